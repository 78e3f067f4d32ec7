"""Reads published EAGLE-3 and P-EAGLE heads, configs and safetensors, in three formats.

The formats differ in these points:

- EAGLE and SpecForge call the first layer "midlayer", speculators and DeepSpec "layers.0".
- Layer ids inside `eagle_config` name the layers whose outputs are the features (SpecForge, SGLang, TensorRT-LLM).
  Outside it, in EAGLE's and speculators' formats, they name the layers whose inputs are the features (vLLM): 1 more.
  DeepSpec's `target_layer_ids` name layers by their outputs.
- speculators has the layers' sizes in `transformer_layer_config`, the others at the top level. In EAGLE's format the
  head's fields are also read from `eagle_config`.
- The token of P-EAGLE's masks is `mask_token_id` in speculators' format, `ptd_token_id` or `pard_token` in EAGLE's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.checkpoint import checkpoint_folder, filled, open_weights, read_json
from .eagle3_head import Eagle3Config, Eagle3Head
from .layers import (
    NOT_NEEDED,
    SUPPORTED,
    UNSCALED,
    check_known,
    default_drafts,
    draft_tokens,
    is_set,
    joined,
    layer_ids,
    layer_kinds,
    layer_sizes,
    rope_frequencies,
    size_if_given,
    size_of,
    speculators_parts,
)
from .methods import EAGLE, MASK_TOKENS, method_of

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# The values that `Eagle3Head` supports; None = not given.
ONLY: dict[str, tuple[Any, ...]] = SUPPORTED | {
    **UNSCALED,
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), (None, True)),
    **dict.fromkeys(("use_mtp_layernorm", "eh_proj_before_attn"), (None, False)),
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 1),
    "parallel_draft_heads_num_layers": (None, 0, 1),
    "is_causal": (None, True),
    # DeepSpec's name for the feature layers, which vLLM reads last in EAGLE's format, and DFlash's.
    **dict.fromkeys(("target_layer_ids", "aux_hidden_state_layer_ids"), (None,)),
}
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "return_hidden_post_norm")
FIELDS = {*ONLY, *SWITCHES, LAYER_IDS, "num_aux_hidden_states", "draft_vocab_size", "target_hidden_size"}
FIELDS |= {"parallel_drafting", "num_target_layers", "mask_token_id", *MASK_TOKENS}


def read_head(
    folder_or_id: str | os.PathLike[str], device: torch.device, dtype: torch.dtype, is_parallel: bool = False
) -> Eagle3Head:
    """Read a head from a folder or a hub repository; `is_parallel` is as in `read_config`. Raises the errors of
    `Eagle3.from_pretrained`."""
    folder = checkpoint_folder(folder_or_id)
    config = read_config(read_json(folder), is_parallel)
    weights = _own_names({name: read() for name, read in open_weights(folder).items()})
    offsets, is_drafted = weights.pop("d2t", None), weights.pop("t2d", None)
    if is_parallel and "mask_hidden" in weights:
        # [1, F * H] in EAGLE's format, [1, 1, F * H] in speculators'.
        mask_hidden = weights["mask_hidden"]
        weights["mask_hidden"] = mask_hidden.unsqueeze(0) if mask_hidden.dim() == 2 else mask_hidden
    with torch.device("meta"):
        head = Eagle3Head(config, "embed_tokens.weight" in weights)
    head.frequencies = rope_frequencies(config).to(device)
    _take_frequencies(weights, head.frequencies)
    found = draft_tokens(config.draft_vocab_size, config.vocab_size, offsets, is_drafted)
    head.draft_of_target = found.to(device)
    return filled(head, weights, folder, device, dtype)


def read_config(raw: Mapping[str, Any], is_parallel: bool = False) -> Eagle3Config:
    """The config of an EAGLE-3 head, or if `is_parallel` of a P-EAGLE head, given the content of config.json in any
    format."""
    method = method_of(raw, "PEagle" if is_parallel else "Eagle3")
    is_eagle, layer = False, raw
    if raw.get("speculators_model_type") is not None:
        layer, own = speculators_parts(raw, FIELDS)
    else:
        is_eagle = EAGLE in raw["architectures"]
        own = _eagle_fields(raw) if is_eagle else _deepspec_fields(raw)
    feature_layers = None if own.get(LAYER_IDS) is None else tuple(layer_ids(own, LAYER_IDS))
    num_features = 3 if feature_layers is None else len(feature_layers)
    model_type = "llama" if is_eagle else layer.get("model_type", "llama")
    sizes, vocab_size = layer_sizes(layer), size_of(layer, "vocab_size")
    masks = [name for name in (*MASK_TOKENS, "mask_token_id") if own.get(name) is not None] or ["mask_token_id"]
    mask_token_id = size_of(own, masks[0], least=0) if is_parallel else None
    check_known(
        *((name, own.get(name), known) for name, known in ONLY.items()),
        ("parallel_drafting", own.get("parallel_drafting"), (None, is_parallel)),
        *((name, own.get(name), (None, mask_token_id) if is_parallel else (None,)) for name in masks),
        ("model_type", model_type, ("llama", "qwen3")),
        ("num_aux_hidden_states", own.get("num_aux_hidden_states"), (None, num_features)),
    )
    if mask_token_id is not None and mask_token_id >= vocab_size:
        raise ValueError(f"config: expected {masks[0]} < {vocab_size}, the tokens, got {mask_token_id}")
    kinds = layer_kinds(layer, size_of(layer, "num_hidden_layers", 1))
    return Eagle3Config(
        **sizes,
        vocab_size=vocab_size,
        draft_vocab_size=size_of(own, "draft_vocab_size", vocab_size),
        target_hidden_size=size_of(own, "target_hidden_size", sizes["hidden_size"]),
        feature_layers=feature_layers,
        windows=tuple(size_of(layer, "sliding_window") if kind == "sliding_attention" else None for kind in kinds),
        normalises_queries=model_type == "qwen3",
        norm_before_residual=is_set(own, "norm_before_residual"),
        norm_before_fc=is_set(own, "norm_before_fc"),
        fc_norm=is_set(own, "fc_norm"),
        # As in vLLM, SGLang and TensorRT-LLM, whatever `fc_norm` is. Between its pull requests 568 and 879, SpecForge
        # fed back the output before the norm even with True; nothing in a file identifies these heads.
        norm_before_feedback=is_set(own, "norm_output") or is_set(own, "return_hidden_post_norm"),
        mask_token_id=mask_token_id,
        num_target_layers=size_if_given(own, "num_target_layers"),
        num_drafts=default_drafts(own, method),
    )


def _deepspec_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The head's fields, with layer ids that name layers by their inputs."""
    inputs = [each + 1 for each in layer_ids(raw, "target_layer_ids")]
    check_known(
        ("eagle_config", raw.get("eagle_config"), (None,)),
        # In a DeepSpec head, layers after the first read the embeddings as well, which ours do not. DeepSpec's
        # evaluation refuses such heads.
        ("num_hidden_layers", raw.get("num_hidden_layers"), (1,)),
        ("model_type", raw.get("model_type"), ("qwen3",)),
        ("speculators_config", raw.get("speculators_config"), (None,)),
        (LAYER_IDS, raw.get(LAYER_IDS), (None, inputs)),
    )
    # It drafts as many tokens as in training.
    methods = [{"speculative_tokens": raw.get("ttt_length")}]
    return {**raw, LAYER_IDS: inputs, "target_layer_ids": None, "speculators_config": {"proposal_methods": methods}}


def _eagle_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The head's fields, with layer ids that name layers by their inputs."""
    own = joined({}, raw, "eagle_config", FIELDS)
    if LAYER_IDS in own:
        outputs, inputs = own[LAYER_IDS], [each + 1 for each in layer_ids(own, LAYER_IDS, least=-1)]
        if raw.get(LAYER_IDS) not in (None, inputs):
            raise ValueError(
                f"config: {LAYER_IDS} is {outputs} in eagle_config, where layers are counted by their outputs; beside "
                f"it, where they are counted by their inputs, expected {inputs}, got {raw[LAYER_IDS]}"
            )
        own[LAYER_IDS] = inputs
    return joined(raw, {"eagle_config": own}, "eagle_config", FIELDS)


def _own_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights to the names in `Eagle3Head`, and keep d2t and t2d."""
    own: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model."))
        if name in own:
            raise ValueError(f"draft: the weights have {name} under two names")
        own[name] = weight
    return {name: own[name] for name in own if name not in NOT_NEEDED}


def _take_frequencies(weights: dict[str, Tensor], own: Tensor) -> None:
    """Remove the rotary frequencies that old files contain. They must equal the config's, up to rounding."""
    for name in [each for each in weights if each.endswith("rotary_emb.inv_freq")]:
        saved = weights.pop(name).to(own)
        if saved.shape != own.shape or not torch.allclose(saved, own, rtol=0.01):
            raise ValueError(f"draft: {name} is {saved.tolist()}, and the config's frequencies are {own.tolist()}")
