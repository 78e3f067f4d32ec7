"""What a step of the target takes, learned from the steps so far."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

# Times that are kept for each number of tokens. One that was read once takes at most SURPRISE times what others say.
NUM_TIMES, SURPRISE = 8, 1.2
# The fastest of so many newest steps without drafts is the unit.
NUM_UNITS = 4
# How far the least time of a number may move before anything is computed anew.
PRECISION = 0.02
# After so many steps what was not read loses so much of what it takes beyond expectation.
FADING, FADED = 64, 0.7
# A forward over no token, in tokens; and the draft's forward, in steps.
FORWARD_COST, DRAFT_COST = 32, 0.25


class StepCosts:
    """What a step takes by the number of tokens that it reads, in units of what the newest steps without drafts took: a
    machine may become slower or faster. What it does besides only adds to a time, so the least of a few times counts. A
    number that was read once is not believed to take far longer than others say.

    Attributes:
        num_since_plain: steps since one without drafts.
    """

    def __init__(self) -> None:
        # Of batches before this one, as far as they differ from each other.
        self._old: list[tuple[int, float]] = []
        # Numbers of which one time is enough: they took surprisingly long before, have faded, or were timed for itself.
        self._unsure: set[int] = set()
        self._times: dict[int, deque[float]] = {}
        # Of the times, when they were measured last.
        self._least: dict[int, float] = {}
        # The newest steps without drafts, in seconds over what they are expected to take in units.
        self._units: deque[float] = deque(maxlen=NUM_UNITS)
        self._points: list[tuple[int, float]] = []
        self._found: dict[int, float] = {}
        # Numbers that were read since unread ones have faded, and steps since then.
        self._read: set[int] = set()
        self._num_steps = self._num_plain = self.num_since_plain = 0
        # Of proposing, by the number of drafts.
        self._drafting: dict[int, deque[float]] = {}
        self._drafting_found: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        """Steps without drafts were measured: not one alone, which something else may have slowed down, and not long
        ago."""
        return self._num_plain > 1 and self.num_since_plain < FADING

    @property
    def limit(self) -> int:
        """The most tokens to read next: what was never measured is approached in steps."""
        return 2 * self._points[-1][0] + 2

    def begin(self) -> None:
        """Another batch: its texts may be longer or shorter, and all steps slower or faster."""
        self.num_since_plain = max(self.num_since_plain, FADING // 2)
        scale, known = self._scale(), dict(self._points)
        self._unsure |= self._times.keys() - known.keys()
        old = dict(self._old)
        # One time of a number is not enough to forget what it took before.
        old |= {n: seconds / scale for n, seconds in known.items() if n not in old or len(self._times.get(n, ())) > 1}
        self._old = sorted(old.items())
        self._times = {}

    def add(self, tokens: int, seconds: float, is_plain: bool, is_sure: bool) -> None:
        if is_plain or not self._units:
            self._units.append(seconds / (self.of(tokens) if self._points else 1.0))
        seconds /= min(self._units)
        if is_sure:
            self._unsure.add(tokens)
        self._num_plain += is_plain
        self.num_since_plain = 0 if is_plain else self.num_since_plain + 1
        times = self._times.setdefault(tokens, deque(maxlen=NUM_TIMES))
        before = min(times) if len(times) > 1 else None
        times.append(seconds)
        least = min(times)
        if len(times) > 2:
            self._unsure.discard(tokens)
        if before is not None and least > SURPRISE * before:
            # All steps may have become slower.
            self.begin()
            self._times[tokens] = times
        if before is None or abs(least - self._least[tokens]) > PRECISION * self._least[tokens]:
            self._measure()
        self._read.add(tokens)
        self._num_steps += 1
        if self._num_steps % FADING == 0:
            self._fade()

    def add_drafting(self, count: int, seconds: float) -> None:
        if not self._units:
            return
        times = self._drafting.setdefault(count, deque(maxlen=NUM_TIMES))
        before = min(times) if len(times) > 1 else None
        times.append(seconds / min(self._units))
        if before != min(times):
            self._drafting_found = {}

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
        """Of proposing so many drafts."""
        if count not in self._drafting_found:
            self._drafting_found[count] = self._draft_seconds(count, base) if count > 0 else 0.0
        return self._drafting_found[count]

    def _draft_seconds(self, count: int, base: float) -> float:
        """Up to twice as many as were ever proposed may take no longer: a block may be one forward."""
        if not self._drafting:
            return DRAFT_COST * base * count
        known = {
            n: min(times) if len(times) > 1 else min(times[0], 2 * DRAFT_COST * base * n)
            for n, times in self._drafting.items()
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
        self._least = {tokens: min(own) for tokens, own in self._times.items()}
        # More tokens take no less time: of two times, the longer one for fewer tokens has another reason.
        least, times = math.inf, {}
        for tokens in sorted(self._times, reverse=True):
            own = self._times[tokens]
            times[tokens] = self._least[tokens] if len(own) > 1 else min(own[0], least)
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
