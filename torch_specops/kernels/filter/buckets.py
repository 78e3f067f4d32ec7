"""Device functions of the search for a row's bounds: its filters, its keys, and the buckets that keys are counted in.

A key is a logit as an int32 in the same order: 16 significant bits for a 16-bit type, 32 for float32. A search knows
a key `lo` at or below the cut, and how much lies above the bucket that begins at `lo`. A pass divides that bucket into
16 smaller ones, each tile sums up what it has in them, and the next launch chooses one.
"""

import triton
import triton.language as tl

from ..rows import FLOAT32_TINY

# What a pass counts: entries for top_k, their weights for top_p, nothing where only the maximum is needed.
NOTHING = tl.constexpr(0)
ENTRIES = tl.constexpr(1)
MASS = tl.constexpr(2)

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
    share = tl.maximum(top_p.to(tl.float64) * tl.sum(total, 0), FLOAT32_TINY)
    return tl.where(search == ENTRIES, top_k.to(tl.float64), tl.where(threshold < 0, share, threshold))
