"""Plots of what was decoded. matplotlib is imported when one is drawn: pip install 'torch_specops[bench]'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from .decode import Completion, GenerationOutput, RowStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["acceptance"]
Decoded = GenerationOutput | Completion


def acceptance(outputs: Decoded | Sequence[Decoded] | Mapping[str, Decoded | Sequence[Decoded]]) -> Figure:
    """Plot the share of drafts that were accepted, at each place of a draft in its step. A draft after a rejected one
    counts as verified and not accepted. Few at the last places: try a smaller `num_draft_tokens`.

    Args:
        outputs: an output, a completion, or a list of them, which are counted together. A mapping has a line for each
            of its names: categories of prompts, or drafts.

    Returns:
        A figure of matplotlib. A notebook shows it, and `figure.savefig("acceptance.png")` writes it.

    Raises:
        TypeError, ValueError: another type; an output without verified drafts.

    Examples:
        >>> import torch, torch_specops
        >>> from torch_specops.decode import RowStep
        >>> tokens, steps = torch.tensor([5, 6, 7, 8, 9]), [RowStep(1, 0, 2), RowStep(3, 2, 2)]
        >>> story = torch_specops.Completion(0, tokens, tokens[1:], None, seed=1, finish_reason="eos", steps=steps)
        >>> torch_specops.plot.acceptance({"story": story}).axes[0].lines[0].get_ydata().tolist()
        [0.5, 0.5]
    """
    groups: Mapping[str, Any] = outputs if isinstance(outputs, Mapping) else {"all": outputs}
    rates = [(name, _rates(_steps(group))) for name, group in groups.items()]
    without = [name for name, shares in rates if not shares]
    if without or not rates:
        raise ValueError(f"outputs: expected verified drafts, got none in {without}")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    # Without pyplot, which would keep every figure in memory, notebooks need this to show a figure.
    vars(figure)["_repr_png_"] = partial(_png, figure)
    draw_acceptance(figure.subplots(), rates)
    return figure


def draw_acceptance(panel: Any, rates: Iterable[tuple[str, Sequence[float]]]) -> None:
    """Draw a line for each name that has drafts: the share of accepted drafts at each place, from the first."""
    from matplotlib.ticker import MaxNLocator

    for name, shares in rates:
        if shares:
            panel.plot(range(1, len(shares) + 1), shares, ".-", label=name)
    panel.set(ylim=(0, 1.05), xlabel="place of a draft in its step", ylabel="share accepted")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.spines[["top", "right"]].set_visible(False)
    if panel.lines:
        panel.legend(frameon=False, fontsize="small", ncols=1 + (len(panel.lines) > 6))


def _png(figure: Figure) -> bytes:
    figure.savefig(file := BytesIO(), format="png")
    return file.getvalue()


def _steps(outputs: Any) -> list[RowStep]:
    if isinstance(outputs, GenerationOutput):
        return [step for row in outputs.steps for step in row]
    if isinstance(outputs, (list, tuple)):
        return [step for each in outputs for step in _steps(each)]
    if not isinstance(outputs, Completion):
        raise TypeError(f"outputs: expected outputs, completions or lists of them, got {type(outputs)}")
    return outputs.steps


def _rates(steps: list[RowStep]) -> list[float]:
    places = range(max((step.num_proposed for step in steps), default=0))
    return [
        sum(step.num_accepted > place for step in steps) / sum(step.num_proposed > place for step in steps)
        for place in places
    ]
