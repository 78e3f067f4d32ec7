"""Every causal language model of transformers, small and with random weights: its own tokens, or a refusal."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_hybrids import PROMISED
from tiny_models import greedy_alone, padded, sharp_model
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import torch_specops
from torch_specops import GenerationOutput, SamplingParams
from torch_specops.drafts import PromptLookup
from torch_specops.hf import language_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

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
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    # The lengths at which a model changes. The texts cross them.
    **dict.fromkeys(("attention_window_size", "local_attention", "sliding_window", "sliding_window_size"), 16),
    **dict.fromkeys(("floor_scale", "keep_window_size", "original_max_position_embeddings"), 16),
    **dict.fromkeys(("attention_chunk_size", "index_topk", "local_attention_window_len", "window_size"), 6),
    "index_block_size": 4,
    **dict.fromkeys(("index_topk_blocks", "max_window_layers"), 2),
    "use_sliding_window": True,
    "attention_types": [[["global", "local"], 2]],
    "num_kv_shared_layers": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "bos_token_id"), 1),
    "rotary_dim": 4,
    "pad_token_id": 0,
    "eos_token_id": None,
}
# They keep keys and values in a latent space, from which every head has its own.
LATENT = {"head_dim": None, "num_key_value_heads": 4}
# The names of such lengths.
LENGTHS = re.compile(
    "attention_chunk_size|attention_window_size|floor_scale|index_(topk|topk_blocks|block_size)|keep_window_size"
    "|local_attention(_window_len)?|original_max_position_embeddings|sliding_window(_size)?|window_size"
)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10_000.0}
LONGROPE["original_max_position_embeddings"] = 16
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
KDA = {"linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
KDA |= {"n_group": 1, "topk_group": 1, "head_dim": 8}
MAMBA = {"state_size": 8, "time_step_rank": 4}
# Models of text and images whose text model has states.
WRAPPERS = ("qwen3_5", "qwen3_5_moe")
TEXT = {"vocab_size": 99, "pad_token_id": 0}
VISION = dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), 32) | {"depth": 1, "num_heads": 2}
# What else a small model of a type needs.
OWN: dict[str, dict[str, Any]] = PROMISED | {
    "bailing_hybrid": KDA,
    "falcon_mamba": MAMBA,
    "gemma3n_text": {"intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "kimi_linear": KDA,
    "lara_mini": DELTA,
    "mamba": MAMBA,
    "minimax_m3_vl_text": {"layer_types": ["minimax_m3_sparse", "full_attention"] * 2},
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "phi3": {"rope_parameters": LONGROPE},
    "phimoe": {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.6}},
    "phi4_multimodal": {
        "rope_parameters": LONGROPE,
        "vision_config": dict.fromkeys(("hidden_size", "intermediate_size"), 32)
        | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "crop_size": 28, "patch_size": 14},
        "audio_config": dict.fromkeys(("hidden_size", "ext_pw_out_channel", "depthwise_separable_out_channel"), 32)
        | {"intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2, "nemo_conv_channels": 8},
    },
    **{kind: {"text_config": TEXT | PROMISED[f"{kind}_text"], "vision_config": VISION} for kind in WRAPPERS},
    "zamba": {"layer_types": ["linear_attention", "hybrid"] * 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
# Types that no small model is built of with transformers 5.23 and 5.24: they need more than these fields, have parts
# beside text, or do not run in float64. The page lists none of them.
NOT_BUILT = (
    *("blenderbot", "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "emu3", "gemma3"),
    *("gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2"),
    *("inkling2_loop_text", "inkling2_text", "llama4", "longcat_flash", "mllama", "moss_transcribe_diarize"),
    *("musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text", "reformer", "xglm", "xlm", "xlnet", "xlstm"),
    "xmod",
)
# Types that read no longer texts than a length of their config, and the longest. Moshi's cache has a window, its masks
# have none.
LIMITED = {"doge": ("keep_window_size", 16), "llama4_text": ("floor_scale", 15), "moshi": ("sliding_window", 16)}
# At the switch it drops its cache, and reads its newest token alone with transformers 5.23.
WITHOUT_CACHE = ("phi4_multimodal",)
PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6], [11, 12, 13, 11, 12, 13, 11, 12])
NEW = 20


def small_config(kind: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[kind]
    defaults = config_class().to_dict()
    lengths = {name for name, value in defaults.items() if LENGTHS.fullmatch(name) and type(value) is int}
    assert lengths <= set(SIZES), "a length that no text crosses"
    sizes: dict[str, Any] = SIZES | (LATENT if "qk_rope_head_dim" in defaults else {})
    fields = {name: value for name, value in sizes.items() if name in defaults and (value or name not in LATENT)}
    if defaults.get("layer_types") and "use_sliding_window" not in defaults:
        kinds = list(dict.fromkeys(defaults["layer_types"]))
        fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
    if kind == "fuyu":
        # Its sizes are its own up to transformers 5.17, and its text model's later.
        fields["text_config"] = small_config("persimmon").to_dict()
    return config_class(**(fields | OWN.get(kind, {})))


def small_model(kind: str, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    config = small_config(kind)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in auto.from_config(config).parameters())
    assert weights < 3e7, "not made small by these fields"
    model = sharp_model(config, auto=auto)
    model.generation_config.use_cache = kind not in WITHOUT_CACHE
    return model


def families() -> list[str]:
    """Those that the page lists."""
    (listed,) = re.findall(r"<!-- The test reads this list. -->\n(.*?)\n\n", PAGE.read_text(), re.DOTALL)
    return re.findall(r"`(\w[\w-]*)`", listed)


def decoded(model: PreTrainedModel, num_new: int) -> GenerationOutput:
    ids, mask = padded(PROMPTS, "left")
    draft, sampling = PromptLookup(1, 1), SamplingParams(temperature=0.0)
    options: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": num_new}
    options |= {"num_draft_tokens": 5, "schedule": "constant"}
    return torch_specops.generate(model, ids, draft=draft, sampling=sampling, **options)


# They are given masks: Doge and Falcon have an attention of their own, the others wider keys than values.
NO_SPANS = (
    *("doge", "falcon", "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"),
    *("minicpm3", "sarvam_mla", "youtu"),
)
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
        if is_listed or kind not in NOT_BUILT:
            raise
        pytest.skip(f"no small model: {error}")
    assert kind not in NOT_BUILT or not transformers.__version__.startswith(("5.23.", "5.24."))
    field, longest = LIMITED.get(kind, (None, None))
    num_new = NEW
    if longest is not None:
        with pytest.raises(ValueError, match=rf"within the {longest} that the target reads, got .*\({field}\)"):
            decoded(model, NEW)
        num_new = longest - max(map(len, PROMPTS))
        expected = [new[:num_new] for new in expected]
    try:
        output = decoded(model, num_new)
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


# Drafts that read hidden states cannot have these, and why.
WITHOUT_FEATURES = dict.fromkeys(
    ("hrm_text", "llama4_text", "modernbert-decoder", "mpt"),
    (ValueError, "does not keep its layers where other models do"),
) | {"gemma3n_text": (RuntimeError, r"expected hidden states of all \[2, 11\] tokens in layer 0, got \[4, 2\]")}
# Their hidden states begin with what the first layer gives.
WITHOUT_EMBEDDINGS = ("falcon_mamba", "mamba", "mamba2")


@torch.no_grad()
def feature_difference(model: PreTrainedModel, kind: str) -> float:
    """How far the features of a prefill, of which the newest logits are wanted, are from the model's hidden states."""
    adapter, tokens = language_model(model), torch.tensor(PROMPTS[0]).repeat(2, 1)
    tokens[1] += 1
    adapter.keep_features(range(adapter.num_layers + 1))
    adapter.expect(1)
    adapter.start(2, 16)
    adapter.begin_texts(torch.full((2,), tokens.shape[1]))
    adapter.forward(tokens, torch.arange(tokens.shape[1]).expand(2, -1), 1)
    features = adapter.features[:, : tokens.shape[1]].split(adapter.hidden_size, 2)
    states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    if kind in WITHOUT_EMBEDDINGS:
        features, states = features[1:], (*states[:-2], states[-1])
    return max(float((mine - own).abs().max()) for mine, own in zip(features, states, strict=True))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "gemma4_text" else pytest.mark.slow) for kind in families()]
)
def test_features_are_the_hidden_states(kind: str) -> None:
    """Gemma 4 with shared keys leaves tokens out of its last layers if the number of logits is given as a number."""
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("this release of transformers has no such model")
    model = small_model(kind)
    if model.config.is_encoder_decoder:
        pytest.skip("its features are the decoder's")
    if kind in WITHOUT_FEATURES:
        error, message = WITHOUT_FEATURES[kind]
        with pytest.raises(error, match=message):
            feature_difference(model, kind)
    else:
        assert feature_difference(model, kind) < 1e-5


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_model_of_images_and_text_continues_text(kind: str) -> None:
    model = small_model(kind, AutoModelForImageTextToText)
    output = decoded(model, NEW)
    assert [output.new_tokens(row) for row in range(2)] == [greedy_alone(model, prompt, NEW) for prompt in PROMPTS]
    assert output.stats.state_bytes > 0
