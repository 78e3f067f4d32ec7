"""The end of the search for a row's bounds (`bounds.py`): the cut, min_p, and the first token kept at the cut."""

import triton
import triton.language as tl

from .. import launch
from ..rows import INT32_MAX, exponential, inverse_temperature, load_own_logits, row_lead, scale, tile_tokens
from .search import (
    BUCKETS,
    MASS,
    NO_KEY,
    choose_bucket,
    is_filtered,
    is_lawful,
    key_value,
    load_amounts,
    load_filters,
    load_tops,
    lowest_key,
    order_key,
    row_of,
    search_threshold,
)

__all__ = ["finish_kernel"]


@triton.jit
def lowest_likely(top, z_max, min_p, inverse_t, DTYPE: tl.constexpr):
    """The lowest key whose scaled logit is at least z_max + log(min_p), by bisection: scaling keeps the order."""
    gap = tl.log(tl.minimum(min_p, 1.0))
    low = lowest_key(DTYPE).to(tl.int64)
    high = top.to(tl.int64)
    for _ in range(DTYPE.primitive_bitwidth):
        middle = (low + high) >> 1
        likely = scale(key_value(middle.to(tl.int32), DTYPE), inverse_t) - z_max >= gap
        low = tl.where(likely, low, tl.minimum(middle + 1, high))
        high = tl.where(likely, middle, high)
    return high.to(tl.int32)


@launch.jit
def finish_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    top_ptr,  # [B, R + K, num_tiles]
    amounts_ptr,  # [B, R + K, num_tiles, BUCKETS] entries of each of 16 keys, by the last pass
    search_ptr,  # [B, R + K, 4]
    bounds_ptr,  # [B, rows_per_sequence, 2], of which rows first_row .. first_row + R + K are written
    stride_b,
    stride_r,
    stride_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_t,
    stride_top_k,
    stride_top_p,
    stride_min_p,
    num_rows,
    num_drafts,
    first_row,
    rows_per_sequence,
    vocab_size,
    num_tiles,
    search,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1).to(tl.int64)
    row = b * (num_rows + num_drafts) + r
    temperature, top_k, top_p, min_p = load_filters(
        b,
        temperature_ptr,
        top_k_ptr,
        top_p_ptr,
        min_p_ptr,
        stride_t,
        stride_top_k,
        stride_top_p,
        stride_min_p,
        vocab_size,
        HAS_TEMPERATURE,
        HAS_TOP_K,
        HAS_TOP_P,
        HAS_MIN_P,
    )
    lawful = is_lawful(temperature, top_p, min_p)
    cut = tl.where(lawful, float("-inf"), float("inf"))
    first = tl.where(lawful, 0, INT32_MAX)
    if is_filtered(temperature, top_k, top_p, min_p):
        DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
        inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
        top = tl.max(load_tops(top_ptr, row, num_tiles, BLOCK_T), 0)
        z_max = scale(key_value(top, DTYPE), inverse_t)
        lo = tl.load(search_ptr + row * 4).to(tl.int32)
        if tl.load(search_ptr + row * 4 + 3) > 0:
            j = tl.arange(0, BUCKETS)
            entries = load_amounts(amounts_ptr, row, num_tiles, BLOCK_T)
            total = tl.sum(entries.to(tl.float64), 0)
            weight = tl.full((BUCKETS,), 1.0, tl.float64)
            if search == MASS:
                # Behind the key of +inf come those of NaN, which have no entries.
                z = tl.where(total > 0, scale(key_value(lo + j, DTYPE), inverse_t), float("-inf"))
                weight = exponential(z - z_max).to(tl.float64)
            mass = total * weight
            threshold = search_threshold(tl.load(search_ptr + row * 4 + 2), search, top_k, top_p, mass)
            bucket, above = choose_bucket(mass, tl.load(search_ptr + row * 4 + 1), threshold)
            lo += bucket
            if search == MASS:
                # Of the tokens at the cut, those of highest id, as many as begin below the threshold.
                tie_weight = tl.sum(tl.where(j == bucket, weight, 0.0), 0)
                wanted = tl.maximum(tl.ceil(((threshold - above) / tie_weight).to(tl.float32)), 1.0)
                ties = tl.sum(tl.where((j == bucket)[None, :], entries, 0.0), 1)
                num_ties = tl.sum(ties, 0)
                if wanted < num_ties:
                    t = tl.arange(0, BLOCK_T)
                    behind = num_ties - tl.cumsum(ties, 0)
                    tile = tl.max(tl.where((ties > 0) & (behind + ties >= wanted), t, 0), 0)
                    row_ptr, stride = row_of(
                        logits_ptr,
                        draft_ptr,
                        b,
                        r,
                        num_rows,
                        stride_b,
                        stride_r,
                        stride_v,
                        stride_draft_b,
                        stride_draft_k,
                        stride_draft_v,
                    )
                    lead = row_lead(row_ptr, UNIT_STRIDE)
                    x = load_own_logits(row_ptr, stride, lead, vocab_size, tile, TILE, UNIT_STRIDE)
                    tie = ((x.to(tl.float32) > float("-inf")) & (order_key(x) == lo)).to(tl.int32)
                    # The first that is kept has this many ties up to itself.
                    rank = tl.sum(tl.where(t == tile, behind + ties, 0.0), 0) - wanted + 1
                    kept = (tie > 0) & (tl.cumsum(tie, 0) >= rank.to(tl.int32))
                    first = tl.min(tl.where(kept, tile_tokens(lead, tile, TILE), INT32_MAX), 0)
        if HAS_MIN_P:
            if min_p > 0:
                likely = lowest_likely(top, z_max, min_p, inverse_t, DTYPE)
                first = tl.where(likely > lo, 0, first)
                lo = tl.maximum(likely, lo)
        cut = tl.where(top > NO_KEY, key_value(lo, DTYPE), cut)
    offset = (b * rows_per_sequence + first_row + r) * 2
    tl.store(bounds_ptr + offset, cut)
    tl.store(bounds_ptr + offset + 1, first.to(tl.float32, bitcast=True))
