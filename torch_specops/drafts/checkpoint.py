"""Files of a checkpoint: config.json and *.safetensors, and nothing else: no pickles and no code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["checkpoint_folder", "open_weights", "read_json"]


def checkpoint_folder(folder_or_id: str | os.PathLike[str]) -> Path:
    """The folder itself, or that of a repository on the Hugging Face hub, fetched if need be.

    Raises:
        ValueError: there is neither, or it cannot be fetched.
    """
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


def read_json(folder: Path) -> dict[str, Any]:
    """The content of config.json; a ValueError if there is none, or no JSON."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"draft: expected config.json in {folder}, found none")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"draft: cannot read {path} as JSON: {error}") from error
    return content


def open_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """The weights in a folder by name, each of which a call reads; a ValueError if no file can be read."""
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
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for name, of in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            weights.setdefault(name, partial(_refuse, f"{name} is in {of}, which is not in {folder}"))
    return weights


def _refuse(reason: str) -> Tensor:
    raise ValueError(f"draft: the weight {reason}")
