"""Host side of every launch: how a kernel is wrapped, and the tile sizes, chosen from shapes by a fixed table."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

__all__ = ["NUM_WARPS", "num_tiles", "tile_size", "wrap_triton"]

NUM_WARPS = 8
# A tile of 4096 is 16 values a thread; smaller tiles give a small batch enough programs to fill the device.
MAX_TILE = 4096
MIN_TILE = 1024
FEW_PROGRAMS = 1024

if triton.knobs.runtime.interpret:
    # The interpreter runs the kernel itself; wrap_triton would try to trace it.
    def wrap_triton(kernel: Any) -> Any:
        return kernel
else:
    from torch.library import wrap_triton


def tile_size(vocab_size: int, num_rows: int) -> int:
    """Vocabulary entries per program: the largest tile that still makes FEW_PROGRAMS programs of `num_rows` rows."""
    tile = MAX_TILE
    while tile > MIN_TILE and num_rows * triton.cdiv(vocab_size, tile) < FEW_PROGRAMS:
        tile //= 2
    return tile


def num_tiles(logits: Tensor, tile: int) -> int:
    """Tiles that cover a row which may start anywhere behind a 16-byte boundary."""
    return triton.cdiv(logits.shape[-1] + 16 // logits.element_size() - 1, tile)
