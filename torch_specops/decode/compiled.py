"""Runs steps eagerly, compiled, or (on CUDA) as captured graphs, and keeps the compiled pieces and graphs."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import compilation
from ..compilation import CompiledPieces, Way, compile_errors_named
from ..drafts import Draft, DraftSource
from ..drafts.base import proposes_on_host
from ..grammars import Grammar
from ..models.base import LanguageModel, static_tensors_of
from ..ops.tracing import normal_tensors
from .grammar import MAX_FORCED, all_allowed
from .graphs import CapturedStep, capture, parts_of
from .models import models_of, versions_of
from .state import DecodeState, copy_state, moved, shape_of, tensors_of
from .step import Masks, StepPlan, Verifier, checked_drafts, propose, speculative_step, verify_and_commit

# The smallest capacity of compiled steps whose longest sequence is not known, and what others are a multiple of.
LEAST_CAPACITY = 256
CAPACITY_MULTIPLE = 64


class StateOwner(Protocol):
    state: DecodeState


class CompiledSteps:
    """Runs the steps of a target and a draft. Each call takes the state of a batch.

    Args:
        target, draft, verify: the parts of a step.
        compile: as `SpeculativeDecoder` takes it.
        one_graph: compile a step as a single graph instead of in pieces.

    Raises:
        NotImplementedError: `one_graph` with a draft that proposes on the host.

    Attributes:
        buckets: the values of K that compiled steps have, ascending.
        way, compile_reason: how steps run, and why.
        compiled: whether steps are compiled or captured. All steps then have the same shapes.
        ready: has a key (K, whether the step has a bitmask) for each step that is ready to run. The value is the time
            of a captured step in seconds, and None for a step that is only compiled.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: DraftSource | None,
        verify: Verifier,
        buckets: Sequence[int],
        *,
        compile: bool | str = False,
        one_graph: bool = False,
    ) -> None:
        self.target = target
        self.draft = draft
        self.verify = verify
        self.one_graph = one_graph
        self._on_host = proposes_on_host(draft)
        if one_graph and self._on_host:
            raise NotImplementedError(
                "one_graph: expected False with a draft that proposes on the host (SuffixLookup with a large memory), "
                "got True"
            )
        self.way: Way = "eager"
        self.ready: dict[tuple[int, bool], float | None] = {}
        self.buckets = buckets
        self._compile = compile
        self._num_eager_steps = 0
        self._pieces = CompiledPieces()
        # The shapes and constants of the newest state. Each combination of them has separate compiled pieces.
        self._shape: Hashable = None
        # The state whose tensors the graphs read and write, and the batch that uses this state now.
        self._static: DecodeState | None = None
        self._owner: weakref.ref[StateOwner] | None = None
        # The models' versions and compile keys at the last call of `follow_models`.
        self._versions: list[Any] = []
        self._compile_keys: tuple[Hashable, ...] = ()
        self._graphs: dict[tuple[int, bool], CapturedStep] = {}
        # Hold the tensors that the graphs read and write, so that no new tensor can take their addresses.
        self._captured: list[Tensor] = []
        # Use one stream for all captures, because cuBLAS keeps a workspace for each stream.
        self._capture_stream: torch.cuda.Stream | None = None
        self.choose_compile(0)

    def __getstate__(self) -> dict[str, Any]:
        # Pickle neither the CUDA graphs, which belong to this process, nor the state, which belongs to a batch.
        emptied: dict[str, Any] = {"_graphs": {}, "ready": {}, "_captured": [], "_capture_stream": None}
        return vars(self) | emptied | {"_static": None, "_owner": None, "_versions": [], "_compile_keys": ()}

    @property
    def compiled(self) -> bool:
        return self.way != "eager"

    def choose_compile(self, num_new_tokens: float) -> None:
        """Decide how steps run, and record the reason. Compiled or captured steps stay so unless a model can no longer
        be compiled.

        Args:
            num_new_tokens: the largest number of new tokens of a row in the next batch.
        """
        models = models_of(self.target, self.draft)
        obstacle = next((why for model in models if (why := model.not_compiled)), None)
        if self.compiled and obstacle is None:
            return
        self.way, self.compile_reason = compilation.choice(
            self._compile,
            self.target.device,
            num_steps=self._num_eager_steps + num_new_tokens / (max(self.buckets) + 1),
            obstacle=obstacle,
            drafts_vary=self.draft is not None and self.draft.deterministic,
        )

    def capacity(self, longest: int, max_length: int | None = None) -> int:
        """The number of slots per row: enough for the longest sequence, or for `max_length`, and the drafts of a step.

        Compiled steps without a `max_length` have a power of two, so that few lengths need graphs of their own. It is
        no more than the length that the target was made for needs, unless the sequence is longer.
        """
        slots = (max_length or longest) + self.most_drafts + 1
        if not self.compiled:
            return slots
        made_for = self.target.max_length or math.inf
        if max_length is None:
            power = max(LEAST_CAPACITY, 1 << (slots - 1).bit_length())
            slots = int(min(power, max(made_for, longest) + self.most_drafts + 1))
        return -(-slots // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE

    @property
    def most_drafts(self) -> int:
        """The largest number of drafts of a row in a step, including tokens that its grammar forces."""
        return max(*self.buckets, self.max_forced)

    @property
    def max_forced(self) -> int:
        """The largest number of forced tokens of a row in an eager step without a draft. For other steps the number is
        0, because these steps have no forced tokens beyond their K drafts."""
        return MAX_FORCED if self.draft is None and not self.compiled else 0

    def check_grammars(self, grammars: Sequence[Grammar | None]) -> None:
        if self.one_graph and any(grammar is not None for grammar in grammars):
            raise NotImplementedError(
                "grammar: a step that is one graph asks the host nothing; expected one_graph=False"
            )

    def place(self, owner: StateOwner, inputs: Hashable = None) -> DecodeState:
        """Copy the owner's state into the static state, because CUDA graphs read and write the addresses of its
        tensors.

        Args:
            inputs: the shapes of the target's encoder inputs.

        Returns:
            The static state, which compiled steps use.
        """
        state, before = owner.state, None if self._owner is None else self._owner()
        if before is not None and before is not owner:
            before.state = moved(before.state, self.target.device, before.state.capacity)
        self._owner = weakref.ref(owner)
        shape = shape_of(state), inputs
        if shape != self._shape:
            # A step may still use the graphs, so wait before they are freed.
            self.synchronize()
            self._forget_graphs()
        if self._static is None or shape_of(self._static) != shape_of(state):
            self._static = state
        self._shape = shape
        copy_state(self._static, state)
        return self._static

    def compile_draft(self, *, is_compiled: bool) -> None:
        """Tell a draft that compiles itself to compile for the current shapes, or to run eagerly."""
        # Test `compiles_itself` and not whether a method `compile` exists, because every `nn.Module` has such a method.
        if self.draft is not None and self.draft.compiles_itself:
            key = self._shape, self._compile_keys
            # With `one_graph`, the draft is compiled as a part of the step, so it must not compile itself.
            compiles = is_compiled and self.way == "compiled" and not self.one_graph
            self.draft.compile(key if compiles else None)

    def follow_models(self) -> bool:
        """Forget the CUDA graphs if a model has changed since the last call. Returns whether a model has changed.
        Compiled pieces are kept, because their keys and torch's guards detect changes."""
        versions = versions_of(self.target, self.draft)
        has_changed = versions != self._versions
        if has_changed:
            self._versions, models = versions, models_of(self.target, self.draft)
            self._compile_keys = tuple(model.compile_key for model in models)
            self._forget_graphs()
        return has_changed

    def keep_valid_graphs(self) -> None:
        """Drop the CUDA graphs if a tensor that they captured was replaced. Called when the models are ready for a
        batch, because a model has a new cache if another decoder has used it."""
        if self.target.device.type != "cuda":
            return
        parts = [self.target] if self.draft is None else [self.target, self.draft]
        tensors = static_tensors_of(*parts)
        static = [part for tensor in tensors or () for part in parts_of(tensor)]
        in_use = [*(tensors_of(self._static).values() if self._static is not None else ()), *static]
        if tensors is None or [t.data_ptr() for t in in_use] != [t.data_ptr() for t in self._captured]:
            self._forget_graphs()
        self._captured = in_use

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self.ready.clear()
        self._captured = []

    def prepare(self, state: DecodeState, num_draft_tokens: int, masked: bool = False) -> float:
        """Compile and capture the step for this K, with or without a bitmask; returns the time spent, in seconds."""
        started, masks = time.perf_counter(), partial(all_allowed, self.target.vocab_size) if masked else None
        plan = StepPlan(num_draft_tokens, is_compiled=True, masks=masks)
        with _all_finished(state), compile_errors_named():
            seconds = None
            if self.target.device.type == "cuda":
                seconds = self._replay_seconds(self._capture(state, plan), plan)
            else:
                self._step(state, plan)
            self.ready[num_draft_tokens, masked] = seconds
        return time.perf_counter() - started

    def _replay_seconds(self, step: CapturedStep, plan: StepPlan) -> float:
        """Time a captured step. All rows must be finished, so that a replay changes no row."""
        seconds = []
        for _ in range(3):
            self.synchronize()
            started = time.perf_counter()
            step.replay(plan.masks)
            self.synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def run(self, state: DecodeState, plan: StepPlan) -> tuple[Tensor, float | None]:
        """Run one step.

        Returns:
            The step's record, and the time (`time.perf_counter`) at which the drafts were ready. The time is None if
            one graph both proposes and verifies.
        """
        self._num_eager_steps += not self.compiled
        captured = self._graphs.get((plan.num_draft_tokens, plan.masks is not None)) if plan.is_compiled else None
        return self._step(state, plan) if captured is None else (captured.replay(plan.masks), None)

    def _step(self, state: DecodeState, plan: StepPlan) -> tuple[Tensor, float | None]:
        num_draft_tokens, is_compiled = plan.num_draft_tokens, plan.is_compiled
        if is_compiled and self.one_graph:
            step = self._piece(speculative_step, num_draft_tokens)
            return step(self.target, self.draft, state, num_draft_tokens, self.verify), None
        proposal, bitmask = self._propose(state, num_draft_tokens, is_compiled), None
        drafted = time.perf_counter()
        if plan.masks is not None:
            proposal, bitmask = plan.masks(proposal)
        if not is_compiled:
            return verify_and_commit(self.target, state, proposal, self.verify, bitmask, plan), drafted
        if plan.choose is not None:
            # All rows get the same number, because a compiled step has one K.
            num_draft_tokens = max(plan.choose(*checked_drafts(proposal, state, self.target)))
            first = replace(proposal, tokens=proposal.tokens[:, :num_draft_tokens].contiguous())
            proposal = first if num_draft_tokens > 0 else self._propose(state, 0)
            bitmask = None if bitmask is None else bitmask[:, : num_draft_tokens + 1].contiguous()
        return self._verify(state, proposal, bitmask), drafted

    def _propose(self, state: DecodeState, num_draft_tokens: int, is_compiled: bool = True) -> Draft:
        is_whole = self.draft is not None and not (self.draft.compiles_itself or self._on_host)
        draft = self._piece(propose, num_draft_tokens) if is_whole and is_compiled else propose
        return draft(self.draft, state, num_draft_tokens, self.target.vocab_size)

    def _verify(self, state: DecodeState, proposal: Draft, bitmask: Tensor | None = None) -> Tensor:
        verify = self._piece(verify_and_commit, proposal.tokens.shape[1], bitmask is not None)
        return verify(self.target, state, proposal, self.verify, bitmask)

    def _piece(self, function: Callable[..., Any], *key: Hashable) -> Callable[..., Any]:
        if self.way != "compiled":
            return function
        return self._pieces.get(function, self._shape, self._compile_keys, *key)

    def _capture(self, state: DecodeState, plan: StepPlan) -> CapturedStep:
        """Capture a step as one CUDA graph, or as two graphs if the host makes a bitmask between them, or as the graph
        of the verification if the host proposes. All graphs share a memory pool, because they never run at the same
        time."""
        stream = self._capture_stream = self._capture_stream or torch.cuda.Stream(self.target.device)
        stream.wait_stream(torch.cuda.current_stream())
        pool = next(iter(self._graphs.values())).verify.pool() if self._graphs else None
        # The `with` block restores the current stream even if a capture fails.
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(state, plan)
            if plan.masks is None and not self._on_host:
                graph, (record, _) = capture(stream, pool, self._step, state, plan)
                step = CapturedStep(graph, record)
            else:
                step = self._capture_in_parts(state, plan.num_draft_tokens, plan.masks, stream, pool)
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[plan.num_draft_tokens, plan.masks is not None] = step
        return step

    def _capture_in_parts(
        self, state: DecodeState, num_draft_tokens: int, masks: Masks | None, stream: torch.cuda.Stream, pool: Any
    ) -> CapturedStep:
        """Capture verifying alone if the draft proposes on the host, otherwise proposing and verifying as two graphs
        that share a memory pool. The host makes the bitmask before verifying."""
        ask: Callable[[], object] | None = None
        proposal = self._propose(state, num_draft_tokens)
        if num_draft_tokens > 0 and self._on_host:
            with normal_tensors():
                parts = (None if part is None else part.clone() for part in vars(proposal).values())
                proposal = Draft(*parts)  # type: ignore[arg-type]
            ask = partial(self._propose_into, state, proposal)
        elif num_draft_tokens > 0:
            graph, proposal = capture(stream, pool, self._propose, state, num_draft_tokens)
            pool, ask = graph.pool(), graph.replay
        if masks is None:
            last, record = capture(stream, pool, self._verify, state, proposal)
            return CapturedStep(last, record, ask, proposal)
        read = replace(proposal, tokens=proposal.tokens.clone())
        _, bitmask = masks(read)
        last, record = capture(stream, pool, self._verify, state, read, bitmask)
        return CapturedStep(last, record, ask, proposal, (read.tokens, bitmask))

    def _propose_into(self, state: DecodeState, static: Draft) -> None:
        """Propose on the host, and write the drafts where a graph reads them."""
        new = self._propose(state, static.tokens.shape[1])
        for old, part in zip(vars(static).values(), vars(new).values(), strict=True):
            if old is not None:
                old.copy_(part)


@contextmanager
def _all_finished(state: DecodeState) -> Iterator[None]:
    """Mark all rows as finished: a step then emits nothing and writes only to cache slots that no token sees."""
    finished = state.finished.clone()
    try:
        state.finished.fill_(True)
        yield
    finally:
        state.finished.copy_(finished)
