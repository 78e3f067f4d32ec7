"""The law of what the ops emit, by chi-square, and wrong samplers that the same tests reject (`chains.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import ALPHA, START, TRIALS, Uniforms, V, Verify, chain_p_values, emit, expect_caught, expect_laws, tables
from chains import short_tiles as short_tiles
from marks import slow
from report import Report
from torch import Tensor

import torch_specops
from torch_specops.testing import chi_square, verify_with_mistake

pytestmark = pytest.mark.usefixtures("short_tiles")


@pytest.mark.parametrize(
    ("op", "draft_kind", "num_drafts"),
    [
        ("verify_exact", "close", 0),
        ("verify_exact", "close", 1),
        ("verify_exact", "opposite", 1),
        ("verify_exact", "close", 2),
        ("verify_exact", "opposite", 2),
        ("verify_block", "opposite", 1),
        ("verify_block", "close", 2),
        ("verify_block", "opposite", 2),
        ("verify_block", "close", 3),
    ],
)
def test_tokens_follow_the_target(op: str, draft_kind: str, num_drafts: int, report: Report) -> None:
    # In the second tables the mistakes of a block show (test_verify_block.py).
    target, draft = tables(42, draft_kind, spread=2.5) if op == "verify_block" else tables(1, draft_kind)
    tokens = emit(target, draft, num_drafts, Uniforms(seed=2), op=op)
    expect_laws(report, f"{op}, {draft_kind} draft, K = {num_drafts}", chain_p_values(tokens, target))


@pytest.mark.parametrize("option", ["one-hot", "draft_lse", "padded", "counter-based"])
@pytest.mark.parametrize("op, num_drafts", [("verify_exact", 2), slow("verify_block", 3)])
def test_tokens_follow_the_target_with_every_option(op: str, num_drafts: int, option: str, report: Report) -> None:
    target, draft = tables(43, "opposite" if option == "draft_lse" else "close")
    t = 0.8 if option == "draft_lse" else 1.0
    tokens = emit(
        target,
        None if option == "one-hot" else draft,
        num_drafts,
        Uniforms(seed=44, counter_based=option == "counter-based"),
        temperature=torch.full((TRIALS,), t) if option == "draft_lse" else None,
        lse=option == "draft_lse",
        pad=option == "padded",
        op=op,
    )
    expect_laws(report, f"{op}, {option}", chain_p_values(tokens, target, t))


@pytest.mark.parametrize("op", ["verify_exact", "verify_block"])
def test_mixed_temperatures_follow_the_target(op: str, report: Report) -> None:
    """Rows of four temperatures share the batch: each follows its own law, greedy ones the argmax."""
    target, draft = tables(11, "close")
    values = torch.tensor([0.0, 0.5, 1.0, 2.0])
    temperature = values[torch.arange(TRIALS) % 4]
    tokens = emit(target, draft, 2, Uniforms(seed=12), temperature=temperature, op=op)
    first = int(target[START].argmax())
    second = int(target[first].argmax())
    assert (tokens[0::4] == torch.tensor([first, second, int(target[second].argmax())])).all()
    for row in (1, 2, 3):
        t = float(values[row])
        expect_laws(report, f"{op}, temperature {t}", chain_p_values(tokens[row::4], target, t))


def first_tokens(
    verify: Callable[..., tuple[Tensor, Tensor]],
    target: Tensor,
    draft: Tensor,
    seed: int,
    trials: int = TRIALS,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """[trials] first tokens of one step with K = 1, the draft drawn from softmax(draft)."""
    generator = torch.Generator().manual_seed(seed)
    x, _ = torch_specops.sample(draft.expand(trials, -1), torch.rand(trials, generator=generator))
    output, n = verify(
        target.expand(trials, 2, -1),
        x.unsqueeze(-1),
        draft.expand(trials, 1, -1),
        torch.rand(trials, 1, generator=generator),
        torch.rand(trials, generator=generator),
        **options,
    )
    return output[:, 0], n


@pytest.mark.parametrize("draft_kind", ["opposite", "close"])
def test_lenience_bounds_every_token(draft_kind: str, report: Report) -> None:
    """The law under lenience l is min(q, p / l) and the residual for the rest: no token above p / l."""
    lenience = 0.3
    target, draft = (table[START] for table in tables(13, draft_kind))
    p, q = torch.softmax(target.double(), -1), torch.softmax(draft.double(), -1)
    kept, residual = torch.minimum(q, p / lenience), (p - q).clamp(min=0)
    law = kept + (1 - kept.sum()) * residual / residual.sum()
    tokens, n = first_tokens(torch_specops.verify_exact, target, draft, 14, lenience=lenience)
    counts = torch.bincount(tokens, minlength=V)
    # Leviathan et al. appendix A.5: alpha = sum min(p / l, q).
    alpha = torch.stack([1 - kept.sum(), kept.sum()])
    p_values = {"token 1": chi_square(counts, law), "num_accepted": chi_square(torch.bincount(n, minlength=2), alpha)}
    expect_laws(report, f"lenience 0.3, {draft_kind} draft", p_values)
    bound = (p / lenience).clamp(max=1)
    # Five standard deviations above the bound itself.
    assert (counts / TRIALS <= bound + 5 * (bound * (1 - bound) / TRIALS).sqrt()).all()
    expect_caught(report, f"lenience 0.3 as lossless, {draft_kind} draft", {"token 1": chi_square(counts, p)})


def test_sample_follows_softmax(report: Report) -> None:
    logits, _ = tables(15, "close")
    uniforms = torch.rand(TRIALS, generator=torch.Generator().manual_seed(16))
    for t in (1.0, 0.4):
        tokens, _ = torch_specops.sample(logits[START].expand(TRIALS, V), uniforms, torch.full((TRIALS,), t))
        law = torch.softmax(logits[START].double() / t, -1)
        expect_laws(report, f"sample, T = {t}", {"token": chi_square(torch.bincount(tokens, minlength=V), law)})


def test_sigmoid_verification_follows_its_law_and_is_lossy(report: Report) -> None:
    alpha, beta = -3.0, 5.0
    target, draft = (table[START] for table in tables(17, "opposite"))
    q = torch.softmax(draft.double(), -1)
    p_hat, q_hat = (torch.sigmoid((z.double() - alpha) / (beta - alpha)) for z in (target, draft))
    kept, residual = q * (p_hat / q_hat).clamp(max=1), (p_hat - q_hat).clamp(min=0)
    law = kept + (1 - kept.sum()) * residual / residual.sum()
    accepted = torch.stack([1 - kept.sum(), kept.sum()])
    tokens, n = first_tokens(torch_specops.verify_sigmoid, target, draft, 18, alpha=alpha, beta=beta)
    counts = torch.bincount(tokens, minlength=V)
    p_values = {
        "token 1": chi_square(counts, law),
        "num_accepted": chi_square(torch.bincount(n, minlength=2), accepted),
    }
    expect_laws(report, "verify_sigmoid", p_values)
    p = torch.softmax(target.double(), -1)
    expect_caught(report, "verify_sigmoid as lossless", {"token 1": chi_square(counts, p)})


def mistaken(mistake: str) -> Verify:
    return lambda propose, **args: verify_with_mistake(mistake, **args)


def reusing_the_drafts(name: str) -> Verify:
    """The draft's uniforms are used once more, as the argument `name`."""

    def verify(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_exact(**args | {name: propose[:, 0] if name == "sample_uniforms" else propose})

    return verify


@pytest.mark.parametrize(
    ("name", "wrong", "draft_kind"),
    [
        ("p in place of the residual", mistaken("p in place of the residual"), "opposite"),
        slow("p in place of the residual", mistaken("p in place of the residual"), "one-hot"),
        slow("the draft's number draws the next token", reusing_the_drafts("sample_uniforms"), "opposite"),
        ("the test's number draws the next token", mistaken("u draws the next token"), "opposite"),
        ("the draft's number in the test", reusing_the_drafts("accept_uniforms"), "opposite"),
        ("a walk that does not stop", mistaken("counts all acceptances"), "close"),
        slow("rejection at u > 1 - p / q", mistaken("u < 1 - p / q where q > p"), "close"),
    ],
)
def test_wrong_sampler_is_caught(name: str, wrong: Verify, draft_kind: str, report: Report) -> None:
    one_hot = draft_kind == "one-hot"
    target, draft = tables(1, "close" if one_hot else draft_kind)
    tokens = emit(target, None if one_hot else draft, 2, Uniforms(seed=2), verify=wrong)
    expect_caught(report, f"{name}, {draft_kind} draft", chain_p_values(tokens, target))


def test_a_wide_vocabulary_hides_a_mistake() -> None:
    """The same wrong sampler, as many trials: plain on 16 tokens, invisible on 4096. Laws are tested on narrow ones."""

    def wrong(target: Tensor, x: Tensor, draft: Tensor, accept: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_exact(target, x, draft, accept, accept[:, 0])

    p_values = []
    for vocab_size, verify in ((4096, wrong), (16, wrong), (16, torch_specops.verify_exact)):
        target = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0))
        tokens, _ = first_tokens(verify, target, -target, seed=1, trials=2000)
        p_values.append(chi_square(torch.bincount(tokens, minlength=vocab_size), target.double().softmax(0)))
    assert p_values[1] < ALPHA and min(p_values[0], p_values[2]) > 1e-4, p_values


def test_drafts_of_another_temperature_are_caught(report: Report) -> None:
    """Verified at T = 1, drafted at T = 0.7."""
    target, draft = tables(1, "close")
    tokens = emit(target, draft, 1, Uniforms(seed=2), draft_temperature=torch.full((TRIALS,), 0.7))
    expect_caught(report, "drafts of another temperature", chain_p_values(tokens, target))


class FrozenUniforms(Uniforms):
    """The same numbers at every step, as a generator captured in a graph gives."""

    def __call__(self, lengths: Tensor, n: int, stream: str) -> Tensor:
        return torch_specops.uniforms(torch.arange(len(lengths)), torch.zeros_like(lengths), n, stream)


def test_frozen_uniforms_are_caught(report: Report) -> None:
    """Numbers that repeat at every step leave the first token right, and only the joint law wrong."""
    target, draft = tables(1, "close")
    p_values = chain_p_values(emit(target, draft, 1, FrozenUniforms(seed=2)), target)
    assert p_values["token 1"] > ALPHA
    expect_caught(report, "frozen uniforms", p_values)


def test_comparison_without_strictness_is_caught(report: Report) -> None:
    """u = 0 is drawn, here once in 1024, and `<=` then accepts tokens that the target excludes: u q <= p = 0."""
    target, draft = (table[START].clone() for table in tables(19, "close"))
    target[::2] = -torch.inf
    generator = torch.Generator().manual_seed(20)
    x, _ = torch_specops.sample(draft.expand(TRIALS, V), torch.rand(TRIALS, generator=generator))
    u = (torch.rand(TRIALS, 1, generator=generator) * 1024).floor() / 1024
    s = torch.rand(TRIALS, generator=generator)
    p, q = torch.softmax(target.double(), -1), torch.softmax(draft.double(), -1)
    recovered, _ = torch_specops.sample((p - q).clamp(min=0).log().float().expand(TRIALS, V), s)

    def p_value(tokens: Tensor) -> float:
        return chi_square(torch.bincount(tokens, minlength=V), p)

    output, _ = torch_specops.verify_exact(
        target.expand(TRIALS, 2, V), x.unsqueeze(-1), draft.expand(TRIALS, 1, V), u, s
    )
    expect_laws(report, "u = 0 and p = 0", {"token 1": p_value(output[:, 0])})
    # The same by hand, first with < and then with <=.
    assert p_value(torch.where(u[:, 0] * q[x] < p[x], x, recovered)) > ALPHA
    not_strict = p_value(torch.where(u[:, 0] * q[x] <= p[x], x, recovered))
    expect_caught(report, "<= at u = 0", {"token 1": not_strict})
