"""The argmax by tiles is the plain one: lowest index of the maximum, whatever stands in a row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from torch_specops.dense.rows import argmax
from torch_specops.eager.walk import TILE, argmax_by_tiles

SIZES = (1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE, 5 * TILE + 7)


@pytest.mark.parametrize("special", [None, math.nan, math.inf, "all"])
def test_argmax_by_tiles(special: float | str | None) -> None:
    for vocab_size, dtype in itertools.product(SIZES, (torch.float32, torch.bfloat16, torch.float16)):
        x = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)
        # Many maxima; one in each of two tiles; one masked entry, most, all.
        x[1] = x[1].clamp(max=0)
        x[2, [0, vocab_size - 1]] = 9.0
        x[3, x[3].argmax()] = -math.inf
        x[4, torch.arange(vocab_size) % 7 != 3] = -math.inf
        x[5] = -math.inf
        if special == "all":
            x[6] = math.nan
            # Of the largest float32 and an infinite logit, which count as equal, the first.
            x[7, [vocab_size // 2, vocab_size - 1]] = torch.tensor([torch.finfo(dtype).max, math.inf], dtype=dtype)
        elif special is not None:
            x[6, [vocab_size // 3, vocab_size - 1]] = special
        for each in (x, x.view(3, 4, -1), x.t().contiguous().t(), x.repeat(1, 2)[:, :vocab_size]):
            found = argmax_by_tiles(each)
            assert found.dtype == torch.int64 and torch.equal(found, argmax(each)), (vocab_size, dtype)
    assert argmax_by_tiles(torch.zeros(3, 0, 50)).shape == (3, 0)
