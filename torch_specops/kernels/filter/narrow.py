"""One pass of the search for a row's bounds (`bounds.py`): choose a bucket from the last pass, divide it into 16."""

import triton.language as tl

from .. import launch
from ..rows import exponential, inverse_temperature, load_own_logits, row_lead, scale
from .search import (
    BUCKETS,
    ENTRIES,
    MASS,
    NO_KEY,
    choose_bucket,
    is_filtered,
    key_value,
    load_amounts,
    load_filters,
    load_tops,
    lowest_key,
    order_key,
    row_of,
    search_threshold,
)

__all__ = ["narrow_kernel"]


@launch.jit
def narrow_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V], of the same dtype
    temperature_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    top_ptr,  # [B, R + K, num_tiles] highest key; the first pass writes it
    previous_ptr,  # [B, R + K, num_tiles, BUCKETS] what the pass before found
    current_ptr,  # the same of this pass
    previous_search_ptr,  # [B, R + K, 4] lo, amount above, threshold, and whether the amounts were written
    search_ptr,
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
    vocab_size,
    num_tiles,
    index,
    search,
    shift,
    previous_search,
    previous_shift,
    FIRST: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
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
    if is_filtered(temperature, top_k, top_p, min_p):
        DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
        inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
        wanted = ((search == ENTRIES) & (top_k > 0)) | ((search == MASS) & (top_p < 1))

        # Where the search stands: every program of a row finds the same.
        lo = lowest_key(DTYPE)
        above = tl.full((), 0.0, tl.float64)
        threshold = tl.full((), -1.0, tl.float64)
        reads = True
        z_max = 0.0
        if not FIRST:
            tops = load_tops(top_ptr, row, num_tiles, BLOCK_T)
            t = tl.arange(0, BLOCK_T)
            tile_top = tl.max(tl.where(t == tile, tops, NO_KEY), 0)
            top = tl.max(tops, 0)
            z_max = scale(key_value(top, DTYPE), inverse_t)
            lo = tl.load(previous_search_ptr + row * 4).to(tl.int32)
            above = tl.load(previous_search_ptr + row * 4 + 1)
            threshold = tl.load(previous_search_ptr + row * 4 + 2)
            own = 1.0
            if tl.load(previous_search_ptr + row * 4 + 3) > 0:
                amounts = load_amounts(previous_ptr, row, num_tiles, BLOCK_T)
                if (index == 1) & (previous_search == MASS):
                    # The first pass knew the maximum of its tile only.
                    z_tile = tl.where(tops > NO_KEY, scale(key_value(tops, DTYPE), inverse_t), float("-inf"))
                    amounts = amounts * exponential(z_tile - z_max)[:, None]
                total = tl.sum(amounts.to(tl.float64), 0)
                threshold = search_threshold(threshold, previous_search, top_k, top_p, total)
                bucket, above = choose_bucket(total, above, threshold)
                lo += bucket << previous_shift
                chosen = (t == tile)[:, None] & (tl.arange(0, BUCKETS) == bucket)[None, :]
                own = tl.sum(tl.sum(tl.where(chosen, amounts, 0.0), 1), 0)
            if search != previous_search:
                above = tl.full((), 0.0, tl.float64)
                threshold = tl.full((), -1.0, tl.float64)
                own = 1.0
            # A pass whose lowest bucket would hold all that is left says nothing, except the last, which counts ties.
            left = (top - lo).to(tl.uint32, bitcast=True) >> shift
            wanted = wanted & ((left > 0) | (shift == 0)) & (top > NO_KEY)
            reads = wanted & (tile_top >= lo) & (own > 0)
        if tile == 0:
            tl.store(search_ptr + row * 4, lo.to(tl.float64))
            tl.store(search_ptr + row * 4 + 1, above)
            tl.store(search_ptr + row * 4 + 2, threshold)
            tl.store(search_ptr + row * 4 + 3, wanted.to(tl.float64))

        j = tl.arange(0, BUCKETS)
        found = tl.zeros((BUCKETS,), tl.float32)
        if reads:
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
            key = tl.where(x.to(tl.float32) > float("-inf"), order_key(x), NO_KEY)
            if FIRST:
                highest = tl.max(key, 0)
                tl.store(top_ptr + row * num_tiles + tile, highest)
                z_max = scale(key_value(highest, DTYPE), inverse_t)
            if wanted:
                inside = key >= lo
                amount = tl.where(inside, 1.0, 0.0)
                if (search == MASS) & (shift > 0):
                    amount = tl.where(inside, exponential(scale(x, inverse_t) - z_max), 0.0)
                bucket = (key - lo).to(tl.uint32, bitcast=True) >> shift
                here = bucket[None, :] == j.to(tl.uint32)[:, None]
                found = tl.sum(tl.where(here, amount[None, :], 0.0), 1)
        if wanted:
            tl.store(current_ptr + (row * num_tiles + tile) * BUCKETS + j, found)
