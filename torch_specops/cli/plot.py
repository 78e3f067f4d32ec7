"""Plots of results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ..plot import draw_acceptance
from .providers import ASSISTED, SPECULATIVE
from .results import Record, by_category, fastest, title_of

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
RATES = "acceptance_rate_per_position"


def plot_providers(results: Sequence[Record], title: str, file: Path) -> None:
    """Plot tokens per second: a panel for each temperature and batch size, with a bar for each provider. The last panel
    has the acceptance of drafts at each place."""
    from matplotlib.figure import Figure

    groups = [(where, list(rows)) for where, rows in groupby(results, title_of)]
    heights = [len(rows) for _, rows in groups]
    height = 0.8 + 0.4 * len(groups) + 0.3 * sum(heights)
    figure = Figure(figsize=(7.0, height + 3.0), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[height, 3.0])[:, 0]
    draw_acceptance(lower.subplots(), ((title_of(row), row[RATES]) for row in results))
    panels = upper.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (where, rows) in zip(panels, groups, strict=True):
        names = [row["provider"] for row in rows]
        colours = ["tab:blue" if name.startswith(SPECULATIVE) else "tab:gray" for name in names]
        bars = panel.barh(names, [row["tokens_per_second"] for row in rows], color=colours)
        panel.bar_label(bars, fmt="%.1f", padding=3)
        # Leave room for the numbers beside the bars.
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set_title(where, loc="left", fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("new tokens per second of the whole batch, prompts included")
    figure.savefig(file, dpi=150)


def plot_categories(records: Sequence[Record], title: str, file: Path) -> None:
    """Plot the speed relative to the fastest provider without a draft. There is a panel for each temperature, with a
    group of bars for each category and a bar for each batch size. A black line marks the fastest assisted generation.
    The panel at the right has the acceptance of drafts in the smallest batches, with a line for each category."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    temperatures, sizes, categories = (
        list(dict.fromkeys(record[key] for record in records)) for key in ("temperature", "batch_size", "category")
    )
    widths = max(5.0, 1.2 + 0.9 * len(categories)), 4.0
    figure = Figure(figsize=(sum(widths), 1.3 + 2.3 * len(temperatures)), layout="constrained")
    figure.suptitle(title, fontsize="medium", x=0.01, ha="left")
    both = figure.subplots(len(temperatures), 2, sharex="col", sharey="col", squeeze=False, width_ratios=widths)
    panels = both[:, 0]
    for panel, temperature in zip(both[:, 1], temperatures, strict=True):
        smallest = [each for each in records if (each["temperature"], each["batch_size"]) == (temperature, min(sizes))]
        draw_acceptance(panel, ((each["category"], each[RATES]) for each in smallest))
    width = 0.8 / len(sizes)
    legend = {}
    for temperature, size in dict.fromkeys((record["temperature"], record["batch_size"]) for record in records):
        panel, index = panels[temperatures.index(temperature)], sizes.index(size)
        panel.set_title(f"T = {temperature:g}", loc="left", fontsize="medium")
        same = (each for each in records if (each["temperature"], each["batch_size"]) == (temperature, size))
        for ways in by_category(same):
            specops, assisted = ways[-1], fastest(ways, (ASSISTED,))
            left = categories.index(specops["category"]) + index * width - 0.4
            colour = colormaps["viridis"]((index + 0.5) / len(sizes))
            bar = {"width": 0.9 * width, "align": "edge", "color": colour, "zorder": 2}
            legend[f"batch {size}"] = panel.bar(left, specops["speedup_over_undrafted"], **bar)
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
