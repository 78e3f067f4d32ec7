"""The second kernel of `verify_exact` (`exact.py`): the walk over the drafts, and the residual of the rejection."""

import triton
import triton.language as tl

from .. import launch
from ..rows import (
    FLOAT32_MAX,
    bounds_of,
    combine_argmax,
    combine_stats,
    exponential,
    inverse_temperature,
    load_own_tile,
    load_partials,
    load_tile_of,
    reciprocal,
    row_lead,
    tile_tokens,
)
from .walk import count_valid, load_scaled, stats_from_lse, token_weight

__all__ = ["residual_kernel", "residual_weights"]


@triton.jit
def residual_weights(
    p,
    z_p,
    v,
    draft_row_ptr,
    stride_draft_v,
    lead,
    vocab_size,
    tile,
    inverse_t,
    q_shift,
    q_weight,
    x,
    ONE_HOT: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    draft_bounds_ptr=None,
    FILTERED: tl.constexpr = False,
):
    """[TILE] max(p - q, 0), and whether the two rows differ in this tile at all. Equal logits mean p = q, which the
    difference of two rounded distributions need not show: their sums may have been taken in another order, or come
    with `draft_lse`."""
    if ONE_HOT:
        weight = tl.where(v == x, 0.0, p)
        differs = 1.0
    else:
        z_q = load_tile_of(
            draft_row_ptr,
            stride_draft_v,
            lead,
            vocab_size,
            tile,
            inverse_t,
            TILE,
            DRAFT_UNIT_STRIDE,
            draft_bounds_ptr,
            FILTERED,
        )
        weight = tl.maximum(p - exponential(z_q - q_shift) * q_weight, 0.0)
        differs = tl.max((z_p != z_q).to(tl.int32), 0).to(tl.float32)
    return weight, differs


@launch.jit
def residual_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B]
    draft_lse_ptr,  # [B, K]
    partial_ptr,  # [B, R, num_tiles, 2]
    mass_ptr,  # [B, num_tiles, 2] residual mass, and whether p and q differ there
    state_ptr,  # [B, 4] shift and weight of p_n, of q_n
    bounds_ptr,  # [B, K+1 or 2K+1, 2]
    num_accepted_ptr,  # [B]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_u_b,
    stride_u_k,
    stride_t,
    stride_lse_b,
    stride_lse_k,
    num_drafts,
    vocab_size,
    num_tiles,
    tiles_per_program,
    num_bounds,
    lenience,
    argmax_gap,
    HAS_TEMPERATURE: tl.constexpr,
    ONE_HOT: tl.constexpr,
    DRAFT_STATS: tl.constexpr,
    FILTERED: tl.constexpr,
    ARGMAX_LENIENT: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    # Inductor passes a Python float as float64, a launch as float32.
    lenience, argmax_gap = tl.cast(lenience, tl.float32), tl.cast(argmax_gap, tl.float32)
    first_tile = tl.program_id(1) * tiles_per_program
    rows_per_sequence = num_drafts + 1
    if DRAFT_STATS:
        rows_per_sequence += num_drafts
    first_row = b * rows_per_sequence
    tokens_ptr = draft_tokens_ptr + b * stride_tokens_b
    num_valid = count_valid(tokens_ptr, stride_tokens_k, num_drafts, vocab_size, BLOCK_K)

    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)

    # The walk, WALK drafts at a time; nothing is live behind a failure. A loop whose end depends on the data would make
    # every reduction in it a call. What bounds add is not hoisted out of the loop, which mostly takes one turn: hoisted
    # addresses made `ptxas` spill.
    n = 0
    walking = (num_valid > 0) & (temperature >= 0)
    for start in tl.range(0, num_drafts, WALK, disable_licm=FILTERED or ARGMAX_LENIENT):
        lane = tl.arange(0, WALK)
        i = (start + lane).to(tl.int64)
        live = walking & (i < num_valid)
        x = tl.load(tokens_ptr + i * stride_tokens_k, mask=live, other=0).to(tl.int64)
        first, second = load_partials(partial_ptr, first_row + i, num_tiles, live, BLOCK_T)
        if temperature == 0:
            if ARGMAX_LENIENT:
                z_x = load_scaled(
                    target_ptr + b * stride_target_b, i * stride_target_k, x * stride_target_v, inverse_t, live
                )
                accepted = live & (z_x > float("-inf")) & (z_x - tl.max(first, 1) >= argmax_gap)
            else:
                accepted = live & (combine_argmax(first, second).to(tl.int64) == x)
        else:
            p_max, p_sum = combine_stats(first, second)
            p_x = token_weight(
                target_ptr + b * stride_target_b,
                i * stride_target_k,
                x * stride_target_v,
                inverse_t,
                p_max,
                p_sum,
                live,
                x,
                bounds_of(bounds_ptr, b, i, num_bounds, FILTERED),
                FILTERED,
            )
            if ONE_HOT:
                q_x = tl.full((WALK,), 1.0, tl.float64)
                q_sum = tl.full((WALK,), 1.0, tl.float32)
            else:
                if DRAFT_STATS:
                    first, second = load_partials(partial_ptr, first_row + num_drafts + 1 + i, num_tiles, live, BLOCK_T)
                    q_max, q_sum = combine_stats(first, second)
                else:
                    lse = tl.load(draft_lse_ptr + b * stride_lse_b + i * stride_lse_k, mask=live, other=0.0)
                    q_max, q_sum = stats_from_lse(lse)
                q_x = token_weight(
                    draft_ptr + b * stride_draft_b,
                    i * stride_draft_k,
                    x * stride_draft_v,
                    inverse_t,
                    q_max,
                    q_sum,
                    live,
                    x,
                    bounds_of(bounds_ptr, b, num_drafts + 1 + i, num_bounds, FILTERED),
                    FILTERED,
                )
            u = tl.load(accept_uniforms_ptr + b * stride_u_b + i * stride_u_k, mask=live, other=0.0)
            # u * l * q < p with both sides multiplied by the two sums: float64 division would cost a call.
            threshold = u.to(tl.float64) * lenience * q_x * p_sum.to(tl.float64)
            accepted = live & (q_x > 0) & (threshold < p_x * q_sum.to(tl.float64))
        run = tl.min(tl.where(accepted, WALK, lane), 0)
        n += run
        walking = walking & (run == WALK)
    if temperature > 0:
        only = first_row + n + tl.zeros((1,), tl.int64)
        first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
        row_max, row_sum = combine_stats(first, second)
        p_shift = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
        p_weight = reciprocal(tl.max(row_sum, 0))
        q_shift = 0.0
        q_weight = 0.0
        if n < num_valid:
            if DRAFT_STATS:
                first, second = load_partials(partial_ptr, only + num_drafts + 1, num_tiles, only >= 0, BLOCK_T)
                row_max, row_sum = combine_stats(first, second)
                q_shift = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
                q_weight = reciprocal(tl.max(row_sum, 0))
            elif not ONE_HOT:
                lse = tl.load(draft_lse_ptr + b * stride_lse_b + n.to(tl.int64) * stride_lse_k)
                q_shift, q_weight = stats_from_lse(lse)
            target_row_ptr = target_ptr + b * stride_target_b + n.to(tl.int64) * stride_target_k
            lead = row_lead(target_row_ptr, TARGET_UNIT_STRIDE)
            last_tile = tl.minimum(first_tile + tiles_per_program, num_tiles)
            for tile in tl.range(first_tile, last_tile):
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
                weight, differs = residual_weights(
                    exponential(z_p - p_shift) * p_weight,
                    z_p,
                    tile_tokens(lead, tile, TILE),
                    draft_ptr + b * stride_draft_b + n.to(tl.int64) * stride_draft_k,
                    stride_draft_v,
                    lead,
                    vocab_size,
                    tile,
                    inverse_t,
                    q_shift,
                    q_weight,
                    tl.load(tokens_ptr + n.to(tl.int64) * stride_tokens_k).to(tl.int32),
                    ONE_HOT,
                    DRAFT_UNIT_STRIDE,
                    TILE,
                    bounds_of(bounds_ptr, b, num_drafts + 1 + n, num_bounds, FILTERED),
                    FILTERED,
                )
                own_mass_ptr = mass_ptr + (b * num_tiles + tile) * 2
                tl.store(own_mass_ptr, tl.sum(weight, 0))
                tl.store(own_mass_ptr + 1, differs)
        if first_tile == 0:
            tl.store(state_ptr + b * 4, p_shift)
            tl.store(state_ptr + b * 4 + 1, p_weight)
            tl.store(state_ptr + b * 4 + 2, q_shift)
            tl.store(state_ptr + b * 4 + 3, q_weight)
    if first_tile == 0:
        tl.store(num_accepted_ptr + b, n.to(tl.int64))
