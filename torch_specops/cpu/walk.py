"""What the verify ops share: probabilities of single tokens, the walk over the drafts, the output row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rows import FLOAT32_MAX, argmax_by_tiles, scale


def stats_from_lse(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The pair that gives exp(z - lse) as a probability; no probability at all where lse is not finite."""
    finite = lse.isfinite()
    return torch.where(finite, lse, 0.0), finite.double()


def probability(z: Tensor, z_max: Tensor, z_sum: Tensor) -> Tensor:
    """exp(z - max) / sum in float64, for single logits; 0 where the row has no finite entry."""
    shift = z_max.clamp(min=-FLOAT32_MAX).double()
    return torch.where(z_sum > 0, torch.exp(z.double() - shift) / z_sum, 0.0)


def gather(logits: Tensor, x: Tensor) -> Tensor:
    return logits.gather(2, x.unsqueeze(-1)).squeeze(-1)


def leading(accepted: Tensor) -> Tensor:
    """[B, K] -> [B] length of the leading run of True."""
    return accepted.long().cumprod(1).sum(1)


def apply_greedy(
    accepted: Tensor,
    greedy_tokens: Tensor | None,
    draft_tokens: Tensor,
    temperature: Tensor | None,
    near: Tensor | None = None,
) -> Tensor:
    """Acceptance with greedy rows decided by the argmax, or by `near` [B, K] in its place; rows without a lawful
    temperature by nothing."""
    if temperature is None or greedy_tokens is None:
        return accepted
    t = temperature.unsqueeze(-1)
    if near is None:
        near = (draft_tokens == greedy_tokens[:, :-1]) & (draft_tokens >= 0)
    return torch.where(t == 0, near, accepted & (t > 0))


def near_argmax(z: Tensor, z_max: Tensor, argmax_lenience: float) -> Tensor:
    """[B, K] whether exp(z - max) >= l: of single logits of greedy rows, and the maxima of their rows."""
    return (z > -math.inf) & (z.double() - z_max.double() >= math.log(argmax_lenience))


def greedy_rows(
    target_logits: Tensor, draft_tokens: Tensor, temperature: Tensor, argmax_lenience: float = 1.0
) -> tuple[Tensor, Tensor]:
    tokens = argmax_by_tiles(target_logits)
    near = None
    if argmax_lenience < 1:
        in_vocab = (draft_tokens >= 0) & (draft_tokens < target_logits.shape[2])
        x, best = (torch.where(in_vocab, index, 0).long() for index in (draft_tokens, tokens[:, :-1]))
        rows = target_logits[:, :-1]
        near = in_vocab & near_argmax(scale(gather(rows, x), None), scale(gather(rows, best), None), argmax_lenience)
    nothing = torch.zeros_like(draft_tokens, dtype=torch.bool)
    n = leading(apply_greedy(nothing, tokens, draft_tokens, temperature, near))
    # No row has a temperature above 0, so what would have been drawn is not looked at.
    return output(draft_tokens, n, n, tokens, temperature), n


def residual_or_target(residual: Tensor, p: Tensor, use_residual: Tensor) -> Tensor:
    """Step 2 of the law: the residual after a rejection, p for the bonus, after padding and for an empty residual."""
    use_residual = use_residual & (residual.amax(-1) > 0)
    return torch.where(use_residual.unsqueeze(-1), residual, p)


def output(
    draft_tokens: Tensor, n: Tensor, drawn: Tensor, greedy_tokens: Tensor | None, temperature: Tensor | None
) -> Tensor:
    """[B, K+1] the accepted drafts, the next token, then -1."""
    next_token = drawn
    if temperature is not None and greedy_tokens is not None:
        rows = torch.arange(n.shape[0], device=n.device)
        next_token = torch.where(temperature == 0, greedy_tokens[rows, n], drawn)
        next_token = torch.where(temperature >= 0, next_token, -1)
    position = torch.arange(draft_tokens.shape[1] + 1, device=n.device)
    drafts = torch.nn.functional.pad(draft_tokens.long(), (0, 1), value=-1)
    kept = torch.where(position < n.unsqueeze(-1), drafts, -1)
    return torch.where(position == n.unsqueeze(-1), next_token.unsqueeze(-1), kept)
