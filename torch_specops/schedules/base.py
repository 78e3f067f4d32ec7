"""What a schedule is told of the steps, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

# Each value needs a compiled graph of its own, so there are few, and they are dense where one draft matters most.
BUCKETS = (1, 2, 3, 5, 8, 12, 20)


@dataclass(frozen=True)
class NextStep:
    """What a schedule is told of a step to come. Lists have an entry for each text that goes on.

    Args:
        texts: an identifier of each text, the same in all of its steps.
        rooms: the most drafts that each can use.
        left: tokens to its limit.
        num_rows: B of the batch, with the rows that have ended.
        is_compiled: True = a compiled step: all rows get the largest number that is planned, rounded to a bucket.
        is_refilled: True = rows that end get new texts, so that no text waits for another.
        looks_up: True = drafts cost no forward.
        asks_again: True = all drafts that are planned are looked up, and the step is planned again when they are known.
        reads_prompts: the target reads the prompts in this step, and is not timed.
        offered: how many drafts were found for each text; None = they are not known yet.
        matches: how many tokens at the end of each text led to its drafts (`Draft.matches`); None = not known.
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
        """So many drafts of each text, as far as it has room for them and they were offered."""
        limits = self.rooms if self.offered is None else map(min, self.rooms, self.offered)
        return [min(count, limit) for limit in limits]


@dataclass(frozen=True)
class PastStep:
    """What became of a step. Lists have an entry for each text that it had.

    Args:
        planned: what the schedule was told last.
        num_draft_tokens: the most drafts of a row that were proposed.
        proposed: drafts of each text that were verified; empty = a compiled step was timed, and no text had it.
        accepted: how many of these were accepted.
        known: of the drafts that were looked up, how many the new tokens show to be right or wrong, verified or not;
            None = drafts are not judged by the new tokens.
        right: how many of these were right, up to the first that was wrong.
        seconds: of reading and verifying; None = not measured.
        draft_seconds: of proposing, if it is no part of `seconds`.
        caught_up: the draft also read what steps without drafts had emitted, in one more forward.
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
    """Chooses the number of drafts of each text, for each step.

    Attributes:
        buckets: the values of K that compiled steps have, ascending, each with a graph of its own. A compiled
            step rounds another value down to a bucket, or up to the smallest bucket. No value exceeds the largest.
    """

    buckets: tuple[int, ...]

    @abstractmethod
    def plan(self, step: NextStep) -> Sequence[int]:
        """The number of drafts of each text, at most its room and what was offered.

        If drafts are sampled, it may depend only on earlier steps, never on the drafts of this step.
        """

    @abstractmethod
    def learn(self, step: PastStep) -> None:
        """Called once per step. A loop that never waits reports each step one step late."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what belongs to single texts. Called when a batch begins."""

    def begin(self) -> Schedule:
        """The schedule of a batch that begins: a shallow copy after `reset`, because batches may take turns. What it
        changes in place holds for the others too, and what it assigns does not."""
        own = copy(self)
        own.reset()
        return own


def buckets_up_to(maximum: int) -> tuple[int, ...]:
    return (*(bucket for bucket in BUCKETS if bucket < maximum), maximum)
