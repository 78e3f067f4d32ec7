"""`specops::sample` for eager calls on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import dense
from ..arguments import Filters
from .rows import argmax_by_tiles, draw, inverse_of, is_dense, read_rows, rows_at_a_time, runs, temperatures_of


def sample(logits: Tensor, uniforms: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """[N, V], [N] -> tokens [N] int64, lse [N] float32."""
    num_rows, vocab_size = logits.shape
    size = rows_at_a_time(vocab_size)
    tokens: list[int] = []
    lse: list[float] = []
    temperatures = temperatures_of(filters.temperature, num_rows)
    if is_dense(temperatures, vocab_size):
        return dense.sample(logits, uniforms, filters)
    for is_sampled, first, last in runs(temperatures):
        if not is_sampled:
            assert filters.temperature is not None
            best = torch.where(filters.temperature[first:last] == 0, argmax_by_tiles(logits[first:last]), -1).tolist()
            tokens += best
            lse += [0.0 if token >= 0 else -math.inf for token in best]
            continue
        for start in range(first, last, size):
            part = slice(start, min(start + size, last))
            own = filters.at(part)
            rows = read_rows(logits[part].unsqueeze(1), inverse_of(own.temperature), own)
            tokens += draw(rows.weights.squeeze(1), uniforms[part].tolist())
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
