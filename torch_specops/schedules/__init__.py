"""Schedules choose how many tokens the next step drafts: a constant number, the number of Hugging Face's heuristic, or
as many as have paid so far. Schedules run on the host, between two steps.
"""

from __future__ import annotations

from .auto import Auto
from .base import NextStep, PastStep, Schedule
from .simple import Constant, Heuristic

__all__ = ["Auto", "Constant", "Heuristic", "NextStep", "PastStep", "Schedule", "as_schedule"]


def as_schedule(
    schedule: str | Schedule | None, num_draft_tokens: int, limit: int | None = None, deterministic: bool = False
) -> Schedule:
    """Return the schedule, or make one from its name: "constant" (always K), "heuristic" (K at first) or "auto" (at
    most K). None means "constant", or for deterministic drafts "auto" with two buckets. Raises ValueError for another
    name, and for more drafts than the `limit` of the source."""
    if isinstance(schedule, Schedule):
        chosen = schedule
    elif schedule is None and deterministic:
        # Use two buckets only, because each bucket needs a graph that takes seconds to compile.
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
