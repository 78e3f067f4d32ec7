"""The CUDA side of the ops as far as fake CUDA tensors show it: shapes, devices, and how many kernels are launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torch_specops

pytest.importorskip("triton")

from torch_specops.kernels import sample
from torch_specops.kernels.verify import block, exact, sigmoid

BATCH, NUM_DRAFTS, VOCAB_SIZE = 4, 5, 50257


def arguments(op: str, option: str) -> dict[str, Any]:
    def cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    temperature = {"temperature": cuda(BATCH)} if option == "temperature" else {}
    if op == "sample":
        return {"logits": cuda(BATCH, VOCAB_SIZE), "uniforms": cuda(BATCH), **temperature}
    given = {
        "target_logits": cuda(BATCH, NUM_DRAFTS + 1, VOCAB_SIZE, dtype=torch.bfloat16),
        "draft_tokens": cuda(BATCH, NUM_DRAFTS, dtype=torch.int64),
        "draft_logits": None if option == "one-hot" else cuda(BATCH, NUM_DRAFTS, VOCAB_SIZE, dtype=torch.bfloat16),
        "accept_uniforms": cuda(BATCH, NUM_DRAFTS),
        "sample_uniforms": cuda(BATCH),
        **temperature,
    }
    return given | ({"draft_lse": cuda(BATCH, NUM_DRAFTS)} if option == "draft_lse" else {})


@pytest.mark.parametrize(
    "op, option, limit",
    [
        ("verify_exact", "none", 3),
        ("verify_exact", "draft_lse", 3),
        ("verify_exact", "one-hot", 3),
        ("verify_exact", "temperature", 3),
        ("verify_block", "none", 4),
        ("verify_block", "draft_lse", 4),
        ("verify_block", "one-hot", 4),
        ("verify_block", "temperature", 4),
        ("verify_sigmoid", "none", 2),
        ("verify_sigmoid", "temperature", 2),
        ("sample", "none", 2),
        ("sample", "temperature", 2),
    ],
)
def test_fake_cuda_tensors_reach_the_launchers(
    op: str, option: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **constants: Any) -> None:
                # Every argument of the kernel is given, none twice.
                names = self.kernel.arg_names
                assert len(args) + len(set(constants) & set(names[len(args) :])) == len(names)
                launched.append((self.kernel.fn.__name__, grid))

            return launch

    for module in (block, exact, sigmoid, sample):
        monkeypatch.setattr(module, "wrap_triton", Recorded)
    with FakeTensorMode():
        first, second = getattr(torch_specops, op)(**arguments(op, option))
    assert first.device.type == second.device.type == "cuda"
    assert first.shape == ((BATCH,) if op == "sample" else (BATCH, NUM_DRAFTS + 1))
    assert second.shape == (BATCH,)
    assert 1 < len(launched) <= limit
    assert all(size > 0 for _, grid in launched for size in grid)


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample"])
def test_fake_tensors_pass_through_wrap_triton(op: str) -> None:
    with FakeTensorMode():
        first, _ = getattr(torch_specops, op)(**arguments(op, "temperature"))
    assert first.dtype == torch.int64


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample"])
def test_no_sequence_no_launch(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernel: Any) -> Any:
        raise AssertionError("a kernel was launched over an empty grid")

    for module in (block, exact, sigmoid, sample):
        monkeypatch.setattr(module, "wrap_triton", refuse)
    with FakeTensorMode():
        empty = {
            name: torch.empty(0, *value.shape[1:], dtype=value.dtype, device="cuda") if value is not None else None
            for name, value in arguments(op, "none").items()
        }
        first, second = getattr(torch_specops, op)(**empty)
    assert len(first) == len(second) == 0
