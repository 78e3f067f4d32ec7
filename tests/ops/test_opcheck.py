"""`torch.library.opcheck` on every op: all four utilities, with every argument, with few, and at the edges of size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import slow
from op_cases import OPS, VERIFY_OPS, op_arguments
from torch.library import opcheck

# The last of opcheck's utilities compiles; these are quick.
QUICK = ("test_schema", "test_autograd_registration", "test_faketensor")


def check(op: str, arguments: dict[str, Any], utilities: tuple[str, ...] = QUICK) -> None:
    outcome = opcheck(getattr(torch.ops.specops, op).default, (), arguments, test_utils=utilities)
    assert outcome == dict.fromkeys(utilities, "SUCCESS")


# Ops whose registration and forms are made like those of the others; `test_compile.py` traces verify_gumbel.
LATER = ("verify_block", "verify_sigmoid", "verify_gumbel", "sample_gumbel")


# opcheck clones its arguments (since torch 2.15), and AOTAutograd asks the clones, no leaves, for their `.grad`. torch
# hides the warning itself, but not from a filter that makes it an error. Ops of `torch.library.custom_op` get it too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("op", [slow(op) if op in LATER else op for op in OPS])
def test_all_utilities(op: str) -> None:
    """On logits that require a gradient, which the ops do not have."""
    arguments = op_arguments(op, batch=3)
    for name in arguments:
        if name.endswith("logits"):
            arguments[name].requires_grad_()
    check(op, arguments, (*QUICK, "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("op", OPS)
def test_few_arguments_and_edges_of_size(op: str) -> None:
    """Without B = K = 0: opcheck itself cannot clone a tensor [0, 0, V] (torch 2.13, negative storage size)."""
    required = [argument.name for argument in getattr(torch.ops.specops, op).default._schema.arguments]
    required = [name for name in required if name.endswith(("logits", "tokens", "uniforms", "seeds", "positions"))]
    for batch, num_drafts in ((3, 0), (0, 4), (1, 1)) if op in VERIFY_OPS else ((0, 1), (1, 1)):
        arguments = op_arguments(op, batch, num_drafts, dtype=torch.bfloat16)
        check(op, arguments)
        few = {name: arguments[name] for name in required}
        check(op, few | {"draft_logits": None} if op in VERIFY_OPS[:2] else few)
