"""`torch-specops bench`: times this package and transformers, in turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from .. import checks
from ..sampling import SamplingParams
from . import options, results
from .comparison import Case, Comparison
from .env import device_name, versions
from .loading import SMOLLM2
from .models import PROMPT, PROMPT_LOOKUP, animates, default_num_draft_tokens, encode, load_models, num_assisted_tokens
from .plot import PLOT_SUFFIXES, plot_categories, plot_providers
from .prompts import Question, read_questions
from .providers import ASSISTED, make_providers, refusal

# The answers to the first prompts can mostly be copied from the prompt, which suits prompt lookup. The answers to the
# last prompts cannot.
PROMPTS = [
    PROMPT,
    "Correct the spelling, and change nothing else: The quik brown fox jumpd over the lazy dog, "
    "becuase it was the fastest fox of the forrest and the dog "  # codespell:ignore
    "was asleep on the warm stones behind the old mill.",
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
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions of several categories, each measured for itself: a line of JSON for each, as Spec-Bench "
            'has them, {"question_id": 1, "category": "math", "turns": ["2 + 2?"]}. Category and id may be missing. '
            "Of several turns the first is asked.",
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="How many prompts at once, separated by commas. All of --prompts are decoded; the last batch of a "
            "category is filled up with its first prompts.",
            show_default="1,8, or 1,4,8 with --prompts",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens that every prompt gets; an end-of-text token does not stop it.")
    ] = 32,
    num_draft_tokens: options.NumDraftTokens = None,
    schedule: options.Schedule = None,
    verify: options.Verify = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            metavar="T,T",
            help="0: always the most likely token. Above 0: sample; 1 is the model's distribution. Several are "
            "separated by commas.",
            show_default="0, or 0,1 with --prompts",
        ),
    ] = None,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Timed runs of each; the median counts.", show_default="3, or 1 with --prompts"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="For sampling in the first round; later ones count up.")] = 0,
    threads: options.Threads = None,
    device: options.Device = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")
    ] = "float32",
    compile: options.Compile = None,
    invariant: options.Invariant = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all measurements, versions and the device to this file."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw speeds and acceptance to this .png, .svg or .pdf file."),
    ] = None,
) -> None:
    """Compare the speed of this package with transformers, on the same models and prompts.

    "transformers generate" has no draft. "transformers assisted" is assisted generation with the same draft and K, and
    for a draft model also with "own K", the default of transformers. "specops" is this package, without and with the
    draft. Assisted generation takes one prompt at a time. Its prompt lookup is "prompt-lookup:2". For
    "lookup-else:NAME" it drafts with NAME alone, and K is that of NAME. Assisted generation is left out where
    transformers refuses it, as for models that keep a recurrent state. Prompts go through the model's chat template, if
    it has any.

    After a warm-up, all of these run in turns. Each table is printed once it is measured; the lines below the last
    table explain the columns. Compiling is not part of tok/s, and on CUDA "MB" is the peak memory without the models.
    At temperature 0 the outputs are compared.

    After Ctrl-C or an error, the results so far are shown and written.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("json_file", "plot_file")}
    console = options.new_console()
    with options.errors_in_one_line():
        if prompts is not None and prompt:
            raise ValueError("prompts: expected --prompts or --prompt, got both")
        questions = [Question(text) for text in prompt or PROMPTS] if prompts is None else read_questions(prompts)
        by_category = prompts is not None
        default_sizes, default_temperatures, default_rounds = ("1,4,8", "0,1", 1) if by_category else ("1,8", "0", 3)
        sizes = _numbers("batch_sizes", batch_sizes or default_sizes, int)
        temperatures = _numbers("temperature", temperature or default_temperatures, float)
        rounds = default_rounds if rounds is None else rounds
        for name, number in {"batch_sizes": min(sizes), "rounds": rounds, "max_new_tokens": max_new_tokens}.items():
            checks.check_int(name, number, 1)
        torch_device = options.compute_on(device, threads)
        _check_files(json_file, plot_file)
        samplings = [SamplingParams(each, top_k, top_p, min_p) for each in temperatures]
        models, tokenizer = load_models(console, target, draft, torch_device, getattr(torch, dtype))
        assisted_tokens = num_assisted_tokens(models.draft, num_draft_tokens)
        if num_draft_tokens is None:
            num_draft_tokens = default_num_draft_tokens(models.draft)
        tokens = [encode(tokenizer, question.text)[0] for question in questions]
        categories: dict[str, list[Tensor]] = {}
        for question, prompt_tokens in zip(questions, tokens, strict=True):
            # Check the length here, because transformers would continue beyond the model's last position.
            if models.target.max_length is not None and len(prompt_tokens) + max_new_tokens > models.target.max_length:
                raise ValueError(
                    f"{question.place}: expected a prompt and new tokens within the {models.target.max_length} that "
                    f"the target reads, got {len(prompt_tokens)} + {max_new_tokens}"
                )
            categories.setdefault(question.category, []).append(prompt_tokens)
        cases = [
            Case(_batches(category_tokens, size)[: None if by_category else 1], sampling, name)
            for sampling in samplings
            for size in sizes
            for name, category_tokens in categories.items()
        ]
        # Do not use "auto" on a CPU, because it might begin to compile in the middle of a comparison.
        default = "auto" if torch_device.type == "cuda" else False
        how = schedule, verify, default if compile is None else compile, assisted_tokens, invariant
        providers = make_providers(models, num_draft_tokens, *how)
        reasons = {way.name: refusal(way) for way in providers if way.name.startswith(ASSISTED)}
        refused = {name: reason for name, reason in reasons.items() if reason}
        providers = [way for way in providers if way.name not in refused]
        comparison = Comparison(models.target, providers, cases, max_new_tokens, rounds, seed)
        where = device_name(torch_device)
        shown = ", ".join(f"{each:g}" for each in temperatures)
        console.print(f"target {target}, draft {draft}, K = {num_draft_tokens}, temperature {shown}")
        if by_category:
            later = sum(question.num_later_turns for question in questions)
            left_out = f"; {later} later turns are not asked" if later else ""
            console.print(f"{len(questions)} prompts in {len(categories)} categories{left_out}")
        median = "1 round" if rounds == 1 else f"median of {rounds} rounds"
        console.print(
            f"{max_new_tokens} new tokens per prompt, {median}, {dtype}, {where}, {torch.get_num_threads()} threads, "
            f"torch {torch.__version__}"
        )
        for name, reason in refused.items():
            console.print(f"{name} is left out: {reason}")
        records: list[results.Record] = []
        total: list[results.Record] = []

        def show() -> None:
            runs, comparison.runs = comparison.runs, []
            new_records, new_totals = results.as_results(runs), results.as_results(results.totals(runs))
            if new_records and by_category:
                results.print_categories(console, new_records, new_totals)
            elif new_records:
                results.print_providers(console, new_records)
            records.extend(new_records)
            total.extend(new_totals)

        ended_by = _run(console, comparison, show)
        interrupted = isinstance(ended_by, KeyboardInterrupt)
        if records:
            legend = results.CATEGORIES_LEGEND if by_category else results.PROVIDERS_LEGEND
            results.print_legend(console, legend, records, total)
        if plot_file is not None and records:
            (plot_categories if by_category else plot_providers)(records + total, f"{target}, draft {draft}", plot_file)
        if json_file is not None:
            chosen = {
                "prompt": None if by_category else [question.text for question in questions],
                "prompts": None if prompts is None else str(prompts),
                "batch_sizes": sizes,
                "temperature": temperatures,
                "rounds": rounds,
                "num_draft_tokens": num_draft_tokens,
            }
            document = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "device": where,
                "threads": torch.get_num_threads(),
                "versions": versions(),
                "arguments": arguments | chosen,
                "refused": refused,
                "prompt_tokens": [len(each) for each in tokens],
                "interrupted": interrupted,
                "error": str(ended_by) if isinstance(ended_by, Exception) else None,
                "results": records,
                "totals": total,
            }
            json_file.write_text(json.dumps(document, indent=2) + "\n")
        if isinstance(ended_by, Exception):
            raise ended_by
    results.print_differences(console, records, tokenizer.decode)
    if interrupted:
        console.print("interrupted: only what is done so far is shown")
        raise typer.Exit(options.INTERRUPTED)
    if any(result["greedy"] == "different" for result in records):
        raise typer.Exit(1)


Number = TypeVar("Number", int, float)


def _numbers(name: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"{name}: expected numbers separated by commas, got {text!r}") from None


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Raise ValueError for files that cannot be written. Called before anything is measured."""
    for name, file in (("json", json_file), ("plot", plot_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{name}: there is no folder {str(file.parent)!r}")
    if plot_file is not None and plot_file.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"plot: expected a file that ends in {', '.join(PLOT_SUFFIXES)}, got {plot_file.name!r}")
    if plot_file is not None and find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is missing; run: pip install 'torch_specops[bench]'")


def _batches(prompts: Sequence[Tensor], batch_size: int) -> list[list[Tensor]]:
    """All prompts in their order. The last batch is filled up with the first prompts."""
    return [
        [prompts[(first + row) % len(prompts)] for row in range(batch_size)]
        for first in range(0, len(prompts), batch_size)
    ]


def _run(console: Console, comparison: Comparison, show: Callable[[], None]) -> KeyboardInterrupt | Exception | None:
    """Run the comparison with a progress bar, and call `show` after each batch size of each temperature. Returns the
    exception that ended the comparison early, or None."""
    columns = BarColumn(15), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left, {task.description}")
    with Progress(*columns, console=console, transient=True, disable=not animates(console)) as progress:
        task = progress.add_task("", total=comparison.cost())
        done = 0.0
        try:
            for _, runs in groupby(comparison.run(), lambda run: (run[0].temperature, run[0].batch_size)):
                for case, label in runs:
                    # Shorten the label: the columns before it take 38 characters, and two must stay free for the "^C"
                    # of a terminal.
                    progress.update(task, completed=done, description=label[: console.width - 40])
                    done += case.cost
                show()
        except (KeyboardInterrupt, Exception) as early_end:
            show()
            return early_end
    return None
