"""Host side of every launch: how a kernel is wrapped, and the tile sizes, chosen from shapes by a fixed table.

Axes of a grid are sequence, tile, row: programs find out where they are without a division, and only the first axis
takes more than 65,535."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

__all__ = ["next_power_of_2", "num_tiles", "num_warps", "stats_warps", "tile_size", "tiles_per_program", "wrap_triton"]

# Smaller tiles give a small batch enough programs to fill the device.
MAX_TILE = 4096
MIN_TILE = 1024
FEW_PROGRAMS = 1024
# About four of 8 warps for each multiprocessor of a large GPU.
RESIDENT_PROGRAMS = 512
MAX_TILES_PER_PROGRAM = 8

if triton.knobs.runtime.interpret:
    # The interpreter runs the kernel itself; wrap_triton would try to trace it.
    def wrap_triton(kernel: Callable[..., Any], /) -> Any:
        return kernel
else:
    from torch.library import wrap_triton


def tile_size(vocab_size: int, num_rows: int) -> int:
    """Vocabulary entries per program: the largest tile that still makes FEW_PROGRAMS programs of `num_rows` rows."""
    tile = MAX_TILE
    while tile > MIN_TILE and num_rows * triton.cdiv(vocab_size, tile) < FEW_PROGRAMS:
        tile //= 2
    return tile


def num_warps(tile: int) -> int:
    """At least 8 values a thread, which are 16 bytes of a 16-bit type."""
    return min(max(tile // 256, 1), 8)


def stats_warps(tile: int) -> int:
    """Of a kernel that only sums a tile up: twice the values a thread, 32 in the largest, as half of what a thread of
    such a kernel executes does not depend on them."""
    return min(max(tile // 512, 1), 4)


def tiles_per_program(num_tiles: int) -> int:
    """Tiles, of `num_tiles` in all, that a program takes one after another where much work comes before the first: as
    many as still make RESIDENT_PROGRAMS programs."""
    count = 1
    while count < MAX_TILES_PER_PROGRAM and num_tiles >= 2 * count * RESIDENT_PROGRAMS:
        count *= 2
    return count


def num_tiles(logits: Tensor, tile: int) -> int:
    """Tiles that cover a row which may start anywhere behind a 16-byte boundary."""
    return triton.cdiv(logits.shape[-1] + 16 // logits.element_size() - 1, tile)


def next_power_of_2(n: int) -> int:
    """By comparisons alone, which a symbolic size answers with a guard; bit operations it refuses."""
    power = 1
    while power < n:
        power *= 2
    return power
