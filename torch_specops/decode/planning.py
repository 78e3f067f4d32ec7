"""Asks the schedule how many drafts each row gets, and reports the results of steps to it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from .. import checks
from ..drafts import Draft, DraftSource, LookupElse
from ..schedules import Auto, NextStep, PastStep, Schedule
from .rows import Row
from .state import DecodeState


@dataclass
class PlannedStep:
    """A planned step, which is kept until the record of the step is read.

    Args:
        rows: the rows of the batch when the step began.
        active: the indices of rows that had not ended.
        asked: the argument of the last call of `Schedule.plan` for this step.
        counts: the numbers of drafts that the schedule chose for the active rows.
        is_masked: whether a row has a grammar.
        num_draft_tokens: the number of drafts per row, K.
        drafts: the draft tokens [B, K]; None = the schedule did not see them.
        seconds, draft_seconds, lookup_seconds, caught_up, is_looked_up: as in `PastStep`.
    """

    rows: list[Row]
    active: list[int]
    asked: NextStep
    counts: list[int]
    is_masked: bool
    num_draft_tokens: int
    drafts: list[list[int]] | None = None
    seconds: float | None = None
    draft_seconds: float = 0.0
    lookup_seconds: float = 0.0
    caught_up: bool = False
    is_looked_up: list[bool] | None = None


class Planner:
    """Plans the steps of one batch.

    Args:
        schedule: chooses the number of drafts.
        draft: proposes the drafts; None = there are no drafts.
        ready: has (K, whether the step has a bitmask) for each step that is compiled so far.

    Attributes:
        is_outgrown: whether all rows are longer than the draft can read.
    """

    def __init__(self, schedule: Schedule, draft: DraftSource | None, ready: Collection[tuple[int, bool]]) -> None:
        self.is_outgrown = False
        self._schedule = schedule.begin()
        self._draft = draft
        self._ready = ready
        self._looks_up = draft is not None and draft.looks_up and draft.deterministic
        # The draft, if the schedule can choose between its two sources. A subclass with another `plan` cannot.
        can_choose = isinstance(self._schedule, Auto) and type(self._schedule).plan is Auto.plan
        self._two_sources = draft if isinstance(draft, LookupElse) and can_choose else None

    def plan(
        self,
        rows: Sequence[Row],
        state: DecodeState,
        *,
        is_compiled: bool,
        is_refilled: bool,
        sees_drafts: bool,
        reads_prompts: bool,
    ) -> PlannedStep:
        """Plan the next step.

        Args:
            state: the rows' tensors, from which drafts are looked up before the plan if there are two sources.
            is_compiled, is_refilled, reads_prompts: as in `NextStep`.
            sees_drafts: whether the host sees drafts before the target reads them, without waiting for a device.
        """
        active = [index for index, row in enumerate(rows) if not row.ended]
        going = [rows[index] for index in active]
        rooms, buckets = self._rooms(going), self._schedule.buckets
        is_masked = any(row.grammar is not None for row in going)
        asked = NextStep(
            texts=list(map(id, going)),
            # For compiled steps, `_smallest_sufficient` reduces K when rows are near their limits, so let the schedule
            # plan with the largest K.
            rooms=[max(buckets) if room > 0 else 0 for room in rooms] if is_compiled else rooms,
            left=[row.limit - row.length for row in going],
            num_rows=len(rows),
            is_compiled=is_compiled,
            is_refilled=is_refilled,
            reads_prompts=reads_prompts,
            looks_up=self._looks_up,
            # If compiled steps have only one K, the schedule has nothing to choose.
            asks_again=self._looks_up and sees_drafts and not (is_compiled and len(buckets) == 1),
        )
        draft, most = self._two_sources, max(rooms, default=0)
        if draft is not None and draft.can_choose and sees_drafts and most > 0 and not (is_compiled or is_masked):
            return self._choose_sources(draft, PlannedStep(list(rows), active, asked, [], False, 0), state)
        counts = self._counts(asked)
        wanted, needed = max(counts, default=0), most
        num_draft_tokens = self._smallest_sufficient(wanted, needed, is_compiled=is_compiled, is_masked=is_masked)
        return PlannedStep(list(rows), active, asked, counts, is_masked, num_draft_tokens)

    def _choose_sources(self, draft: LookupElse, step: PlannedStep, state: DecodeState) -> PlannedStep:
        """Look up drafts, unless lookups have lost too much time. Then plan the step and choose the source of each
        row's drafts."""
        assert isinstance(self._schedule, Auto)
        most = min(max(step.asked.rooms), max(self._schedule.buckets))
        found, offered, matches = state.tokens[:, :0], [0] * len(step.active), None
        if self._schedule.may_look_up(step.asked):
            started = time.perf_counter()
            looked_up = draft.look_up(state.tokens, state.lengths, most)
            found, step.drafts = looked_up.tokens, looked_up.tokens.tolist()
            # Count in Python: each operation of torch would take as long as all of these rows.
            offered = [[*step.drafts[index], -1].index(-1) for index in step.active]
            if looked_up.matches is not None:
                matches = looked_up.matches[step.active].tolist()
            step.lookup_seconds = time.perf_counter() - started
        step.asked = replace(step.asked, offered=offered, matches=matches, num_others=draft.num_other_tokens)
        counts, is_first = self._schedule.plan_sources(step.asked)
        if [*map(type, is_first)] != [bool] * len(offered):
            name = type(self._schedule).__name__
            raise ValueError(f"schedule: expected from {name}.plan_sources one bool for each text, got {is_first}")
        limits = [
            min(room, max(self._schedule.buckets), own if first else draft.num_other_tokens)
            for room, own, first in zip(step.asked.rooms, offered, is_first, strict=True)
        ]
        step.counts, step.is_looked_up = self._checked("plan_sources", counts, limits), is_first
        step.num_draft_tokens = max(step.counts)
        if step.num_draft_tokens > 0:
            chosen = found.new_full((len(step.rows), most), -1)
            if first := [index for index, is_looked_up in zip(step.active, is_first, strict=True) if is_looked_up]:
                chosen[first, : found.shape[1]] = found[first]
            draft.choose(chosen, _num_others(step))
        return step

    def _rooms(self, going: Sequence[Row]) -> list[int]:
        """The largest number of drafts that each of these unfinished rows can use. The last token before the limit
        needs no draft."""
        readable = None if self._draft is None else self._draft.max_length
        left = [row.limit - row.length - 1 for row in going]
        most = left
        if readable is not None:
            most = [min(readable + 1 - row.length, room) for row, room in zip(going, left, strict=True)]
        self.is_outgrown = max(most, default=0) <= 0 < max(left, default=0)
        return [max(room, 0) for room in most]

    def _smallest_sufficient(self, wanted: int, needed: int, *, is_compiled: bool, is_masked: bool) -> int:
        """The smallest K that is at least `needed` and needs no compiling, but at most `wanted`. An eager step may have
        any K. A compiled step has one of the schedule's buckets, or 0 if all rows are too long for the draft."""
        if not is_compiled:
            return min(wanted, needed)
        if self.is_outgrown:
            return 0
        buckets = self._schedule.buckets
        wanted = max((count for count in buckets if count <= wanted), default=min(buckets))
        sufficient = (count for count, has_mask in self._ready if has_mask == is_masked and count >= needed)
        return min([wanted, *sufficient])

    def _counts(self, asked: NextStep) -> list[int]:
        limits = asked.at_most(max(self._schedule.buckets))
        return self._checked("plan", list(self._schedule.plan(asked)), limits)

    def _checked(self, method: str, counts: Sequence[int], limits: Sequence[int]) -> list[int]:
        """The numbers of drafts that a method of the schedule has chosen, at most `limits`."""
        are_numbers = len(counts) == len(limits) and all(map(checks.is_int, counts))
        if not are_numbers or any(not 0 <= count <= most for count, most in zip(counts, limits, strict=True)):
            raise ValueError(
                f"schedule: expected from {type(self._schedule).__name__}.{method} one number for each text, from 0 to "
                f"{limits}, got {counts}"
            )
        return list(map(int, counts))

    def choose(self, step: PlannedStep, proposal: Draft, num_proposed: Tensor) -> list[int]:
        """How many drafts of each row to verify (`StepPlan.choose`)."""
        offered = num_proposed.tolist()
        if self._draft is None:
            # Without a draft source, all drafts are forced tokens, so verify all of them.
            return offered
        chosen = [offered[index] for index in step.active]
        if step.asked.asks_again:
            chosen = self._ask_again(step, proposal, chosen)
        else:
            chosen = list(map(min, step.counts, chosen))
        if step.asked.is_compiled:
            step.num_draft_tokens = self._smallest_sufficient(
                step.num_draft_tokens, max(chosen, default=0), is_compiled=True, is_masked=step.is_masked
            )
            return [step.num_draft_tokens] * len(offered)
        counts = [0] * len(offered)
        for index, count in zip(step.active, chosen, strict=True):
            counts[index] = count
        return counts

    def _ask_again(self, step: PlannedStep, proposal: Draft, offered: list[int]) -> list[int]:
        matches = None if proposal.matches is None else proposal.matches[step.active].tolist()
        step.asked = replace(step.asked, offered=offered, matches=matches)
        step.drafts, chosen = proposal.tokens.tolist(), self._counts(step.asked)
        # Verify all drafts of rows with a grammar, because forced tokens among them are always accepted.
        forced = (step.rows[index].grammar is not None for index in step.active)
        return [most if is_forced else few for most, few, is_forced in zip(offered, chosen, forced, strict=True)]

    def learn_time(self, step: PlannedStep, seconds: float) -> None:
        """Tell the schedule how long a captured step takes, before it has run for any row."""
        timed = PastStep(step.asked, (), (), num_draft_tokens=step.num_draft_tokens, seconds=seconds)
        self._schedule.learn(timed)

    def learn(
        self, step: PlannedStep, tokens: list[list[int]], num_accepted: list[int], num_proposed: list[int]
    ) -> None:
        """Tell the schedule the results of a step: each row's new tokens, and its accepted and proposed drafts."""
        known, right, caught_up = None, None, step.caught_up
        if self._two_sources is not None and step.is_looked_up is not None:
            caught_up = step.num_draft_tokens > 0 and self._two_sources.caught_up
        if step.drafts is not None and step.asked.offered is not None:
            # Skip rows with a grammar, because the grammar may have changed their drafts.
            new = [tokens[index] if step.rows[index].grammar is None else [] for index in step.active]
            known = list(map(min, step.asked.offered, map(len, new)))
            right = [
                next((place for place in range(count) if drafts[place] != tail[place]), count)
                for count, tail, drafts in zip(known, new, (step.drafts[index] for index in step.active), strict=True)
            ]
        self._schedule.learn(
            PastStep(
                step.asked,
                proposed=[num_proposed[index] for index in step.active],
                accepted=[num_accepted[index] for index in step.active],
                num_draft_tokens=_num_others(step),
                known=known,
                right=right,
                seconds=step.seconds,
                draft_seconds=step.draft_seconds,
                lookup_seconds=step.lookup_seconds,
                caught_up=caught_up,
                is_looked_up=step.is_looked_up,
            )
        )


def _num_others(step: PlannedStep) -> int:
    """The largest number of drafts of a row, those of the first of two sources excluded."""
    if step.is_looked_up is None:
        return step.num_draft_tokens
    pairs = zip(step.counts, step.is_looked_up, strict=True)
    return max((count for count, is_looked_up in pairs if not is_looked_up), default=0)
