"""Schedules that measure no times: a constant number of drafts, and Hugging Face's rule."""

from __future__ import annotations

from ..checks import check_int
from .base import NextStep, PastStep, Schedule, buckets_up_to


class Constant(Schedule):
    """The same K in every step.

    Args:
        num_draft_tokens: the number of drafts, K >= 0.

    Examples:
        >>> from torch_specops.schedules import Constant, NextStep
        >>> Constant(4).plan(NextStep(texts=[0, 1], rooms=[9, 2], left=[10, 3], num_rows=2))
        [4, 2]
    """

    def __init__(self, num_draft_tokens: int) -> None:
        self.buckets = (check_int("num_draft_tokens", num_draft_tokens, 0),)

    def plan(self, step: NextStep) -> list[int]:
        return step.at_most(self.buckets[0])

    def learn(self, step: PastStep) -> None:
        pass

    def reset(self) -> None:
        pass


class Heuristic(Schedule):
    """Hugging Face's rule, which Wagner et al. 2024 (arXiv 2406.11016) use too: 2 more drafts when every draft was
    accepted, otherwise 1 fewer, at least 1.

    In a batch, K grows only if all drafts of all rows were accepted. A step without drafts changes nothing. Eager steps
    have any K up to `maximum`. Compiled steps need a graph for each K, so the rule's value is rounded down to 1, 2, 3,
    5, 8, 12 or 20. Every batch starts again from `num_draft_tokens`, like "heuristic_transient" of transformers.

    Args:
        num_draft_tokens: the first K, from 1 to `maximum`.
        maximum: the largest K. Hugging Face's rule has no maximum.
    """

    def __init__(self, num_draft_tokens: int = 5, maximum: int = 20) -> None:
        maximum = check_int("maximum", maximum, 1)
        self.buckets = buckets_up_to(maximum)
        num_draft_tokens = check_int("num_draft_tokens", num_draft_tokens, 1)
        if num_draft_tokens > maximum:
            raise ValueError(f"num_draft_tokens: expected a number up to maximum = {maximum}, got {num_draft_tokens}")
        self.maximum = maximum
        self._start = self._value = num_draft_tokens

    def plan(self, step: NextStep) -> list[int]:
        return step.at_most(self._value)

    def learn(self, step: PastStep) -> None:
        if any(step.proposed):
            change = 2 if list(step.proposed) == list(step.accepted) else -1
            self._value = min(max(self._value + change, 1), self.maximum)

    def reset(self) -> None:
        self._value = self._start
