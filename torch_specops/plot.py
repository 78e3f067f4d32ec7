"""Plots of what was decoded. matplotlib is imported when one is drawn: pip install 'torch_specops[bench]'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from .decode import Acceptance, Completion, GenerationOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["acceptance"]

Decoded = GenerationOutput | Completion | Acceptance
Group = Decoded | Sequence[Decoded]


def acceptance(outputs: Group | Mapping[str, Group]) -> Figure:
    """Plot the share of drafts that were accepted, at each place of a draft in its step. A draft after a rejected one
    counts as verified and not accepted. If few drafts are accepted at the last places, a smaller `num_draft_tokens`
    would do.

    Args:
        outputs: what `generate` or `generate_many` returned, or an `Acceptance` (`output.stats` and each of
            `output.acceptance` are some); a list of these counts them together. A mapping has a line for each of its
            names: categories of prompts, or drafts.

    Returns:
        A figure of matplotlib. A notebook shows it, and `figure.savefig("acceptance.png")` writes it.

    Raises:
        TypeError: another type.
        ValueError: no drafts were verified under one of the names.
        ModuleNotFoundError: matplotlib is not installed.

    Examples:
        >>> from torch_specops import plot
        >>> from torch_specops.decode import Acceptance
        >>> code = Acceptance.of_steps([(3, 2, 2), (2, 1, 2)], num_tokens=5)
        >>> story = Acceptance.of_steps([(1, 0, 2), (3, 2, 2)], num_tokens=4)
        >>> figure = plot.acceptance({"code": code, "story": story})
        >>> [(line.get_label(), line.get_ydata().tolist()) for line in figure.axes[0].lines]
        [('code', [1.0, 0.5]), ('story', [0.5, 0.5])]
    """
    groups: Mapping[str, Any] = outputs if isinstance(outputs, Mapping) else {"": outputs}
    rates = {name: _rates(name, group) for name, group in groups.items()}
    if not rates:
        raise ValueError("outputs: expected verified drafts, got none")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    # Without pyplot, which would keep every figure in memory, notebooks need this to show a figure.
    vars(figure)["_repr_png_"] = partial(_png, figure)
    draw_acceptance(figure.subplots(), rates)
    return figure


def draw_acceptance(panel: Axes, rates: Mapping[str, Sequence[float]]) -> None:
    """Draw a line for each name: the share of accepted drafts at each place, from the first."""
    from matplotlib.ticker import MaxNLocator

    for name, shares in rates.items():
        panel.plot(range(1, len(shares) + 1), shares, marker=".", label=name)
    panel.set_ylim(0, 1.05)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("place of a draft in its step")
    panel.set_ylabel("share accepted")
    panel.spines[["top", "right"]].set_visible(False)
    if any(rates):
        panel.legend(frameon=False, fontsize="small", ncols=1 + (len(rates) > 6))
    if not rates:
        panel.text(0.5, 0.5, "no drafts", ha="center")


def _png(figure: Figure) -> bytes:
    figure.savefig(file := BytesIO(), format="png")
    return file.getvalue()


def _rates(name: str, group: Any) -> list[float]:
    counts = []
    for each in group if isinstance(group, (list, tuple)) else [group]:
        of = {GenerationOutput: "stats", Completion: "acceptance"}.get(type(each))
        counts.append(each if of is None else getattr(each, of))
        if not isinstance(counts[-1], Acceptance):
            raise TypeError(f"outputs: expected outputs, completions or their counts, got {type(each)}")
    proposed, accepted = (
        [sum(at) for at in zip_longest(*(getattr(count, key) for count in counts), fillvalue=0)]
        for key in ("proposed_at", "accepted_at")
    )
    if not proposed:
        raise ValueError(f"outputs: expected verified drafts, got none{f' in {name!r}' if name else ''}")
    return [n / of for n, of in zip(accepted, proposed, strict=True)]
