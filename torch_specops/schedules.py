"""How many tokens to draft in the next step: a constant, Hugging Face's heuristic, or the optimum of Leviathan et al.
2023 (arXiv 2211.17192), section 3.5. A schedule runs on the host, between two steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from .checks import check_int, check_number

__all__ = ["Constant", "Heuristic", "Optimal", "Schedule", "Trim", "as_schedule"]

# From the number of drafts of each active row to the most that are verified in any row.
Trim = Callable[[Sequence[int]], int]

# Each value needs a compiled graph of its own, so there are few, and they are dense where one draft matters most.
BUCKETS = (1, 2, 3, 5, 8, 12, 20)
# `Optimal` halves the weight of a step every HALF_LIFE steps: with one draft tried per step, the standard error of
# alpha is at most 0.04. Without drafts alpha is not measured, so every EXPLORE_EVERY-th step drafts all the same, which
# costs at most bucket * c / EXPLORE_EVERY of the time.
HALF_LIFE = 50.0
EXPLORE_EVERY = 16
# alpha before the first step, and how many drafts it counts for.
PRIOR, PRIOR_WEIGHT = 0.7, 10.0


class Schedule(ABC):
    """Chooses K, the number of drafts per sequence, for each step of a batch.

    Attributes:
        buckets: the values of K that compiled steps have, ascending, each with a graph of its own. For another value, a
            compiled step has the largest bucket below it, or the smallest one. No value exceeds the largest.
    """

    buckets: tuple[int, ...]

    @abstractmethod
    def first(self) -> int:
        """K of a batch's first step, which depends on earlier batches until `reset`."""

    @abstractmethod
    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        """Learn from a finished step, and choose K for the next step to begin. Called once per step.

        The finished step need not be the newest: a loop that never waits reports each step late by one.

        Args:
            num_proposed: drafts of each active row, without padding; a row with 0 drafts is ignored.
            num_accepted: how many of them were accepted.

        Raises:
            TypeError: a count that is no int.
            ValueError: lists of unequal length, or a row with fewer than 0 or more accepted than proposed.
        """

    def trim(self, num_proposed: Sequence[int]) -> int:
        """The most drafts of a row to verify. Called in eager steps on a CPU, for drafts that cost nothing and are
        known before the target reads them (prompt lookup, n-grams). By default, all of them.

        Args:
            num_proposed: drafts of each active row, without padding.
        """
        return max(num_proposed, default=0)

    def trim_refilled(self, num_proposed: Sequence[int]) -> int:
        """`trim` for a batch whose ended rows take new requests, so that no row waits for another one. By default the
        same as `trim`."""
        return self.trim(num_proposed)

    @abstractmethod
    def reset(self) -> None:
        """Forget every step reported."""


def as_schedule(schedule: str | Schedule, num_draft_tokens: int, limit: int | None = None) -> Schedule:
    """The schedule itself, or a new one: "constant" (K), "heuristic" (K at first) or "optimal" (K at most). A
    ValueError for another name, and for more drafts than the `limit` of the source."""
    if isinstance(schedule, Schedule):
        chosen = schedule
    elif schedule == "constant":
        chosen = Constant(num_draft_tokens)
    elif schedule == "heuristic":
        chosen = Heuristic(num_draft_tokens, maximum=max(min(limit or 20, 20), num_draft_tokens))
    elif schedule == "optimal":
        # The decoder measures the cost ratio and replaces this one.
        chosen = Optimal(0.1, buckets=(0, *_buckets_up_to(num_draft_tokens)))
    else:
        raise ValueError(f"schedule: expected 'constant', 'heuristic', 'optimal' or a Schedule, got {schedule!r}")
    if limit is not None and max(chosen.buckets) > limit:
        name = "schedule" if chosen is schedule else "num_draft_tokens"
        raise ValueError(f"{name}: this draft has at most {limit} tokens per step, got {max(chosen.buckets)}")
    return chosen


class Constant(Schedule):
    """The same K in every step.

    Args:
        num_draft_tokens: K >= 0.

    Examples:
        >>> from torch_specops.schedules import Constant
        >>> Constant(4).next([4, 4], [0, 2])
        4
    """

    def __init__(self, num_draft_tokens: int) -> None:
        check_int("num_draft_tokens", num_draft_tokens, 0)
        self.buckets = (num_draft_tokens,)

    def first(self) -> int:
        return self.buckets[0]

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        _check_counts(num_proposed, num_accepted)
        return self.buckets[0]

    def reset(self) -> None:
        pass


class Heuristic(Schedule):
    """Hugging Face's rule, which Wagner et al. 2024 (arXiv 2406.11016) use too: 2 more drafts when every draft was
    accepted, otherwise 1 fewer, at least 1.

    In a batch, all drafts of all rows must be accepted; a step without drafts changes nothing. Eager steps have any K
    up to `maximum`. Compiled steps need a graph for each K, and have the largest of 1, 2, 3, 5, 8, 12, 20 that does not
    exceed the value of the rule. Every batch begins anew, like "heuristic_transient" of transformers.

    Args:
        num_draft_tokens: the first K, from 1 to `maximum`.
        maximum: the largest K; Hugging Face has none.

    Examples:
        >>> from torch_specops.schedules import Heuristic
        >>> schedule = Heuristic()
        >>> schedule.first(), schedule.next([5], [5]), schedule.next([7], [7]), schedule.next([9], [3])
        (5, 7, 9, 8)
    """

    def __init__(self, num_draft_tokens: int = 5, maximum: int = 20) -> None:
        check_int("maximum", maximum, 1)
        self.buckets = _buckets_up_to(maximum)
        check_int("num_draft_tokens", num_draft_tokens, 1)
        if num_draft_tokens > maximum:
            raise ValueError(f"num_draft_tokens: expected a number up to maximum = {maximum}, got {num_draft_tokens}")
        self.maximum = maximum
        self._start = self._value = num_draft_tokens

    def first(self) -> int:
        return self._value

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        _check_counts(num_proposed, num_accepted)
        if any(num_proposed):
            change = 2 if list(num_proposed) == list(num_accepted) else -1
            self._value = min(max(self._value + change, 1), self.maximum)
        return self._value

    def reset(self) -> None:
        self._value = self._start


class Optimal(Schedule):
    """The bucket K with the largest walltime factor (1 + alpha + .. + alpha ** K) / (K c + 1) at the acceptance rate
    alpha measured so far (Leviathan et al. 2023, theorem 3.8 and section 3.5); the smallest of equals.

    alpha is accepted / (accepted + rejections). A walk ends at its first rejection, so a row whose drafts were not all
    accepted had exactly one rejection, and the drafts after it were not tried. Old steps lose their weight, so that
    alpha follows the text.

    Drafting pays if alpha > c (corollary 3.9, for K = 1). If it does not, K is 0 if 0 is a bucket; now and then a step
    drafts the smallest other bucket, because without drafts alpha is not measured.

    The theorem is about one sequence. A batch is as slow as its slowest row, so `trim` chooses K by the row with the
    fewest drafts; `trim_refilled` chooses it by the mean of all rows. Both choose 0 only if 0 is a bucket.

    Args:
        cost_ratio: c >= 0, the time of one draft forward / the time of one target forward.
        buckets: at least one above 0; with 0, a step may have no drafts.

    Attributes:
        alpha: the measured acceptance rate, in [0, 1].

    Examples:
        >>> from torch_specops.schedules import Optimal
        >>> schedule = Optimal(cost_ratio=0.1)
        >>> schedule.first()
        5
        >>> [schedule.next([5, 5], [5, 5]) for _ in range(5)]
        [8, 8, 12, 12, 12]
    """

    def __init__(self, cost_ratio: float, buckets: Sequence[int] = (0, *BUCKETS)) -> None:
        check_number("cost_ratio", cost_ratio)
        if not 0 <= cost_ratio < math.inf:
            raise ValueError(f"cost_ratio: expected a finite number >= 0, got {cost_ratio}")
        for bucket in buckets:
            check_int("buckets", bucket, 0)
        self.buckets = tuple(buckets)
        if not buckets or any(low >= high for low, high in pairwise(buckets)):
            raise ValueError(f"buckets: expected ascending numbers, at least one, got {self.buckets}")
        if self.buckets[-1] == 0:
            raise ValueError("buckets: expected at least one number above 0, got (0,); that is Constant(0)")
        self.cost_ratio = cost_ratio
        self._fewest = next(bucket for bucket in self.buckets if bucket > 0)
        self.reset()

    def reset(self) -> None:
        self.alpha, self._weight = PRIOR, PRIOR_WEIGHT
        self._steps_without_drafts = self._steps_trimmed_to_none = 0
        self._explores = False

    def first(self) -> int:
        return self._best(self.buckets)

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        _check_counts(num_proposed, num_accepted)
        accepted = sum(num_accepted)
        rejections = sum(kept < proposed for proposed, kept in zip(num_proposed, num_accepted, strict=True))
        remembered = 0.5 ** (1 / HALF_LIFE) * self._weight
        self._weight = remembered + accepted + rejections
        # After many steps without drafts the weight may underflow to 0; alpha then does not change.
        if self._weight > 0:
            self.alpha = (remembered * self.alpha + accepted) / self._weight

        best = self._best(self.buckets)
        self._steps_without_drafts = self._steps_without_drafts + 1 if best == 0 else 0
        self._explores = self._steps_without_drafts == EXPLORE_EVERY
        if not self._explores:
            return best
        self._steps_without_drafts = 0
        return self._fewest

    def trim(self, num_proposed: Sequence[int]) -> int:
        return self._trim(num_proposed, min)

    def trim_refilled(self, num_proposed: Sequence[int]) -> int:
        return self._trim(num_proposed, fmean)

    def _trim(self, num_proposed: Sequence[int], together: Callable[[Sequence[float]], float]) -> int:
        """The number of drafts with the most expected tokens per time, where `together` combines those of the rows."""
        most = max(num_proposed, default=0)
        if self.buckets[0] > 0 or most == 0 or self._explores:
            return most
        expected = self._expected(most)
        speeds = [
            together([expected[min(count, own)] for own in num_proposed]) / self._cost(count)
            for count in range(most + 1)
        ]
        best = speeds.index(max(speeds))
        self._steps_trimmed_to_none = self._steps_trimmed_to_none + 1 if best == 0 else 0
        if self._steps_trimmed_to_none < EXPLORE_EVERY:
            return best
        self._steps_trimmed_to_none = 0
        return min(self._fewest, most)

    def _best(self, counts: Sequence[int]) -> int:
        """The best of ascending numbers of drafts; the smallest of equals."""
        expected = self._expected(counts[-1])
        return max(counts, key=lambda count: expected[count] / self._cost(count))

    def _expected(self, most: int) -> list[float]:
        """`analysis.expected_tokens_per_step(alpha, K)` for K from 0 to `most`, as running sums."""
        return list(accumulate(self.alpha**count for count in range(most + 1)))

    def _cost(self, count: int) -> float:
        """The time of a step with `count` drafts, in units of a step without drafts."""
        return count * self.cost_ratio + 1


def _buckets_up_to(maximum: int) -> tuple[int, ...]:
    return (*(bucket for bucket in BUCKETS if bucket < maximum), maximum)


def _check_counts(num_proposed: Sequence[int], num_accepted: Sequence[int]) -> None:
    if len(num_proposed) != len(num_accepted):
        raise ValueError(
            f"num_accepted: expected one count per row, {len(num_proposed)} as num_proposed has, "
            f"got {len(num_accepted)}"
        )
    for proposed, accepted in zip(num_proposed, num_accepted, strict=True):
        if type(proposed) is type(accepted) is int and 0 <= accepted <= proposed:
            continue
        check_int("num_proposed", proposed, 0)
        check_int("num_accepted", accepted, 0)
        if accepted > proposed:
            raise ValueError(f"num_accepted: expected at most num_proposed = {proposed}, got {accepted}")
