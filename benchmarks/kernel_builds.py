"""Count the kernel builds that calls of the ops make, and which of them are compiled anew; no GPU needed.

    python benchmarks/kernel_builds.py [--batch 1 64] [--drafts 5] [--vocab 128256] [--dtype bfloat16]

Triton compiles a kernel once for each set of what it specialises: dtypes, constants, warps, which integers need 64
bits, which pointers are multiples of 16 bytes, and, of integers that `do_not_specialize` does not name, which are 1 or
multiples of 16. In code, fake CUDA tensors suffice:

    with FakeTensorMode(), record_builds() as builds:
        torch_specops.sample(torch.empty(4, 1000, device="cuda"), torch.empty(4, device="cuda"))
    len(builds)

With real tensors, in the interpreter for example, the kernels run as well. Inductor compiles its own builds, for each
graph anew.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_specops
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


def calls(batch: int, drafts: int, vocab_size: int, dtype: torch.dtype) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(op, options, arguments) as fake CUDA tensors, of the calls that a decoding loop makes."""

    def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    # As the loop has them: both are views of the numbers of one call.
    uniforms = cuda(batch, drafts + 1)
    filters = {"top_k": cuda(batch, dtype=torch.int64), "top_p": cuda(batch), "min_p": cuda(batch)}
    verify = {
        "target_logits": cuda(batch, drafts + 1, vocab_size, dtype=dtype),
        "draft_tokens": cuda(batch, drafts, dtype=torch.int64),
        "draft_logits": cuda(batch, drafts, vocab_size, dtype=dtype),
        "accept_uniforms": uniforms.narrow(1, 0, drafts),
        "sample_uniforms": uniforms.select(1, drafts),
    }
    rows = {"logits": cuda(batch, vocab_size, dtype=dtype)}
    temperature = {"temperature": cuda(batch)}
    with_lse = verify | temperature | {"draft_lse": cuda(batch, drafts)}
    one_hot = verify | temperature | {"draft_logits": None}
    for op in ("verify_exact", "verify_block"):
        yield op, "no temperature", verify
        yield op, "temperature", verify | temperature
        yield op, "draft_lse", with_lse
        yield op, "one-hot", one_hot
        yield op, "draft_lse, filters", with_lse | filters
    yield "verify_sigmoid", "temperature", verify | temperature
    yield "sample", "temperature", rows | temperature | {"uniforms": cuda(batch)}
    yield "sample", "filters", rows | temperature | filters | {"uniforms": cuda(batch)}
    yield "filter_logits", "filters", rows | temperature | filters


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[5])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256])
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    options = parser.parse_args(arguments)
    table = Table("op", "options", "B", "K", "V", "dtype", "kernels", "new builds", title="Kernel builds, in turn")
    known: set[KernelBuild] = set()
    for shape in product(options.batch, options.drafts, options.vocab, options.dtype):
        batch, drafts, vocab_size, dtype = shape
        with FakeTensorMode():
            for op, label, given in calls(batch, drafts, vocab_size, getattr(torch, dtype)):
                with record_builds() as builds:
                    getattr(torch_specops, op)(**given)
                table.add_row(op, label, *map(str, shape), str(len(builds)), str(len(builds - known)))
                known |= builds
    Console(width=140).print(table)
    print(f"{len(known)} builds in all")
    return len(known)


if __name__ == "__main__":
    main()
