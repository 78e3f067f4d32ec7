"""Device functions on one row of logits: wide loads, scaling, partial softmax, and the two-level inverse CDF.

A row is cut into tiles of TILE entries. Tile boundaries are counted from the 16-byte boundary at or before the
row's first entry, `lead` entries earlier, so that every load of a whole 16-byte chunk is one 128-bit load for any
vocabulary size, stride and offset. A tile inside the row is loaded without masks. Chunks that the row fills only
partly, at most 1 at each end, are loaded entry by entry. No byte outside the row is read.

`stride_v` is the stride between the logits of a row, None = 1. Strided rows have no wide loads, and a lead of 0.

Entries outside the row, masked (-inf) and NaN entries are -inf after scaling, never 0, so they carry no weight.

The partials of a tile are a pair of float32 in memory: the maximum and the sum of exponentials, or in a greedy row the
maximum and its token, stored as float32 bits.

Kernels import these functions by name: Inductor regenerates a kernel's source and follows plain global names only.
"""

import triton
import triton.language as tl

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
FLOAT32_TINY = tl.constexpr(1.1754943508222875e-38)
INT32_MAX = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# An exponent up to this has a rounding error of at most 2**-11, which the first terms of a series correct.
LARGEST_PLAIN_EXPONENT = tl.constexpr(2.0**14)


@triton.jit
def load_temperature(temperature_ptr, row):
    """T of a row; 1 where no temperature is given."""
    temperature = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    return temperature


@triton.jit
def inverse_temperature(temperature_ptr, temperature):
    """1 / T: finite and positive for every T; 1 for a greedy row, so that its logits stay comparable."""
    inverse = 1.0
    if temperature_ptr is not None:
        inverse = tl.minimum(tl.maximum(tl.div_rn(1.0, temperature), FLOAT32_TINY), FLOAT32_MAX)
        inverse = tl.where(temperature > 0, inverse, 1.0)
    return inverse


@triton.jit
def widen(x):
    """Convert to float32. For bfloat16 by its bits: one shift or mask, where a conversion takes two instructions."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def scale(x, inverse_t):
    """logits / T in float32. A finite logit stays finite, +inf becomes the largest float32, NaN -inf."""
    x = widen(x)
    z = tl.minimum(tl.maximum(x * inverse_t, -FLOAT32_MAX), FLOAT32_MAX)
    return tl.where(x > float("-inf"), z, float("-inf"))


@triton.jit
def exponential(x):
    """exp(x) in float32; results below 2**-126 may be 0, for which `tl.exp` spends three instructions."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def row_lead(row_ptr, stride_v):
    """Entries between the 16-byte boundary at or before the row and its first entry."""
    lead = 0
    if stride_v is None:
        lead = ((row_ptr.to(tl.int64) & 15) // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)).to(tl.int32)
    return lead


@triton.jit
def tile_tokens(lead, tile, TILE: tl.constexpr):
    """[TILE] token ids of a tile. Ids outside the row are negative or beyond the vocabulary."""
    return tile * TILE + tl.arange(0, TILE) - lead


@triton.jit
def load_aligned(row_ptr, lead, vocab_size, tile, TILE: tl.constexpr, WIDEN: tl.constexpr = False):
    """[TILE] raw logits of a row whose boundary, row_ptr - lead, is a multiple of 16 bytes."""
    # Widen in each branch: after the branches it would cost 16 more instructions (docs/performance.md).
    VEC: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    base = tl.multiple_of(row_ptr - lead, 16)
    position = tile * TILE + tl.arange(0, TILE)
    end = lead + vocab_size
    if (tile * TILE >= lead) & (tile * TILE + TILE <= end):
        x = tl.load(base + position)
        if WIDEN:
            x = widen(x)
    else:
        chunk = position // VEC * VEC
        whole = (chunk >= lead) & (chunk + VEC <= end)
        part = (position >= lead) & (position < end) & (whole == 0)
        x = tl.load(base + position, mask=whole, other=float("-inf"))
        x = tl.where(whole, x, tl.load(base + position, mask=part, other=float("-inf")))
        if WIDEN:
            x = widen(x)
    return x


@triton.jit
def load_logits(row_ptr, stride_v, lead, vocab_size, tile, TILE: tl.constexpr, WIDEN: tl.constexpr = False):
    """[TILE] raw logits of a tile counted from the row's own boundary, `lead` = row_lead(row_ptr)."""
    if stride_v is None:
        x = load_aligned(row_ptr, lead, vocab_size, tile, TILE, WIDEN)
    else:
        v = tile_tokens(lead, tile, TILE)
        x = tl.load(row_ptr + v.to(tl.int64) * stride_v, mask=v < vocab_size, other=float("-inf"))
        if WIDEN:
            x = widen(x)
    return x


@triton.jit
def load_logits_beside(row_ptr, stride_v, lead, vocab_size, tile, TILE: tl.constexpr, WIDEN: tl.constexpr = False):
    """[TILE] raw logits of a tile counted from another row's boundary; loads are wide if the two rows align."""
    v = tile_tokens(lead, tile, TILE)
    inside = (v >= 0) & (v < vocab_size)
    if stride_v is None:
        if ((row_ptr - lead).to(tl.int64) & 15) == 0:
            x = load_aligned(row_ptr, lead, vocab_size, tile, TILE, WIDEN)
        else:
            x = tl.load(row_ptr + v, mask=inside, other=float("-inf"))
            if WIDEN:
                x = widen(x)
    else:
        x = tl.load(row_ptr + v.to(tl.int64) * stride_v, mask=inside, other=float("-inf"))
        if WIDEN:
            x = widen(x)
    return x


@triton.jit
def keep(x, v, cut, first_at_cut):
    """Raw logits of token ids v in float32, -inf if the filters removed them. Kept logits are above the cut, or equal
    it and have an id >= `first_at_cut`."""
    x = x.to(tl.float32)
    return tl.where((x > cut) | ((x == cut) & (v >= first_at_cut)), x, float("-inf"))


@triton.jit
def within_bounds(x, v, bounds_ptr, bounds_row):
    """`keep` with the bounds of a row that `filter` stored; x unchanged without bounds (None)."""
    if bounds_ptr is not None:
        cut = tl.load(bounds_ptr + bounds_row * 2)
        first_at_cut = tl.load(bounds_ptr + bounds_row * 2 + 1).to(tl.int32, bitcast=True)
        x = keep(x, v, cut, first_at_cut)
    return x


@triton.jit
def load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE: tl.constexpr):
    """[TILE] logits of a tile in float32, -inf outside the row's bounds."""
    x = load_logits(row_ptr, stride_v, lead, vocab_size, tile, TILE, True)
    return within_bounds(x, tile_tokens(lead, tile, TILE), bounds_ptr, bounds_row)


@triton.jit
def load_scaled(row_ptr, stride_v, lead, vocab_size, tile, inverse_t, bounds_ptr, bounds_row, TILE: tl.constexpr):
    """[TILE] scaled logits of a tile, -inf outside the row's bounds."""
    return scale(load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE), inverse_t)


@triton.jit
def load_kept_beside(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE: tl.constexpr):
    """`load_kept` of a tile counted from another row's boundary."""
    x = load_logits_beside(row_ptr, stride_v, lead, vocab_size, tile, TILE, True)
    return within_bounds(x, tile_tokens(lead, tile, TILE), bounds_ptr, bounds_row)


@triton.jit
def tile_stats(x, inverse_t):
    """Raw logits -> the maximum of the scaled logits, and the sum of exp(z - maximum); (-inf, 0) for a tile without a
    finite entry.

    exp(z - maximum) is 2**(x c - s) / 2**(x_max c - s) with c = log2(e) / T. With s = x_max c rounded, the divisor is
    almost 1 and is applied to the sum. So an entry costs one fused multiply-add, one power of two and one addition.
    Only a tile with NaN or values near the limits of float32 is scaled entry by entry."""
    x = widen(x)
    c = inverse_t * LOG2_E
    x_max = tl.max(x, 0)
    shift = x_max * c
    plain = tl.abs(shift) <= LARGEST_PLAIN_EXPONENT
    shift = tl.where(plain, shift, 0.0)
    total = tl.sum(tl.exp2(tl.fma(x, c, -shift)), 0)
    z_max = x_max * inverse_t
    rest = tl.where(plain, tl.fma(x_max, c, -shift) * LN_2, 0.0)
    z_sum = tl.fma(total, rest * tl.fma(rest, 0.5, -1.0), total)
    # A masked tile is plain too: it has no weight. The test total >= 0 fails for NaN.
    if ((plain | (x_max == float("-inf"))) & (total >= 0)) == 0:
        z_max, z_sum = scaled_stats(scale(x, inverse_t))
    return z_max, z_sum


@triton.jit
def scaled_stats(z):
    """`tile_stats` of scaled logits."""
    z_max = tl.max(z, 0)
    return z_max, tl.sum(exponential(z - tl.maximum(z_max, -FLOAT32_MAX)), 0)


@triton.jit
def tile_argmax(z, v):
    """The maximum, and the lowest token id with it, as the bits of a float32 so that it fits a partial."""
    z_max = tl.max(z, 0)
    token = tl.min(tl.where(z == z_max, v, INT32_MAX), 0)
    return z_max, token.to(tl.float32, bitcast=True)


@triton.jit
def store_pair(pair_ptr, left, right):
    tl.store(pair_ptr, left)
    tl.store(pair_ptr + 1, right)


@triton.jit
def load_partials(partial_ptr, row, num_tiles, live, BLOCK_T: tl.constexpr):
    """[R, BLOCK_T] the two partials of every tile of rows [R]; (-inf, 0) where not live."""
    tile = tl.arange(0, BLOCK_T)
    offset = (row[:, None] * num_tiles + tile[None, :]) * 2
    mask = live[:, None] & (tile < num_tiles)[None, :]
    tile_max = tl.load(partial_ptr + offset, mask=mask, other=float("-inf"))
    sum_or_token = tl.load(partial_ptr + offset + 1, mask=mask, other=0.0)
    return tile_max, sum_or_token


@triton.jit
def load_row_partials(partial_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """[1, BLOCK_T] `load_partials` of a single row."""
    rows = row + tl.zeros((1,), tl.int64)
    return load_partials(partial_ptr, rows, num_tiles, rows >= 0, BLOCK_T)


@triton.jit
def rounded_product(x, y):
    """x * y that no later addition is fused with."""
    # A plain product would be fused into the first addition of a reduction between lanes: x y + round(x' y') in one
    # lane and x' y' + round(x y) in the other, so that their totals differ. This product is already fused, and no
    # compiler removes it: adding +0 is not an identity, because it turns -0 into +0.
    return tl.fma(x, y, 0.0)


@triton.jit
def combine_stats(tile_max, tile_sum):
    """[R, BLOCK_T] partials -> [R] maximum and sum of exponentials of whole rows, in a fixed order."""
    z_max = tl.max(tile_max, 1)
    shift = tl.maximum(z_max, -FLOAT32_MAX)
    return z_max, tl.sum(rounded_product(tile_sum, exponential(tile_max - shift[:, None])), 1)


@triton.jit
def combine_argmax(tile_max, tile_token):
    """[R, BLOCK_T] partials -> [R] lowest token id of the maximum, -1 for a row with no finite entry."""
    z_max = tl.max(tile_max, 1)
    token = tl.where(tile_max == z_max[:, None], tile_token.to(tl.int32, bitcast=True), INT32_MAX)
    return tl.where(z_max > float("-inf"), tl.min(token, 1), -1)


@triton.jit
def row_stats(partial_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """Maximum and sum of exponentials of one row from its partials; the maximum is finite even if no entry is."""
    tile_max, tile_sum = load_row_partials(partial_ptr, row, num_tiles, BLOCK_T)
    z_max, z_sum = combine_stats(tile_max, tile_sum)
    return tl.maximum(tl.max(z_max, 0), -FLOAT32_MAX), tl.max(z_sum, 0)


@triton.jit
def row_argmax(partial_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """Lowest token id of one row's maximum from its partials; -1 for a row with no finite entry."""
    tile_max, tile_token = load_row_partials(partial_ptr, row, num_tiles, BLOCK_T)
    return tl.max(combine_argmax(tile_max, tile_token), 0)


@triton.jit
def reciprocal(total):
    """1 / total, or 0 for a row without weight."""
    return tl.where(total > 0, 1.0 / total, 0.0)


@triton.jit
def pick_tile(mass, uniform):
    """First level of the inverse CDF: masses [T] of the tiles -> (tile, the rest of the threshold inside it)."""
    index = tl.arange(0, mass.shape[0])
    exact = mass.to(tl.float64)
    threshold = uniform.to(tl.float64) * tl.sum(exact, 0)
    cumulated = tl.cumsum(exact, 0)
    above = (cumulated > threshold) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, 0), 0)
    tile = tl.minimum(tl.min(tl.where(above, index, INT32_MAX), 0), last)
    # The reduction makes it one register; the difference of two float64 sums was computed late, and took six.
    left = threshold - (cumulated - exact)
    return tile, tl.sum(tl.where(index == tile, left.to(tl.float32), 0.0), 0)


@triton.jit
def pick_token(weight, v, threshold):
    """Second level: weights [TILE] and token ids -> the first id whose cumulated weight exceeds the threshold, else
    the last of positive weight; -1 without any. A scan may not be monotone, hence the test of the weight itself."""
    above = (tl.cumsum(weight, 0) > threshold) & (weight > 0)
    last = tl.max(tl.where(weight > 0, v, -1), 0)
    return tl.minimum(tl.min(tl.where(above, v, INT32_MAX), 0), last)


@triton.jit
def is_last_program(count_ptr, num_programs):
    """True in the last program of a group to arrive, to which the stores of the others are visible. Each program counts
    itself; the count is 0 before the first and after the last. Valid for scalars that the counting thread stores."""
    # The barrier covers the other threads. The atomic is a fence on both sides, and a barrier follows it.
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if last:
        tl.store(count_ptr, 0)
    return last
