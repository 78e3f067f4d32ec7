"""The rows of a batch: texts begin in them, steps add tokens, and rows end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..drafts.adapter import keep_features
from ..drafts.base import replace_inputs
from ..drafts.rows import read_beginnings, read_texts
from ..schedules import Optimal
from .inputs import Prompts
from .output import GenerationOutput, GenerationStats, RecordReader, Step, TopLogprobs
from .runner import StepRunner
from .step import DecodeState, unpack_record
from .stopping import RowRule, Stopping

__all__ = ["Batch", "KeptLogits"]


class KeptLogits(Protocol):
    """Gets the target's logits [B, K+1, V] of each eager step, and then the number of tokens that each row emitted."""

    def push(self, logits: Tensor) -> None: ...

    def keep(self, num_tokens: list[int]) -> None: ...


class Batch:
    """A batch of rows, and what the host knows of them from the records read so far. On CUDA the device may be one step
    ahead.

    Args:
        runner: runs the steps.
        values: the state before the first step. A finished row is free.
        prompts: what the values were made of.
        stopping: asks other rules about the ends of rows; None = there are none but those of the prompts.
        logits: keeps the target's logits; None = they are not kept.

    Attributes:
        lengths: tokens of each row.
        finished: whether each row has ended.
        reasons, errors: why each row ended, as in `GenerationOutput`.
        stats: counts and times.
    """

    def __init__(
        self,
        runner: StepRunner,
        values: DecodeState,
        prompts: Prompts,
        stopping: Stopping | None = None,
        logits: KeptLogits | None = None,
    ) -> None:
        started = time.perf_counter()
        self._runner = runner
        self._logits = logits
        self._stopping = stopping
        self.stats = GenerationStats(seeds=values.seeds.tolist(), compiled=runner.compile_reason)
        self._limits, self.lengths, self.finished = (
            each.tolist() for each in (values.limits, values.lengths, values.finished)
        )
        self.reasons: list[str | None] = ["length" if ended else None for ended in self.finished]
        self.errors: dict[int, str] = {}
        self._eos = values.eos.tolist()
        # How many texts each row had that have ended or were replaced by the host: a record from before is stale.
        self._num_ends = [0] * len(self.lengths)
        self._is_refilled = False
        self.prompt_lengths = list(self.lengths)
        self._pad_token_id = prompts.pad_token_id
        for row, rules in enumerate(prompts.rules if stopping is None else ()):
            self._use_rules(row, values, rules)

        inputs = prompts.inputs
        state = runner.start(values, inputs or {})
        runner.keep_logits = None if logits is None else logits.push
        target, longest = runner.target, max(self.lengths)
        reads_first = keep_features(target, runner.draft) or prompts.num_copies > 1 or all(self.finished)
        target.start(len(self.lengths), state.capacity, inputs)
        if runner.compiled or not runner.cost_is_measured or min(self.lengths) < longest or reads_first:
            # All but the newest token of the longest prompt, but at least one: the first forward allocates the cache.
            read_beginnings(target, state.tokens, max(longest - 1, 1))
        else:
            # In eager mode, prompts of one length are read together with the first drafts, which saves a forward.
            runner.unread_length = longest
        runner.start_draft(inputs)
        self._reader = RecordReader(state.tokens.device)
        self._wanted: int | None = None
        runner.synchronize()
        self.stats.prefill_seconds = time.perf_counter() - started

    @property
    def state(self) -> DecodeState:
        return self._runner.state

    def fill(self, texts: Mapping[int, DecodeState], rules: Mapping[int, Sequence[RowRule]]) -> None:
        """Begin texts in rows that have ended, and let the models read the prompts.

        Args:
            texts: row -> the values of a batch with this text alone.
            rules: what ends it besides its eos and limit.
        """
        if not texts:
            return
        started, runner = time.perf_counter(), self._runner
        self._is_refilled = True
        for row, values in texts.items():
            runner.refill(row, values)
            self._num_ends[row] += 1
            self.lengths[row], self._limits[row] = int(values.lengths), int(values.limits)
            self.prompt_lengths[row] = self.lengths[row]
            self._eos[row] = values.eos[0].tolist()
            self.finished[row], self.reasons[row] = False, None
            self.errors.pop(row, None)
            self._use_rules(row, values, rules[row])
        state = runner.state
        rows = torch.tensor(list(texts), device=state.tokens.device)
        read_texts(runner.target, state.tokens, state.lengths, rows, num_unread=1)
        runner.restart_draft(rows)
        self.stats.prefill_seconds += time.perf_counter() - started

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Let the encoders read other inputs [1, ...] for a row that has ended."""
        replace_inputs(self._runner.target, row, inputs)
        if self._runner.draft is not None:
            self._runner.draft.replace_inputs(row, inputs)
        self._runner.keep_valid_graphs()

    def end(self, row: int, reason: str) -> None:
        """End a row where the host has seen it."""
        self._runner.end_row(row, self.lengths[row])
        self._num_ends[row] += 1
        self.finished[row], self.reasons[row] = True, reason

    def copy_logprobs(self, row: int, logprobs: Tensor, top: TopLogprobs) -> None:
        """Copy the log-probabilities of a row's new tokens to tensors [n] and [n, N], as far as the batch has them."""
        state, places = self.state, slice(self.prompt_lengths[row], self.lengths[row])
        for copy, kept in zip((logprobs, *top), (state.logprobs, state.top_tokens, state.top_values), strict=True):
            if kept is not None:
                copy.copy_(kept[row, places])

    def step(self) -> Step:
        """Run a step; returns the oldest one that was not yet returned."""
        runner = self._runner
        if self._wanted is None:
            self._measure_cost()
            self._wanted = runner.schedule.first()
        while True:
            # The last token of a row needs no draft, so the rows may have room for fewer than are wanted.
            num_draft_tokens = runner.smallest_sufficient(self._wanted, max(self._room() - 1, 0))
            self.stats.compile_seconds += runner.prepare(num_draft_tokens)
            # The time of a step excludes compiling, and what the caller does between two steps.
            before = time.perf_counter()
            trim = runner.schedule.trim_refilled if self._is_refilled else runner.schedule.trim
            self._reader.push(runner.run(num_draft_tokens, trim), list(self._num_ends))
            read = self._reader.pop()
            if read is not None:
                return self._read(*read, time.perf_counter() - before)

    def _room(self) -> int:
        """The most tokens that any row may still get."""
        rows = zip(self._limits, self.lengths, self.finished, strict=True)
        return max(0 if ended else limit - length for limit, length, ended in rows)

    def _read(self, record: Tensor, num_ends: list[int], seconds: float) -> Step:
        """Count a step, and end the rows that it ended. `num_ends` is from before the step."""
        step = Step(*unpack_record(record), seconds)
        before = self.finished
        for row, (then, now) in enumerate(zip(num_ends, self._num_ends, strict=True)):
            if then != now:
                step.tokens[row], step.num_accepted[row], step.num_proposed[row] = [], 0, 0
                step.finished[row] = before[row]
        self.stats.add(step)
        if self._logits is not None:
            self._logits.keep(list(map(len, step.tokens)))
        if self._stopping is not None:
            step = self._stopped(step, self._stopping)
        ended = []
        for row, tokens in enumerate(step.tokens):
            self.lengths[row] += len(tokens)
            if step.finished[row] and not before[row]:
                ended.append(row)
                self.reasons[row] = self._reason(row, tokens)
        self.finished = list(step.finished)
        runner = self._runner
        if ended and runner.draft is not None:
            runner.draft.end(self.state.tokens[ended], self.state.lengths[ended])
        active = [row for row, over in enumerate(before) if not over]
        counts = ([each[row] for row in active] for each in (step.num_proposed, step.num_accepted))
        self._wanted = runner.schedule.next(*counts)
        return step

    def _reason(self, row: int, tokens: list[int]) -> str:
        if tokens and tokens[-1] in self._eos[row]:
            return "eos"
        if self._stopping is not None and row in self._stopping.cuts:
            return "stop"
        if self.lengths[row] == self._limits[row]:
            return "length"
        self.errors[row] = f"target: no finite logit after {self.lengths[row]} tokens"
        return "error"

    def _stopped(self, step: Step, stopping: Stopping) -> Step:
        """The step, up to where rules end rows."""
        tokens, finished = stopping.add(step.tokens, step.finished)
        self.stats.num_tokens += sum(map(len, tokens)) - sum(map(len, step.tokens))
        for row, length in stopping.cuts.items():
            self._runner.end_row(row, self.prompt_lengths[row] + length)
            self._num_ends[row] += 1
        return replace(step, tokens=tokens, finished=finished)

    def _use_rules(self, row: int, values: DecodeState, rules: Sequence[RowRule]) -> None:
        """Let rules end the text that begins in a row; the text is the row's, or the only one, of `values`."""
        if rules and self._stopping is None:
            self._stopping = Stopping([[] for _ in self.lengths])
        if self._stopping is not None:
            text = values.tokens[row if len(values.tokens) > 1 else 0, : self.lengths[row]]
            self._stopping.begin(row, text.tolist(), rules)

    # Outside inference mode, because users train on what was generated.
    @torch.inference_mode(False)
    def output(self, interrupted: bool = False) -> GenerationOutput:
        """The sequences and statistics so far."""
        state = self.state
        lengths, prompt_lengths = (
            torch.tensor(each, device=state.tokens.device) for each in (self.lengths, self.prompt_lengths)
        )
        width = int(lengths.max())
        inside = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)

        def up_to_end(values: Tensor | None, nothing: float) -> Tensor | None:
            """The new tokens of each row, and `nothing` where the device is ahead of the host."""
            if values is None:
                return None
            is_new = inside if values.dim() == 2 else inside.unsqueeze(2)
            return torch.where(is_new, values[:, :width], nothing)

        top_tokens, top_values = up_to_end(state.top_tokens, -1), up_to_end(state.top_values, math.nan)
        return GenerationOutput(
            sequences=torch.where(inside, state.tokens[:, :width], self._pad_token_id),
            prompt_lengths=prompt_lengths,
            lengths=lengths,
            stats=self.stats,
            errors=dict(self.errors),
            interrupted=interrupted,
            logprobs=up_to_end(state.logprobs, math.nan),
            finish_reasons=list(self.reasons),
            top_logprobs=None if top_tokens is None or top_values is None else TopLogprobs(top_tokens, top_values),
        )

    def _measure_cost(self) -> None:
        """Replace the schedule by the `Optimal` one for the cost of a draft, if it is to be measured. The cost has two
        parts: the draft's own forward, and one more token for the target to read."""
        runner = self._runner
        if runner.cost_is_measured:
            return
        seconds, most = [], runner.schedule.buckets[-1]
        for num_draft_tokens in (0, most):
            self.stats.compile_seconds += runner.prepare(num_draft_tokens)
            seconds.append(runner.seconds_of(num_draft_tokens))
        plain, drafting = seconds
        runner.schedule = Optimal(max(drafting - plain, 0.0) / (most * plain), buckets=runner.schedule.buckets)
        runner.cost_is_measured = True
