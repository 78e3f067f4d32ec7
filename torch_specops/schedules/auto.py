"""The schedule "auto": as many drafts as have paid so far."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import check_int
from .base import NextStep, PastStep, Schedule, buckets_up_to
from .costs import StepCosts

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
# Where less than this part of a step seems to be gained, one of so many steps is without drafts, to see what it takes.
CLEAR_GAIN, LOOK_EVERY = 0.6, 4


class Auto(Schedule):
    """From 0 to K drafts for each text and step, as many as pay for themselves according to what was measured so far.

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
        num_draft_tokens = check_int("num_draft_tokens", num_draft_tokens, 1)
        given = (0, *buckets_up_to(num_draft_tokens)) if buckets is None else buckets
        self.buckets = tuple(check_int("buckets", each, 0) for each in given)
        if tuple(sorted({0, num_draft_tokens, *self.buckets})) != self.buckets:
            raise ValueError(f"buckets: expected ascending numbers from 0 to {num_draft_tokens}, got {self.buckets}")
        # By the number of rows, and whether steps are fixed.
        self._costs: defaultdict[tuple[int, bool], StepCosts] = defaultdict(StepCosts)
        # Drafts that were looked up, by match length and place: the others are planned before they are known.
        self._matches = [_Share() for _ in PRIORS]
        self._chance_after = PRIORS.copy()
        self._others = _Share(3.5, 5.0)
        self.reset()

    def reset(self) -> None:
        self._account = self._elapsed = 0.0
        self._num_undrafted = 0
        # The texts for which drafts that are not known did not pay when they were last planned.
        self._declined: list[int] | None = None
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
        texts, costs = step.texts, self._costs[step.num_rows, step.is_fixed]
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
        # Steps without drafts have taught nothing about these drafts.
        if texts == self._declined and self._num_undrafted % TRY_EVERY > 0:
            return nothing
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
        if step.asks_again and best < CLEAR_GAIN * base and costs.num_since_plain >= LOOK_EVERY:
            return nothing
        counts = nothing.copy()
        for _, _, index in offers[:num_best]:
            counts[index] += 1
        self._declined = list(texts) if num_best == 0 and not step.asks_again else None
        if self._declined is not None and self._num_undrafted >= TRY_EVERY:
            tried = [min(room, 1) for room in rooms]
            return tried if spent(sum(tried), 1) <= at_stake + LOAN * base else nothing
        return counts

    def learn(self, step: PastStep) -> None:
        planned = step.planned
        costs = self._costs[planned.num_rows, planned.is_fixed]
        plain = planned.num_rows if planned.is_fixed else len(planned.texts)
        read = plain * (1 + step.num_draft_tokens) if planned.is_fixed else plain + sum(step.proposed)
        if step.seconds and plain > 0:
            costs.add(read, step.seconds, read == plain, is_sure=not step.proposed)
        if step.num_draft_tokens > 0:
            costs.add_drafting(step.num_draft_tokens, step.draft_seconds)
        if not step.proposed:
            return
        base = costs.of(plain) if costs.is_known else 0.0
        self._elapsed += base
        if base > 0 and step.num_draft_tokens > 0:
            accepted = zip(planned.texts, step.accepted, strict=True)
            saved = sum(base * self._saved.get(text, 0.0) * count for text, count in accepted)
            spent = max(costs.of(read) - base, 0.0) + costs.draft_seconds(step.num_draft_tokens, base)
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


@dataclass
class _Share:
    """How many drafts were right, and how many there were or were expected to be right; newer drafts count more."""

    right: float = 0.0
    expected: float = 0.0

    def add(self, right: float, expected: float, memory: float) -> None:
        self.right = self.right * memory + right
        self.expected = self.expected * memory + expected
