"""Small random models of every tested family: float64 and with sharp logits, so that no two tokens tie."""

from __future__ import annotations

import copy

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 60
POSITIONS = 96

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_HEAD = {"head_dim": 8}
_SLIDING = {"sliding_window": 6}
# Gemma scales its embeddings up: tied to the head, every token would predict itself.
_UNTIED = {"tie_word_embeddings": False}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# family -> (class prefix, model suffix, config fields)
FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("Llama", "ForCausalLM", _GROUPED),
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED),
    "qwen2 sliding": (
        "Qwen2",
        "ForCausalLM",
        _GROUPED | _SLIDING | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", "ForCausalLM", _GROUPED | _HEAD),
    "mistral": ("Mistral", "ForCausalLM", _GROUPED | _SLIDING),
    "gemma": ("Gemma", "ForCausalLM", _GROUPED | _HEAD | _UNTIED),
    "gemma2": ("Gemma2", "ForCausalLM", _GROUPED | _HEAD | _SLIDING | _UNTIED),
    "gemma3": (
        "Gemma3",
        "ForCausalLM",
        _GROUPED | _HEAD | _SLIDING | _UNTIED | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("Phi", "ForCausalLM", _SIZES),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),
    "opt": (
        "OPT",
        "ForCausalLM",
        {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32},
    ),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _SIZES),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": POSITIONS,
            "decoder_start_token_id": 1,
        },
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "decoder_start_token_id": 1,
        },
    ),
}
DECODER_ONLY = [family for family in FAMILIES if family not in ("whisper", "t5")]


def tiny(family: str, seed: int = 0, attention: str = "sdpa", vocab: int = VOCAB, **fields: object) -> PreTrainedModel:
    """A model whose next token depends on all of its context; without an eos unless `generation_config` gets one."""
    prefix, suffix, family_fields = FAMILIES[family]
    config_class = getattr(transformers, prefix + ("TextConfig" if prefix == "Gemma3" else "Config"))
    positions = {} if family in ("gpt2", "whisper", "t5") else {"max_position_embeddings": POSITIONS}
    config = config_class(**({"vocab_size": vocab} | positions | _ENDS | family_fields | fields))
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + suffix)(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms stay as they are: their weights are scales around one.
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    model.generation_config.eos_token_id = None
    return model


def perturbed(model: PreTrainedModel, scale: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A copy that often, but not always, agrees with the model: a draft with partial acceptance."""
    clone = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in clone.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * scale)
    return clone
