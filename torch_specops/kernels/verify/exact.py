"""`specops::verify_exact` on CUDA: accept the drafts, then draw from the residual (docs/math.md has the law).

Accept draft x_i iff u_i * l * q_i(x_i) < p_i(x_i); at the first failure n draw from max(p_n - q_n, 0), after K
acceptances from p_K. p_i(v) = exp(z_i(v) - max_i) / sum_i needs two numbers of a row, not the softmax of it.

Bytes per sequence, with s_p and s_q bytes a logit:
    without draft_lse   V * ((K + 1) * s_p + K * s_q), each row once
    with draft_lse      V * ((K + 1) * s_p + s_q): K + 1 target rows and the draft row of the rejection
    one-hot drafts      V * (K + 1) * s_p
and the row pair of the rejection once more (in L2). Rows behind a padded draft, draft rows of greedy sequences and
the whole of a sequence without a lawful temperature are not read. Nothing of size [.., V] is written; the scratch
is 8 bytes per (row, tile) and per (sequence, tile).

With filters the search for the bounds of the K + 1 target and K draft rows comes first (`filter/bounds.py` has its
bytes and launches), and whatever is loaded of a row is masked by the row's own bounds.

Three launches, each a grid over what it writes, so there are no races, atomics or counters:
1. `stats_kernel`, one program per (row, tile): maximum and sum of exponentials (greedy rows: the argmax).
2. `residual_kernel` (`exact_residual.py`), one program per (sequence, tile): combines the partials, walks the drafts
   to n (every program of a sequence computes the same n in the same order), and sums its tile's residual weights.
3. `draw_kernel`, one program per sequence: picks the tile that s falls into, rescans it, writes the output row.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..filter import filter_bounds
from ..launch import wrap_triton
from ..rows import (
    bounds_of,
    combine_argmax,
    exponential,
    inverse_temperature,
    load_kept_logits,
    load_own_tile,
    load_partials,
    pick_tile,
    pick_token,
    row_lead,
    scale,
    tile_argmax,
    tile_stats,
    tile_tokens,
)
from . import walk
from .exact_residual import residual_kernel, residual_weights
from .walk import count_valid, store_output

__all__ = ["verify_exact"]


@launch.jit
def stats_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B]
    partial_ptr,  # [B, R, num_tiles, 2], R = K+1 target rows, then K draft rows if they are read
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_t,
    num_drafts,
    vocab_size,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    DRAFT_STATS: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    bounds_ptr=None,  # [B, K+1 or 2K+1, 2] bounds of the target rows, then of the draft rows
    num_bounds=0,
    FILTERED: tl.constexpr = False,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    r = tl.program_id(2)
    rows_per_sequence = num_drafts + 1
    if DRAFT_STATS:
        rows_per_sequence += num_drafts
    partial_ptr += ((b * rows_per_sequence + r) * num_tiles + tile) * 2
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
    num_valid = count_valid(draft_tokens_ptr + b * stride_tokens_b, stride_tokens_k, num_drafts, vocab_size, BLOCK_K)
    if r <= num_drafts:
        if (r <= num_valid) & (temperature >= 0):
            row_ptr = target_ptr + b * stride_target_b + r.to(tl.int64) * stride_target_k
            lead = row_lead(row_ptr, TARGET_UNIT_STRIDE)
            x = load_kept_logits(
                row_ptr,
                stride_target_v,
                lead,
                vocab_size,
                tile,
                TILE,
                TARGET_UNIT_STRIDE,
                bounds_of(bounds_ptr, b, r, num_bounds, FILTERED),
                FILTERED,
            )
            if temperature == 0:
                first, second = tile_argmax(scale(x, inverse_t), tile_tokens(lead, tile, TILE))
            else:
                first, second = tile_stats(x, inverse_t)
            tl.store(partial_ptr, first)
            tl.store(partial_ptr + 1, second)
    if DRAFT_STATS:
        i = r - num_drafts - 1
        if (i >= 0) & (i < num_valid) & (temperature > 0):
            row_ptr = draft_ptr + b * stride_draft_b + i.to(tl.int64) * stride_draft_k
            lead = row_lead(row_ptr, DRAFT_UNIT_STRIDE)
            x = load_kept_logits(
                row_ptr,
                stride_draft_v,
                lead,
                vocab_size,
                tile,
                TILE,
                DRAFT_UNIT_STRIDE,
                bounds_of(bounds_ptr, b, r, num_bounds, FILTERED),
                FILTERED,
            )
            first, second = tile_stats(x, inverse_t)
            tl.store(partial_ptr, first)
            tl.store(partial_ptr + 1, second)


@launch.jit
def draw_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    sample_uniforms_ptr,  # [B]
    temperature_ptr,  # [B]
    partial_ptr,  # [B, R, num_tiles, 2]
    mass_ptr,  # [B, num_tiles, 2] residual mass, and whether p and q differ there
    state_ptr,  # [B, 4]
    bounds_ptr,  # [B, K+1 or 2K+1, 2]
    num_accepted_ptr,  # [B]
    output_tokens_ptr,  # [B, K+1]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_s,
    stride_t,
    num_drafts,
    vocab_size,
    num_tiles,
    num_bounds,
    HAS_TEMPERATURE: tl.constexpr,
    ONE_HOT: tl.constexpr,
    DRAFT_STATS: tl.constexpr,
    FILTERED: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    rows_per_sequence = num_drafts + 1
    if DRAFT_STATS:
        rows_per_sequence += num_drafts
    tokens_ptr = draft_tokens_ptr + b * stride_tokens_b
    num_valid = count_valid(tokens_ptr, stride_tokens_k, num_drafts, vocab_size, BLOCK_K)
    n = tl.load(num_accepted_ptr + b)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)

    next_token = -1
    if temperature >= 0:
        only = b * rows_per_sequence + n + tl.zeros((1,), tl.int64)
        first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
        if temperature == 0:
            next_token = tl.max(combine_argmax(first, second), 0)
        else:
            inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
            p_shift = tl.load(state_ptr + b * 4)
            p_weight = tl.load(state_ptr + b * 4 + 1)
            q_shift = tl.load(state_ptr + b * 4 + 2)
            q_weight = tl.load(state_ptr + b * 4 + 3)
            s = tl.load(sample_uniforms_ptr + b * stride_s)
            index = tl.arange(0, BLOCK_T)
            weighed = (index < num_tiles) & (n < num_valid)
            residual = tl.load(mass_ptr + (b * num_tiles + index) * 2, mask=weighed, other=0.0)
            differs = tl.load(mass_ptr + (b * num_tiles + index) * 2 + 1, mask=weighed, other=0.0)
            # The residual after a rejection; p for the bonus, after padding and for an empty residual.
            has_residual = (tl.sum(residual, 0) > 0) & (tl.max(differs, 0) > 0)
            p_mass = tl.max(second * exponential(first - p_shift) * p_weight, 0)
            tile, threshold = pick_tile(tl.where(has_residual, residual, p_mass), s)

            target_row_ptr = target_ptr + b * stride_target_b + n * stride_target_k
            lead = row_lead(target_row_ptr, TARGET_UNIT_STRIDE)
            v = tile_tokens(lead, tile, TILE)
            z_p = load_own_tile(
                target_row_ptr,
                stride_target_v,
                lead,
                vocab_size,
                tile,
                inverse_t,
                TILE,
                TARGET_UNIT_STRIDE,
                bounds_of(bounds_ptr, b, n, num_bounds, FILTERED),
                FILTERED,
            )
            weight = exponential(z_p - p_shift) * p_weight
            if has_residual:
                weight, _ = residual_weights(
                    weight,
                    z_p,
                    v,
                    draft_ptr + b * stride_draft_b + n * stride_draft_k,
                    stride_draft_v,
                    lead,
                    vocab_size,
                    tile,
                    inverse_t,
                    q_shift,
                    q_weight,
                    tl.load(tokens_ptr + n * stride_tokens_k).to(tl.int32),
                    ONE_HOT,
                    DRAFT_UNIT_STRIDE,
                    TILE,
                    bounds_of(bounds_ptr, b, num_drafts + 1 + n, num_bounds, FILTERED),
                    FILTERED,
                )
            next_token = pick_token(weight, v, threshold)
    store_output(
        output_tokens_ptr + b * (num_drafts + 1), tokens_ptr, stride_tokens_k, n, num_drafts, next_token, BLOCK_K
    )


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    argmax_lenience: float = 1.0,
    *,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch `specops::verify_exact`; arguments as the op's, checked there. `tile` overrides the table (tests,
    benchmarks)."""
    batch, num_rows, vocab_size = target_logits.shape
    num_drafts = num_rows - 1
    device = target_logits.device
    output_tokens = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    if launch.hint(batch) == 0:
        return output_tokens, num_accepted

    draft_stats = draft_logits is not None and draft_lse is None and num_drafts > 0
    rows_per_sequence = num_rows + (num_drafts if draft_stats else 0)
    tile = tile or launch.tile_size(vocab_size, batch * rows_per_sequence)
    num_tiles = launch.num_tiles(target_logits, tile, draft_logits)
    launch.check_grid("target_logits", target_logits, num_rows + num_drafts, num_tiles)
    partial = torch.empty(batch, rows_per_sequence, num_tiles, 2, dtype=torch.float32, device=device)
    mass = torch.empty(batch, num_tiles, 2, dtype=torch.float32, device=device)
    state = torch.empty(batch, 4, dtype=torch.float32, device=device)

    filtered = top_k is not None or top_p is not None or min_p is not None
    # An absent tensor is passed as a present one that the kernels do not touch.
    bounds = mass
    if filtered:
        bounds = filter_bounds(target_logits, temperature, top_k, top_p, min_p, draft_logits, tile=tile)
    draft = target_logits if draft_logits is None else draft_logits
    t = sample_uniforms if temperature is None else temperature
    lse = accept_uniforms if draft_lse is None else draft_lse
    flags = {
        "HAS_TEMPERATURE": temperature is not None,
        "DRAFT_STATS": draft_stats,
        "FILTERED": filtered,
        "TARGET_UNIT_STRIDE": target_logits.stride(2) == 1,
        "DRAFT_UNIT_STRIDE": draft.stride(2) == 1,
        "TILE": tile,
        "BLOCK_K": launch.lanes(num_rows),
        "num_warps": launch.num_warps(tile),
    }
    block_t = launch.lanes(num_tiles)
    tiles_per_program = launch.tiles_per_program(batch * num_tiles)
    wrap_triton(stats_kernel)[(batch, num_tiles, rows_per_sequence)](
        target_logits,
        draft,
        draft_tokens,
        t,
        partial,
        *target_logits.stride(),
        *draft.stride(),
        *draft_tokens.stride(),
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds_ptr=bounds,
        num_bounds=bounds.shape[1],
        **(flags | {"num_warps": launch.stats_warps(tile)}),
    )
    wrap_triton(residual_kernel)[(batch, triton.cdiv(num_tiles, tiles_per_program))](
        target_logits,
        draft,
        draft_tokens,
        accept_uniforms,
        t,
        lse,
        partial,
        mass,
        state,
        bounds,
        num_accepted,
        *target_logits.stride(),
        *draft.stride(),
        *draft_tokens.stride(),
        *accept_uniforms.stride(),
        t.stride(0),
        *lse.stride(),
        num_drafts,
        vocab_size,
        num_tiles,
        tiles_per_program,
        bounds.shape[1],
        lenience,
        math.log(argmax_lenience),
        ONE_HOT=draft_logits is None,
        ARGMAX_LENIENT=argmax_lenience < 1,
        WALK=walk.width(block_t),
        BLOCK_T=block_t,
        **flags,
    )
    wrap_triton(draw_kernel)[(batch,)](
        target_logits,
        draft,
        draft_tokens,
        sample_uniforms,
        t,
        partial,
        mass,
        state,
        bounds,
        num_accepted,
        output_tokens,
        *target_logits.stride(),
        *draft.stride(),
        *draft_tokens.stride(),
        sample_uniforms.stride(0),
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds.shape[1],
        ONE_HOT=draft_logits is None,
        BLOCK_T=block_t,
        **flags,
    )
    return output_tokens, num_accepted
