"""Mistakes that implementations of speculative sampling have made; docs/traps.md says where each one is tested.

A test here builds the exact input on which the mistake shows. Where a law or a property already covers the trap, the
table points there.
"""

from __future__ import annotations

import math

import torch
from oracle import Case, compare

import torch_specops
from torch_specops.laws import chi_square


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
    assert compare(case, (output, n)).wrong == []

    p_hat, q_hat = (torch.sigmoid((z[:, 0] - alpha) / (beta - alpha)) for z in (target, draft))
    tokens, _ = torch_specops.sample((p_hat - q_hat).clamp(min=0).log(), args["sample_uniforms"])
    subtracted = torch.stack((tokens, torch.full_like(tokens, -1)), 1)
    assert len(compare(case, (subtracted, n)).wrong) > trials / 4


def test_small_probabilities_keep_their_ratio() -> None:
    """No epsilon: p(x) = 1e-9 against q(x) = 2e-9 accepts at u = 0.49 and rejects at u = 0.51."""
    rest = math.log1p(-1e-9)
    target = torch.tensor([[math.log(1e-9), rest, -torch.inf], [0.0, 0.0, 0.0]]).expand(2, 2, 3)
    draft = torch.tensor([[math.log(2e-9), rest, -torch.inf]]).expand(2, 1, 3)
    tokens, u = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0.49], [0.51]])
    output, n = torch_specops.verify_exact(target, tokens, draft, u, torch.zeros(2))
    assert n.tolist() == [1, 0] and output.tolist() == [[0, 0], [1, -1]]
