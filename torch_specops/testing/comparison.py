"""Compare the result of an op with the result of the oracle, row by row.

The oracle computes in float64, and an implementation in float32 or better. Their results may differ only if a number of
the call is so close to its threshold that a small change of the number also changes the oracle's result. So the
acceptance uniforms, the filters and `draft_lse` are changed by the bound of `_bound`, by half of it, by a quarter of it
and so on, each up and down. A row must equal the oracle's result before or after one of these changes. The next token
may be any token whose interval of the CDF is no further from the uniform than `_bound`.

Exact numbers are not changed: a uniform of 0, a filter that is off, an lse that is not finite. Greedy rows depend on
none of these numbers.

A token drawn with Gumbel noise may be any token whose score is below the largest by at most the sum of both bounds
(`_score_bounds`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import reference
from .cases import BELOW_ONE_FLOAT64, Case, on_cpu, oracle

# The largest w = 1 - u of Gumbel noise in float32.
LARGEST = 1.0 - 2.0**-24
# A number is changed by these shares of its bound.
SHARES = [2.0**-k for k in range(12)]
# Groups of arguments that are changed together.
MOVED = (("accept_uniforms",), ("draft_lse",), ("top_p", "min_p"))
# The uniforms with which the next token is drawn; the name depends on the op.
DRAWING = ("sample_uniforms", "uniforms")


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: the number of `rows`, the number of rows that differ from the oracle only by float32
    `rounding`, and the indices of the `wrong` rows."""

    rows: int
    rounding: int
    wrong: list[int]


def compare(case: Case, got: Tensor | tuple[Tensor, ...]) -> Comparison:
    """Compare the result of an op with the result of the oracle, row by row.

    A row must be bitwise equal to the oracle's row, unless float32 rounding may decide the result; cases named
    "exact_.." allow no difference. The lse of `sample` must be close. Raises AssertionError for wrong shapes, wrong
    dtypes or a wrong number of outputs.
    """
    args, expected = on_cpu(case.args), case.expected
    got = tuple(x.cpu() for x in ((got,) if isinstance(got, Tensor) else got))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected], (
        f"{case.name}: expected {[(list(x.shape), x.dtype) for x in expected]}, "
        f"got {[(list(x.shape), x.dtype) for x in got]}"
    )
    rounding, wrong = 0, []
    for b in (~_equal_rows(case.op, expected, got)).nonzero().flatten().tolist():
        row = {name: x[b : b + 1] if isinstance(x, Tensor) else x for name, x in args.items()}
        got_row = tuple(x[b : b + 1] for x in got)
        shares = () if case.name.startswith("exact_") else SHARES
        choices = (moved for share in shares for moved in _moved(case.op, row, share, MOVED))
        with _drawing(case.op, row, got_row):
            is_rounding = any(_equal_rows(case.op, oracle(case.op, moved), got_row) for moved in choices)
        if is_rounding:
            rounding += 1
        else:
            wrong.append(b)
    return Comparison(len(got[0]), rounding, wrong)


def rounding_rows(case: Case) -> Tensor:
    """[B] bool, True for rows whose result float32 rounding may change."""
    args, expected = on_cpu(case.args), case.expected
    may_differ = torch.zeros(len(expected[0]), dtype=torch.bool)
    changes = (nullcontext, partial(_scores, _second)) if case.op.endswith("gumbel") else (nullcontext,)
    for moved, change in itertools.product(_moved(case.op, args, 1.0, (*MOVED, DRAWING)), changes):
        with change():
            may_differ |= ~_equal_rows(case.op, expected, oracle(case.op, moved))
    return may_differ


def _equal_rows(op: str, expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> Tensor:
    """[B] bool, True for rows with equal results."""
    if op == "filter_logits":
        # Compare signs too, because the op must not change the sign of a zero.
        return ((expected[0] == got[0]) & (expected[0].signbit() == got[0].signbit())).all(1)
    if op == "sample_gumbel":
        return expected[0] == got[0]
    if op == "sample":
        # An infinite lse must be equal, and so must the lse 0 of a greedy row. Others may differ by rounding.
        lse, tolerance = expected[1], 1e-6 * (1 + expected[1].abs())
        close = (got[1] == lse) | ((lse != 0) & lse.isfinite() & ((got[1] - lse).abs() <= tolerance))
        return close & (expected[0] == got[0])
    return (expected[0] == got[0]).all(1) & (expected[1] == got[1])


def _bound(temperature: Tensor | None, like: Tensor) -> Tensor:
    """The most that a number may be changed in each row. For scaled logits of size 10 to 100, probabilities have a
    relative error of some tens of 2**-24, and their sums have a slightly larger error. A low temperature makes the
    logits larger, and therefore also the bound."""
    t = torch.ones(len(like)) if temperature is None else temperature
    bound = (2.0**-15 / t.double().clamp(min=2.0**-9, max=1.0)).nan_to_num()
    return bound.view(-1, *[1] * (like.dim() - 1))


@contextmanager
def _drawing(op: str, row: dict[str, Any], got: tuple[Tensor, ...]) -> Iterator[None]:
    """Inside the `with` block, the oracle draws the same next token as `got`, if the token's interval of the CDF is no
    further from the uniform than `_bound`. (Changing the uniform by shares of the bound could miss the interval of an
    unlikely token.) With Gumbel noise, the oracle draws each token of `got` whose score is within the bounds of the
    largest score."""

    def draw(weights: Tensor, s: float) -> int:
        sums, total = weights.cumsum(0), weights.sum()
        if 0 < s < 1 and 0 <= token < len(weights) and weights[token] > 0:
            below = sums[token - 1] if token > 0 else 0.0
            if sums[token] > (s - bound) * total and below <= (s + bound) * total:
                return token
        return inverse_cdf(weights, s)

    def prefer(scores: Tensor, bounds: Tensor) -> Tensor:
        token = next(tokens)
        if 0 <= token < len(scores) and scores[token] + bounds[token] >= (scores - bounds).max():
            scores[token] = math.inf
        return scores

    # Cycle through the tokens, because the oracle is called several times, and draws from every row each time.
    tokens = itertools.cycle(got[0].flatten().tolist())
    token, inverse_cdf = -1, reference.inverse_cdf
    if op == "sample":
        token = int(got[0])
    elif op not in ("filter_logits", "sample_gumbel") and 0 <= got[1] < got[0].shape[1]:
        token = int(got[0][0, got[1]])
    bound = float(_bound(row.get("temperature"), got[-1]))
    with mock.patch.object(reference, "inverse_cdf", draw), _scores(prefer):
        yield


@contextmanager
def _scores(change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Inside the `with` block, the oracle's scores are changed by `change`, a function of the scores and their
    bounds."""
    gumbel_scores = reference.gumbel_scores

    def changed(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
        scores = gumbel_scores(logits, noise, temperature)
        return change(scores, _score_bounds(scores - noise, noise))

    with mock.patch.object(reference, "gumbel_scores", changed):
        yield


def _second(scores: Tensor, bounds: Tensor) -> Tensor:
    """Lower the largest score by its bound, and raise all others by theirs. If another score is within the bounds, it
    becomes the largest."""
    largest = scores.argmax()
    bounds[largest] *= -1
    return scores + bounds


def _score_bounds(gap: Tensor, noise: Tensor) -> Tensor:
    """The largest error of a score gap + g in float32, for each token.

    The subtraction, the two roundings of a product with 1 / T, the logarithms and the sum each have an error below
    2**-23 of their result (near a zero of log, of 1). 2**-20 exceeds the total of these errors. In addition, w is
    rounded twice and is at most 1 - 2**-24, which also changes g."""
    w = -torch.expm1(-torch.exp(-noise))
    low, high = ((w * factor).clamp(2.0**-33, LARGEST) for factor in (1 - 2.0**-22, 1 + 2.0**-22))
    low_g, high_g = (-torch.log(-torch.log1p(-x)) for x in (high, low))
    return 2.0**-20 * (1 + gap.abs() + noise.abs()) + torch.maximum(high_g, noise) - torch.minimum(low_g, noise)


def _moved(
    op: str, args: dict[str, Any], share: float, groups: tuple[tuple[str, ...], ...]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments, with each group changed by a share of the bound, in all combinations of up and down."""
    names = [[name for name in together if args.get(name) is not None] for together in groups]
    for signs in itertools.product((-1, 1), repeat=sum(map(bool, names))):
        moved = dict(args)
        for sign, together in zip(signs, filter(None, names), strict=True):
            for name in together:
                x = args[name].double()
                changed = x + sign * share * _bound(args.get("temperature"), x)
                if name == "draft_lse":
                    moved[name] = torch.where(x.isfinite(), changed, x)
                else:
                    # Keep changed numbers strictly between 0 and 1, with two exceptions. `accept_uniforms` may rise
                    # above 1 (not in `verify_block`), so that the oracle too can reject a draft with p = q. Numbers in
                    # DRAWING may leave [0, 1), and then draw the first or the last token.
                    lowest = -math.inf if name in DRAWING else 1 - BELOW_ONE_FLOAT64
                    endless = name in DRAWING or (name == "accept_uniforms" and op != "verify_block")
                    highest = math.inf if endless else BELOW_ONE_FLOAT64
                    moved[name] = torch.where((x > 0) & (x < 1), changed.clamp(lowest, highest), x)
        yield moved
