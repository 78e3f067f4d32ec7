"""`specops::sample` on CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .filters import row_bounds, scale_kept
from .rows import all_greedy, argmax_by_tiles, draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if temperature is not None and all_greedy(temperature):
        tokens = torch.where(temperature == 0, argmax_by_tiles(logits), -1)
        return tokens, torch.where(tokens >= 0, 0.0, -math.inf)
    bounds = row_bounds(logits, temperature, top_k, top_p, min_p)
    z = scale_kept(logits, inverse_temperature(temperature), bounds)
    z_max, z_sum = softmax_stats(z)
    tokens = draw(softmax_row(z, z_max, z_sum), uniforms)
    lse = (z_max.double() + z_sum.log()).float()
    if temperature is None:
        return tokens, lse
    has_law = (z_max > -math.inf) & (temperature >= 0)
    greedy = temperature == 0
    tokens = torch.where(has_law, torch.where(greedy, lowest_argmax(z, z_max), tokens), -1)
    return tokens, torch.where(has_law, torch.where(greedy, 0.0, lse), -math.inf)
