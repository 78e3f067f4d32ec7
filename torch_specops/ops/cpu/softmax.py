"""Functions of rows of logits: scaling, softmax, argmax and the inverse CDF."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).smallest_normal
# The number of vocabulary entries per tile in `draw` and `draw_tokens`, which first find the tile and then the token.
TILE = 1024


def inverse_temperature(temperature: Tensor | None) -> Tensor | None:
    """[B], 1 / T clamped to finite positive numbers; 1 for greedy rows, because they only compare logits."""
    if temperature is None:
        return None
    return torch.where(temperature > 0, (1.0 / temperature).clamp(FLOAT32_TINY, FLOAT32_MAX), 1.0)


def scale(logits: Tensor, inverse: Tensor | None) -> Tensor:
    """[B, ...] logits / T in float32. A finite logit stays finite, +inf becomes the largest float32, and NaN becomes
    -inf."""
    x = logits.float()
    z = x if inverse is None else x * inverse.view(-1, *([1] * (x.dim() - 1)))
    # The comparison is False for NaN too. `nan_to_num` is not used, because Inductor does not vectorise it.
    return torch.where(x > -math.inf, z.clamp(-FLOAT32_MAX, FLOAT32_MAX), -math.inf)


def softmax_stats(z: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] -> the maximum [...] float32 and the sum of exp(z - maximum) [...] float64; (-inf, 0) for a row without
    a finite entry."""
    z_max = z.amax(-1)
    shift = z_max.clamp(min=-FLOAT32_MAX)
    return z_max, torch.exp(z - shift.unsqueeze(-1)).sum(-1, dtype=torch.float64)


def softmax_row(z: Tensor, z_max: Tensor, z_sum: Tensor) -> Tensor:
    """[B, V] softmax in float32, from the maximum and sum [B] of each row."""
    inverse_sum = torch.where(z_sum > 0, 1.0 / z_sum, 0.0).float().unsqueeze(-1)
    return torch.exp(z - z_max.clamp(min=-FLOAT32_MAX).unsqueeze(-1)) * inverse_sum


def argmax(logits: Tensor) -> Tensor:
    """[..., V] -> the lowest index of the maximum; -1 for a row without a finite entry."""
    z = scale(logits, None)
    return lowest_argmax(z, z.amax(-1))


def lowest_argmax(z: Tensor, z_max: Tensor) -> Tensor:
    # Compute the index as a minimum, because Inductor does not vectorise argmax.
    index = torch.arange(z.shape[-1], device=z.device, dtype=torch.int32)
    lowest = torch.where(z == z_max.unsqueeze(-1), index, z.shape[-1]).amin(-1).long()
    return torch.where(z_max > -math.inf, lowest, -1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token from each row by inverse CDF: weights [B, V], uniforms [B] -> tokens [B]; -1 for a row of zero
    weight. The search finds the tile first, then the token in the tile."""
    batch, vocab_size = weights.shape
    size = min(TILE, vocab_size)
    num_tiles = (vocab_size + size - 1) // size
    tiles = torch.nn.functional.pad(weights, (0, num_tiles * size - vocab_size)).view(batch, num_tiles, size)
    mass = tiles.sum(-1, dtype=torch.float64)
    cdf = mass.cumsum(-1)
    threshold = uniforms.double() * cdf[:, -1]

    rows = torch.arange(batch, device=weights.device)
    tile = _first_above(cdf, mass > 0, threshold)
    inside = tiles[rows, tile]
    before = cdf[rows, tile] - mass[rows, tile]
    token = _first_above(inside.cumsum(-1, dtype=torch.float64), inside > 0, threshold - before)
    return torch.where(cdf[:, -1] > 0, tile * size + token, -1)


def _first_above(cdf: Tensor, positive: Tensor, threshold: Tensor) -> Tensor:
    """[B, N] -> [B], the first entry with `positive` whose cdf exceeds the threshold, else the last entry with
    `positive`, else 0."""
    index = torch.arange(cdf.shape[-1], device=cdf.device)
    last = torch.where(positive, index, 0).amax(-1)
    above = positive & (cdf > threshold.unsqueeze(-1))
    return torch.minimum(torch.where(above, index, cdf.shape[-1]).amin(-1), last)
