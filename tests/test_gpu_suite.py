"""How many kernels Triton builds, counted without a GPU: the suite of GPU tests fits its time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gpu_suite
import pytest
import torch
from gpu_suite import CaseSet, case_of, is_smoke
from op_cases import OPS
from oracle import case_names
from torch import Tensor
from torch._subclasses import FakeTensorMode

import torch_specops

triton = pytest.importorskip("triton")

from triton.backends.compiler import BaseBackend  # noqa: E402
from triton.runtime.jit import native_specialize_impl  # noqa: E402

from benchmarks.kernel_builds import KernelBuild, build_of, record_builds  # noqa: E402


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
    ours = [build_of(kernel, args, {"num_warps": 4}) for args in cases]
    theirs = [of_triton(args) for args in cases]
    for i in range(len(cases)):
        assert [ours[i] == other for other in ours] == [theirs[i] == other for other in theirs]
    assert ours[0] != build_of(kernel, cases[0], {"num_warps": 8})


def test_a_second_call_alike_needs_no_build() -> None:
    def builds(rows: int, vocab_size: int) -> set[KernelBuild]:
        with FakeTensorMode(), record_builds() as found:
            torch_specops.sample(torch.empty(rows, vocab_size, device="cuda"), torch.empty(rows, device="cuda"))
        return found

    assert len(builds(4, 50257)) == 2
    assert builds(4, 50257) == builds(7, 50304)
    assert [build.kernel for build in builds(4, 128256) - builds(4, 50257)] == ["sample.draw_kernel"]


def fake(value: Any) -> Any:
    """The same strides and offset on a device that is not there."""
    if not isinstance(value, Tensor):
        return value
    numbers = max(value.untyped_storage().nbytes() // value.element_size(), 1)
    storage = torch.empty(numbers, dtype=value.dtype, device="cuda")
    return storage.as_strided(value.shape, value.stride(), value.storage_offset())


def builds_of(cases: Iterable[tuple[str, CaseSet, str]]) -> set[KernelBuild]:
    found: set[KernelBuild] = set()
    for op, of, name in cases:
        arguments = case_of(op, of.vocab_size, name, device="cpu", limits=of.limits).args
        with FakeTensorMode(), record_builds() as builds:
            getattr(torch_specops, op)(**{key: fake(value) for key, value in arguments.items()})
        found |= builds
    return found


def on_device() -> list[tuple[str, CaseSet, str]]:
    return [(op, of, name) for op in OPS for of in gpu_suite.ON_DEVICE for name in of.names_of(op)]


def test_the_smoke_part_has_every_op_over_three_vocabularies_and_few_builds() -> None:
    """At 0.8 s a build, half of its minute."""
    smoke = [(op, of, name) for op, of, name in on_device() if is_smoke(op, of.vocab_size, name)]
    assert sorted({(op, of.vocab_size) for op, of, _ in smoke}) == [
        (op, vocab_size) for op in sorted(OPS) for vocab_size in (17, 1025, 50_257)
    ]
    assert len(builds_of(smoke)) <= 36


@pytest.mark.slow
def test_all_cases_need_few_builds() -> None:
    """At 0.8 s a build, half a minute on 12 processes."""
    assert len(builds_of(on_device())) <= 450


def test_every_name_in_the_suite_is_a_case() -> None:
    known = {name for op in OPS for name in case_names(op)}
    sets = (*gpu_suite.ON_DEVICE, *gpu_suite.UNDER_STAND_IN)
    assert {name for of in sets for name in (of.names or "").split()} <= known
    # Every case of every op is met where the oracle is cheap.
    assert {of.vocab_size for of in gpu_suite.ON_DEVICE if of.names is None} == {17, 1025}
