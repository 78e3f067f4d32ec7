"""Weights and a bound on what float32 may make of each.

With eps = 2**-24, z the scaled logits of a row and a their maximum (or `draft_lse`):

    weight    exp(z - a) errs by a factor of exp(+-9 eps max(|z|, |a|)) for the rounding of z - a, which is exact where
              z = a, and by ENTRY eps for the exponential and what follows it
    score     sigmoid(y), y = (z - alpha) / (beta - alpha), errs by 3 eps (|z| + |alpha|) / (beta - alpha) times
              1 - sigmoid(y) for the rounding of y, and by ENTRY eps
    sum       a sum or prefix sum over a vocabulary errs by SUM eps, besides the errors of its terms
    tiny      a weight below TINY may be flushed to zero
    filters   a token so close to the boundary of top_p or min_p that float32 may keep or remove it errs by its weight
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_specops import reference

INF = math.inf
EPS = 2.0**-24
# In units of EPS. An entry: exp or sigmoid 4, rescaling a tile 5, normalising 3, products and quotients 4. A sum: 32
# entries of a thread one by one, 7 levels of a tree, then some hundreds of tiles, whose errors mostly cancel.
ENTRY, SUM = 16, 48
TINY = 1e-37


class Weights(NamedTuple):
    """[V] float64 each: a row of weights, and a bound on the float32 error of every one."""

    value: Tensor
    error: Tensor

    def possible(self) -> Tensor:
        """[V] bool: where float32 may find a positive weight."""
        return self.value + self.error > 0


def exponential(z: Tensor, a: Tensor) -> Weights:
    finite = torch.where(z > -INF, z, 0.0)
    rounding = torch.where(finite == a, 0.0, 9 * EPS * torch.maximum(finite.abs(), a.abs()))
    weight, upper, lower = (torch.exp((z - a + each).clamp(max=80.0)) for each in (0.0, rounding, -rounding))
    error = torch.maximum(upper - weight, weight - lower) + ENTRY * EPS * weight
    return Weights(weight, error + torch.where((z > -INF) & (weight < TINY), TINY, 0.0))


def at_boundary(logits: Tensor, t: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[V] bool: the tokens that float32 may keep or remove: the mass before one is close to top_p times the sum, or its
    ratio to the largest to min_p."""
    close = torch.zeros(logits.shape, dtype=torch.bool)
    x = reference.comparable_logits(logits)
    # Ascending and stable, then reversed: of equal logits the higher index comes first.
    order = x.sort(stable=True).indices.flip(0)
    order = order[x[order] > -INF]
    if not t > 0 or len(order) == 0:
        return close
    if 0 < top_k < len(order):
        order = order[x[order] >= x[order[top_k - 1]]]
    z = reference.scaled_logits(logits, t)[order]
    # How far each token is within top_p and within min_p, and the bound on it.
    within_p, bound_p = torch.full_like(z, INF), torch.zeros_like(z)
    within_ratio, bound_ratio = within_p, bound_p
    if top_p < 1:
        weights = exponential(z, z[0])
        before, errors = (w.cumsum(0) - w for w in weights)
        top_p = max(top_p, 0.0)
        threshold, rest = top_p * weights.value.sum(), weights.error.sum() - errors
        within_p = threshold - before
        bound_p = (1 - top_p) * errors + top_p * rest + SUM * EPS * (before + threshold)
    if min_p > 0:
        gap = z - z[0]
        within_ratio = gap - min(math.log(min_p), 0.0)
        # Of equal logits the ratio is exactly one.
        bound_ratio = torch.where(gap == 0, -1.0, EPS * (2 * z.abs() + z[0].abs() + 3 * gap.abs() + ENTRY))
    # What one filter removes for certain the other need not decide.
    either = (within_p.abs() <= bound_p) & (within_ratio >= -bound_ratio)
    either |= (within_ratio.abs() <= bound_ratio) & (within_p >= -bound_p)
    # The first token is always kept.
    close[order[1:]] = either[1:]
    return close


def softmax(logits: Tensor, t: float, filters: tuple[int, float, float], lse: float | None = None) -> Weights:
    """Of what the filters keep, normalised by the sum or by a given lse."""
    kept = reference.scaled_logits(reference.filtered(logits, t, *filters), t)
    if kept.max() == -INF or (lse is not None and not math.isfinite(lse)):
        return Weights(torch.zeros_like(kept), torch.zeros_like(kept))
    close = at_boundary(logits, t, *filters)
    z = torch.where(close, reference.scaled_logits(logits, t), kept)
    weight, error = exponential(z, z.max() if lse is None else torch.tensor(lse, dtype=torch.float64))
    weight, error = torch.where(kept > -INF, weight, 0.0), error + torch.where(close, weight, 0.0)
    if lse is not None:
        return Weights(weight, error)
    total, total_error = weight.sum(), error.sum()
    relative = total_error / (total - total_error).clamp(min=TINY) + SUM * EPS
    return Weights(weight / total, (error + weight * relative) / total)


def score(logits: Tensor, t: float, alpha: float, beta: float) -> Weights:
    z = reference.score_logits(logits, t, alpha, beta)
    score = reference.sigmoid_scores(logits, t, alpha, beta)
    return Weights(score, score * ((1 - score) * _score_rounding(z, alpha, beta) + ENTRY * EPS))


def _score_rounding(z: Tensor, alpha: float, beta: float) -> Tensor:
    return 3 * EPS * (torch.where(z > -INF, z, 0.0).abs() + abs(alpha)) / (beta - alpha)


def positive_part(p: Weights, q: Weights, possible: Tensor, reach: tuple[float, float] = (1.0, 1.0)) -> Weights:
    """max(P p - q, 0), P between the two numbers of `reach`; exactly zero but at the `possible` tokens."""
    low, high = reach
    difference = torch.where(possible, high * p.value - q.value, 0.0)
    error = torch.where(possible, high * p.error + (high - low) * p.value + q.error, 0.0)
    return Weights(difference.clamp(min=0), torch.where(difference + error > 0, error, 0.0))


def score_residual(
    target: Tensor, draft: Tensor, t: float, alpha: float, beta: float, p: Weights, q: Weights
) -> Weights:
    """max(p^ - q^, 0) as p^ (1 - q^) (1 - exp(-gap)), gap = (z_p - z_q) / (beta - alpha), which loses no digits where
    the scores are nearly equal."""
    z_p, z_q = (reference.score_logits(logits, t, alpha, beta) for logits in (target, draft))
    both = (z_p > -INF) & (z_q > -INF)
    z_p, z_q = torch.where(both, z_p, 0.0), torch.where(both, z_q, 0.0)
    gap = (z_p - z_q) / (beta - alpha)
    gap_rounding = torch.where(gap == 0, 0.0, 2 * EPS * (z_p.abs() + z_q.abs()) / (beta - alpha))
    largest = p.value * torch.sigmoid((alpha - z_q) / (beta - alpha))
    value, upper = (largest * -torch.expm1(-each.clamp(min=0)) for each in (gap, gap + gap_rounding))
    relative = p.error / p.value.clamp(min=TINY) + q.value * _score_rounding(z_q, alpha, beta) + 2 * ENTRY * EPS
    error = upper - value + upper * relative
    return Weights(torch.where(both, value, p.value), torch.where(both, error, p.error))
