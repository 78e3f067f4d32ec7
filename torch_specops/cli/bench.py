"""`torch-specops bench`: this package beside transformers, in one run, as a table, JSON and a plot."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..benchmark import ASSISTED, GENERATE, Benchmark, Measurement, Workload
from .env import device_name, versions
from .pair import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFT_HELP,
    MIN_P_HELP,
    PROMPT,
    PROMPT_LOOKUP,
    SMOLLM2,
    TARGET_HELP,
    TOP_K_HELP,
    TOP_P_HELP,
    VERIFY_HELP,
    VerifyName,
    default_num_draft_tokens,
    encode,
    errors_in_one_line,
    load_pair,
    set_threads,
    to_device,
)

__all__ = ["PROMPTS", "bench"]

# Of different lengths and kinds: copying pays for the first ones, and hardly for the last.
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

DIFFERENT = 1
INTERRUPTED = 130


class ScheduleName(str, Enum):
    constant = "constant"
    heuristic = "heuristic"
    optimal = "optimal"


class DtypeName(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def bench(
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = SMOLLM2,
    draft: Annotated[str, typer.Option(help=DRAFT_HELP)] = PROMPT_LOOKUP,
    prompt: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="May be repeated; row b of a batch gets prompt b.", show_default="8 of different lengths"),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,8",
    max_new_tokens: Annotated[int, typer.Option(help="Exactly this many per row: an eos ends nothing.")] = 64,
    num_draft_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Drafts per step (K), ours and transformers'.", show_default=DEFAULT_NUM_DRAFT_TOKENS),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily and compares, 1 samples.")] = 0.0,
    top_k: Annotated[int, typer.Option(help=TOP_K_HELP)] = 0,
    top_p: Annotated[float, typer.Option(help=TOP_P_HELP)] = 1.0,
    min_p: Annotated[float, typer.Option(help=MIN_P_HELP)] = 0.0,
    verify: Annotated[VerifyName, typer.Option(help=VERIFY_HELP)] = VerifyName.exact,
    schedule: Annotated[
        ScheduleName,
        typer.Option(help="Our drafts per step: always K; K at first, then 2 more or 1 fewer; what is best, up to K."),
    ] = ScheduleName.constant,
    rounds: Annotated[int, typer.Option(help="Timed runs of each provider; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the first round, when sampling.")] = 0,
    threads: Annotated[Optional[int], typer.Option(help="CPU threads.", show_default="torch's choice")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    dtype: Annotated[DtypeName, typer.Option(help="Of both models.")] = DtypeName.float32,
    compile: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            help="Measure our steps compiled, too, or never.", show_default="compiled on CUDA, eager on a CPU"
        ),
    ] = None,
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", help="Write everything measured to this file: every round, versions, the device."),
    ] = None,
    plot_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--plot", help="Draw tokens/s into this file (.png, .svg, .pdf); needs matplotlib."),
    ] = None,
) -> None:
    """Time this package beside transformers, with one target, one draft and the same prompts.

    [bold]transformers generate[/bold]: one token per step, its dynamic cache. [bold]transformers assisted[/bold]:
    assisted generation with the same draft and K; with a draft model also as it is set up by default. It takes batches
    of one only. [bold]specops, no draft[/bold]: one token per step through our loop. [bold]specops[/bold]: the same
    loop with the draft.

    After a warm-up the providers take turns, round by round. tokens/s are all new tokens of a batch / the median
    seconds of a call, reading the prompts included, compiling not. 'outside' is the time outside the forwards of both
    models per step, from a run of its own. 'memory' is the peak of the process on a CPU, and of what is allocated
    beside the models on CUDA.

    Greedy outputs are compared before anything is timed. 'identical': to all others, or to plain greedy decoding. 'near
    ties': different only where two logits were closer than float32 rounding. Exit code 1 means a difference beyond
    that, 2 that an argument or an installation is wrong, 130 Ctrl-C; the rounds done by then are shown.
    """
    arguments = {name: value for name, value in locals().items() if not name.endswith("_file")}
    console = Console(highlight=False, markup=False)
    with errors_in_one_line():
        sizes = _sizes(batch_sizes)
        torch_device = to_device(device)
        set_threads(threads)
        _check_files(json_file, plot_file)
        if num_draft_tokens is None:
            num_draft_tokens = default_num_draft_tokens(draft)
        prompts = prompt or PROMPTS
        pair, tokenizer = load_pair(console, target, draft, torch_device, getattr(torch, dtype.value))
        work = Workload(
            [encode(tokenizer, text)[0] for text in prompts],
            max_new_tokens,
            num_draft_tokens,
            temperature,
            seed,
            top_k,
            top_p,
            min_p,
            verify.value,
            schedule.value,
        )
        benchmark = Benchmark(pair, work, sizes, rounds, compile)
        described = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(torch_device),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "arguments": arguments
            | {
                "prompt": list(prompts),
                "batch_sizes": sizes,
                "num_draft_tokens": num_draft_tokens,
                "dtype": dtype.value,
                "verify": verify.value,
                "schedule": schedule.value,
            },
            "prompt_tokens": [len(tokens) for tokens in work.prompts],
        }
        console.print(f"target {target}, draft {draft}, K = {num_draft_tokens}, temperature {temperature:g}")
        console.print(
            f"{max_new_tokens} new tokens, median of {rounds} rounds, {dtype.value} on {described['device']}, "
            f"{torch.get_num_threads()} threads, torch {torch.__version__}",
            soft_wrap=True,
        )
        interrupted = _run(console, benchmark)
        results = _results(benchmark.measurements)
        if results:
            console.print(_table(results))
        if json_file is not None:
            document = described | {"interrupted": interrupted, "results": results}
            json_file.write_text(json.dumps(document, indent=2) + "\n")
        if plot_file is not None and results:
            _plot(results, f"{target}, draft {draft}, K = {num_draft_tokens}", str(described["device"]), plot_file)
    different = _print_differences(console, benchmark.measurements, tokenizer)
    if interrupted:
        console.print("interrupted: these are the rounds done so far")
        raise typer.Exit(INTERRUPTED)
    if different:
        raise typer.Exit(DIFFERENT)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"batch_sizes: expected numbers separated by commas, got {text!r}") from None


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """What would fail at the end fails at the beginning."""
    for name, file in (("json", json_file), ("plot", plot_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{name}: no such directory: {str(file.parent)!r}")
    if plot_file is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is missing; run: pip install matplotlib")
    if plot_file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"plot: expected a name that ends in .png, .svg or .pdf, got {plot_file.name!r}")


def _run(console: Console, benchmark: Benchmark) -> bool:
    """Measure behind a progress bar; return whether Ctrl-C ended it."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=benchmark.num_runs)
        try:
            for done, label in enumerate(benchmark.run()):
                progress.update(task, completed=done, description=label)
        except KeyboardInterrupt:
            return True
    return False


def _results(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """As JSON, with the ratios to transformers at the same batch size; providers that were never timed only with their
    reason."""
    results = []
    for measured in measurements:
        if not measured.seconds and not measured.note:
            continue
        same = [other for other in measurements if other.batch_size == measured.batch_size]
        ratios = {
            "over_generate": _ratio(measured, [other for other in same if other.provider == GENERATE]),
            "over_assisted": _ratio(measured, [other for other in same if other.provider.startswith(ASSISTED)]),
        }
        results.append(measured.as_dict() | ratios)
    return results


def _ratio(measured: Measurement, others: Sequence[Measurement]) -> float | None:
    """How many times as fast as the fastest of the others."""
    rates = [other.tokens_per_second for other in others if other.tokens_per_second is not None]
    return measured.tokens_per_second / max(rates) if measured.tokens_per_second and rates else None


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("batch", "provider"):
        table.add_column(name, overflow="fold")
    for name in (
        "tokens/s",
        "/ generate",
        "/ assisted",
        "acceptance\nlength",
        "acceptance\nrate",
        "outside\nms/step",
        "compile\ns",
        "memory\nMB",
    ):
        table.add_column(name, justify="right")
    table.add_column("greedy")
    previous = results[0]["batch_size"]
    for result in results:
        if result["batch_size"] != previous:
            table.add_section()
            previous = result["batch_size"]
        table.add_row(
            str(result["batch_size"]),
            result["provider"],
            _cell(result["tokens_per_second"], ".1f"),
            _cell(result["over_generate"], ".2f"),
            _cell(result["over_assisted"], ".2f"),
            _cell(result["mean_acceptance_length"], ".2f"),
            _cell(result["acceptance_rate"], ".1%"),
            _cell(result["outside_seconds_per_step"], ".2f", 1e3),
            _cell(result["compile_seconds"] or None, ".1f"),
            _cell(result["peak_memory_bytes"], ".0f", 1e-6),
            result["note"] or result["greedy"] or "not compared",
        )
    return table


def _cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def _print_differences(console: Console, measurements: Sequence[Measurement], tokenizer: Any) -> bool:
    """A line for each provider that differs from plain greedy decoding; return whether rounding does not explain it."""
    for measured in measurements:
        if not measured.differences:
            continue
        worst = max(measured.differences, key=lambda difference: difference.logit_gap / difference.rounding_bound)
        token, expected = (repr(tokenizer.decode([each])) for each in (worst.token, worst.expected_token))
        console.print(
            f"{measured.provider}, batch {measured.batch_size}: {len(measured.differences)} tokens are not those of "
            f"plain greedy decoding; the worst, token {worst.index} of row {worst.row}, is {token} in place of "
            f"{expected}, and their logits differ by {worst.logit_gap:.1e} (float32 rounding: up to "
            f"{worst.rounding_bound:.1e})",
            soft_wrap=True,
        )
    return any(measured.greedy == "different" for measured in measurements)


def _plot(results: Sequence[dict[str, Any]], title: str, device: str, file: Path) -> None:
    """Bars of the median tokens/s, with a line from the slowest to the fastest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [result for result in results if result["seconds"]]
    sizes = sorted({result["batch_size"] for result in timed})
    heights = [sum(result["batch_size"] == size for result in timed) for size in sizes]
    figure, axes = pyplot.subplots(
        len(sizes),
        figsize=(8, 1.2 + 0.9 * len(sizes) + 0.3 * sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for size, axis in zip(sizes, axes[:, 0], strict=True):
        rows = [result for result in timed if result["batch_size"] == size]
        names = [result["provider"] for result in rows]
        rates = [result["tokens_per_second"] for result in rows]
        low = [rate - result["new_tokens"] / max(result["seconds"]) for rate, result in zip(rates, rows, strict=True)]
        high = [result["new_tokens"] / min(result["seconds"]) - rate for rate, result in zip(rates, rows, strict=True)]
        colours = ["tab:green" if name.startswith("specops") else "tab:grey" for name in names]
        bars = axis.barh(names, rates, xerr=[low, high], color=colours, ecolor="black", capsize=2)
        axis.bar_label(bars, fmt="%.1f", padding=4)
        axis.margins(x=0.1)
        axis.invert_yaxis()
        axis.set_title(f"batch {size}", loc="left", fontsize="medium")
    axes[-1, 0].set_xlabel(f"tokens/s, median and range of {len(timed[0]['seconds'])} rounds, {device}")
    figure.suptitle(title)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
