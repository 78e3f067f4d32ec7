"""The cost of steps with drafts, learned from the steps so far."""

from __future__ import annotations

from collections import deque

# The unit of cost is the fastest of this many recent steps without drafts. The minimum is best, because other programs
# can only make a step slower.
NUM_UNITS = 4
# After this many steps with drafts, steps without drafts are timed again.
STALE_AFTER = 64
# The weight of a step decays by this factor with each later step.
MEMORY = 63 / 64
# `are_few` is True for fewer steps with drafts than this.
FEW_STEPS = 4
# The weight of a step that is slower than expected. The weight is low, because another program may be the reason.
WEIGHT_OF_SLOW_STEPS = 0.25
# The cost of one step is capped at this multiple of the expected cost.
LARGEST_SURPRISE = 2.0
# Assumed before the first step with drafts: the fixed cost of a forward, in tokens, and the cost of a draft, in steps.
FIXED_TOKENS, DRAFT_COST = 32, 0.25
# The fit begins with a prior of no additional cost, which weighs as much as this many steps.
PRIOR_STEPS = 0.1
# The newest times of proposing are kept: this many for each number of drafts, and for lookups before a plan.
NUM_DRAFTINGS = 8


class StepCosts:
    """The cost of steps of a batch with B rows. The unit of cost is a recent step without drafts, which reads B tokens.

    A step that reads n tokens costs 1 + slope * (n - B). If it reads drafts it costs `jump` more, because kernels for
    several tokens per row may differ from kernels for a single token. `slope` and `jump` are fitted by least squares.
    Captured steps need no fit, because their times are exact.

    Args:
        num_rows: the number of rows, B.
        draft_cost: the assumed cost of proposing a draft per row, until it is timed.

    Attributes:
        jump: >= 0, in units.
        slope: from 0 to 1 / B, in units per token.
        most_drafts: the largest number of drafts in a step so far.
    """

    def __init__(self, num_rows: int, draft_cost: float) -> None:
        self._num_rows, self._draft_cost = num_rows, draft_cost
        self.jump = self.slope = 0.0
        self.most_drafts, self._first_slope = 0, 1 / (FIXED_TOKENS + num_rows)
        self._units: deque[float] = deque(maxlen=NUM_UNITS)
        self._num_plain = self._num_since_plain = 0
        self._units_are_old = False
        self._exact: dict[int, float] = {}
        # Weighted sums of 1, x, x * x, y and x * y over steps with drafts, where x = (n - B) / B and y = cost - 1.
        self._sums = [0.0] * 5
        self._draftings: dict[int, deque[float]] = {}
        self._lookups: deque[float] = deque(maxlen=NUM_DRAFTINGS)
        # Pairs (number of drafts, cost of proposing them), in ascending order.
        self._points: list[tuple[int, float]] = []
        # Times that were measured before the unit of cost. The times wait here until there is a unit.
        self._first_drafting: tuple[int, float] | None = None
        self._first_step: tuple[int, int, float] | None = None

    @property
    def are_known(self) -> bool:
        """True = steps are captured, or two recent steps without drafts were timed. One step is not enough, because it
        may have been slow by chance."""
        return self.are_exact or (bool(self._units) and self._num_plain > 1 and self._num_since_plain < STALE_AFTER)

    @property
    def are_few(self) -> bool:
        """True = only few steps with drafts were timed."""
        return self._sums[0] < FEW_STEPS

    def begin(self) -> None:
        """Begin another batch, whose steps may be slower or faster. The old unit is used until a step without drafts is
        timed."""
        self._units_are_old = True
        self._num_since_plain = max(self._num_since_plain, STALE_AFTER // 2)

    def room(self, purse: float) -> int:
        """The largest number of drafts that the next step may read. The number grows gradually, and the drafts beyond
        the largest number so far must cost no more than `purse`, the time that drafts may lose."""
        more = min(self._next_most, int(purse / self._most_each))
        return max(more, self.most_drafts, 1)

    @property
    def _next_most(self) -> int:
        if self.most_drafts > 0:
            return 3 * self.most_drafts + max(self._num_rows // 8, 1)
        # No drafts were read so far. Allow as many as are expected to cost no more to read than one draft per row costs
        # to propose.
        return max(self._num_rows // 8, int(self.of_drafting(1) / self._first_slope), 1)

    @property
    def _most_each(self) -> float:
        """An upper estimate of the cost per draft in a step with more drafts than any step so far."""
        return max(self.jump / self.most_drafts + self.slope if self.most_drafts > 0 else 0.0, self._first_slope)

    def of(self, num_rows: int) -> float:
        """The cost of a step without drafts if `num_rows` rows are unfinished."""
        return 1 + self.slope * (num_rows - self._num_rows)

    @property
    def are_exact(self) -> bool:
        """True = steps are captured, and timed before they run."""
        return bool(self._exact)

    def extra(self, num_rows: int, tokens: int, num_draft_tokens: int) -> float:
        """The additional cost of a step that reads `tokens` tokens and proposes `num_draft_tokens` drafts per row,
        compared with a step without drafts."""
        if self._exact:
            return self._between_exact(tokens)
        return self._verifying(tokens - num_rows) + self.of_drafting(num_draft_tokens)

    def risk(self, num_rows: int, tokens: int, num_draft_tokens: int) -> float:
        """An upper estimate of `extra` for a step that reads more drafts than any step so far."""
        num_drafts = tokens - num_rows
        if self._exact or num_drafts <= self.most_drafts:
            return self.extra(num_rows, tokens, num_draft_tokens)
        more = self._most_each * (num_drafts - self.most_drafts)
        return self._verifying(self.most_drafts) + more + self.of_drafting(num_draft_tokens)

    def _verifying(self, num_drafts: int) -> float:
        return self.jump + self.slope * num_drafts if num_drafts > 0 else 0.0

    def of_drafting(self, count: int) -> float:
        """The cost of proposing `count` drafts per row. The cost is interpolated between the timed numbers of drafts,
        and extrapolated beyond the largest."""
        if not self._points:
            return self._draft_cost * count
        low, first = 0, 0.0
        for high, last in self._points:
            if count <= high or high == self._points[-1][0]:
                return first + max(last - first, 0.0) * (count - low) / (high - low)
            low, first = high, last
        return first

    def add(self, num_rows: int, tokens: int, seconds: float) -> None:
        """Add a step that was timed while it ran, with `num_rows` unfinished rows."""
        if self._exact:
            return
        num_drafts, expected = tokens - num_rows, self.of(num_rows)
        if num_drafts == 0:
            self._num_plain += 1
            self._num_since_plain = 0
            if self._units_are_old:
                self._units.clear()
                self._units_are_old = False
            self._units.append(seconds / expected)
            if self._first_drafting is not None:
                self.add_drafting(*self._first_drafting)
                self._first_drafting = None
            if self._first_step is not None:
                first, self._first_step = self._first_step, None
                self.add(*first)
            return
        expected += self._verifying(num_drafts)
        self._num_since_plain += 1
        if not self._units:
            self._first_step = num_rows, tokens, seconds
            return
        # A compiled step may have far more drafts than any step before, so let its cost be proportional to the tokens
        # that it reads.
        most = LARGEST_SURPRISE * expected
        if num_drafts > self._next_most:
            most = max(most, tokens / num_rows)
        self.most_drafts = max(self.most_drafts, num_drafts)
        if self._units_are_old:
            # A step with drafts can show that steps have become faster. Only a step without drafts can show that they
            # have become slower.
            self._units = deque([min(max(self._units), seconds / expected)], maxlen=NUM_UNITS)
        cost = min(seconds / min(self._units), most)
        weight = 1.0 if cost <= expected else WEIGHT_OF_SLOW_STEPS
        self._fit(tokens / self._num_rows - 1, cost - 1, weight)

    def add_captured(self, tokens: int, seconds: float, *, is_plain: bool) -> None:
        """Add a captured step that was timed before any row ran it."""
        if is_plain:
            self._units.extend([seconds] * NUM_UNITS)
        if self._units:
            self._exact[tokens] = seconds / min(self._units)

    def _between_exact(self, tokens: int) -> float:
        """The additional cost of a captured step, interpolated between timed steps; beyond the largest of them, its
        cost. A rough value is enough there, because a larger step is timed before it runs."""
        (low, first), *points = sorted(self._exact.items())
        for high, last in points:
            if tokens <= high:
                return first + (last - first) * (tokens - low) / (high - low) - 1
            low, first = high, last
        return first - 1

    def add_drafting(self, count: int, seconds: float) -> None:
        if not self._units:
            self._first_drafting = count, seconds
            return
        self._draftings.setdefault(count, deque(maxlen=NUM_DRAFTINGS)).append(seconds / min(self._units))
        self._points = [
            (number, min(times) if len(times) > 1 else min(times[0], 2 * DRAFT_COST * number))
            for number, times in sorted(self._draftings.items())
        ]

    def add_lookup(self, seconds: float) -> float:
        """Add the time of a lookup before a plan. Returns the cost of a lookup; 0 = there is no unit of cost yet."""
        self._lookups.append(seconds)
        return min(self._lookups) / min(self._units) if self._units else 0.0

    def _fit(self, x: float, y: float, weight: float) -> None:
        news = (1.0, x, x * x, y, x * y)
        self._sums = [MEMORY * old + weight * new for old, new in zip(self._sums, news, strict=True)]
        w, wx, wxx, wy, wxy = self._sums
        w, wxx = w + PRIOR_STEPS, wxx + PRIOR_STEPS
        slope = (w * wxy - wx * wy) / (w * wxx - wx * wx)
        slope = min(max(slope, 0.0), 1.0)
        jump = (wy - slope * wx) / w
        if jump < 0:
            jump, slope = 0.0, min(max(wxy / wxx, 0.0), 1.0)
        self.jump, self.slope = jump, slope / self._num_rows
