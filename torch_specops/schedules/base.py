"""The interface of schedules, and the records of steps that they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

# Each value needs a separate compiled graph, so there are few, dense where one draft matters most.
BUCKETS = (1, 2, 3, 5, 8, 12, 20)


@dataclass(frozen=True)
class NextStep:
    """The next step, to be planned. Lists have an entry for each unfinished sequence.

    Args:
        texts: an identifier of each sequence, the same in all of its steps.
        rooms: the most drafts that each can use.
        left: tokens until each sequence's limit.
        num_rows: B, finished rows included.
        is_compiled: True = a compiled step: all rows get the largest planned number, rounded to a bucket.
        is_refilled: True = finished rows get new sequences, so that no sequence waits for another.
        looks_up: True = drafts cost no forward.
        asks_again: True = all planned drafts are looked up, and the step is planned again with the drafts found.
        reads_prompts: True = the target reads the prompts in this step, which is not timed.
        offered: how many drafts were found for each sequence; None = not known yet.
        matches: the match length of each sequence's drafts (`Draft.matches`); None = not known.
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

    def at_most(self, count: int) -> list[int]:
        """`count` drafts for each sequence, limited by its room and by the drafts offered."""
        limits = self.rooms if self.offered is None else map(min, self.rooms, self.offered)
        return [min(count, limit) for limit in limits]


@dataclass(frozen=True)
class PastStep:
    """The result of a step. Lists have an entry for each sequence of the step.

    Args:
        planned: the step as the schedule last planned it.
        num_draft_tokens: the largest number of drafts proposed for a row.
        proposed: how many drafts of each sequence were verified; empty = a compiled step was timed without sequences.
        accepted: how many of these were accepted.
        known: how many looked-up drafts the new tokens show to be right or wrong, verified or not; None = new tokens do
            not judge drafts.
        right: how many of these were right, up to the first that was wrong.
        seconds: the time of reading and verifying; None = not measured.
        draft_seconds: the time of proposing, if `seconds` does not include it.
        caught_up: the draft also read the tokens of earlier steps without drafts, in one more forward.
    """

    planned: NextStep
    proposed: Sequence[int]
    accepted: Sequence[int]
    num_draft_tokens: int = 0
    known: Sequence[int] | None = None
    right: Sequence[int] | None = None
    seconds: float | None = None
    draft_seconds: float = 0.0
    caught_up: bool = False


class Schedule(ABC):
    """Chooses the number of drafts of each sequence, for each step.

    Attributes:
        buckets: the values of K that compiled steps have, ascending, each with a separate graph. A compiled step rounds
            other values down to a bucket, or up to the smallest bucket. No planned value exceeds the largest.
    """

    buckets: tuple[int, ...]

    @abstractmethod
    def plan(self, step: NextStep) -> Sequence[int]:
        """The number of drafts of each sequence, at most its room and the drafts offered.

        If drafts are sampled, it may depend only on earlier steps, never on the drafts of this step.
        """

    @abstractmethod
    def learn(self, step: PastStep) -> None:
        """Called once per step. A loop that never waits reports each step one step late."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the state of single sequences. Called when a batch begins."""

    def begin(self) -> Schedule:
        """The schedule for a new batch: a shallow copy after `reset`, because batches may take turns. Objects changed
        in place are shared between batches; assigned attributes are not."""
        own = copy(self)
        own.reset()
        return own


def buckets_up_to(maximum: int) -> tuple[int, ...]:
    return (*(bucket for bucket in BUCKETS if bucket < maximum), maximum)
