"""A batch of rows: admits prompts to free rows, runs steps that append tokens, and ends finished rows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..drafts import Draft, DraftSource
from ..drafts.base import keeps_states, readable_lengths
from ..models.base import FeatureModel, LanguageModel, feature_model, readable_length
from ..models.reading import begin_texts, read_beginnings, read_texts
from ..ops.tracing import normal_tensors
from ..schedules import Schedule
from .compiled import CompiledSteps
from .grammar import accept_tokens, masks_of
from .inputs import Prompts
from .models import models_of
from .output import GenerationOutput, GenerationStats, RecordReader, Step, TopLogprobs
from .planning import PlannedStep, Planner
from .rows import BatchRules, RowStep, ask_row_rules
from .state import Texts, moved, shapes_of
from .step import RowResults, StepPlan, unpack_record


class KeptLogits(Protocol):
    """Receives the target's logits [B, K+1, V] of each eager step (`push`), then the number of tokens that each row
    emitted (`keep`)."""

    def push(self, logits: Tensor) -> None: ...

    def keep(self, num_tokens: list[int]) -> None: ...


class Batch:
    """The rows of a batch: their tensors on the device, and a copy of their tokens on the host. The host gets the
    tokens from the records of steps. On CUDA the device may be one step ahead of the host.

    Args:
        steps: runs the steps.
        schedule: chooses the number of drafts.
        prompts: the first sequences. A row that is finished from the start is free.
        capacity: the number of slots of each row.
        batch_rules: rules that look at all rows together and may end rows; None = no such rules.
        logits: receives the target's logits; None = they are not needed.
    """

    def __init__(
        self,
        steps: CompiledSteps,
        schedule: Schedule,
        prompts: Prompts,
        capacity: int,
        batch_rules: BatchRules | None = None,
        logits: KeptLogits | None = None,
    ) -> None:
        started, inputs = time.perf_counter(), prompts.inputs
        self.rows = prompts.rows()
        self.stats = GenerationStats(
            seeds=prompts.state.seeds.tolist(),
            compiled=steps.compile_reason,
            verify=steps.verify.op,
            invariant=steps.target.invariant,
        )
        self._steps = steps
        self._target = steps.target
        self._draft = steps.draft
        self._batch_rules = batch_rules
        self._logits = logits
        self._is_refilled = False
        self._pad_token_id = prompts.pad_token_id
        # The sequences that `fill` has admitted.
        self._texts = Texts()
        # The common length of the prompts, if the next step has to read them; None = the target has read them.
        self._prefill_length: int | None = None
        # Steps without drafts since the last step with drafts. The draft has not read the tokens of these steps.
        self._num_undrafted = 0
        # Whether the next step is compiled. Steps run eagerly while a request needs larger tensors than `state.ROOM`
        # allows.
        self._is_compiled = steps.compiled
        # The results of a record that `_masks` has read early, because bitmasks depend on the newest tokens. `_collect`
        # takes these results.
        self._read_early: RowResults | None = None
        self._vocab_size = self._target.vocab_size
        # Rows whose prompts came with encoder inputs or images.
        self._rows_with_inputs = set(range(len(self.rows))) if inputs else set()
        # Leave images out of `_input_shapes`, because the shapes of a step do not depend on the sizes of images.
        has_images = inputs is not None and self._target.reads_images
        self._input_shapes = None if inputs is None or has_images else shapes_of(inputs)
        sampling = replace(prompts.state.sampling, coupled=steps.verify.op == "gumbel")
        self.state = moved(replace(prompts.state, sampling=sampling), self._target.device, capacity)
        self._start_models(inputs, reads_first=prompts.num_copies > 1 or all(self.finished) or has_images)
        self._planner = Planner(schedule, self._draft, steps.ready)
        self._reader = RecordReader(self.state.tokens.device)
        steps.synchronize()
        self.stats.state_bytes = sum(each.state_bytes for each in models_of(self._target, self._draft))
        self.stats.prefill_seconds = time.perf_counter() - started

    def _start_models(self, inputs: Mapping[str, Tensor] | None, *, reads_first: bool) -> None:
        """Prefill the models.

        Args:
            reads_first: whether the target must read the prompts here. Otherwise it may read them in the first step.
        """
        steps, target, draft = self._steps, self._target, self._draft
        if draft is not None:
            # Bind again, because another decoder may have bound this draft to its target since the last call.
            draft.bind(target)
        steps.follow_models()
        target.expect(steps.most_drafts + 1)
        if draft is not None:
            draft.expect(steps.most_drafts)
        if self._is_compiled:
            self.state = steps.place(self, self._input_shapes)
        state, lengths = self.state, [row.length for row in self.rows]
        reads_first |= _keep_features(target, draft) or target.keeps_states
        with normal_tensors():
            target.start(len(lengths), min(state.capacity, readable_length(target) or state.capacity), inputs)
        if self._is_compiled or min(lengths) < max(lengths) or reads_first:
            prompt_lengths = state.lengths.new_tensor([len(row.prompt) for row in self.rows])
            read_beginnings(target, state.tokens, state.lengths, 1, prompt_lengths)
            self._prefill_length = None
        else:
            # All prompts have the same length. Only announce them here: the first step reads them in the same forward
            # as its drafts, which saves a forward.
            begin_texts(target, state.lengths)
            self._prefill_length = max(lengths)
        steps.compile_draft(is_compiled=self._is_compiled)
        if draft is not None:
            with normal_tensors():
                draft.start(state.tokens, readable_lengths(draft, state.tokens, state.lengths), state.capacity, inputs)
        self._num_undrafted = 0
        steps.keep_valid_graphs()

    def read_again(self) -> None:
        """Prefill the models again, after another batch has used them.

        Raises:
            RuntimeError: an unfinished row had encoder inputs or images, which are not kept; or the target's vocabulary
                has shrunk.
        """
        if any(not self.rows[index].ended for index in self._rows_with_inputs):
            raise RuntimeError(
                "inputs: expected to go on before another call uses the target or the draft, because what was read "
                "besides the tokens is not kept"
            )
        self.check_vocabulary()
        started = time.perf_counter()
        self._start_models(None, reads_first=True)
        self.stats.prefill_seconds += time.perf_counter() - started

    def check_vocabulary(self) -> None:
        """Raise RuntimeError if the target's vocabulary has shrunk and a row is unfinished. Called whenever the target
        may have changed."""
        before, self._vocab_size = self._vocab_size, self._target.vocab_size
        if self._vocab_size < before and not all(self.finished):
            raise RuntimeError(f"target: expected its {before} tokens until the texts end, got {self._vocab_size}")

    @property
    def _is_cuda(self) -> bool:
        return self.state.tokens.device.type == "cuda"

    @property
    def finished(self) -> list[bool]:
        return [row.finished for row in self.rows]

    def fill(self, texts: Mapping[int, Prompts]) -> None:
        """Begin new sequences in rows that have ended, and prefill their prompts.

        Args:
            texts: maps each row to its new prompt, a batch of one.
        """
        started, draft = time.perf_counter(), self._draft
        self._is_refilled = True
        self._texts.begin(self.state, {index: prompts.state for index, prompts in texts.items()})
        self._fit()
        self.rows = [texts[index].rows()[0] if index in texts else row for index, row in enumerate(self.rows)]
        state = self.state
        rows = torch.tensor(list(texts), device=state.tokens.device)
        read_texts(self._target, state.tokens, state.lengths, rows, num_unread=1)
        if draft is not None:
            with normal_tensors():
                draft.restart(state.tokens, readable_lengths(draft, state.tokens, state.lengths), rows)
        self.stats.prefill_seconds += time.perf_counter() - started

    def _fit(self) -> None:
        """Update the eos tokens and the sampling parameters in the state to those of the sequences in its rows."""
        state, fits = self._texts.fitted(self.state, self._steps.compiled)
        if state is None:
            return
        self._is_compiled, self.state = fits, state
        if fits:
            self.state = self._steps.place(self, self._input_shapes)
            self._steps.keep_valid_graphs()
        self._steps.compile_draft(is_compiled=fits)

    def replace_inputs(self, index: int, inputs: Mapping[str, Tensor]) -> None:
        """Replace the encoder inputs or the images [1, ...] of a row that has ended."""
        (self._rows_with_inputs.add if inputs else self._rows_with_inputs.discard)(index)
        with normal_tensors():
            self._target.replace_inputs(index, inputs)
            if self._draft is not None:
                self._draft.replace_inputs(index, inputs)
        self._steps.keep_valid_graphs()

    def follow_models(self) -> bool:
        """Adapt to changes of the models that `Guard.look` found. Returns whether a model has changed."""
        has_changed = self._steps.follow_models()
        if has_changed:
            self._steps.compile_draft(is_compiled=self._is_compiled)
        return has_changed

    def end(self, index: int, reason: str) -> None:
        """End a row after the last token that the host has seen."""
        row = self.rows[index]
        self._end_row(index, row.length)
        row.ended, row.reason = True, reason
        self._texts.end([index])

    def _end_row(self, index: int, length: int) -> None:
        """Cut a row to `length` tokens and end it, without waiting for the device."""
        self.state.lengths[index].fill_(length)
        self.state.finished[index].fill_(True)

    def copy_logprobs(self, index: int, logprobs: Tensor, top: TopLogprobs) -> None:
        """Copy log-probabilities of a row's new tokens to tensors [n] and [n, N], if the batch computes them."""
        state, row = self.state, self.rows[index]
        for copy, computed in zip((logprobs, *top), (state.logprobs, state.top_tokens, state.top_values), strict=True):
            if computed is not None:
                copy.copy_(computed[index, len(row.prompt) : row.length])

    def step(self) -> Step:
        """Launch a step. Returns the oldest step that has not been returned yet."""
        self._fit()
        results = None
        while results is None:
            # The time of a step excludes compilation and the caller's work between two steps. It includes the plan of
            # an eager step, which may look up drafts.
            started = time.perf_counter()
            planned = self._plan()
            if planned.asked.is_compiled:
                started = time.perf_counter()
            self._launch(planned)
            results = self._collect()
        seconds = time.perf_counter() - started
        self.stats.seconds += seconds
        return Step(*results, seconds)

    def _plan(self) -> PlannedStep:
        """Plan the next step; compile and capture it if it is not ready."""
        steps, is_compiled = self._steps, self._is_compiled
        sees_drafts = not self._is_cuda and not (is_compiled and steps.one_graph)
        while True:
            planned = self._planner.plan(
                self.rows,
                self.state,
                is_compiled=is_compiled,
                is_refilled=self._is_refilled,
                sees_drafts=sees_drafts,
                reads_prompts=self._prefill_length is not None,
            )
            if not is_compiled:
                return planned
            if planned.asked.asks_again:
                # Compile the smallest step too, because the schedule may verify fewer drafts than are looked up.
                self._prepare(min(steps.buckets), planned.is_masked)
            if not self._prepare(planned.num_draft_tokens, planned.is_masked):
                return planned
            seconds = steps.ready[planned.num_draft_tokens, planned.is_masked]
            if seconds is None:
                return planned
            # Capturing has measured the step's time. Tell the schedule, which may now choose another number of drafts.
            self._planner.learn_time(planned, seconds)

    def _prepare(self, num_draft_tokens: int, is_masked: bool) -> bool:
        """Compile and capture a step. Returns False if it was ready."""
        if (num_draft_tokens, is_masked) in self._steps.ready:
            return False
        if num_draft_tokens > 0:
            self._catch_up()
        self.stats.compile_seconds += self._steps.prepare(self.state, num_draft_tokens, is_masked)
        return True

    def _catch_up(self) -> None:
        """Let the draft read the tokens that steps without drafts have emitted."""
        state, draft = self.state, self._draft
        if draft is not None and self._num_undrafted > 0:
            draft.catch_up(state.tokens, readable_lengths(draft, state.tokens, state.lengths), self._num_undrafted)
        self._num_undrafted = 0

    def _launch(self, planned: PlannedStep) -> None:
        """Begin a step. On CUDA the step runs asynchronously."""
        started, steps = time.perf_counter(), self._steps
        is_compiled, num_draft_tokens = planned.asked.is_compiled, planned.num_draft_tokens
        if num_draft_tokens > 0:
            planned.caught_up = self._num_undrafted > 0
            self._catch_up()
        else:
            # Do not count a step in which all rows are too long for the draft, because the draft need not read the
            # tokens of this step.
            self._num_undrafted += not self._planner.is_outgrown
        may_choose = planned.asked.asks_again if is_compiled else not self._is_cuda
        plan = StepPlan(
            num_draft_tokens,
            is_compiled=is_compiled,
            masks=partial(self._masks, is_compiled) if planned.is_masked else None,
            choose=partial(self._planner.choose, planned) if may_choose else None,
            prefill_length=self._prefill_length,
            on_logits=None if self._logits is None else self._logits.push,
        )
        record, drafted = steps.run(self.state, plan)
        self._reader.push(record, planned)
        planned.draft_seconds = 0.0 if drafted is None else drafted - started
        if self._prefill_length is None:
            seconds = steps.ready[num_draft_tokens, planned.is_masked] if is_compiled else None
            planned.seconds = time.perf_counter() - started - planned.draft_seconds if seconds is None else seconds
        self._prefill_length = None

    def _collect(self) -> RowResults | None:
        """The results of the oldest step that was launched and not yet collected. On CUDA, None if this is the newest
        step, because the host reads results one step late."""
        results, self._read_early = self._read_early, None
        if results is None and (read := self._reader.pop()) is not None:
            results = self._read(*read)
        return results

    def _masks(self, is_compiled: bool, proposal: Draft) -> tuple[Draft, Tensor]:
        """Return the drafts to verify and their bitmask; `StepPlan.masks` calls this."""
        # `tolist` waits for the drafts, and therefore for the previous step.
        drafts, num_draft_tokens, draft = proposal.tokens.tolist(), proposal.tokens.shape[1], self._draft
        # Keep the drafts of a model with states: its state has read them, and cannot be corrected later.
        may_replace = proposal.logits is None and (draft is None or not keeps_states(draft))
        deterministic = [may_replace] * len(drafts)
        if proposal.is_one_hot is not None:
            deterministic = proposal.is_one_hot.tolist()
        read = self._reader.pop(early=True)
        if read is not None:
            self._read_early = self._read(*read)
        tokens, bitmask = masks_of(
            self.rows,
            drafts,
            self._target.vocab_size,
            deterministic=deterministic,
            max_drafts=max(num_draft_tokens, self._steps.max_forced),
            width=num_draft_tokens if is_compiled else None,
        )
        if may_replace and draft is not None and not draft.feature_layers:
            replaced = (tokens >= 0) & (tokens != torch.tensor(drafts, device="cpu")[:, : tokens.shape[1]])
            if bool(replaced.any()):
                # The draft has read its own drafts. Let it read the tokens in their places before it drafts again.
                self._num_undrafted = tokens.shape[1] - 1
        device = proposal.tokens.device
        if device.type == "cuda":
            tokens, bitmask = (each.pin_memory().to(device, non_blocking=True) for each in (tokens, bitmask))
        width = tokens.shape[1]
        logits, lse = (None if each is None else each[:, :width] for each in (proposal.logits, proposal.lse))
        return replace(proposal, tokens=tokens, logits=logits, lse=lse), bitmask

    def _read(self, record: Tensor, planned: PlannedStep) -> RowResults:
        """Process the record of a step: update the statistics and the rows, and end rows that have finished."""
        tokens, num_accepted, num_proposed, rejected, finished = results = unpack_record(record)
        self._planner.learn(planned, tokens, num_accepted, num_proposed)
        num_before = [len(row.tokens) for row in self.rows]
        for index, (then, row) in enumerate(zip(planned.rows, self.rows, strict=True)):
            if then is not row or row.ended:
                # Ignore the results of this row, because the host ended its sequence after the launch of this step.
                tokens[index], num_accepted[index], num_proposed[index], rejected[index] = [], 0, 0, -1
            else:
                row.tokens += tokens[index]
                row.ended = finished[index]
                if tokens[index]:
                    counts = num_accepted[index], num_proposed[index], rejected[index]
                    row.steps.append(RowStep(len(tokens[index]), *counts))
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
            first, row.num_released = row.num_released, len(row.tokens)
            if index in cuts:
                self._end_row(index, row.length)
            if self._batch_rules is not None:
                row.num_released = min(row.num_released, self._batch_rules.num_asked)
            if self._batch_rules is not None or row.num_released - first != num_new[index]:
                # Correct the counts: a rule has cut tokens of this step, or has released tokens of earlier steps.
                self.stats.num_tokens += row.num_released - first - num_new[index]
                tokens[index] = row.tokens[first : row.num_released]
            finished[index] = row.finished
            if finished[index] and row.reason is None:
                row.set_finish_reason()
                ended.append(index)
        self._texts.end(ended)
        if ended and self._draft is not None:
            with normal_tensors():
                self._draft.on_finished(self.state.tokens[ended], self.state.lengths[ended])
        return results

    # Leave inference mode: users may train on the output, and autograd refuses inference tensors.
    @torch.inference_mode(False)
    def output(self) -> GenerationOutput:
        """The sequences and statistics so far."""
        state, rows = self.state, self.rows
        device = state.tokens.device
        lengths = torch.tensor([row.length for row in rows], device=device)
        width = int(lengths.max())
        inside = torch.arange(width, device=device) < lengths.unsqueeze(1)

        def up_to_end(values: Tensor | None, nothing: float) -> Tensor | None:
            """Write `nothing` after the end of each row, because the device may be ahead of the host."""
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
            steps=[list(row.steps) for row in rows],
        )


def _keep_features(target: LanguageModel, draft: DraftSource | None) -> bool:
    """Tell the target which hidden states to keep: those that the draft reads. Returns whether the target keeps any."""
    if draft is not None and draft.feature_layers:
        feature_model(target).keep_features(draft.feature_layers)
        return True
    if isinstance(target, FeatureModel):
        target.keep_features(())
    return False
