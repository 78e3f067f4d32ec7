"""The second and third kernel of `verify_block` (`block.py`): p / q of every draft, then where the block may end."""

import triton
import triton.language as tl

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

__all__ = ["ratio_kernel", "reach_kernel"]

# The exponential of the first is finite in float64; so is the product of the second with it.
LARGEST_EXPONENT = tl.constexpr(300.0)
LARGEST_SCALE = tl.constexpr(1e150)


@triton.jit
def compose(scale, cap, next_scale, next_cap):
    """x -> min(x * scale, cap), then x -> min(x * next_scale, next_cap), as one such map."""
    return tl.minimum(scale * next_scale, LARGEST_SCALE), tl.minimum(cap * next_scale, next_cap)


@triton.jit(
    do_not_specialize=[
        "stride_target_b",
        "stride_target_k",
        "stride_target_v",
        "stride_draft_b",
        "stride_draft_k",
        "stride_draft_v",
        "stride_tokens_b",
        "stride_tokens_k",
        "stride_t",
        "stride_lse_b",
        "stride_lse_k",
        "num_drafts",
        "vocab_size",
        "num_tiles",
        "num_bounds",
    ]
)
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
    row = tl.program_id(0).to(tl.int64)
    b = row // num_drafts
    i = row % num_drafts
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


@triton.jit(do_not_specialize=["stride_u_b", "stride_u_k", "stride_t", "num_drafts"])
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
    tl.store(reach_ptr + k, tl.where(open & (last_certain == 0), 1.0, -1.0), mask=(k == 0) & (k < num_drafts))
    tl.store(num_accepted_ptr + b, tl.where(open, -1, n).to(tl.int64))
