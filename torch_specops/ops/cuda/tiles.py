"""Device functions for one row of logits: wide loads, scaling, partial softmax, and the inverse CDF in two levels.

A row is divided into tiles of TILE entries. Tiles do not start at the row's first entry, but at the 16-byte boundary at
or before it, which is `lead` entries earlier. Every whole 16-byte chunk is then one 128-bit load, for any vocabulary
size, stride and offset. A tile inside the row is loaded without masks. A chunk that the row fills only partly, at most
one at each end, is loaded entry by entry. No byte outside the row is read.

`stride_v` is the stride between the logits of a row; None = 1. Rows with another stride are loaded entry by entry, and
their lead is 0.

After scaling, entries outside the row, masked entries (-inf) and NaN are all -inf, so their weight is 0.

The partials of a tile are two float32 numbers in memory: the maximum and the sum of exponentials. In a greedy row they
are the maximum and its token, whose bits are stored as a float32.

Kernels must import these functions by name. Inductor generates a kernel's source again, and resolves only plain global
names.
"""

import triton
import triton.language as tl

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
FLOAT32_TINY = tl.constexpr(1.1754943508222875e-38)
INT32_MAX = tl.constexpr(2**31 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# An exponent of at most this size has a rounding error of at most 2**-11, which `tile_stats` corrects with the first
# terms of a series.
LARGEST_PLAIN_EXPONENT = tl.constexpr(2.0**14)


@triton.jit
def load_temperature(temperature_ptr, row):
    """The temperature of a row; 1 if no temperature is given."""
    temperature = 1.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    return temperature


@triton.jit
def inverse_temperature(temperature_ptr, temperature):
    """1 / T clamped to finite positive numbers; 1 for a greedy row, so that its logits are compared unscaled."""
    inverse = 1.0
    if temperature_ptr is not None:
        inverse = tl.minimum(tl.maximum(tl.div_rn(1.0, temperature), FLOAT32_TINY), FLOAT32_MAX)
        inverse = tl.where(temperature > 0, inverse, 1.0)
    return inverse


@triton.jit
def widen(x):
    """Convert to float32. bfloat16 is converted by a shift of its bits, because a conversion would take two
    instructions."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def scale(x, inverse_t):
    """logits / T in float32. A finite logit stays finite, +inf becomes the largest float32, and NaN becomes -inf."""
    x = widen(x)
    z = tl.minimum(tl.maximum(x * inverse_t, -FLOAT32_MAX), FLOAT32_MAX)
    return tl.where(x > float("-inf"), z, float("-inf"))


@triton.jit
def exponential(x):
    """exp(x) in float32. Results below 2**-126 may be 0; `tl.exp` would take three more instructions to compute
    them."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def row_lead(row_ptr, stride_v):
    """The number of entries from the 16-byte boundary at or before the row to its first entry."""
    lead = 0
    if stride_v is None:
        lead = ((row_ptr.to(tl.int64) & 15) // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)).to(tl.int32)
    return lead


@triton.jit
def tile_tokens(lead, tile, TILE: tl.constexpr):
    """The token ids [TILE] of a tile. Ids outside the row are negative or beyond the vocabulary."""
    return tile * TILE + tl.arange(0, TILE) - lead


@triton.jit
def load_aligned(row_ptr, lead, vocab_size, tile, TILE: tl.constexpr, WIDEN: tl.constexpr = False):
    """The raw logits [TILE] of a tile, for a row whose boundary row_ptr - lead is a multiple of 16 bytes."""
    VEC: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    base = tl.multiple_of(row_ptr - lead, 16)
    position = tile * TILE + tl.arange(0, TILE)
    end = lead + vocab_size
    if (tile * TILE >= lead) & (tile * TILE + TILE <= end):
        x = tl.load(base + position)
        # Convert to float32 in each branch, because converting after the branches would cost 16 more instructions
        # (docs/performance.md).
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
    """The raw logits [TILE] of a tile that is counted from the boundary of this row, with lead = row_lead(row_ptr)."""
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
    """The raw logits [TILE] of a tile that is counted from the boundary of another row. Loads are wide if both rows
    have the same alignment."""
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
    """The raw logits of token ids v in float32; -inf for tokens that the filters remove. A token is kept if its logit
    is above the cut, or equals the cut and its id is >= `first_at_cut`."""
    x = x.to(tl.float32)
    return tl.where((x > cut) | ((x == cut) & (v >= first_at_cut)), x, float("-inf"))


@triton.jit
def load_bounds(bounds_ptr, bounds_row):
    """The bounds that `filter_bounds` stored for a row: the cut, and the lowest kept id at the cut."""
    return tl.load(bounds_ptr + bounds_row * 2), tl.load(bounds_ptr + bounds_row * 2 + 1).to(tl.int32, bitcast=True)


@triton.jit
def within_bounds(x, v, bounds_ptr, bounds_row):
    """`keep` with the bounds of a row; x unchanged if there are no bounds (None)."""
    if bounds_ptr is not None:
        cut, first_at_cut = load_bounds(bounds_ptr, bounds_row)
        x = keep(x, v, cut, first_at_cut)
    return x


@triton.jit
def load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE: tl.constexpr):
    """The logits [TILE] of a tile in float32; -inf outside the bounds of the row."""
    x = load_logits(row_ptr, stride_v, lead, vocab_size, tile, TILE, True)
    return within_bounds(x, tile_tokens(lead, tile, TILE), bounds_ptr, bounds_row)


@triton.jit
def load_kept_parts(
    row_ptr,
    stride_v,
    lead,
    vocab_size,
    tile,
    bounds_ptr,
    bounds_row,
    tops,
    b,
    row,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """`load_kept` for row `row` of sequence b that reads only the parts of the tile in which a token is kept. A part
    has PART entries. `tops` has a pointer to the maxima of parts that the search has stored (or None), the number of
    rows of a sequence that have them, and the number of parts of a row. Other rows are read completely."""
    top_ptr, num_tops, num_parts = tops
    if top_ptr is None or bounds_ptr is None:
        x = load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE)
    else:
        cut, first_at_cut = load_bounds(bounds_ptr, bounds_row)
        part = tile * (TILE // PART) + tl.arange(0, TILE // PART)
        # The search did not read rows that keep every token or none, and stored no maxima for them.
        searched = (row < num_tops) & (cut > float("-inf")) & (first_at_cut < INT32_MAX)
        top_ptr += (b * num_tops + row) * num_parts
        top = tl.load(top_ptr + part, mask=searched & (part < num_parts), other=float("inf"))
        kept = (widen(top) >= cut)[:, None]
        position = part[:, None] * PART + tl.arange(0, PART)[None, :]
        end = lead + vocab_size
        if stride_v is None:
            VEC: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
            base = tl.multiple_of(row_ptr - lead, 16)
            chunk = position // VEC * VEC
            whole = kept & (chunk >= lead) & (chunk + VEC <= end)
            x = tl.load(base + position, mask=whole, other=float("-inf"))
            if (tile * TILE < lead) | (tile * TILE + TILE > end):
                split = kept & (whole == 0) & (position >= lead) & (position < end)
                x = tl.load(base + position, mask=split, other=x)
        else:
            x = tl.load(row_ptr + position.to(tl.int64) * stride_v, mask=kept & (position < end), other=float("-inf"))
        x = keep(tl.reshape(widen(x), (TILE,)), tile_tokens(lead, tile, TILE), cut, first_at_cut)
    return x


@triton.jit
def load_scaled(row_ptr, stride_v, lead, vocab_size, tile, inverse_t, bounds_ptr, bounds_row, TILE: tl.constexpr):
    """The scaled logits [TILE] of a tile; -inf outside the bounds of the row."""
    return scale(load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE), inverse_t)


@triton.jit
def load_kept_beside(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE: tl.constexpr):
    """`load_kept` for a tile that is counted from the boundary of another row."""
    x = load_logits_beside(row_ptr, stride_v, lead, vocab_size, tile, TILE, True)
    return within_bounds(x, tile_tokens(lead, tile, TILE), bounds_ptr, bounds_row)


@triton.jit
def tile_stats(x, inverse_t):
    """Raw logits -> the maximum of the scaled logits, and the sum of exp(z - maximum); (-inf, 0) for a tile without a
    finite entry.

    With c = log2(e) / T, exp(z - maximum) is 2**(x c - s) / 2**(x_max c - s) for any s. s is x_max c, rounded. The
    divisor is then nearly 1, and is applied to the sum instead of each entry, so that an entry takes one fused
    multiply-add, one power of two and one addition. Only a tile that has NaN or values near the limits of float32 is
    scaled entry by entry."""
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
    # A tile whose entries are all masked needs no scaling, because its weight is 0. The test total >= 0 fails for NaN.
    if ((plain | (x_max == float("-inf"))) & (total >= 0)) == 0:
        z_max, z_sum = scaled_stats(scale(x, inverse_t))
    return z_max, z_sum


@triton.jit
def scaled_stats(z):
    """`tile_stats` for logits that are already scaled."""
    z_max = tl.max(z, 0)
    return z_max, tl.sum(exponential(z - tl.maximum(z_max, -FLOAT32_MAX)), 0)


@triton.jit
def tile_argmax(z, v):
    """The maximum, and the lowest token id that has it. The bits of the id are returned as a float32, so that it can be
    stored as a partial."""
    z_max = tl.max(z, 0)
    token = tl.min(tl.where(z == z_max, v, INT32_MAX), 0)
    return z_max, token.to(tl.float32, bitcast=True)


@triton.jit
def store_pair(pair_ptr, left, right):
    tl.store(pair_ptr, left)
    tl.store(pair_ptr + 1, right)


@triton.jit
def load_partials(partial_ptr, row, num_tiles, live, BLOCK_T: tl.constexpr):
    """The two partials [R, BLOCK_T] of every tile of rows [R]; (-inf, 0) where not live."""
    tile = tl.arange(0, BLOCK_T)
    offset = (row[:, None] * num_tiles + tile[None, :]) * 2
    mask = live[:, None] & (tile < num_tiles)[None, :]
    tile_max = tl.load(partial_ptr + offset, mask=mask, other=float("-inf"))
    sum_or_token = tl.load(partial_ptr + offset + 1, mask=mask, other=0.0)
    return tile_max, sum_or_token


@triton.jit
def load_row_partials(partial_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """`load_partials` for a single row, [1, BLOCK_T]."""
    rows = row + tl.zeros((1,), tl.int64)
    return load_partials(partial_ptr, rows, num_tiles, rows >= 0, BLOCK_T)


@triton.jit
def rounded_product(x, y):
    """x * y, rounded, so that the compiler cannot fuse the product with a later addition."""
    # A plain product would be fused into the first addition of a reduction between lanes. One lane would compute x y +
    # round(x' y') and the other x' y' + round(x y), so that their totals would differ. This product is already a fused
    # operation, and the compiler may not simplify it: adding +0 is not an identity, because it turns -0 into +0.
    return tl.fma(x, y, 0.0)


@triton.jit
def combine_stats(tile_max, tile_sum):
    """Partials [R, BLOCK_T] -> the maximum [R] and the sum of exponentials [R] of whole rows, added in a fixed
    order."""
    z_max = tl.max(tile_max, 1)
    shift = tl.maximum(z_max, -FLOAT32_MAX)
    return z_max, tl.sum(rounded_product(tile_sum, exponential(tile_max - shift[:, None])), 1)


@triton.jit
def combine_argmax(tile_max, tile_token):
    """Partials [R, BLOCK_T] -> the lowest token id [R] of the maximum; -1 for a row without a finite entry."""
    z_max = tl.max(tile_max, 1)
    token = tl.where(tile_max == z_max[:, None], tile_token.to(tl.int32, bitcast=True), INT32_MAX)
    return tl.where(z_max > float("-inf"), tl.min(token, 1), -1)


@triton.jit
def row_stats(partial_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """The maximum and the sum of exponentials of one row, from its partials. The maximum is finite even if no entry
    is."""
    tile_max, tile_sum = load_row_partials(partial_ptr, row, num_tiles, BLOCK_T)
    z_max, z_sum = combine_stats(tile_max, tile_sum)
    return tl.maximum(tl.max(z_max, 0), -FLOAT32_MAX), tl.max(z_sum, 0)


@triton.jit
def row_argmax(partial_ptr, row, num_tiles, BLOCK_T: tl.constexpr):
    """The lowest token id of the maximum of one row, from its partials; -1 for a row without a finite entry."""
    tile_max, tile_token = load_row_partials(partial_ptr, row, num_tiles, BLOCK_T)
    return tl.max(combine_argmax(tile_max, tile_token), 0)


@triton.jit
def reciprocal(total):
    """1 / total, or 0 if total is 0."""
    return tl.where(total > 0, 1.0 / total, 0.0)


@triton.jit
def pick_tile(mass, uniform):
    """First level of the inverse CDF: masses [T] of the tiles -> the tile, and the threshold minus the mass of all
    tiles before it."""
    index = tl.arange(0, mass.shape[0])
    exact = mass.to(tl.float64)
    threshold = uniform.to(tl.float64) * tl.sum(exact, 0)
    cumulated = tl.cumsum(exact, 0)
    above = (cumulated > threshold) & (mass > 0)
    last = tl.max(tl.where(mass > 0, index, 0), 0)
    tile = tl.minimum(tl.min(tl.where(above, index, INT32_MAX), 0), last)
    # Reduce the difference to one float32 here. Otherwise the compiler computes the difference of the two float64 sums
    # later, and needs six registers instead of one.
    left = threshold - (cumulated - exact)
    return tile, tl.sum(tl.where(index == tile, left.to(tl.float32), 0.0), 0)


@triton.jit
def pick_token(weight, v, threshold):
    """Second level: weights [TILE] and token ids -> the first id whose cumulative weight exceeds the threshold, else
    the last id of positive weight; -1 if there is none. Weights are also tested for > 0, because a parallel scan need
    not be monotone."""
    above = (tl.cumsum(weight, 0) > threshold) & (weight > 0)
    last = tl.max(tl.where(weight > 0, v, -1), 0)
    return tl.minimum(tl.min(tl.where(above, v, INT32_MAX), 0), last)


@triton.jit
def is_last_program(count_ptr, num_programs):
    """True in the program of a group that calls this function last. That program can read what the others stored. Each
    program increments the count, which is 0 before the first call and after the last. This works only for scalars that
    are stored by the thread that increments the count."""
    # The barrier waits for the stores of the other threads. The atomic orders memory accesses before and after it, and
    # Triton adds a barrier after it.
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if last:
        tl.store(count_ptr, 0)
    return last
