"""The suite of GPU tests fits its time: how many kernels it has Triton build, counted without a GPU."""

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
