"""The second kernel of `verify_exact` (`exact.py`): the walk over the drafts, and the residual of the rejection."""

import triton.language as tl

from .. import launch
from ..rows import (
    combine_stats,
    exponential,
    inverse_temperature,
    load_partials,
    load_scaled,
    load_scaled_beside,
    load_temperature,
    reciprocal,
    row_lead,
    row_stats,
    store_pair,
    tile_tokens,
)
from .accept import accept_greedy, accept_sampled, count_valid, leading, load_token_logits, token_weights
from .residual import draft_row_stats, draft_stats, residual_weights, store_state

__all__ = ["residual_kernel"]


@launch.jit
def residual_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    draft_lse_ptr,  # [B, K] or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
    mass_ptr,  # [B, num_tiles, 2] residual mass, and whether p and q differ there
    state_ptr,  # [B, 4]
    num_accepted_ptr,  # [B]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    tiles_per_program,
    rows_per_sequence,
    num_bounds,
    lenience,
    argmax_gap,  # log of the lenience of greedy sequences; None: they accept the argmax alone
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1) * tiles_per_program
    first_row = b * rows_per_sequence
    # Inductor passes a Python float as float64, a launch as float32.
    lenience = tl.cast(lenience, tl.float32)
    if argmax_gap is not None:
        argmax_gap = tl.cast(argmax_gap, tl.float32)
    target_ptr += b * stride_target_b
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)

    # The walk; nothing is live behind a failure. All drafts are visited, because a loop whose end depends on the data
    # would make every reduction in it a call. The loop mostly takes one turn, and addresses of bounds that were hoisted
    # out of it made `ptxas` spill.
    n = 0
    walking = (num_valid > 0) & (temperature >= 0)
    for start in tl.range(0, num_drafts, WALK, disable_licm=bounds_ptr is not None or argmax_gap is not None):
        i = (start + tl.arange(0, WALK)).to(tl.int64)
        live = walking & (i < num_valid)
        x = tl.load(tokens_ptr + i, mask=live, other=0).to(tl.int64)
        tile_max, sum_or_token = load_partials(partial_ptr, first_row + i, num_tiles, live, BLOCK_T)
        if temperature == 0:
            z_x = load_token_logits(target_ptr, stride_target_k, stride_target_v, i, x, live, inverse_t, None, 0)
            accepted = live & accept_greedy(x, z_x, tile_max, sum_or_token, argmax_gap)
        else:
            p_max, p_sum = combine_stats(tile_max, sum_or_token)
            bounds_row = b * num_bounds + i
            z_p = load_token_logits(
                target_ptr, stride_target_k, stride_target_v, i, x, live, inverse_t, bounds_ptr, bounds_row
            )
            p_x = token_weights(z_p, p_max, p_sum)
            if draft_ptr is None:
                q_x = tl.full((WALK,), 1.0, tl.float64)
                q_sum = tl.full((WALK,), 1.0, tl.float32)
            else:
                draft_row = num_drafts + 1 + i
                bounds_row = b * num_bounds + draft_row
                q_max, q_sum = draft_stats(
                    partial_ptr, first_row + draft_row, draft_lse_ptr, b * num_drafts + i, num_tiles, live, BLOCK_T
                )
                draft_sequence_ptr = draft_ptr + b * stride_draft_b
                z_q = load_token_logits(
                    draft_sequence_ptr, stride_draft_k, stride_draft_v, i, x, live, inverse_t, bounds_ptr, bounds_row
                )
                q_x = token_weights(z_q, q_max, q_sum)
            u = tl.load(accept_uniforms_ptr + b * num_drafts + i, mask=live, other=0.0)
            accepted = live & accept_sampled(u, lenience, p_x, p_sum, q_x, q_sum)
        run = leading(accepted)
        n += run
        walking = walking & (run == WALK)

    if temperature > 0:
        p_shift, p_sum = row_stats(partial_ptr, first_row + n, num_tiles, BLOCK_T)
        p_weight = reciprocal(p_sum)
        q_shift = 0.0
        q_weight = 0.0
        if n < num_valid:
            rejected = n.to(tl.int64)
            draft_row = num_drafts + 1 + rejected
            p_bounds, q_bounds = b * num_bounds + rejected, b * num_bounds + draft_row
            if draft_ptr is not None:
                q_shift, q_sum = draft_row_stats(
                    partial_ptr, first_row + draft_row, draft_lse_ptr, b * num_drafts + rejected, num_tiles, BLOCK_T
                )
                q_weight = reciprocal(q_sum)
            row_ptr = target_ptr + rejected * stride_target_k
            lead = row_lead(row_ptr, stride_target_v)
            for tile in tl.range(first_tile, tl.minimum(first_tile + tiles_per_program, num_tiles)):
                z_p = load_scaled(
                    row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, bounds_ptr, p_bounds, TILE
                )
                weight = exponential(z_p - p_shift) * p_weight
                if draft_ptr is None:
                    x = tl.load(tokens_ptr + rejected).to(tl.int32)
                    weight, differs = tl.where(tile_tokens(lead, tile, TILE) == x, 0.0, weight), 1.0
                else:
                    draft_row_ptr = draft_ptr + b * stride_draft_b + rejected * stride_draft_k
                    z_q = load_scaled_beside(
                        draft_row_ptr, stride_draft_v, lead, vocab_size, tile, inverse_t, bounds_ptr, q_bounds, TILE
                    )
                    weight, differs = residual_weights(weight, z_p, z_q, q_shift, q_weight)
                store_pair(mass_ptr + (b * num_tiles + tile) * 2, tl.sum(weight, 0), differs)
        if first_tile == 0:
            store_state(state_ptr + b * 4, p_shift, p_weight, q_shift, q_weight)
    if first_tile == 0:
        tl.store(num_accepted_ptr + b, n.to(tl.int64))
