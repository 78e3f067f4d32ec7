"""`specops::sample_gumbel` and `specops::verify_gumbel` on a CPU: draw y_i = argmax of (z - max) / T + g, and accept
drafts up to the first x_i != y_i.

The eager form uses NumPy, because it has unsigned integers, and its comparisons and searches take a fifth of the time
of torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import Filters, GumbelArguments
from ..tracing import is_eager_cpu
from ..uniforms import MASK, noise_key_bytes, noise_keys
from .eager_rows import CACHED_LOGITS, argmax_by_tiles, columns, integers, inverse_number, scaled_rows
from .eager_walk import prefix_length
from .filters import row_bounds, scale_kept
from .softmax import FLOAT32_MAX, inverse_temperature, lowest_argmax
from .walk import prefix_lengths

# Constants of `hashes`, which maps a token id and two keys to 32 random bits: the step of a Weyl sequence, a factor,
# and two shifts.
WEYL, FACTOR = 0x9E3779B9, 0x735A2D97
SHIFTS = 16, 15
# The largest float32 below 1.
LARGEST = 1.0 - 2.0**-24
# In a row longer than MAX_SCORED_VOCAB, scores z / T + noise are computed only for tokens that may have the largest
# score. NUM_LIKELY likely tokens are scored first, and the winner's score is at least the best of theirs. A small hash
# gives large noise, so only a token with a small hash can win. For a token whose z / T is at most NEAR_TOP below the
# largest, the hash must be below one limit, for any other token below a smaller limit. SCORE_SLACK is larger than all
# rounding errors.
MAX_SCORED_VOCAB, NUM_LIKELY, NEAR_TOP, SCORE_SLACK = 2048, 256, 6.0, 0.01

Array = Any


def verify_gumbel(args: GumbelArguments) -> tuple[Tensor, Tensor]:
    """Target logits [B, K+1, V] and draft tokens [B, K] -> output_tokens [B, K+1] and num_accepted [B]."""
    logits, (batch, num_rows, vocab_size) = args.target_logits, args.target_logits.shape
    if not is_eager_cpu(logits, args.seeds, args.positions) or batch == 0:
        return dense(args)
    temperature = [1.0] * batch if args.temperature is None else args.temperature.tolist()
    # Greedy rows use no noise, so skip the keys if all rows are greedy.
    is_sampled = any(t > 0 for t in temperature)
    drafts = args.draft_tokens.tolist()
    keys = _eager_keys(args) if is_sampled else np.zeros((batch, num_rows, 2), np.uint32)
    tokens: list[list[int]] = [[] for _ in drafts]
    live, first = list(range(batch)), 0
    # Read rows until each sequence has a mismatch. Short rows are read several at a time.
    while live:
        stop = min(first + max(1, CACHED_LOGITS // (len(live) * vocab_size)), num_rows)
        drawn = _draw(columns(logits, first, stop), args.filters, temperature, keys[:, first:stop], live)
        matching = []
        for b, row in zip(live, drawn, strict=True):
            n = prefix_length(x == y >= 0 for x, y in zip(drafts[b][first:stop], row, strict=False))
            tokens[b] += row[: n + 1]
            if n == stop - first:
                matching.append(b)
        live, first = matching, stop
    output = [token for row in tokens for token in row + [-1] * (num_rows - len(row))]
    return integers(output).view(batch, num_rows), integers([len(row) - 1 for row in tokens])


def _eager_keys(args: GumbelArguments) -> Array:
    """[B, K+1, 2] uint32, the noise keys of each position."""
    batch, num_rows, _ = args.target_logits.shape
    seeds = [seed for seed in args.seeds.tolist() for _ in range(num_rows)]
    positions = [position + i for position in args.positions.tolist() for i in range(num_rows)]
    return np.frombuffer(noise_key_bytes(seeds, positions), np.uint32).reshape(batch, num_rows, 2)


def _draw(
    logits: Tensor, filters: Filters, temperature: Sequence[float], keys: Array, sequences: Sequence[int]
) -> list[list[int]]:
    """Logits [B, C, V], filters and temperatures [B], keys [B, C, 2] -> C tokens for each of `sequences`; -1 for rows
    without a distribution."""
    tokens: dict[int, list[int]] = {}
    sampled = [b for b in sequences if temperature[b] > 0]
    if sampled:
        sampled_filters = filters if len(sampled) == len(temperature) else filters.at(sampled)
        z, maxima = scaled_rows(_of(logits, sampled), None, sampled_filters)
        drawn = _likeliest(z.resolve_neg().numpy(), maxima, [temperature[b] for b in sampled], _of(keys, sampled))
        tokens |= zip(sampled, drawn, strict=True)
    greedy = [b for b in sequences if temperature[b] == 0]
    if greedy:
        tokens |= zip(greedy, argmax_by_tiles(_of(logits, greedy)).tolist(), strict=True)
    return [tokens.get(b, [-1] * logits.shape[1]) for b in sequences]


def _of(values: Any, sequences: list[int]) -> Any:
    """values[sequences], without a copy if these are all sequences."""
    return values if len(sequences) == len(values) else values[sequences]


def _likeliest(z: Array, maxima: list[list[float]], temperature: list[float], keys: Array) -> list[list[int]]:
    """Logits [B, C, V] with their maxima, temperatures [B], keys [B, C, 2] -> the token with the largest score in each
    row."""
    inverse = [0.0 if t == math.inf else inverse_number(t) for t in temperature]
    with np.errstate(over="ignore"):
        if z.shape[-1] > MAX_SCORED_VOCAB:
            rows = zip(z, maxima, inverse, keys, strict=True)
            return [
                [_likeliest_of_many(row, top, scale, key) for row, top, key in zip(rows_z, tops, row_keys, strict=True)]
                for rows_z, tops, scale, row_keys in rows
            ]
        top = np.array(maxima, np.float32)
        scale = np.array(inverse, np.float32)[:, None, None]
        scores = _scores(z, np.maximum(top, -FLOAT32_MAX)[..., None], scale, hashes(keys, z.shape[-1]))
        return np.where(top > -np.inf, scores.argmax(-1), -1).tolist()


def _likeliest_of_many(z: Array, top: float, inverse: float, key: Array) -> int:
    """`_likeliest` for one long row. It computes the logarithms of only a few tokens."""
    if top == -math.inf:
        return -1
    small = hashes(key, len(z))
    likely = np.flatnonzero(z >= _below(top, 1, inverse))[:NUM_LIKELY]
    # The largest score is at least `least`. A token can have this score only if its noise g >= least + (top - z) / T.
    # Because g is at most -log w (`_scores`), the hash of such a token is small.
    least = float(_scores(z[likely], top, inverse, small[likely]).max()) - SCORE_SLACK
    wins = z >= _below(top, NEAR_TOP, inverse)
    wins &= small <= _limit(least)
    wins |= small <= _limit(least + NEAR_TOP)
    tokens = np.flatnonzero(wins)
    return int(tokens[_scores(z[tokens], top, inverse, small[tokens]).argmax()])


def _below(top: float, distance: float, inverse: float) -> Array:
    """The logit whose z / T is `distance` below the largest z / T, or the lowest float32 if no finite logit is that far
    below."""
    return np.float32(max(top - distance / inverse, -FLOAT32_MAX) if inverse * FLOAT32_MAX > distance else -FLOAT32_MAX)


def _limit(score: float) -> Array:
    """The largest hash for which w (see `_scores`) is at most exp(-score)."""
    return np.uint32(min(math.exp(-score) * 2.0**32, MASK))


def _scores(z: Array, top: Any, inverse: Any, words: Array) -> Array:
    """The scores (z - top) / T + g in float32. The hash `words` give w = 1 - u, and g = -log(-log(1 - w))."""
    w = np.minimum((words.astype(np.float32) + 0.5) * 2.0**-32, LARGEST)
    gap = np.maximum(np.maximum(z - top, -FLOAT32_MAX) * inverse, -FLOAT32_MAX)
    return np.where(z > -np.inf, gap - np.log(-np.log1p(-w)), -np.inf)


def hashes(keys: Array, vocab_size: int) -> Array:
    """Keys [..., 2] uint32 -> the hash of every token [..., V] uint32."""
    x = _weyl_sequence(vocab_size) ^ keys[..., :1]
    x ^= x >> np.uint32(SHIFTS[0])
    x *= keys[..., 1:] | np.uint32(1)
    x ^= x >> np.uint32(SHIFTS[1])
    x *= np.uint32(FACTOR)
    return x


@lru_cache(maxsize=4)
def _weyl_sequence(vocab_size: int) -> Array:
    sequence = np.arange(vocab_size, dtype=np.uint32) * np.uint32(WEYL)
    sequence.flags.writeable = False
    return sequence


def dense(args: GumbelArguments) -> tuple[Tensor, Tensor]:
    """`verify_gumbel` without data-dependent control flow, for compiled calls."""
    logits, filters, temperature = args.target_logits, args.filters, args.temperature
    batch, num_rows, _ = logits.shape
    position = torch.arange(num_rows, device=logits.device)
    positions = args.positions.unsqueeze(1) + position
    keys = noise_keys(args.seeds.repeat_interleave(num_rows), positions.flatten())
    z = scale_kept(logits, None, row_bounds(logits, filters))  # [B, K+1, V]
    z_max = z.amax(-1, keepdim=True)
    gap = (z - z_max.clamp(min=-FLOAT32_MAX)).clamp(min=-FLOAT32_MAX)
    inverse = inverse_temperature(temperature)
    if temperature is not None and inverse is not None:
        inverse = torch.where(temperature == math.inf, 0.0, inverse)
        gap = (gap * inverse.view(-1, 1, 1)).clamp(min=-FLOAT32_MAX)
    scores = torch.where(z > -math.inf, gap + _noise(keys.view(batch, num_rows, 2), logits.shape[2]), -math.inf)
    if temperature is not None:
        scores = torch.where((temperature == 0).view(-1, 1, 1), z, scores)
    tokens = lowest_argmax(scores, scores.amax(-1))  # [B, K+1]
    if temperature is not None:
        tokens = torch.where((temperature >= 0).unsqueeze(1), tokens, -1)
    n = prefix_lengths((args.draft_tokens == tokens[:, :-1]) & (tokens[:, :-1] >= 0))
    return torch.where(position <= n.unsqueeze(1), tokens, -1), n


def _noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Keys [B, C, 2] -> Gumbel noise g [B, C, V] float32."""
    w = ((dense_hashes(keys, vocab_size).float() + 0.5) * 2.0**-32).clamp(max=LARGEST)
    return -torch.log(-torch.log1p(-w))


def dense_hashes(keys: Tensor, vocab_size: int) -> Tensor:
    """`hashes` [..., V] in int64 arithmetic. An overflow changes only bits above the low 32, which are masked."""
    x = (torch.arange(vocab_size, device=keys.device) * WEYL & MASK) ^ keys[..., :1]
    x = (x ^ x >> SHIFTS[0]) * (keys[..., 1:] | 1) & MASK
    return (x ^ x >> SHIFTS[1]) * FACTOR & MASK
