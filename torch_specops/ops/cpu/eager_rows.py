"""Rows of logits as weights, draws from them, and their argmax."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Filters
from ..tracing import is_eager_cpu
from .filters import is_kept, row_bounds, scale_kept
from .softmax import FLOAT32_MAX, FLOAT32_TINY, TILE, argmax

# The eager form loops over sequences. A batch of more than EAGER_MAX_BATCH sampled sequences takes the dense form if
# its rows are shorter than EAGER_MIN_VOCAB.
EAGER_MAX_BATCH, EAGER_MIN_VOCAB = 16, 1024
# The most logits that a thread processes at a time, so that they stay in its cache.
CACHED_LOGITS = 2**16
# Smaller weights have lost digits.
LEAST_EXACT_WEIGHT = 2.0**-100
# Vocabulary entries per tile of `argmax_by_tiles`, and the most logits that are searched without tiles.
ARGMAX_TILE, ARGMAX_MAX_UNTILED = 128, 2**15


def rows_at_a_time(vocab_size: int) -> int:
    return max(1, CACHED_LOGITS * torch.get_num_threads() // vocab_size)


def takes_dense_form(logits: Tensor, temperature: Tensor | None) -> bool:
    """True for a traced or empty call, and if computing all rows is cheaper than finding the rows that are needed."""
    if not is_eager_cpu(logits) or logits.shape[0] == 0:
        return True
    if logits.shape[-1] >= EAGER_MIN_VOCAB or logits.shape[0] <= EAGER_MAX_BATCH:
        return False
    return temperature is None or int((temperature > 0).sum()) > EAGER_MAX_BATCH


def runs(logits: Tensor, temperature: Tensor | None) -> Iterator[tuple[bool, slice]]:
    """Runs of adjacent sequences of one kind, as (True if they are sampled, their slice). A run of sampled sequences is
    as long as fits in the cache, at least 1. The others are greedy, or have a negative or NaN temperature."""
    temperatures = [1.0] * logits.shape[0] if temperature is None else temperature.tolist()
    if len(temperatures) == 1:
        yield temperatures[0] > 0, slice(0, 1)
        return
    size = max(1, rows_at_a_time(logits.shape[-1]) // logits.shape[1:-1].numel())
    start = 0
    for is_sampled, run in groupby(temperatures, lambda t: t > 0):
        stop = start + len(list(run))
        step = size if is_sampled else stop - start
        for first in range(start, stop, step):
            yield is_sampled, slice(first, min(first + step, stop))
        start = stop


def inverse_of(temperature: Tensor | None) -> Tensor | None:
    """1 / T of sampled sequences, as `inverse_temperature` has it; None if every T is 1."""
    if temperature is None or all(t == 1 for t in temperature.tolist()):
        return None
    # For one number, Python's float64 takes a fifth of torch's time and rounds to the same float32.
    return floats(list(map(inverse_number, temperature.tolist())))


def inverse_number(t: float) -> float:
    """1 / T of one sampled sequence."""
    return min(max(1 / t, FLOAT32_TINY), FLOAT32_MAX)


def integers(values: Sequence[int]) -> Tensor:
    """[N] int64, N > 0. `torch.tensor` takes longer than a pass over a short row."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def floats(values: Sequence[float]) -> Tensor:
    """[N] float32, N > 0."""
    return torch.frombuffer(array("f", values), dtype=torch.float32)


class Rows(NamedTuple):
    """C rows of logits of each of B sequences as weights, with p = weights / total."""

    z: Tensor  # [B, C, V] scaled logits, -inf where masked or removed by a filter
    weights: Tensor  # [B, C, V] float32
    maximum: list[list[float]]  # [B][C] of z
    total: list[list[float]]  # [B][C] 0 for a row with no finite entry

    def probabilities(self, tokens: Tensor) -> Callable[[int, int], float]:
        """[B, <= C] -> a function of b and i: the probability of the token of row (b, i), in float64."""
        weights, index = self.weights.gather(2, tokens.unsqueeze(-1)).tolist(), tokens.tolist()

        def probability(b: int, i: int) -> float:
            (weight,), total = weights[b][i], self.total[b][i]
            if weight <= LEAST_EXACT_WEIGHT and total > 0:
                weight = math.exp(float(self.z[b, i, index[b][i]]) - self.maximum[b][i])
                if weight > 0:
                    weight *= float(self.weights[b, i].amax())
            return float(weight / total) if total > 0 else 0.0

        return probability

    def factors(self, where: Sequence[tuple[int, int]], factor: float) -> Tensor:
        """[N, 1] the multipliers that turn the weights of the rows (b, i) into factor * p."""
        totals = [self.total[b][i] for b, i in where]
        return floats([factor / total if total > 0 else 0.0 for total in totals]).unsqueeze(1)


def read_rows(logits: Tensor, inverse: Tensor | None, filters: Filters) -> Rows:
    """[B, C, V], and 1 / T and filters [B] -> the rows, of sequences whose temperature is above 0."""
    z, maximum = scaled_rows(logits, inverse, filters)
    # `softmax` sums a row entry by entry. Dividing by `total`, which torch sums pairwise, removes the error of that
    # sum.
    weights = torch.softmax(z, -1)
    if any(-math.inf in row for row in maximum):
        weights.nan_to_num_(0.0)
    return Rows(z, weights, maximum, weights.sum(-1).tolist())


def scaled_rows(logits: Tensor, inverse: Tensor | None, filters: Filters) -> tuple[Tensor, list[list[float]]]:
    """The scaled logits [B, C, V], -inf where masked or removed, and their maxima [B][C]."""
    bounds = row_bounds(logits, filters)
    z = logits.float() if inverse is None else logits.float() * inverse.view(-1, 1, 1)
    if bounds is not None:
        if bounds.first is not None and not bounds.first.any():
            # If no tie is removed, one comparison is enough.
            bounds = bounds._replace(first=None)
        z = torch.where(is_kept(logits, bounds), z, -math.inf)
    maximum = z.amax(-1).tolist()
    # Logits that are NaN, infinite or overflow make the maximum NaN or infinite. Logits that overflow to -inf have no
    # weight next to a larger maximum.
    if not all(-FLOAT32_MAX < each < FLOAT32_MAX for row in maximum for each in row):
        z = scale_kept(logits, inverse, bounds)
        maximum = z.amax(-1).tolist()
    return z, maximum


def columns(x: Tensor, first: int, stop: int) -> Tensor:
    """x[:, first:stop], without slicing if that is all of x, because a slice takes microseconds."""
    return x if (first, stop) == (0, x.shape[1]) else x[:, first:stop]


def pick_rows(x: Tensor, where: Sequence[tuple[int, int]]) -> Tensor:
    """[B, C, V] -> [N, V] the rows (b, i); a view where possible."""
    if len(where) == 1:
        ((b, i),) = where
        return x[b, i : i + 1]
    sequences, positions = zip(*where, strict=True)
    return x[list(sequences), list(positions)]


def draw_tokens(weights: Tensor, uniforms: Sequence[float], least: float = 0.0) -> list[int]:
    """[N, V], [N] -> [N] by inverse CDF; -1 for a row whose sum is not above `least`.

    A uniform number outside [0, 1) draws the first or the last token that has a weight.
    """
    num_rows, vocab_size = weights.shape
    if num_rows == 1 or vocab_size > TILE:
        return [_draw_from(weights[row], u, least) for row, u in enumerate(uniforms)]
    cdf = weights.cumsum(-1, dtype=torch.float64)
    totals = cdf[:, -1].tolist()
    threshold = torch.tensor(uniforms, dtype=torch.float64, device=weights.device).clamp(min=0) * cdf[:, -1]
    tokens = torch.searchsorted(cdf, threshold.unsqueeze(1), right=True).flatten().tolist()
    for row, total in enumerate(totals):
        if total <= least:
            tokens[row] = -1
        elif tokens[row] == vocab_size:
            tokens[row] = int(weights[row].nonzero()[-1])
    return tokens


def _draw_from(weights: Tensor, u: float, least: float) -> int:
    """[V] -> the token. In a long row, first find the tile that contains it."""
    u, vocab_size = max(u, 0.0), weights.shape[0]
    if vocab_size <= TILE:
        values = weights.tolist()
        cdf = list(accumulate(values))
        return _first_above(cdf, u * cdf[-1], values) if cdf[-1] > least else -1
    whole = vocab_size // TILE * TILE
    mass = [*weights[:whole].view(-1, TILE).sum(-1).tolist(), float(weights[whole:].sum())]
    sums = list(accumulate(mass, initial=0.0))
    if sums[-1] <= least:
        return -1
    # If u * sum exceeds all sums by rounding, take the last tile with a weight.
    tile = min(bisect_right(sums, u * sums[-1]), bisect_left(sums, sums[-1])) - 1
    inside = weights[tile * TILE : (tile + 1) * TILE].tolist()
    return tile * TILE + _first_above(list(accumulate(inside)), u * sums[-1] - sums[tile], inside)


def _first_above(cdf: list[float], threshold: float, weights: list[float]) -> int:
    """The first token whose cumulative sum exceeds the threshold; if none does by rounding, the last with a weight."""
    token = bisect_right(cdf, threshold)
    return token if token < len(cdf) else max(token for token, weight in enumerate(weights) if weight > 0)


def argmax_by_tiles(logits: Tensor) -> Tensor:
    """`argmax` in a third of the time for many logits: torch vectorises the maximum but not its index, so the index is
    searched in one tile per row."""
    vocab_size = logits.shape[-1]
    if logits.numel() <= ARGMAX_MAX_UNTILED:
        row_max, best = logits.max(-1)
    else:
        size = min(ARGMAX_TILE, vocab_size)
        whole = vocab_size // size * size
        tile_max = logits[..., :whole].unflatten(-1, (-1, size)).amax(-1)
        if whole < vocab_size:
            tile_max = torch.cat([tile_max, logits[..., whole:].amax(-1, keepdim=True)], -1)
        row_max, tile = tile_max.max(-1, keepdim=True)
        # Indices beyond the vocabulary repeat the last entry, so they are never the lowest index of a maximum.
        index = tile * size + torch.arange(size, device=logits.device)
        best = tile[..., 0] * size + logits.gather(-1, index.clamp(max=vocab_size - 1)).argmax(-1)
    # `argmax` handles NaN and infinite logits: it replaces them, which may make ties.
    return best if all(-math.inf < each < FLOAT32_MAX for each in row_max.flatten().tolist()) else argmax(logits)
