"""A simulated loop: a schedule plans the drafts of texts whose right drafts are known, and a clock counts seconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch_specops.schedules import Auto, Constant, NextStep, PastStep, Schedule

# For each position of a text: how many drafts are found there, the length of their match, and how many are right.
Text = list[tuple[int, int, int]]
# The seconds of a step by the number of tokens that it reads. A step is 1 where nothing is drafted for one row.
Seconds = Callable[[int], float]


def flat(num_tokens: int) -> float:
    return (32 + num_tokens) / 33


def dear(num_tokens: int) -> float:
    """A token costs a step."""
    return float(num_tokens)


def stepped(num_tokens: int) -> float:
    """One token is read by another kernel than several."""
    return 1.0 if num_tokens == 1 else 1.6 + 0.04 * num_tokens


def a_text(length: int, chance: Callable[[int], float], seed: int = 0, match: int = 4, num_found: int = 10) -> Text:
    """Whose drafts at a position are each right with this chance, if those before them are."""
    rng = random.Random(seed)
    found = []
    for position in range(length):
        right = next((n for n in range(num_found) if rng.random() >= chance(position)), num_found)
        found.append((num_found, match, min(right, length - position - 1)))
    return found


class Loop:
    """Runs a schedule on texts, the first `num_rows` at once and the others as rows are free, with a clock.

    Args:
        looks_up: drafts are known before they are verified; otherwise each costs `drafting` seconds.
        is_compiled: all rows read as many tokens as the one with most, and as a bucket has.
        has_equal_prompts: the first step reads the prompts.
        limit: the tokens that a text may have, if it ends before.
        is_captured: no draft is known before it is verified, and a step is timed before it runs the first time.
        slow: the steps that take five times as long, for another reason.
        speed: how many times as long as said the next step takes.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Seconds,
        *,
        looks_up: bool = True,
        drafting: float = 0.0,
        is_compiled: bool = False,
        is_captured: bool = False,
        is_refilled: bool = False,
        has_equal_prompts: bool = True,
        limit: int = 0,
        slow: Sequence[int] = (),
        speed: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.schedule, self.seconds, self.looks_up, self.drafting = schedule, seconds, looks_up, drafting
        self.is_compiled, self.is_refilled, self.slow = is_compiled or is_captured, is_refilled, slow
        self.is_captured, self.speed = is_captured, speed
        self.has_equal_prompts, self.limit = has_equal_prompts, limit
        # The numbers of drafts whose steps were timed.
        self.timed: set[int] = set()
        # Of each step: the drafts that were verified.
        self.counts: list[list[int]] = []

    def planned(self, step: NextStep) -> list[int]:
        """Rounded as the runner rounds them."""
        counts, buckets = list(self.schedule.plan(step)), self.schedule.buckets
        most = max((count for count in buckets if count <= max(counts)), default=buckets[0])
        return [min(most, room) for room in step.rooms] if self.is_compiled else counts

    def run(self, texts: Sequence[Text], num_rows: int | None = None) -> float:
        """The seconds that it takes, without what slow steps take more."""
        self.schedule = self.schedule.begin()
        clock, waiting, size = 0.0, list(enumerate(texts)), num_rows or len(texts)
        num_steps = num_undrafted = 0
        rows, waiting = waiting[:size], waiting[size:]
        places = dict.fromkeys(range(len(texts)), 0)
        while rows:
            numbers = [number for number, _ in rows]
            cells = [text[places[number]] for number, text in rows]
            left = [max(len(text), self.limit) - places[number] for number, text in rows]
            step = NextStep(
                numbers,
                [own - 1 for own in left],
                left,
                size,
                is_compiled=self.is_compiled,
                is_refilled=self.is_refilled,
                reads_prompts=self.has_equal_prompts and num_steps == 0 and not self.is_compiled,
                looks_up=self.looks_up,
                asks_again=self.looks_up and not self.is_captured,
            )
            if self.is_compiled:
                # How much room there is decides no graph.
                step = replace(step, rooms=[self.schedule.buckets[-1] * (own > 1) for own in left])
            counts, offered = self.planned(step), None
            num_draft_tokens = max(counts)
            while self.is_captured and num_draft_tokens not in self.timed:
                self.timed.add(num_draft_tokens)
                seconds = self.seconds(size * (1 + num_draft_tokens)) + self.drafting * num_draft_tokens
                self.schedule.learn(PastStep(step, (), (), num_draft_tokens=num_draft_tokens, seconds=seconds))
                counts = self.planned(step)
                num_draft_tokens = max(counts)
            if step.asks_again and num_draft_tokens > 0:
                offered = list(map(min, counts, (found for found, _, _ in cells)))
                step = replace(step, offered=offered, matches=[match for _, match, _ in cells])
                counts = list(self.schedule.plan(step))
                assert all(0 <= own <= most for own, most in zip(counts, offered, strict=True))
                if self.is_compiled:
                    num_draft_tokens = min(count for count in self.schedule.buckets if count >= max(counts))
            if self.is_compiled:
                counts = [min(num_draft_tokens, own - 1) for own in left]
            accepted = [min(own, right) for own, (_, _, right) in zip(counts, cells, strict=True)]
            read = size * (1 + num_draft_tokens) if self.is_compiled else len(rows) + sum(counts)
            # Reading the prompts takes longer than reading the drafts, and is not timed.
            num_steps += 1
            seconds = self.seconds(len(rows) if step.reads_prompts else read)
            caught_up = not self.looks_up and num_draft_tokens > 0 and num_undrafted > 0
            num_undrafted = 0 if num_draft_tokens > 0 else num_undrafted + 1
            drafting = self.drafting * (1 if self.looks_up else num_draft_tokens + caught_up)
            if num_draft_tokens == 0:
                drafting = 0.0
            if self.is_captured:
                seconds, drafting = seconds + self.drafting * num_draft_tokens, self.drafting * caught_up
            known = None if offered is None else list(map(min, offered, (own + 1 for own in accepted)))
            self.schedule.learn(
                PastStep(
                    step,
                    proposed=counts,
                    accepted=accepted,
                    num_draft_tokens=num_draft_tokens,
                    known=known,
                    right=None if known is None else [min(n, own) for n, (_, _, own) in zip(known, cells, strict=True)],
                    seconds=None
                    if step.reads_prompts
                    else seconds * (5 if len(self.counts) in self.slow else 1) * self.speed(),
                    draft_seconds=0.0 if self.is_captured else drafting,
                    caught_up=caught_up,
                )
            )
            self.counts.append(counts)
            clock += seconds + drafting
            for number, own in zip(numbers, accepted, strict=True):
                places[number] += own + 1
            rows = [(number, text) for number, text in rows if places[number] < len(text)]
            while self.is_refilled and waiting and len(rows) < size:
                rows.append(waiting.pop(0))
        return clock


def best_constant(texts: Sequence[Text], seconds: Seconds, num_rows: int | None = None, **options: Any) -> float:
    """The least time that a constant number of drafts takes, 0 among them."""
    return min(Loop(Constant(count), seconds, **options).run(texts, num_rows) for count in (0, 1, 2, 3, 5, 10))


# For each position of a text: what a lookup finds, as in `Text`, and how many drafts of another source are right.
DoubleText = list[tuple[int, int, int, int]]


def a_double_text(
    length: int, copied: float, chance: float, chance_of_others: float, found_elsewhere: float, seed: int
) -> DoubleText:
    """A text in which stretches of 30 tokens on average are copied with probability `copied`. There the lookup finds
    drafts that are right with probability `chance`; elsewhere it sometimes finds drafts, of which few are right."""
    rng = random.Random(seed)
    found, num_copied, is_copied = [], 0, False
    for position in range(length):
        if rng.random() < 1 / 30:
            is_copied = rng.random() < copied
        num_copied = num_copied + 1 if is_copied else 0
        num_found = 10 if is_copied or rng.random() < found_elsewhere else 0
        each = chance if is_copied else 0.3
        right = next((n for n in range(num_found) if rng.random() >= each), num_found)
        right_of_others = next((n for n in range(4) if rng.random() >= chance_of_others), 4)
        match = min(3 + num_copied, 20) if is_copied else 4
        room = length - position - 1
        found.append((num_found, match if num_found else 0, min(right, room), min(right_of_others, room)))
    return found


def run_with_two_sources(
    schedule: Auto,
    texts: Sequence[DoubleText],
    seconds: Seconds,
    drafting: float,
    num_rows: int,
    *,
    is_refilled: bool,
    looking_up: float = 0.0,
) -> float:
    """As `Loop.run`, with a lookup that needs `looking_up` seconds, and another source that needs `drafting` seconds
    for each draft of all rows."""
    schedule = schedule.begin()
    rows, waiting = list(enumerate(texts))[:num_rows], list(enumerate(texts))[num_rows:]
    places, unread = dict.fromkeys(range(len(texts)), 0), set[int]()
    clock, is_begin = 0.0, True
    while rows:
        numbers, cells = [number for number, _ in rows], [text[places[number]] for number, text in rows]
        left = [len(text) - places[number] for number, text in rows]
        step = NextStep(
            numbers,
            [own - 1 for own in left],
            left,
            num_rows,
            is_refilled=is_refilled,
            reads_prompts=is_begin,
            num_others=4,
        )
        looks_up = schedule.may_look_up(step)
        offered = [looks_up * min(found, own - 1) for (found, *_), own in zip(cells, left, strict=True)]
        step = replace(step, offered=offered, matches=[match for _, match, *_ in cells])
        counts, is_looked_up = schedule.plan_sources(step)
        plans = list(zip(counts, is_looked_up, cells, strict=True))
        num_others = max((count for count, first, _ in plans if not first), default=0)
        accepted = [min(count, cell[2] if first else cell[3]) for count, first, cell in plans]
        known = [min(found, own + 1) for found, own in zip(offered, accepted, strict=True)]
        caught_up = num_others > 0 and not unread.isdisjoint(numbers)
        unread = set() if num_others > 0 else unread | set(numbers)
        times = seconds(len(rows) + (0 if is_begin else sum(counts))), drafting * (num_others + caught_up)
        past = PastStep(
            step,
            proposed=counts,
            accepted=accepted,
            num_draft_tokens=num_others,
            known=known,
            right=[min(count, cell[2]) for count, cell in zip(known, cells, strict=True)],
            seconds=None if is_begin else times[0],
            draft_seconds=times[1],
            lookup_seconds=looking_up * looks_up,
            caught_up=caught_up,
            is_looked_up=is_looked_up,
        )
        schedule.learn(past)
        clock, is_begin = clock + sum(times) + looking_up * looks_up, False
        for number, own in zip(numbers, accepted, strict=True):
            places[number] += own + 1
        rows = [(number, text) for number, text in rows if places[number] < len(text)]
        while is_refilled and waiting and len(rows) < num_rows:
            rows.append(waiting.pop(0))
    return clock
