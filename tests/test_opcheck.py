"""`torch.library.opcheck` on every op: all four utilities, every optional argument, dtype, layout and edge of size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import FILTERS, OPS, VERIFY_OPS, op_arguments
from torch import Tensor
from torch.library import opcheck

# The first three are quick; the last one compiles.
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def check(op: str, arguments: dict[str, Any], utilities: tuple[str, ...] = UTILITIES) -> None:
    outcome = opcheck(getattr(torch.ops.specops, op).default, (), arguments, test_utils=utilities)
    assert outcome == dict.fromkeys(utilities, "SUCCESS")


def required(op: str, **sizes: Any) -> dict[str, Any]:
    schema = getattr(torch.ops.specops, op).default._schema
    names = [argument.name for argument in schema.arguments if not argument.has_default_value()]
    arguments = op_arguments(op, **sizes)
    return {name: arguments[name] for name in names}


def strided(x: Tensor) -> Tensor:
    """The same values, with every dimension strided."""
    wide = x.new_zeros([2 * size + 1 for size in x.shape])
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def changes(op: str) -> dict[str, dict[str, Any]]:
    """Calls of an op that differ in one thing from the one with every argument."""
    full = op_arguments(op, batch=3)
    tensors = {name: value for name, value in full.items() if isinstance(value, Tensor)}
    logits = [name for name in tensors if name.endswith("logits")]
    changed = {
        "required arguments": required(op, batch=3),
        "without filters": op_arguments(op, batch=3, filtered=False),
        "int32": full | {name: x.int() for name, x in tensors.items() if x.dtype == torch.int64},
        "float64 uniforms": full | {name: x.double() for name, x in tensors.items() if name.endswith("uniforms")},
        "bfloat16 and float32": full | {logits[0]: full[logits[0]].bfloat16()},
        "float16": full | {name: full[name].half() for name in logits},
        "strides": full | {name: strided(x) for name, x in tensors.items()},
        "masked logits": full | {name: full[name].index_fill(-1, torch.tensor([0, 9]), -torch.inf) for name in logits},
        "NaN": full | {name: full[name].index_fill(-1, torch.tensor([3]), torch.nan) for name in logits},
    }
    changed |= {f"{name} alone": required(op, batch=3) | {name: full[name]} for name in FILTERS if name in full}
    if "draft_lse" in full:
        changed["one-hot drafts"] = full | {"draft_logits": None, "draft_lse": None}
    return changed


@pytest.mark.parametrize("op", OPS)
def test_all_utilities(op: str) -> None:
    check(op, op_arguments(op, batch=3))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_compiling_every_change(op: str) -> None:
    for arguments in changes(op).values():
        check(op, arguments)


@pytest.mark.parametrize("op", OPS)
def test_every_change(op: str) -> None:
    for arguments in changes(op).values():
        check(op, arguments, UTILITIES[:3])


@pytest.mark.parametrize("op", OPS)
def test_sizes(op: str) -> None:
    """Without B = K = 0: opcheck itself cannot clone a tensor [0, 0, V] (torch 2.13, negative storage size)."""
    for batch, num_drafts in ((3, 0), (0, 4), (1, 1)) if op in VERIFY_OPS else ((0, 1), (1, 1)):
        check(op, op_arguments(op, batch, num_drafts), UTILITIES[:3])
    if op in VERIFY_OPS[:2]:
        check(op, required(op, num_drafts=0) | {"draft_logits": None}, UTILITIES[:3])


@pytest.mark.parametrize("op", ["verify_exact", "sample", "filter_logits"])
def test_logits_that_require_grad(op: str) -> None:
    """The ops are not differentiable: no output asks for a gradient, so a model outside `no_grad` can use them."""
    arguments = op_arguments(op, batch=3, filtered=False)
    for name in arguments:
        if name.endswith("logits"):
            arguments[name].requires_grad_()
    check(op, arguments)
    outputs = getattr(torch.ops.specops, op)(**arguments)
    assert not any(output.requires_grad for output in ((outputs,) if isinstance(outputs, Tensor) else outputs))
