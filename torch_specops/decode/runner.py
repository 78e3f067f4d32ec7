"""How a step runs: as it stands, as compiled pieces, as one graph, and on CUDA captured into a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..compilation import CompiledPieces
from ..drafts import Draft, DraftSource, LanguageModel
from ..drafts.base import static_tensors_of
from ..sampling import SamplingTensors
from ..schedules import Schedule
from .ragged import as_row_reader
from .state import DecodeState, Verify, num_proposed_of, propose, shortened, speculative_step, verify_and_commit

__all__ = ["StepRunner"]


class StepRunner:
    """Runs the steps of one batch after another, and keeps what was compiled and captured for them.

    Args:
        target, draft, verify: what a step is made of.
        one_graph: compile a step as a single graph, not in pieces.

    Attributes:
        verify: as given.
        compiled: whether steps are compiled.
        unread_length: the length of every row, where the next step is to read the prompts as well; None = the target
            has read them.
    """

    def __init__(self, target: LanguageModel, draft: DraftSource | None, verify: Verify, one_graph: bool) -> None:
        self.compiled = False
        self.unread_length: int | None = None
        self.verify = verify
        self._target = target
        self._row_reader = as_row_reader(target)
        self._draft = draft
        self._one_graph = one_graph
        self._pieces = CompiledPieces()
        self._shape: Hashable = None
        self._state: DecodeState | None = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._ready: set[int] = set()
        # What the graphs read and write, kept alive for them: as long as a tensor lives, no other has its address.
        self._captured: list[Tensor] = []
        # One for all captures: cuBLAS keeps a workspace for each stream it has met.
        self._side: torch.cuda.Stream | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Graphs belong to a process.
        return vars(self) | {"_graphs": {}, "_ready": set(), "_captured": [], "_side": None}

    @property
    def state(self) -> DecodeState:
        if self._state is None:
            raise RuntimeError("nothing was decoded yet: call generate or stream first")
        return self._state

    @property
    def draft_shape(self) -> Hashable | None:
        """What stands for the shapes of the batch where the draft compiles its pieces; None = it compiles none."""
        return self._shape if self.compiled and not self._one_graph else None

    def start(self, values: DecodeState, inputs: Mapping[str, Tensor]) -> DecodeState:
        """Begin a batch: its state on the target's device, in the tensors of the state before where the shapes are the
        same, because graphs know their addresses."""
        shape = _shape_of(values, inputs)
        if shape != self._shape:
            # Before the models make room for the new batch.
            self._forget_graphs()
        self._shape = shape
        self.unread_length = None
        new = _tensors_of(values)
        if self._state is not None and self._state.is_sampled == values.is_sampled:
            old = _tensors_of(self._state)
            if {name: tensor.shape for name, tensor in old.items()} == {name: t.shape for name, t in new.items()}:
                for name, tensor in new.items():
                    old[name].copy_(tensor)
                return self._state
        moved: dict[str, Any] = {name: tensor.to(self._target.device, copy=True) for name, tensor in new.items()}
        sampling = SamplingTensors(**{name: moved.pop(name) for name in _tensors_of(values.sampling)})
        self._state = replace(values, sampling=sampling, **moved)
        return self._state

    def keep_valid_graphs(self) -> None:
        """Called once the models are ready for the batch: CUDA graphs stay if all that they captured is where it was.
        A model may have a new cache although no shape has changed, if another decoder used it in between."""
        if self._target.device.type != "cuda":
            return
        parts = [self._target] if self._draft is None else [self._target, self._draft]
        tensors = static_tensors_of(*parts)
        static = [part for tensor in tensors or () for part in _parts_of(tensor)]
        found = [*_tensors_of(self.state).values(), *static]
        if tensors is None or [t.data_ptr() for t in found] != [t.data_ptr() for t in self._captured]:
            self._forget_graphs()
        self._captured = found

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._ready.clear()
        self._captured = []

    def run(self, num_draft_tokens: int, schedule: Schedule | None = None) -> Tensor:
        """One step; returns its record.

        Args:
            schedule: what says how many of the drafts are worth reading, where that can be asked; None = all that a
                batch has, its padding too.
        """
        with self.on_device():
            if num_draft_tokens in self._graphs:
                graph, record = self._graphs[num_draft_tokens]
                graph.replay()
                return record
            return self._step(num_draft_tokens, schedule)

    def prepare(self, num_draft_tokens: int) -> float:
        """Compile and capture the step for this K, unless that was done; returns the seconds it took."""
        if not self.compiled or num_draft_tokens in self._ready:
            return 0.0
        started = time.perf_counter()
        with self.on_device(), self._nothing_emitted():
            if self._target.device.type == "cuda":
                self._capture(num_draft_tokens)
            else:
                self._step(num_draft_tokens)
        self._ready.add(num_draft_tokens)
        return time.perf_counter() - started

    def seconds_of(self, num_draft_tokens: int) -> float:
        """What a step takes that reads all of its drafts; the state stays as it is."""
        times = []
        with self._nothing_emitted():
            for _ in range(3):
                self.synchronize()
                started = time.perf_counter()
                self.run(num_draft_tokens)
                self.synchronize()
                times.append(time.perf_counter() - started)
        return sorted(times)[1]

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the target's device the current one, which Triton launches on and streams belong to."""
        device = self._target.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def synchronize(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)

    def _step(self, num_draft_tokens: int, schedule: Schedule | None = None) -> Tensor:
        state = self.state
        if self.compiled and self._one_graph:
            step = self._piece(speculative_step, num_draft_tokens)
            return step(self._target, self._draft, state, num_draft_tokens, self.verify)
        compiles_itself = self._draft is None or self._draft.compiles_itself
        proposal = (propose if compiles_itself else self._piece(propose, num_draft_tokens))(
            self._draft, state, num_draft_tokens
        )
        row_reader = None
        if schedule is not None and not self.compiled and state.tokens.device.type == "cpu":
            # Shapes are free here, and a forward over fewer tokens is cheaper.
            proposal = shortened(proposal, self._width(proposal, schedule))
            row_reader = self._row_reader
        unread_length, self.unread_length = self.unread_length, None
        return self._piece(verify_and_commit, num_draft_tokens)(
            self._target,
            state,
            proposal.tokens,
            proposal.logits,
            proposal.lse,
            self.verify,
            unread_length,
            row_reader,
        )

    def _width(self, proposal: Draft, schedule: Schedule) -> int:
        """How many drafts of a row are worth reading. Those of a model have been paid for, and its rows have as many
        as each other."""
        counts = num_proposed_of(proposal.tokens)
        if self._draft is None or not self._draft.deterministic:
            return int(counts.max())
        return schedule.trim(counts[~self.state.finished].tolist())

    def _piece(self, function: Callable[..., Any], num_draft_tokens: int) -> Callable[..., Any]:
        return self._pieces.get(function, self._shape, num_draft_tokens) if self.compiled else function

    @contextmanager
    def _nothing_emitted(self) -> Iterator[None]:
        """Rows are marked as finished: a step then changes nothing but cache slots that are not visible."""
        finished = self.state.finished.clone()
        try:
            self.state.finished.fill_(True)
            yield
        finally:
            self.state.finished.copy_(finished)

    def _capture(self, num_draft_tokens: int) -> None:
        """The whole step as one CUDA graph; its pool is shared with the graphs of other K, which never run together."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._target.device)
        self._side.wait_stream(torch.cuda.current_stream())
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # The outer context leaves the side stream also where a capture fails.
        with torch.cuda.stream(self._side):
            for _ in range(3):
                self._step(num_draft_tokens)
            # torch's default stream for captures belongs to the device that captured first; its default error mode
            # forbids other threads to use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._side, capture_error_mode="thread_local"):
                record = self._step(num_draft_tokens)
        torch.cuda.current_stream().wait_stream(self._side)
        self._graphs[num_draft_tokens] = (graph, record)


def _shape_of(state: DecodeState, inputs: Mapping[str, Tensor]) -> Hashable:
    """Everything about a batch that a compiled piece takes for fixed, but for K."""
    tensors = _tensors_of(state) | dict(inputs)
    return state.is_sampled, tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


def _tensors_of(values: DecodeState | SamplingTensors) -> dict[str, Tensor]:
    """Every tensor of a state, by name; those of its sampling too."""
    tensors = {name: value for name, value in vars(values).items() if isinstance(value, Tensor)}
    return tensors | _tensors_of(values.sampling) if isinstance(values, DecodeState) else tensors


def _parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data: those inside a quantised weight."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.detach()
    else:
        for name in flatten()[0]:
            yield from _parts_of(getattr(tensor, name))
