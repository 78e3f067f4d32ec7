"""Block verification: wrong samplers that the law of its tokens rejects (that of `verify_block` itself is tested in
`test_laws.py`), its law by enumeration of the algorithm, and how long its blocks are beside those of `verify_exact`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from chains import TRIALS, Uniforms, Verify, chain_p_values, emit, expect_caught, expect_laws, tables
from chains import short_tiles as short_tiles
from conftest import Report
from oracle import compare, sample_inputs
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.laws import chi_square

pytestmark = pytest.mark.usefixtures("short_tiles")

# A context-dependent law: the probabilities [V] of the next token after a prefix.
Model = Callable[[tuple[int, ...]], Tensor]


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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_block_is_caught(mistake: str, report: Report) -> None:
    target, draft = tables(41, "close")

    def wrong(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        return own_block(mistake, **args)

    tokens = emit(target, draft, 3, Uniforms(seed=42), verify=wrong)
    expect_caught(report, f"block, {mistake}", chain_p_values(tokens, target))


SHARED = {
    "sample uniforms of the draft": lambda propose, args: {"sample_uniforms": propose[:, 0]},
    "sample uniforms of a test": lambda propose, args: {"sample_uniforms": args["accept_uniforms"][:, -1]},
    "accept uniforms of the draft": lambda propose, args: {"accept_uniforms": propose},
    "one accept uniform": lambda propose, args: {
        "accept_uniforms": args["accept_uniforms"][:, :1].expand_as(args["accept_uniforms"])
    },
}


@pytest.mark.parametrize("shared", SHARED)
def test_shared_uniforms_are_caught(shared: str, report: Report) -> None:
    target, draft = tables(41, "close")

    def wrong(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_block(**args | SHARED[shared](propose, args))

    tokens = emit(target, draft, 3, Uniforms(seed=42), verify=wrong)
    expect_caught(report, f"block, {shared}", chain_p_values(tokens, target))


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


def blocks(p: Model, q: Model, num_drafts: int, vocab_size: int) -> Iterator[tuple[float, list[float], list[float]]]:
    """(probability of the draft, P_0 .. P_K, h_1 .. h_K) of every block of drafts."""
    for x in itertools.product(range(vocab_size), repeat=num_drafts):
        probability, reach, thresholds = 1.0, [1.0], []
        for i, token in enumerate(x):
            p_row, q_row = p(x[:i]), q(x[:i])
            if i > 0:
                mass = float((reach[i] * p_row - q_row).clamp(min=0).sum())
                thresholds.append(1.0 if reach[i] == 1 else mass / (mass + 1 - reach[i]))
            probability *= float(q_row[token])
            reach.append(min(reach[i] * float(p_row[token] / q_row[token]), 1.0))
        yield probability, reach, [*thresholds, reach[-1]]


def expected_lengths(p: Model, q: Model, num_drafts: int, vocab_size: int) -> tuple[list[float], list[float]]:
    """How probable it is that `verify_exact` and `verify_block` accept at least i = 1 .. K drafts."""
    exact, block = [0.0] * num_drafts, [0.0] * num_drafts
    for x in itertools.product(range(vocab_size), repeat=num_drafts):
        probability, alone = 1.0, 1.0
        for i, token in enumerate(x):
            ratio = float(p(x[:i])[token] / q(x[:i])[token])
            probability, alone = probability * float(q(x[:i])[token]), alone * min(ratio, 1.0)
            # Each prefix of i + 1 drafts is met once for every continuation: its last draft counts it.
            if all(token == 0 for token in x[i + 1 :]):
                exact[i] += probability * alone
    for probability, _, thresholds in blocks(p, q, num_drafts, vocab_size):
        none_later = 1.0
        for i in range(num_drafts, 0, -1):
            none_later *= 1 - thresholds[i - 1]
            block[i - 1] += probability * (1 - none_later)
    return exact, block


def random_model(seed: int, vocab_size: int, spread: float) -> Model:
    def rows_of(prefix: tuple[int, ...]) -> Tensor:
        code = sum((token + 1) * (vocab_size + 1) ** i for i, token in enumerate(prefix))
        generator = torch.Generator().manual_seed(1000 * seed + code)
        return (spread * torch.randn(vocab_size, generator=generator, dtype=torch.float64)).softmax(-1)

    return rows_of


@pytest.mark.parametrize("vocab_size, num_drafts, spread", [(2, 5, 1.0), (3, 3, 3.0), (5, 2, 0.3)])
def test_never_shorter_than_verify_exact(vocab_size: int, num_drafts: int, spread: float) -> None:
    """By enumeration: at least i drafts are accepted at least as often, for every i, and more often for some."""
    gains = []
    for seed in range(6):
        p, q = random_model(2 * seed, vocab_size, spread), random_model(2 * seed + 1, vocab_size, spread)
        exact, block = expected_lengths(p, q, num_drafts, vocab_size)
        assert all(b >= e - 1e-12 for e, b in zip(exact, block, strict=True))
        gains.append(sum(block) - sum(exact))
    assert max(gains) > 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_the_emitted_law_by_enumeration(seed: int) -> None:
    """The first token of a step of K = 3 over all blocks and outcomes is the target's, to float64's rounding, and each
    prefix is accepted with probability q P, as the proof says."""
    vocab_size, num_drafts = 3, 3
    p, q = random_model(2 * seed, vocab_size, 1.5), random_model(2 * seed + 1, vocab_size, 1.5)
    law, first, second = torch.zeros(vocab_size, dtype=torch.float64), torch.zeros(3), torch.zeros(3, 3)
    for x, (probability, _, thresholds) in zip(
        itertools.product(range(vocab_size), repeat=num_drafts), blocks(p, q, num_drafts, vocab_size), strict=True
    ):
        none_later = 1.0
        for n in range(num_drafts, 0, -1):
            outcome = probability * none_later * thresholds[n - 1]
            none_later *= 1 - thresholds[n - 1]
            law[x[0]] += outcome
            first[x[0]] += outcome
            second[x[0], x[1]] += outcome if n >= 2 else 0.0
        residual = (p(()) - q(())).clamp(min=0)
        law += probability * none_later * residual / residual.sum()
    torch.testing.assert_close(law, p(()), rtol=0, atol=1e-13)
    torch.testing.assert_close(first.double(), torch.minimum(p(()), q(())), rtol=0, atol=1e-6)
    for a in range(vocab_size):
        reach = min(float(p(())[a] / q(())[a]), 1.0)
        expected = float(q(())[a]) * torch.minimum(reach * p((a,)), q((a,)))
        torch.testing.assert_close(second[a].double(), expected, rtol=0, atol=1e-6)


P, Q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
LENGTHS = {"verify_exact": 10 / 9, "verify_block": 11 / 9}


def test_lengths_of_the_papers_model_by_enumeration() -> None:
    """Sun et al., section 3: both models know no context, p = (1/3, 2/3), q = (2/3, 1/3), K = 2."""
    exact, block = expected_lengths(lambda prefix: P, lambda prefix: Q, 2, 2)
    assert sum(exact) == pytest.approx(LENGTHS["verify_exact"], abs=1e-14)
    assert sum(block) == pytest.approx(LENGTHS["verify_block"], abs=1e-14)


def step(op: Verify, tokens: Tensor, accept: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    batch, num_drafts = tokens.shape
    target, draft = P.log().float().expand(batch, num_drafts + 1, 2), Q.log().float().expand(batch, num_drafts, 2)
    return op(target, tokens, draft, accept, sample)


@pytest.mark.parametrize("package", [torch_specops, reference], ids=["op", "oracle"])
@pytest.mark.parametrize("op", LENGTHS)
def test_lengths_of_the_papers_model_by_integration(op: str, package: Any) -> None:
    """Over all blocks and a grid of uniforms: thresholds are multiples of 1/4, so midpoints of eighths are exact."""
    grid = (torch.arange(8) + 0.5) / 8
    tokens = torch.tensor(list(itertools.product(range(2), repeat=2)))
    u = torch.cartesian_prod(grid, grid)
    _, n = step(getattr(package, op), tokens.repeat_interleave(64, 0), u.repeat(4, 1), torch.full((4 * 64,), 0.5))
    mean = (Q[tokens].prod(1) * n.view(4, 64).double().mean(1)).sum()
    assert float(mean) == pytest.approx(LENGTHS[op], abs=1e-12)


@pytest.mark.parametrize("op", LENGTHS)
def test_lengths_of_the_papers_model_by_simulation(op: str, report: Report) -> None:
    g = torch.Generator().manual_seed(49)
    tokens = (torch.rand(TRIALS, 2, generator=g) >= 2 / 3).long()
    output, n = step(
        getattr(torch_specops, op), tokens, torch.rand(TRIALS, 2, generator=g), torch.rand(TRIALS, generator=g)
    )
    error = float(n.double().std()) / TRIALS**0.5
    assert abs(float(n.double().mean()) - LENGTHS[op]) < 4 * error
    # 1/9 is far outside: the two cannot be taken for each other.
    assert error < 1 / 90
    expect_laws(
        report, f"block, the paper's model, {op}", {"token 1": chi_square(torch.bincount(output[:, 0], minlength=2), P)}
    )


def test_lengths_of_a_chain_are_those_of_the_formula() -> None:
    """Both verifiers on the same drafts and uniforms. E[n] over drafts and uniforms is the mean of the sums of P_i, or
    of the products of min(1, p / q), so that the difference has mean zero."""
    target, draft = tables(51, "close")
    accepted, expected = [], []

    def first_step(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        if not accepted:
            p, q = (args[name].double().softmax(-1) for name in ("target_logits", "draft_logits"))
            x = args["draft_tokens"].unsqueeze(-1)
            reach, alone = torch.ones(TRIALS), torch.ones(TRIALS)
            sums = torch.zeros(2, TRIALS, dtype=torch.float64)
            for ratio in (p[:, :-1].gather(2, x) / q.gather(2, x)).squeeze(-1).unbind(1):
                reach, alone = (reach * ratio).clamp(max=1), alone * ratio.clamp(max=1)
                assert (reach >= alone * (1 - 1e-12)).all()
                sums += torch.stack([alone, reach])
            expected.extend(sums)
            accepted.extend(getattr(torch_specops, op)(**args)[1].double() for op in LENGTHS)
        return torch_specops.verify_block(**args)

    emit(target, draft, 3, Uniforms(seed=51), length=1, verify=first_step)
    for n, mean in zip(accepted, expected, strict=True):
        assert abs(float((n - mean).mean())) < 4.5 * float((n - mean).std()) / TRIALS**0.5
    gain = accepted[1] - accepted[0]
    assert float(gain.mean()) > 5 * float(gain.std()) / TRIALS**0.5
