"""Results by script and cell, and Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["NOT_RUN", "Found", "less", "load", "markdown", "span"]

RESULTS = Path(__file__).resolve().parents[1] / "results" / "evidence"
SCRIPTS = (
    "leviathan_theory",
    "leviathan_measured",
    "leviathan_oracle",
    "wagner_text",
    "wagner_asr",
    "wagner_memory",
    "chen",
)
NOT_RUN = "not run"
# By script, then by key, what a cell returned; and under "seconds", by script, what each of its cells took.
Found: TypeAlias = "dict[str, dict[str, Any]]"


def load(directory: Path = RESULTS) -> Found:
    """A script that was never run has no cells."""
    found: Found = {"seconds": {}}
    for script in SCRIPTS:
        path = directory / f"{script}.json"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
        found[script] = {key: cell["result"] for key, cell in cells.items()}
        found["seconds"][script] = [cell["seconds"] for cell in cells.values()]
    return found


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def less(own: float, baseline: float) -> str:
    """By how many percent less than the baseline; negative where it is more."""
    return f"{100 * (1 - own / baseline):.1f}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """ "low to high", or the number if all are the same."""
    numbers = sorted(values)
    if not numbers:
        return NOT_RUN
    low, high = f"{numbers[0]:.{digits}f}", f"{numbers[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"
