"""The ops on CPU, vectorised in torch: no loop, no data-dependent shape, so Inductor fuses them into C++. An eager call
looks whether any row is sampled; a traced one cannot, and does what rows of both kinds need.

Logits are scaled and exponentiated in float32; sums, distribution functions and the few probabilities that decide
an acceptance are float64. The law is that of `reference.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["sample", "verify_exact", "verify_sigmoid"]

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).smallest_normal
# Vocabulary entries per tile of the two-level search in `_draw`.
TILE = 1024


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None,
    draft_lse: Tensor | None,
    lenience: float,
) -> tuple[Tensor, Tensor]:
    if temperature is not None and _all_greedy(temperature):
        return _greedy(target_logits, draft_tokens, temperature)
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse = _inverse_temperature(temperature)
    in_vocab = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    x = torch.where(in_vocab, draft_tokens, 0).long()

    scaled_target = _scale(target_logits, inverse)
    p_max, p_sum = _softmax_stats(scaled_target)
    p_x = _probability(_scale(_gather(target_logits[:, :num_drafts], x), inverse), p_max[:, :-1], p_sum[:, :-1])
    if draft_logits is None:
        q_max = q_sum = None
        q_x = torch.ones_like(p_x)
    else:
        if draft_lse is None:
            q_max, q_sum = _softmax_stats(_scale(draft_logits, inverse))
        else:
            q_max, q_sum = _stats_from_lse(draft_lse)
        q_x = _probability(_scale(_gather(draft_logits, x), inverse), q_max, q_sum)

    accepted = in_vocab & (q_x > 0) & (accept_uniforms.double() * lenience * q_x < p_x)
    greedy_tokens = None if temperature is None else _lowest_argmax(scaled_target, p_max)
    accepted = _apply_greedy(accepted, greedy_tokens, draft_tokens, temperature)
    n = _leading(accepted)

    rows = torch.arange(n.shape[0], device=n.device)
    z_p = scaled_target[rows, n]
    p = _softmax_row(z_p, p_max[rows, n], p_sum[rows, n])
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        if q_max is None or q_sum is None or draft_logits is None:
            is_draft = torch.arange(vocab_size, device=p.device) == x[rows, rejected].unsqueeze(-1)
            residual = torch.where(is_draft, 0.0, p)
        else:
            z_q = _scale(draft_logits[rows, rejected], inverse)
            q = _softmax_row(z_q, q_max[rows, rejected], q_sum[rows, rejected])
            # Equal logits mean p = q, which the rounding of a given draft_lse would hide.
            residual = torch.where((z_p != z_q).any(-1, keepdim=True), (p - q).clamp(min=0), 0.0)
        p = _residual_or_target(residual, p, (n < num_drafts) & in_vocab[rows, rejected])
    drawn = _draw(p, sample_uniforms)
    return _output(draft_tokens, n, drawn, greedy_tokens, temperature), n


def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float,
    beta: float,
    temperature: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if temperature is not None and _all_greedy(temperature):
        return _greedy(target_logits, draft_tokens, temperature)
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse = _inverse_temperature(temperature)
    in_vocab = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    x = torch.where(in_vocab, draft_tokens, 0).long()

    z_px = _floor(_scale(_gather(target_logits[:, :num_drafts], x), inverse), alpha, beta)
    z_qx = _floor(_scale(_gather(draft_logits, x), inverse), alpha, beta)
    p_x = _sigmoid_score(z_px.double(), alpha, beta)
    q_x = _sigmoid_score(z_qx.double(), alpha, beta)
    accepted = in_vocab & (q_x > 0) & (accept_uniforms.double() * q_x < p_x)
    greedy_tokens = None if temperature is None else _argmax(target_logits)
    accepted = _apply_greedy(accepted, greedy_tokens, draft_tokens, temperature)
    n = _leading(accepted)

    rows = torch.arange(n.shape[0], device=n.device)
    z_p = _scale(target_logits[rows, n], inverse)
    weights = _softmax_row(z_p, *_softmax_stats(z_p))
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        z_p = _floor(z_p, alpha, beta)
        z_q = _floor(_scale(draft_logits[rows, rejected], inverse), alpha, beta)
        p = _sigmoid_score(z_p, alpha, beta)
        residual = _sigmoid_residual(p, z_p, z_q, alpha, beta)
        p = _residual_or_target(residual, p, in_vocab[rows, rejected])
        weights = torch.where((n < num_drafts).unsqueeze(-1), p, weights)
    drawn = _draw(weights, sample_uniforms)
    return _output(draft_tokens, n, drawn, greedy_tokens, temperature), n


def sample(logits: Tensor, uniforms: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    if temperature is not None and _all_greedy(temperature):
        tokens = torch.where(temperature == 0, _argmax(logits), -1)
        return tokens, torch.where(tokens >= 0, 0.0, -math.inf)
    z = _scale(logits, _inverse_temperature(temperature))
    z_max, z_sum = _softmax_stats(z)
    tokens = _draw(_softmax_row(z, z_max, z_sum), uniforms)
    lse = (z_max.double() + z_sum.log()).float()
    if temperature is None:
        return tokens, lse
    has_law = (z_max > -math.inf) & (temperature >= 0)
    greedy = temperature == 0
    tokens = torch.where(has_law, torch.where(greedy, _lowest_argmax(z, z_max), tokens), -1)
    return tokens, torch.where(has_law, torch.where(greedy, 0.0, lse), -math.inf)


def _inverse_temperature(temperature: Tensor | None) -> Tensor | None:
    """[B] 1 / T, finite and positive for every T; 1 for a greedy row, whose values must stay comparable."""
    if temperature is None:
        return None
    return torch.where(temperature > 0, (1.0 / temperature).clamp(FLOAT32_TINY, FLOAT32_MAX), 1.0)


def _scale(logits: Tensor, inverse: Tensor | None) -> Tensor:
    """[B, ...] logits / T in float32. A finite logit stays finite, +inf becomes the largest float32, NaN -inf."""
    x = logits.float()
    z = x if inverse is None else x * inverse.view(-1, *([1] * (x.dim() - 1)))
    # False for NaN too. Inductor turns this form into vector code, and nan_to_num not.
    return torch.where(x > -math.inf, z.clamp(-FLOAT32_MAX, FLOAT32_MAX), -math.inf)


def _softmax_stats(z: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] -> maximum [...] float32 and sum of exp(z - maximum) [...] float64; (-inf, 0) without a finite entry."""
    z_max = z.amax(-1)
    shift = z_max.clamp(min=-FLOAT32_MAX)
    return z_max, torch.exp(z - shift.unsqueeze(-1)).sum(-1, dtype=torch.float64)


def _stats_from_lse(lse: Tensor) -> tuple[Tensor, Tensor]:
    """The pair that gives exp(z - lse) as a probability; no probability at all where lse is not finite."""
    finite = lse.isfinite()
    return torch.where(finite, lse, 0.0), finite.double()


def _probability(z: Tensor, z_max: Tensor, z_sum: Tensor) -> Tensor:
    """exp(z - max) / sum in float64, for single logits; 0 where the row has no finite entry."""
    shift = z_max.clamp(min=-FLOAT32_MAX).double()
    return torch.where(z_sum > 0, torch.exp(z.double() - shift) / z_sum, 0.0)


def _softmax_row(z: Tensor, z_max: Tensor, z_sum: Tensor) -> Tensor:
    """[B, V] the same in float32, for whole rows."""
    inverse_sum = torch.where(z_sum > 0, 1.0 / z_sum, 0.0).float().unsqueeze(-1)
    return torch.exp(z - z_max.clamp(min=-FLOAT32_MAX).unsqueeze(-1)) * inverse_sum


def _floor(z: Tensor, alpha: float, beta: float) -> Tensor:
    """Scaled logits not below the one whose score is sigmoid(-80), which float32 still holds: a row never loses all
    its scores. -inf stays."""
    return torch.where(z > -math.inf, z.clamp(min=alpha - 80.0 * (beta - alpha)), z)


def _sigmoid_score(z: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.where(z > -math.inf, torch.sigmoid((z - alpha) / (beta - alpha)), 0.0)


def _sigmoid_residual(p: Tensor, z_p: Tensor, z_q: Tensor, alpha: float, beta: float) -> Tensor:
    """[B, V] max(sigmoid(a) - sigmoid(b), 0) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) for a > b, which does not
    cancel; a and b are the scaled logits of target and draft."""
    scale = 1.0 / (beta - alpha)
    gap = ((z_p - z_q) * scale).clamp(min=0)
    difference = p * torch.sigmoid((alpha - z_q) * scale) * -torch.expm1(-gap)
    return torch.where(z_p > -math.inf, torch.where(z_q > -math.inf, difference, p), 0.0)


def _gather(logits: Tensor, x: Tensor) -> Tensor:
    return logits.gather(2, x.unsqueeze(-1)).squeeze(-1)


def _leading(accepted: Tensor) -> Tensor:
    """[B, K] -> [B] length of the leading run of True."""
    return accepted.long().cumprod(1).sum(1)


def _argmax(logits: Tensor) -> Tensor:
    """[..., V] -> lowest index of the maximum, -1 without a finite entry."""
    z = _scale(logits, None)
    return _lowest_argmax(z, z.amax(-1))


def _lowest_argmax(z: Tensor, z_max: Tensor) -> Tensor:
    # Inductor vectorises a minimum, but not argmax.
    index = torch.arange(z.shape[-1], device=z.device, dtype=torch.int32)
    lowest = torch.where(z == z_max.unsqueeze(-1), index, z.shape[-1]).amin(-1).long()
    return torch.where(z_max > -math.inf, lowest, -1)


def _apply_greedy(
    accepted: Tensor, greedy_tokens: Tensor | None, draft_tokens: Tensor, temperature: Tensor | None
) -> Tensor:
    """Acceptance with greedy rows decided by the argmax, rows without a lawful temperature by nothing."""
    if temperature is None or greedy_tokens is None:
        return accepted
    t = temperature.unsqueeze(-1)
    is_argmax = (draft_tokens == greedy_tokens[:, :-1]) & (draft_tokens >= 0)
    return torch.where(t == 0, is_argmax, accepted & (t > 0))


def _all_greedy(temperature: Tensor) -> bool:
    """Whether no row is sampled, where that can be known: in an eager call, with no mode that records or fakes it."""
    is_plain = type(temperature) is Tensor and temperature.device.type == "cpu"
    if not is_plain or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return not bool((temperature > 0).any())


def _greedy(target_logits: Tensor, draft_tokens: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    tokens = _argmax(target_logits)
    nothing = torch.zeros_like(draft_tokens, dtype=torch.bool)
    n = _leading(_apply_greedy(nothing, tokens, draft_tokens, temperature))
    # No row has a temperature above 0, so what would have been drawn is not looked at.
    return _output(draft_tokens, n, n, tokens, temperature), n


def _residual_or_target(residual: Tensor, p: Tensor, use_residual: Tensor) -> Tensor:
    """Step 2 of the law: the residual after a rejection, p for the bonus, after padding and for an empty residual."""
    use_residual = use_residual & (residual.amax(-1) > 0)
    return torch.where(use_residual.unsqueeze(-1), residual, p)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[B, V], [B] -> [B] by inverse CDF: find the tile, then the token in it; -1 for a row of zero weight."""
    batch, vocab_size = weights.shape
    size = min(TILE, vocab_size)
    num_tiles = (vocab_size + size - 1) // size
    tiles = torch.nn.functional.pad(weights, (0, num_tiles * size - vocab_size)).view(batch, num_tiles, size)
    mass = tiles.sum(-1, dtype=torch.float64)
    cdf = mass.cumsum(-1)
    threshold = uniforms.double() * cdf[:, -1]

    rows = torch.arange(batch, device=weights.device)
    tile = _first_above(cdf, mass > 0, threshold)
    inside = tiles[rows, tile]
    before = cdf[rows, tile] - mass[rows, tile]
    token = _first_above(inside.cumsum(-1, dtype=torch.float64), inside > 0, threshold - before)
    return torch.where(cdf[:, -1] > 0, tile * size + token, -1)


def _first_above(cdf: Tensor, positive: Tensor, threshold: Tensor) -> Tensor:
    """[B, N] -> [B] first positive entry whose cdf exceeds the threshold, else the last positive one, else 0."""
    index = torch.arange(cdf.shape[-1], device=cdf.device)
    last = torch.where(positive, index, 0).amax(-1)
    above = positive & (cdf > threshold.unsqueeze(-1))
    return torch.minimum(torch.where(above, index, cdf.shape[-1]).amin(-1), last)


def _output(
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
