"""The kernel builds that calls of the ops need; no GPU is. For tests, and to try in an interpreter.

Triton compiles a kernel once for each set of what it specialises: dtypes, constants, warps, which integers need 64
bits, which pointers are multiples of 16 bytes, and, of integers that `do_not_specialize` does not name, which are 1 or
multiples of 16. Fake CUDA tensors suffice:

    with FakeTensorMode(), record_builds() as builds:
        torch_specops.sample(torch.empty(4, 1000, device="cuda"), torch.empty(4, device="cuda"))
    len(builds)

With real tensors, in the interpreter for example, the kernels run as well. Inductor compiles its own builds, for each
graph anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor

from torch_specops.kernels import launch


@dataclass(frozen=True)
class KernelBuild:
    """A kernel with all that it is specialised on, by the names of its arguments and launch options."""

    kernel: str
    specialized: tuple[tuple[str, Any], ...]


@contextmanager
def record_builds() -> Iterator[set[KernelBuild]]:
    """Fills a set with the builds of all kernels launched inside."""
    builds: set[KernelBuild] = set()

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        class Recorded:
            def __init__(self, kernel: Any) -> None:
                self.kernel = kernel

            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def record(*args: Any, **kwargs: Any) -> None:
                    builds.add(build_of(self.kernel, args, kwargs))
                    original(self.kernel)[grid](*args, **kwargs)

                return record

        return Recorded

    with mock.patch.object(launch, "wrap_triton", recorded(launch.wrap_triton)):
        yield builds


def build_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> KernelBuild:
    """The build that a launch with these arguments needs."""
    parameters = inspect.signature(kernel.fn).parameters
    # The interpreter's kernels keep what `triton.jit` was given in a dictionary.
    options = getattr(kernel, "kwargs", None) or vars(kernel)
    plain = set(options["do_not_specialize"] or ())
    any_address = set(options["do_not_specialize_on_alignment"] or ())
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    given = defaults | dict(zip(parameters, args, strict=False)) | kwargs

    def specialized(name: str, value: Any) -> Any:
        if name not in parameters or "constexpr" in str(parameters[name].annotation) or value is None:
            return value
        if isinstance(value, Tensor):
            # Storages begin at multiples of 16 bytes, and fake ones have no address.
            aligned = value.storage_offset() * value.element_size() % 16 == 0
            return value.dtype, aligned and name not in any_address
        if isinstance(value, float):
            return "fp32"
        value = int(value)
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return kind if name in plain else (kind, value == 1, value % 16 == 0)

    module = kernel.fn.__module__.removeprefix("torch_specops.kernels.")
    values = tuple((name, specialized(name, value)) for name, value in sorted(given.items()))
    return KernelBuild(f"{module}.{kernel.fn.__name__}", values)
