"""Host side of every launch: how a kernel is built and wrapped, and tile sizes, chosen from shapes by a fixed table.

Axes of a grid are sequence, tile, row: programs find out where they are without a division, and only the first axis
takes more than 65,535.

A size may be symbolic while a call is traced. What any size may have is then chosen for the size of the example,
without a guard (`hint`): a graph with a dynamic batch is one graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = [
    "check_grid",
    "hint",
    "jit",
    "lanes",
    "num_tiles",
    "num_warps",
    "stats_warps",
    "tile_size",
    "tiles_per_program",
    "wrap_triton",
]

# Smaller tiles give a small batch enough programs to fill the device.
MAX_TILE = 4096
MIN_TILE = 1024
FEW_PROGRAMS = 1024
# About four of 8 warps for each multiprocessor of a large GPU.
RESIDENT_PROGRAMS = 512
MAX_TILES_PER_PROGRAM = 8
# Of the second and third axis of a grid.
MAX_AXIS = 65_535
# The threads of a warp: fewer would not be faster, and every width is another build.
MIN_LANES = 32

if triton.knobs.runtime.interpret:
    # The interpreter runs the kernel itself; wrap_triton would try to trace it.
    def wrap_triton(kernel: Callable[..., Any], /) -> Any:
        return kernel
else:
    from torch.library import wrap_triton


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit` with one build for all sizes, strides and addresses: the kernels need to know nothing that divides
    them for wide loads (`rows.py`)."""
    parameters = inspect.signature(kernel).parameters.values()
    names = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    return triton.jit(kernel, do_not_specialize=names, do_not_specialize_on_alignment=names)


def hint(size: int | torch.SymInt) -> int:
    """The size, or that of the example if it is symbolic; 1 if there is none. Sets no guard."""
    return size.node.hint or 1 if isinstance(size, torch.SymInt) else size


def tile_size(vocab_size: int, num_rows: int) -> int:
    """Vocabulary entries per program: the largest tile that still makes FEW_PROGRAMS programs of `num_rows` rows."""
    vocab_size, num_rows = hint(vocab_size), hint(num_rows)
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
    while count < MAX_TILES_PER_PROGRAM and hint(num_tiles) >= 2 * count * RESIDENT_PROGRAMS:
        count *= 2
    return count


def num_tiles(logits: Tensor, tile: int, draft_logits: Tensor | None = None) -> int:
    """Tiles that cover a row, of either tensor, which may start anywhere behind a 16-byte boundary."""
    size = min(logits.element_size(), logits.element_size() if draft_logits is None else draft_logits.element_size())
    return triton.cdiv(logits.shape[-1] + 16 // size - 1, tile)


def check_grid(name: str, logits: Tensor, num_rows: int, num_tiles: int) -> None:
    """Rows of a sequence, the draft's among them, and tiles of a row: the axes that may be too long."""
    for axis, count in (("rows of a sequence, the draft's included", num_rows), ("tiles of a row", num_tiles)):
        if count > MAX_AXIS:
            raise ValueError(
                f"{name}: expected at most {MAX_AXIS} {axis} on CUDA, got {count} for shape {list(logits.shape)}"
            )


def lanes(count: int) -> int:
    """The power of two that holds `count`, and a guard where that is symbolic, by comparisons alone: bit operations a
    symbolic size refuses."""
    width = MIN_LANES
    while width < count:
        width *= 2
    return width
