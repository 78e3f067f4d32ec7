"""Calls of `specops::attend` for the CPU, the interpreter and a GPU, and how far a result is from the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class AttentionCase:
    """[B, heads, n, D] over [B, key heads, slots, D]; with a window, queries see so many slots and no more."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    slots: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    window: int | None = None

    def arguments(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Rows of different lengths, from one token to a full cache. Slots outside of all spans are NaN."""
        g = torch.Generator().manual_seed(self.slots)
        queries = torch.randn(self.batch, self.queries, self.heads, self.head_dim, generator=g).transpose(1, 2)
        keys, values = torch.randn(2, self.batch, self.key_heads, self.slots, self.head_dim, generator=g)
        starts = torch.linspace(0, self.slots - self.queries, self.batch).long()
        last = starts.unsqueeze(1) + torch.arange(self.queries)
        first = (last - (self.window or self.slots) + 1).clamp(min=0)
        slots = torch.arange(self.slots)
        outside = (slots < first[:, :1]) | (slots > last[:, -1:])
        for each in (keys, values):
            each.masked_fill_(outside[:, None, :, None], math.nan)
        moved = (each.to(device, self.dtype) for each in (queries, keys, values))
        return *moved, torch.stack([first, last], -1).to(device), self.head_dim**-0.5

    def error(self, output: Tensor) -> float:
        """The largest difference from the oracle, in units of what rounding explains."""
        *tensors, scale = self.arguments()
        expected = oracle(*tensors, scale)
        assert output.shape == expected.shape and output.dtype == self.dtype
        return float((output.cpu().double() - expected).abs().max()) / TOLERANCE[self.dtype]


def oracle(queries: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float) -> Tensor:
    """`specops::attend` in float64, with a loop over queries and heads."""
    batch, num_heads, count, head_dim = queries.shape
    group = num_heads // keys.shape[1]
    output = torch.zeros(batch, count, num_heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        for i in range(count):
            seen = slice(int(spans[b, i, 0]), int(spans[b, i, 1]) + 1)
            for h in range(num_heads):
                own_keys, own_values = (each[b, h // group, seen].double() for each in (keys, values))
                output[b, i, h] = torch.softmax(scale * (own_keys @ queries[b, h, i].double()), 0) @ own_values
    return output


# Groups of 1 to 7 heads, widths that are no power of two, more queries than a program holds; prompts that begin in the
# first slot and later.
CASES = (
    AttentionCase(2, 4, 2, 3, 70, 16),
    AttentionCase(3, 2, 2, 1, 90, 96, window=40),
    AttentionCase(1, 7, 1, 6, 60, 64, torch.float16),
    AttentionCase(2, 6, 2, 5, 100, 80, torch.bfloat16, window=9),
    AttentionCase(2, 5, 1, 32, 50, 128, torch.bfloat16),
    AttentionCase(2, 2, 1, 2, 33, 256, torch.bfloat16),
    AttentionCase(2, 4, 2, 40, 40, 16),
    AttentionCase(2, 2, 1, 36, 60, 16, window=9),
)
