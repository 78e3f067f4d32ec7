"""Published EAGLE-3 heads: their configs and weights in two formats, read from safetensors alone.

The formats differ in three points:

- EAGLE and SpecForge call the layer "midlayer", speculators "layers.0".
- Layer ids in `eagle_config` count the layers whose outputs are the features. speculators counts the layers whose
  inputs they are, 1 more.
- `norm_output`, False in SpecForge: logits without the last norm. True in speculators: the next draft reads the output
  of the last norm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .checkpoint import checkpoint_folder, filled, open_weights, read_json
from .eagle3_head import Eagle3Config, Eagle3Head
from .layers import check_known, layer_ids, layer_sizes, rope_frequencies, size_of

# Weights of the target, for training alone, and the inverse of d2t.
NOT_NEEDED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_head(folder_or_id: str | os.PathLike[str], device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """The head in a folder, or in a repository of the hub, with the errors of `Eagle3.from_pretrained`."""
    folder = checkpoint_folder(folder_or_id)
    config = read_config(read_json(folder))
    weights = _own_names({name: read() for name, read in open_weights(folder).items()})
    offsets = weights.pop("d2t", None)
    with torch.device("meta"):
        head = Eagle3Head(config, "embed_tokens.weight" in weights)
    head.frequencies = rope_frequencies(config).to(device)
    head.draft_of_target = _draft_of_target(config, offsets).to(device)
    return filled(head, weights, folder, device, dtype)


def read_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """The config of a head, given the content of config.json in either format."""
    kind, architectures = raw.get("speculators_model_type"), raw.get("architectures") or []
    if kind != "eagle3" and (kind is not None or "LlamaForCausalLMEagle3" not in architectures):
        raise ValueError(
            "config: expected architectures ['LlamaForCausalLMEagle3'] or speculators_model_type 'eagle3', "
            f"got {architectures} and {kind!r}"
        )
    is_speculators = kind is not None
    # The sizes are in `layer`, the features in `own`.
    layer = (raw.get("transformer_layer_config") or {}) if is_speculators else raw
    own = raw if is_speculators else raw.get("eagle_config") or {}
    model_type = layer.get("model_type", "llama") if is_speculators else "llama"
    check_known(
        ("use_aux_hidden_state", own.get("use_aux_hidden_state", True), (True,)),
        ("model_type", model_type, ("llama", "qwen3")),
        ("num_hidden_layers", layer.get("num_hidden_layers", 1), (1,)),
    )
    feature_layers = None
    if own.get("eagle_aux_hidden_state_layer_ids") is not None:
        ids = layer_ids(own, "eagle_aux_hidden_state_layer_ids", least=-1)
        feature_layers = tuple(each if is_speculators else each + 1 for each in ids)
    has_window = is_speculators and (layer.get("layer_types") or [None])[0] == "sliding_attention"
    sizes = layer_sizes(layer)
    return Eagle3Config(
        **sizes,
        vocab_size=size_of(layer, "vocab_size"),
        draft_vocab_size=size_of(raw, "draft_vocab_size", layer.get("vocab_size")),
        target_hidden_size=size_of(raw, "target_hidden_size", sizes["hidden_size"]),
        feature_layers=feature_layers,
        window=layer.get("sliding_window") if has_window else None,
        normalises_queries=model_type == "qwen3",
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_before_logits=is_speculators or bool(raw.get("norm_output", True)),
        norm_before_feedback=is_speculators and bool(raw.get("norm_output", False)),
    )


def _own_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of `Eagle3Head`, and d2t."""
    own = {re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model.")): weights[name] for name in weights}
    return {name: own[name] for name in own if name not in NOT_NEEDED and not name.endswith("inv_freq")}


def _draft_of_target(config: Eagle3Config, offsets: Tensor | None) -> Tensor:
    """[V] int64: maps each target token to the head's token, or -1. Token i of the head is i + offsets[i]."""
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if count != vocab_size:
            raise ValueError(f"draft: the head has {count} of {vocab_size} tokens and lacks the weights d2t")
        offsets = torch.zeros(count, dtype=torch.int64, device="cpu")
    if list(offsets.shape) != [count]:
        raise ValueError(f"draft: expected d2t of shape [{count}], got {list(offsets.shape)}")
    index = torch.arange(count, device=offsets.device)
    tokens = index + offsets
    is_map = int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size and len(tokens.unique()) == count
    # A head with all tokens has them in the target's order.
    if not is_map or (count == vocab_size and bool((offsets != 0).any())):
        raise ValueError(
            f"draft: expected d2t to lead to {count} different tokens in [0, {vocab_size}), in order if all"
        )
    found = tokens.new_full((vocab_size,), -1)
    found[tokens] = index
    return found
