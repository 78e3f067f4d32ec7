"""The small kernels of `verify_block` (`block.py`): p / q of every draft, where the block may end, where it does."""

import triton
import triton.language as tl

from .. import launch
from ..rows import (
    FLOAT32_MAX,
    bounds_of,
    combine_argmax,
    combine_stats,
    inverse_temperature,
    load_partials,
    reciprocal,
)
from .walk import count_valid, load_scaled, stats_from_lse

__all__ = ["decide_kernel", "ratio_kernel", "reach_kernel"]

# The exponential of the first is finite in float64; so is the product of the second with it.
LARGEST_EXPONENT = tl.constexpr(300.0)
LARGEST_SCALE = tl.constexpr(1e150)


@triton.jit
def compose(scale, cap, next_scale, next_cap):
    """x -> min(x * scale, cap), then x -> min(x * next_scale, next_cap), as one such map."""
    return tl.minimum(scale * next_scale, LARGEST_SCALE), tl.minimum(cap * next_scale, next_cap)


@launch.jit
def ratio_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B]
    draft_lse_ptr,  # [B, K]
    partial_ptr,  # [B, R, num_tiles, 2], R = K+1 target rows, then K draft rows if they are read
    bounds_ptr,  # [B, K+1 or 2K+1, 2]
    state_ptr,  # [B, K, 4] shift and weight of p_i, of q_i
    ratio_ptr,  # [B, K] float64 p / q of draft i; -1 where the block ends before it, or a greedy sequence rejects it
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_t,
    stride_lse_b,
    stride_lse_k,
    num_drafts,
    vocab_size,
    num_tiles,
    num_bounds,
    HAS_TEMPERATURE: tl.constexpr,
    ONE_HOT: tl.constexpr,
    DRAFT_STATS: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    row = b * num_drafts + i
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
    tokens_ptr = draft_tokens_ptr + b * stride_tokens_b
    num_valid = count_valid(tokens_ptr, stride_tokens_k, num_drafts, vocab_size, BLOCK_K)

    ratio = tl.full((), -1.0, tl.float64)
    if (i < num_valid) & (temperature >= 0):
        x = tl.load(tokens_ptr + i * stride_tokens_k).to(tl.int64)
        rows_per_sequence = num_drafts + 1
        if DRAFT_STATS:
            rows_per_sequence += num_drafts
        only = b * rows_per_sequence + i + tl.zeros((1,), tl.int64)
        first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
        if temperature == 0:
            ratio = tl.where(tl.max(combine_argmax(first, second), 0).to(tl.int64) == x, 1.0, ratio)
        else:
            row_max, row_sum = combine_stats(first, second)
            p_max = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
            p_sum = tl.max(row_sum, 0)
            q_max = 0.0
            q_sum = 1.0
            z_p = load_scaled(
                target_ptr + b * stride_target_b,
                i * stride_target_k,
                x * stride_target_v,
                inverse_t,
                True,
                x,
                bounds_of(bounds_ptr, b, i, num_bounds, FILTERED),
                FILTERED,
            )
            exponent = z_p.to(tl.float64) - p_max.to(tl.float64)
            has_ratio = z_p > float("-inf")
            if not ONE_HOT:
                if DRAFT_STATS:
                    first, second = load_partials(partial_ptr, only + num_drafts + 1, num_tiles, only >= 0, BLOCK_T)
                    row_max, row_sum = combine_stats(first, second)
                    q_max = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
                    q_sum = tl.max(row_sum, 0)
                else:
                    q_max, q_sum = stats_from_lse(tl.load(draft_lse_ptr + b * stride_lse_b + i * stride_lse_k))
                z_q = load_scaled(
                    draft_ptr + b * stride_draft_b,
                    i * stride_draft_k,
                    x * stride_draft_v,
                    inverse_t,
                    True,
                    x,
                    bounds_of(bounds_ptr, b, num_drafts + 1 + i, num_bounds, FILTERED),
                    FILTERED,
                )
                has_ratio = has_ratio & (z_q > float("-inf")) & (q_sum > 0)
                exponent -= z_q.to(tl.float64) - q_max.to(tl.float64)
            # Where both rows have the same stats the quotient is exactly 1.
            sums = tl.where(q_sum == p_sum, 1.0, q_sum * reciprocal(p_sum)).to(tl.float64)
            exponent = tl.where(has_ratio, tl.minimum(exponent, LARGEST_EXPONENT), 0.0)
            value = tl.where(has_ratio, tl.exp(exponent) * sums, 0.0)
            ratio = tl.where(p_sum > 0, value, ratio)
            state = state_ptr + row * 4
            tl.store(state, p_max)
            tl.store(state + 1, reciprocal(p_sum))
            tl.store(state + 2, q_max)
            tl.store(state + 3, reciprocal(q_sum))
    tl.store(ratio_ptr + row, ratio)


@launch.jit
def reach_kernel(
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B]
    ratio_ptr,  # [B, K] float64
    reach_ptr,  # [B, K] float64 P_i where the block may end before draft i, else -1
    num_accepted_ptr,  # [B]; -1 where the residuals are to decide
    stride_u_b,
    stride_u_k,
    stride_t,
    num_drafts,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    k = tl.arange(0, BLOCK_K)
    ratio = tl.load(ratio_ptr + b * num_drafts + k, mask=k < num_drafts, other=-1.0)
    # The length of the block, or what a greedy sequence accepts.
    n = tl.min(tl.where(ratio >= 0, BLOCK_K, k), 0)
    one = tl.full((BLOCK_K,), 1.0, tl.float64)
    scale, cap = tl.associative_scan((tl.maximum(ratio, 0.0), one), 0, compose)

    # Lane k has what concerns the end of the block behind draft k, that is before draft k + 1.
    reach = tl.minimum(scale, cap)
    u = tl.load(accept_uniforms_ptr + b * stride_u_b + k.to(tl.int64) * stride_u_k, mask=k < n, other=0.0)
    passed = (k < n) & (reach > 0) & (u.to(tl.float64) < reach)
    last_certain = tl.max(tl.where((k + 1 < n) & (reach == 1), k + 1, 0), 0)
    end = tl.max(tl.where(passed, k + 1, 0), 0)
    open = (end < n) & (temperature > 0)
    candidate = open & (passed | (k + 1 == last_certain)) & (k + 1 < n) & (k + 1 >= last_certain)
    reach_ptr += b * num_drafts
    tl.store(reach_ptr + k + 1, tl.where(candidate, reach, -1.0), mask=k + 1 < num_drafts)
    tl.store(reach_ptr, tl.where(open & (last_certain == 0), 1.0, -1.0))
    tl.store(num_accepted_ptr + b, tl.where(open, -1, n).to(tl.int64))


@launch.jit
def decide_kernel(
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B]
    partial_ptr,  # [B, R, num_tiles, 2]
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    mass_ptr,  # [B, K, num_tiles, 2] residual mass, and whether p and q differ there
    row_state_ptr,  # [B, 4] shift and weight of P p_n, of q_n
    row_mass_ptr,  # [B, num_tiles, 2] the masses of row n; zero where the next token is drawn from p_n
    num_accepted_ptr,  # [B]
    stride_u_b,
    stride_u_k,
    stride_t,
    num_drafts,
    num_tiles,
    HAS_TEMPERATURE: tl.constexpr,
    DRAFT_STATS: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    if temperature > 0:
        n = tl.load(num_accepted_ptr + b)
        tile = tl.arange(0, BLOCK_T)
        chosen_ptr = row_mass_ptr + (b * num_tiles + tile) * 2
        if n < 0:
            for start in range(0, num_drafts, WALK):
                i = (start + tl.arange(0, WALK)).to(tl.int64)
                reach = tl.load(reach_ptr + b * num_drafts + i, mask=i < num_drafts, other=-1.0)
                candidate = reach > 0
                mass, differs = load_partials(mass_ptr, b * num_drafts + i, num_tiles, candidate, BLOCK_T)
                total = tl.sum(tl.maximum(mass, 0.0).to(tl.float64), 1)
                total = tl.where(tl.max(differs, 1) > 0, total, 0.0)
                u_ptr = accept_uniforms_ptr + b * stride_u_b + (i - 1) * stride_u_k
                u = tl.load(u_ptr, mask=candidate & (i > 0), other=0.0).to(tl.float64)
                # Where P = 1 all that is accepted later is accepted here too, also where the residual is empty.
                accepted = candidate & ((reach == 1) | (u * (total + (1.0 - reach)) < total))
                n = tl.maximum(n, tl.max(tl.where(accepted, i, -1), 0))
            tl.store(num_accepted_ptr + b, n)
            row = b * num_drafts + n
            source_ptr = mass_ptr + (row * num_tiles + tile) * 2
            for part in tl.static_range(2):
                tl.store(chosen_ptr + part, tl.load(source_ptr + part, mask=tile < num_tiles), mask=tile < num_tiles)
            weight = tl.load(state_ptr + row * 4 + 1) * tl.load(reach_ptr + row).to(tl.float32)
            tl.store(row_state_ptr + b * 4, tl.load(state_ptr + row * 4))
            tl.store(row_state_ptr + b * 4 + 1, weight)
            tl.store(row_state_ptr + b * 4 + 2, tl.load(state_ptr + row * 4 + 2))
            tl.store(row_state_ptr + b * 4 + 3, tl.load(state_ptr + row * 4 + 3))
        else:
            rows_per_sequence = num_drafts + 1
            if DRAFT_STATS:
                rows_per_sequence += num_drafts
            only = b * rows_per_sequence + n + tl.zeros((1,), tl.int64)
            first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
            row_max, row_sum = combine_stats(first, second)
            tl.store(chosen_ptr, tl.zeros((BLOCK_T,), tl.float32), mask=tile < num_tiles)
            tl.store(chosen_ptr + 1, tl.zeros((BLOCK_T,), tl.float32), mask=tile < num_tiles)
            tl.store(row_state_ptr + b * 4, tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX))
            tl.store(row_state_ptr + b * 4 + 1, reciprocal(tl.max(row_sum, 0)))
            tl.store(row_state_ptr + b * 4 + 2, 0.0)
            tl.store(row_state_ptr + b * 4 + 3, 0.0)
