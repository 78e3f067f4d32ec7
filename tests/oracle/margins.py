"""Which decisions are too close for float32. Rows with such a decision are left out of the comparison with the oracle.

The oracle decides in float64, an implementation in float32. A decision is too close where a number and its threshold,
each within its bound (`bounds.py`), overlap:

    acceptance    u l q(x) and p(x); for `verify_block` u and h
    draw          s times the sum of all weights, and the prefix sum at a token that may be drawn but the last
    empty         whether a residual max(p - q, 0) has a positive entry
    filters       for `filter_logits` and the lse of `sample`, whether a token is kept
    greedy        argmax_lenience and the ratio to the largest

Everything else is exact, and is compared: the argmax, top_k, ties, padding, excluded tokens, rows without a law, and
rows of equal logits, whose residual is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_specops import reference

from .bounds import (
    ENTRY,
    EPS,
    SUM,
    TINY,
    Weights,
    at_boundary,
    exponential,
    positive_part,
    score,
    score_residual,
    softmax,
)

INF = math.inf


class Row(NamedTuple):
    """One sequence of a verify op, or one row of `sample`, which has no drafts."""

    target: Tensor  # [K+1, V]
    draft: Tensor | None  # [K, V]
    lse: Tensor | None  # [K]
    tokens: list[int]  # K
    u: list[float]  # K, times the lenience
    s: float
    temperature: float
    filters: tuple[int, float, float]
    scores: tuple[float, float] | None

    def is_draft(self, i: int) -> bool:
        return i < len(self.tokens) and 0 <= self.tokens[i] < self.target.shape[-1]

    def p(self, i: int) -> Weights:
        """Of row i: probabilities, or scores where they are compared with a draft's."""
        if self.scores is not None and i < len(self.tokens):
            return score(self.target[i], self.temperature, *self.scores)
        return softmax(self.target[i], self.temperature, self.filters)

    def q(self, i: int) -> Weights:
        if self.draft is None:
            one_hot = torch.zeros(self.target.shape[-1], dtype=torch.float64)
            one_hot[self.tokens[i]] = 1.0
            return Weights(one_hot, torch.zeros_like(one_hot))
        if self.scores is not None:
            return score(self.draft[i], self.temperature, *self.scores)
        return softmax(self.draft[i], self.temperature, self.filters, None if self.lse is None else float(self.lse[i]))

    def residual(self, i: int, p: Weights, q: Weights, reach: tuple[float, float] = (1.0, 1.0)) -> Weights:
        """max(P p - q, 0). It is exactly zero where p is, at the token of a one-hot draft, and where all logits are
        equal."""
        if self.scores is not None:
            return score_residual(self.target[i], self.draft[i], self.temperature, *self.scores, p, q)
        possible = p.possible()
        if self.draft is None:
            possible = possible & (q.value == 0)
        elif self.lse is None:
            z_p, z_q = (reference.scaled_logits(x[i], self.temperature) for x in (self.target, self.draft))
            possible = possible & (z_p != z_q).any()
        return positive_part(p, q, possible, reach)


def left_out(op: str, args: dict[str, Any], num_accepted: Tensor | None) -> Tensor:
    """[B] bool: the rows that have a decision too close for float32. `num_accepted` is the oracle's, of a verify op."""
    logits = args["logits" if op in ("sample", "filter_logits") else "target_logits"]
    rows = range(logits.shape[0])
    if op == "filter_logits":
        return torch.tensor([bool(at_boundary(logits[b], *_law(args, b)).any()) for b in rows], dtype=torch.bool)
    accepted = [0] * logits.shape[0] if num_accepted is None else num_accepted.tolist()
    return torch.tensor([any(_decisions(op, args, b, accepted[b])) for b in rows], dtype=torch.bool)


def lse_bound(args: dict[str, Any], r: int) -> float:
    """How far the lse of row r of `sample` may be from the oracle's: by the error of the sum of weights, of the scaled
    maximum, and of the result."""
    t, *filters = _law(args, r)
    z = reference.scaled_logits(reference.filtered(args["logits"][r], t, *filters), t)
    weights = exponential(z, z.max())
    relative = float(weights.error.sum() / weights.value.sum())
    return relative + EPS * (SUM + 3 * float(z.max().abs()) + 2 * float(torch.logsumexp(z, 0).abs()))


def _law(args: dict[str, Any], b: int) -> tuple[float, int, float, float]:
    """Temperature, top_k, top_p and min_p of a row."""
    t, top_k, top_p, min_p = (args.get(name) for name in ("temperature", "top_k", "top_p", "min_p"))
    return (
        1.0 if t is None else float(t[b]),
        0 if top_k is None else int(top_k[b]),
        1.0 if top_p is None else float(top_p[b]),
        0.0 if min_p is None else float(min_p[b]),
    )


def _decisions(op: str, args: dict[str, Any], b: int, n: int) -> Iterator[bool]:
    """For each decision of a row that accepts n drafts, whether it is too close."""
    t, *filters = _law(args, b)
    lenience = args.get("lenience", 1.0)
    is_sample = op == "sample"
    row = Row(
        target=args["logits"][b : b + 1] if is_sample else args["target_logits"][b],
        draft=None if is_sample or args["draft_logits"] is None else args["draft_logits"][b],
        lse=None if args.get("draft_lse") is None else args["draft_lse"][b],
        tokens=[] if is_sample else args["draft_tokens"][b].tolist(),
        u=[] if is_sample else [float(u) * lenience for u in args["accept_uniforms"][b]],
        s=float(args["uniforms" if is_sample else "sample_uniforms"][b]),
        temperature=t,
        filters=(int(filters[0]), *filters[1:]),
        scores=(args.get("alpha", -1e3), args.get("beta", 1e3)) if op == "verify_sigmoid" else None,
    )
    if t == 0:
        for i in range(n + 1):
            yield row.is_draft(i) and _greedy_is_close(row.target[i], row.tokens[i], args.get("argmax_lenience", 1.0))
    elif t > 0:
        yield is_sample and bool(at_boundary(row.target[0], t, *row.filters).any())
        yield from _block_decisions(row, n) if op == "verify_block" else _exact_decisions(row, n)


def _exact_decisions(row: Row, n: int) -> Iterator[bool]:
    """Of `verify_exact`, `verify_sigmoid` and `sample`: n acceptances, a rejection where a draft is left, a draw."""
    for i in range(n + 1):
        p, rest = row.p(i), None
        if row.is_draft(i):
            q = row.q(i)
            yield _acceptance_is_close(row.u[i], p, q, row.tokens[i])
            rest = row.residual(i, p, q)
    yield from _draw(rest, p, row.s)


def _block_decisions(row: Row, n: int) -> Iterator[bool]:
    """Of `verify_block`: h_n accepts, none after it does, a draw. P_i and h_i are intervals."""
    reach, targets, residuals = [(1.0, 1.0)], [], []
    for i in range(len(row.tokens) + 1):
        targets.append(row.p(i))
        if not row.is_draft(i) or not targets[i].value.any():
            break
        q = row.q(i)
        residuals.append(row.residual(i, targets[i], q, reach[i]))
        reach.append(_next_reach(reach[i], targets[i], q, row.tokens[i]))
        if reach[-1] == (0.0, 0.0):
            # Nothing behind can be accepted.
            break
    for i in range(max(n, 1), len(reach)):
        low, high = reach[i] if i == len(residuals) else _block_acceptance(reach[i], residuals[i])
        yield low <= row.u[i - 1] < high
    yield from _draw(residuals[n] if n < len(residuals) else None, targets[n], row.s)


def _next_reach(reach: tuple[float, float], p: Weights, q: Weights, x: int) -> tuple[float, float]:
    """min(P p(x) / q(x), 1), and 0 where q(x) is."""
    p_x, p_error, q_x, q_error = (float(w[x]) for w in (*p, *q))
    if q_x + q_error == 0:
        return 0.0, 0.0
    low, high = reach[0] * max(p_x - p_error, 0.0) / (q_x + q_error), reach[1] * (p_x + p_error)
    high = high / (q_x - q_error) if q_x > q_error else INF * high if high > 0 else 0.0
    low = low if low > TINY and q_x > q_error else 0.0
    return min(low, 1.0), min(max(high, TINY) if high > 0 else 0.0, 1.0)


def _block_acceptance(reach: tuple[float, float], residual: Weights) -> tuple[float, float]:
    """h = S / (S + 1 - P), S the sum of the residual."""
    least = float((residual.value - residual.error).clamp(min=0).sum()) * (1 - SUM * EPS)
    largest = float((residual.value + residual.error).sum()) * (1 + SUM * EPS)
    return tuple(1.0 if p == 1 else mass / (mass + 1 - p) for p, mass in zip(reach, (least, largest), strict=True))


def _acceptance_is_close(u: float, p: Weights, q: Weights, x: int) -> bool:
    p_x, p_error, q_x, q_error = (float(w[x]) for w in (*p, *q))
    may_accept = q_x + q_error > 0 and u * max(q_x - q_error, 0.0) < p_x + p_error
    may_reject = q_x - q_error <= 0 or u * (q_x + q_error) >= p_x - p_error
    return may_accept and may_reject


def _draw(residual: Weights | None, p: Weights, s: float) -> Iterator[bool]:
    """From the residual where it has a positive entry, else from p."""
    if int(p.possible().sum()) <= 1:
        return
    if residual is not None and residual.possible().any():
        # Otherwise float32 may take it for empty.
        yield not (residual.value > residual.error).any()
        p = residual
    yield _draw_is_close(p, s)


def _draw_is_close(weights: Weights, s: float) -> bool:
    possible = weights.possible()
    sums, errors = weights.value.cumsum(0), weights.error.cumsum(0)
    # An error before a token moves both sides, its share s of the threshold.
    bound = (1 - s) * errors + s * (errors[-1] - errors) + SUM * EPS * (sums + s * sums[-1])
    close = possible & ((sums - s * sums[-1]).abs() <= bound)
    # Nothing comes after the last token that may be drawn.
    close[possible.nonzero()[-1:]] = False
    return bool(close.any())


def _greedy_is_close(logits: Tensor, x: int, argmax_lenience: float) -> bool:
    z = reference.scaled_logits(logits, 0.0)
    if argmax_lenience == 1 or z[x] == -INF or z[x] == z.max():
        return False
    gap = float(z[x] - z.max())
    return abs(gap - math.log(argmax_lenience)) <= EPS * (float(z.max().abs()) + 3 * abs(gap) + ENTRY)
