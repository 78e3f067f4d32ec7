"""`torch-specops bench`: this package and transformers, timed in turns."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..sampling import SamplingParams
from . import options
from .comparison import Comparison, Workload
from .env import device_name, versions
from .loading import SMOLLM2
from .models import PROMPT, PROMPT_LOOKUP, default_num_draft_tokens, encode, load_models
from .results import as_results, print_differences, print_tables

# The first ones can largely be answered by copying, the last ones hardly.
PROMPTS = [
    PROMPT,
    "Correct the spelling, and change nothing else: The quik brown fox jumpd over the lazy dog, becuase it was the "
    "fastest fox of the forrest and the dog was asleep on the warm stones behind the old mill.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Repeat this list, sorted: pear, apple, quince, plum, cherry, apricot, peach, lemon, lime, orange.",
    "Turn this into JSON: name Ada, born 1815, city London; name Alan, born 1912, city London; name Grace, born 1906, "
    "city New York.",
    "Explain in three sentences why the sky is blue.",
    "Write one sentence about the sea.",
    "Tell me a story about a lighthouse keeper who finds a letter in a bottle.",
]


def bench(
    target: options.Target = SMOLLM2,
    draft: options.Draft = PROMPT_LOOKUP,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Give it once per row of a batch.", show_default="8 prompts of different lengths"
        ),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(metavar="N,N", help="How many prompts at once, separated by commas.")
    ] = "1,8",
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens that every prompt gets; an end-of-text token does not stop it.")
    ] = 64,
    num_draft_tokens: options.NumDraftTokens = None,
    schedule: options.Schedule = "constant",
    verify: options.Verify = "exact",
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    rounds: Annotated[int, typer.Option(metavar="N", help="Timed runs of each; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="For sampling in the first round; later ones count up.")] = 0,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")
    ] = "float32",
    compile: options.Compile = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all measurements, versions and the device to this file."),
    ] = None,
) -> None:
    """Time this package beside transformers, with the same models and prompts.

    Compared are "transformers generate" (no draft), "transformers assisted" (assisted generation with the same draft
    and K, and with a draft model also with "own K", as transformers sets it up by default), and this package,
    "specops", without and with the draft. Assisted generation takes one prompt at a time.

    After a warm-up they take turns. The lines below the tables say what the columns are. Compiling is not part of
    tok/s, and on CUDA "MB" is the peak of memory without the models. At temperature 0 the outputs are compared.

    Ctrl-C shows the rounds done so far. Exit codes: 1 an output differs beyond rounding, 2 a wrong argument or a
    missing package, 130 Ctrl-C.
    """
    arguments = {name: value for name, value in locals().items() if name != "json_file"}
    console = Console(highlight=False, markup=False)
    with options.errors_in_one_line():
        sizes = _sizes(batch_sizes)
        torch_device = options.to_device(device)
        options.set_threads(threads)
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise ValueError(f"json: there is no folder {str(json_file.parent)!r}")
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        if num_draft_tokens is None:
            num_draft_tokens = default_num_draft_tokens(draft)
        prompts = prompt or PROMPTS
        models, tokenizer = load_models(console, target, draft, torch_device, getattr(torch, dtype))
        tokens = [encode(tokenizer, text)[0] for text in prompts]
        work = Workload(tokens, max_new_tokens, num_draft_tokens, sampling, seed, verify, schedule)
        comparison = Comparison(models, work, sizes, rounds, "auto" if compile is None else compile)
        where = device_name(torch_device)
        console.print(
            f"target {target}, draft {draft}, K = {num_draft_tokens}, temperature {temperature:g}", soft_wrap=True
        )
        console.print(
            f"{max_new_tokens} new tokens per prompt, median of {rounds} rounds, {dtype}, {where}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}",
            soft_wrap=True,
        )
        interrupted = _run(console, comparison)
        results = as_results(comparison.measurements)
        print_tables(console, results)
        if json_file is not None:
            chosen = {"prompt": list(prompts), "batch_sizes": sizes, "num_draft_tokens": num_draft_tokens}
            document = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "device": where,
                "threads": torch.get_num_threads(),
                "versions": versions(),
                "arguments": arguments | chosen,
                "prompt_tokens": [len(each) for each in tokens],
                "interrupted": interrupted,
                "results": results,
            }
            json_file.write_text(json.dumps(document, indent=2) + "\n")
    different = print_differences(console, comparison.measurements, tokenizer.decode)
    if interrupted:
        console.print("interrupted: only the rounds done so far are shown")
        raise typer.Exit(options.INTERRUPTED)
    if different:
        raise typer.Exit(1)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"batch_sizes: expected numbers separated by commas, got {text!r}") from None


def _run(console: Console, comparison: Comparison) -> bool:
    """Measure behind a progress bar; return whether Ctrl-C ended it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=comparison.num_runs)
        try:
            for done, label in enumerate(comparison.run()):
                progress.update(task, completed=done, description=label)
        except KeyboardInterrupt:
            return True
    return False
