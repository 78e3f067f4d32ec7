"""Mistakes that implementations of speculative sampling have made; docs/traps.md says where each one is tested.

Most are covered by the laws and by the comparison with the oracle, where the table points. Here is the rest.
"""

from __future__ import annotations

import math

import torch

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


def test_small_probabilities_keep_their_ratio() -> None:
    """No epsilon: p(x) = 1e-9 against q(x) = 2e-9 accepts at u = 0.49 and rejects at u = 0.51."""
    rest = math.log1p(-1e-9)
    target = torch.tensor([[math.log(1e-9), rest, -torch.inf], [0.0, 0.0, 0.0]]).expand(2, 2, 3)
    draft = torch.tensor([[math.log(2e-9), rest, -torch.inf]]).expand(2, 1, 3)
    tokens, u = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0.49], [0.51]])
    output, n = torch_specops.verify_exact(target, tokens, draft, u, torch.tensor([0.0, 0.5]))
    assert n.tolist() == [1, 0] and output.tolist() == [[0, 0], [1, -1]]
