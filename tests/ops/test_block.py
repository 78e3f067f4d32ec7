"""What is special about `verify_block`: its first draft, where a block ends, and long products. Most of it is asked of
the oracle, with which `test_oracle_grid.py` compares the op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import results
from oracle import Case, compare, sample_inputs
from torch import Tensor

import torch_specops
from torch_specops import reference

INF, NAN = math.inf, math.nan


def first_drafts(args: dict[str, Any], num_drafts: int) -> dict[str, Any]:
    """The same call with no more than the first drafts."""
    return {
        name: x[:, : num_drafts + (name == "target_logits")] if isinstance(x, Tensor) and x.dim() > 1 else x
        for name, x in args.items()
    }


def test_one_draft_is_verified_as_by_verify_exact() -> None:
    names = ["k1", "one_hot", "lse", "pad_head", "greedy_mixed", "draft_nan", "masked"]
    for case in sample_inputs("verify_block", vocab_sizes=[2, 17, 130], names=names):
        first = first_drafts(case.args, 1)
        assert compare(Case(case.name, "verify_exact", first), reference.verify_block(**first)).wrong == []


@pytest.mark.parametrize("end", ["padding", "padding above", "no target row", "no draft row"])
def test_where_no_draft_can_follow_the_block_ends(end: str) -> None:
    """What comes after the first two drafts does not matter, and the next token is drawn from p, as it is after K."""
    lengths = set()
    for case in sample_inputs("verify_block", vocab_sizes=[17], names=["k3", "k8", "fp32_bf16"]):
        args = {name: x.clone() for name, x in case.args.items()}
        if end.startswith("padding"):
            args["draft_tokens"][:, 2] = -1 if end == "padding" else 17
        elif end == "no target row":
            args["target_logits"][:, 2] = -INF
        else:
            args["draft_logits"][:, 2] = NAN
        output, n = reference.verify_block(**args)
        short_output, short_n = reference.verify_block(**first_drafts(args, 2))
        assert torch.equal(output[:, :3], short_output) and torch.equal(n, short_n) and (output[:, 3:] == -1).all()
        lengths.update(n.tolist())
        ended = Case(f"{case.name}, {end}", "verify_block", args)
        assert [compare(ended, got).wrong for _, got in results([ended])] in ([[]], [[], []])
    assert lengths == {0, 1, 2}


def test_long_products_neither_cancel_nor_vanish() -> None:
    """Ratios of 1e-30 and 1e30 in turn: P comes back to 1 each time, through values that float32 cannot multiply."""
    num_drafts, gap = 12, 30 * math.log(10)
    target, draft = torch.zeros(2, num_drafts + 1, 2), torch.zeros(2, num_drafts, 2)
    target[:, 0:-1:2, 0] = -gap
    draft[:, 1::2, 0] = -gap
    # In the second sequence nothing after draft 6 can be accepted.
    target[1, 6, 0] = -INF
    args = {
        "target_logits": target,
        "draft_tokens": torch.zeros(2, num_drafts, dtype=torch.int64),
        "draft_logits": draft,
        "accept_uniforms": torch.full((2, num_drafts), 0.9),
        "sample_uniforms": torch.full((2,), 0.5),
    }
    for verify in (torch_specops.verify_block, reference.verify_block):
        assert verify(**args)[1].tolist() == [12, 6]
        assert compare(Case("long products", "verify_block", args), verify(**args)).wrong == []
