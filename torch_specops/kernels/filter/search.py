"""The two kernels of the search for a row's bounds (`bounds.py`): one pass of it, and its end.

A key is a logit as an int32 in the same order: 16 significant bits for a 16-bit type, 32 for float32. A search knows
a key `lo` at or below the cut, and how much lies above the bucket that begins at `lo`. A pass divides that bucket into
16 smaller ones, each tile sums up what it has in them, and the next launch chooses one.
"""

import triton
import triton.language as tl

from .. import launch
from ..rows import (
    FLOAT32_TINY,
    INT32_MAX,
    exponential,
    inverse_temperature,
    load_logits,
    load_temperature,
    row_lead,
    scale,
    store_pair,
    tile_tokens,
)

# What a pass counts: entries for top_k, their weights for top_p, nothing where only the maximum is needed.
NOTHING = tl.constexpr(0)
ENTRIES = tl.constexpr(1)
MASS = tl.constexpr(2)

# The share of top_p from which a mass has reached it, so that the rounding of top_p to float32 keeps no token more.
TOP_P_REACHED = tl.constexpr(1.0 - 2.0**-24)
BUCKETS = tl.constexpr(16)
# Below every key: that of an excluded entry, and the highest of a tile that has no other.
NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def load_filters(b, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
    """top_k (0 = off), top_p (1 = off) and min_p (0 = off) of a sequence."""
    top_k = 0
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + b)
        top_k = tl.where((k > 0) & (k < vocab_size), k, 0).to(tl.int32)
    top_p = 1.0
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + b)
    min_p = 0.0
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b)
    return top_k, top_p, min_p


@triton.jit
def is_lawful(temperature, top_p, min_p):
    """Whether the row has a law, so that something is kept. A greedy row does not look at top_p and min_p."""
    return (temperature == 0) | ((temperature > 0) & (top_p == top_p) & (min_p == min_p))


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p):
    """Whether the row must be read."""
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return is_lawful(temperature, top_p, min_p) & (temperature > 0) & filtered


@triton.jit
def find_row(logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k):
    """Row r of a sequence. The draft's rows come after the others."""
    row_ptr = logits_ptr + b * stride_b + r * stride_r
    if draft_ptr is not None:
        if r >= num_rows:
            row_ptr = draft_ptr + b * stride_draft_b + (r - num_rows) * stride_draft_k
    return row_ptr


@triton.jit
def order_key(x):
    """Raw logits -> int32 keys. The two zeros share a key; that of a NaN means nothing."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    bits = x.to(tl.int16, bitcast=True).to(tl.int32) if BITS == 16 else x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -(2 ** (BITS - 1)), 0, bits)
    return bits ^ ((bits >> 31) & (2 ** (BITS - 1) - 1))


@triton.jit
def key_value(key, DTYPE: tl.constexpr):
    """int32 keys -> raw logits in float32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    bits = key ^ ((key >> 31) & (2 ** (BITS - 1) - 1))
    x = bits.to(tl.int16).to(DTYPE, bitcast=True) if BITS == 16 else bits.to(DTYPE, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def lowest_key(DTYPE: tl.constexpr):
    """The key of the lowest logit that is not excluded, one above that of -inf."""
    return order_key(tl.full((), float("-inf"), tl.float32).to(DTYPE)) + 1


@triton.jit
def choose_bucket(amount, above, threshold):
    """[BUCKETS] amounts, and the amount above all of them -> (bucket, amount above it): the lowest bucket that holds
    something and has less than `threshold` above it. The highest that holds something always qualifies."""
    j = tl.arange(0, BUCKETS)
    before = above + tl.sum(tl.where(j[None, :] > j[:, None], amount[None, :], 0.0), 1)
    bucket = tl.min(tl.where((amount > 0) & (before < threshold), j, BUCKETS - 1), 0)
    return bucket, tl.sum(tl.where(j == bucket, before, 0.0), 0)


@triton.jit
def load_amounts(amounts_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """[BLOCK_T, BUCKETS] what every tile of a row has in each bucket."""
    t = tl.arange(0, BLOCK_T)
    # The launcher allocates these: 64 bytes a tile, so that every tile's are aligned.
    row_ptr = tl.multiple_of(amounts_ptr + row * num_tiles * BUCKETS, 16)
    offset = t[:, None] * BUCKETS + tl.arange(0, BUCKETS)[None, :]
    return tl.load(row_ptr + offset, mask=(t < num_tiles)[:, None], other=0.0)


@triton.jit
def load_tops(top_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """[BLOCK_T] the highest key of every tile of a row."""
    t = tl.arange(0, BLOCK_T)
    return tl.load(top_ptr + row * num_tiles + t, mask=t < num_tiles, other=NO_KEY)


@triton.jit
def search_threshold(threshold, search, top_k, top_p, total):
    """How much may lie above the cut: top_k entries, or top_p of the mass that the search's first pass saw, but always
    more than nothing, so that the first token stays."""
    share = tl.maximum(top_p.to(tl.float64) * TOP_P_REACHED * tl.sum(total, 0), FLOAT32_TINY)
    return tl.where(search == ENTRIES, top_k.to(tl.float64), tl.where(threshold < 0, share, threshold))


@launch.jit
def narrow_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V] of the same dtype and stride_v, or None
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    top_ptr,  # [B, R + K, num_tiles] highest key; the first pass writes it
    previous_ptr,  # [B, R + K, num_tiles, BUCKETS] what the pass before found; None: this is the first pass
    current_ptr,  # the same of this pass
    previous_search_ptr,  # [B, R + K, 4] lo, amount above, threshold, and whether the amounts were written; or None
    search_ptr,  # the same of this pass
    stride_b,
    stride_r,
    stride_v,
    stride_draft_b,
    stride_draft_k,
    num_rows,
    num_drafts,
    vocab_size,
    num_tiles,
    index,
    search,
    shift,
    previous_search,
    previous_shift,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Choose a bucket from what the pass before found, and divide it into 16."""
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
    row = b * (num_rows + num_drafts) + r
    temperature = load_temperature(temperature_ptr, b)
    top_k, top_p, min_p = load_filters(b, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    if is_filtered(temperature, top_k, top_p, min_p):
        DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
        inverse_t = inverse_temperature(temperature_ptr, temperature)
        wanted = ((search == ENTRIES) & (top_k > 0)) | ((search == MASS) & (top_p < 1))

        # Where the search stands: every program of a row finds the same.
        lo = lowest_key(DTYPE)
        above = tl.full((), 0.0, tl.float64)
        threshold = tl.full((), -1.0, tl.float64)
        reads = True
        z_max = 0.0
        if previous_ptr is not None:
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
            row_ptr = find_row(
                logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k
            )
            x = load_logits(row_ptr, stride_v, row_lead(row_ptr, stride_v), vocab_size, tile, TILE)
            key = tl.where(x.to(tl.float32) > float("-inf"), order_key(x), NO_KEY)
            if previous_ptr is None:
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
    draft_ptr,  # [B, K, V] of the same dtype and stride_v, or None
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    top_ptr,  # [B, R + K, num_tiles]
    amounts_ptr,  # [B, R + K, num_tiles, BUCKETS] entries of each of 16 keys, by the last pass
    search_ptr,  # [B, R + K, 4]
    bounds_ptr,  # [B, num_bounds, 2], of which rows first_row .. first_row + R + K are written
    stride_b,
    stride_r,
    stride_v,
    stride_draft_b,
    stride_draft_k,
    num_rows,
    num_drafts,
    first_row,
    num_bounds,
    vocab_size,
    num_tiles,
    search,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The cut from the last pass, min_p, and the first token that is kept at the cut."""
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1).to(tl.int64)
    row = b * (num_rows + num_drafts) + r
    temperature = load_temperature(temperature_ptr, b)
    top_k, top_p, min_p = load_filters(b, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    lawful = is_lawful(temperature, top_p, min_p)
    cut = tl.where(lawful, float("-inf"), float("inf"))
    first_at_cut = tl.where(lawful, 0, INT32_MAX)
    if is_filtered(temperature, top_k, top_p, min_p):
        DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
        inverse_t = inverse_temperature(temperature_ptr, temperature)
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
                num_wanted = tl.maximum(tl.ceil(((threshold - above) / tie_weight).to(tl.float32)), 1.0)
                ties = tl.sum(tl.where((j == bucket)[None, :], entries, 0.0), 1)
                num_ties = tl.sum(ties, 0)
                if num_wanted < num_ties:
                    t = tl.arange(0, BLOCK_T)
                    behind = num_ties - tl.cumsum(ties, 0)
                    tile = tl.max(tl.where((ties > 0) & (behind + ties >= num_wanted), t, 0), 0)
                    row_ptr = find_row(
                        logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k
                    )
                    lead = row_lead(row_ptr, stride_v)
                    x = load_logits(row_ptr, stride_v, lead, vocab_size, tile, TILE)
                    v = tile_tokens(lead, tile, TILE)
                    tie = ((x.to(tl.float32) > float("-inf")) & (order_key(x) == lo)).to(tl.int32)
                    # The first that is kept has this many ties up to itself.
                    rank = tl.sum(tl.where(t == tile, behind + ties, 0.0), 0) - num_wanted + 1
                    kept = (tie > 0) & (tl.cumsum(tie, 0) >= rank.to(tl.int32))
                    first_at_cut = tl.min(tl.where(kept, v, INT32_MAX), 0)
        if min_p_ptr is not None:
            if min_p > 0:
                likely = lowest_likely(top, z_max, min_p, inverse_t, DTYPE)
                first_at_cut = tl.where(likely > lo, 0, first_at_cut)
                lo = tl.maximum(likely, lo)
        cut = tl.where(top > NO_KEY, key_value(lo, DTYPE), cut)
    store_pair(bounds_ptr + (b * num_bounds + first_row + r) * 2, cut, first_at_cut.to(tl.float32, bitcast=True))
