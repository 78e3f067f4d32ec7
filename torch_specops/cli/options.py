"""The options that the commands share, and how errors are reported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from .. import checks
from .loading import AUSTEN, AUSTEN_DRAFT, SMOLLM2
from .models import (
    DFLASH,
    EAGLE3,
    EARLY_EXIT,
    INT8,
    LOOKUP_ELSE,
    NGRAM,
    OWN_MTP,
    PEAGLE,
    PROMPT_LOOKUP,
    SUFFIX_LOOKUP,
    TRANSFORMERS_LOOKUP,
)

# The exit status that a shell reports for a process that Ctrl-C ended.
INTERRUPTED = 130


Target = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="The model whose text you want: a folder, a Hugging Face hub id, "
        f"'{SMOLLM2}' (from a pip package) or '{AUSTEN}' (tiny, always there).",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        # Do not use the metavar DRAFT, because typer 0.27.0 to 0.27.3 mistake it for the option itself.
        metavar="NAME",
        help=f"What guesses the next tokens: '{PROMPT_LOOKUP}' copies from the text so far ('{TRANSFORMERS_LOOKUP}2' "
        f"as transformers does); '{SUFFIX_LOOKUP}' looks for longer matches; '{NGRAM}FILE' counts "
        f"what follows what in a text file; '{EARLY_EXIT}N' is the target's first N layers; '{EAGLE3}FOLDER' is an "
        f"EAGLE-3 head for the target, such as '{EAGLE3}{AUSTEN}'; '{PEAGLE}FOLDER' is a P-EAGLE head for it, "
        f"'{DFLASH}FOLDER' a DFlash or DSpark drafter; '{OWN_MTP}' are the MTP layers in the target's checkpoint; "
        f"'{INT8}' is a quantised copy of the target (needs torchao); '{LOOKUP_ELSE}NAME' copies where four tokens "
        "match, and uses the draft NAME elsewhere; or name a smaller model with the same tokens, such as "
        f"'{AUSTEN_DRAFT}' for '{AUSTEN}', or the assistant of a Gemma 4 target.",
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="How many tokens the draft guesses per step.",
        show_default=f"10 for {PROMPT_LOOKUP}, {SUFFIX_LOOKUP} and {LOOKUP_ELSE}NAME, their own with P-EAGLE, "
        "DFlash, MTP and Gemma 4 assistants, 2 otherwise",
    ),
]
Schedule = Annotated[
    Literal["auto", "constant", "heuristic"] | None,
    typer.Option(
        metavar="NAME",
        help="'auto': as many guesses as pay, up to K; the default for guesses that are looked up. 'constant': K "
        "guesses in every step; the default for others. 'heuristic': 2 more after a step whose guesses were all right, "
        "1 fewer after any other.",
    ),
]
Verify = Annotated[
    Literal["exact", "block", "gumbel"] | None,
    typer.Option(
        metavar="NAME",
        help="'gumbel': a guess is accepted if it is the target's token, so that the text depends on the seed alone. "
        "'exact': guesses are judged one by one. 'block': together, which accepts as many or more on average. All give "
        "the target's distribution.  [default: exact for a draft model, otherwise gumbel]",
    ),
]
Invariant = Annotated[
    bool,
    typer.Option(
        "--invariant",
        help="This package's outputs have the same bits with any guesses and in any batch. On a CPU, for some models, "
        "in float32 and bfloat16.",
    ),
]
TopK = Annotated[int, typer.Option(metavar="N", help="Sample from the N most likely tokens only. 0: all.")]
TopP = Annotated[
    float,
    typer.Option(metavar="P", help="Sample from the most likely tokens that have probability P together. 1: all."),
]
MinP = Annotated[
    float,
    typer.Option(metavar="P", help="Sample from tokens at least P times as probable as the most likely one. 0: all."),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="Where to run: cpu, cuda, cuda:1.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads.", show_default="torch's choice")]
Compile = Annotated[
    bool | None,
    typer.Option(
        help="Compile this package's steps with torch.compile. It takes a while the first time.",
        show_default="captured on CUDA; the demo compiles long texts on a CPU",
    ),
]


def new_console() -> Console:
    """A console that prints text unchanged: rich adds no colours to words, and the terminal breaks long lines."""
    return Console(highlight=False, markup=False, soft_wrap=True)


def compute_on(device: str, threads: int | None) -> torch.device:
    """Return the device with this name. Also sets torch's number of CPU threads, unless `threads` is None."""
    if threads is not None:
        checks.check_int("threads", threads, 1)
        torch.set_num_threads(threads)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
    torch_device = torch.device(device)
    if torch_device.type == "cuda" and (torch_device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: torch finds {torch.cuda.device_count()} CUDA devices, so there is no {device!r}")
    return torch_device


@contextmanager
def threads_restored() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print errors that the user can fix as one line, and end the command with exit code 2."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        print(f"torch-specops: error: {lines[0]}", file=sys.stderr)
        raise typer.Exit(2) from None
