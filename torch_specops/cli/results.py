"""Measurements as records for JSON, as tables, and as sentences about what differs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console

from .comparison import ASSISTED, GENERATE, Measurement

# (header, key of a result, format, factor). A column without any value is left out. All of them, the widest name and
# the mark take 78 characters.
COLUMNS = (
    ("tok/s", "tokens_per_second", "9.1f", 1),
    ("/gen", "speedup", "6.2f", 1),
    ("/asst", "speedup_over_assisted", "7.2f", 1),
    ("len", "mean_acceptance_length", "6.2f", 1),
    ("rate", "acceptance_rate", "6.0%", 1),
    ("ms/st", "outside_seconds_per_step", "7.2f", 1e3),
    ("MB", "peak_memory_bytes", "7.0f", 1e-6),
)
# What stands behind a row, by how its output compares.
MARKS = {
    "identical": ("=", "identical to plain greedy decoding"),
    "near ties": ("~", "identical but where two logits are closer than float32 rounding"),
    "rounding": ("~", "different, and a 16-bit dtype cannot tell whether by rounding"),
    "different": ("!", "different from plain greedy decoding"),
    None: ("", "sampled outputs are not compared"),
}
LEGEND = """tok/s: new tokens per second of the whole batch, prompts included
/gen, /asst: over transformers generate, over the fastest assisted generation
len: tokens per step; rate: drafts accepted; ms/st: outside the models, a step"""


def as_results(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Records of what was timed, each with its speedups over transformers at the same batch size: over `generate`, and
    over the fastest assisted generation."""
    timed = [
        asdict(measured) | {"tokens_per_second": measured.new_tokens / statistics.median(measured.seconds)}
        for measured in measurements
        if measured.seconds
    ]
    for key, name in (("speedup", GENERATE), ("speedup_over_assisted", ASSISTED)):
        base: dict[int, float] = {}
        for result in timed:
            if result["provider"].startswith(name):
                size = result["batch_size"]
                base[size] = max(result["tokens_per_second"], base.get(size, 0.0))
        for result in timed:
            # In an interrupted round transformers may not have had its turn.
            fastest = base.get(result["batch_size"])
            result[key] = result["tokens_per_second"] / fastest if fastest else None
    return timed


def print_tables(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """A table for each batch size, and what the columns mean."""
    for batch_size, group in groupby(results, lambda result: result["batch_size"]):
        rows = list(group)
        columns = [column for column in COLUMNS if any(row[column[1]] is not None for row in rows)]
        names = [row["provider"].replace(", K = ", " K=").replace(", own", " own") for row in rows]
        width = max(map(len, [*names, f"batch {batch_size}"]))
        header = f"{f'batch {batch_size}':{width}}" + "".join(f"{name:>{_width(form)}}" for name, _, form, _ in columns)
        console.print()
        console.print(header, style="bold", soft_wrap=True)
        for name, row in zip(names, rows, strict=True):
            cells = [
                f"{'-':>{_width(form)}}" if row[key] is None else format(row[key] * factor, form)
                for _, key, form, factor in columns
            ]
            console.print(f"{name:{width}}{''.join(cells)}  {MARKS[row['greedy']][0]}".rstrip(), soft_wrap=True)
    console.print()
    console.print(LEGEND, soft_wrap=True)
    found = {result["greedy"] for result in results}
    for verdict, meaning in MARKS.items():
        if verdict in found:
            console.print(": ".join(filter(None, meaning)), soft_wrap=True)
    for result in results:
        if result["compile_seconds"]:
            console.print(
                f"{result['provider']}, batch {result['batch_size']}: {result['compile_seconds']:.1f} s compiling, "
                "not counted",
                soft_wrap=True,
            )


def _width(form: str) -> int:
    """Of a column: "9.1f" is 9 wide."""
    return int(form[0])


def print_differences(
    console: Console, measurements: Sequence[Measurement], decode_text: Callable[[list[int]], str]
) -> bool:
    """A line for each provider that differs from plain greedy decoding; return whether rounding does not explain it."""
    for measured in measurements:
        if not measured.differences:
            continue
        worst = max(measured.differences, key=lambda difference: difference.logit_gap / difference.rounding_bound)
        console.print(
            f"{measured.provider}, batch {measured.batch_size}: {len(measured.differences)} tokens are not those of "
            f"plain greedy decoding. The worst: in row {worst.row}, {worst.describe(decode_text)}",
            soft_wrap=True,
        )
    return any(measured.greedy == "different" for measured in measurements)
