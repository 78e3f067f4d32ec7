"""Schedules choose how many tokens the next step drafts: a constant, Hugging Face's heuristic, or what has paid so far.
They run on the host, between two steps.
"""

from __future__ import annotations

from .auto import Auto
from .base import NextStep, PastStep, Schedule
from .simple import Constant, Heuristic

__all__ = ["Auto", "Constant", "Heuristic", "NextStep", "PastStep", "Schedule", "as_schedule"]


def as_schedule(
    schedule: str | Schedule | None, num_draft_tokens: int, limit: int | None = None, deterministic: bool = False
) -> Schedule:
    """The schedule itself, or a new one: "constant" (K), "heuristic" (K at first) or "auto" (K at most); None = "auto"
    for deterministic drafts, with two graphs in compiled steps, otherwise "constant". A ValueError for another name,
    and for more drafts than the `limit` of the source."""
    if isinstance(schedule, Schedule):
        chosen = schedule
    elif schedule is None and deterministic:
        # Every further graph takes seconds to compile.
        chosen = Auto(num_draft_tokens, buckets=(0, num_draft_tokens))
    elif schedule in (None, "constant"):
        chosen = Constant(num_draft_tokens)
    elif schedule == "heuristic":
        chosen = Heuristic(num_draft_tokens, maximum=max(min(limit or 20, 20), num_draft_tokens))
    elif schedule == "auto":
        chosen = Auto(num_draft_tokens)
    else:
        raise ValueError(f"schedule: expected 'auto', 'constant', 'heuristic' or a Schedule, got {schedule!r}")
    if limit is not None and max(chosen.buckets) > limit:
        name = "schedule" if chosen is schedule else "num_draft_tokens"
        raise ValueError(f"{name}: this draft has at most {limit} tokens per step, got {max(chosen.buckets)}")
    return chosen
