"""Small random hybrids, in float64; inside transformers their states are float32."""

from __future__ import annotations

from typing import Any

from tiny_models import VOCAB, sharp_model
from transformers import CONFIG_MAPPING, PreTrainedModel

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
_HALF = {"layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_DELTA |= _SIZES | _HALF | {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"shared_expert_intermediate_size": 16}
_MAMBA2 = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_chunk_size": 16}
_MAMBA2 |= _SIZES | {"mamba_n_groups": 1}
_CONV = _SIZES | {"layer_types": ["conv", "full_attention"] * 2}

# model type -> config fields
PROMISED: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "granitemoehybrid": _MAMBA2 | _HALF | {"num_local_experts": 0, "shared_intermediate_size": 48},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1, 3]},
    "nemotron_h": _SIZES
    | {"layer_types": ["linear_attention", "moe", "full_attention", "linear_attention"], "moe_intermediate_size": 16}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    | {"moe_shared_expert_intermediate_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1}
    | {"ssm_state_size": 8, "chunk_size": 16, "head_dim": 8},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "lfm2": _CONV,
    "lfm2_moe": _CONV
    | {"num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "jamba": _SIZES
    | {"mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "num_experts": 4, "num_experts_per_tok": 2}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8}
    | {"n_groups": 1, "chunk_size": 16},
}


def tiny_hybrid(kind: str, seed: int = 0, vocab: int = VOCAB, **fields: Any) -> PreTrainedModel:
    """A model of a promised type whose next token depends on all of its context, without an eos."""
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**({"vocab_size": vocab} | ends | PROMISED[kind] | fields))
    return sharp_model(config, seed)
