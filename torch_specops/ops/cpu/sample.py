"""`specops::sample` on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arguments import Filters
from .eager_rows import argmax_by_tiles, draw_tokens, floats, integers, inverse_of, read_rows, runs, takes_dense_form
from .filters import row_bounds, scale_kept
from .softmax import draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats


def sample(logits: Tensor, uniforms: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Logits [N, V] and uniforms [N] -> tokens [N] int64 and lse [N] float32."""
    if takes_dense_form(logits, filters.temperature):
        return dense(logits, uniforms, filters)
    tokens: list[int] = []
    lse: list[float] = []
    for is_sampled, where in runs(logits, filters.temperature):
        part, part_filters, u = logits, filters, uniforms
        if where != slice(0, logits.shape[0]):
            part, part_filters, u = logits[where], filters.at(where), uniforms[where]
        if not is_sampled:
            assert part_filters.temperature is not None
            best = argmax_by_tiles(part).tolist()
            tokens += [
                token if t == 0 else -1 for token, t in zip(best, part_filters.temperature.tolist(), strict=True)
            ]
            lse += [0.0 if token >= 0 else -math.inf for token in tokens[where]]
        else:
            rows = read_rows(part.unsqueeze(1), inverse_of(part_filters.temperature), part_filters)
            tokens += draw_tokens(rows.weights.squeeze(1), u.tolist())
            lse += [
                z_max - math.log(weight / total) if total > 0 else -math.inf
                for (z_max,), (total,), (weight,) in zip(
                    rows.maximum, rows.total, rows.weights.amax(-1).tolist(), strict=True
                )
            ]
    return integers(tokens), floats(lse)


def dense(logits: Tensor, uniforms: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
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
