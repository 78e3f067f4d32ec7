"""What is special about `verify_block`: how it relates to `verify_exact`, where a block ends, and its thresholds. Most
of it is asked of the oracle, with which `test_oracle_grid.py` compares the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Case, compare, sample_inputs
from torch import Tensor

import torch_specops
from torch_specops import reference

INF, NAN = math.inf, math.nan
BELOW_ONE = 1 - 2.0**-24
VERIFIERS = [torch_specops.verify_block, reference.verify_block]
Verify = Callable[..., tuple[Tensor, Tensor]]


def block(num_drafts: int, vocab_size: int = 5, seed: int = 0, noise: float = 1.0) -> dict[str, Any]:
    """One sequence whose drafts are drawn from their logits."""
    g = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(1, num_drafts + 1, vocab_size, generator=g)
    draft = target[:, :-1] + noise * torch.randn(1, num_drafts, vocab_size, generator=g)
    tokens, _ = reference.sample(draft[0], torch.rand(num_drafts, generator=g))
    return {
        "target_logits": target,
        "draft_tokens": tokens.view(1, num_drafts),
        "draft_logits": draft,
        "accept_uniforms": torch.rand(1, num_drafts, generator=g),
        "sample_uniforms": torch.rand(1, generator=g),
    }


def reach_of(args: dict[str, Any]) -> list[float]:
    """P_0 .. P_K of the first sequence, in float64."""
    p, q = (args[name][0].double().softmax(-1) for name in ("target_logits", "draft_logits"))
    reach = [1.0]
    for i, x in enumerate(args["draft_tokens"][0].tolist()):
        reach.append(min(reach[i] * float(p[i, x] / q[i, x]), 1.0))
    return reach


def probability_of(args: dict[str, Any], i: int) -> float:
    """h_i for 0 < i < K."""
    p, q = (args[name][0].double().softmax(-1) for name in ("target_logits", "draft_logits"))
    reach = reach_of(args)[i]
    mass = float((reach * p[i] - q[i]).clamp(min=0).sum())
    return mass / (mass + 1 - reach)


@pytest.mark.parametrize("verify", VERIFIERS, ids=["op", "oracle"])
def test_one_draft_is_verified_as_by_verify_exact(verify: Verify) -> None:
    names = ["k1", "one_hot", "lse", "pad_head", "greedy_mixed", "draft_nan", "masked"]
    for case in sample_inputs("verify_block", vocab_sizes=[2, 17, 130], names=names):
        first = {
            name: value if value is None or value.dim() == 1 else value[:, : 2 if name == "target_logits" else 1]
            for name, value in case.args.items()
        }
        assert compare(Case(case.name, "verify_exact", first), verify(**first)).wrong == []


def test_every_threshold_is_where_the_law_puts_it() -> None:
    """A uniform just below h_i accepts i drafts, one just above does not, whatever was rejected before it."""
    margin, tested = 1e-5, 0
    for seed in range(40):
        args = block(3, seed=seed, noise=1.5)
        thresholds = {3: reach_of(args)[3]} | {i: probability_of(args, i) for i in (1, 2)}
        for i, h in thresholds.items():
            for u, accepted in ((h - margin, True), (h + margin, False)):
                # Without a certain draft elsewhere, which 1 - 2**-24 would accept.
                if 0 <= u < 1 and all(other == i or thresholds[other] < 0.999 for other in thresholds):
                    uniforms = torch.full((1, 3), BELOW_ONE, dtype=torch.float64)
                    uniforms[0, i - 1] = u
                    _, n = reference.verify_block(**args | {"accept_uniforms": uniforms})
                    assert int(n) == (i if accepted else 0), (seed, i, accepted)
                    tested += 1
    assert tested > 50


ENDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "padding": lambda args: args["draft_tokens"].__setitem__((0, 1), -1),
    "padding above": lambda args: args["draft_tokens"].__setitem__((0, 1), 5),
    "no target row": lambda args: args["target_logits"].__setitem__((0, 1), -INF),
    "no draft row": lambda args: args["draft_logits"].__setitem__((0, 1), NAN),
}


@pytest.mark.parametrize("end", ENDS)
def test_where_no_draft_can_follow_the_block_ends(end: str) -> None:
    """After x_1 comes padding, or a row without a law: x_1 is accepted with probability P_1, the next token is drawn
    from p, and later drafts and logits do not matter."""
    tested = 0
    for seed in range(30):
        args = block(4, seed=seed, noise=2.0)
        reach = reach_of(args)[1]
        ENDS[end](args)
        if not 0.01 < reach < 0.99:
            continue
        for u, accepted in ((reach - 1e-4, 1), (reach + 1e-4, 0)):
            args["accept_uniforms"][:] = 0.0
            args["accept_uniforms"][0, 0] = u
            output, n = reference.verify_block(**args)
            assert int(n) == accepted
            if accepted:
                expected, _ = reference.sample(args["target_logits"][:, 1], args["sample_uniforms"])
                assert output[0].tolist() == [int(args["draft_tokens"][0, 0]), int(expected), -1, -1, -1]
            changed = {name: value.clone() for name, value in args.items()}
            changed["target_logits"][0, 2:], changed["draft_logits"][0, 2:] = 7.0, NAN
            changed["draft_tokens"][0, 2:], changed["accept_uniforms"][0, 1:] = 0, 0.5
            assert all(torch.equal(a, b) for a, b in zip(reference.verify_block(**changed), (output, n), strict=True))
            tested += 1
    assert tested >= 10


def test_long_products_neither_cancel_nor_vanish() -> None:
    """Ratios of 1e-30 and 1e30 in turn: P comes back to 1 each time, through values that float32 cannot multiply."""
    num_drafts, gap = 12, 30 * math.log(10)
    target, draft = torch.zeros(2, num_drafts + 1, 2), torch.zeros(2, num_drafts, 2)
    target[:, 0:-1:2, 0] = -gap
    draft[:, 1::2, 0] = -gap
    tokens = torch.zeros(2, num_drafts, dtype=torch.int64)
    # In the second sequence nothing after draft 6 can be accepted.
    target[1, 6, 0] = -INF
    case = Case(
        "long products",
        "verify_block",
        {
            "target_logits": target,
            "draft_tokens": tokens,
            "draft_logits": draft,
            "accept_uniforms": torch.full((2, num_drafts), 0.9),
            "sample_uniforms": torch.full((2,), 0.5),
        },
    )
    for verify in VERIFIERS:
        assert verify(**case.args)[1].tolist() == [12, 6]
        assert compare(case, verify(**case.args)).wrong == []
