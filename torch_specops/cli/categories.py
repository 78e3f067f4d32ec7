"""Results by category of prompts, as tables and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from .comparison import ASSISTED, PLAIN, SPECULATIVE
from .results import UNDRAFTED, print_compile_seconds, title_of

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# The positions of drafts whose acceptance is shown. With four of them a table is 78 wide.
PLACES = (1, 2, 4, 8)
NAME_WIDTH = 15
HEADER = f"{'category':{NAME_WIDTH}}  undrafted     asst   len  specops /best   len"
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
        console.print(f"\n{title}", style="bold", soft_wrap=True)
        console.print(HEADER + "".join(f"{place:4}" for place in places), style="bold", soft_wrap=True)
        for ways in [*_by_category(group), *_by_category(each for each in totals if title_of(each) == title)]:
            console.print(_row(ways, places), soft_wrap=True)
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


def _drafted(ways: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(way for way in reversed(ways) if way["provider"].startswith(SPECULATIVE))


def _row(ways: Sequence[dict[str, Any]], places: Sequence[int]) -> str:
    undrafted, assisted, own = _fastest(ways, UNDRAFTED), _fastest(ways, ASSISTED), _drafted(ways)
    assert undrafted is not None
    letter = "s" if undrafted["provider"].startswith(PLAIN) else "t"
    name = own["category"]
    cells = [
        name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 2] + "..",
        f"{_speed(undrafted):>9} {letter}",
        f"{_speed(assisted):>9}{_length(assisted):>6}",
        f"{_speed(own):>9}{own['speedup_over_undrafted']:6.2f}{_length(own):>6}",
    ]
    return f"{cells[0]:{NAME_WIDTH}}{''.join(cells[1:])}{''.join(_percent(own, place) for place in places)}"


def _speed(way: dict[str, Any] | None) -> str:
    return "-" if way is None else f"{way['tokens_per_second']:.1f}"


def _length(way: dict[str, Any] | None) -> str:
    length = None if way is None else way["mean_acceptance_length"]
    return "-" if length is None else f"{length:.2f}"


def _percent(way: dict[str, Any], place: int) -> str:
    rates = way["acceptance_rate_per_position"]
    return f"{100 * rates[place - 1]:4.0f}" if place <= len(rates) else "   -"


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
            own, assisted = _drafted(ways), _fastest(ways, ASSISTED)
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
