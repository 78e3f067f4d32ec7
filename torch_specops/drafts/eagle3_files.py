"""Published EAGLE-3 heads: their configs and weights in two formats, read from safetensors alone.

The formats differ in three points:

- EAGLE and SpecForge call the layer "midlayer", speculators "layers.0".
- Layer ids in `eagle_config` count the layers whose outputs are the features. speculators counts the layers whose
  inputs they are, one more.
- `norm_output`, False in SpecForge: logits without the last norm. True in speculators: the next draft reads the output
  of the last norm.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .eagle3_head import Eagle3Config, Eagle3Head, rope_frequencies

__all__ = ["read_config", "read_head"]

# Weights of the target, for training alone, and the inverse of d2t.
NOT_NEEDED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def read_head(folder_or_id: str | os.PathLike[str], device: torch.device, dtype: torch.dtype) -> Eagle3Head:
    """The head in a folder, or in a repository of the hub.

    Raises:
        ValueError: as `Eagle3.from_pretrained`.
    """
    folder = _folder(folder_or_id)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"draft: expected config.json in {folder}, found none")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"draft: cannot read {path} as JSON: {error}") from error
    config = read_config(raw)
    weights = _read_weights(folder)
    offsets = weights.pop("d2t", None)
    # Build on meta: `assign=True` supplies the tensors.
    with torch.device("meta"):
        head = Eagle3Head(config, "embed_tokens.weight" in weights)
    _check_weights(folder, weights, head)
    head.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    head.requires_grad_(False)
    head.draft_of_target = _draft_of_target(config, offsets).to(device)
    head.frequencies = rope_frequencies(config).to(device)
    return head.eval()


def read_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """The config of a head, given the content of config.json in either format.

    Raises:
        ValueError: another kind of draft, a missing size, a value that this package does not know.
    """
    kind, architectures = raw.get("speculators_model_type"), raw.get("architectures") or []
    if kind is not None:
        if kind != "eagle3":
            raise ValueError(f"config: expected speculators_model_type 'eagle3', got {kind!r}")
        return _speculators_config(raw)
    if "LlamaForCausalLMEagle3" not in architectures:
        raise ValueError(
            "config: expected architectures ['LlamaForCausalLMEagle3'] or speculators_model_type 'eagle3', "
            f"got architectures {architectures}"
        )
    own = raw.get("eagle_config") or {}
    if not own.get("use_aux_hidden_state", True):
        raise ValueError("config: expected eagle_config.use_aux_hidden_state True, got False")
    outputs = own.get("eagle_aux_hidden_state_layer_ids")
    layers = None if outputs is None else [layer + 1 for layer in _layer_ids(outputs)]
    return _config(raw, raw, layers, norm_before_logits=bool(raw.get("norm_output", True)))


def _speculators_config(raw: Mapping[str, Any]) -> Eagle3Config:
    layer = raw.get("transformer_layer_config") or {}
    model_type = layer.get("model_type", "llama")
    if model_type not in ("llama", "qwen3"):
        raise ValueError(f"config: expected a transformer_layer_config of llama or qwen3, got {model_type!r}")
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    windowed = (layer.get("layer_types") or [None])[0] == "sliding_attention"
    return _config(
        raw,
        layer,
        None if ids is None else _layer_ids(ids),
        window=layer.get("sliding_window") if windowed else None,
        normalises_queries=model_type == "qwen3",
        norm_before_feedback=bool(raw.get("norm_output", False)),
    )


def _config(
    raw: Mapping[str, Any], layer: Mapping[str, Any], feature_layers: Sequence[int] | None, **others: Any
) -> Eagle3Config:
    """The common part of the formats; `layer` has the sizes."""
    hidden, num_heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"config: expected num_hidden_layers 1, got {layer['num_hidden_layers']}")
    if layer.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config: expected hidden_act 'silu', got {layer['hidden_act']!r}")
    rope = (layer.get("rope_scaling") or {}) | (layer.get("rope_parameters") or {})
    rope = {"rope_type": rope.get("type", "default")} | rope
    return Eagle3Config(
        vocab_size=_size(layer, "vocab_size"),
        draft_vocab_size=_size(raw, "draft_vocab_size", layer.get("vocab_size")),
        hidden_size=hidden,
        intermediate_size=_size(layer, "intermediate_size"),
        num_heads=num_heads,
        num_key_value_heads=_size(layer, "num_key_value_heads", num_heads),
        head_dim=_size(layer, "head_dim", hidden // num_heads),
        target_hidden_size=_size(raw, "target_hidden_size", hidden),
        feature_layers=None if feature_layers is None else tuple(feature_layers),
        num_features=3 if feature_layers is None else len(feature_layers),
        norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", layer.get("rope_theta", 10000.0))),
        rope=rope,
        attention_bias=bool(layer.get("attention_bias", False)),
        mlp_bias=bool(layer.get("mlp_bias", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc", False)),
        fc_norm=bool(raw.get("fc_norm", False)),
        **others,
    )


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config: expected an int >= 1 as {name}, got {value!r}")
    return value


def _layer_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise ValueError(f"config: expected a list of layers as eagle_aux_hidden_state_layer_ids, got {ids!r}")
    return ids


def _folder(folder_or_id: str | os.PathLike[str]) -> Path:
    folder = Path(folder_or_id)
    if folder.is_dir():
        return folder
    name = str(folder_or_id)
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ValueError(f"draft: there is no folder {name!r}, and it is no hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    # Offline, refused, unknown: each is an error of its own there.
    except Exception as error:
        raise ValueError(f"draft: cannot fetch {name!r}: {str(error).strip().splitlines()[0]}") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights under the names of `Eagle3Head`, and d2t."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        raise ValueError(f"draft: expected *.safetensors in {folder}, found {others}; pickled weights are not read")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"draft: cannot read {file}: {error}") from error
    own = {re.sub(r"^layers\.0\.", "midlayer.", name.removeprefix("model.")): weights[name] for name in weights}
    return {name: own[name] for name in own if name not in NOT_NEEDED and not name.endswith("inv_freq")}


def _check_weights(folder: Path, weights: Mapping[str, Tensor], head: Eagle3Head) -> None:
    expected = {name: list(tensor.shape) for name, tensor in head.state_dict().items()}
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise ValueError(f"draft: {folder} lacks the weights {', '.join(missing)}")
    if unknown:
        raise ValueError(f"draft: {folder} has weights that its config does not tell of: {', '.join(unknown)}")
    for name, shape in expected.items():
        if list(weights[name].shape) != shape:
            raise ValueError(
                f"draft: expected {name} of shape {shape}, as the config says, got {list(weights[name].shape)}"
            )


def _draft_of_target(config: Eagle3Config, offsets: Tensor | None) -> Tensor:
    """[V] int64: maps each target token to the head's token, or -1. Token i of the head is i + offsets[i]."""
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    if offsets is None:
        if count != vocab_size:
            raise ValueError(f"draft: the head has {count} of {vocab_size} tokens and lacks the weights d2t")
        offsets = torch.zeros(count, dtype=torch.int64)
    if count == vocab_size and bool((offsets != 0).any()):
        raise ValueError(f"draft: expected d2t of zeros, because the head has all {vocab_size} tokens")
    if list(offsets.shape) != [count]:
        raise ValueError(f"draft: expected d2t of shape [{count}], got {list(offsets.shape)}")
    tokens = torch.arange(count) + offsets
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or len(tokens.unique()) < count:
        raise ValueError(f"draft: expected d2t to lead to {count} different tokens in [0, {vocab_size})")
    found = torch.full((vocab_size,), -1, dtype=torch.int64)
    found[tokens] = torch.arange(count)
    return found
