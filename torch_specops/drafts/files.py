"""Checkpoints of drafts: config.json and *.safetensors of a folder or of the hub. Nothing else is read, and nothing is
passed over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["check_known", "filled", "layer_sizes", "open_checkpoint", "read_weights", "size_of"]

Head = TypeVar("Head", bound=nn.Module)


def open_checkpoint(folder_or_id: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The folder, fetched if it is the id of a repository, and its config.

    Raises:
        ValueError: no such folder or repository; a config that is missing or no JSON.
    """
    folder = _folder(folder_or_id)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"draft: expected config.json in {folder}, found none")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"draft: cannot read {path} as JSON: {error}") from error
    return folder, raw


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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder by name, without a leading "model.", and without frequencies, which configs give.

    Raises:
        ValueError: no safetensors, or a damaged file.
    """
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
    return {name.removeprefix("model."): weights[name] for name in weights if not name.endswith("inv_freq")}


def filled(
    build: Callable[[], Head], weights: Mapping[str, Tensor], source: object, device: torch.device, dtype: torch.dtype
) -> Head:
    """The module that `build` makes, with these weights, for inference.

    Raises:
        ValueError: weights that are missing, unknown or of another shape, or quantised; the message names them.
    """
    for name, tensor in weights.items():
        if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"draft: {name} in {source} is {tensor.dtype}: quantised weights are not read")
    # Build on meta: `assign=True` supplies the tensors.
    with torch.device("meta"):
        head = build()
    try:
        head.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"draft: the weights in {source} are not those of its config: {error}") from error
    return head.requires_grad_(False).eval()


def check_known(*values: tuple[str, Any, tuple[Any, ...]]) -> None:
    """Refuse a value of a config that is none of the known values; each comes with its name."""
    for name, value, known in values:
        if value not in known:
            raise ValueError(f"config: expected {name} {' or '.join(map(repr, known))}, got {value!r}")


def size_of(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config: expected an int >= 1 as {name}, got {value!r}")
    return value


def layer_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `LayerConfig` but `normalises_queries`, as transformers names them."""
    check_known(("hidden_act", raw.get("hidden_act", "silu"), ("silu",)))
    rope = (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
    hidden, num_heads = size_of(raw, "hidden_size"), size_of(raw, "num_attention_heads")
    return {
        "hidden_size": hidden,
        "intermediate_size": size_of(raw, "intermediate_size"),
        "num_heads": num_heads,
        "num_key_value_heads": size_of(raw, "num_key_value_heads", num_heads),
        "head_dim": size_of(raw, "head_dim", hidden // num_heads),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope_theta": float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        "rope": {"rope_type": rope.get("type", "default")} | rope,
        "attention_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }
