"""What float32 rounding may do to a filter: the lawful results of filtering a row.

top_k compares logits, so it has one result, and so have ties. The mass before a token in float32 may fall on either
side of top_p, and a probability on either side of min_p times the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_specops import reference

from .rounding_bounds import ENTRY, EPS, SUM, TINY, exponential

__all__ = ["argmax_lenience_is_open", "filters_of", "lawful_row_pairs", "lawful_rows", "single_rows"]

INF = math.inf
FILTERS = ("top_k", "top_p", "min_p")
Filters = tuple[int, float, float]
Bounds = tuple[float, int]


def filters_of(args: dict[str, Any], b: int) -> Filters:
    top_k, top_p, min_p = (args.get(name) for name in FILTERS)
    return (
        0 if top_k is None else int(top_k[b]),
        1.0 if top_p is None else float(top_p[b]),
        0.0 if min_p is None else float(min_p[b]),
    )


def lawful_rows(logits: Tensor, t: float, filters: Filters) -> list[Tensor]:
    """The [V] logits as filtering may leave them, the oracle's result first."""
    if filters == (0, 1.0, 0.0):
        return [logits]
    bounds = reference.filter_bounds(logits, t, *filters)
    some_or_all = t > 0 and bounds[0] > -INF and bounds[1] < len(logits)
    others = _lawful_bounds(logits, t, *filters) - {bounds} if some_or_all else set()
    return [_kept(logits, each) for each in (bounds, *sorted(others))]


def lawful_row_pairs(
    target: Tensor, draft: Tensor | None, t: float, filters: Filters
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The filtered rows of a position. Rows of equal logits are filtered alike."""
    targets = lawful_rows(target, t, filters)
    if draft is None:
        yield from ((row, None) for row in targets)
    elif torch.equal(reference.scaled_logits(target, 0.0), reference.scaled_logits(draft, 0.0)):
        yield from zip(targets, lawful_rows(draft, t, filters), strict=True)
    else:
        yield from itertools.product(targets, lawful_rows(draft, t, filters))


def single_rows(args: dict[str, Any], b: int) -> Iterator[dict[str, Any]]:
    """The arguments of verify row b alone, a batch of one, with its logits as filtering may leave them: every
    combination of its positions."""
    t = 1.0 if args.get("temperature") is None else float(args["temperature"][b])
    filters = filters_of(args, b)
    single = {
        name: value[b : b + 1] if isinstance(value, Tensor) else value
        for name, value in args.items()
        if name not in FILTERS
    }
    target, draft = args["target_logits"][b], args["draft_logits"]
    positions = [
        list(lawful_row_pairs(target[i], None if draft is None else draft[b, i], t, filters))
        for i in range(target.shape[0] - 1)
    ]
    for pairs in itertools.product(*positions):
        drafts = [row for _, row in pairs if row is not None]
        single |= {"draft_logits": torch.stack(drafts)[None]} if drafts else {}
        for bonus in lawful_rows(target[-1], t, filters):
            yield single | {"target_logits": torch.stack([*(row for row, _ in pairs), bonus])[None]}


def argmax_lenience_is_open(logits: Tensor, x: int, argmax_lenience: float) -> bool:
    """Whether rounding may decide if a greedy row takes x."""
    z = reference.scaled_logits(logits, 0.0)
    if argmax_lenience == 1 or z[x] == -INF or z[x] == z.max():
        return False
    gap = float(z[x] - z.max())
    return abs(gap - math.log(argmax_lenience)) <= EPS * (float(z.max().abs()) + 3 * abs(gap) + ENTRY)


def _kept(logits: Tensor, bounds: Bounds) -> Tensor:
    x, (cut, first) = reference.comparable_logits(logits), bounds
    kept = (x > cut) | ((x == cut) & (torch.arange(len(x)) >= first))
    return torch.where(kept & (x > -INF), logits, -INF)


def _lawful_bounds(logits: Tensor, t: float, top_k: int, top_p: float, min_p: float) -> set[Bounds]:
    """(cut, first) of every lawful result, of a row with a law and a finite entry."""
    x = reference.comparable_logits(logits)
    # Ascending and stable, then reversed: of equal logits the higher index comes first.
    order = x.sort(stable=True).indices.flip(0)
    order = order[x[order] > -INF]
    if 0 < top_k < len(order):
        order = order[x[order] >= x[order[top_k - 1]]]
    z = reference.scaled_logits(logits, t)[order]
    by_mass = _last_by_mass(z, top_p) if top_p < 1 else {len(order) - 1}
    by_ratio = _last_by_ratio(z, x[order], min_p) if min_p > 0 else {len(order) - 1}
    # Filters keep the top of one order, so both together keep what the stricter one keeps.
    lasts = {min(pair) for pair in itertools.product(by_mass, by_ratio)}
    return {(float(x[order[last]]), _first_of_equals(x, order, last)) for last in lasts}


def _first_of_equals(x: Tensor, order: Tensor, last: int) -> int:
    """The lowest index among those kept that equal the last one kept."""
    kept = order[: last + 1]
    return int(kept[x[kept] == x[order[last]]].min())


def _last_by_mass(z: Tensor, top_p: float) -> set[int]:
    """Places in the descending order at which top_p may end: those of which the token is kept, and the next is not."""
    top_p = max(top_p, 0.0)
    weight, error = exponential(z, z[0])
    error = error + torch.where(weight < TINY, weight, 0.0)
    before, before_error = (torch.cat((w.new_zeros(1), w.cumsum(0)[:-1])) for w in (weight, error))
    total, total_error = weight.sum(), error.sum()
    slack = (1 - top_p) * before_error + top_p * (total_error - before_error) + SUM * EPS * (before + top_p * total)
    may_keep, may_remove = before - slack < top_p * total, before + slack >= top_p * total
    # The first token is always kept, and nothing comes after the last.
    may_keep[0], may_remove[0] = True, False
    may_end = torch.cat((may_remove[1:], torch.ones(1, dtype=torch.bool)))
    return {int(last) for last in (may_keep & may_end).nonzero()}


def _last_by_ratio(z: Tensor, x: Tensor, min_p: float) -> set[int]:
    """The same for min_p, which keeps equal logits or none of them."""
    gap = z - z[0]
    slack = torch.where(z == z[0], 0.0, EPS * (2 * z.abs() + z[0].abs() + 3 * gap.abs() + ENTRY))
    lowest = min(math.log(min_p), 0.0)
    may_keep, may_remove = gap + slack >= lowest, gap - slack < lowest
    is_last_equal = torch.cat((x[1:] < x[:-1], torch.ones(1, dtype=torch.bool)))
    may_end = torch.cat((may_remove[1:], torch.ones(1, dtype=torch.bool)))
    return {int(last) for last in (may_keep & may_end & is_last_equal).nonzero()}
