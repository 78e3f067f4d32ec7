"""Turns measurements into records for JSON, tables, and lines about differing outputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby, zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from .comparison import Run
from .greedy import GreedyDifference, worst_of
from .providers import ASSISTED, GENERATE, PLAIN

# Columns of a table: (header, key of a record, format, factor). A column without values is left out.
COLUMNS = (
    ("tok/s", "tokens_per_second", ".1f", 1),
    ("/gen", "speedup", ".2f", 1),
    ("/asst", "speedup_over_assisted", ".2f", 1),
    ("len", "mean_acceptance_length", ".2f", 1),
    ("rate", "acceptance_rate", ".0%", 1),
    ("ms/st", "outside_seconds_per_step", ".2f", 1e3),
    ("MB", "peak_memory_bytes", ".0f", 1e-6),
)
# A table of categories shows the acceptance of drafts at these positions. More positions would make it wider than 80
# columns.
PLACES = (1, 2, 4, 8)
NAME_WIDTH = 15
# For each verdict on an output: the mark at the end of its table row, and the meaning of the mark.
MARKS = {
    "identical": ("=", "identical to plain greedy decoding"),
    "near ties": ("~", "identical but where two logits are closer than float32 rounding"),
    "rounding": ("~", "different, and a 16-bit dtype cannot tell whether by rounding"),
    "different": ("!", "different from plain greedy decoding"),
    None: ("", "sampled outputs are not compared"),
}
PROVIDERS_LEGEND = """tok/s: new tokens per second of the whole batch, prompts included
/gen, /asst: over transformers generate, over the fastest assisted generation
len: tokens per step; rate: drafts accepted; ms/st: outside the models, a step"""
CATEGORIES_LEGEND = """undrafted, asst, specops: new tokens per second, prompts included
undrafted: the faster of transformers generate (t) and specops, no draft (s)
asst: the fastest assisted generation of transformers; /best: over undrafted
len: tokens per step; 1, 2, ...: percent accepted of the 1st, 2nd, ... drafts"""
# The names of the providers without a draft.
UNDRAFTED = (GENERATE, PLAIN)

Record = dict[str, Any]


def totals(runs: Sequence[Run]) -> list[Run]:
    """The runs as one category, "total"; empty if there is only one category."""
    if len({run.case.category for run in runs}) <= 1:
        return []
    return [replace(run, case=replace(run.case, category="total")) for run in runs]


def as_results(runs: Sequence[Run]) -> list[Record]:
    """Make a record for each provider and case. A record has speedups within its case: over transformers' `generate`,
    over the fastest assisted generation, and over the fastest provider without a draft."""
    cases: dict[tuple[object, ...], dict[str, list[Run]]] = {}
    for run in runs:
        case = cases.setdefault((run.case.temperature, run.case.batch_size, run.case.category), {})
        case.setdefault(run.provider.name, []).append(run)
    results = []
    for case in cases.values():
        records = [_record(provider_runs) for provider_runs in case.values()]
        for key, names in (
            ("speedup", (GENERATE,)),
            ("speedup_over_assisted", (ASSISTED,)),
            ("speedup_over_undrafted", UNDRAFTED),
        ):
            base = fastest(records, names)
            for record in records:
                record[key] = record["tokens_per_second"] / base["tokens_per_second"] if base else None
        results += records
    return results


def _record(runs: Sequence[Run]) -> Record:
    """The record of one provider in one case, from its runs on all batches."""

    def total(name: str) -> Any:
        values = [getattr(run, name) for run in runs]
        return None if None in values else sum(values)

    new_tokens, num_steps, num_row_steps = total("new_tokens"), total("num_steps"), total("num_row_steps")
    outside_seconds = total("outside_seconds")
    proposed, accepted = (
        [sum(counts) for counts in zip_longest(*(getattr(run, name) for run in runs), fillvalue=0)]
        for name in ("proposed_at", "accepted_at")
    )
    memory = [run.peak_memory_bytes for run in runs if run.peak_memory_bytes is not None]
    case, provider = runs[0].case, runs[0].provider
    return {
        "category": case.category or None,
        "temperature": case.temperature,
        "batch_size": case.batch_size,
        "provider": provider.name,
        "compiled": provider.compiled,
        "num_batches": len(runs),
        "new_tokens": new_tokens,
        "seconds": [run.seconds for run in runs],
        "tokens_per_second": new_tokens / sum(statistics.median(run.seconds) for run in runs),
        "num_steps": num_steps,
        "mean_acceptance_length": None if num_row_steps is None else new_tokens / num_row_steps,
        "drafts_per_step": sum(proposed) / num_row_steps if num_row_steps else None,
        "steps_without_drafts": 1 - sum(proposed[:1]) / num_row_steps if num_row_steps else None,
        "acceptance_rate": sum(accepted) / sum(proposed) if proposed else None,
        "acceptance_rate_per_position": [n / max(of, 1) for n, of in zip(accepted, proposed, strict=True)],
        "outside_seconds_per_step": None if outside_seconds is None else outside_seconds / num_steps,
        "compile_seconds": total("compile_seconds"),
        "peak_memory_bytes": max(memory, default=None),
        "greedy": worst_verdict(run.greedy for run in runs),
        "differences": [asdict(each) for run in runs for each in run.differences],
    }


def worst_verdict(verdicts: Iterable[str | None]) -> str | None:
    return max(verdicts, key=list(MARKS).index)


def fastest(records: Sequence[Record], names: tuple[str, ...]) -> Record | None:
    candidates = [record for record in records if record["provider"].startswith(names)]
    return max(candidates, key=lambda record: record["tokens_per_second"], default=None)


def by_category(results: Iterable[Record]) -> list[list[Record]]:
    return [list(group) for _, group in groupby(results, lambda result: result["category"])]


def title_of(result: Record) -> str:
    return f"T = {result['temperature']:g}, batch {result['batch_size']}"


def _print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], gap: int) -> None:
    """Print a table without rules, with names in the first column and numbers in the others. The table is printed in
    its full width, so that a narrow terminal breaks the lines and rich does not cut off digits."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, gap), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True, overflow="crop")
    for row in rows:
        table.add_row(*row)
    table.width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.print(table)


def print_providers(console: Console, results: Sequence[Record]) -> None:
    """Print the table of one temperature and batch size, with a row for each provider."""
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in results)]
    rows = []
    for row in results:
        name = row["provider"].replace(", K = ", " K=").replace(", own", " own")
        cells = ["-" if row[key] is None else format(row[key] * factor, form) for _, key, form, factor in columns]
        rows.append([name, *cells, MARKS[row["greedy"]][0]])
    console.print()
    _print_table(console, [title_of(results[0]), *(header for header, *_ in columns), ""], rows, gap=2)
    _print_drafting(console, [(row["provider"], row) for row in results])


def print_categories(console: Console, results: Sequence[Record], totals: Sequence[Record]) -> None:
    """Print the table of one temperature and batch size, with a row for each category."""
    num_drafted = max(len(result["acceptance_rate_per_position"]) for result in results)
    places = [place for place in PLACES if place <= num_drafted]
    headers = "category", "undrafted", "asst", "len", "specops", "/best", "len", *map(str, places), ""
    rows = [_category_cells(ways, places) for ways in [*by_category(results), *by_category(totals)]]
    console.print(f"\n{title_of(results[0])}", style="bold")
    _print_table(console, headers, rows, gap=1)
    _print_drafting(console, [(ways[-1]["category"], ways[-1]) for ways in by_category([*results, *totals])])


def _print_drafting(console: Console, ways: Sequence[tuple[str, Record]]) -> None:
    """For each name and record, print a line with the number of drafts that the schedule chose."""
    for name, way in ways:
        if way["acceptance_rate"] is not None:
            drafts, without = way["drafts_per_step"], way["steps_without_drafts"]
            console.print(f"{name}: {drafts:.1f} drafts a row and step, {without:.0%} of these without")


def _category_cells(ways: Sequence[Record], places: Sequence[int]) -> list[str]:
    # The last provider is this package with its draft.
    undrafted, assisted, specops = fastest(ways, UNDRAFTED), fastest(ways, (ASSISTED,)), ways[-1]
    assert undrafted is not None
    name, letter = specops["category"], "s" if undrafted["provider"].startswith(PLAIN) else "t"
    (speed, length), rates = _speed_and_length(specops), specops["acceptance_rate_per_position"]
    return [
        name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 2] + "..",
        f"{undrafted['tokens_per_second']:.1f} {letter}",
        *_speed_and_length(assisted),
        speed,
        f"{specops['speedup_over_undrafted']:.2f}",
        length,
        *(f"{100 * rates[place - 1]:.0f}" if place <= len(rates) else "-" for place in places),
        MARKS[worst_verdict(way["greedy"] for way in ways)][0],
    ]


def _speed_and_length(way: Record | None) -> tuple[str, str]:
    if way is None:
        return "-", "-"
    length = way["mean_acceptance_length"]
    return f"{way['tokens_per_second']:.1f}", "-" if length is None else f"{length:.2f}"


def print_legend(console: Console, legend: str, results: Sequence[Record], totals: Sequence[Record]) -> None:
    """Print the meaning of the columns and marks, and the times of compiling."""
    console.print(f"\n{legend}")
    verdicts = {result["greedy"] for result in results}
    for verdict, meaning in MARKS.items():
        if verdict in verdicts:
            console.print(": ".join(filter(None, meaning)))
    for result in totals or results:
        if result["compile_seconds"]:
            seconds = f"{result['compile_seconds']:.1f} s compiling, not counted"
            console.print(f"{result['provider']}, {title_of(result)}: {seconds}")


def print_differences(console: Console, results: Sequence[Record], decode_text: Callable[[list[int]], str]) -> None:
    """Print a line for each result that differs from plain greedy decoding."""
    for result in results:
        differences = [GreedyDifference(**each) for each in result["differences"]]
        if differences:
            worst = worst_of(differences)
            place = ", ".join(filter(None, [result["provider"], f"batch {result['batch_size']}", result["category"]]))
            console.print(
                f"{place}: {len(differences)} tokens differ from plain greedy decoding. The worst: in row "
                f"{worst.row}, {worst.describe(decode_text)}"
            )
