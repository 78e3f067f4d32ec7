"""Texts of three tokens, drafted and verified by the ops, whose law is known exactly.

TRIALS texts over V = 16 tokens come from fixed seeds, one per batch row. The tokens form a Markov chain, so that the
second row of logits depends on the first token: the marginals at three positions and the joint laws of consecutive
tokens are known. A law fails below ALPHA, and a wrong sampler must fall below the same ALPHA. A right build fails one
of some 300 laws, with those of tiny_laws.py, with a probability of 3e-4. On a wide vocabulary the same wrong samplers
would pass, with too few trials per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from report import Report
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.ops.cpu import softmax
from torch_specops.testing import chi_square

V = 16
TRIALS = 12_000
LENGTH = 3
ALPHA = 1e-6
# The state before the first token.
START = V

# Called with the uniforms that the drafts were drawn with, then the arguments of a verify op by name.
Verify = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def short_tiles() -> Iterator[None]:
    """16 tokens in four tiles, the last one ragged: the laws then hold for both levels of the search. One tile of the
    usual length would be padding."""
    with mock.patch.object(softmax, "TILE", 5):
        yield


def tables(seed: int, draft: str, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    """[V + 1, V] logits of the target and of the draft for each last token."""
    generator = torch.Generator().manual_seed(seed)
    target = spread * torch.randn(V + 1, V, generator=generator)
    noise = 0.5 * torch.randn(V + 1, V, generator=generator)
    return target, {"opposite": -target, "close": target + noise}[draft]


@dataclass
class Uniforms:
    """Independent numbers for each step from torch.rand, or from the counter-based function."""

    seed: int
    counter_based: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def __call__(self, lengths: Tensor, n: int, stream: str) -> Tensor:
        if self.counter_based:
            seeds = torch.arange(len(lengths)) + self.seed * TRIALS
            return torch_specops.uniforms(seeds, lengths, n, stream)
        return torch.rand(len(lengths), n, generator=self.generator)


def emit(
    target: Tensor,
    draft: Tensor | None,
    num_drafts: int,
    uniforms: Uniforms,
    *,
    length: int = LENGTH,
    temperature: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    filters: dict[str, Tensor] | None = None,
    lse: bool = False,
    pad: bool = False,
    op: str = "verify_exact",
    verify: Verify | None = None,
) -> Tensor:
    """[TRIALS, length] tokens of as many steps as every row needs, by an op or by a `verify` of one's own. Without
    `draft` logits the draft is the token after the last one."""
    tokens = torch.full((TRIALS, length * (num_drafts + 1)), -1)
    lengths = torch.zeros(TRIALS, dtype=torch.int64)
    last = torch.full((TRIALS,), START)
    draft_temperature = temperature if draft_temperature is None else draft_temperature
    filters = filters or {}
    for _ in range(length):
        propose = uniforms(lengths, num_drafts, "propose")
        states, draft_lse = [last], []
        for i in range(num_drafts):
            if draft is None:
                states.append((states[-1] + 1) % V)
            else:
                x, row_lse = torch_specops.sample(draft[states[-1]], propose[:, i], draft_temperature, **filters)
                states.append(x)
                draft_lse.append(row_lse)
        states_tensor = torch.stack(states, 1)
        draft_tokens = states_tensor[:, 1:].clone()
        if pad:
            # How many drafts a row keeps depends on the row alone.
            draft_tokens[torch.arange(num_drafts) >= (torch.arange(TRIALS) % (num_drafts + 1)).unsqueeze(-1)] = -1
        args: dict[str, Any] = {
            "target_logits": target[states_tensor],
            "draft_tokens": draft_tokens,
            "draft_logits": None if draft is None else draft[states_tensor[:, :-1]],
            "accept_uniforms": uniforms(lengths, num_drafts, "accept"),
            "sample_uniforms": uniforms(lengths, 1, "sample")[:, 0],
            "temperature": temperature,
            **filters,
        }
        if lse:
            args["draft_lse"] = torch.stack(draft_lse, 1)
        output, n = getattr(torch_specops, op)(**args) if verify is None else verify(propose, **args)
        # The -1 after a row's tokens is overwritten by the next step.
        tokens.scatter_(1, lengths.unsqueeze(-1) + torch.arange(num_drafts + 1), output)
        last = output.gather(1, n.unsqueeze(-1)).squeeze(-1)
        lengths = lengths + n + 1
    return tokens[:, :length]


def probabilities(table: Tensor, temperature: float = 1.0, **filters: float) -> Tensor:
    """[V + 1, V] float64 the law of the next token, by the oracle's filters."""
    rows = [reference.filtered(row, temperature, **filters) for row in table]
    return torch.softmax(torch.stack(rows).double() / temperature, -1)


def chain_p_values(tokens: Tensor, target: Tensor, temperature: float = 1.0, **filters: float) -> dict[str, float]:
    """Chi-square of each token [N, length], and of two neighbours jointly."""
    p = probabilities(target, temperature, **filters)
    law, p_values = p[START], {}
    for i, token in enumerate(tokens.unbind(1), 1):
        p_values[f"token {i}"] = chi_square(torch.bincount(token, minlength=V), law)
        if i < tokens.shape[1]:
            joint, pairs = law.unsqueeze(-1) * p[:V], V * token + tokens[:, i]
            p_values[f"tokens {i}, {i + 1}"] = chi_square(torch.bincount(pairs, minlength=V * V), joint.flatten())
            law = joint.sum(0)
    return p_values


def expect_laws(report: Report, name: str, p_values: dict[str, float]) -> None:
    report.p_values |= {f"{name}, {key}": value for key, value in p_values.items()}
    assert min(p_values.values()) > ALPHA, p_values


def expect_caught(report: Report, name: str, p_values: dict[str, float]) -> None:
    report.wrong_p_values[name] = min(p_values.values())
    assert min(p_values.values()) < ALPHA, f"the tests do not see that this sampler is wrong: {p_values}"
