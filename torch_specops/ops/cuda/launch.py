"""Host side of every launch: how kernels are built and called, and tile sizes, which depend on shapes only.

The axes of a grid are sequence, tile, row. So a program finds its place without a division, and only the first axis may
exceed 65,535.

Sizes may be symbolic while a call is traced. Tile sizes are then chosen for the example's size, without a guard
(`hint`), so that a graph with a dynamic batch stays one graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from .. import private

# A small batch gets smaller tiles, so that enough programs fill the device.
MAX_TILE = 4096
MIN_TILE = 1024
FEW_PROGRAMS = 1024
# About four programs of 8 warps per multiprocessor of a large GPU.
RESIDENT_PROGRAMS = 512
MAX_TILES_PER_PROGRAM = 8
# The longest second or third axis of a grid.
MAX_AXIS = 65_535
# Options of every launch. Triton's default differs between releases; results are right with both (`rounded_product`).
OPTIONS = {"enable_fp_fusion": True}
# The threads of a warp. Narrower ranges would not be faster, and each width needs another build.
MIN_LANES = 32

if triton.knobs.runtime.interpret:
    # The interpreter runs the kernel itself; wrap_triton would try to trace it.
    def wrap_triton(kernel: Callable[..., Any], /) -> Any:
        return kernel
else:
    from torch.library import wrap_triton


def jit(kernel: Callable[..., Any], specialize_addresses: bool = False) -> Any:
    """`triton.jit` with one build for all sizes, strides and addresses: the kernels load 16 bytes at a time for any
    alignment (`tiles.py`). With specialised addresses they do so only if 16 divides the address."""
    parameters = inspect.signature(kernel).parameters.values()
    names = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    if specialize_addresses:
        names = [name for name in names if not name.endswith("_ptr")]
    return triton.jit(kernel, do_not_specialize=names, do_not_specialize_on_alignment=names)


def run(kernel: Any, grid: tuple[int, ...], values: dict[str, Any], num_warps: int) -> None:
    """Launch `kernel` with the `values` that it has a parameter for, unless there are no sequences. A value of None is
    an argument that the call lacks: the kernel is built without it."""
    if hint(grid[0]) > 0:
        arguments = [values[name] for name in kernel.arg_names]
        # While a launch is traced, torch asks Triton for the kernel's code without the options.
        with _options_as_defaults() if private.is_fake(arguments[0]) else nullcontext():
            wrap_triton(kernel)[grid](*arguments, num_warps=num_warps, **OPTIONS)


@contextmanager
def _options_as_defaults() -> Iterator[None]:
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = OPTIONS["enable_fp_fusion"]
        yield


def contiguous(x: Tensor | None) -> Tensor | None:
    """Kernels take strides only for logits. Small tensors such as [B, K] are copied if they are strided."""
    # x.contiguous() would fail for a fake CUDA tensor if torch is built without CUDA.
    return x if x is None or x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def logits_strides(names: tuple[str, ...], logits: Tensor | None) -> dict[str, int | None]:
    """The strides by the names of the kernels' parameters. None for the last means 1, for which kernels are built with
    wide loads."""
    if logits is None:
        return dict.fromkeys(names, 0) | {names[-1]: None}
    *outer, inner = logits.stride()
    return dict(zip(names, (*outer, None if inner == 1 else inner), strict=True))


def hint(size: int | torch.SymInt) -> int:
    """The size, or the example's size if it is symbolic; 1 without an example. Sets no guard."""
    return private.hint(size) if isinstance(size, torch.SymInt) else size


def tile_size(vocab_size: int, num_rows: int) -> int:
    """Vocabulary entries per program: the largest tile with which `num_rows` rows make FEW_PROGRAMS programs."""
    vocab_size, num_rows = hint(vocab_size), hint(num_rows)
    tile = MAX_TILE
    while tile > MIN_TILE and num_rows * triton.cdiv(vocab_size, tile) < FEW_PROGRAMS:
        tile //= 2
    return tile


def num_warps(tile: int) -> int:
    """At least 8 values per thread, which are 16 bytes of a 16-bit type."""
    return min(max(tile // 256, 1), 8)


def stats_warps(tile: int) -> int:
    """For a kernel that only reduces a tile: twice the values per thread, because half of the instructions of such a
    thread do not depend on the number of its values."""
    return min(max(tile // 512, 1), 4)


def tiles_per_program(num_tiles: int) -> int:
    """Tiles per program, out of `num_tiles` in all, for kernels with much work before the first tile: as many as still
    leave RESIDENT_PROGRAMS programs."""
    count = 1
    while count < MAX_TILES_PER_PROGRAM and hint(num_tiles) >= 2 * count * RESIDENT_PROGRAMS:
        count *= 2
    return count


def num_tiles(logits: Tensor, tile: int, draft_logits: Tensor | None = None) -> int:
    """Tiles that cover a row of either tensor, at any offset from a 16-byte boundary."""
    size = min(logits.element_size(), logits.element_size() if draft_logits is None else draft_logits.element_size())
    return triton.cdiv(logits.shape[-1] + 16 // size - 1, tile)


def check_grid(name: str, logits: Tensor, num_rows: int, num_tiles: int) -> None:
    """Raise ValueError if a sequence has too many rows, the draft's included, or a row has too many tiles for a
    grid."""
    for axis, count in (("rows of a sequence, the draft's included", num_rows), ("tiles of a row", num_tiles)):
        if count > MAX_AXIS:
            raise ValueError(
                f"{name}: expected at most {MAX_AXIS} {axis} on CUDA, got {count} for shape {list(logits.shape)}"
            )


def padded_power_of_2(count: int) -> int:
    """The least power of two >= `count`, at least a warp. Uses comparisons only, because symbolic sizes have no bit
    operations; each comparison is a guard."""
    width = MIN_LANES
    while width < count:
        width *= 2
    return width
