"""Results by category of prompts, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console

from .providers import ASSISTED, PLAIN
from .results import MARKS, UNDRAFTED, print_whole, table_of, title_of, worst_verdict

# The positions of drafts whose acceptance is shown. With more of them a table may be wider than 80.
PLACES = (1, 2, 4, 8)
NAME_WIDTH = 15
CATEGORIES_LEGEND = """undrafted, asst, specops: new tokens per second, prompts included
undrafted: the faster of transformers generate (t) and specops, no draft (s)
asst: the fastest assisted generation of transformers; /best: over undrafted
len: tokens per step; 1, 2, ...: percent accepted of the 1st, 2nd, ... drafts"""


def print_categories(console: Console, results: Sequence[dict[str, Any]], totals: Sequence[dict[str, Any]]) -> None:
    """The table of one temperature and batch size, with a row for each category."""
    num_drafted = max(len(result["acceptance_rate_per_position"]) for result in results)
    places = [place for place in PLACES if place <= num_drafted]
    headers = "category", "undrafted", "asst", "len", "specops", "/best", "len", *map(str, places), ""
    table = table_of(*headers, gap=1)
    for ways in [*by_category(results), *by_category(totals)]:
        table.add_row(*_cells(ways, places))
    console.print(f"\n{title_of(results[0])}", style="bold", soft_wrap=True)
    print_whole(console, table)


def by_category(results: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(results, lambda result: result["category"])]


def fastest(ways: Sequence[dict[str, Any]], names: str | tuple[str, ...]) -> dict[str, Any] | None:
    found = [way for way in ways if way["provider"].startswith(names)]
    return max(found, key=lambda way: way["tokens_per_second"], default=None)


def _cells(ways: Sequence[dict[str, Any]], places: Sequence[int]) -> list[str]:
    # This package with its draft is the last of the providers.
    undrafted, assisted, own = fastest(ways, UNDRAFTED), fastest(ways, ASSISTED), ways[-1]
    assert undrafted is not None
    name, letter = own["category"], "s" if undrafted["provider"].startswith(PLAIN) else "t"
    (speed, length), rates = _speed_and_length(own), own["acceptance_rate_per_position"]
    return [
        name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 2] + "..",
        f"{undrafted['tokens_per_second']:.1f} {letter}",
        *_speed_and_length(assisted),
        speed,
        f"{own['speedup_over_undrafted']:.2f}",
        length,
        *(f"{100 * rates[place - 1]:.0f}" if place <= len(rates) else "-" for place in places),
        MARKS[worst_verdict(way["greedy"] for way in ways)][0],
    ]


def _speed_and_length(way: dict[str, Any] | None) -> tuple[str, str]:
    if way is None:
        return "-", "-"
    length = way["mean_acceptance_length"]
    return f"{way['tokens_per_second']:.1f}", "-" if length is None else f"{length:.2f}"
