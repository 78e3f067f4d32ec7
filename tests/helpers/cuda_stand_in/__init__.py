"""CUDA devices made of the CPU, so that code written for a GPU runs line by line without one.

    python tests/helpers/cuda_stand_in SCRIPT.py ARGUMENTS...
    TORCH_SPECOPS_CUDA_STAND_IN=1 pytest -m gpu

A tensor on "cuda:0" or "cuda:1" is a `DeviceTensor`: its device is the one it names, its data lie on the CPU, and torch
functions run on its data. Triton kernels run in Triton's interpreter. What goes wrong on a GPU goes wrong here:

- tensors of two devices in one call, and a kernel launched while another device is current;
- host synchronisation during a capture, or where `torch.cuda.set_sync_debug_mode` forbids it;
- the replay of a CUDA graph that touches memory freed since its capture (a capture runs nothing, a replay runs the
  captured calls again);
- a copy to pinned memory that the host reads before an event or a synchronisation says that it is done;
- memory that was never written: `torch.empty` is full of garbage.

Not imitated: compilers (`torch.compile` returns the function as it is, no PTX is made), time, races between streams,
the arithmetic of a GPU, autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.autograd import DeviceType
from triton.runtime.interpreter import GridExecutor

from . import interpreter, runtime
from .runtime import HOST, LAUNCHES, MEMORY, NUM_DEVICES, CUDAGraph, Event, Stream, current_stream, index_of
from .tensors import DeviceTensor, StandIn, launch

__all__ = ["DeviceTensor", "install", "installed"]

PROPERTIES = SimpleNamespace(
    name="CUDA stand-in",
    major=9,
    minor=0,
    # Inputs are rotated through twice the cache: a small one keeps them few.
    L2_cache_size=4096,
    multi_processor_count=132,
    total_memory=2**30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    gcnArchName="",
)


class Device:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else index_of(device)

    def __enter__(self) -> None:
        self._before = HOST.device
        if self.idx >= 0:
            HOST.device = self.idx

    def __exit__(self, *_: Any) -> None:
        HOST.device = self._before


class Profile:
    """`torch.profiler.profile` of what was launched on the devices."""

    def __init__(self, **_: Any) -> None:
        self._launches: list[str] = []

    def __enter__(self) -> Profile:
        self._first = len(LAUNCHES)
        return self

    def __exit__(self, *_: Any) -> None:
        self._launches = LAUNCHES[self._first :]

    def events(self) -> list[Any]:
        return [
            SimpleNamespace(
                name=name,
                device_type=DeviceType.CUDA,
                is_user_annotation=False,
                self_device_time_total=1.0,
            )
            for name in self._launches
        ]


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`."""
    if stream is None:
        yield
        return
    with Device(stream.device):
        before, HOST.streams[stream.device] = HOST.streams[stream.device], stream
        try:
            yield
        finally:
            HOST.streams[stream.device] = before


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """`torch.cuda.graph`."""
    synchronize()
    with on_stream(stream or Stream()):
        cuda_graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            cuda_graph.capture_end()


def synchronize(device: Any = None) -> None:
    runtime.synchronises("torch.cuda.synchronize", implicitly=False)
    current_stream(device).finish()


def reset_peak(device: Any = None) -> None:
    MEMORY.peak[index_of(device)] = MEMORY.allocated[index_of(device)]


class Generator(torch.Generator):
    """A generator of the CPU that says which device it is for."""

    on: str

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, "cpu")
        self.on = torch.device(device).type
        return self


def uncompiled(model: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """`torch.compile`."""
    return (lambda function: function) if model is None else model


def nothing(*_: Any, **__: Any) -> None:
    pass


API: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": nothing,
    "current_device": lambda: HOST.device,
    "current_stream": current_stream,
    "device": Device,
    "device_count": lambda: NUM_DEVICES,
    "empty_cache": nothing,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_properties": lambda device=None: PROPERTIES,
    "graph": graph,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: HOST.capture is not None,
    "is_initialized": lambda: True,
    "manual_seed": nothing,
    "manual_seed_all": nothing,
    "max_memory_allocated": lambda device=None: MEMORY.peak[index_of(device)],
    "memory_allocated": lambda device=None: MEMORY.allocated[index_of(device)],
    "reset_peak_memory_stats": reset_peak,
    "set_sync_debug_mode": runtime.set_sync_mode,
    "stream": on_stream,
    "synchronize": synchronize,
}


def installed() -> bool:
    return torch.cuda.is_available is API["is_available"]


def install() -> None:
    """Put the stand-in in the place of `torch.cuda`, for as long as this process lives."""
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError("there is a CUDA device here: it needs no stand-in")
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: expected 1 before triton is imported")
    # Dynamo looks every function of torch.cuda up by its name when it is first imported, and wants torch's own.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    for name, value in API.items():
        setattr(torch.cuda, name, value)
    torch.Generator = Generator
    torch.compile = uncompiled
    torch.compiler.cudagraph_mark_step_begin = nothing
    torch.profiler.profile = Profile
    torch.cuda.profiler.profile = nullcontext
    interpreter.prepare()
    run_kernel = GridExecutor.__call__
    GridExecutor.__call__ = lambda *args, **kwargs: launch(run_kernel, *args, **kwargs)

    # A thread that begins later has the stand-in too.
    run = threading.Thread.run

    def run_with_stand_in(thread: threading.Thread) -> None:
        with StandIn():
            run(thread)

    threading.Thread.run = run_with_stand_in  # type: ignore[method-assign]
    StandIn().__enter__()
