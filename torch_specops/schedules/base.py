"""The interface of schedules, and the records of steps that they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import repeat

# Each value of K needs a compiled graph, so there are few values. The values are dense where one more draft matters
# most.
BUCKETS = (1, 2, 3, 5, 8, 12, 20)


@dataclass(frozen=True)
class NextStep:
    """The next step, as `Schedule.plan` gets it. Lists have an entry for each unfinished sequence.

    Args:
        texts: an identifier of each sequence, which is the same in all of its steps.
        rooms: the largest number of drafts that each sequence can use.
        left: the number of tokens until the limit of each sequence.
        num_rows: the number of rows, finished rows included.
        is_compiled: whether the step is compiled. If so, all rows get the largest planned number, rounded to a bucket.
        is_refilled: whether finished rows get new sequences, so that no sequence waits for another.
        looks_up: whether drafts are looked up in tokens, so that they cost no forward.
        asks_again: whether the planned drafts are looked up, and `plan` is then called again with `offered`.
        reads_prompts: whether the target also reads the prompts in this step. A step that reads prompts is not timed.
        offered: the number of drafts found for each sequence; None = not known yet.
        matches: the match length of each sequence's drafts (`Draft.matches`); None = not known.
        num_others: the largest number of drafts that a second source can propose for a sequence instead of those
            offered (`LookupElse`); None = there is no second source.
    """

    texts: Sequence[int]
    rooms: Sequence[int]
    left: Sequence[int]
    num_rows: int
    is_compiled: bool = False
    is_refilled: bool = False
    looks_up: bool = False
    asks_again: bool = False
    reads_prompts: bool = False
    offered: Sequence[int] | None = None
    matches: Sequence[int] | None = None
    num_others: int | None = None

    def at_most(self, count: int) -> list[int]:
        """`count` drafts for each sequence, limited by its room and by the drafts offered."""
        offered = repeat(count) if self.offered is None else (max(each, self.num_others or 0) for each in self.offered)
        return [min(count, *limits) for limits in zip(self.rooms, offered, strict=False)]


@dataclass(frozen=True)
class PastStep:
    """The result of a step. Lists have an entry for each sequence of the step.

    Args:
        planned: the argument of the last call of `plan` for this step.
        num_draft_tokens: the largest number of drafts proposed for a row; of two sources, by the second.
        proposed: the number of verified drafts of each sequence; empty = a compiled step was only timed, and no
            sequence took part.
        accepted: the number of accepted drafts of each sequence.
        known: the number of looked-up drafts, verified or not, that can be compared with the new tokens; None = there
            are no such drafts.
        right: the number of these drafts that were right, up to the first wrong draft.
        seconds: the time in which the target read and verified the drafts; None = not measured.
        draft_seconds: the time of proposing, if `seconds` does not include it.
        lookup_seconds: the time of the lookup before the plan, if there are two sources.
        caught_up: whether the draft also read the tokens of earlier steps without drafts, in one more forward.
        is_looked_up: whether the drafts of each sequence were looked up, if there are two sources; otherwise None.
    """

    planned: NextStep
    proposed: Sequence[int]
    accepted: Sequence[int]
    num_draft_tokens: int = 0
    known: Sequence[int] | None = None
    right: Sequence[int] | None = None
    seconds: float | None = None
    draft_seconds: float = 0.0
    lookup_seconds: float = 0.0
    caught_up: bool = False
    is_looked_up: Sequence[bool] | None = None


class Schedule(ABC):
    """Chooses the number of drafts of each sequence, for each step.

    Attributes:
        buckets: the values of K that compiled steps have, ascending, each with a separate graph. A compiled step rounds
            other values down to a bucket, or up to the smallest bucket. No planned value exceeds the largest bucket.
    """

    buckets: tuple[int, ...]

    @abstractmethod
    def plan(self, step: NextStep) -> Sequence[int]:
        """The number of drafts of each sequence, at most its room and the drafts offered.

        If drafts are sampled, the numbers may depend only on earlier steps, never on the drafts of this step.
        """

    @abstractmethod
    def learn(self, step: PastStep) -> None:
        """Learn from a step. Called once per step; on CUDA each step is reported one step late."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the state of single sequences. Called when a batch begins."""

    def begin(self) -> Schedule:
        """Return the schedule of a new batch: a shallow copy of this one, after `reset`. Each batch has a copy, because
        batches may take turns. The copies share objects that are changed in place, but not attributes that are
        assigned."""
        fresh = copy(self)
        fresh.reset()
        return fresh


def buckets_up_to(maximum: int) -> tuple[int, ...]:
    return (*(bucket for bucket in BUCKETS if bucket < maximum), maximum)
