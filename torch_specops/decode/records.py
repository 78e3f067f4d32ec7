"""The way of a step's record to the host and to a streamer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .output import Step
from .state import record_of

__all__ = ["RecordReader", "Streamer", "step_of", "streamer_calls"]

# Called with every step; or an object with `put(tokens)` and `end()`, as transformers' streamers are.
Streamer = Callable[[Step], object] | Any


class RecordReader:
    """Brings records to the host: at once on a CPU; on CUDA through pinned memory, one step late, so that the next
    step is already queued while the host looks at this one."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._queue: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def push(self, record: Tensor) -> None:
        if not self._is_cuda:
            self._queue.append((record, None))
            return
        pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
        pinned.copy_(record, non_blocking=True)
        event = torch.cuda.Event()
        # The stream that the copy is on, which need not be that of the current device.
        event.record(torch.cuda.current_stream(record.device))
        self._queue.append((pinned, event))

    def pop(self) -> Tensor | None:
        if self._is_cuda and len(self._queue) < 2:
            return None
        record, event = self._queue.pop(0)
        if event is not None:
            event.synchronize()
        return record


def step_of(record: Tensor, seconds: float) -> Step:
    emitted, num_accepted, num_proposed, _, finished = record_of(record)
    return Step(
        tokens=[[token for token in row if token >= 0] for row in emitted.tolist()],
        num_accepted=num_accepted.tolist(),
        num_proposed=num_proposed.tolist(),
        finished=[bool(row) for row in finished.tolist()],
        seconds=seconds,
    )


def streamer_calls(
    streamer: Streamer | None, input_ids: Tensor
) -> tuple[Callable[[Step], object], Callable[[], object]]:
    if streamer is None:
        return lambda step: None, lambda: None
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        if input_ids.shape[0] != 1:
            raise ValueError(f"streamer: one with put and end takes a batch of one, got {input_ids.shape[0]} rows")
        streamer.put(input_ids.cpu())
        return partial(_put, streamer), streamer.end
    if callable(streamer):
        return streamer, lambda: None
    raise TypeError(f"streamer: expected a callable, or an object with put and end, got {type(streamer)}")


def _put(streamer: Any, step: Step) -> None:
    streamer.put(torch.tensor(step.tokens[0], dtype=torch.int64))
