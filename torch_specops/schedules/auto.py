"""The schedule "auto", which chooses as many drafts as have paid so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import NamedTuple

from ..checks import check_int
from .base import NextStep, PastStep, Schedule, buckets_up_to
from .costs import DRAFT_COST, StepCosts

# Drafts may lose a limited time in a batch, measured in steps: LOST_SHARE of all steps of the batch, but at most LOAN +
# LATER_SHARE of the steps so far.
LOST_SHARE, LOAN, LATER_SHARE = 0.0165, 3.0, 0.01
# Drafts may also lose the time that earlier drafts have gained, up to MOST_SAVED steps.
MOST_SAVED = 4.0
# The reserve is the time that earlier batches were allowed to lose and did not lose. Drafts may lose the reserve too.
# It begins with FIRST_RESERVE steps, and grows to at most LARGEST_RESERVE steps.
FIRST_RESERVE, LARGEST_RESERVE = 0.4, 2.0
# For looked-up drafts, PRIORS[n] is the prior probability that a draft is right after a match of n tokens; longer
# matches count as LONGEST tokens. The prior weighs as much as WEIGHT drafts. The weight of earlier drafts decays by
# MEMORY with each draft.
LONGEST = 20
PRIORS = [0.1, 0.1, *(min(0.95, 0.4 + 0.08 * (length - 2)) for length in range(2, LONGEST + 1))]
WEIGHT, MEMORY = 6.0, 0.5 ** (1 / 256)
# In a new sequence, the odds that a looked-up draft is right are multiplied by CAUTION. This prior weighs as much as
# PATIENCE drafts of the sequence. The weight of earlier drafts decays by MEMORY_OF_SEQUENCE with each draft.
PATIENCE, CAUTION, MEMORY_OF_SEQUENCE = 2.0, 0.7, 0.95
# For other drafts: the prior probability that a draft is right, and the weight of this prior, in drafts.
CHANCE_OF_OTHERS, WEIGHT_OF_OTHERS = 0.7, 5.0
PATIENCE_OF_OTHERS, MEMORY_OF_OTHERS = 8.0, 0.5 ** (1 / 50)
MOST_CERTAIN, LEAST_CHANCE = 0.98, 0.01
# In later steps, the number of accepted drafts of a sequence is nearer to the mean of the batch by this share, because
# copied passages end and begin.
TO_THE_MEAN = 0.6
# Drafts that did not pay are tried again after TRY_AFTER steps without drafts. The number doubles with each try, up to
# TRY_AFTER_AT_MOST.
TRY_AFTER, TRY_AFTER_AT_MOST = 8, 64
# Of two sources, looked-up drafts count by this factor: the probability that they are right changes from passage to
# passage, and the estimate is often too high.
MARGIN = 0.8
# If there is another source, drafts are looked up in each step, after LOOK_UP_LESS_AFTER steps that verified none in
# every second, after as many more in every third, then in every fourth.
LOOK_UP_LESS_AFTER, RAREST_LOOKUPS = 8, 4


class Auto(Schedule):
    """Chooses 0 to K drafts for each sequence and step: as many as pay, according to measurements.

    `StepCosts` learns the cost of drafts. The schedule also learns from earlier drafts the probability that a draft is
    right: for looked-up drafts by match length and place in the step, for other drafts by sequence. New tokens show
    whether looked-up drafts were right, even if these were not verified. Other drafts must be tried now and then.

    With two sources (`LookupElse`), an eager step on a CPU has looked-up drafts alone, or for each row the drafts of
    the source from which more are expected to be right. The schedule takes the plan with the larger gain per time. In
    both choices, looked-up drafts must be a quarter better. Each source may lose the time below, so bad drafts of one
    do not stop the other, and lookups stop when they have lost it. The longer no looked-up draft is verified, the fewer
    steps have a lookup. The other source is tried beside looked-up drafts too. A subclass that overrides `plan` plans
    both sources as one.

    If finished rows are refilled (sessions, `generate_many`), an accepted draft of one of n sequences saves 1 / n of a
    step. Otherwise the batch ends with its slowest row, and only drafts of the rows that end last save time. Such
    drafts save less in larger batches, where the slowest row falls further below the mean by chance.

    After every step the schedule estimates how much time drafts have lost so far, compared with decoding without
    drafts. A step may have drafts only if this loss would stay below 1.65 % of the batch's time even if all of these
    drafts are wrong. If the batch ends early, the bound is 1.65 % of the time to its limit. Earlier batches may have
    lost less than they were allowed to lose; a batch may lose this time too, up to two steps. A batch may also lose
    time that drafts have gained in earlier batches, up to four steps. A step that takes longer than expected may exceed
    the bound once.

    Costs and probabilities are kept from batch to batch, except the probabilities of single sequences.

    Args:
        num_draft_tokens: the largest number of drafts of a row, K >= 1.
        buckets: the values of K of compiled steps, from 0 to K; None = 0, 1, 2, 3, 5, 8, 12, 20 as far as they are
            below K, and K.

    Examples:
        >>> from dataclasses import replace
        >>> from torch_specops.schedules import Auto, NextStep, PastStep
        >>> schedule = Auto(4)
        >>> step = NextStep([0], rooms=[9], left=[10], num_rows=1, looks_up=True, asks_again=True)
        >>> for _ in range(2):
        ...     schedule.learn(PastStep(step, proposed=[0], accepted=[0], seconds=0.03))
        >>> schedule.plan(replace(step, offered=[4], matches=[12]))
        [1]
    """

    def __init__(self, num_draft_tokens: int = 10, buckets: Sequence[int] | None = None) -> None:
        num_draft_tokens = check_int("num_draft_tokens", num_draft_tokens, 1)
        numbers = (0, *buckets_up_to(num_draft_tokens)) if buckets is None else buckets
        self.buckets = tuple(check_int("buckets", number, 0) for number in numbers)
        if tuple(sorted({0, num_draft_tokens, *self.buckets})) != self.buckets:
            raise ValueError(f"buckets: expected ascending numbers from 0 to {num_draft_tokens}, got {self.buckets}")
        # The costs for each number of rows, separately for eager and compiled steps.
        self._costs: dict[tuple[int, bool], StepCosts] = {}
        # Counts of looked-up drafts, by match length + place in the step.
        self._matches = [_Share() for _ in PRIORS]
        self._chance_after = PRIORS.copy()
        self._others = _Share(CHANCE_OF_OTHERS * WEIGHT_OF_OTHERS, WEIGHT_OF_OTHERS)
        # Of two sources, the second reserve is for steps with drafts of the second source.
        self._reserves = _Reserve(), _Reserve()
        self.reset()

    def reset(self) -> None:
        self._purses = tuple(map(_Purse, self._reserves))
        self._elapsed = self._num_undrafted = self._num_unused = 0
        self._try_after = TRY_AFTER
        # A step with drafts that ran before costs were known, and the cost that was assumed for it.
        self._unjudged: tuple[PastStep, float] | None = None
        # The sequences of the last plan, if it found that their drafts do not pay.
        self._declined: list[int] | None = None
        # By sequence, for looked-up drafts and for others.
        self._sequences: dict[int, tuple[_Share, _Share]] = {}
        for costs in self._costs.values():
            costs.begin()

    def plan(self, step: NextStep) -> list[int]:
        return self.plan_sources(step)[0]

    def plan_sources(self, step: NextStep) -> tuple[list[int], list[bool]]:
        """As `plan`, and if there are two sources, whether each sequence gets the drafts of the first."""
        counts, is_first = self._planned(step)
        if not step.asks_again or step.offered is not None or not any(counts):
            is_drafted = any(count > 0 and not first for count, first in zip(counts, is_first, strict=True))
            self._num_undrafted = 0 if is_drafted else self._num_undrafted + 1
        return counts, is_first

    def _planned(self, step: NextStep) -> tuple[list[int], list[bool]]:
        costs, nothing, none = self._costs_of(step), [0] * len(step.texts), [False] * len(step.texts)
        rooms, has_two = step.at_most(self.buckets[-1]), step.num_others is not None
        allowance = self._allowance(step)
        purses = [purse.most(allowance) for purse in self._purses[: 1 + has_two]]
        if not any(rooms) or max(purses) <= 0:
            return nothing, none
        if step.asks_again and step.offered is None:
            return rooms, none
        # The first step may have drafts although costs are unknown, because the draft has just read the prompts and
        # need not catch up.
        is_begin = self._elapsed == 0 and self._num_undrafted == 0 and not (step.is_compiled or step.looks_up)
        if not costs.are_known and not is_begin:
            return nothing, none
        is_declined, is_due = step.texts == self._declined, self._num_undrafted >= self._try_after
        # Plan no drafts before the next try is due: steps without drafts teach nothing about the drafts of a model.
        if is_declined and not any(step.offered or ()) and not is_due:
            return nothing, none
        self._sequences = {text: self._sequences.get(text) or (_Share(), _Share()) for text in step.texts}
        reached = self._chances_of_lookups(step) if step.asks_again else self._chances(step)
        if has_two:
            counts, is_first = self._better(step, costs, reached, *purses)
        else:
            counts, is_first = self._best(step, costs, reached, *purses).counts, none
        is_tried = any(count > 0 and not first for count, first in zip(counts, is_first, strict=True))
        if is_tried:
            self._try_after = TRY_AFTER
        elif is_due and (is_declined or any(counts)) and (costs.are_few or not step.asks_again):
            # Of two sources try the second, in rows without looked-up drafts.
            tried = self._best(step, costs, reached, purses[-1], is_trial=True).counts
            is_first, counts = list(map(bool, counts)), list(map(max, counts, tried))
            self._try_after = min(2 * self._try_after, TRY_AFTER_AT_MOST)
        self._declined = None if any(counts) else list(step.texts)
        return counts, is_first

    def may_look_up(self, step: NextStep) -> bool:
        """Whether to look up drafts before the plan, if there are two sources: not if the time of a lookup may not be
        lost, and seldom if no looked-up draft is verified."""
        every = min(1 + self._num_unused // LOOK_UP_LESS_AFTER, RAREST_LOOKUPS)
        return self._num_unused % every == 0 and self._purses[0].most(self._allowance(step)) > 0

    def _allowance(self, step: NextStep) -> float:
        """How much time drafts of the batch may lose."""
        steps = self._elapsed + max(step.left, default=0)
        return min(LOST_SHARE * steps, LOAN + LATER_SHARE * self._elapsed)

    def _better(
        self, step: NextStep, costs: StepCosts, others: list[list[float]], purse: float, purse_of_others: float
    ) -> tuple[list[int], list[bool]]:
        """The better of two plans: looked-up drafts alone; or for each row the drafts of the source from which more are
        expected to be right."""
        looked_up = self._chances_of_lookups(step)
        first = self._best(replace(step, looks_up=True), costs, looked_up, purse)
        is_first = [MARGIN * sum(chances) >= sum(other) for chances, other in zip(looked_up, others, strict=True)]
        if not all(is_first):
            sources = list(zip(looked_up, others, is_first, strict=True))
            reached = [chances if is_looked_up else other for chances, other, is_looked_up in sources]
            mixed = self._best(step, costs, reached, purse_of_others)
            if mixed.rate > MARGIN * first.rate:
                return mixed.counts, is_first
        return first.counts, list(map(bool, first.counts))

    def _best(
        self,
        step: NextStep,
        costs: StepCosts,
        reached: list[list[float]],
        purse: float,
        *,
        is_trial: bool = False,
    ) -> _Best:
        """The numbers of drafts with the largest expected gain whose risk fits into the purse. All numbers are 0 if no
        choice gains, except in a trial.

        Args:
            reached: the probability that each draft of this step is accepted.
        """
        num_texts, buckets, left = len(reached), self.buckets, max(step.left)
        nothing = _Best(0.0, [0] * num_texts)
        if not any(reached):
            return nothing
        plain, base, per_token = _without_drafts(step, costs)
        shares, saved = self._savings(step, reached, base, per_token)
        luck = _Luck(shares, 0 if step.is_refilled else left)
        levels = [level for level in buckets if level > 0] if step.is_compiled else list(range(1, buckets[-1] + 1))
        if is_trial or not costs.are_known:
            levels = levels[:1]
        room = plain * buckets[-1] if step.is_compiled or step.reads_prompts else costs.room(purse)
        is_behind = not step.looks_up and self._num_undrafted > 0
        catching_up = costs.of_drafting(1) if is_behind else 0.0
        # Compiled steps read the same number of drafts for all rows, so leaving out a single draft that does not pay
        # saves nothing.
        least = -math.inf if step.is_compiled or is_trial else per_token
        offers: list[tuple[float, int, int]] = []
        choices: list[_Choice] = []
        worth, before = 0.0, 0
        for level in levels:
            more = [
                (chances[place] * saved[index], place, index)
                for index, chances in enumerate(reached)
                for place in range(before, min(level, len(chances)))
                if chances[place] * saved[index] > least
            ]
            if not more:
                break
            worth += sum(value for value, _, _ in more)
            for _, place, index in more if luck.matters else ():
                luck.add(index, place, reached[index][place])
            offers, before = offers + more, level
            read = plain * (1 + level) if step.is_compiled else plain + (0 if step.reads_prompts else len(offers))
            # Looked-up drafts are already proposed here, so proposing costs nothing more.
            num_proposed = 0 if step.looks_up else min(level, step.num_others or level)
            extra = costs.extra(plain, read, num_proposed) + catching_up / left
            gain = worth - base * luck.loss - extra
            rate = gain / (base + extra)
            if step.is_refilled and num_texts > 1:
                # A longer step takes time in which other steps would gain too, so compare what equal times gain. Not
                # where rows wait for the slowest, because `luck` already lowers the number of drafts, nor for a single
                # row, whose estimated probabilities vary so much that the number would often be too low.
                gain = rate
            risk = costs.risk(plain, min(read, plain + room), num_proposed) + catching_up
            if (gain > 0 or is_trial) and risk <= purse:
                choices.append(_Choice(gain, risk, level, len(offers), rate))
            # The gain rises, then falls, so stop at the first fall. The measured times of captured steps may jump, so
            # try all levels of compiled steps.
            if choices and gain < choices[-1].gain and not step.is_compiled:
                break
        if not choices:
            return nothing
        # Prefer choices that use at most half of the purse, so that drafting can continue if all drafts of this step
        # are wrong.
        safe = [choice for choice in choices if 2 * choice.risk <= purse]
        best = max(safe) if safe else min(choices, key=lambda choice: choice.risk)
        total = best.num_offers
        if step.is_compiled:
            return _Best(best.rate, step.at_most(best.level))
        chosen = offers[:total] if total <= room else sorted(offers[:total], reverse=True)[:room]
        counts = [0] * num_texts
        for _, _, index in chosen:
            counts[index] += 1
        return _Best(best.rate, counts)

    def learn(self, step: PastStep) -> None:
        planned, count = step.planned, step.num_draft_tokens
        costs, (plain, read) = self._costs_of(planned), self._tokens_read(step)
        if not step.proposed:
            if step.seconds:
                costs.add_captured(read, step.seconds, is_plain=count == 0)
            return
        if step.seconds:
            costs.add(plain, read, step.seconds)
        if count > 0 and not costs.are_exact:
            costs.add_drafting(count + step.caught_up, step.draft_seconds)
        self._elapsed += 1
        for reserve in self._reserves:
            if reserve.num_steps < LARGEST_RESERVE:
                reserve.num_steps += LOST_SHARE
        cost = self._cost(step, costs)
        purse = self._purses[step.is_looked_up is not None and count > 0]
        if count > 0 and not costs.are_known:
            self._unjudged = step, cost
        elif self._unjudged is not None and costs.are_known:
            first, assumed = self._unjudged
            purse.gain(assumed - self._cost(first, costs))
            self._unjudged = None
        purse.gain(self._saved(planned, step.accepted, costs) - cost)
        if step.lookup_seconds:
            self._purses[0].gain(-costs.add_lookup(step.lookup_seconds))
        is_used = any(count > 0 and first for count, first in zip(step.proposed, step.is_looked_up or (), strict=False))
        self._num_unused = 0 if is_used else self._num_unused + 1
        if step.known is not None:
            self._judge(planned, step.known, step.right or step.known)
            if step.is_looked_up is None:
                return
        is_looked_up = step.is_looked_up or repeat(False)
        rows = zip(planned.texts, step.proposed, step.accepted, is_looked_up, strict=False)
        for text, proposed, accepted, is_known in rows:
            for share in (self._others, self._sequences.get(text, (None, None))[1]):
                if proposed > 0 and not is_known and share is not None:
                    share.add(accepted, accepted + (accepted < proposed), MEMORY_OF_OTHERS)

    def _cost(self, step: PastStep, costs: StepCosts) -> float:
        """The cost of a step's drafts, in units of a step without drafts."""
        plain, read = self._tokens_read(step)
        drafting = step.caught_up * costs.of_drafting(1)
        return drafting + costs.extra(plain, read if step.seconds else plain, step.num_draft_tokens)

    @staticmethod
    def _tokens_read(step: PastStep) -> tuple[int, int]:
        """The number of tokens that the target reads in a step without drafts, and the number in this step."""
        plain = _num_read(step.planned)
        return plain, plain + (plain * step.num_draft_tokens if step.planned.is_compiled else sum(step.proposed))

    def _saved(self, step: NextStep, accepted: Sequence[int], costs: StepCosts) -> float:
        """The time that a step's accepted drafts saved, in units of a step without drafts."""
        plain, base, per_token = _without_drafts(step, costs)
        if step.is_refilled:
            return base * sum(accepted) / len(accepted)
        after = max(left - count for left, count in zip(step.left, accepted, strict=True))
        return (base - per_token * plain) * (max(step.left) - after) + per_token * sum(accepted)

    def _judge(self, step: NextStep, known: Sequence[int], right: Sequence[int]) -> None:
        """Learn from the looked-up drafts of a step, up to the first wrong draft."""
        matches = step.matches or [0] * len(known)
        for text, match, num_known, num_right in zip(step.texts, matches, known, right, strict=True):
            sequence, _ = self._sequences.get(text, (None, None))
            for place in range(min(num_right + 1, num_known)):
                length, is_right = min(max(match, 0) + place, LONGEST), place < num_right
                if sequence is not None:
                    sequence.add(is_right, self._chance_after[length], MEMORY_OF_SEQUENCE)
                share = self._matches[length]
                share.add(is_right, 1.0, MEMORY)
                self._chance_after[length] = (share.right + WEIGHT * PRIORS[length]) / (share.expected + WEIGHT)

    def _chances(self, step: NextStep) -> list[list[float]]:
        """For each sequence and draft, the probability that this draft and all drafts before it are right."""
        most = self.buckets[-1] if step.num_others is None else min(step.num_others, self.buckets[-1])
        reached, pooled = [], self._others.right / self._others.expected
        for room, (_, sequence) in zip(step.rooms, self._sequences.values(), strict=True):
            chance = (sequence.right + PATIENCE_OF_OTHERS * pooled) / (sequence.expected + PATIENCE_OF_OTHERS)
            reached.append([chance**place for place in range(1, min(room, most) + 1)])
        return reached

    def _chances_of_lookups(self, step: NextStep) -> list[list[float]]:
        """As `_chances`, for looked-up drafts."""
        offered, reached = step.offered or step.rooms, []
        rooms = [min(room, count, self.buckets[-1]) for room, count in zip(step.rooms, offered, strict=True)]
        for index, (room, (sequence, _)) in enumerate(zip(rooms, self._sequences.values(), strict=True)):
            match = 0 if step.matches is None else min(max(step.matches[index], 0), LONGEST)
            odds = (sequence.right + CAUTION * PATIENCE) / (sequence.expected + PATIENCE)
            product, products = 1.0, []
            for chance in islice(chain(self._chance_after[match:], repeat(self._chance_after[LONGEST])), room):
                right = odds * chance
                product *= min(right / (1 - chance + right), MOST_CERTAIN)
                if product < LEAST_CHANCE:
                    break
                products.append(product)
            reached.append(products)
        return reached

    def _savings(
        self, step: NextStep, reached: list[list[float]], base: float, per_token: float
    ) -> tuple[list[float], list[float]]:
        """Two numbers for each sequence: its weight in the time at which the batch ends, and the time that an accepted
        draft saves. The unit is a step without drafts."""
        num_texts = len(reached)
        if step.is_refilled or num_texts == 1:
            return [1 / num_texts] * num_texts, [base / num_texts] * num_texts
        accepted = [sum(chances) for chances in reached]
        mean = sum(accepted) / num_texts
        steps = [
            left / (1 + count + TO_THE_MEAN * (mean - count)) for left, count in zip(step.left, accepted, strict=True)
        ]
        last = max(steps)
        # Drafts of a sequence save nothing if it ends before the slowest sequence even without drafts.
        weights = [
            math.exp(-8 * (1 - num_steps / last)) if left > last or num_steps == last else 0.0
            for num_steps, left in zip(steps, step.left, strict=True)
        ]
        whole = sum(weights)
        shares = [weight / whole for weight in weights]
        fixed = base - per_token * num_texts
        return shares, [fixed * share + per_token for share in shares]

    def _costs_of(self, step: NextStep) -> StepCosts:
        key = step.num_rows, step.is_compiled
        if key not in self._costs:
            self._costs[key] = StepCosts(step.num_rows, 0.0 if step.looks_up else DRAFT_COST)
        return self._costs[key]


def _num_read(step: NextStep) -> int:
    """The number of rows that the target reads. Compiled steps also read rows that have ended."""
    return step.num_rows if step.is_compiled else len(step.texts)


def _without_drafts(step: NextStep, costs: StepCosts) -> tuple[int, float, float]:
    """For a step without drafts: the number of tokens that it reads, its cost, and the cost that one row less saves."""
    num_read = _num_read(step)
    return num_read, costs.of(num_read), 0.0 if step.is_compiled else costs.slope


@dataclass
class _Share:
    """The number of drafts that were right, and the number with which it is compared: all drafts, or those that were
    expected to be right. Newer drafts weigh more."""

    right: float = 0.0
    expected: float = 0.0

    def add(self, right: float, expected: float, memory: float) -> None:
        self.right = self.right * memory + right
        self.expected = self.expected * memory + expected


@dataclass
class _Reserve:
    """The time that drafts may still lose over all batches, in steps. All copies of a schedule share this object."""

    num_steps: float = FIRST_RESERVE


class _Purse:
    """How much time drafts of a batch may lose.

    Args:
        reserve: the time that earlier batches did not lose.
    """

    def __init__(self, reserve: _Reserve) -> None:
        reserve.num_steps = min(reserve.num_steps, LARGEST_RESERVE + MOST_SAVED)
        self._reserve, self._first = reserve, reserve.num_steps
        # The time that drafts have gained so far, in units of a step without drafts.
        self._gained = 0.0

    def most(self, allowance: float) -> float:
        """How much time drafts may cost in the next step, if all drafts of the batch may lose `allowance`."""
        # The reserve is negative if an earlier batch ended before its limit and had lost more than its share. This
        # batch pays it back.
        return self._gained + max(allowance + min(self._first, 0.0), self._first)

    def gain(self, gain: float) -> None:
        self._gained = min(self._gained + gain, MOST_SAVED)
        self._reserve.num_steps += gain


class _Choice(NamedTuple):
    """A candidate plan: verify the first `num_offers` of the drafts on offer, at most `level` per row.

    Args:
        gain: the expected gain, in steps; with several rows of a refilled batch, divided by the time of the step.
        risk: the loss if all drafts are wrong.
        rate: the expected gain divided by the time of the step.
    """

    gain: float
    risk: float
    level: int
    num_offers: int
    rate: float


class _Best(NamedTuple):
    """A plan: the numbers of drafts, and the expected gain divided by the time of the step."""

    rate: float
    counts: list[int]


class _Luck:
    """Estimates how far the slowest sequence of a batch falls below the mean by chance.

    Over S steps the number of accepted drafts of a sequence has the variance S v. So the slowest of n sequences is z(n)
    sqrt(S v) drafts below the mean, or z sqrt(v / S) drafts per step. Here z(n) is the mean of the largest of n
    standard normals: about sqrt(2 ln n) - 0.55, within 0.08 from n = 2 to 64.

    Args:
        shares: the weight of each sequence in the time at which the batch ends; n is 1 / the sum of their squares.
        left: the number of tokens until the end of the longest sequence; 0 = no sequence waits for another.
    """

    def __init__(self, shares: Sequence[float], left: int) -> None:
        num_effective = 1 / sum(share * share for share in shares) if left > 0 else 1.0
        self._z = max(math.sqrt(2 * math.log(max(num_effective, 1.0))) - 0.55, 0.0)
        self.matters = self._z > 0
        self._shares, self._left = shares, left
        self._means = [0.0] * len(shares)
        self._mean = self._variance = 0.0

    def add(self, index: int, place: int, reached: float) -> None:
        """Add a draft that comes `place` drafts after the first and is accepted with probability `reached`."""
        share, mean = self._shares[index], self._means[index]
        self._variance += share * reached * (2 * place + 1 - 2 * mean - reached)
        self._means[index] = mean + reached
        self._mean += share * reached

    @property
    def loss(self) -> float:
        """How far the slowest sequence is below the mean, in drafts per step."""
        if not self.matters:
            return 0.0
        return self._z * math.sqrt(max(self._variance, 0.0) * (1 + self._mean) / self._left)
