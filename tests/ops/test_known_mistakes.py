"""Mistakes that implementations of speculative sampling have made; docs/traps.md says where each one is tested.

Most are covered by the laws and by the comparison with the oracle, where the table points. Here is the rest.
"""

from __future__ import annotations

import math

import pytest
import torch

import torch_specops
from torch_specops.analysis import acceptance_probability
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


def test_small_probabilities_keep_their_ratio() -> None:
    """No epsilon: p(x) = 1e-9 against q(x) = 2e-9 accepts at u = 0.49 and rejects at u = 0.51."""
    rest = math.log1p(-1e-9)
    target = torch.tensor([[math.log(1e-9), rest, -torch.inf], [0.0, 0.0, 0.0]]).expand(2, 2, 3)
    draft = torch.tensor([[math.log(2e-9), rest, -torch.inf]]).expand(2, 1, 3)
    tokens, u = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0.49], [0.51]])
    output, n = torch_specops.verify_exact(target, tokens, draft, u, torch.tensor([0.0, 0.5]))
    assert n.tolist() == [1, 0] and output.tolist() == [[0, 0], [1, -1]]


def test_a_rejection_with_the_complement_is_caught() -> None:
    """Rejected if q > p and r > 1 - p / q, which has the probability p / q; with r < 1 - p / q the law is kept."""
    generator, trials, vocab = torch.Generator().manual_seed(0), 20_000, 8
    target, draft = torch.randn(2, vocab, generator=generator)
    p, q = (logits.double().softmax(0) for logits in (target, draft))
    drafts, _ = torch_specops.sample(draft.expand(trials, vocab), torch.rand(trials, generator=generator))
    r, s = torch.rand(2, trials, generator=generator).double()
    residual = (p - q).clamp(min=0).cumsum(0)
    others = torch.searchsorted(residual, s * residual[-1], right=True).clamp(max=vocab - 1)
    p_values = {}
    for name, exceeds in (("slide", r > 1 - (p / q)[drafts]), ("text", r < 1 - (p / q)[drafts])):
        rejected = (q > p)[drafts] & exceeds
        tokens = torch.where(rejected, others, drafts)
        p_values[name] = chi_square(torch.bincount(tokens, minlength=vocab), p)
    assert p_values["slide"] < 1e-12 and p_values["text"] > 1e-4


def test_the_printed_argmax_lenience_is_the_wrong_way_round() -> None:
    """As printed, alpha is 1 at l = 1 and falls with l; the paper's own alphas are 0.75, 0.75, 0.8 and 0.87 for l = 1,
    0.5, 0.3 and 0.1."""
    generator, vocab = torch.Generator().manual_seed(0), 50
    target = 2 * torch.randn(400, vocab, generator=generator)
    draft = target + torch.randn(400, vocab, generator=generator)
    p, x = target.softmax(1), draft.argmax(1, keepdim=True)
    share = (p.gather(1, x) / p.amax(1, keepdim=True)).flatten()
    leniences = (1.0, 0.5, 0.3, 0.1)
    printed = [(share <= each).double().mean().item() for each in leniences]
    alphas = [acceptance_probability(target, draft, 0.0, argmax_lenience=each).mean().item() for each in leniences]
    assert printed[0] == 1.0 and printed == sorted(printed, reverse=True) and printed[-1] < 0.5
    assert alphas == sorted(alphas) and 0.3 < alphas[0] < alphas[-1] < 1.0
    assert alphas[1:] == pytest.approx([(share >= each).double().mean().item() for each in leniences[1:]])
