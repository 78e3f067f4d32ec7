"""Plans of eager calls, so that a repeated call only launches.

What an op allocates and launches follows from the types, shapes, strides, dtypes, devices and alignments of its tensors
and from its other arguments; no op reads the data of a tensor on the host. These properties are the key of a plan. The
first call with a key runs the op and records it. Later calls allocate the outputs and one block of scratch, and launch
the recorded kernels with the addresses of their own tensors.

The key contains all that Triton builds a kernel for, so that a plan never launches a kernel that was built for other
arguments. Launch hooks and streams are those of the moment of the call. There is no plan for a call that runs any torch
function other than those below, such as a copy of a strided tensor, that launches through a tracer or Triton's
interpreter, or that changes how Triton compiles. Triton also raises if a constant of a module has changed since a
kernel was built; a plan does not look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.compiler import CompiledKernel

from .. import private

# The releases of Triton whose built kernels are known to be launched with `kernel[grid](*arguments)`, with an address
# for a tensor.
RELEASES = ("3.6.", "3.7.", "3.8.")
# All plans are forgotten when there are so many, because calls with ever new shapes would fill the memory.
MAX_PLANS = 1024
# Triton may build a kernel for addresses with this alignment, which new tensors have.
ALIGNMENT = 16
# The torch functions that a plan repeats or can leave out.
ALLOCATES = {"empty", "new_empty"}
SAME_ADDRESS = {"unsqueeze", "squeeze"}
METADATA = {"__get__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "stride", "_is_functional_tensor"}


class Plan(NamedTuple):
    constants: list[Any]
    outputs: list[tuple[torch.Size, torch.dtype]]
    offsets: list[int]  # of the scratch tensors, then the size of all
    # The arguments of a kernel are selected from the constants, then the addresses of inputs, outputs and scratch.
    launches: list[tuple[Callable[..., None], itemgetter[Any]]]

    def run(self, addresses: list[int], device: torch.device) -> Any:
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.outputs]
        values = [*self.constants, *addresses, *(output.data_ptr() for output in outputs)]
        if self.offsets[-1] > 0:
            scratch = torch.empty(self.offsets[-1], dtype=torch.uint8, device=device)
            start = scratch.data_ptr()
            values += [start + offset for offset in self.offsets]
        for launch, select in self.launches:
            launch(*select(values))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


# None: the call has no plan.
plans: dict[tuple[Any, ...], Plan | None] = {}
recording = threading.local()


class Recorder(TorchFunctionMode):
    """Records what an op allocates and launches."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.tensors = [x for x in inputs if isinstance(x, Tensor)]  # inputs, then allocated tensors
        self.num_inputs = len(self.tensors)
        self.places = {id(x): place for place, x in enumerate(self.tensors)}
        self.views: list[Tensor] = []  # kept, so that no other tensor gets the id
        self.launches: list[tuple[Any, tuple[int, ...], list[Any]]] = []
        self.is_complete = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.__name__
        if not isinstance(result, Tensor):
            self.is_complete &= name in METADATA
        elif name in ALLOCATES and result.data_ptr() % ALIGNMENT == 0:
            self.places[id(result)] = len(self.tensors)
            self.tensors.append(result)
        elif name in SAME_ADDRESS and id(args[0]) in self.places:
            self.places[id(result)] = self.places[id(args[0])]
            self.views.append(result)
        else:
            self.is_complete = False
        return result

    def plan(self, result: Any) -> Plan | None:
        """The plan of the recorded call, which returned `result`; None if there is none."""
        outputs = result if isinstance(result, tuple) else (result,)
        places = [self.places.get(id(output), -1) for output in outputs]
        scratch = [place for place in range(self.num_inputs, len(self.tensors)) if place not in places]
        order = [*range(self.num_inputs), *places, *scratch]
        arguments = [x for _, _, arguments in self.launches for x in arguments]
        built = all(isinstance(kernel, CompiledKernel) for kernel, _, _ in self.launches)
        known = all(id(x) in self.places for x in arguments if isinstance(x, Tensor))
        # An input or one tensor twice among the outputs would be in the order twice.
        if not (self.is_complete and built and known) or sorted(order) != list(range(len(self.tensors))):
            return None
        constants = [x for x in arguments if not isinstance(x, Tensor)]
        index, next_constant = {place: len(constants) + i for i, place in enumerate(order)}, iter(range(len(constants)))
        launches: list[tuple[Callable[..., None], itemgetter[Any]]] = []
        for kernel, grid, given in self.launches:
            selected = [index[self.places[id(x)]] if isinstance(x, Tensor) else next(next_constant) for x in given]
            launches.append((kernel[(*grid, 1, 1)[:3]], itemgetter(*selected)))
        sizes = [-(-self.tensors[place].nbytes // ALIGNMENT) * ALIGNMENT for place in scratch]
        shapes = [(output.shape, output.dtype) for output in outputs]
        return Plan(constants, shapes, list(accumulate(sizes, initial=0)), launches)


def note(kernel: Any, grid: tuple[int, ...], arguments: list[Any]) -> None:
    """Called after every launch, with what it returned."""
    if (recorder := getattr(recording, "recorder", None)) is not None:
        recorder.launches.append((kernel, grid, arguments))


def key_of(body: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[Any, ...] | None, list[int]]:
    """The key of a call, None if there cannot be a plan, and the addresses of its tensors."""
    runtime = triton.knobs.runtime
    key: list[Any] = [body, runtime.debug, triton.knobs.compilation.instrumentation_mode]
    addresses: list[int] = []
    for x in args:
        if type(x) is Tensor and x.layout is torch.strided:
            address = x.data_ptr()
            addresses.append(address)
            key += (x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT)
        elif isinstance(x, Tensor):
            return None, addresses
        else:
            # With its type, because 1, 1.0 and True are equal, and as text, because 0.0 and -0.0 are.
            key += (type(x), x if x is None else repr(x))
    return tuple(key) if runtime.add_stages_inspection_hook is None else None, addresses


def call(body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """`body(*args)` for tensors on the current device, by a plan if there is one."""
    key, addresses = key_of(body, args)
    plan = None if key is None else plans.get(key)
    if plan is not None:
        return plan.run(addresses, args[0].device)
    with private.launching_directly():
        if key is None or key in plans or not triton.__version__.startswith(RELEASES):
            return body(*args)
        # Other objects than the arguments, which may be one tensor twice.
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in args]
        before, recording.recorder = getattr(recording, "recorder", None), Recorder(inputs)
        try:
            with recording.recorder as recorder:
                result = body(*inputs)
        finally:
            recording.recorder = before
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plans[key] = recorder.plan(result)
        return result
