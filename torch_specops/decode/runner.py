"""Runs a step: eagerly, in compiled pieces, as one compiled graph, or on CUDA as a captured CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import compilation
from ..compilation import CompiledPieces, compile_errors_named
from ..drafts import Draft, DraftSource, LanguageModel
from ..drafts.base import readable_lengths, static_tensors_of
from ..drafts.ragged import expect_tokens
from ..grammars import Grammar
from ..ops.tracing import normal_tensors
from ..schedules import Schedule
from .grammar import MAX_FORCED, all_allowed
from .graphs import CapturedStep, Masks, capture, capture_in_two, parts_of
from .models import models_of
from .rows import Row
from .state import DecodeState, Texts, copy_state, moved, shape_of, tensors_of
from .step import Choose, Verifier, checked_drafts, propose, speculative_step, verify_and_commit

__all__ = ["StepRunner"]

# The capacity of compiled steps is rounded up to a multiple of this, so that prompts of similar length share a graph.
CAPACITY_MULTIPLE = 64


class StepRunner:
    """Runs the steps of one batch after another, and keeps what was compiled and captured for them.

    Args:
        target, draft, verify: the parts of a step.
        schedule: chooses the number of drafts.
        compile: as `SpeculativeDecoder` takes it.
        one_graph: compile a step as a single graph instead of in pieces.

    Attributes:
        compiled, compile_reason: whether steps are compiled, and why.
        draft_seconds: of proposing in the newest step, as far as it was a part of its own.
        texts: those that were begun in rows of the batch.
        unread_length: the length of every row if the next step must read the prompts too; None = the target has read
            them.
        keep_logits: as `verify_and_commit` takes it.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: DraftSource | None,
        verify: Verifier,
        schedule: Schedule,
        *,
        compile: bool | str = False,
        one_graph: bool = False,
    ) -> None:
        self.target = target
        self.draft = draft
        self.verify = verify
        self.schedule = schedule
        self.draft_seconds = self._started = 0.0
        self.compiled = False
        self.unread_length: int | None = None
        self.keep_logits: Callable[[Tensor], object] | None = None
        self._compile = compile
        self._one_graph = one_graph
        self._num_eager_steps = 0
        self._pieces = CompiledPieces()
        self._shape: Hashable = None
        # Of the models, when they were looked at last.
        self._versions: list[Any] = []
        self._compile_keys: tuple[Hashable, ...] = ()
        self._state: DecodeState | None = None
        self.texts = Texts()
        # The state of the compiled steps while steps run eagerly, because they need more room; None = they do not.
        self._set_aside: DecodeState | None = None
        # The number of steps without drafts since the last step with drafts.
        self._num_undrafted = 0
        # All rows are longer than the draft can read.
        self._is_outgrown = False
        # By K, and whether the steps have a bitmask.
        self._graphs: dict[tuple[int, bool], CapturedStep] = {}
        # The keys whose steps are compiled and captured, and how long a captured one takes.
        self._ready: dict[tuple[int, bool], float | None] = {}
        # The tensors that the graphs read and write, held so that no new tensor can take their addresses.
        self._captured: list[Tensor] = []
        # One stream for all captures: cuBLAS keeps a workspace for every stream it was used on.
        self._capture_stream: torch.cuda.Stream | None = None
        self.choose_compile(0)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs belong to a process.
        return vars(self) | {"_graphs": {}, "_ready": {}, "_captured": [], "_capture_stream": None}

    @property
    def state(self) -> DecodeState:
        if self._state is None:
            raise RuntimeError("nothing was decoded yet: call generate or stream first")
        return self._state

    @property
    def is_fixed(self) -> bool:
        """The next step is compiled, so that all rows have the same number of drafts."""
        return self.compiled and self._set_aside is None

    @property
    def looks_up(self) -> bool:
        """Drafts cost no forward."""
        return self.draft is not None and self.draft.looks_up and self.draft.deterministic

    @property
    def asks_again(self) -> bool:
        """The host sees drafts that cost no forward before the target reads them."""
        # Compiled steps with one K leave nothing to choose.
        has_no_choice = self.is_fixed and (self._one_graph or len(self.schedule.buckets) == 1)
        return self.looks_up and self.state.tokens.device.type == "cpu" and not has_no_choice

    def choose_compile(self, num_new_tokens: float) -> None:
        """Decide whether to compile, and why. Once steps are compiled, they stay compiled, if a model can be.

        Args:
            num_new_tokens: of the longest row of the batch to come.
        """
        models = models_of(self.target, self.draft)
        obstacle = next((why for model in models if (why := getattr(model, "not_compiled", None))), None)
        if self.compiled and obstacle is None:
            return
        self.compiled, self.compile_reason = compilation.choice(
            self._compile,
            self.target.device,
            num_steps=self._num_eager_steps + num_new_tokens / (max(self.schedule.buckets) + 1),
            obstacle=obstacle,
            drafts_vary=self.draft is not None and self.draft.deterministic,
        )

    def capacity(self, longest: int) -> int:
        """Slots for the longest sequence, and for the drafts of a step beyond it."""
        slots = longest + max(*self.schedule.buckets, self.max_forced) + 1
        return -(-slots // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE if self.compiled else slots

    def check_grammars(self, grammars: Sequence[Grammar | None]) -> None:
        if self._one_graph and any(grammar is not None for grammar in grammars):
            raise NotImplementedError(
                "grammar: a step that is one graph asks the host nothing; expected one_graph=False"
            )

    @property
    def max_forced(self) -> int:
        """How many tokens that grammars force may a row get in a step, instead of K drafts."""
        return MAX_FORCED if self.draft is None and not self.compiled else 0

    def start(self, values: DecodeState, capacity: int, inputs: Mapping[str, Tensor] | None) -> DecodeState:
        """Begin a batch with these values. If its shapes are those of the last batch, the values are copied into that
        batch's tensors, because graphs hold their addresses."""
        values = replace(values, sampling=replace(values.sampling, coupled=self.verify.op == "gumbel"))
        state, before = moved(values, self.target.device, capacity), self._set_aside or self._state
        shape = shape_of(state, inputs or {})
        self.follow_models()
        expect_tokens(self.target, max(*self.schedule.buckets, self.max_forced) + 1)
        if self.draft is not None:
            self.draft.expect(max(self.schedule.buckets))
        if shape != self._shape:
            # Frees the graphs' memory before the models allocate for the new batch.
            self._forget_graphs()
        self._shape = shape
        self._set_aside = None
        self.texts = Texts()
        self.unread_length = None
        self._num_undrafted = 0
        self._state = state
        if before is not None and shape_of(before, {}) == shape_of(state, {}):
            copy_state(before, state)
            self._state = before
        return self.state

    def start_draft(self, inputs: Mapping[str, Tensor] | None) -> None:
        """Let the draft read the batch that the target has begun, with `inputs` as in `DraftSource.start`; drop CUDA
        graphs that do not fit it."""
        state, draft = self.state, self.draft
        self._compile_draft()
        if draft is not None:
            with normal_tensors():
                draft.start(state.tokens, readable_lengths(draft, state.tokens, state.lengths), state.capacity, inputs)
        self.keep_valid_graphs()
        self.schedule.reset()

    def restart_draft(self, rows: Tensor) -> None:
        """Let the draft read the new texts of these rows."""
        state, draft = self.state, self.draft
        if draft is not None:
            with normal_tensors():
                draft.restart(state.tokens, readable_lengths(draft, state.tokens, state.lengths), rows)

    def _compile_draft(self) -> None:
        # The `compile` of a source that is a module may be that of `nn.Module`.
        if self.draft is not None and self.draft.compiles_itself:
            # The draft has no pieces of its own if the step is one graph.
            key = self._shape, self._compile_keys
            self.draft.compile(key if self.is_fixed and not self._one_graph else None)

    def fill(self, texts: Mapping[int, DecodeState]) -> None:
        """Begin texts, each alone in its batch, in rows that have ended."""
        self.texts.begin(self.state, texts)
        self.fit()

    def fit(self) -> None:
        """Give the state the eos tokens and the sampling of the texts in its rows."""
        compiled, state, fits = self._set_aside or self.state, *self.texts.fitted(self.state, self.compiled)
        if state is None:
            return
        self._set_aside = None if fits or not self.compiled else compiled
        if not fits:
            self._state = state
        elif shape_of(state, {}) == shape_of(compiled, {}):
            # Graphs hold the addresses.
            copy_state(compiled, state)
            self._state = compiled
        else:
            # The newest step may still be running.
            self.synchronize()
            self._forget_graphs()
            self._state, self._shape = state, shape_of(state, {})
            self.keep_valid_graphs()
        self._compile_draft()

    def follow_models(self) -> bool:
        """Called when the models were looked at. If any has changed, forget the graphs; compiled pieces are kept, which
        torch and their keys tell apart. Returns whether any has."""
        models = models_of(self.target, self.draft)
        versions = [getattr(model, "version", 0) for model in models]
        has_changed = versions != self._versions
        if has_changed:
            self._versions = versions
            self._compile_keys = tuple(getattr(model, "compile_key", None) for model in models)
            self._forget_graphs()
            self._compile_draft()
        return has_changed

    def keep_valid_graphs(self) -> None:
        """Drop the CUDA graphs if any tensor that they captured was replaced. Called once the models are ready for a
        batch: a model has a new cache if another decoder used it in between."""
        if self.target.device.type != "cuda":
            return
        parts = [self.target] if self.draft is None else [self.target, self.draft]
        tensors = static_tensors_of(*parts)
        static = [part for tensor in tensors or () for part in parts_of(tensor)]
        found = [*tensors_of(self._set_aside or self.state).values(), *static]
        if tensors is None or [t.data_ptr() for t in found] != [t.data_ptr() for t in self._captured]:
            self._forget_graphs()
        self._captured = found

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._ready.clear()
        self._captured = []

    def run(self, num_draft_tokens: int, choose: Choose | None = None, masks: Masks | None = None) -> Tensor:
        """Run one step and return its record.

        Args:
            num_draft_tokens: K.
            choose: as `verify_and_commit` takes it, for a step on a CPU that is eager, or that `asks_again`: the
                largest of its numbers, which is ready, is then that of all rows. None = all K drafts are verified,
                padding included.
            masks: asks grammars between the drafts and their verification; None = no row has one.
        """
        self._started, self.draft_seconds = time.perf_counter(), 0.0
        self._num_eager_steps += not self.compiled
        if num_draft_tokens == 0:
            # Rows that are too long for the draft need no catching up.
            self._num_undrafted += not self._is_outgrown
        else:
            self._catch_up()
        captured = self._graphs.get((num_draft_tokens, masks is not None)) if self.is_fixed else None
        return self._step(num_draft_tokens, choose, masks) if captured is None else captured.replay(masks)

    def _catch_up(self) -> None:
        """Let the draft read what steps without drafts emitted, before it reads anything behind that."""
        state, draft = self.state, self.draft
        if draft is not None and self._num_undrafted > 0:
            draft.catch_up(state.tokens, readable_lengths(draft, state.tokens, state.lengths), self._num_undrafted)
        self._num_undrafted = 0

    def end_row(self, row: int, length: int) -> None:
        """Cut a row to this length, and end it. The host does not wait: the device does it before the next step."""
        self.state.lengths[row].fill_(length)
        self.state.finished[row].fill_(True)

    def rooms(self, going: Sequence[Row]) -> list[int]:
        """The most drafts that each of these rows, which have not ended, can use; the last token needs none."""
        readable = None if self.draft is None else self.draft.max_length
        left = [row.limit - row.length - 1 for row in going]
        most = (
            left
            if readable is None
            else [min(readable + 1 - row.length, n) for row, n in zip(going, left, strict=True)]
        )
        self._is_outgrown = max(most, default=0) <= 0 < max(left, default=0)
        return [max(each, 0) for each in most]

    def smallest_sufficient(self, wanted: int, needed: int, masked: bool = False) -> int:
        """The smallest K that is at least `needed` and needs no compiling, but at most `wanted`. An eager step can have
        any K, a compiled one those of the schedule's buckets, and 0 if the draft can read no row any more."""
        if not self.compiled:
            return min(wanted, needed)
        if self._is_outgrown:
            return 0
        buckets = self.schedule.buckets
        wanted = max((count for count in buckets if count <= wanted), default=min(buckets))
        ready = (count for count, has_mask in self._ready if has_mask == masked)
        return min([wanted, *(count for count in ready if count >= needed)])

    def prepare(self, num_draft_tokens: int, masked: bool = False) -> float:
        """Compile and capture the step for this K, with or without a bitmask, if it is not ready; returns the seconds
        that took."""
        if not self.is_fixed or (num_draft_tokens, masked) in self._ready:
            return 0.0
        if num_draft_tokens > 0:
            self._catch_up()
        started, masks = time.perf_counter(), partial(all_allowed, self.target.vocab_size) if masked else None
        with self._all_finished(), compile_errors_named():
            if self.target.device.type == "cuda":
                self._capture(num_draft_tokens, masks)
            else:
                self._step(num_draft_tokens, masks=masks)
            self._ready[num_draft_tokens, masked] = self._replay_seconds(num_draft_tokens, masked)
        return time.perf_counter() - started

    def _replay_seconds(self, num_draft_tokens: int, masked: bool) -> float | None:
        """The time of a captured step; it must change no row."""
        step = self._graphs.get((num_draft_tokens, masked))
        if step is None:
            return None
        masks, seconds = partial(all_allowed, self.target.vocab_size) if masked else None, []
        for _ in range(3):
            self.synchronize()
            started = time.perf_counter()
            step.replay(masks)
            self.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def captured_seconds(self, num_draft_tokens: int, masked: bool) -> float | None:
        """How long the captured step takes; None = it is not captured."""
        return self._ready.get((num_draft_tokens, masked)) if self.is_fixed else None

    def synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _step(self, num_draft_tokens: int, choose: Choose | None = None, masks: Masks | None = None) -> Tensor:
        if self.is_fixed and self._one_graph:
            step = self._piece(speculative_step, num_draft_tokens)
            return step(self.target, self.draft, self.state, num_draft_tokens, self.verify)
        proposal, bitmask = self._propose(num_draft_tokens), None
        self.draft_seconds = time.perf_counter() - self._started
        if masks is not None:
            proposal, bitmask = masks(proposal, self.compiled)
        if choose is not None and self.is_fixed and self.asks_again:
            # All rows get as many, so that the step has a graph.
            _, num_proposed = checked_drafts(proposal, self.state, self.target)
            num_draft_tokens = max(choose(proposal, num_proposed))
            first = replace(proposal, tokens=proposal.tokens[:, :num_draft_tokens].contiguous())
            proposal = first if num_draft_tokens > 0 else self._propose(0)
            bitmask = None if bitmask is None else bitmask[:, : num_draft_tokens + 1].contiguous()
        return self._verify(num_draft_tokens, proposal, bitmask, choose)

    def _propose(self, num_draft_tokens: int) -> Draft:
        compiles_itself = self.draft is None or self.draft.compiles_itself
        draft = propose if compiles_itself else self._piece(propose, num_draft_tokens)
        return draft(self.draft, self.state, num_draft_tokens, self.target.vocab_size)

    def _verify(
        self, num_draft_tokens: int, proposal: Draft, bitmask: Tensor | None = None, choose: Choose | None = None
    ) -> Tensor:
        if self.compiled or self.state.tokens.device.type != "cpu":
            choose = None
        unread_length, self.unread_length = self.unread_length, None
        verify = self._piece(verify_and_commit, num_draft_tokens, bitmask is not None)
        return verify(self.target, self.state, proposal, self.verify, unread_length, choose, self.keep_logits, bitmask)

    def _piece(self, function: Callable[..., Any], *key: Hashable) -> Callable[..., Any]:
        return self._pieces.get(function, self._shape, self._compile_keys, *key) if self.is_fixed else function

    @contextmanager
    def _all_finished(self) -> Iterator[None]:
        """All rows are marked as finished: a step emits nothing, and changes only cache slots that are not visible."""
        finished, keep_logits = self.state.finished.clone(), self.keep_logits
        try:
            self.state.finished.fill_(True)
            self.keep_logits = None
            yield
        finally:
            self.state.finished.copy_(finished)
            self.keep_logits = keep_logits

    def _capture(self, num_draft_tokens: int, masks: Masks | None) -> None:
        """Capture the whole step as one CUDA graph, or as two with the bitmask between them. Graphs of different steps
        share a memory pool: they never run at the same time."""
        stream = self._capture_stream = self._capture_stream or torch.cuda.Stream(self.target.device)
        stream.wait_stream(torch.cuda.current_stream())
        pool = next(iter(self._graphs.values())).verify.pool() if self._graphs else None
        # The context also leaves the stream if a capture fails.
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(num_draft_tokens, masks=masks)
            if masks is None:
                step = CapturedStep(*capture(stream, pool, self._step, num_draft_tokens))
            else:
                step = capture_in_two(stream, pool, self._propose, self._verify, masks, num_draft_tokens)
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[num_draft_tokens, masks is not None] = step
