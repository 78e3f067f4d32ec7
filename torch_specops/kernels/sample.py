"""`specops::sample` on CUDA: draw one token per row of softmax(logits / T), and its logsumexp.

Bytes: V * s per row, read once, and one tile of it again (in L2). Two launches:
1. `stats_kernel`, one program per (row, tile): the tile's maximum and sum of exponentials, 8 bytes.
2. `draw_kernel`, one program per row: combine the partials in tile order, pick the tile that s falls into, rescan it.
Scratch: 8 bytes per tile, V / TILE of them a row. No float atomics: bitwise repeatable.
With filters the search for the rows' bounds comes first (`filter/bounds.py`); both kernels mask what they load.
"""

import torch
import triton.language as tl
from torch import Tensor

from . import launch
from .filter import filter_bounds
from .launch import wrap_triton
from .rows import (
    FLOAT32_MAX,
    combine_argmax,
    combine_stats,
    exponential,
    inverse_temperature,
    load_kept_logits,
    load_own_tile,
    load_partials,
    pick_tile,
    pick_token,
    reciprocal,
    row_lead,
    scale,
    tile_argmax,
    tile_stats,
    tile_tokens,
)

__all__ = ["sample"]


@launch.jit
def stats_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N]
    partial_ptr,  # [N, num_tiles, 2]
    bounds_ptr,  # [N, 2]
    stride_n,
    stride_v,
    stride_t,
    vocab_size,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    FILTERED: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row * stride_t)
    row_ptr = logits_ptr + row * stride_n
    lead = row_lead(row_ptr, UNIT_STRIDE)
    inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
    x = load_kept_logits(row_ptr, stride_v, lead, vocab_size, tile, TILE, UNIT_STRIDE, bounds_ptr + row * 2, FILTERED)
    if temperature == 0:
        first, second = tile_argmax(scale(x, inverse_t), tile_tokens(lead, tile, TILE))
    else:
        first, second = tile_stats(x, inverse_t)
    own_partial_ptr = partial_ptr + (row * num_tiles + tile) * 2
    tl.store(own_partial_ptr, first)
    tl.store(own_partial_ptr + 1, second)


@launch.jit
def draw_kernel(
    logits_ptr,  # [N, V]
    uniforms_ptr,  # [N]
    temperature_ptr,  # [N]
    partial_ptr,  # [N, num_tiles, 2]
    bounds_ptr,  # [N, 2]
    tokens_ptr,  # [N]
    lse_ptr,  # [N]
    stride_n,
    stride_v,
    stride_u,
    stride_t,
    vocab_size,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    FILTERED: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row * stride_t)
    only = row + tl.zeros((1,), tl.int64)
    first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
    if temperature == 0:
        token = tl.max(combine_argmax(first, second), 0)
        lse = tl.where(token >= 0, 0.0, float("-inf"))
    else:
        z_max, z_sum = combine_stats(first, second)
        row_max = tl.max(z_max, 0)
        row_sum = tl.max(z_sum, 0)
        shift = tl.maximum(row_max, -FLOAT32_MAX)
        weight = reciprocal(row_sum)
        mass = tl.max(second * exponential(first - shift) * weight, 0)
        tile, threshold = pick_tile(mass, tl.load(uniforms_ptr + row * stride_u))
        row_ptr = logits_ptr + row * stride_n
        lead = row_lead(row_ptr, UNIT_STRIDE)
        inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
        z = load_own_tile(
            row_ptr,
            stride_v,
            lead,
            vocab_size,
            tile,
            inverse_t,
            TILE,
            UNIT_STRIDE,
            bounds_ptr + row * 2,
            FILTERED,
        )
        token = pick_token(exponential(z - shift) * weight, tile_tokens(lead, tile, TILE), threshold)
        lse = row_max + tl.log(row_sum)
    lawful = (token >= 0) & (temperature >= 0)
    tl.store(tokens_ptr + row, tl.where(lawful, token, -1).to(tl.int64))
    tl.store(lse_ptr + row, tl.where(lawful, lse, float("-inf")))


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch `specops::sample`; arguments as the op's, checked there. `tile` overrides the table (tests,
    benchmarks)."""
    num_rows, vocab_size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    lse = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if launch.hint(num_rows) == 0:
        return tokens, lse
    tile = tile or launch.tile_size(vocab_size, num_rows)
    num_tiles = launch.num_tiles(logits, tile)
    launch.check_grid("logits", logits, 1, num_tiles)
    partial = torch.empty(num_rows, num_tiles, 2, dtype=torch.float32, device=logits.device)
    filtered = top_k is not None or top_p is not None or min_p is not None
    # An absent tensor is passed as a present one that the kernel does not touch.
    bounds = partial
    if filtered:
        bounds = filter_bounds(logits.unsqueeze(1), temperature, top_k, top_p, min_p, tile=tile)
    t = uniforms if temperature is None else temperature
    flags = {
        "HAS_TEMPERATURE": temperature is not None,
        "FILTERED": filtered,
        "UNIT_STRIDE": logits.stride(1) == 1,
        "TILE": tile,
        "num_warps": launch.num_warps(tile),
    }
    wrap_triton(stats_kernel)[(num_rows, num_tiles)](
        logits,
        t,
        partial,
        bounds,
        *logits.stride(),
        t.stride(0),
        vocab_size,
        num_tiles,
        **(flags | {"num_warps": launch.stats_warps(tile)}),
    )
    wrap_triton(draw_kernel)[(num_rows,)](
        logits,
        uniforms,
        t,
        partial,
        bounds,
        tokens,
        lse,
        logits.stride(0),
        logits.stride(1),
        uniforms.stride(0),
        t.stride(0),
        vocab_size,
        num_tiles,
        BLOCK_T=launch.lanes(num_tiles),
        **flags,
    )
    return tokens, lse
