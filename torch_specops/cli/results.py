"""Measurements as records for JSON, as tables, and as sentences about what differs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from .comparison import GENERATE, Measurement

# (header, key of a result, format, factor); the last ones only where there is room.
COLUMNS = (
    ("tokens/s", "tokens_per_second", ".1f", 1),
    ("speedup", "speedup", ".2f", 1),
    ("tokens\nper step", "mean_acceptance_length", ".2f", 1),
    ("drafts\naccepted", "acceptance_rate", ".1%", 1),
)
MORE_COLUMNS = (
    ("outside\nms/step", "outside_seconds_per_step", ".2f", 1e3),
    ("compiling\ns", "compile_seconds", ".1f", 1),
    ("memory\nMB", "peak_memory_bytes", ".0f", 1e-6),
)
WIDE = 120


def as_results(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Records of what was timed, each with its speedup over transformers generate at the same batch size."""
    timed = [
        asdict(measured) | {"tokens_per_second": measured.new_tokens / statistics.median(measured.seconds)}
        for measured in measurements
        if measured.seconds
    ]
    plain = {result["batch_size"]: result["tokens_per_second"] for result in timed if result["provider"] == GENERATE}
    for result in timed:
        # In an interrupted round it may not have had its turn.
        base = plain.get(result["batch_size"])
        result["speedup"] = result["tokens_per_second"] / base if base else None
    return timed


def print_tables(console: Console, results: Sequence[dict[str, Any]]) -> None:
    """A table for each batch size."""
    columns = COLUMNS + MORE_COLUMNS if console.width >= WIDE else COLUMNS
    for batch_size, group in groupby(results, lambda result: result["batch_size"]):
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        table.add_column(f"\nbatch {batch_size}", no_wrap=True)
        for header, *_ in columns:
            table.add_column(header, justify="right", vertical="bottom")
        table.add_column("\noutput")
        for result in group:
            cells = [format(result[key] * factor, form) if result[key] else "-" for _, key, form, factor in columns]
            table.add_row(result["provider"], *cells, result["greedy"] or "not compared")
        console.print()
        console.print(table)


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
