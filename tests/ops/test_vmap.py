"""`torch.func.vmap` over the ops: what is mapped over joins the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import OPS, call, equal, tensor_arguments
from torch import Tensor
from torch.func import vmap

N, B, K = 3, 2, 3


def stacked(op: str) -> dict[str, Tensor]:
    """The tensor arguments of N calls, [N, ...] each."""
    calls = [tensor_arguments(op, B, K, seed=seed) for seed in range(N)]
    return {name: torch.stack([each[name] for each in calls]) for name in calls[0]}


def mapped(op: str, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    return vmap(lambda *values: call(op, dict(zip(given, values, strict=True))), **options)(*given.values())


def one_by_one(op: str, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    results = [call(op, {name: value[i] for name, value in given.items()}) for i in range(N)]
    return tuple(torch.stack(each) for each in zip(*results, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_over_a_leading_axis(op: str) -> None:
    assert equal(mapped(op, stacked(op)), one_by_one(op, stacked(op)))


def test_vmap_over_any_axes() -> None:
    given = stacked("verify_exact")
    shared = {"draft_logits", "draft_lse", "temperature", "top_k"}
    want = one_by_one("verify_exact", given | {name: given[name][:1].expand_as(given[name]) for name in shared})
    given |= {name: given[name][0] for name in shared}
    given |= {"target_logits": given["target_logits"].movedim(0, 2), "sample_uniforms": given["sample_uniforms"].T}
    dims = {name: None if name in shared else 0 for name in given} | {"target_logits": 2, "sample_uniforms": 1}
    inner = tuple(dims.values())
    assert equal(mapped("verify_exact", given, in_dims=inner), want)

    twice = {name: torch.stack([value, value]) for name, value in given.items()}
    both = vmap(lambda *values: mapped("verify_exact", dict(zip(given, values, strict=True)), in_dims=inner))
    assert all(equal(tuple(each[i] for each in both(*twice.values())), want) for i in range(2))


def test_no_rows_and_errors_that_name_the_argument() -> None:
    given = stacked("verify_exact")
    output, num_accepted = mapped("verify_exact", {name: value[:, :0] for name, value in given.items()})
    assert output.shape == (N, 0, K + 1) and num_accepted.shape == (N, 0)
    with pytest.raises(TypeError, match=r"^temperature: expected float32, got float64$"):
        mapped("verify_exact", given | {"temperature": torch.ones(N, B, dtype=torch.float64)})
