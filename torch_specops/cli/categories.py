"""Results by category of prompts, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from .providers import ASSISTED, PLAIN
from .results import UNDRAFTED, print_compile_seconds, table_of, title_of

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# The positions of drafts whose acceptance is shown. With more of them a table may be wider than 80.
PLACES = (1, 2, 4, 8)
NAME_WIDTH = 15
LEGEND = """undrafted, asst, specops: new tokens per second, prompts included
undrafted: the faster of transformers generate (t) and specops, no draft (s)
asst: the fastest assisted generation of transformers; /best: over undrafted
len: tokens per step; 1, 2, ...: percent accepted of the 1st, 2nd, ... drafts"""


def print_categories(
    console: Console, results: Sequence[dict[str, Any]], totals: Sequence[dict[str, Any]], num_draft_tokens: int
) -> None:
    """A table for each temperature and batch size with a row for each category, and what the columns mean."""
    places = [place for place in PLACES if place <= num_draft_tokens]
    for title, group in groupby(results, title_of):
        headers = "category", "undrafted", "asst", "len", "specops", "/best", "len", *map(str, places)
        table = table_of(*headers, gap=1)
        for ways in [*_by_category(group), *_by_category(each for each in totals if title_of(each) == title)]:
            table.add_row(*_cells(ways, places))
        console.print(f"\n{title}", style="bold", soft_wrap=True)
        console.print(table)
    console.print()
    console.print(LEGEND, soft_wrap=True)
    if {result["greedy"] for result in results} - {None} == {"identical"}:
        console.print("outputs at T = 0: identical to plain greedy decoding", soft_wrap=True)
    print_compile_seconds(console, totals or results)


def _by_category(results: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(results, lambda result: result["category"])]


def _fastest(ways: Sequence[dict[str, Any]], names: str | tuple[str, ...]) -> dict[str, Any] | None:
    found = [way for way in ways if way["provider"].startswith(names)]
    return max(found, key=lambda way: way["tokens_per_second"], default=None)


def _cells(ways: Sequence[dict[str, Any]], places: Sequence[int]) -> list[str]:
    # This package with its draft is the last of the providers.
    undrafted, assisted, own = _fastest(ways, UNDRAFTED), _fastest(ways, ASSISTED), ways[-1]
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
    ]


def _speed_and_length(way: dict[str, Any] | None) -> tuple[str, str]:
    if way is None:
        return "-", "-"
    length = way["mean_acceptance_length"]
    return f"{way['tokens_per_second']:.1f}", "-" if length is None else f"{length:.2f}"


def plot_categories(results: Sequence[dict[str, Any]], totals: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot the speed over the fastest way without a draft: a panel for each temperature, with a group of bars for each
    category and a bar for each batch size. A black line marks the fastest assisted generation."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    records = [*results, *totals]
    temperatures, sizes, categories = (
        list(dict.fromkeys(record[key] for record in records)) for key in ("temperature", "batch_size", "category")
    )
    shape = max(5.0, 1.2 + 0.9 * len(categories)), 0.9 + 2.3 * len(temperatures)
    figure = Figure(figsize=shape, layout="constrained")
    panels = figure.subplots(len(temperatures), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    width = 0.8 / len(sizes)
    legend = {}
    for temperature, size in dict.fromkeys((record["temperature"], record["batch_size"]) for record in records):
        panel, index = panels[temperatures.index(temperature)], sizes.index(size)
        panel.set_title(f"T = {temperature:g}", loc="left", fontsize="medium")
        same = (each for each in records if (each["temperature"], each["batch_size"]) == (temperature, size))
        for ways in _by_category(same):
            own, assisted = ways[-1], _fastest(ways, ASSISTED)
            left = categories.index(own["category"]) + index * width - 0.4
            colour = colormaps["viridis"]((index + 0.5) / len(sizes))
            bar = {"width": 0.9 * width, "align": "edge", "color": colour, "zorder": 2}
            legend[f"batch {size}"] = panel.bar(left, own["speedup_over_undrafted"], **bar)
            if assisted is not None:
                height = assisted["speedup_over_undrafted"]
                line = panel.hlines(height, left, left + 0.9 * width, color="black", linewidth=2, zorder=3)
                legend["transformers assisted"] = line
    for panel in panels:
        panel.axhline(1.0, color="grey", linewidth=1, zorder=1)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    figure.supylabel("speed (fastest without a draft = 1)", fontsize="medium")
    figure.legend(list(legend.values()), list(legend), loc="outside upper right", ncols=len(legend), frameon=False)
    figure.savefig(file, dpi=150)
