"""Mistakes that implementations of speculative sampling have made; docs/traps.md says where each one is tested.

A test here builds the exact input on which the mistake shows. Where a law or a property already covers the trap, the
table points there.
"""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Case, compare
from torch import Tensor

import torch_specops
from torch_specops.laws import chi_square

INF = math.inf
BELOW_ONE = 1.0 - 2.0**-24


def verify(
    target: Tensor, tokens: list[int], draft: Tensor | None, u: float, s: float, t: float | None = None
) -> tuple[list[int], int]:
    """One row of verify_exact, the same u for every draft."""
    output, n = torch_specops.verify_exact(
        target[None],
        torch.tensor([tokens]),
        None if draft is None else draft[None],
        torch.full((1, len(tokens)), u),
        torch.tensor([s]),
        None if t is None else torch.tensor([t]),
    )
    return output[0].tolist(), int(n)


def first_token_p_value(vocab_size: int, trials: int, *, shared_noise: bool) -> float:
    """Chi-square of the first token against p, for a draft opposite to the target."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(vocab_size, generator=generator)
    propose = torch.rand(trials, generator=generator)
    drafts, _ = torch_specops.sample((-target).expand(trials, vocab_size), propose)
    output, _ = torch_specops.verify_exact(
        target.expand(trials, 2, vocab_size),
        drafts.unsqueeze(-1),
        (-target).expand(trials, 1, vocab_size),
        torch.rand(trials, 1, generator=generator),
        propose if shared_noise else torch.rand(trials, generator=generator),
    )
    counts = torch.bincount(output[:, 0], minlength=vocab_size)
    return chi_square(counts, torch.softmax(target.double(), 0))


def test_wide_vocabulary_hides_shared_noise() -> None:
    """The same mistake, as many trials: plain on 16 tokens, invisible on 4096. Laws are tested on narrow ones."""
    trials = 2000
    assert first_token_p_value(4096, trials, shared_noise=True) > 1e-4
    assert first_token_p_value(16, trials, shared_noise=True) < 1e-12
    assert first_token_p_value(16, trials, shared_noise=False) > 1e-4


def test_u_just_below_one_stays_in_the_vocabulary() -> None:
    """The sum of float32 weights may fall short of s times their total: the last token of positive weight is meant."""
    for vocab_size in (1, 3, 1000, 5001):
        logits = torch.zeros(2, vocab_size)
        logits[:, -1] = -INF if vocab_size > 1 else 0.0
        tokens, _ = torch_specops.sample(logits, torch.tensor([BELOW_ONE, 1.0 - 2.0**-53], dtype=torch.float64))
        assert tokens.tolist() == [max(vocab_size - 2, 0)] * 2
        assert verify(logits, [-1], torch.zeros(1, vocab_size), 0.0, BELOW_ONE)[0][0] == max(vocab_size - 2, 0)


@pytest.mark.parametrize("value", [math.nan, -INF])
@pytest.mark.parametrize("t", [None, 0.0, 0.7])
def test_row_without_a_finite_logit_emits_minus_one(value: float, t: float | None) -> None:
    """An argmax over it returns a padded lane, a token that no embedding has."""
    vocab_size = 1001
    target = torch.zeros(2, vocab_size)
    target[0] = value
    assert verify(target, [5], torch.zeros(1, vocab_size), 0.0, 0.5, t) == ([-1, -1], 0)
    assert verify(target.flip(0), [0], None, 0.0, 0.5, t) == ([0, -1], 1)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 31, 33, 127, 1023, 1025])
def test_lanes_past_the_vocabulary_are_never_drawn(vocab_size: int) -> None:
    """Lanes that are filled with 0 outweigh logits of -1e4, or tie with probabilities of 0."""
    logits = torch.full((2, vocab_size), -1e4)
    for s in (0.0, 0.5, BELOW_ONE):
        for t in (1.0, 0.0):
            tokens, lse = torch_specops.sample(logits, torch.full((2,), s), torch.full((2,), t))
            assert (tokens < vocab_size).all()
            assert lse.tolist() == pytest.approx([-1e4 + math.log(vocab_size) if t else 0.0] * 2, rel=1e-6)
            output, _ = verify(logits, [vocab_size], logits[:1], 0.0, s, t)
            assert 0 <= output[0] < vocab_size
    # The residual of one token, and nothing but zeros after it.
    target, draft = torch.full((2, vocab_size), -INF), torch.full((1, vocab_size), -INF)
    target[:, 0] = 0.0
    draft[:, -1] = 0.0
    assert verify(target, [vocab_size - 1], draft, 0.5, BELOW_ONE)[0][0] == 0


def test_residual_of_nearly_equal_scores_keeps_its_digits() -> None:
    """At +-1e4 a difference of two float32 scores has few digits left: the subtraction draws other tokens."""
    alpha, beta, trials, vocab_size = -1e4, 1e4, 64, 1000
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(trials, 1, vocab_size, generator=generator)
    target = draft + 0.02 * torch.randn(trials, 1, vocab_size, generator=generator)
    # The drafted token is one that the target likes less by more than rounding can hide.
    target[..., 0] = draft[..., 0] - 1.0
    args = {
        "target_logits": torch.cat((target, target), 1),
        "draft_tokens": torch.zeros(trials, 1, dtype=torch.int64),
        "draft_logits": draft,
        "accept_uniforms": torch.full((trials, 1), 1.0 - 2.0**-30, dtype=torch.float64),
        "sample_uniforms": torch.rand(trials, generator=generator),
        "alpha": alpha,
        "beta": beta,
    }
    case = Case("nearly equal scores", "verify_sigmoid", args)
    output, n = torch_specops.verify_sigmoid(**args)
    assert (n == 0).all()
    comparison = compare(case, (output, n))
    assert comparison.wrong == []
    assert comparison.rounding < trials / 4

    p_hat, q_hat = (torch.sigmoid((z[:, 0] - alpha) / (beta - alpha)) for z in (target, draft))
    tokens, _ = torch_specops.sample((p_hat - q_hat).clamp(min=0).log(), args["sample_uniforms"])
    subtracted = torch.stack((tokens, torch.full_like(tokens, -1)), 1)
    assert len(compare(case, (subtracted, n)).wrong) > trials / 4


def test_small_probabilities_keep_their_ratio() -> None:
    """No epsilon: p(x) = 1e-9 against q(x) = 2e-9 accepts at u = 0.49 and rejects at u = 0.51."""
    rest = math.log1p(-1e-9)
    target = torch.tensor([[math.log(1e-9), rest, -INF], [0.0, 0.0, 0.0]])
    draft = torch.tensor([[math.log(2e-9), rest, -INF]])
    assert verify(target, [0], draft, 0.49, 0.0) == ([0, 0], 1)
    assert verify(target, [0], draft, 0.51, 0.5) == ([1, -1], 0)


def test_one_seed_for_every_row_repeats_its_tokens() -> None:
    """Rows of one seed draw alike, rows of their own seeds do not: seeds are read per row."""
    logits, positions = torch.zeros(64, 1000), torch.zeros(64, dtype=torch.int64)
    alike = torch_specops.uniforms(torch.full((64,), 3), positions, 1, "sample")[:, 0]
    own = torch_specops.uniforms(torch.arange(64), positions, 1, "sample")[:, 0]
    assert len(torch_specops.sample(logits, alike)[0].unique()) == 1
    assert len(torch_specops.sample(logits, own)[0].unique()) > 50
