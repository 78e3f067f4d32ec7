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

pytest.importorskip("triton")

from benchmarks.kernel_builds import KernelBuild, record_builds


def builds(rows: int, vocab_size: int, offset: int = 0, filters: bool = False) -> set[KernelBuild]:
    with FakeTensorMode(), record_builds() as found:
        logits = torch.empty(rows, vocab_size + offset, device="cuda").narrow(1, offset, vocab_size)
        top_k = torch.empty(rows, dtype=torch.int64, device="cuda") if filters else None
        torch_specops.sample(logits, torch.empty(rows, device="cuda"), top_k=top_k)
    return found


def test_a_second_call_alike_needs_no_build() -> None:
    few = builds(4, 50257)
    assert len(few) == 2
    # Neither the number of rows, nor what a size divides into, nor where a row begins.
    assert few == builds(7, 50257) == builds(4, 50304) == builds(1, 50257) == builds(4, 50257, offset=1)
    assert [build.kernel for build in builds(4, 128256) - few] == ["sample.draw_kernel"]
    assert builds(4, 50257, filters=True) - few


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
    assert len(builds_of(on_device())) <= 460


def test_every_name_in_the_suite_is_a_case() -> None:
    known = {name for op in OPS for name in case_names(op)}
    sets = (*gpu_suite.ON_DEVICE, *gpu_suite.UNDER_STAND_IN)
    assert {name for of in sets for name in (of.names or "").split()} <= known
    # Every case of every op is met where the oracle is cheap.
    assert {of.vocab_size for of in gpu_suite.ON_DEVICE if of.names is None} == {17, 1025}
