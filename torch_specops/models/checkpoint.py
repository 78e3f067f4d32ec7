"""Reads checkpoints (config.json and *.safetensors; no pickles and no code) and loads their weights into networks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def checkpoint_folder(folder_or_id: str | os.PathLike[str]) -> Path:
    """The folder itself, or the folder of a Hugging Face hub repository, downloaded if necessary.

    Raises:
        TypeError: neither a str nor a path.
        ValueError: neither exists, or the download fails.
    """
    if not isinstance(folder_or_id, str | os.PathLike):
        raise TypeError(f"folder_or_id: expected a folder or a hub id, got {type(folder_or_id)}")
    folder = Path(folder_or_id)
    if folder.is_dir():
        return folder
    name = str(folder_or_id)
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise ValueError(f"draft: there is no folder {name!r}, and it is no hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    # huggingface_hub raises another exception for each cause: offline, refused, unknown.
    except Exception as error:
        raise ValueError(f"draft: cannot fetch {name!r}: {str(error).strip().splitlines()[0]}") from error


def read_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """The object in this file; a ValueError if it is missing or holds none."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"draft: expected {name} in {folder}, found none")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"draft: cannot read {path} as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"draft: expected an object in {path}, got {type(content)}")
    return content


def open_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """For each weight in a folder, by name, a function that reads it; a ValueError if no file can be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        raise ValueError(f"draft: expected *.safetensors in {folder}, found {others}; pickled weights are not read")
    from safetensors import SafetensorError, safe_open

    weights: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        try:
            content = safe_open(file, "pt")
        except SafetensorError as error:
            raise ValueError(f"draft: cannot read {file}: {error}") from error
        for name in content.keys():  # noqa: SIM118
            twice = f"{name} is in several files of {folder}"
            weights[name] = partial(_refuse, twice) if name in weights else partial(content.get_tensor, name)
    index = "model.safetensors.index.json"
    if (folder / index).is_file():
        places = read_json(folder, index).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"draft: expected an object as weight_map in {folder / index}, got {places!r}")
        for name, of in places.items():
            weights.setdefault(name, partial(_refuse, f"{name} is in {of}, which is not in {folder}"))
    return weights


def _refuse(reason: str) -> Tensor:
    raise ValueError(f"draft: the weight {reason}")


def filled(
    network: Network,
    weights: Mapping[str, Tensor],
    source: object,
    device: torch.device,
    dtype: torch.dtype,
    wide: Iterable[str] = (),
) -> Network:
    """Load the weights from `source` into a network on the meta device, in this dtype, or in float32 if the weight's
    name contains an entry of `wide`.

    Raises:
        TypeError: a dtype of another type.
        ValueError: another dtype than float64, float32, bfloat16 and float16; a weight that is missing, unknown, of
            another shape or quantised, by name.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected a torch.dtype or None, got {type(dtype)}")
    if dtype not in FLOATING:
        raise ValueError(f"dtype: expected float64, float32, bfloat16 or float16, got {dtype}")
    check_floating(weights, source)
    dtypes = {name: torch.float32 if any(part in name for part in wide) else dtype for name in weights}
    own = {name: tensor.to(device, dtypes[name]) for name, tensor in weights.items()}
    try:
        network.load_state_dict(own, assign=True)
    except RuntimeError as error:
        raise ValueError(f"draft: the weights in {source} do not fit its config: {error}") from error
    return network.requires_grad_(False).eval()


def check_floating(weights: Mapping[str, Tensor], source: object) -> None:
    for name, tensor in weights.items():
        if tensor.dtype not in FLOATING:
            raise ValueError(f"draft: {name} in {source} is {tensor.dtype}: quantised weights are not read")
