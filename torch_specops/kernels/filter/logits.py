"""`specops::filter_logits` on CUDA: a copy of the logits in which what the filters remove is -inf.

Bytes: V * s read and V * s written per row, on top of the search (`bounds.py`). One launch more than the search:
`mask_kernel`, one program per (row, tile).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..launch import wrap_triton
from ..rows import load_aligned, row_lead, tile_tokens, within_bounds
from .bounds import filter_bounds

__all__ = ["filter_logits"]


@launch.jit
def mask_kernel(
    logits_ptr,  # [N, V]
    bounds_ptr,  # [N, 2]
    output_ptr,  # [N, V]
    stride_n,
    stride_v,
    vocab_size,
    num_tiles,
    UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    output_row_ptr = output_ptr + row * vocab_size
    # Tiles are counted from the boundary of the row that is written; rows that are read begin at the same place in a
    # chunk unless they were sliced.
    lead = row_lead(output_row_ptr, True)
    v = tile_tokens(lead, tile, TILE)
    inside = (v >= 0) & (v < vocab_size)
    row_ptr = logits_ptr + row * stride_n
    if UNIT_STRIDE:
        if ((row_ptr - lead).to(tl.int64) & 15) == 0:
            x = load_aligned(row_ptr, lead, vocab_size, tile, TILE)
        else:
            x = tl.load(row_ptr + v, mask=inside, other=float("-inf"))
    else:
        x = tl.load(row_ptr + v.to(tl.int64) * stride_v, mask=inside, other=float("-inf"))
    kept = within_bounds(x, v, bounds_ptr + row * 2).to(x.dtype)
    store_aligned(output_row_ptr, kept, lead, vocab_size, tile, TILE)


@triton.jit
def store_aligned(row_ptr, x, lead, vocab_size, tile, TILE: tl.constexpr):
    """The counterpart of `load_aligned`: whole 16-byte chunks at once, the row's two ends entry by entry."""
    VEC: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    base = tl.multiple_of(row_ptr - lead, 16)
    position = tile * TILE + tl.arange(0, TILE)
    end = lead + vocab_size
    chunk = position // VEC * VEC
    whole = (chunk >= lead) & (chunk + VEC <= end)
    tl.store(base + position, x, mask=whole)
    last_chunk = end // VEC * VEC
    if ((tile == 0) & (lead > 0)) | ((last_chunk < end) & (tile == last_chunk // TILE)):
        tl.store(base + position, x, mask=(position >= lead) & (position < end) & (whole == 0))


def filter_logits(
    logits: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    tile: int | None = None,
) -> Tensor:
    """Launch `specops::filter_logits`; arguments as the op's, checked there. `tile` overrides the table (tests,
    benchmarks)."""
    num_rows, vocab_size = logits.shape
    output = torch.empty(num_rows, vocab_size, dtype=logits.dtype, device=logits.device)
    if launch.hint(num_rows) == 0:
        return output
    tile = tile or launch.tile_size(vocab_size, num_rows)
    num_tiles = launch.num_tiles(logits, tile)
    launch.check_grid("logits", logits, 1, num_tiles)
    bounds = filter_bounds(logits.unsqueeze(1), temperature, top_k, top_p, min_p, tile=tile)
    wrap_triton(mask_kernel)[(num_rows, num_tiles)](
        logits,
        bounds,
        output,
        logits.stride(0),
        logits.stride(1),
        vocab_size,
        num_tiles,
        UNIT_STRIDE=logits.stride(1) == 1,
        TILE=tile,
        num_warps=launch.num_warps(tile),
    )
    return output
