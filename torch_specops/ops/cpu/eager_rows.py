"""Compute softmax weights of rows of logits, draw tokens from them, and find the argmax, in eager calls."""

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

# The eager form loops over sequences in Python. A batch of more than EAGER_MAX_BATCH sampled sequences therefore takes
# the dense form if its rows are shorter than EAGER_MIN_VOCAB.
EAGER_MAX_BATCH, EAGER_MIN_VOCAB = 16, 1024
# A thread processes at most this many logits at a time, so that they stay in the CPU's cache.
CACHED_LOGITS = 2**16
# Weights below this have lost digits in float32, and are computed again in float64.
LEAST_EXACT_WEIGHT = 2.0**-100
# The number of vocabulary entries per tile of `argmax_by_tiles`, and the most logits that it searches without tiles.
ARGMAX_TILE, ARGMAX_MAX_UNTILED = 128, 2**15


def rows_at_a_time(vocab_size: int) -> int:
    return max(1, CACHED_LOGITS * torch.get_num_threads() // vocab_size)


def takes_dense_form(logits: Tensor, temperature: Tensor | None) -> bool:
    """True if the call is traced or empty, or if computing all rows is cheaper than selecting the rows that are
    needed."""
    if not is_eager_cpu(logits) or logits.shape[0] == 0:
        return True
    if logits.shape[-1] >= EAGER_MIN_VOCAB or logits.shape[0] <= EAGER_MAX_BATCH:
        return False
    return temperature is None or int((temperature > 0).sum()) > EAGER_MAX_BATCH


def runs(logits: Tensor, temperature: Tensor | None, is_one_hot: Tensor | None = None) -> Iterator[tuple[bool, slice]]:
    """Split the batch into runs of adjacent sequences that are all sampled or all not, and all one-hot or all not.
    Yields (True if the run is sampled, its slice). A run of sampled sequences has as many sequences as fit in the CPU's
    cache, at least 1. Sequences that are not sampled are greedy, or have a negative or NaN temperature."""
    temperatures = [1.0] * logits.shape[0] if temperature is None else temperature.tolist()
    if len(temperatures) == 1:
        yield temperatures[0] > 0, slice(0, 1)
        return
    one_hot = [False] * len(temperatures) if is_one_hot is None else is_one_hot.tolist()
    size = max(1, rows_at_a_time(logits.shape[-1]) // logits.shape[1:-1].numel())
    start = 0
    for (is_sampled, _), run in groupby((t > 0, each) for t, each in zip(temperatures, one_hot, strict=True)):
        stop = start + len(list(run))
        step = size if is_sampled else stop - start
        for first in range(start, stop, step):
            yield is_sampled, slice(first, min(first + step, stop))
        start = stop


def inverse_of(temperature: Tensor | None) -> Tensor | None:
    """1 / T of sampled sequences, with the same values as `inverse_temperature`; None if every T is 1."""
    if temperature is None or all(t == 1 for t in temperature.tolist()):
        return None
    # Divide in Python, because for one number that takes a fifth of torch's time, and the float64 quotient rounds to
    # the same float32.
    return floats(list(map(inverse_number, temperature.tolist())))


def inverse_number(t: float) -> float:
    """1 / T of one sampled sequence."""
    return min(max(1 / t, FLOAT32_TINY), FLOAT32_MAX)


def integers(values: Sequence[int]) -> Tensor:
    """A tensor [N] int64, N > 0. `torch.tensor` is avoided because it takes longer than processing a short row."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)


def floats(values: Sequence[float]) -> Tensor:
    """A tensor [N] float32, N > 0."""
    return torch.frombuffer(array("f", values), dtype=torch.float32)


class Rows(NamedTuple):
    """C rows for each of B sequences, as weights with p = weights / total."""

    z: Tensor  # [B, C, V], scaled logits; -inf where masked or removed by a filter
    weights: Tensor  # [B, C, V] float32
    maximum: list[list[float]]  # [B][C], the maximum of z in each row
    total: list[list[float]]  # [B][C], the sum of the weights; 0 for a row without a finite entry

    def probabilities(self, tokens: Tensor) -> Callable[[int, int], float]:
        """Tokens [B, <= C] -> a function (b, i) -> the probability of the token in row (b, i), in float64."""
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
        """[N, 1], the number for each row (b, i) whose product with the weights is factor * p."""
        totals = [self.total[b][i] for b, i in where]
        return floats([factor / total if total > 0 else 0.0 for total in totals]).unsqueeze(1)


def read_rows(logits: Tensor, inverse: Tensor | None, filters: Filters) -> Rows:
    """Logits [B, C, V], 1 / T [B] and filters [B] -> `Rows`. All temperatures are above 0."""
    z, maximum = scaled_rows(logits, inverse, filters)
    # `softmax` adds the entries of a row one by one, which has a larger rounding error. Dividing by `total`, which
    # torch adds pairwise, removes that error.
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
            # If no tied token is removed, comparing with the cut alone is enough.
            bounds = bounds._replace(first=None)
        z = torch.where(is_kept(logits, bounds), z, -math.inf)
    maximum = z.amax(-1).tolist()
    # If a maximum is NaN or infinite, a logit is NaN or +inf, or has overflowed to +inf. Scale again with clamping
    # then. A logit that overflows to -inf needs no clamping, because its weight is 0 beside a finite maximum.
    if not all(-FLOAT32_MAX < each < FLOAT32_MAX for row in maximum for each in row):
        z = scale_kept(logits, inverse, bounds)
        maximum = z.amax(-1).tolist()
    return z, maximum


def columns(x: Tensor, first: int, stop: int) -> Tensor:
    """x[:, first:stop]. Returns x itself if the slice is all of it, because slicing takes microseconds."""
    return x if (first, stop) == (0, x.shape[1]) else x[:, first:stop]


def pick_rows(x: Tensor, where: Sequence[tuple[int, int]]) -> Tensor:
    """[B, C, V] -> [N, V], the rows (b, i); a view if N = 1."""
    if len(where) == 1:
        ((b, i),) = where
        return x[b, i : i + 1]
    sequences, positions = zip(*where, strict=True)
    return x[list(sequences), list(positions)]


def draw_tokens(weights: Tensor, uniforms: Sequence[float], least: float = 0.0) -> list[int]:
    """Draw a token from each row: weights [N, V], uniforms [N] -> tokens [N] by inverse CDF; -1 for a row whose sum is
    not above `least`.

    A uniform number outside [0, 1) draws the first or the last token with a positive weight.
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
    """Draw a token from weights [V]. In a long row, first find the tile that contains the token."""
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
    # Rounding may make u * sum as large as the last cumulative sum. Take the last tile with a positive weight then.
    tile = min(bisect_right(sums, u * sums[-1]), bisect_left(sums, sums[-1])) - 1
    inside = weights[tile * TILE : (tile + 1) * TILE].tolist()
    return tile * TILE + _first_above(list(accumulate(inside)), u * sums[-1] - sums[tile], inside)


def _first_above(cdf: list[float], threshold: float, weights: list[float]) -> int:
    """The first token whose cumulative sum exceeds the threshold. If rounding leaves none, the last token with a
    positive weight."""
    token = bisect_right(cdf, threshold)
    return token if token < len(cdf) else max(token for token, weight in enumerate(weights) if weight > 0)


def argmax_by_tiles(logits: Tensor) -> Tensor:
    """`argmax`, which takes a third of the time for many logits. torch vectorises the maximum but not its index, so
    this searches the index in only one tile per row."""
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
        # Indices beyond the vocabulary repeat the last entry, and `argmax` returns the lowest index, so they are never
        # chosen.
        index = tile * size + torch.arange(size, device=logits.device)
        best = tile[..., 0] * size + logits.gather(-1, index.clamp(max=vocab_size - 1)).argmax(-1)
    # If there are NaN or infinite logits, use the general `argmax`, which first replaces them. The replaced values may
    # tie.
    return best if all(-math.inf < each < FLOAT32_MAX for each in row_max.flatten().tolist()) else argmax(logits)
