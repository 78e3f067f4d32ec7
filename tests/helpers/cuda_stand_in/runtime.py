"""What CUDA keeps besides the numbers: current devices and streams, allocated memory, captures, copies under way."""

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
SYNC_MODES = ("default", "warn", "error")


class Memory:
    """Which storages have a tensor that is alive, and the bytes of each device."""

    def __init__(self) -> None:
        self.tensors: Counter[int] = Counter()
        self.allocated: Counter[int] = Counter()
        self.peak: Counter[int] = Counter()

    def hold(self, tensor: Tensor, data: Tensor) -> None:
        storage, index = data.untyped_storage(), tensor.device.index
        key, size = storage._cdata, storage.nbytes()
        self.tensors[key] += 1
        if self.tensors[key] == 1:
            self.allocated[index] += size
            self.peak[index] = max(self.peak[index], self.allocated[index])
        weakref.finalize(tensor, self._release, key, index, size).atexit = False

    def _release(self, key: int, index: int, size: int) -> None:
        self.tensors[key] -= 1
        if self.tensors[key] == 0:
            del self.tensors[key]
            self.allocated[index] -= size


class Host(threading.local):
    """What a thread has of its own."""

    def __init__(self) -> None:
        self.device = 0
        self.capture: CUDAGraph | None = None
        self.streams = [Stream(index) for index in range(NUM_DEVICES)]


class Copy:
    """A copy to pinned memory, done when something waits for its stream."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source.clone()

    def finish(self) -> None:
        with on_data():
            self._target.copy_(self._source)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = index_of(device)
        self.copies: list[Copy] = []

    def synchronize(self) -> None:
        synchronises("Stream.synchronize", implicitly=False)
        self.finish()

    def finish(self) -> None:
        # Copies of the same memory end in the order in which they were begun.
        for copy in self.copies:
            copy.finish()
        self.copies.clear()

    def wait_stream(self, other: Stream) -> None:
        self.copies.extend(other.copies)

    @property
    def cuda_stream(self) -> int:
        return id(self)


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.copies: list[Copy] = []
        self._timed = enable_timing
        self._seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.copies = list((stream or current_stream()).copies)
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        synchronises("Event.synchronize", implicitly=False)
        for copy in self.copies:
            copy.finish()
        self.copies.clear()

    def query(self) -> bool:
        synchronises("Event.query", implicitly=False)
        return not self.copies

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed) or self._seconds is None or end._seconds is None:
            raise ValueError("Both events must be created with argument 'enable_timing=True' and recorded.")
        return max(1e3 * (end._seconds - self._seconds), 1e-3)


class CUDAGraph:
    """The calls of a capture, run again by every replay.

    A capture runs nothing: what it wrote to memory from outside is put back, and what it allocated is garbage until the
    first replay. The calls hold the data of their tensors, as a graph holds addresses; memory from outside that no
    tensor refers to any more was freed."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        # By storage: the bytes of memory from outside, as the capture found them.
        self._outside: dict[int, tuple[Tensor, Tensor]] = {}
        self._inside: dict[int, Tensor] = {}
        self._pool: Any = None
        self.error_mode = "global"

    def pool(self) -> Any:
        return self._pool

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode. Expected `global`, ..., got {capture_error_mode}")
        if HOST.capture is not None:
            raise RuntimeError("a capture is already going on")
        self._pool, self.error_mode = pool or (id(self), 0), capture_error_mode
        HOST.capture = self
        CAPTURES.append(self)

    def capture_end(self) -> None:
        HOST.capture = None
        CAPTURES.remove(self)
        with on_data():
            for data, found in self._outside.values():
                data.copy_(found)
            for data in self._inside.values():
                data.fill_(GARBAGE)

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for tensor in tensors_in((args, kwargs)):
            key = tensor.untyped_storage()._cdata
            if key not in self._outside and key not in self._inside:
                self._outside[key] = bytes_of(tensor), bytes_of(tensor).clone()
        result = function(*args, **kwargs)
        made = tensors_in(result)
        for tensor in made:
            if tensor.untyped_storage()._cdata not in self._outside:
                self._inside[tensor.untyped_storage()._cdata] = bytes_of(tensor)
        self._calls.append((function, args, kwargs, made))
        return result

    def replay(self) -> None:
        if any(MEMORY.tensors[key] == 0 for key in self._outside):
            raise RuntimeError("CUDA error: an illegal memory access: the graph replays calls on memory that was freed")
        with on_data():
            for function, args, kwargs, made in self._calls:
                for old, new in zip(made, tensors_in(function(*args, **kwargs)), strict=True):
                    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        old.copy_(new)

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


MEMORY = Memory()
CAPTURES: list[CUDAGraph] = []
# Names of the kernels, fills and copies that were launched.
LAUNCHES: list[str] = []
GARBAGE = 0xCB
sync_mode = "default"


def set_sync_mode(mode: int | str) -> None:
    global sync_mode
    sync_mode = SYNC_MODES[mode] if isinstance(mode, int) else mode
    if sync_mode not in SYNC_MODES:
        raise RuntimeError(f"invalid value of debug_mode, expected one of {SYNC_MODES}")
    warnings.warn(
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
        stacklevel=2,
    )


def synchronises(what: str, implicitly: bool = True) -> None:
    """Called where the host waits for the device. `implicitly`: in a function that is not there for waiting."""
    for graph in CAPTURES:
        if graph is HOST.capture or graph.error_mode == "global":
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    if not implicitly:
        return
    if sync_mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
    if sync_mode == "warn":
        warnings.warn(f"called a synchronizing CUDA operation ({what})", stacklevel=3)


def index_of(device: Any) -> int:
    """The index of a CUDA device; None = the current one."""
    if device is None:
        return HOST.device
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"Expected a cuda device, but got: {device}")
        device = HOST.device if device.index is None else device.index
    if not 0 <= device < NUM_DEVICES:
        raise RuntimeError(f"CUDA error: invalid device ordinal {device}")
    return device


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


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole memory that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


HOST = Host()
