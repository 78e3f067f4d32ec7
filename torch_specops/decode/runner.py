"""Runs a step: eagerly, in compiled pieces, as one compiled graph, or on CUDA as a captured CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..compilation import CompiledPieces, compile_errors_named
from ..drafts import DraftSource, LanguageModel
from ..drafts.base import static_tensors_of
from ..schedules import Optimal, Schedule, Trim
from .state import DecodeState, constants_of, moved, refilled, tensors_of
from .step import Verifier, propose, speculative_step, verify_and_commit

__all__ = ["StepRunner"]

# The capacity of compiled steps is rounded up to a multiple of this, so that prompts of similar length share a graph.
CAPACITY_MULTIPLE = 64
# Compiling on a CPU pays after 3,500 (greedy) to 7,100 (sampled) steps: benchmarks/results, cpu-compile and
# cpu-loop-austen-bytes.
STEPS_THAT_PAY = 8000


class StepRunner:
    """Runs the steps of one batch after another, and keeps what was compiled and captured for them.

    Args:
        target, draft, verify: the parts of a step.
        schedule: chooses the number of drafts.
        measures_cost: the cost of a draft is to be measured before the first step.
        compile: as `SpeculativeDecoder` takes it.
        one_graph: compile a step as a single graph instead of in pieces.

    Attributes:
        compiled, compile_reason: whether steps are compiled, and why.
        schedule: the one in use.
        cost_is_measured: False until a cost that is to be measured has been.
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
        measures_cost: bool = False,
        compile: bool | str = False,
        one_graph: bool = False,
    ) -> None:
        self.target = target
        self.draft = draft
        self.verify = verify
        self.schedule = schedule
        self.cost_is_measured = not measures_cost
        self.compiled = False
        self.unread_length: int | None = None
        self.keep_logits: Callable[[Tensor], object] | None = None
        self._compile = compile
        self._one_graph = one_graph
        self._num_eager_steps = 0
        self._pieces = CompiledPieces()
        self._shape: Hashable = None
        self._state: DecodeState | None = None
        # The number of steps without drafts since the last step with drafts.
        self._num_undrafted = 0
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # The K whose steps are compiled and captured.
        self._ready: set[int] = set()
        # The tensors that the graphs read and write, held so that no new tensor can take their addresses.
        self._captured: list[Tensor] = []
        # One stream for all captures: cuBLAS keeps a workspace for every stream it was used on.
        self._capture_stream: torch.cuda.Stream | None = None
        self.choose_compile(0)

    def __getstate__(self) -> dict[str, Any]:
        # Graphs belong to a process.
        return vars(self) | {"_graphs": {}, "_ready": set(), "_captured": [], "_capture_stream": None}

    @property
    def state(self) -> DecodeState:
        if self._state is None:
            raise RuntimeError("nothing was decoded yet: call generate or stream first")
        return self._state

    def choose_compile(self, num_new_tokens: float) -> None:
        """Decide whether to compile, and why. Once steps are compiled, they stay compiled.

        Args:
            num_new_tokens: of the longest row of the batch to come.
        """
        if not self.compiled:
            num_steps = self._num_eager_steps + num_new_tokens / (max(self.schedule.buckets) + 1)
            self.compiled, self.compile_reason = self._resolved(num_steps)

    def _resolved(self, num_steps: float) -> tuple[bool, str]:
        """`compile` for so many eager steps, done and to come."""
        compile, draft, device = self._compile, self.draft, self.target.device.type
        models = (self.target, getattr(draft, "model", None))
        obstacle = next((why for model in models if (why := getattr(model, "not_compiled", None))), None)
        if isinstance(compile, bool):
            if compile and obstacle is not None:
                raise ValueError(f"compile: expected False or 'auto', got True: {obstacle}")
            return compile, f"compile={compile} was asked for"
        if compile != "auto":
            raise ValueError(f"compile: expected True, False or 'auto', got {compile!r}")
        if obstacle is not None:
            return False, f"eager: {obstacle}"
        if device == "cuda":
            return True, "compiled: on CUDA the host would be the bottleneck of an eager step"
        if draft is not None and draft.deterministic:
            # Text without a match has no drafts, and the time of an eager forward is that of the tokens it reads.
            return False, f"eager: on {device} an eager step reads only the tokens proposed, a compiled one always K"
        pays = f"on {device} compiling pays after about {STEPS_THAT_PAY:,} steps"
        if num_steps >= STEPS_THAT_PAY:
            return True, f"compiled: {pays}"
        return False, f"eager: {pays}, and {num_steps:,.0f} are done or certain"

    def capacity(self, longest: int) -> int:
        """Slots for the longest sequence, and for the drafts of a step beyond it."""
        slots = longest + max(self.schedule.buckets) + 1
        return -(-slots // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE if self.compiled else slots

    def start(self, values: DecodeState, capacity: int, inputs: Mapping[str, Tensor] | None) -> DecodeState:
        """Begin a batch with these values. If its shapes are those of the last batch, the values are copied into that
        batch's tensors, because graphs hold their addresses."""
        state, before = moved(values, self.target.device, capacity), self._state
        shape = _shape_of(state, inputs or {})
        if shape != self._shape:
            # Frees the graphs' memory before the models allocate for the new batch.
            self._forget_graphs()
        self._shape = shape
        self.unread_length = None
        self._num_undrafted = 0
        if before is not None and _shape_of(before, {}) == _shape_of(state, {}):
            for old, new in zip(tensors_of(before).values(), tensors_of(state).values(), strict=True):
                old.copy_(new)
        else:
            self._state = state
        return self.state

    def start_draft(self, inputs: Mapping[str, Tensor] | None) -> None:
        """Let the draft read the batch that the target has begun, and drop CUDA graphs that do not fit it.

        Args:
            inputs: as in `DraftSource.start`.
        """
        state, draft = self.state, self.draft
        if draft is not None:
            self._compile_draft(draft)
            draft.expect(max(self.schedule.buckets))
            draft.start(state.tokens, state.lengths, state.capacity, inputs)
        self.keep_valid_graphs()
        self.schedule.reset()

    def restart_draft(self, rows: Tensor) -> None:
        """Let the draft read the new texts of these rows."""
        if self.draft is not None:
            self._compile_draft(self.draft)
            self.draft.restart(self.state.tokens, self.state.lengths, rows)

    def _compile_draft(self, draft: DraftSource) -> None:
        # As a part of one graph the draft has no pieces of its own.
        draft.compile(self._shape if self.compiled and not self._one_graph else None)

    def refill(self, row: int, values: DecodeState) -> None:
        """Put another sequence into a row of the batch, as `refilled` does."""
        before, self._state = self.state, refilled(self.state, row, values)
        if self._state is not before:
            # The newest step may still be running.
            self.synchronize()
            self._forget_graphs()
            self._shape = _shape_of(self._state, {})
            self.keep_valid_graphs()

    def keep_valid_graphs(self) -> None:
        """Drop the CUDA graphs if any tensor that they captured was replaced. Called once the models are ready for a
        batch: a model has a new cache if another decoder used it in between."""
        if self.target.device.type != "cuda":
            return
        parts = [self.target] if self.draft is None else [self.target, self.draft]
        tensors = static_tensors_of(*parts)
        static = [part for tensor in tensors or () for part in _parts_of(tensor)]
        found = [*tensors_of(self.state).values(), *static]
        if tensors is None or [t.data_ptr() for t in found] != [t.data_ptr() for t in self._captured]:
            self._forget_graphs()
        self._captured = found

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._ready.clear()
        self._captured = []

    def run(self, num_draft_tokens: int, trim: Trim | None = None) -> Tensor:
        """Run one step and return its record.

        Args:
            num_draft_tokens: K.
            trim: chooses how many of the drafts to verify in an eager step on a CPU (`Schedule.trim`); None = all K,
                padding included.
        """
        state = self.state
        self._num_eager_steps += not self.compiled
        if num_draft_tokens == 0:
            self._num_undrafted += 1
        elif self._num_undrafted > 0:
            assert self.draft is not None
            self.draft.catch_up(state.tokens, state.lengths, self._num_undrafted)
            self._num_undrafted = 0
        if num_draft_tokens in self._graphs:
            graph, record = self._graphs[num_draft_tokens]
            graph.replay()
            return record
        return self._step(num_draft_tokens, trim)

    def end_row(self, row: int, length: int) -> None:
        """Cut a row to this length, and end it. The host does not wait: the device does it before the next step."""
        self.state.lengths[row].fill_(length)
        self.state.finished[row].fill_(True)

    def smallest_sufficient(self, wanted: int, needed: int) -> int:
        """The smallest K that is at least `needed` and needs no compiling, but at most `wanted`. An eager step can have
        any K, a compiled one those of the schedule's buckets."""
        if not self.compiled:
            return min(wanted, needed)
        buckets = self.schedule.buckets
        wanted = max((count for count in buckets if count <= wanted), default=min(buckets))
        return min([wanted, *(count for count in self._ready if count >= needed)])

    def prepare(self, num_draft_tokens: int) -> float:
        """Compile and capture the step for this K if it is not ready; returns the seconds that took."""
        if not self.compiled or num_draft_tokens in self._ready:
            return 0.0
        started = time.perf_counter()
        with self._all_finished(), compile_errors_named():
            if self.target.device.type == "cuda":
                self._capture(num_draft_tokens)
            else:
                self._step(num_draft_tokens)
        self._ready.add(num_draft_tokens)
        return time.perf_counter() - started

    def measure_cost(self) -> float:
        """If the cost of a draft is to be measured, and was not yet, replace the schedule by the `Optimal` one for it.
        The cost has two parts: the draft's own forward, and one more token for the target to read. The state does not
        change. Returns the seconds spent compiling."""
        if self.cost_is_measured:
            return 0.0
        compiling, medians, most = 0.0, [], self.schedule.buckets[-1]
        for num_draft_tokens in (0, most):
            compiling += self.prepare(num_draft_tokens)
            times = []
            with self._all_finished():
                for _ in range(3):
                    self.synchronize()
                    started = time.perf_counter()
                    self.run(num_draft_tokens)
                    self.synchronize()
                    times.append(time.perf_counter() - started)
            medians.append(sorted(times)[1])
        plain, drafting = medians
        self.schedule = Optimal(max(drafting - plain, 0.0) / (most * plain), buckets=self.schedule.buckets)
        self.cost_is_measured = True
        return compiling

    def synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)

    def _step(self, num_draft_tokens: int, trim: Trim | None = None) -> Tensor:
        state = self.state
        if self.compiled and self._one_graph:
            step = self._piece(speculative_step, num_draft_tokens)
            return step(self.target, self.draft, state, num_draft_tokens, self.verify)
        compiles_itself = self.draft is None or self.draft.compiles_itself
        draft = propose if compiles_itself else self._piece(propose, num_draft_tokens)
        proposal = draft(self.draft, state, num_draft_tokens)
        if self.compiled or state.tokens.device.type != "cpu":
            trim = None
        unread_length, self.unread_length = self.unread_length, None
        return self._piece(verify_and_commit, num_draft_tokens)(
            self.target, state, proposal, self.verify, unread_length, trim, self.keep_logits
        )

    def _piece(self, function: Callable[..., Any], num_draft_tokens: int) -> Callable[..., Any]:
        return self._pieces.get(function, self._shape, num_draft_tokens) if self.compiled else function

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

    def _capture(self, num_draft_tokens: int) -> None:
        """Capture the whole step as one CUDA graph. Graphs of different K share a memory pool: they never run at the
        same time."""
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.target.device)
        stream = self._capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # The outer context also leaves the stream if a capture fails.
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(num_draft_tokens)
            # torch's defaults would capture on a stream of the device that captured first, and would keep other threads
            # from using CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                record = self._step(num_draft_tokens)
        torch.cuda.current_stream().wait_stream(stream)
        self._graphs[num_draft_tokens] = (graph, record)


def _shape_of(state: DecodeState, inputs: Mapping[str, Tensor]) -> Hashable:
    """Everything that a compiled piece takes as constant for a batch, except for K."""
    tensors = tensors_of(state) | dict(inputs)
    return constants_of(state), tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a tensor: a quantised weight has several."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
    else:
        for name in flatten()[0]:
            yield from _parts_of(getattr(tensor, name))
