"""The host side of every launch: build and call kernels, and choose tile sizes, which depend only on shapes.

The axes of a grid are sequence, tile and row, in this order. A program then needs no division to find its indices. Only
the first axis of a grid may exceed 65,535.

Sizes may be symbolic while a call is traced. Tile sizes are then chosen for the size in the traced example (`hint`).
This adds no guard, so a dynamic batch size needs only one graph.
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
from . import plans

# Tiles are smaller in a small batch, so that there are at least FEW_PROGRAMS programs where possible.
MAX_TILE = 4096
MIN_TILE = 1024
FEW_PROGRAMS = 1024
# A program processes several tiles only if at least this many programs remain. These are about four programs of 8 warps
# for each multiprocessor of a large GPU.
RESIDENT_PROGRAMS = 512
MAX_TILES_PER_PROGRAM = 8
# CUDA's limit for the second and third axis of a grid.
MAX_AXIS = 65_535
# Options of every launch. They are fixed because Triton's default differs between releases. Results are correct with
# either value (see `rounded_product`).
OPTIONS = {"enable_fp_fusion": True}
# Ranges over rows or tiles have at least as many entries as a warp has threads. Narrower ranges would not be faster,
# and each width needs another build of the kernel.
MIN_LANES = 32

if triton.knobs.runtime.interpret:
    # Triton's interpreter runs the kernel in Python. `wrap_triton` would try to trace it, so leave it out.
    def wrap_triton(kernel: Callable[..., Any], /) -> Any:
        return kernel
else:
    from torch.library import wrap_triton


def jit(kernel: Callable[..., Any], specialize_addresses: bool = False) -> Any:
    """`triton.jit` with one build for all sizes, strides and addresses. Kernels that use `tiles.py` need no
    specialisation to load 16 bytes at a time. Other kernels set `specialize_addresses`, and then do so only if all
    addresses are multiples of 16."""
    parameters = inspect.signature(kernel).parameters.values()
    names = [parameter.name for parameter in parameters if "constexpr" not in str(parameter.annotation)]
    if specialize_addresses:
        names = [name for name in names if not name.endswith("_ptr")]
    return triton.jit(kernel, do_not_specialize=names, do_not_specialize_on_alignment=names)


def run(kernel: Any, grid: tuple[int, ...], values: dict[str, Any], num_warps: int) -> None:
    """Launch `kernel` with those of the `values` that it has a parameter for. Does nothing if there are no sequences. A
    value of None means that the argument was not given; the kernel is built without it."""
    if hint(grid[0]) > 0:
        arguments = [values[name] for name in kernel.arg_names]
        # While a launch is traced, torch compiles the kernel without these options, so set them as Triton's defaults.
        with _options_as_defaults() if private.is_fake(arguments[0]) else nullcontext():
            built = wrap_triton(kernel)[grid](*arguments, num_warps=num_warps, **OPTIONS)
        plans.note(built, grid, arguments)


@contextmanager
def _options_as_defaults() -> Iterator[None]:
    with triton.knobs.language.scope():
        triton.knobs.language.default_fp_fusion = OPTIONS["enable_fp_fusion"]
        yield


def contiguous(x: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor. Kernels take strides only for logits, so small tensors such as [B, K] are copied if
    they are not contiguous."""
    # Use `clone`, because `x.contiguous()` fails for a fake CUDA tensor if torch is built without CUDA.
    return x if x is None or x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def logits_strides(names: tuple[str, ...], logits: Tensor | None) -> dict[str, int | None]:
    """A dict from the kernels' parameter names to the strides of the logits. If the last stride is 1 it is None, for
    which kernels are built with wide loads."""
    if logits is None:
        return dict.fromkeys(names, 0) | {names[-1]: None}
    *outer, inner = logits.stride()
    return dict(zip(names, (*outer, None if inner == 1 else inner), strict=True))


def hint(size: int | torch.SymInt) -> int:
    """The size, or its value in the traced example if it is symbolic; 1 if there is no example. Adds no guard."""
    return private.hint(size) if isinstance(size, torch.SymInt) else size


def tile_size(vocab_size: int, num_rows: int) -> int:
    """The number of vocabulary entries per program: the largest tile for which `num_rows` rows give at least
    FEW_PROGRAMS programs."""
    vocab_size, num_rows = hint(vocab_size), hint(num_rows)
    tile = MAX_TILE
    while tile > MIN_TILE and num_rows * triton.cdiv(vocab_size, tile) < FEW_PROGRAMS:
        tile //= 2
    return tile


def num_warps(tile: int) -> int:
    """The number of warps for a tile. Each thread gets at least 8 values, which are 16 bytes of a 16-bit type."""
    return min(max(tile // 256, 1), 8)


def stats_warps(tile: int) -> int:
    """The number of warps for a kernel that only reduces a tile. Each thread gets twice as many values as with
    `num_warps`, because half of its instructions do not depend on the number of values."""
    return min(max(tile // 512, 1), 4)


def tiles_per_program(num_tiles: int) -> int:
    """The number of tiles per program, for kernels with much work before the first tile. It is the largest number for
    which `num_tiles` tiles still give RESIDENT_PROGRAMS programs."""
    count = 1
    while count < MAX_TILES_PER_PROGRAM and hint(num_tiles) >= 2 * count * RESIDENT_PROGRAMS:
        count *= 2
    return count


def num_tiles(logits: Tensor, tile: int, draft_logits: Tensor | None = None) -> int:
    """The number of tiles that cover a row of either tensor, whatever its offset from a 16-byte boundary."""
    size = min(logits.element_size(), logits.element_size() if draft_logits is None else draft_logits.element_size())
    return triton.cdiv(logits.shape[-1] + 16 // size - 1, tile)


def check_grid(name: str, logits: Tensor, num_rows: int, num_tiles: int) -> None:
    """Raise ValueError if a sequence has too many rows (target and draft) for a grid, or a row has too many tiles."""
    for axis, count in (("rows of a sequence, the draft's included", num_rows), ("tiles of a row", num_tiles)):
        if count > MAX_AXIS:
            raise ValueError(
                f"{name}: expected at most {MAX_AXIS} {axis} on CUDA, got {count} for shape {list(logits.shape)}"
            )


def padded_power_of_2(count: int) -> int:
    """The smallest power of two >= `count`, at least the size of a warp. It uses only comparisons, because symbolic
    sizes have no bit operations. Each comparison adds a guard."""
    width = MIN_LANES
    while width < count:
        width *= 2
    return width
