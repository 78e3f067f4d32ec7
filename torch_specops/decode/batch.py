"""The rows of a batch: texts begin in them, steps add tokens, and rows end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..drafts import Draft, DraftSource, LanguageModel
from ..drafts.base import feature_model, replace_inputs
from ..drafts.images import reads_images
from ..drafts.ragged import begin_texts, keeps_states, read_beginnings, read_texts
from ..ops.tracing import normal_tensors
from ..schedules import NextStep, PastStep
from .grammar import accept_tokens, masks_of
from .inputs import Prompts
from .models import models_of
from .output import GenerationOutput, GenerationStats, RecordReader, Step, TopLogprobs
from .rows import BatchRules, Row, ask_row_rules
from .runner import StepRunner
from .step import unpack_record

__all__ = ["Batch", "KeptLogits"]


# For each row the tokens that a step emitted, drafts accepted, drafts proposed, and whether the row has ended.
RowResults = tuple[list[list[int]], list[int], list[int], list[bool]]


class KeptLogits(Protocol):
    """Gets the target's logits [B, K+1, V] of each eager step, and then the number of tokens that each row emitted."""

    def push(self, logits: Tensor) -> None: ...

    def keep(self, num_tokens: list[int]) -> None: ...


@dataclass
class _Begun:
    """A step whose record was not read yet.

    Args:
        rows: of the batch when it began.
        active: those that had not ended.
        planned: what the schedule was told last.
        counts: what it chose, for the active rows.
        masked: a row has a grammar.
        num_draft_tokens: K.
        drafts: [B, K], where the schedule saw them; None = elsewhere.
        seconds, draft_seconds: as in `PastStep`.
    """

    rows: list[Row]
    active: list[int]
    planned: NextStep
    counts: list[int]
    masked: bool
    num_draft_tokens: int = 0
    drafts: list[list[int]] | None = None
    seconds: float | None = None
    draft_seconds: float = 0.0


class Batch:
    """A batch of rows, and what the host knows of them from the records read so far. On CUDA the device may be one step
    ahead.

    Args:
        runner: runs the steps.
        prompts: the first texts. A finished row is free.
        capacity: slots of each row.
        batch_rules: end rows too; None = there are none.
        logits: keeps the target's logits; None = they are not kept.

    Attributes:
        rows: the texts.
        stats: counts and times.
    """

    def __init__(
        self,
        runner: StepRunner,
        prompts: Prompts,
        capacity: int,
        batch_rules: BatchRules | None = None,
        logits: KeptLogits | None = None,
    ) -> None:
        started, inputs = time.perf_counter(), prompts.inputs
        self.rows = [prompts.row(index) for index in range(len(prompts.rules))]
        self.stats = GenerationStats(
            seeds=prompts.state.seeds.tolist(), compiled=runner.compile_reason, verify=runner.verify.op
        )
        self._runner = runner
        self._batch_rules = batch_rules
        self._logits = logits
        self._is_refilled = False
        # A step that was read before its time, because the masks of the next one depend on its tokens.
        self._read_early: RowResults | None = None
        self._pad_token_id = prompts.pad_token_id
        has_images = inputs is not None and reads_images(runner.target)
        # Steps do not depend on the sizes of images.
        state = runner.start(prompts.state, capacity, None if has_images else inputs)
        runner.keep_logits = None if logits is None else logits.push
        target, lengths = runner.target, [row.length for row in self.rows]
        reads_first = _keep_features(target, runner.draft) or prompts.num_copies > 1 or all(self.finished)
        reads_first |= keeps_states(target) or has_images
        with normal_tensors():
            target.start(len(lengths), state.capacity, inputs)
        if runner.compiled or min(lengths) < max(lengths) or reads_first:
            read_beginnings(target, state.tokens, state.lengths, num_unread=1)
        else:
            # In eager mode, prompts of one length are read together with the first drafts, which saves a forward.
            begin_texts(target, state.lengths)
            runner.unread_length = max(lengths)
        runner.start_draft(inputs)
        self._reader: RecordReader[_Begun] = RecordReader(state.tokens.device)
        runner.synchronize()
        self.stats.state_bytes = sum(getattr(each, "state_bytes", 0) for each in models_of(target, runner.draft))
        self.stats.prefill_seconds = time.perf_counter() - started

    @property
    def finished(self) -> list[bool]:
        return [row.finished for row in self.rows]

    def fill(self, texts: Mapping[int, Prompts]) -> None:
        """Begin texts in rows that have ended, and let the models read the prompts.

        Args:
            texts: row -> a batch of its new text alone.
        """
        started, runner = time.perf_counter(), self._runner
        self._is_refilled = True
        runner.fill({index: prompts.state for index, prompts in texts.items()})
        self.rows = [texts[index].row(0) if index in texts else row for index, row in enumerate(self.rows)]
        state = runner.state
        rows = torch.tensor(list(texts), device=state.tokens.device)
        read_texts(runner.target, state.tokens, state.lengths, rows, num_unread=1)
        runner.restart_draft(rows)
        self.stats.prefill_seconds += time.perf_counter() - started

    def replace_inputs(self, index: int, inputs: Mapping[str, Tensor]) -> None:
        """Let the models read other inputs [1, ...] for a row that has ended: for their encoders, or images."""
        with normal_tensors():
            replace_inputs(self._runner.target, index, inputs)
            if self._runner.draft is not None:
                self._runner.draft.replace_inputs(index, inputs)
        self._runner.keep_valid_graphs()

    def end(self, index: int, reason: str) -> None:
        """End a row where the host has seen it."""
        row = self.rows[index]
        self._runner.end_row(index, row.length)
        row.ended, row.reason = True, reason
        self._runner.texts.end([index])

    def copy_logprobs(self, index: int, logprobs: Tensor, top: TopLogprobs) -> None:
        """Copy the log-probabilities of a row's new tokens to tensors [n] and [n, N], as far as the batch has them."""
        state, row = self._runner.state, self.rows[index]
        for copy, kept in zip((logprobs, *top), (state.logprobs, state.top_tokens, state.top_values), strict=True):
            if kept is not None:
                copy.copy_(kept[index, len(row.prompt) : row.length])

    def step(self) -> Step:
        """Run a step; returns the oldest one that was not yet returned."""
        runner = self._runner
        runner.fit()
        while True:
            active = [index for index, row in enumerate(self.rows) if not row.ended]
            going = [self.rows[index] for index in active]
            masks = self._masks if any(row.grammar is not None for row in going) else None
            rooms = runner.rooms(going)
            planned, is_ready = self._next_step(going, rooms), False
            while not is_ready:
                counts = self._plan(planned)
                self._begun = begun = _Begun(list(self.rows), active, planned, counts, masks is not None)
                wanted, needed = max(counts, default=0), max(rooms, default=0)
                begun.num_draft_tokens = runner.smallest_sufficient(wanted, needed, begun.masked)
                is_ready = self._prepare(begun)
            num_draft_tokens, reads_prompts = begun.num_draft_tokens, runner.unread_length is not None
            # The time of a step excludes compiling, and what the caller does between two steps.
            before = time.perf_counter()
            self._reader.push(runner.run(num_draft_tokens, self._choose, masks), begun)
            if not reads_prompts:
                begun.draft_seconds = runner.draft_seconds
                seconds = runner.captured_seconds(num_draft_tokens, begun.masked)
                begun.seconds = time.perf_counter() - before - begun.draft_seconds if seconds is None else seconds
            results, self._read_early = self._read_early, None
            if results is None:
                read = self._reader.pop()
                results = None if read is None else self._read(*read)
            if results is not None:
                seconds = time.perf_counter() - before
                self.stats.seconds += seconds
                return Step(*results, seconds)

    def _prepare(self, begun: _Begun) -> bool:
        """Compile and capture the step if it is not ready. False = its time was measured, and the schedule may have
        another plan."""
        runner, count, masked = self._runner, begun.num_draft_tokens, begun.masked
        if begun.planned.is_fixed and runner.asks_again:
            # What is verified may be fewer drafts than were looked up.
            self.stats.compile_seconds += runner.prepare(min(runner.schedule.buckets), masked)
        preparing = runner.prepare(count, masked)
        self.stats.compile_seconds += preparing
        seconds = runner.captured_seconds(count, masked) if preparing > 0 else None
        if seconds is None:
            return True
        runner.schedule.learn(PastStep(begun.planned, (), (), num_draft_tokens=count, seconds=seconds))
        return False

    def _next_step(self, going: Sequence[Row], rooms: list[int]) -> NextStep:
        runner = self._runner
        if runner.is_fixed:
            # Which steps have few drafts because there is little room is not for the schedule to decide.
            rooms = [max(runner.schedule.buckets) if room > 0 else 0 for room in rooms]
        return NextStep(
            texts=list(map(id, going)),
            rooms=rooms,
            left=[row.limit - row.length for row in going],
            num_rows=len(self.rows),
            is_fixed=runner.is_fixed,
            is_refilled=self._is_refilled,
            looks_up=runner.looks_up,
            asks_again=runner.asks_again,
        )

    def _plan(self, step: NextStep) -> list[int]:
        schedule = self._runner.schedule
        counts = list(schedule.plan(step))
        limits = step.at_most(max(schedule.buckets))
        are_numbers = len(counts) == len(limits) and all(isinstance(own, int) for own in counts)
        if not are_numbers or any(not 0 <= own <= most for own, most in zip(counts, limits, strict=True)):
            raise ValueError(
                f"schedule: expected from {type(schedule).__name__}.plan one number for each text, from 0 to {limits}, "
                f"got {counts}"
            )
        return counts

    def _choose(self, proposal: Draft, num_proposed: Tensor) -> list[int]:
        """How many drafts of each row to verify, for `StepRunner.run`."""
        begun, offered, counts = self._begun, num_proposed.tolist(), [0] * len(num_proposed)
        if self._runner.draft is None:
            # A grammar forces these.
            return offered
        own = [offered[index] for index in begun.active]
        if not begun.planned.asks_again:
            chosen = list(map(min, begun.counts, own))
        else:
            matches = None if proposal.matches is None else proposal.matches[begun.active].tolist()
            begun.planned = replace(begun.planned, offered=own, matches=matches)
            begun.drafts, chosen = proposal.tokens.tolist(), self._plan(begun.planned)
            # Tokens that a grammar forces are certain.
            with_grammar = [self.rows[index].grammar is not None for index in begun.active]
            chosen = [all_ if forced else few for all_, few, forced in zip(own, chosen, with_grammar, strict=True)]
        if begun.planned.is_fixed:
            planned, most = begun.num_draft_tokens, max(chosen, default=0)
            begun.num_draft_tokens = self._runner.smallest_sufficient(planned, most, begun.masked)
            return [begun.num_draft_tokens] * len(counts)
        for index, count in zip(begun.active, chosen, strict=True):
            counts[index] = count
        return counts

    def _learn(self, begun: _Begun, tokens: list[list[int]], num_accepted: list[int], num_proposed: list[int]) -> None:
        """Tell the schedule what became of a step."""
        known = right = None
        if begun.drafts is not None and begun.planned.offered is not None:
            # Those that a grammar has changed say nothing of lookups.
            new = [tokens[index] if begun.rows[index].grammar is None else [] for index in begun.active]
            known = list(map(min, begun.planned.offered, map(len, new)))
            right = [
                next((place for place in range(count) if drafts[place] != own[place]), count)
                for count, own, drafts in zip(known, new, (begun.drafts[index] for index in begun.active), strict=True)
            ]
        self._runner.schedule.learn(
            PastStep(
                begun.planned,
                proposed=[num_proposed[index] for index in begun.active],
                accepted=[num_accepted[index] for index in begun.active],
                num_draft_tokens=begun.num_draft_tokens,
                known=known,
                right=right,
                seconds=begun.seconds,
                draft_seconds=begun.draft_seconds,
            )
        )

    def _masks(self, proposal: Draft, is_fixed: bool) -> tuple[Draft, Tensor]:
        """The drafts to verify and their bitmask, for `StepRunner.run`."""
        # Waits for the drafts, and with them for the step before.
        drafts, num_draft_tokens = proposal.tokens.tolist(), proposal.tokens.shape[1]
        read = self._reader.pop(early=True)
        if read is not None:
            self._read_early = self._read(*read)
        tokens, bitmask = masks_of(
            self.rows,
            drafts,
            self._runner.target.vocab_size,
            deterministic=proposal.logits is None,
            max_drafts=max(num_draft_tokens, self._runner.max_forced),
            width=num_draft_tokens if is_fixed else None,
        )
        device = proposal.tokens.device
        if device.type == "cuda":
            tokens, bitmask = (each.pin_memory().to(device, non_blocking=True) for each in (tokens, bitmask))
        probabilities = (proposal.logits, proposal.lse)
        logits, lse = (None if each is None else each[:, : tokens.shape[1]] for each in probabilities)
        return Draft(tokens, logits, lse, proposal.matches), bitmask

    def _read(self, record: Tensor, begun: _Begun) -> RowResults:
        """Count a step, and end the rows that it ended."""
        tokens, num_accepted, num_proposed, finished = results = unpack_record(record)
        self._learn(begun, tokens, num_accepted, num_proposed)
        runner = self._runner
        num_before = [len(row.tokens) for row in self.rows]
        for index, (then, row) in enumerate(zip(begun.rows, self.rows, strict=True)):
            if then is not row or row.ended:
                # The host has ended the text, which the device had not seen.
                tokens[index], num_accepted[index], num_proposed[index] = [], 0, 0
            else:
                row.tokens += tokens[index]
                row.ended = finished[index]
        num_new = list(map(len, tokens))
        self.stats.add(num_new, num_accepted, num_proposed)
        if self._logits is not None:
            self._logits.keep(num_new)
        cuts = ask_row_rules(self.rows, num_new)
        if self._batch_rules is not None:
            cuts |= self._batch_rules.ask(self.rows)
        ended = []
        for index, row in enumerate(self.rows):
            if row.grammar is not None and not accept_tokens(row, row.grammar, num_before[index]):
                cuts.add(index)
            first, row.num_shown = row.num_shown, len(row.tokens)
            if index in cuts:
                runner.end_row(index, row.length)
            if self._batch_rules is not None:
                row.num_shown = min(row.num_shown, self._batch_rules.num_asked)
            if self._batch_rules is not None or row.num_shown - first != num_new[index]:
                # A rule has cut tokens, or has held them back until now.
                self.stats.num_tokens += row.num_shown - first - num_new[index]
                tokens[index] = row.tokens[first : row.num_shown]
            finished[index] = row.finished
            if finished[index] and row.reason is None:
                row.settle()
                ended.append(index)
        runner.texts.end(ended)
        if ended and runner.draft is not None:
            with normal_tensors():
                runner.draft.end(runner.state.tokens[ended], runner.state.lengths[ended])
        return results

    # Outside inference mode, because users train on what was generated.
    @torch.inference_mode(False)
    def output(self) -> GenerationOutput:
        """The sequences and statistics so far."""
        state, rows = self._runner.state, self.rows
        device = state.tokens.device
        lengths = torch.tensor([row.length for row in rows], device=device)
        width = int(lengths.max())
        inside = torch.arange(width, device=device) < lengths.unsqueeze(1)

        def up_to_end(values: Tensor | None, nothing: float) -> Tensor | None:
            """The new tokens of each row, and `nothing` where the device is ahead of the host."""
            if values is None:
                return None
            is_new = inside if values.dim() == 2 else inside.unsqueeze(2)
            return torch.where(is_new, values[:, :width], nothing)

        top_tokens, top_values = up_to_end(state.top_tokens, -1), up_to_end(state.top_values, math.nan)
        return GenerationOutput(
            sequences=torch.where(inside, state.tokens[:, :width], self._pad_token_id),
            prompt_lengths=torch.tensor([len(row.prompt) for row in rows], device=device),
            lengths=lengths,
            stats=self.stats,
            errors={index: row.error for index, row in enumerate(rows) if row.error is not None},
            logprobs=up_to_end(state.logprobs, math.nan),
            finish_reasons=[row.reason for row in rows],
            top_logprobs=None if top_tokens is None or top_values is None else TopLogprobs(top_tokens, top_values),
        )


def _keep_features(target: LanguageModel, draft: DraftSource | None) -> bool:
    """Tell the target which hidden states to keep: those that the draft reads. Returns whether it keeps any."""
    if draft is not None and draft.feature_layers:
        feature_model(target).keep_features(draft.feature_layers)
        # Another decoder may have bound it in between.
        draft.bind(target)
        return True
    if hasattr(target, "keep_features"):
        target.keep_features(())
    return False
