"""`specops::sample` in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arguments import Filters
from .filters import row_bounds, scale_kept
from .rows import draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats


def sample(logits: Tensor, uniforms: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """[N, V], [N] -> tokens [N] int64, lse [N] float32."""
    temperature = filters.temperature
    z = scale_kept(logits, inverse_temperature(temperature), row_bounds(logits, filters))  # [N, V]
    z_max, z_sum = softmax_stats(z)  # [N]
    tokens = draw(softmax_row(z, z_max, z_sum), uniforms)
    lse = (z_max.double() + z_sum.log()).float()
    if temperature is None:
        return tokens, lse
    has_law = (z_max > -math.inf) & (temperature >= 0)
    greedy = temperature == 0
    tokens = torch.where(has_law, torch.where(greedy, lowest_argmax(z, z_max), tokens), -1)
    return tokens, torch.where(has_law, torch.where(greedy, 0.0, lse), -math.inf)
