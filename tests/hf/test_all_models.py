"""Every causal language model of transformers, small and with random weights: its own tokens, or a refusal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import greedy_alone, padded
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import torch_specops
from torch_specops import SamplingParams
from torch_specops.drafts import PromptLookup
from torch_specops.hf import language_model

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"

# What a config calls its sizes -> a small one. A config has some of these fields.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window"), 16),
    **dict.fromkeys(("attention_chunk_size", "window_size"), 6),
    "attention_types": [[["global", "local"], 2]],
    "num_kv_shared_layers": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"), 1),
    "rotary_dim": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
}
# They keep keys and values in a latent space, from which every head has its own.
LATENT = {"head_dim": None, "num_key_value_heads": 4}
PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6], [11, 12, 13, 11, 12, 13, 11, 12])
NEW = 20


def small_config(kind: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[kind]
    defaults = config_class().to_dict()
    sizes: dict[str, Any] = SIZES | (LATENT if "qk_rope_head_dim" in defaults else {})
    fields = {name: value for name, value in sizes.items() if name in defaults and (value or name not in LATENT)}
    if defaults.get("layer_types"):
        kinds = list(dict.fromkeys(defaults["layer_types"]))
        fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    if kind == "lfm2":
        # Its published models have convolutions, its default config has none.
        fields["layer_types"] = ["conv", "full_attention"] * 2
    if kind == "fuyu":
        # Its sizes are its own up to transformers 5.17, and its text model's later.
        fields["text_config"] = small_config("persimmon").to_dict()
    if kind == "gemma3n_text":
        fields |= {"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4}
    return config_class(**fields)


def small_model(kind: str) -> PreTrainedModel:
    config = small_config(kind)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    assert weights < 3e7, "not made small by these fields"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    # The grouped product of experts knows no float64.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


def families() -> list[str]:
    """Those that the page lists."""
    (listed,) = re.findall(r"<!-- The test reads this list. -->\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    return re.findall(r"`(\w[\w-]*)`", listed)


# They are given masks: Doge and Falcon have an attention of their own, the others wider keys than values.
NO_SPANS = ("doge", "falcon", "axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
# One that rotates in float32, one that transformers decodes otherwise behind padding, one that is refused, and two with
# and without spans.
QUICK = ("gptj", "mpt", "mamba", "qwen3_moe", "falcon")
# transformers 5.17 gives its layers masks of another kind, and it is refused there.
REFUSED_IN_5_17 = ("doge",)
KINDS = [
    pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow)
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_model_gets_other_tokens_than_from_transformers(kind: str) -> None:
    is_listed = kind in families()
    try:
        model = small_model(kind)
        # Alone, because some models read padding.
        expected = [greedy_alone(model, prompt, NEW) for prompt in PROMPTS]
    except Exception as error:  # Whatever its authors raise for these sizes.
        if is_listed:
            raise
        pytest.skip(f"no small model: {error}")
    ids, mask = padded(PROMPTS, "left")
    try:
        output = torch_specops.generate(
            model,
            ids,
            attention_mask=mask,
            draft=PromptLookup(1, 1),
            max_new_tokens=NEW,
            sampling=SamplingParams(temperature=0.0),
            pad_token_id=0,
        )
    except ValueError as error:
        is_known = kind in REFUSED_IN_5_17 and Version(transformers.__version__) < Version("5.18")
        if (is_listed and not is_known) or not str(error).startswith("model: "):
            raise
        return
    assert sum(output.stats.proposed_at) > 0
    assert [output.new_tokens(row) for row in range(2)] == expected
    assert is_listed
    has_sdpa = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    assert language_model(model.float()).supports_spans == (has_sdpa and kind not in NO_SPANS)
