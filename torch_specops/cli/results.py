"""Turns measurements into records for JSON, tables, and lines about differing outputs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby, zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from .comparison import Measurement
from .greedy import worst_of
from .providers import ASSISTED, GENERATE, PLAIN

# (header, key of a result, format, factor). A column without values is left out.
COLUMNS = (
    ("tok/s", "tokens_per_second", ".1f", 1),
    ("/gen", "speedup", ".2f", 1),
    ("/asst", "speedup_over_assisted", ".2f", 1),
    ("len", "mean_acceptance_length", ".2f", 1),
    ("rate", "acceptance_rate", ".0%", 1),
    ("ms/st", "outside_seconds_per_step", ".2f", 1e3),
    ("MB", "peak_memory_bytes", ".0f", 1e-6),
)
# The mark after a row and its meaning, by how the output compares.
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
# The ways to decode without a draft.
UNDRAFTED = (GENERATE, PLAIN)
TOTAL = "total"


def totals(measurements: Sequence[Measurement]) -> list[Measurement]:
    """All categories together; empty if there is only one."""
    together: dict[tuple[float, int, str], Measurement] = {}
    for row in measurements:
        key = row.temperature, row.batch_size, row.provider
        runs = together[key].runs if key in together else []
        together[key] = replace(row, category=TOTAL, runs=runs + row.runs)
    return list(together.values()) if len({row.category for row in measurements}) > 1 else []


def as_results(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Records of what was timed, each with its speedups in the same case: over transformers' `generate`, over the
    fastest assisted generation, and over the fastest way without a draft."""
    results = []
    for _, group in groupby(measurements, lambda row: (row.temperature, row.batch_size, row.category)):
        records = [_record(row) for row in group]
        for key, names in (
            ("speedup", GENERATE),
            ("speedup_over_assisted", ASSISTED),
            ("speedup_over_undrafted", UNDRAFTED),
        ):
            base = [each["tokens_per_second"] for each in records if each["provider"].startswith(names)]
            for record in records:
                record[key] = record["tokens_per_second"] / max(base) if base else None
        results += records
    return results


def _record(row: Measurement) -> dict[str, Any]:
    def total(name: str) -> Any:
        values = [getattr(run, name) for run in row.runs]
        return None if None in values else sum(values)

    new_tokens, num_steps, num_row_steps = total("new_tokens"), total("num_steps"), total("num_row_steps")
    outside_seconds = total("outside_seconds")
    proposed, accepted = (
        [sum(counts) for counts in zip_longest(*(getattr(run, name) for run in row.runs), fillvalue=0)]
        for name in ("proposed_at", "accepted_at")
    )
    memory = [run.peak_memory_bytes for run in row.runs if run.peak_memory_bytes is not None]
    return {
        "category": row.category or None,
        "temperature": row.temperature,
        "batch_size": row.batch_size,
        "provider": row.provider,
        "compiled": row.compiled,
        "num_batches": len(row.runs),
        "new_tokens": new_tokens,
        "seconds": [run.seconds for run in row.runs],
        "tokens_per_second": new_tokens / sum(statistics.median(run.seconds) for run in row.runs),
        "num_steps": num_steps,
        "mean_acceptance_length": None if num_row_steps is None else new_tokens / num_row_steps,
        "acceptance_rate": sum(accepted) / sum(proposed) if proposed else None,
        "acceptance_rate_per_position": [n / max(of, 1) for n, of in zip(accepted, proposed, strict=True)],
        "outside_seconds_per_step": None if outside_seconds is None else outside_seconds / num_steps,
        "compile_seconds": total("compile_seconds"),
        "peak_memory_bytes": max(memory, default=None),
        "greedy": worst_verdict(run.greedy for run in row.runs),
        "differences": [asdict(each) for run in row.runs for each in run.differences],
    }


def worst_verdict(verdicts: Iterable[str | None]) -> str | None:
    return max(verdicts, key=list(MARKS).index)


def title_of(result: dict[str, Any]) -> str:
    return f"T = {result['temperature']:g}, batch {result['batch_size']}"


def table_of(*columns: str, gap: int = 2) -> Table:
    """A table without lines. Names are in the first column, numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, gap), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True, overflow="crop")
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print it in its full width: a narrower terminal breaks its lines, where rich would cut off digits."""
    table.width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.print(table, crop=False)


def print_providers(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """The table of one temperature and batch size, with a row per provider."""
    columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in results)]
    table = table_of(title_of(results[0]), *(header for header, *_ in columns), "")
    for row in results:
        name = row["provider"].replace(", K = ", " K=").replace(", own", " own")
        cells = ["-" if row[key] is None else format(row[key] * factor, form) for _, key, form, factor in columns]
        table.add_row(name, *cells, MARKS[row["greedy"]][0])
    console.print()
    print_whole(console, table)


def print_legend(
    console: Console, legend: str, results: Sequence[dict[str, Any]], totals: Sequence[dict[str, Any]]
) -> None:
    """The meaning of the columns and marks, and the times of compiling."""
    console.print(f"\n{legend}", soft_wrap=True)
    found = {result["greedy"] for result in results}
    for verdict, meaning in MARKS.items():
        if verdict in found:
            console.print(": ".join(filter(None, meaning)), soft_wrap=True)
    for result in totals or results:
        if result["compile_seconds"]:
            console.print(
                f"{result['provider']}, {title_of(result)}: {result['compile_seconds']:.1f} s compiling, not counted",
                soft_wrap=True,
            )


def print_differences(
    console: Console, measurements: Sequence[Measurement], decode_text: Callable[[list[int]], str]
) -> bool:
    """A line for each provider that differs from plain greedy decoding; returns whether any differs beyond rounding."""
    for measured in measurements:
        differences = [each for run in measured.runs for each in run.differences]
        if not differences:
            continue
        worst = worst_of(differences)
        place = ", ".join(filter(None, [measured.provider, f"batch {measured.batch_size}", measured.category]))
        console.print(
            f"{place}: {len(differences)} tokens are not those of plain greedy decoding. The worst: in row "
            f"{worst.row}, {worst.describe(decode_text)}",
            soft_wrap=True,
        )
    return any(run.greedy == "different" for measured in measurements for run in measured.runs)
