"""Which launches need a build of their own, by shapes alone: real CPU tensors beside what Triton itself specialises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_specops

triton = pytest.importorskip("triton")

from triton.backends.compiler import BaseBackend  # noqa: E402
from triton.runtime.jit import native_specialize_impl  # noqa: E402

from benchmarks import kernel_builds  # noqa: E402


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["anywhere_ptr"])
def kernel(x_ptr, anywhere_ptr, plain, special, scale, SIZE: triton.language.constexpr, extra=None):
    pass


VALUES = (0, 1, 2, 16, 17, 2**31 - 1, 2**31, -1)


def arguments() -> list[tuple[Any, ...]]:
    x = torch.zeros(64)
    tensors = [x, x[1:], x[4:], x[::2], x.double(), x.long(), x.bfloat16()[8:], x.bfloat16()[4:]]
    found = [(tensor, x, 2, 2, 0.5, 64) for tensor in tensors] + [(x, tensor, 2, 2, 0.5, 64) for tensor in tensors]
    found += [(x, x, value, 2, 0.5, 64) for value in VALUES] + [(x, x, 2, value, 0.5, 64) for value in VALUES]
    return [*found, (x, x, 2, 2, 1.0, 64), (x, x, 2, 2, 0.5, 128), (x, x, 2, 2, 0.5, 64, x)]


def test_builds_are_told_apart_as_triton_does() -> None:
    def of_triton(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = (*args, None)[:7]
        return tuple(
            value
            if parameter.is_constexpr
            else native_specialize_impl(
                BaseBackend,
                value,
                False,
                not parameter.do_not_specialize,
                not parameter.do_not_specialize_on_alignment,
            )
            for parameter, value in zip(kernel.params, args, strict=True)
        )

    cases = arguments()
    ours = [kernel_builds.build_of(kernel, args, {"num_warps": 4}) for args in cases]
    theirs = [of_triton(args) for args in cases]
    for i in range(len(cases)):
        assert [ours[i] == other for other in ours] == [theirs[i] == other for other in theirs]
    assert ours[0] != kernel_builds.build_of(kernel, cases[0], {"num_warps": 8})


def test_a_second_call_alike_needs_no_build() -> None:
    def builds(rows: int, vocab_size: int) -> set[Any]:
        with FakeTensorMode(), kernel_builds.record_builds() as found:
            torch_specops.sample(torch.empty(rows, vocab_size, device="cuda"), torch.empty(rows, device="cuda"))
        return found

    assert len(builds(4, 50257)) == 2
    assert builds(4, 50257) == builds(7, 50304)
    assert [build.kernel for build in builds(4, 128256) - builds(4, 50257)] == ["sample.draw_kernel"]
