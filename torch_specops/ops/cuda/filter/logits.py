"""`specops::filter_logits` on CUDA: a copy of the logits with -inf for removed tokens.

In addition to the search (`bounds.py`), V * s bytes are read and V * s bytes are written per row. There is one launch
more: `mask_kernel`, one program per (row, tile).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments import Filters
from .. import launch
from ..tiles import load_logits_beside, row_lead, tile_tokens, within_bounds
from .bounds import filter_bounds


@triton.jit
def store_aligned(row_ptr, x, lead, vocab_size, tile, TILE: tl.constexpr):
    """Store a tile of a row: whole 16-byte chunks at once, and the two ends of the row entry by entry, as
    `load_aligned` loads it."""
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


@launch.jit
def mask_kernel(
    logits_ptr,  # [N, V]
    bounds_ptr,  # [N, 2]
    output_ptr,  # [N, V]
    stride_n,
    stride_v,
    vocab_size,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    output_row_ptr = output_ptr + row * vocab_size
    # Count tiles from the boundary of the output row. The input's rows have the same alignment, unless the input is a
    # slice.
    lead = row_lead(output_row_ptr, None)
    x = load_logits_beside(logits_ptr + row * stride_n, stride_v, lead, vocab_size, tile, TILE)
    kept = within_bounds(x, tile_tokens(lead, tile, TILE), bounds_ptr, row).to(x.dtype)
    store_aligned(output_row_ptr, kept, lead, vocab_size, tile, TILE)


def filter_logits(logits: Tensor, filters: Filters, *, tile: int | None = None) -> Tensor:
    """Launch the kernels of `specops::filter_logits`, which has checked the arguments. Tests and benchmarks set
    `tile`."""
    num_rows, vocab_size = logits.shape
    output = torch.empty(num_rows, vocab_size, dtype=logits.dtype, device=logits.device)
    tile = tile or launch.tile_size(vocab_size, num_rows)
    num_tiles = launch.num_tiles(logits, tile)
    launch.check_grid("logits", logits, 1, num_tiles)
    values = {
        "logits_ptr": logits,
        "bounds_ptr": filter_bounds(logits.unsqueeze(1), filters, tile=tile)[0],
        "output_ptr": output,
        **launch.logits_strides(("stride_n", "stride_v"), logits),
        "vocab_size": vocab_size,
        "TILE": tile,
    }
    launch.run(mask_kernel, (num_rows, num_tiles), values, launch.num_warps(tile))
    return output
