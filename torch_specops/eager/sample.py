"""`specops::sample` for eager calls on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import dense
from ..arguments import Filters
from .rows import argmax_by_tiles, draw, inverse_of, prefers_dense, read_rows, runs


def sample(logits: Tensor, uniforms: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """[N, V], [N] -> tokens [N] int64, lse [N] float32."""
    if prefers_dense(logits, filters.temperature):
        return dense.sample(logits, uniforms, filters)
    tokens: list[int] = []
    lse: list[float] = []
    for is_sampled, where in runs(logits, filters.temperature):
        own = filters.at(where)
        if not is_sampled:
            assert own.temperature is not None
            best = argmax_by_tiles(logits[where]).tolist()
            tokens += [token if t == 0 else -1 for token, t in zip(best, own.temperature.tolist(), strict=True)]
            lse += [0.0 if token >= 0 else -math.inf for token in tokens[where]]
        else:
            rows = read_rows(logits[where].unsqueeze(1), inverse_of(own.temperature), own)
            tokens += draw(rows.weights.squeeze(1), uniforms[where].tolist())
            largest = rows.weights.amax(-1).flatten().tolist()
            lse += [
                z_max - math.log(weight / total) if total > 0 else -math.inf
                for (z_max,), (total,), weight in zip(rows.maximum, rows.total, largest, strict=True)
            ]
    device = logits.device
    return (
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(lse, dtype=torch.float32, device=device),
    )
