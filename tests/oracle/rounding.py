"""What float32 rounding may do to a row: the set of its lawful results. The bounds are derived in `rounding_rows`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_specops import reference

from .rounding_bounds import ENTRY, EPS, SUM, TINY, exponential
from .rounding_filters import argmax_lenience_is_open, filters_of, lawful_row_pairs, lawful_rows

__all__ = ["Laws", "is_open", "lawful_results", "lse_is_lawful"]

INF = math.inf


@dataclass(frozen=True)
class _Weights:
    """[V] float64 weights and a bound on the float32 error of each."""

    value: Tensor
    error: Tensor

    def possible(self) -> Tensor:
        return self.value + self.error > 0

    def certain(self) -> bool:
        return bool((self.value - self.error > 0).any())

    def tokens(self, s: float) -> Tensor:
        """[V] bool: the tokens that the inverse CDF may return, in float32."""
        c, e = self.value.cumsum(0), self.error.cumsum(0)
        threshold = s * c[-1]
        slack = (1 - s) * e + s * (e[-1] - e) + SUM * EPS * (c + threshold)
        c_before, slack_before = (torch.cat((x.new_zeros(1), x[:-1])) for x in (c, slack))
        chosen = self.possible() & (c + slack > threshold) & (c_before - slack_before <= threshold)
        # Rounding may leave none above the threshold: then it is the last positive one.
        last = self.possible().nonzero()[-1:]
        chosen[last] |= c[last] - slack[last] <= threshold
        return chosen


# For each number of accepted drafts that is lawful: the tokens [V] that may come next (none: the token -1).
Laws = dict[int, Tensor]


def is_open(laws: Laws) -> bool:
    return len(laws) > 1 or any(int(tokens.sum()) > 1 for tokens in laws.values())


def lawful_results(op: str, args: dict[str, Any], b: int) -> Laws:
    logits = args["logits" if op == "sample" else "target_logits"][b]
    rows = logits if logits.dim() == 2 else logits[None]
    t = 1.0 if args.get("temperature") is None else float(args["temperature"][b])
    s = float(args["uniforms" if op == "sample" else "sample_uniforms"][b])
    drafts = [] if op == "sample" else args["draft_tokens"][b].tolist()
    scores = (args.get("alpha", -1e3), args.get("beta", 1e3)) if op == "verify_sigmoid" else None
    vocab_size = rows.shape[-1]
    nothing = torch.zeros(vocab_size, dtype=torch.bool)
    filters = filters_of(args, b)

    if not t >= 0:
        return {0: nothing}
    laws: Laws = {}
    for i, x in enumerate(drafts):
        in_vocab = 0 <= x < vocab_size
        if t == 0:
            lenience = args.get("argmax_lenience", 1.0)
            accepted = in_vocab and reference.accepts_greedily(rows[i], x, lenience)
            either = in_vocab and argmax_lenience_is_open(rows[i], x, lenience)
            if not accepted or either:
                laws[i] = _single(reference.argmax(rows[i]), nothing)
            if not accepted and not either:
                return laws
            continue
        if not in_vocab:
            laws[i] = nothing
            for row in lawful_rows(rows[i], t, filters):
                laws[i] = laws[i] | _target_weights(row, t, scores).tokens(s)
            return laws
        may_accept = False
        draft = None if args["draft_logits"] is None else args["draft_logits"][b, i]
        for target_row, draft_row in lawful_row_pairs(rows[i], draft, t, filters):
            accepted, tokens = _test(_position(args, b, i, target_row, draft_row), x, t, s, scores)
            may_accept = may_accept or accepted
            if tokens is not None:
                laws[i] = laws.get(i, nothing) | tokens
        if not may_accept:
            return laws
    k = len(drafts)
    laws[k] = nothing
    for row in lawful_rows(rows[k], t, filters):
        laws[k] = laws[k] | (_single(reference.argmax(row), nothing) if t == 0 else _softmax(row, t)[0].tokens(s))
    return laws


def _position(args: dict[str, Any], b: int, i: int, target: Tensor, draft: Tensor | None) -> dict[str, Any]:
    """The arguments of one position alone: batch and position 0, with these rows."""
    lse = args.get("draft_lse")
    return args | {
        "target_logits": target[None, None],
        "draft_logits": None if draft is None else draft[None, None],
        "draft_lse": None if lse is None else lse[b : b + 1, i : i + 1],
        "accept_uniforms": args["accept_uniforms"][b : b + 1, i : i + 1],
    }


def _test(
    args: dict[str, Any], x: int, t: float, s: float, scores: tuple[float, float] | None
) -> tuple[bool, Tensor | None]:
    """Of one position: whether x may be accepted, and if it may be rejected, the tokens that may come next."""
    p, q, residual = _pair(args, 0, 0, x, t, scores)
    ul = float(args["accept_uniforms"][0, 0]) * args.get("lenience", 1.0)
    slack = 1 + ENTRY * EPS
    p_low, p_high = float(p.value[x] - p.error[x]), float(p.value[x] + p.error[x])
    q_low, q_high = float(q.value[x] - q.error[x]), float(q.value[x] + q.error[x])
    if _has_mass(args, 0, 0, x, t):
        # A probability that vanishes, of a token that is not excluded, may count as zero or as positive.
        q_high = max(q_high, TINY)
    may_accept = q_high > 0 and p_high > 0 and ul * max(q_low, 0.0) < p_high * slack
    may_reject = q_low <= 0 or ul * q_high * slack >= p_low
    if not may_reject:
        return may_accept, None
    tokens = torch.zeros_like(p.value, dtype=torch.bool)
    if residual.possible().any():
        tokens |= residual.tokens(s)
    if not residual.certain():
        tokens |= _target_weights(args["target_logits"][0, 0], t, scores).tokens(s)
    return may_accept, tokens


def _single(token: int, nothing: Tensor) -> Tensor:
    return nothing if token < 0 else torch.arange(len(nothing)) == token


def _target_weights(logits: Tensor, t: float, scores: tuple[float, float] | None) -> _Weights:
    return _softmax(logits, t)[0] if scores is None else _score(logits, t, *scores)


def _has_mass(args: dict[str, Any], b: int, i: int, x: int, t: float) -> bool:
    """Whether the draft gives token x a probability above zero, however small."""
    draft, lse = args["draft_logits"], args.get("draft_lse")
    if draft is None:
        return True
    excluded = bool(reference.scaled_logits(draft[b, i, x], t) == -INF)
    return not excluded and (lse is None or math.isfinite(float(lse[b, i])))


def _pair(
    args: dict[str, Any], b: int, i: int, x: int, t: float, scores: tuple[float, float] | None
) -> tuple[_Weights, _Weights, _Weights]:
    """p, q and the residual of draft x at position i."""
    target = args["target_logits"][b, i]
    draft = None if args["draft_logits"] is None else args["draft_logits"][b, i]
    lse = args.get("draft_lse")
    if scores is not None:
        assert draft is not None
        return (
            _score(target, t, *scores),
            _score(draft, t, *scores),
            _score_residual(target, draft, t, *scores),
        )
    shape, p = _softmax(target, t)
    if draft is None:
        one_hot = torch.zeros_like(p.value)
        one_hot[x] = 1.0
        # p without x keeps the ratios of p: the normaliser drops out.
        rest = 1 - one_hot
        return p, _Weights(one_hot, torch.zeros_like(rest)), _Weights(shape.value * rest, shape.error * rest)
    q = _softmax(draft, t)[1] if lse is None else _softmax_by_lse(draft, t, float(lse[b, i]))
    if lse is None and torch.equal(reference.scaled_logits(target, t), reference.scaled_logits(draft, t)):
        zero = torch.zeros_like(p.value)
        return p, q, _Weights(zero, zero)
    # Where q is zero the residual is p; where p is zero it is zero.
    error = torch.where(p.value > 0, p.error + q.error, 0.0)
    difference = p.value - q.value
    return p, q, _Weights(difference.clamp(min=0), torch.where(difference + error > 0, error, 0.0))


def _softmax(logits: Tensor, t: float) -> tuple[_Weights, _Weights]:
    """softmax with the errors of the weights alone (a law does not change with its normaliser), and with all errors."""
    z = reference.scaled_logits(logits, t)
    if z.max() == -INF:
        zero = torch.zeros_like(z)
        return _Weights(zero, zero), _Weights(zero, zero)
    weight, error = exponential(z, z.max())
    total = weight.sum()
    weight, error = weight / total, error / total
    error = error + torch.where(weight < TINY, weight, 0.0)
    return _Weights(weight, error), _Weights(weight, error + weight * (error.sum() + SUM * EPS))


def _softmax_by_lse(logits: Tensor, t: float, lse: float) -> _Weights:
    z = reference.scaled_logits(logits, t)
    if not math.isfinite(lse):
        return _Weights(torch.zeros_like(z), torch.zeros_like(z))
    weight, error = exponential(z, torch.tensor(lse, dtype=torch.float64))
    return _Weights(weight, error + torch.where(weight < TINY, weight, 0.0))


def _score(logits: Tensor, t: float, alpha: float, beta: float) -> _Weights:
    z = reference.score_logits(logits, t, alpha, beta)
    finite = torch.where(z > -INF, z, 0.0)
    value = reference.sigmoid_scores(logits, t, alpha, beta)
    argument = 3 * EPS * (finite.abs() + abs(alpha)) / (beta - alpha)
    complement = torch.sigmoid((alpha - finite) / (beta - alpha))
    error = value * (complement * argument + ENTRY * EPS) + torch.where(value < TINY, value, 0.0)
    return _Weights(value, error)


def _score_residual(target: Tensor, draft: Tensor, t: float, alpha: float, beta: float) -> _Weights:
    """max(p^ - q^, 0) and its error, by the product form of `rounding_rows`."""
    width = beta - alpha
    p = _score(target, t, alpha, beta)
    z_p, z_q = (reference.score_logits(logits, t, alpha, beta) for logits in (target, draft))
    both = (z_p > -INF) & (z_q > -INF)
    z_p, z_q = torch.where(both, z_p, 0.0), torch.where(both, z_q, 0.0)
    complement = torch.sigmoid((alpha - z_q) / width)
    gap = (z_p - z_q) / width
    gap_error = torch.where(z_p == z_q, 0.0, 2 * EPS * (z_p.abs() + z_q.abs()) / width)
    value = p.value * complement * -torch.expm1(-gap.clamp(min=0))
    upper = p.value * complement * -torch.expm1(-(gap + gap_error).clamp(min=0))
    complement_argument = 3 * EPS * (z_q.abs() + abs(alpha)) / width * torch.sigmoid((z_q - alpha) / width)
    relative = torch.where(p.value > 0, p.error / p.value, 0.0) + complement_argument + 2 * ENTRY * EPS
    # The oracle subtracts two scores in float64.
    oracle = torch.where(value > 0, 2.0**-52 * p.value, 0.0)
    error = (upper - value) + upper * relative + oracle + torch.where(value < TINY, value, 0.0)
    return _Weights(torch.where(both, value, p.value), torch.where(both, error, p.error))


def lse_is_lawful(args: dict[str, Any], r: int, lse: float, token: int) -> bool:
    """Whether row r of `sample` may return this lse with this token: that of a lawful filtering, up to the float32
    error of the sum of weights, of the scaled maximum, and of the result."""
    t = 1.0 if args.get("temperature") is None else float(args["temperature"][r])
    for row in lawful_rows(args["logits"][r], t, filters_of(args, r)):
        z = reference.scaled_logits(row, t)
        exact = float(torch.logsumexp(z, 0))
        bound = float(_softmax(row, t)[0].error.sum()) + EPS * (SUM + 3 * abs(float(z.max())) + 2 * abs(exact))
        if z[token] > -INF and abs(lse - exact) <= bound:
            return True
    return False
