"""What float32 rounding may do to a row of `verify_block`: the set of its lawful results.

P_i and the acceptance probabilities h_i are intervals here. A draft whose uniform lies below the interval is accepted,
one above it is not, one inside may be either; the last accepted draft decides.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from torch_specops import reference

from .rounding import Laws, _has_mass, _pair, _softmax, _Weights, lawful_results
from .rounding_bounds import ENTRY, EPS, SUM, TINY

__all__ = ["lawful_block_results"]


class _Interval(NamedTuple):
    low: float
    value: float
    high: float


def lawful_block_results(args: dict[str, Any], b: int) -> Laws:
    """As `lawful_results`, for `verify_block`."""
    t = 1.0 if args.get("temperature") is None else float(args["temperature"][b])
    if not t > 0:
        return lawful_results("verify_exact", args, b)
    rows, s = args["target_logits"][b], float(args["sample_uniforms"][b])
    drafts = args["draft_tokens"][b].tolist()
    reach = [_Interval(1.0, 1.0, 1.0)]
    pairs: list[tuple[_Weights, _Weights]] = []
    for i, x in enumerate(drafts):
        if not 0 <= x < rows.shape[-1] or not _softmax(rows[i], t)[0].possible().any():
            break
        p, q, _ = _pair(args, b, i, x, t, None)
        pairs.append((p, q))
        reach.append(_next_reach(reach[i], p, q, x, _has_mass(args, b, i, x, t)))

    end = len(pairs)
    residuals = [_residual(args, b, i, t, reach[i], *pairs[i]) for i in range(end)]
    laws: Laws = {}
    for n in range(end, -1, -1):
        low, high = (1.0, 1.0) if n == 0 else _acceptance(reach[n], None if n == end else residuals[n])
        u = 0.0 if n == 0 else float(args["accept_uniforms"][b, n - 1])
        if u < high:
            laws[n] = torch.zeros(rows.shape[-1], dtype=torch.bool)
            if n < end and residuals[n].possible().any():
                laws[n] |= residuals[n].tokens(s)
            if n == end or not residuals[n].certain():
                laws[n] |= _softmax(rows[n], t)[0].tokens(s)
        if u < low:
            break
    return laws


def _next_reach(reach: _Interval, p: _Weights, q: _Weights, x: int, has_mass: bool) -> _Interval:
    """min(P p(x) / q(x), 1). A probability that vanishes, of a token that is not excluded, may count as zero or not."""
    if not has_mass:
        return _Interval(0.0, 0.0, 0.0)
    p_x, p_error, q_x, q_error = (float(w[x]) for w in (p.value, p.error, q.value, q.error))
    value = min(reach.value * p_x / q_x, 1.0) if q_x > 0 else 0.0
    slack = 1 + ENTRY * EPS
    highest, lowest = reach.high * (p_x + p_error) * slack, reach.low * max(p_x - p_error, 0.0) / slack
    high = min(highest / (q_x - q_error), 1.0) if q_x > q_error else float(highest > 0)
    low = min(lowest / max(q_x + q_error, TINY), 1.0) if q_x > TINY else 0.0
    if low < TINY and high > 0:
        low, high = 0.0, max(high, TINY)
    return _Interval(low, value, high)


def _residual(args: dict[str, Any], b: int, i: int, t: float, reach: _Interval, p: _Weights, q: _Weights) -> _Weights:
    """max(P p - q, 0) at row i."""
    target, draft = args["target_logits"][b, i], args["draft_logits"]
    scaled = reference.scaled_logits(target, t)
    is_softmax = draft is not None and args.get("draft_lse") is None
    if is_softmax and torch.equal(scaled, reference.scaled_logits(draft[b, i], t)):
        zero = torch.zeros_like(p.value)
        return _Weights(zero, zero)
    # Where p is zero the residual is zero, and so it is at the token of a one-hot draft.
    possible = scaled > -math.inf
    if draft is None:
        possible = possible & (q.value == 0)
    rounding = 2 * EPS * reach.value * p.value
    above = reach.high * (p.value + p.error) - reach.value * p.value + q.error + rounding
    below = reach.value * p.value - reach.low * (p.value - p.error) + q.error + rounding
    difference = torch.where(possible, reach.value * p.value - q.value, 0.0)
    error = torch.where(possible, torch.maximum(above, below), 0.0)
    error += torch.where(possible & (reach.value * p.value < TINY), TINY, 0.0)
    return _Weights(difference.clamp(min=0), torch.where(difference + error > 0, error, 0.0))


def _acceptance(reach: _Interval, residual: _Weights | None) -> tuple[float, float]:
    """The least and the largest h: P at the end of the block, S / (S + 1 - P) before."""
    if residual is None:
        return reach.low, reach.high
    largest = float((residual.value + residual.error).sum()) * (1 + SUM * EPS)
    least = float((residual.value - residual.error).clamp(min=0).sum()) * (1 - SUM * EPS)
    low = 1.0 if reach.low == 1 else least / (least + 1 - reach.low)
    high = 1.0 if reach.high == 1 else largest / (largest + 1 - reach.high)
    return low, high
