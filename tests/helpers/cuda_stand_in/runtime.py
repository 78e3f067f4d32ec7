"""What CUDA keeps besides the numbers: current devices and streams, memory in use, captures, copies under way."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NUM_DEVICES = 2
GARBAGE = 0xCB
# By storage: how many tensors of a device are alive that lie in it.
USERS: Counter[int] = Counter()
CAPTURES: list[CUDAGraph] = []
sync_mode: int | str = "default"


class Host(threading.local):
    """What a thread has of its own."""

    def __init__(self) -> None:
        self.device = 0
        self.capture: CUDAGraph | None = None
        self.streams = [Stream(index) for index in range(NUM_DEVICES)]


class Stream:
    """Copies to pinned memory, (target, source), are done when something waits for them."""

    def __init__(self, device: Any = None) -> None:
        self.device = index_of(device)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def finish(self) -> None:
        with on_data():
            # Copies of the same memory end in the order in which they were begun.
            for target, source in self.copies:
                target.copy_(source)
        self.copies.clear()

    def wait_stream(self, other: Stream) -> None:
        self.copies.extend(other.copies)


class Event(Stream):
    """Waits for the copies that its stream had when it was recorded."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__()
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.copies = list((stream or current_stream()).copies)
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        synchronises("Event.synchronize", implicitly=False)
        self.finish()

    def elapsed_time(self, end: Event) -> float:
        return max(1e3 * (end._seconds - self._seconds), 1e-3)


class CUDAGraph:
    """The calls of a capture, run again by every replay.

    A capture runs nothing: what it wrote to memory from outside is put back, and what it allocated is garbage until the
    first replay. The calls hold the data of their tensors, as a graph holds addresses; memory from outside that no
    tensor lies in any more was freed."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        # By storage: the bytes of memory from outside, and as the capture found them.
        self._outside: dict[int, tuple[Tensor, Tensor]] = {}
        self._inside: dict[int, Tensor] = {}
        self.error_mode = "global"

    def pool(self) -> None:
        return None

    @contextmanager
    def capturing(self, error_mode: str) -> Iterator[None]:
        self.error_mode, HOST.capture = error_mode, self
        CAPTURES.append(self)
        try:
            yield
        finally:
            HOST.capture = None
            CAPTURES.remove(self)
            with on_data():
                for data, found in self._outside.values():
                    data.copy_(found)
                for data in self._inside.values():
                    data.fill_(GARBAGE)

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for tensor in tensors_in((args, kwargs)):
            key = storage_of(tensor)
            if key not in self._outside and key not in self._inside:
                self._outside[key] = bytes_of(tensor), bytes_of(tensor).clone()
        result = function(*args, **kwargs)
        made = tensors_in(result)
        self._inside |= {storage_of(each): bytes_of(each) for each in made if storage_of(each) not in self._outside}
        self._calls.append((function, args, kwargs, made))
        return result

    def replay(self) -> None:
        if not all(USERS[key] for key in self._outside):
            raise RuntimeError("CUDA error: an illegal memory access: the graph replays calls on memory that was freed")
        with on_data():
            for function, args, kwargs, made in self._calls:
                for old, new in zip(made, tensors_in(function(*args, **kwargs)), strict=True):
                    if storage_of(old) != storage_of(new):
                        old.copy_(new)


def hold(tensor: Tensor, data: Tensor) -> None:
    """Count a tensor of a device among those that lie in its memory, for as long as it is alive."""
    key = storage_of(data)
    USERS[key] += 1
    weakref.finalize(tensor, lambda: USERS.update({key: -1})).atexit = False


def set_sync_mode(mode: int | str) -> None:
    global sync_mode
    sync_mode = mode
    warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


def synchronises(what: str, implicitly: bool = True) -> None:
    """Called where the host waits for the device. `implicitly`: in a function that is not there for waiting."""
    if any(graph is HOST.capture or graph.error_mode == "global" for graph in CAPTURES):
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    if implicitly and sync_mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation ({what})")


def index_of(device: Any) -> int:
    """The index of a CUDA device; None = the current one."""
    if isinstance(device, (str, torch.device)):
        device = torch.device(device).index
    return HOST.device if device is None else device


def current_stream(device: Any = None) -> Stream:
    return HOST.streams[index_of(device)]


@contextmanager
def on_data() -> Iterator[None]:
    """Torch functions inside are torch's own, and may write to whatever they find."""
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        yield


def execute(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call on the data of tensors; a capture writes it down."""
    if HOST.capture is not None:
        return HOST.capture.record(function, args, kwargs)
    return function(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole memory that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


HOST = Host()
