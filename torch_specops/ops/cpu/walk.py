"""Functions that the verify ops share: the accept rule, the number of accepted drafts, greedy rows, the residual and
the output row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .softmax import FLOAT32_MAX, softmax_row

# q(x) is clamped to exp of this number, so that it is finite in float64 for any `draft_lse`.
LARGEST_EXPONENT = 700.0
# A residual with at most this mass counts as empty, because in float32 it cannot be distinguished from rounding errors.
LEAST_RESIDUAL = 2.0**-100


def accepts(u: Any, p_x: Any, q_x: Any, in_vocab: Any) -> Any:
    """The accept rule: draft x is accepted iff u q(x) < p(x) (Leviathan et al. 2023, Algorithm 1).

    The arguments are tensors [B, K] or single numbers. u is the uniform number in float64, multiplied by the lenience
    (appendix A.5). Padding and drafts with p(x) = 0 or q(x) = 0 are never accepted.
    """
    return in_vocab & (p_x > 0) & (q_x > 0) & (u * q_x < p_x)


def prefix_lengths(accepted: Tensor) -> Tensor:
    """[B, K] -> [B] the number of accepted drafts before the first rejection."""
    return accepted.long().cumprod(1).sum(1)


def draft_indices(draft_tokens: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The tokens [B, K] as valid indices (0 for padding), and a mask [B, K] that is True for tokens in the
    vocabulary."""
    in_vocab = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    return torch.where(in_vocab, draft_tokens, 0).long(), in_vocab


def logits_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logits [B, K, V] and tokens [B, K] -> [B, K], the logit of the given token in each row."""
    return logits.gather(2, tokens.unsqueeze(-1)).squeeze(-1)


def probability(z: Tensor, z_max: Tensor, z_sum: Tensor) -> Tensor:
    """[B, K] exp(z - max) / sum in float64, where z [B, K] are single logits; 0 if the row has no finite entry."""
    shift = z_max.clamp(min=-FLOAT32_MAX).double()
    return torch.where(z_sum > 0, torch.exp((z.double() - shift).clamp(max=LARGEST_EXPONENT)) / z_sum, 0.0)


def stats_from_lse(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum and the sum [B, K] for which `probability` returns exp(z - lse), or 0 where lse is not finite."""
    finite = lse.isfinite()
    # Use inf as the maximum, so that exp(z - inf) is 0. With another maximum, exp could overflow, and inf times 0 is
    # NaN.
    return torch.where(finite, lse, math.inf), finite.double()


def apply_greedy(
    accepted: Tensor,  # [B, K]
    greedy_tokens: Tensor | None,  # [B, K+1]
    draft_tokens: Tensor,  # [B, K]
    temperature: Tensor | None,  # [B]
    near_argmax: Tensor | None = None,  # [B, K]
) -> Tensor:
    """Apply the rule of greedy rows to `accepted` [B, K]. In greedy rows a draft is accepted if it is the argmax, or as
    `near_argmax` says if that is given. In rows with a negative or NaN temperature, no draft is accepted."""
    if temperature is None or greedy_tokens is None:
        return accepted
    if near_argmax is None:
        near_argmax = (draft_tokens == greedy_tokens[:, :-1]) & (draft_tokens >= 0)
    t = temperature.unsqueeze(-1)
    return torch.where(t == 0, near_argmax, accepted & (t > 0))


def is_near_argmax(z: Tensor, z_max: Tensor, argmax_lenience: float) -> Tensor:
    """[B, K] True where exp(z - max) >= l, the accept rule of greedy rows with lenience l (Leviathan et al. appendix
    A.5)."""
    return (z > -math.inf) & (z.double() - z_max.double() >= math.log(argmax_lenience))


def residual(
    weights: Tensor,  # [..., V], the weights p, or P p in `verify_block`
    z_p: Tensor,  # [..., V]
    x: Tensor,  # [...], the draft tokens
    q: tuple[Tensor, Tensor, Tensor] | None,  # scaled logits [..., V], their maximum and sum [...]; None = one-hot at x
    equal: Tensor | float = 0.0,  # [..., V], the result for rows with equal logits
    is_one_hot: Tensor | None = None,  # [...] True: one-hot at x although q is given
) -> Tensor:
    """[..., V] max(weights - q, 0)."""
    if q is None or is_one_hot is not None:
        is_draft = torch.arange(weights.shape[-1], device=weights.device) == x.unsqueeze(-1)
        without_draft = torch.where(is_draft, 0.0, weights)
        if q is None:
            return without_draft
    # If the logits are equal, q is a multiple of p, and the difference would consist of rounding errors. Return `equal`
    # then.
    differs = (z_p != q[0]).any(-1, keepdim=True)
    rest = torch.where(differs, (weights - softmax_row(*q)).clamp(min=0), equal)
    return rest if is_one_hot is None else torch.where(is_one_hot.unsqueeze(-1), without_draft, rest)


def residual_or_target(residual: Tensor, p: Tensor, use_residual: Tensor, least: float = 0.0) -> Tensor:
    """The weights [B, V] of the next token: the residual where `use_residual`, unless its mass is at most `least`, else
    p."""
    use_residual = use_residual & (residual.sum(-1) > least)
    return torch.where(use_residual.unsqueeze(-1), residual, p)


def output_rows(
    draft_tokens: Tensor,  # [B, K]
    n: Tensor,  # [B], the number of accepted drafts
    drawn: Tensor,  # [B], the next token of each sampled row
    greedy_tokens: Tensor | None,  # [B, K+1]
    temperature: Tensor | None,  # [B]
) -> Tensor:
    """[B, K+1] the accepted drafts, the next token, then -1."""
    next_token = drawn
    if temperature is not None and greedy_tokens is not None:
        rows = torch.arange(n.shape[0], device=n.device)
        next_token = torch.where(temperature == 0, greedy_tokens[rows, n], drawn)
        next_token = torch.where(temperature >= 0, next_token, -1)
    position = torch.arange(draft_tokens.shape[1] + 1, device=n.device)
    drafts = pad(draft_tokens.long(), (0, 1), value=-1)
    kept = torch.where(position < n.unsqueeze(-1), drafts, -1)
    return torch.where(position == n.unsqueeze(-1), next_token.unsqueeze(-1), kept)
