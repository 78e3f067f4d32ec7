"""Plots of results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from .providers import ASSISTED, SPECULATIVE
from .results import Record, by_category, fastest, title_of

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def plot_providers(results: Sequence[Record], file: Path) -> None:
    """Plot tokens per second: a panel for each temperature and batch size, with a bar for each provider."""
    from matplotlib.figure import Figure

    groups = [(title, list(rows)) for title, rows in groupby(results, title_of)]
    heights = [len(rows) for _, rows in groups]
    figure = Figure(figsize=(7.0, 0.5 + 0.4 * len(groups) + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, rows) in zip(panels, groups, strict=True):
        names = [row["provider"] for row in rows]
        colours = ["tab:blue" if name.startswith(SPECULATIVE) else "tab:gray" for name in names]
        bars = panel.barh(names, [row["tokens_per_second"] for row in rows], color=colours)
        panel.bar_label(bars, fmt="%.1f", padding=3)
        # Leave room for the numbers beside the bars.
        panel.margins(x=0.15)
        panel.invert_yaxis()
        panel.set_title(title, loc="left", fontsize="medium")
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("new tokens per second of the whole batch, prompts included")
    figure.savefig(file, dpi=150)


def plot_categories(records: Sequence[Record], file: Path) -> None:
    """Plot the speed relative to the fastest provider without a draft. There is a panel for each temperature, with a
    group of bars for each category and a bar for each batch size. A black line marks the fastest assisted
    generation."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

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
