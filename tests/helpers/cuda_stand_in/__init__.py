"""CUDA devices made of the CPU, so that tests and measurements for a GPU run line by line without one.

    python tests/helpers/cuda_stand_in SCRIPT.py ARGUMENTS...
    TORCH_SPECOPS_CUDA_STAND_IN=1 pytest -m gpu

A tensor on "cuda:0" or "cuda:1" is a `DeviceTensor`: its device is the one it names, its data lie on the CPU, and torch
functions run on its data. Triton kernels run in Triton's interpreter. These mistakes, which no other test without a GPU
finds, raise or give other numbers here: the host waits in a captured step, a graph is replayed on memory that was
freed, pinned memory is read before its copy is done, a kernel is launched while another device is current.

Not imitated: compilers (`torch.compile` returns the function as it is), time, races between streams, the arithmetic of
a GPU, what a profiler and statistics of memory find, autograd.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton_interpreter
from torch.autograd import DeviceType
from triton.runtime.interpreter import GridExecutor

from .runtime import HOST, NUM_DEVICES, CUDAGraph, Event, Stream, current_stream, index_of, set_sync_mode, synchronises
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
)


class Device:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.index = index_of(device)

    def __enter__(self) -> None:
        self._before, HOST.device = HOST.device, self.index

    def __exit__(self, *_: Any) -> None:
        HOST.device = self._before


@contextmanager
def profile(**_: Any) -> Iterator[Any]:
    """`torch.profiler.profile`, which finds one kernel in everything."""
    kernel = {"device_type": DeviceType.CUDA, "is_user_annotation": False, "self_device_time_total": 1.0}
    yield SimpleNamespace(events=lambda: [SimpleNamespace(name="kernel", **kernel)])


class Generator(torch.Generator):
    """A generator of any device, on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """`torch.cuda.stream`."""
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
    with on_stream(stream or Stream()), cuda_graph.capturing(capture_error_mode):
        yield


def synchronize(device: Any = None) -> None:
    synchronises("torch.cuda.synchronize", implicitly=False)
    current_stream(device).finish()


def uncompiled(model: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """`torch.compile`."""
    return (lambda function: function) if model is None else model


API: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": lambda: None,
    "current_device": lambda: HOST.device,
    "current_stream": current_stream,
    "device": Device,
    "device_count": lambda: NUM_DEVICES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_properties": lambda device=None: PROPERTIES,
    "graph": graph,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: HOST.capture is not None,
    "is_initialized": lambda: True,
    "max_memory_allocated": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "set_sync_debug_mode": set_sync_mode,
    "stream": on_stream,
    "synchronize": synchronize,
}


def installed() -> bool:
    return torch.cuda.is_available is API["is_available"]


def install() -> None:
    """Put the stand-in in the place of `torch.cuda`, for as long as this process lives."""
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
    torch.compiler.cudagraph_mark_step_begin = lambda: None
    torch.profiler.profile = profile
    torch.cuda.profiler.profile = nullcontext
    triton_interpreter.prepare()
    run_kernel = GridExecutor.__call__
    GridExecutor.__call__ = lambda *args, **kwargs: launch(run_kernel, *args, **kwargs)

    # A thread that begins later has the stand-in too.
    run = threading.Thread.run

    def run_with_stand_in(thread: threading.Thread) -> None:
        with StandIn():
            run(thread)

    threading.Thread.run = run_with_stand_in  # type: ignore[method-assign]
    StandIn().__enter__()
