"""How many tokens to draft in the next step: a constant, Hugging Face's heuristic, or the optimum of Leviathan et al.
2023 (arXiv 2211.17192), section 3.5. Plain Python: a schedule runs on the host, between two steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["Constant", "Heuristic", "Optimal", "Schedule", "expected_tokens_per_step", "walltime_factor"]

# Each value is one compiled graph, so there are few of them, dense where one draft more or less matters most.
BUCKETS = (1, 2, 3, 5, 8, 12, 20)


def expected_tokens_per_step(alpha: float, num_draft_tokens: int) -> float:
    """Expected number of tokens that one step emits (Leviathan et al. 2023, equation 1).

    (1 - alpha ** (K + 1)) / (1 - alpha), and K + 1, its limit, at alpha = 1. Assumes that drafts are accepted
    independently and with the same probability.

    Args:
        alpha: the probability in [0, 1] that a draft which was reached is accepted.
        num_draft_tokens: K >= 0.

    Raises:
        TypeError: an argument that is no number, or a K that is no int.
        ValueError: a number out of range.

    Example:
        >>> from torch_specops.schedules import expected_tokens_per_step
        >>> round(expected_tokens_per_step(0.8, 5), 4)
        3.6893
    """
    _check_alpha("alpha", alpha)
    _check_int("num_draft_tokens", num_draft_tokens, least=0)
    # The sum itself: its closed form is 0 / 0 at alpha = 1 and cancels near it.
    return math.fsum(alpha**i for i in range(num_draft_tokens + 1))


def walltime_factor(alpha: float, cost_ratio: float, num_draft_tokens: int) -> float:
    """Expected speed relative to decoding without drafts (Leviathan et al. 2023, theorem 3.8).

    (1 - alpha ** (K + 1)) / ((1 - alpha) (K c + 1)). Assumes, beside what `expected_tokens_per_step` does, that the
    target reads K + 1 tokens in the time of one.

    Args:
        alpha: the probability in [0, 1] that a draft which was reached is accepted.
        cost_ratio: c >= 0, the time of one draft forward / the time of one target forward.
        num_draft_tokens: K >= 0.

    Raises:
        TypeError: an argument that is no number, or a K that is no int.
        ValueError: a number out of range.

    Example:
        >>> from torch_specops.schedules import walltime_factor
        >>> round(walltime_factor(0.8, 0.1, 5), 4)
        2.4595
    """
    _check_cost_ratio(cost_ratio)
    return expected_tokens_per_step(alpha, num_draft_tokens) / (num_draft_tokens * cost_ratio + 1)


class Schedule(ABC):
    """Chooses K, the number of drafts per sequence, for each step of a batch.

    Attributes:
        buckets: the values of K that may come, ascending; each is a graph of its own.
    """

    buckets: tuple[int, ...]

    @abstractmethod
    def first(self) -> int:
        """K of a batch's first step, before any of its steps has been reported. What earlier batches taught counts
        until `reset`."""

    @abstractmethod
    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        """Learn from a finished step, and choose K for the next one to begin. Called once per step.

        The step reported need not be the last one begun: a loop that never waits reports one step late.

        Args:
            num_proposed: how many drafts each active row had, without padding; 0 says nothing of the drafts.
            num_accepted: how many of them were accepted.

        Raises:
            TypeError: a count that is no int.
            ValueError: lists of unequal length, or a row with fewer than 0 or more accepted than proposed.
        """

    def trim(self, num_proposed: Sequence[int]) -> int:
        """How many drafts of a row to verify at most, where they cost nothing and are seen before the target reads
        them: looked-up ones, eagerly, on a CPU. All there are, unless a schedule knows better.

        Args:
            num_proposed: how many drafts each active row has, without padding.
        """
        return max(num_proposed, default=0)

    @abstractmethod
    def reset(self) -> None:
        """Forget every step reported."""


class Constant(Schedule):
    """The same K in every step.

    Args:
        num_draft_tokens: K >= 0.

    Example:
        >>> from torch_specops.schedules import Constant
        >>> Constant(4).next([4, 4], [0, 2])
        4
    """

    def __init__(self, num_draft_tokens: int) -> None:
        _check_int("num_draft_tokens", num_draft_tokens, least=0)
        self.buckets = (num_draft_tokens,)

    def first(self) -> int:
        return self.buckets[0]

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        _check_counts(num_proposed, num_accepted)
        return self.buckets[0]

    def reset(self) -> None:
        pass


class Heuristic(Schedule):
    """Hugging Face's rule: 2 more when every draft was accepted, otherwise 1 fewer, at least 1.

    In a batch: when every draft of every row that had one was accepted; without any draft the value stays. The rule
    moves a value of its own, and K is the largest bucket that does not exceed it.

    Args:
        num_draft_tokens: the value to begin with, from the smallest bucket to `maximum`.
        maximum: the largest value; Hugging Face has none.
        buckets: None = those of 1, 2, 3, 5, 8, 12, 20 below `maximum`, and `maximum`.

    Example:
        >>> from torch_specops.schedules import Heuristic
        >>> schedule = Heuristic()
        >>> schedule.first(), schedule.next([5], [5]), schedule.next([5], [5]), schedule.next([8], [3])
        (5, 5, 8, 8)
    """

    def __init__(self, num_draft_tokens: int = 5, maximum: int = 20, buckets: Sequence[int] | None = None) -> None:
        _check_int("maximum", maximum, least=1)
        if buckets is None:
            buckets = [*(bucket for bucket in BUCKETS if bucket < maximum), maximum]
        self.buckets = _checked_buckets(buckets, least=1)
        if self.buckets[-1] > maximum:
            raise ValueError(f"buckets: expected numbers up to maximum = {maximum}, got {self.buckets[-1]}")
        _check_int("num_draft_tokens", num_draft_tokens, least=self.buckets[0])
        if num_draft_tokens > maximum:
            raise ValueError(f"num_draft_tokens: expected a number up to maximum = {maximum}, got {num_draft_tokens}")
        self.maximum = maximum
        self._start = self._value = num_draft_tokens

    def first(self) -> int:
        return self._bucket()

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        _check_counts(num_proposed, num_accepted)
        if any(num_proposed):
            all_accepted = list(num_proposed) == list(num_accepted)
            change = 2 if all_accepted else -1
            self._value = min(max(self._value + change, self.buckets[0]), self.maximum)
        return self._bucket()

    def reset(self) -> None:
        self._value = self._start

    def _bucket(self) -> int:
        return max(bucket for bucket in self.buckets if bucket <= self._value)


class Optimal(Schedule):
    """The bucket K that maximises `walltime_factor` at the acceptance rate measured so far (Leviathan et al. 2023,
    theorem 3.8 and section 3.5); the smallest of equals.

    alpha is accepted / (accepted + rejections). The walk ends at the first rejection, so a row whose drafts were not
    all accepted had exactly one, and the drafts behind it were never tried. A step counts half as much `half_life`
    steps later, so that alpha follows the text; the prior fades in the same way.

    Drafting pays where alpha > c (corollary 3.9, for K = 1). Where it does not, K is 0, if that is a bucket, and every
    `explore_every`-th step drafts the smallest other bucket all the same, or alpha would never be measured again.

    The theorem is of one sequence. Of a batch in which some rows have no drafts, `trim` verifies the number K that
    maximises sum_b E(min(K, K_b)) / (K c + 1), where E is `expected_tokens_per_step` and K_b are the drafts of row b;
    0 under the same condition.

    Args:
        cost_ratio: c >= 0, the time of one draft forward / the time of one target forward.
        buckets: at least one above 0; with 0, a step may be without drafts.
        half_life: in steps, > 0. At 50 and one draft tried per step, alpha has a standard error of 0.04 at most.
        explore_every: in steps, >= 1. Exploring costs at most bucket * c / explore_every of the time.
        prior: alpha before any step, in [0, 1].
        prior_weight: how many drafts the prior counts for, > 0.

    Example:
        >>> from torch_specops.schedules import Optimal
        >>> schedule = Optimal(cost_ratio=0.1)
        >>> schedule.first()
        5
        >>> [schedule.next([5, 5], [5, 5]) for _ in range(5)]
        [8, 8, 12, 12, 12]
    """

    def __init__(
        self,
        cost_ratio: float,
        buckets: Sequence[int] = (0, *BUCKETS),
        *,
        half_life: float = 50.0,
        explore_every: int = 16,
        prior: float = 0.7,
        prior_weight: float = 10.0,
    ) -> None:
        _check_cost_ratio(cost_ratio)
        self.buckets = _checked_buckets(buckets, least=0)
        if self.buckets[-1] == 0:
            raise ValueError("buckets: expected at least one number above 0, got (0,); that is Constant(0)")
        _check_above_zero("half_life", half_life)
        _check_int("explore_every", explore_every, least=1)
        _check_alpha("prior", prior)
        _check_above_zero("prior_weight", prior_weight)
        self.cost_ratio = cost_ratio
        self.half_life = half_life
        self.explore_every = explore_every
        self.prior = prior
        self.prior_weight = prior_weight
        self.reset()

    def reset(self) -> None:
        self._alpha = float(self.prior)
        self._weight = float(self.prior_weight)
        self._steps_without_drafts = self._steps_trimmed_to_none = 0
        self._explores = False

    @property
    def alpha(self) -> float:
        """The acceptance rate measured, in [0, 1]."""
        return self._alpha

    def first(self) -> int:
        return self._best()

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        _check_counts(num_proposed, num_accepted)
        accepted = sum(num_accepted)
        rejections = sum(kept < proposed for proposed, kept in zip(num_proposed, num_accepted, strict=True))
        remembered = 0.5 ** (1 / self.half_life) * self._weight
        self._weight = remembered + accepted + rejections
        # Long without drafts, the weight may vanish; alpha then stays what it was.
        if self._weight > 0:
            self._alpha = (remembered * self._alpha + accepted) / self._weight

        best = self._best()
        self._steps_without_drafts = self._steps_without_drafts + 1 if best == 0 else 0
        self._explores = self._steps_without_drafts == self.explore_every
        if not self._explores:
            return best
        self._steps_without_drafts = 0
        return self._fewest

    def trim(self, num_proposed: Sequence[int]) -> int:
        most = max(num_proposed, default=0)
        if self.buckets[0] > 0 or most == 0 or self._explores:
            return most

        def speed(count: int) -> float:
            tokens = math.fsum(expected_tokens_per_step(self._alpha, min(count, each)) for each in num_proposed)
            return tokens / (count * self.cost_ratio + 1)

        best = max(range(most + 1), key=speed)
        self._steps_trimmed_to_none = self._steps_trimmed_to_none + 1 if best == 0 else 0
        if self._steps_trimmed_to_none < self.explore_every:
            return best
        self._steps_trimmed_to_none = 0
        return min(self._fewest, most)

    @property
    def _fewest(self) -> int:
        return min(bucket for bucket in self.buckets if bucket > 0)

    def _best(self) -> int:
        # The first of equals: buckets ascend.
        return max(self.buckets, key=lambda bucket: walltime_factor(self._alpha, self.cost_ratio, bucket))


def _check_counts(num_proposed: Sequence[int], num_accepted: Sequence[int]) -> None:
    for name, counts in (("num_proposed", num_proposed), ("num_accepted", num_accepted)):
        for count in counts:
            _check_int(name, count, least=0)
    if len(num_proposed) != len(num_accepted):
        raise ValueError(
            f"num_accepted: expected one count per row, {len(num_proposed)} as num_proposed has, "
            f"got {len(num_accepted)}"
        )
    for proposed, accepted in zip(num_proposed, num_accepted, strict=True):
        if accepted > proposed:
            raise ValueError(f"num_accepted: expected at most num_proposed = {proposed}, got {accepted}")


def _checked_buckets(buckets: Sequence[int], least: int) -> tuple[int, ...]:
    for bucket in buckets:
        _check_int("buckets", bucket, least)
    if not buckets or any(low >= high for low, high in pairwise(buckets)):
        raise ValueError(f"buckets: expected ascending numbers, at least one, got {tuple(buckets)}")
    return tuple(buckets)


def _check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected a number >= {least}, got {value}")


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")


def _check_alpha(name: str, value: float) -> None:
    _check_number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value}")


def _check_above_zero(name: str, value: float) -> None:
    _check_number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")


def _check_cost_ratio(value: float) -> None:
    _check_number("cost_ratio", value)
    if not 0 <= value < math.inf:
        raise ValueError(f"cost_ratio: expected a finite number >= 0, got {value}")
