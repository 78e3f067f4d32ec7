"""Rows of logits as weights, and the draw from them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Filters
from ..dense.filters import row_bounds, scale_kept
from ..dense.rows import FLOAT32_MAX, inverse_temperature, scale

# Logits that a thread handles at a time: few enough to stay in its cache.
READ = 2**16
# Vocabulary entries per tile of the two-level search in `draw`.
TILE = 1024


def rows_at_a_time(vocab_size: int) -> int:
    return max(1, READ * torch.get_num_threads() // vocab_size)


def runs(temperature: Tensor | None, batch: int) -> Iterator[tuple[bool, int, int]]:
    """Neighbouring sequences of one kind, as (whether they are sampled, first, last + 1). Those that are not sampled
    are greedy, or have a temperature that is no law."""
    if temperature is None:
        yield True, 0, batch
        return
    start = 0
    for is_sampled, run in groupby(temperature.tolist(), lambda t: t > 0):
        stop = start + len(list(run))
        yield is_sampled, start, stop
        start = stop


class Row(NamedTuple):
    """One row, with p = weights / total; a total of 0 is a row with no finite entry."""

    z: Tensor  # [V] scaled logits, -inf where masked or removed by a filter
    weights: Tensor  # [V] exp(z - maximum)
    total: float

    def times(self, factor: float) -> Tensor:
        """[V] factor p, in float32."""
        return self.weights * (factor / self.total) if self.total > 0 else torch.zeros_like(self.weights)


class Rows(NamedTuple):
    """C rows of each of B sequences."""

    z: Tensor  # [B, C, V]
    weights: Tensor  # [B, C, V]
    maximum: list[list[float]]  # [B][C]
    total: list[list[float]]  # [B][C]

    def at(self, b: int, i: int) -> Row:
        return Row(self.z[b, i], self.weights[b, i], self.total[b][i])

    def probabilities(self, tokens: Tensor) -> list[list[float]]:
        """[B, <= C] -> the probability of one token of each row, in float64."""
        z = self.z.gather(2, tokens.unsqueeze(-1)).squeeze(-1).tolist()
        return [
            [math.exp(z_x - z_max) / total if total > 0 else 0.0 for z_x, z_max, total in zip(*row, strict=False)]
            for row in zip(z, self.maximum, self.total, strict=True)
        ]


def read_rows(logits: Tensor, filters: Filters) -> Rows:
    """[B, C, V] and filters [B] -> the rows, of sequences whose temperature is above 0."""
    inverse = inverse_temperature(filters.temperature)
    bounds = row_bounds(logits, filters)
    if bounds is None:
        z = logits.float()
        if inverse is not None:
            z = z * inverse.view(-1, 1, 1)
    else:
        z = scale_kept(logits, inverse, bounds)
    z_max = z.amax(-1)
    maximum = z_max.tolist()
    # `scale` changes only NaN, infinite and overflown logits. They show in the maximum, which is NaN or infinite then;
    # what has fallen below the least float32 weighs nothing beside a larger maximum.
    if bounds is None and not all(-FLOAT32_MAX < each < FLOAT32_MAX for row in maximum for each in row):
        z = scale(logits, inverse)
        z_max = z.amax(-1)
        maximum = z_max.tolist()
    weights = (z - z_max.clamp(min=-FLOAT32_MAX).unsqueeze(-1)).exp_()
    return Rows(z, weights, maximum, weights.sum(-1, dtype=torch.float64).tolist())


def draw(weights: list[Tensor], uniforms: Tensor) -> list[int]:
    """B times [V], [B] -> B tokens by inverse CDF; -1 for weights that are all zero."""
    if len(weights[0]) > TILE:
        return [_draw_by_tiles(row, u) for row, u in zip(weights, uniforms.tolist(), strict=True)]
    cdf = torch.stack(weights).cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1]
    tokens = torch.searchsorted(cdf, (uniforms * total).unsqueeze(-1), right=True).squeeze(-1).tolist()
    return [
        -1 if mass == 0 else token if token < len(row) else _last_positive(row)
        for token, mass, row in zip(tokens, total.tolist(), weights, strict=True)
    ]


def _draw_by_tiles(weights: Tensor, u: float) -> int:
    """[V] -> the token: find the tile, then the token in it."""
    whole = len(weights) // TILE * TILE
    tiles = [weights[:whole].view(-1, TILE), weights[whole:].view(1, -1)]
    mass = [each for some in tiles for each in some.sum(-1, dtype=torch.float64).tolist()]
    cdf = list(accumulate(mass, initial=0.0))
    if cdf[-1] == 0:
        return -1
    threshold = u * cdf[-1]
    tile = bisect_right(cdf, threshold) - 1
    if tile == len(mass):
        return _last_positive(weights)
    inside = weights[tile * TILE : (tile + 1) * TILE]
    token = int(torch.searchsorted(inside.cumsum(0, dtype=torch.float64), threshold - cdf[tile], right=True))
    return tile * TILE + (token if token < len(inside) else _last_positive(inside))


def _last_positive(weights: Tensor) -> int:
    """Where rounding leaves no sum above the threshold."""
    return int(weights.nonzero()[-1])
