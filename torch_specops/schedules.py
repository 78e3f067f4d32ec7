"""How many tokens to draft in the next step: a constant, Hugging Face's heuristic, or what has paid so far. A schedule
runs on the host, between two steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .checks import check_int

__all__ = ["Auto", "Constant", "Heuristic", "NextStep", "PastStep", "Schedule", "as_schedule"]

# Each value needs a compiled graph of its own, so there are few, and they are dense where one draft matters most.
BUCKETS = (1, 2, 3, 5, 8, 12, 20)

# What `Auto` assumes. The chance that the next token is right after a match of n tokens, until WEIGHT drafts of that
# length were seen, and the factor by which each draft makes those before count less.
LONGEST = 20
PRIORS = [0.1, 0.1, *(min(0.95, 0.4 + 0.08 * (length - 2)) for length in range(2, LONGEST + 1))]
WEIGHT, MEMORY = 6.0, 0.5 ** (1 / 256)
# A text counts with so many drafts at odds of CAUTION, until it has its own.
PATIENCE, CAUTION, MEMORY_OF_TEXTS = 2.0, 0.7, 0.95
PATIENCE_OF_OTHERS, MEMORY_OF_OTHERS = 8.0, 0.5 ** (1 / 50)
MOST_CERTAIN = 0.98
# Less pays nowhere.
LEAST_CHANCE = 0.01
# The share of what drafts are expected to save that is not at stake.
SURE = 0.5
# In steps without drafts, what a batch may lose at first on drafts that are known, and on others; and how often a gain
# may be risked again. Then the share of the time that may be lost in all, and how many steps without drafts come before
# a try.
LOAN, LOAN_OF_OTHERS, MOST_SAVED = 0.4, 1.8, 2.0
LOST_SHARE, TRY_EVERY = 0.01, 8
# Times that are kept for each number of tokens. One that was read once takes at most SURPRISE times what others say.
NUM_TIMES, SURPRISE = 8, 1.2
# After so many steps what was not read loses so much of what it takes beyond expectation.
FADING, FADED = 64, 0.7
# A forward over no token, in tokens; and the draft's forward, in steps.
FORWARD_COST, DRAFT_COST = 32, 0.25


@dataclass(frozen=True)
class NextStep:
    """What a schedule is told of a step to come. Lists have an entry for each text that goes on.

    Args:
        texts: what tells the texts apart; a text has the same in all of its steps.
        rooms: the most drafts that each can use.
        left: tokens to its limit.
        num_rows: B of the batch, with the rows that have ended.
        is_fixed: True = a compiled step: all rows get the largest number that is planned, rounded to a bucket.
        is_refilled: True = rows that end get new texts, so that no text waits for another.
        looks_up: True = drafts cost no forward.
        asks_again: True = all drafts that are planned are looked up, and the step is planned again when they are known.
        offered: how many drafts were found for each text; None = they are not known yet.
        matches: how many tokens at the end of each text led to its drafts (`Draft.matches`); None = not known.
    """

    texts: Sequence[int]
    rooms: Sequence[int]
    left: Sequence[int]
    num_rows: int
    is_fixed: bool = False
    is_refilled: bool = False
    looks_up: bool = False
    asks_again: bool = False
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
        known: how many of the drafts that were looked up the new tokens tell to be right or wrong, whether they were
            verified or not; None = drafts are not judged so.
        right: how many of these were right, up to the first wrong one.
        seconds: of reading and verifying; None = not measured.
        draft_seconds: of proposing, if it is no part of `seconds`.
    """

    planned: NextStep
    proposed: Sequence[int]
    accepted: Sequence[int]
    num_draft_tokens: int = 0
    known: Sequence[int] | None = None
    right: Sequence[int] | None = None
    seconds: float | None = None
    draft_seconds: float = 0.0


class Schedule(ABC):
    """Chooses the number of drafts of each text, for each step of a batch.

    Attributes:
        buckets: the values of K that compiled steps have, ascending, each with a graph of its own. For another value, a
            compiled step has the largest bucket below it, or the smallest one. No value exceeds the largest.
    """

    buckets: tuple[int, ...]

    @abstractmethod
    def plan(self, step: NextStep) -> Sequence[int]:
        """The number of drafts of each text, at most its room and what was offered.

        For drafts that are sampled, it may depend on earlier steps alone, never on the drafts of this one.
        """

    @abstractmethod
    def learn(self, step: PastStep) -> None:
        """Called once per step. A loop that never waits reports each step late by one."""

    @abstractmethod
    def reset(self) -> None:
        """Called when a batch begins."""


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


class Constant(Schedule):
    """The same K in every step.

    Args:
        num_draft_tokens: K >= 0.

    Examples:
        >>> from torch_specops.schedules import Constant, NextStep
        >>> Constant(4).plan(NextStep(texts=[0, 1], rooms=[9, 2], left=[10, 3], num_rows=2))
        [4, 2]
    """

    def __init__(self, num_draft_tokens: int) -> None:
        check_int("num_draft_tokens", num_draft_tokens, 0)
        self.buckets = (num_draft_tokens,)

    def plan(self, step: NextStep) -> list[int]:
        return step.at_most(self.buckets[0])

    def learn(self, step: PastStep) -> None:
        pass

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
    """

    def __init__(self, num_draft_tokens: int = 5, maximum: int = 20) -> None:
        check_int("maximum", maximum, 1)
        self.buckets = _buckets_up_to(maximum)
        check_int("num_draft_tokens", num_draft_tokens, 1)
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


class Auto(Schedule):
    """From 0 to K drafts for each text and step, as many as pay for themselves by what was measured so far.

    A step's time is learned by the tokens that the target reads. A draft's chance to be right is learned from drafts
    before it: for drafts that are looked up by the length of their match and their place in the step, for others by
    text. Drafts are verified in the order of their worth: the chance that they are reached and right, times the time
    that a token saves. If no text waits for another (sessions, `generate_many`), a token saves its share of a step; in
    a batch that ends with its slowest row, most of that is saved by the rows that end last.

    By these estimates the drafts of a batch lose at most a part of a step and 1 % of the time, beside what drafts just
    before have gained. The next tokens of a text say whether its drafts were right, so drafts that are looked up are
    judged without being verified. Others are tried now and then, as far as that budget allows.

    What was learned of times, and of drafts in general, is kept from batch to batch.

    Args:
        num_draft_tokens: K >= 1, the most drafts of a row.
        buckets: for compiled steps, from 0 to K; None = 0, 1, 2, 3, 5, 8, 12, 20 up to K, and K.

    Examples:
        >>> from dataclasses import replace
        >>> from torch_specops.schedules import Auto, NextStep, PastStep
        >>> schedule = Auto(4)
        >>> step = NextStep([0], rooms=[9], left=[10], num_rows=1, looks_up=True, asks_again=True)
        >>> for _ in range(2):
        ...     schedule.learn(PastStep(step, proposed=[0], accepted=[0], seconds=0.03))
        >>> schedule.plan(replace(step, offered=[4], matches=[12]))
        [3]
    """

    def __init__(self, num_draft_tokens: int = 10, buckets: Sequence[int] | None = None) -> None:
        check_int("num_draft_tokens", num_draft_tokens, 1)
        self.buckets = (0, *_buckets_up_to(num_draft_tokens)) if buckets is None else tuple(buckets)
        if tuple(sorted({0, num_draft_tokens, *self.buckets})) != self.buckets:
            raise ValueError(f"buckets: expected ascending numbers from 0 to {num_draft_tokens}, got {self.buckets}")
        # By the number of rows, and whether steps are fixed.
        self._costs: dict[tuple[int, bool], _Costs] = {}
        # Drafts that were looked up, by match length and place: the others are planned before they are known.
        self._matches = [_Share() for _ in PRIORS]
        self._chance_after = PRIORS.copy()
        self._others = _Share(3.5, 5.0)
        self.reset()

    def reset(self) -> None:
        self._account = self._elapsed = 0.0
        self._num_undrafted = 0
        self._texts: dict[int, _Share] = {}
        self._rates: dict[int, float] = {}
        self._saved: dict[int, float] = {}
        for costs in self._costs.values():
            costs.begin()

    def plan(self, step: NextStep) -> list[int]:
        counts = self._counts(step)
        self._num_undrafted = 0 if any(counts) else self._num_undrafted + 1
        if step.is_fixed and any(counts):
            counts = step.at_most(self._bucket(max(counts)))
        return counts

    def _counts(self, step: NextStep) -> list[int]:
        texts, costs = step.texts, self._costs_of(step)
        plain = step.num_rows if step.is_fixed else len(texts)
        rooms, nothing = step.at_most(self.buckets[-1]), [0] * len(texts)
        # Steps without drafts are measured first, and again now and then.
        if not any(rooms) or not costs.is_known:
            return nothing
        base = costs.of(plain)
        at_stake = self._account + LOST_SHARE * self._elapsed
        purse = at_stake + (LOAN if step.asks_again else LOAN_OF_OTHERS) * base
        if purse <= 0 or (step.asks_again and step.offered is None):
            return rooms if purse > 0 else nothing
        self._texts = {text: self._texts.get(text) or _Share() for text in texts}
        reached = self._chances(step, rooms)
        self._saved = self._savings(step, list(map(sum, reached)), base, costs.of(0))
        # Less than this never pays.
        least = (costs.of(plain + sum(rooms)) - base) / sum(rooms) / 2
        offers = []
        for index, text in enumerate(texts):
            for place, chance in enumerate(reached[index], 1):
                worth = chance * base * self._saved[text]
                if worth < least:
                    break
                offers.append((worth, -place, index))
        offers.sort(reverse=True)

        def spent(num_drafts: int, most: int) -> float:
            read = plain * (1 + self._bucket(most)) if step.is_fixed else plain + num_drafts
            if read > costs.limit and not step.is_fixed:
                return math.inf
            # Looked-up drafts are there. What others have not read is another forward.
            drafting = 0.0 if step.looks_up else costs.draft_seconds(most + (self._num_undrafted > 0), base)
            return costs.of(read) - base + drafting

        best, num_best, most, worth = 0.0, 0, 0, 0.0
        for count, (more, place, _) in enumerate(offers, 1):
            most, worth = max(most, -place), worth + more
            cost = spent(count, most)
            if cost == math.inf:
                break
            if worth - cost > best and cost - SURE * worth <= purse:
                best, num_best = worth - cost, count
        counts = nothing.copy()
        for _, _, index in offers[:num_best]:
            counts[index] += 1
        if num_best == 0 and not step.asks_again and self._num_undrafted >= TRY_EVERY:
            tried = [min(room, 1) for room in rooms]
            return tried if spent(sum(tried), 1) <= at_stake + LOAN * base else nothing
        return counts

    def learn(self, step: PastStep) -> None:
        planned, costs = step.planned, self._costs_of(step.planned)
        plain = planned.num_rows if planned.is_fixed else len(planned.texts)
        read = plain * (1 + step.num_draft_tokens) if planned.is_fixed else plain + sum(step.proposed)
        if step.seconds and plain > 0:
            costs.add(read, step.seconds, read == plain, is_sure=not step.proposed)
        if step.num_draft_tokens > 0:
            costs.drafting.setdefault(step.num_draft_tokens, deque(maxlen=NUM_TIMES)).append(step.draft_seconds)
        if not step.proposed:
            return
        if costs.is_known:
            base = costs.of(plain)
            accepted = zip(planned.texts, step.accepted, strict=True)
            saved = sum(base * self._saved.get(text, 0.0) * count for text, count in accepted)
            spent = max(costs.of(read) - base, 0.0) + costs.draft_seconds(step.num_draft_tokens, base)
            self._elapsed += base
            self._account = min(self._account + saved - spent, MOST_SAVED * (base + spent))
        if step.known is not None:
            self._judge(planned, step.known, step.right or step.known)
            return
        for text, proposed, count in zip(planned.texts, step.proposed, step.accepted, strict=True):
            for share in (self._texts.get(text), self._others):
                if proposed > 0 and share is not None:
                    share.add(count, count + (count < proposed), MEMORY_OF_OTHERS)

    def _judge(self, step: NextStep, known: Sequence[int], right: Sequence[int]) -> None:
        """Learn from drafts that were looked up. Those behind a wrong one tell nothing."""
        matches = step.matches or [0] * len(known)
        for text, match, num_known, num_right in zip(step.texts, matches, known, right, strict=True):
            own = self._texts.get(text)
            for place in range(min(num_right + 1, num_known)):
                length, is_right = min(max(match, 0) + place, LONGEST), place < num_right
                if own is not None:
                    own.add(is_right, self._chance_after[length], MEMORY_OF_TEXTS)
                share = self._matches[length]
                share.add(is_right, 1.0, MEMORY)
                self._chance_after[length] = (share.right + WEIGHT * PRIORS[length]) / (share.expected + WEIGHT)

    def _chances(self, step: NextStep, rooms: Sequence[int]) -> list[list[float]]:
        """Of each draft of each text, that it and all before it are right."""
        reached, pooled = [], self._others.right / self._others.expected
        for index, (room, own) in enumerate(zip(rooms, self._texts.values(), strict=True)):
            if not step.asks_again:
                chance = (own.right + PATIENCE_OF_OTHERS * pooled) / (own.expected + PATIENCE_OF_OTHERS)
                reached.append([chance**place for place in range(1, room + 1)])
                continue
            match = 0 if step.matches is None else step.matches[index]
            odds = (own.right + CAUTION * PATIENCE) / (own.expected + PATIENCE)
            product, products = 1.0, []
            for place in range(room):
                chance = self._chance_after[min(max(match, 0) + place, LONGEST)]
                product *= min(chance * odds / (1 - chance + chance * odds), MOST_CERTAIN)
                if product < LEAST_CHANCE:
                    break
                products.append(product)
            reached.append(products)
        return reached

    def _savings(self, step: NextStep, rates: list[float], base: float, fixed: float) -> dict[int, float]:
        """The share of a step that an accepted draft of each text saves; `fixed` is a forward over no token."""
        num_texts = len(rates)
        shares = [1 / num_texts] * num_texts
        if num_texts > 1 and not step.is_refilled:
            known = zip(step.texts, rates, strict=True)
            self._rates = {text: rate / 16 + self._rates.get(text, rate) * 15 / 16 for text, rate in known}
            steps = [left / (1 + rate) for left, rate in zip(step.left, self._rates.values(), strict=True)]
            last = max(steps)
            # A text that ends before the last one even without drafts saves nothing.
            weights = [
                math.exp(-8 * (1 - own / last)) if left > last or own == last else 0.0
                for own, left in zip(steps, step.left, strict=True)
            ]
            shares = [weight / sum(weights) for weight in weights]
        fixed = min(fixed / base, 1.0)
        saved = [fixed * share + (1 - fixed) / num_texts for share in shares]
        return dict(zip(step.texts, saved, strict=True))

    def _bucket(self, count: int) -> int:
        return min(bucket for bucket in self.buckets if bucket >= count)

    def _costs_of(self, step: NextStep) -> _Costs:
        return self._costs.setdefault((step.num_rows, step.is_fixed), _Costs())


@dataclass
class _Share:
    """How many drafts were right, and how many there were or were expected to be right; newer drafts count more."""

    right: float = 0.0
    expected: float = 0.0

    def add(self, right: float, expected: float, memory: float) -> None:
        self.right = self.right * memory + right
        self.expected = self.expected * memory + expected


class _Costs:
    """The seconds of a step by the number of tokens that it reads. What a machine does besides only adds to them, so
    the least of a few times counts. A number that was read once is not believed to take far longer than others say."""

    def __init__(self) -> None:
        # Of batches before this one, as far as they differ from each other.
        self._old: list[tuple[int, float]] = []
        # Numbers of which one time is enough: they took surprisingly long before, have faded, or were timed for itself.
        self._unsure: set[int] = set()
        self._times: dict[int, deque[float]] = {}
        self._points: list[tuple[int, float]] = []
        self._found: dict[int, float] = {}
        # Numbers that were read since unread ones have faded, and steps since then.
        self._read: set[int] = set()
        self._num_steps = self._num_plain = self._num_since = 0
        # Of proposing, by the number of drafts.
        self.drafting: dict[int, deque[float]] = {}

    @property
    def is_known(self) -> bool:
        """Steps without drafts were measured: not one alone, which something else may have slowed down, and not long
        ago."""
        return self._num_plain > 1 and self._num_since < FADING

    @property
    def limit(self) -> int:
        """The most tokens to read next: what was never measured is approached in steps."""
        return 2 * self._points[-1][0] + 2

    def begin(self) -> None:
        """Another batch: its texts may be longer or shorter, and all steps slower or faster."""
        self._num_since = max(self._num_since, FADING // 2)
        scale, known = self._scale(), dict(self._points)
        self._unsure |= self._times.keys() - known.keys()
        self._old = sorted((dict(self._old) | {n: seconds / scale for n, seconds in known.items()}).items())
        self._times = {}

    def add(self, tokens: int, seconds: float, is_plain: bool, is_sure: bool) -> None:
        if is_sure:
            self._unsure.add(tokens)
        self._num_plain += is_plain
        self._num_since = 0 if is_plain else self._num_since + 1
        times = self._times.setdefault(tokens, deque(maxlen=NUM_TIMES))
        before = min(times) if len(times) > 1 else None
        times.append(seconds)
        if len(times) > 2:
            self._unsure.discard(tokens)
        if before is not None and min(times) > SURPRISE * before:
            # All steps may have become slower.
            self.begin()
            self._times[tokens] = times
        if before != min(times):
            self._measure()
        self._read.add(tokens)
        self._num_steps += 1
        if self._num_steps % FADING == 0:
            self._fade()

    def _fade(self) -> None:
        """What was not read for long comes closer to what the fewest tokens say, until it is tried again."""
        scale, (low, first) = self._scale(), self._points[0]
        faded = {}
        for tokens, seconds in self._points:
            line = first * (FORWARD_COST + tokens) / (FORWARD_COST + low)
            kept = 1.0 if tokens in self._read else FADED
            faded[tokens] = min(seconds, line + kept * (seconds - line)) / scale
            if faded[tokens] * scale < seconds:
                self._unsure.add(tokens)
        self._old = sorted(faded.items())
        self._times = {tokens: times for tokens, times in self._times.items() if tokens in self._read}
        self._read = set()
        self._measure()

    def draft_seconds(self, count: int, base: float) -> float:
        """Of proposing so many drafts. Up to twice as many as were ever proposed may take no longer: a block may be one
        forward."""
        if count == 0:
            return 0.0
        if not self.drafting:
            return DRAFT_COST * base * count
        known = {
            n: min(times) if len(times) > 1 else min(times[0], 2 * DRAFT_COST * base * n)
            for n, times in self.drafting.items()
        }
        points = sorted(known.items())
        (fewest, least), (most, longest) = points[0], points[-1]
        if count > 2 * most:
            return longest * count / most
        if count >= most:
            return longest
        return self._between(points, count) if count >= fewest else least * count / fewest

    def of(self, tokens: int) -> float:
        if tokens not in self._found:
            self._found[tokens] = self._between(self._points, tokens)
        return self._found[tokens]

    def _scale(self) -> float:
        sure = self._times.keys() - self._unsure if self._old else ()
        return min((min(self._times[n]) / self._between(self._old, n) for n in sure), default=1.0)

    def _measure(self) -> None:
        scale = self._scale()
        points = {tokens: seconds * scale for tokens, seconds in self._old}
        # More tokens take no less time: of two times, the longer one for fewer tokens has another reason.
        least, times = math.inf, {}
        for tokens in sorted(self._times, reverse=True):
            own = self._times[tokens]
            times[tokens] = min(own) if len(own) > 1 else min(own[0], least)
            least = min(least, times[tokens])
        points |= {n: times[n] for n, own in self._times.items() if len(own) > 1 or n in self._unsure}
        surprises = []
        for tokens in sorted(times.keys() - points.keys()):
            seconds = times[tokens]
            expected = self._between(sorted(points.items()), tokens) if points else seconds
            if seconds <= SURPRISE * expected:
                points[tokens] = seconds
            else:
                surprises.append((seconds / expected, tokens, seconds))
        # One may have another reason; several bear each other out.
        points |= {tokens: seconds for _, tokens, seconds in sorted(surprises)[:-1]}
        self._points, self._found = sorted(points.items()), {}

    @staticmethod
    def _between(points: list[tuple[int, float]], tokens: int) -> float:
        """A line between the two points around it. Before the first and behind the last, a forward over no token costs
        as much as FORWARD_COST tokens; behind the last, a token costs no less than on average before."""
        place = bisect_left(points, (tokens, 0.0))
        if 0 < place < len(points):
            (low, first), (high, last) = points[place - 1], points[place]
            return first + (last - first) * (tokens - low) / (high - low)
        (low, first), (high, last) = points[0], points[-1]
        if place == 0:
            return first * (FORWARD_COST + tokens) / (FORWARD_COST + low)
        slope = last / (FORWARD_COST + high)
        if high > low:
            slope = max(slope, (last - first) / (high - low))
        return last + slope * (tokens - high)


def _buckets_up_to(maximum: int) -> tuple[int, ...]:
    return (*(bucket for bucket in BUCKETS if bucket < maximum), maximum)
