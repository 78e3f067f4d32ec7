"""What a step of the target takes, learned from the steps so far."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median

# Times that are kept for each number of tokens, and of batches before; and how many are few.
NUM_TIMES, NUM_OLD_TIMES, FEW_TIMES = 8, 2, 2
# A number that was read once is doubted if it takes so many times what others say.
SURPRISE = 1.2
# The unit is the least of so many estimates.
NUM_UNITS = 4
# How far the least time of a number may move before anything is computed anew.
PRECISION = 0.02
# After so many steps, this part is left of what a number that was not read takes beyond expectation.
FADING, FADED = 64, 0.7
# A forward over no token, in tokens; and the draft's forward, in steps.
FORWARD_COST, DRAFT_COST = 32, 0.25


class StepCosts:
    """What a step takes by the number of tokens that it reads, in units of what the newest steps without drafts took: a
    machine may become slower or faster. What it does besides only adds to a time, so the least of a few times counts,
    and more tokens take no less time. Of the numbers that were read once, one may have been read in a slow step.

    Attributes:
        num_since_plain: steps since one without drafts.
    """

    def __init__(self) -> None:
        # In units, by the number of tokens; and the least of them when all were compared last.
        self._times: dict[int, deque[float]] = {}
        self._least: dict[int, float] = {}
        # What is left of what a number takes beyond expectation, if it was not read for long.
        self._trust: dict[int, float] = {}
        # The numbers of tokens of steps in this batch, and the seconds of a unit by each.
        self._units: deque[tuple[int, float]] = deque(maxlen=NUM_UNITS)
        # In units, by the number of tokens: steps without drafts, in the order in which their numbers came.
        self._plain: dict[int, deque[float]] = {}
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
        self._units.clear()
        for times in self._times.values():
            while len(times) > NUM_OLD_TIMES:
                times.popleft()

    def add(self, tokens: int, seconds: float, is_plain: bool, is_sure: bool) -> None:
        if is_plain or not self._points:
            self._units.append((tokens, seconds / self._add_plain(tokens, seconds)))
        # Until there are steps without drafts, others of this batch tell the unit by what they took before.
        elif not self._units or (len(self._units) < NUM_UNITS and len(self._times.get(tokens, ())) > 1):
            self._units.append((tokens, seconds / self.of(tokens)))
        self._num_plain += is_plain
        self.num_since_plain = 0 if is_plain else self.num_since_plain + 1
        times = self._times.setdefault(tokens, deque(maxlen=NUM_TIMES))
        if self._trust.pop(tokens, 1.0) < 1.0:
            while len(times) > 1:
                times.popleft()
        # A step that was timed for itself is believed at once.
        times.extend([seconds / self._unit] * (2 if is_sure else 1))
        if len(times) < 3 or abs(min(times) - self._least[tokens]) > PRECISION * self._least[tokens]:
            self._measure()
        self._read.add(tokens)
        self._num_steps += 1
        if self._num_steps % FADING == 0:
            for unread in self._times.keys() - self._read:
                self._trust[unread] = FADED * self._trust.get(unread, 1.0)
            self._read = set()
            self._measure()

    def add_drafting(self, count: int, seconds: float) -> None:
        if not self._units:
            return
        times = self._drafting.setdefault(count, deque(maxlen=NUM_TIMES))
        before = min(times) if len(times) > 1 else None
        times.append(seconds / self._unit)
        if before != min(times):
            self._drafting_found = {}

    @property
    def _unit(self) -> float:
        return min(unit for _, unit in self._units)

    def _add_plain(self, tokens: int, seconds: float) -> float:
        """What a step without drafts takes in units. The first number takes 1, and others are compared with numbers
        that came before them alone: a unit that was compared with itself would drift."""
        numbers = list(self._plain)
        earlier = numbers[: numbers.index(tokens)] if tokens in numbers else numbers
        units = [unit for number, unit in self._units if number in earlier]
        times = self._plain.setdefault(tokens, deque(maxlen=NUM_TIMES))
        if units:
            times.append(seconds / min(units))
        elif not times:
            times.append(self.of(tokens) if self._points else 1.0)
        return median(times)

    def draft_seconds(self, count: int, base: float) -> float:
        """Of proposing so many drafts."""
        if count not in self._drafting_found:
            self._drafting_found[count] = self._draft_seconds(count, base)
        return self._drafting_found[count]

    def _draft_seconds(self, count: int, base: float) -> float:
        """Up to twice as many as were ever proposed may take no longer: a block may be one forward."""
        if not self._drafting:
            return DRAFT_COST * base * count
        points = [(0, 0.0)]
        for n, times in sorted(self._drafting.items()):
            points.append((n, min(times) if len(times) > 1 else min(times[0], 2 * DRAFT_COST * base * n)))
        most, longest = points[-1]
        if count >= most:
            return longest if count <= 2 * most else longest * count / most
        return self._between(points, count)

    def of(self, tokens: int) -> float:
        if tokens not in self._found:
            self._found[tokens] = self._between(self._points, tokens)
        return self._found[tokens]

    def _measure(self) -> None:
        self._least = {tokens: min(times) for tokens, times in self._times.items()}
        found = self._rising()
        sure = sorted((tokens, found[tokens]) for tokens, times in self._times.items() if len(times) > 1)
        if sure:
            # Of the numbers that were read once, one may have another reason to surprise; several bear each other out.
            once = {n: found[n] / self._between(sure, n) for n, times in self._times.items() if len(times) == 1}
            if once and max(once.values()) > SURPRISE:
                del found[max(once, key=once.__getitem__)]
        fresh = sorted((tokens, seconds) for tokens, seconds in found.items() if tokens not in self._trust)
        for tokens in found.keys() & self._trust.keys() if fresh else ():
            line = self._between(fresh, tokens)
            found[tokens] = min(found[tokens], line + self._trust[tokens] * (found[tokens] - line))
        self._points, self._found = sorted(found.items()), {}

    def _rising(self) -> dict[int, float]:
        """The least times, made to rise by the number of tokens: isotonic regression. Where fewer tokens seem to take
        longer, few times of them have another reason, and many are averaged."""
        least, blocks = math.inf, list[tuple[list[int], int, float]]()
        for tokens in sorted(self._times, reverse=True):
            numbers, count, mean = [tokens], len(self._times[tokens]), self._least[tokens]
            if count <= FEW_TIMES:
                mean = min(mean, least)
            least = min(mean, least)
            while blocks and blocks[-1][2] < mean:
                more, num_times, others = blocks.pop()
                mean = (count * mean + num_times * others) / (count + num_times)
                numbers, count = numbers + more, count + num_times
            blocks.append((numbers, count, mean))
        return {tokens: mean for numbers, _, mean in blocks for tokens in numbers}

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
