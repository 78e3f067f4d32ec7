"""The result of an op against the oracle's, row by row.

The oracle computes in float64, an implementation in float32 or better. Wherever the two may disagree, a number of the
call lies so close to its threshold that the oracle itself decides otherwise as soon as that number moves a little. So a
row must equal the oracle's, or the oracle's with its other uniforms, filters and `draft_lse` moved by the bound of
`_bound`, or by a half, a quarter .. of it, each up or down; and its next token may be any whose interval of the CDF is
no further from the uniform than the bound. What is exact does not move: a uniform of 0, a filter that is off, an lse
that is not finite; and greedy rows depend on none of these numbers.

A token that is the argmax of scores with Gumbel noise may be any whose score lies closer to the largest than the two
bounds of `_score_bounds`.
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
# A number may move by less than its bound.
SHARES = [2.0**-k for k in range(12)]
# Names of arguments that move together, and of those that draw the next token.
MOVED = (("accept_uniforms",), ("draft_lse",), ("top_p", "min_p"))
DRAWING = ("sample_uniforms", "uniforms")


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: how many `rows` there are, how many of them differ from the oracle by float32 `rounding`,
    and which are `wrong`."""

    rows: int
    rounding: int
    wrong: list[int]


def compare(case: Case, got: Tensor | tuple[Tensor, ...]) -> Comparison:
    """Compare the result of an op with the oracle's, row by row.

    A row must equal the oracle's, bit for bit, but for rounding (of which "exact_" cases have none); `sample`'s lse
    must be close. Wrong shapes, dtypes or a wrong number of outputs raise AssertionError.
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
    """[B] bool: the rows that float32 rounding may decide."""
    args, expected = on_cpu(case.args), case.expected
    found = torch.zeros(len(expected[0]), dtype=torch.bool)
    changes = (nullcontext, partial(_scores, _second)) if case.op.endswith("gumbel") else (nullcontext,)
    for moved, change in itertools.product(_moved(case.op, args, 1.0, (*MOVED, DRAWING)), changes):
        with change():
            found |= ~_equal_rows(case.op, expected, oracle(case.op, moved))
    return found


def _equal_rows(op: str, expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> Tensor:
    """[B] bool."""
    if op == "filter_logits":
        # Zeros keep their sign.
        return ((expected[0] == got[0]) & (expected[0].signbit() == got[0].signbit())).all(1)
    if op == "sample_gumbel":
        return expected[0] == got[0]
    if op == "sample":
        # Exact where it is infinite, and 0 in greedy rows.
        lse, tolerance = expected[1], 1e-6 * (1 + expected[1].abs())
        close = (got[1] == lse) | ((lse != 0) & lse.isfinite() & ((got[1] - lse).abs() <= tolerance))
        return close & (expected[0] == got[0])
    return (expected[0] == got[0]).all(1) & (expected[1] == got[1])


def _bound(temperature: Tensor | None, like: Tensor) -> Tensor:
    """How far a number may move in each row: scaled logits z of some tens have probabilities with a relative error of
    some tens of 2**-24, and sums of them a few more. A low temperature makes the logits as much larger."""
    t = torch.ones(len(like)) if temperature is None else temperature
    bound = (2.0**-15 / t.double().clamp(min=2.0**-9, max=1.0)).nan_to_num()
    return bound.view(-1, *[1] * (like.dim() - 1))


@contextmanager
def _drawing(op: str, row: dict[str, Any], got: tuple[Tensor, ...]) -> Iterator[None]:
    """While active, the oracle draws the next token of a row that was got, if the uniform is as close to its interval
    of the CDF as the bound. No share of the bound is sure to meet the interval of an unlikely token. With Gumbel noise
    it draws every token that was got, if its score is as close to the largest as their bounds."""

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

    # The oracle draws from every row, each time that it is called.
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
    """While active, the oracle's scores are changed by a function of the scores and their bounds."""
    gumbel_scores = reference.gumbel_scores

    def changed(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
        scores = gumbel_scores(logits, noise, temperature)
        return change(scores, _score_bounds(scores - noise, noise))

    with mock.patch.object(reference, "gumbel_scores", changed):
        yield


def _second(scores: Tensor, bounds: Tensor) -> Tensor:
    """The largest score falls behind all that are as close as their bounds."""
    largest = scores.argmax()
    bounds[largest] *= -1
    return scores + bounds


def _score_bounds(gap: Tensor, noise: Tensor) -> Tensor:
    """How far float32 may be from the score gap + g of each token.

    A subtraction, the two roundings of a product with 1 / T, the logarithms and the sum each have an error below 2**-23
    of what they return, and of 1 near a zero of log; 2**-20 is more than all of them. w is rounded twice, and is at
    most 1 - 2**-24; g has what that makes of it."""
    w = -torch.expm1(-torch.exp(-noise))
    low, high = ((w * factor).clamp(2.0**-33, LARGEST) for factor in (1 - 2.0**-22, 1 + 2.0**-22))
    low_g, high_g = (-torch.log(-torch.log1p(-x)) for x in (high, low))
    return 2.0**-20 * (1 + gap.abs() + noise.abs()) + torch.maximum(high_g, noise) - torch.minimum(low_g, noise)


def _moved(
    op: str, args: dict[str, Any], share: float, groups: tuple[tuple[str, ...], ...]
) -> Iterator[dict[str, Any]]:
    """The arguments moved by a share of the bound, with every choice of directions."""
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
                    # Between 0 and 1, without the ends. Beyond 1 a draft of p = q is rejected; beyond both the first or
                    # the last token is drawn, however unlikely it is.
                    lowest = -math.inf if name in DRAWING else 1 - BELOW_ONE_FLOAT64
                    endless = name in DRAWING or (name == "accept_uniforms" and op != "verify_block")
                    highest = math.inf if endless else BELOW_ONE_FLOAT64
                    moved[name] = torch.where((x > 0) & (x < 1), changed.clamp(lowest, highest), x)
        yield moved
