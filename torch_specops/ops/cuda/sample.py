"""`specops::sample` on CUDA: draw one token per row of softmax(logits / T), and compute the row's logsumexp.

Bytes: V * s per row with s bytes per logit, read once, and one tile of the row again (from L2). Two launches:
1. `stats_kernel`, one program per (row, tile): the tile's maximum and sum of exponentials, 8 bytes.
2. `draw_kernel`, one program per row: combine the partials in the order of tiles, select the tile that the uniform
   falls into, and read it again to find the token.
Scratch: 8 bytes per tile, with V / TILE tiles per row. There are no float atomics, so results are bitwise repeatable.
With filters, the search for the bounds of the rows comes first (`filter/bounds.py`), and both kernels mask their loads
by the bounds. The first then reads only the parts of a row in which a token is kept.
"""

import torch
import triton.language as tl
from torch import Tensor

from ..arguments import Filters
from . import launch
from .filter import filter_bounds, top_values
from .tiles import (
    FLOAT32_MAX,
    combine_argmax,
    combine_stats,
    exponential,
    inverse_temperature,
    load_kept_parts,
    load_row_partials,
    load_scaled,
    load_temperature,
    pick_tile,
    pick_token,
    reciprocal,
    row_lead,
    scale,
    store_pair,
    tile_argmax,
    tile_stats,
    tile_tokens,
)


@launch.jit
def stats_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N] or None
    bounds_ptr,  # [N, 2] or None
    top_ptr,  # [N, 1, num_parts] maxima of parts, or None
    partial_ptr,  # [N, num_tiles, 2]
    stride_n,
    stride_v,
    vocab_size,
    num_tiles,
    num_parts,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = load_temperature(temperature_ptr, row)
    row_ptr = logits_ptr + row * stride_n
    lead = row_lead(row_ptr, stride_v)
    tops = (top_ptr, 1, num_parts)
    x = load_kept_parts(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, row, tops, row, 0, TILE, PART)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    if temperature == 0:
        tile_max, sum_or_token = tile_argmax(scale(x, inverse_t), tile_tokens(lead, tile, TILE))
    else:
        tile_max, sum_or_token = tile_stats(x, inverse_t)
    store_pair(partial_ptr + (row * num_tiles + tile) * 2, tile_max, sum_or_token)


@launch.jit
def draw_kernel(
    logits_ptr,  # [N, V]
    uniforms_ptr,  # [N]
    temperature_ptr,  # [N] or None
    bounds_ptr,  # [N, 2] or None
    partial_ptr,  # [N, num_tiles, 2]
    tokens_ptr,  # [N]
    lse_ptr,  # [N, LSE_WIDTH], with bounds if LSE_WIDTH is 3, not 1
    stride_n,
    stride_v,
    vocab_size,
    num_tiles,
    LSE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = load_temperature(temperature_ptr, row)
    # Load the uniform early, because the compiler does not move loads across the barriers of a reduction.
    uniform = tl.load(uniforms_ptr + row)
    tile_max, sum_or_token = load_row_partials(partial_ptr, row, num_tiles, BLOCK_T)
    if temperature == 0:
        token = tl.max(combine_argmax(tile_max, sum_or_token), 0)
        lse = tl.where(token >= 0, 0.0, float("-inf"))
    else:
        z_max, z_sum = combine_stats(tile_max, sum_or_token)
        row_max = tl.max(z_max, 0)
        row_sum = tl.max(z_sum, 0)
        shift = tl.maximum(row_max, -FLOAT32_MAX)
        weight = reciprocal(row_sum)
        mass = tl.max(sum_or_token * exponential(tile_max - shift) * weight, 0)
        tile, threshold = pick_tile(mass, uniform)
        row_ptr = logits_ptr + row * stride_n
        lead = row_lead(row_ptr, stride_v)
        inverse_t = inverse_temperature(temperature_ptr, temperature)
        z = load_scaled(row_ptr, stride_v, lead, vocab_size, tile, inverse_t, bounds_ptr, row, TILE)
        token = pick_token(exponential(z - shift) * weight, tile_tokens(lead, tile, TILE), threshold)
        lse = row_max + tl.log(row_sum)
    lawful = (token >= 0) & (temperature >= 0)
    tl.store(tokens_ptr + row, tl.where(lawful, token, -1).to(tl.int64))
    tl.store(lse_ptr + row * LSE_WIDTH, tl.where(lawful, lse, float("-inf")))
    if LSE_WIDTH == 3:
        cut, first_at_cut = float("-inf"), 0.0
        if bounds_ptr is not None:
            cut, first_at_cut = tl.load(bounds_ptr + row * 2), tl.load(bounds_ptr + row * 2 + 1)
        store_pair(lse_ptr + row * 3 + 1, cut, first_at_cut)


def sample(
    logits: Tensor, uniforms: Tensor, filters: Filters, with_bounds: bool = False, *, tile: int | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `specops::sample`, which has checked the arguments. Tests and benchmarks set `tile`."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lse_shape = (num_rows, 3) if with_bounds else (num_rows,)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=logits.device)
    tile = tile or launch.tile_size(vocab_size, num_rows)
    num_tiles = launch.num_tiles(logits, tile)
    launch.check_grid("logits", logits, 1, num_tiles)
    bounds = top = None
    if filters.removes_tokens:
        bounds, top = filter_bounds(logits.unsqueeze(1), filters, tile=tile)
    values = {
        "logits_ptr": logits,
        "uniforms_ptr": launch.contiguous(uniforms),
        "temperature_ptr": launch.contiguous(filters.temperature),
        "bounds_ptr": bounds,
        **top_values(top, tile),
        "partial_ptr": torch.empty(num_rows, num_tiles, 2, dtype=torch.float32, device=logits.device),
        "tokens_ptr": tokens,
        "lse_ptr": lse,
        **launch.logits_strides(("stride_n", "stride_v"), logits),
        "vocab_size": vocab_size,
        "num_tiles": num_tiles,
        "LSE_WIDTH": 3 if with_bounds else 1,
        "TILE": tile,
        "BLOCK_T": launch.padded_power_of_2(num_tiles),
    }
    launch.run(stats_kernel, (num_rows, num_tiles), values, launch.stats_warps(tile))
    launch.run(draw_kernel, (num_rows,), values, launch.num_warps(tile))
    return tokens, lse
