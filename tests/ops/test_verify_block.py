"""What is special about `verify_block`: its first draft, where a block ends, long products, lengths of its blocks, and
wrong versions that the comparison with the oracle and the law of the tokens reject. `test_oracle_grid.py` compares the
op with the oracle, `test_distribution.py` tests its law."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from chains import Uniforms, chain_p_values, emit, expect_caught, tables
from chains import short_tiles as short_tiles
from op_cases import call, call_traced, results
from report import Report
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.testing import Case, compare, sample_inputs

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
    assert reference.verify_block(**args)[1].tolist() == [12, 6]
    for form in (call, call_traced):
        assert compare(Case("long products", "verify_block", args), form("verify_block", args)).wrong == []


def own_block(mistake: str, **args: Any) -> tuple[Tensor, Tensor]:
    """Block verification of plain batches (softmax drafts, no padding, no temperature), with a mistake or none."""
    p, q = (args[name].softmax(-1) for name in ("target_logits", "draft_logits"))
    x, u = args["draft_tokens"].unsqueeze(-1), args["accept_uniforms"]
    num_drafts = x.shape[1]
    ratio = (p[:, :-1].gather(2, x) / q.gather(2, x)).squeeze(-1)
    reach = [torch.ones(len(u))]
    for i in range(num_drafts):
        product = reach[i] * ratio[:, i]
        reach.append(product if mistake == "P without a cap" else product.clamp(max=1))
    accepted = []
    for i in range(1, num_drafts + 1):
        row = i - 1 if mistake == "the row before" else i
        if i == num_drafts:
            h = reach[i]
        else:
            mass = (reach[i].unsqueeze(-1) * p[:, row] - q[:, row]).clamp(min=0).sum(-1)
            h = torch.where(reach[i] >= 1, 1.0, mass / (mass + 1 - reach[i]))
        accepted.append(u[:, i - 1] < h)
    passed = torch.stack(accepted, 1)
    if mistake == "stops at a failure":
        passed = passed.long().cumprod(1).bool()
    n = torch.where(passed, torch.arange(1, num_drafts + 1), 0).amax(1)
    every = torch.arange(len(n))
    q = torch.nn.functional.pad(q, (0, 0, 0, 1))
    scale = torch.stack(reach, 1)[every, n]
    if mistake == "residual without P":
        scale = torch.ones_like(scale)
    weights = torch.where(n == num_drafts, 1.0, scale).unsqueeze(-1) * p[every, n] - q[every, n]
    # A wrong block may end where nothing is left to draw from.
    weights = torch.where((weights > 0).any(-1, keepdim=True), weights, p[every, n])
    next_token, _ = torch_specops.sample(weights.clamp(min=0).log(), args["sample_uniforms"])
    output = torch.where(torch.arange(num_drafts + 1) < n.unsqueeze(-1), torch.nn.functional.pad(x[..., 0], (0, 1)), -1)
    output[every, n] = next_token
    return output, n


MISTAKES = ["stops at a failure", "residual without P", "the row before", "P without a cap"]


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_block_is_caught(mistake: str, report: Report) -> None:
    target, draft = tables(42, "close", spread=2.5)

    def wrong(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        return own_block(mistake, **args)

    tokens = emit(target, draft, 3, Uniforms(seed=42), verify=wrong)
    expect_caught(report, f"block, {mistake}", chain_p_values(tokens, target))


@pytest.mark.usefixtures("short_tiles")
def test_residual_at_padding_is_caught(report: Report) -> None:
    """The residual makes up for drafts that were accepted; at padding none could be, and p is right."""
    target, draft = tables(43, "close")

    def wrong(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        output, n = torch_specops.verify_block(**args)
        every, k = torch.arange(len(n)), args["draft_tokens"].shape[1]
        at = n.clamp(max=k - 1)
        p, q = args["target_logits"][every, n].softmax(-1), args["draft_logits"][every, at].softmax(-1)
        padded = (n < k) & (args["draft_tokens"][every, at] < 0)
        token, _ = torch_specops.sample((p - q).clamp(min=0).log(), args["sample_uniforms"])
        output[every, n] = torch.where(padded, token, output[every, n])
        return output, n

    tokens = emit(target, draft, 3, Uniforms(seed=44), pad=True, verify=wrong)
    expect_caught(report, "block, residual at padding", chain_p_values(tokens, target))


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_the_comparison_catches_a_wrong_block(mistake: str) -> None:
    """Row by row against the oracle. Without a mistake nothing is wrong."""
    names = ["k3", "k8", "fp32_bf16"]
    cases = [
        case for seed in range(12) for case in sample_inputs("verify_block", vocab_sizes=[17], seed=seed, names=names)
    ]
    assert any(compare(case, own_block(mistake, **case.args)).wrong for case in cases) == bool(mistake)


P, Q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)


@pytest.mark.parametrize("package", [torch_specops, reference], ids=["op", "oracle"])
def test_lengths_of_the_papers_model(package: Any) -> None:
    """Sun et al., section 3: both models know no context, p = (1/3, 2/3), q = (2/3, 1/3), K = 2. Over all blocks and a
    grid of uniforms: thresholds are multiples of 1/4, so midpoints of eighths are exact."""
    grid = (torch.arange(8) + 0.5) / 8
    blocks = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    tokens, u = blocks.repeat_interleave(64, 0), torch.cartesian_prod(grid, grid).repeat(4, 1)
    target, draft = P.log().float().expand(256, 3, 2), Q.log().float().expand(256, 2, 2)
    for op, expected in (("verify_exact", 10 / 9), ("verify_block", 11 / 9)):
        _, n = getattr(package, op)(target, tokens, draft, u, torch.full((256,), 0.5))
        mean = (Q[blocks].prod(1) * n.view(4, 64).double().mean(1)).sum()
        assert float(mean) == pytest.approx(expected, abs=1e-12)
