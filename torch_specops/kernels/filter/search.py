"""The two kernels of the search for a row's bounds (`bounds.py`).

A key is a logit as an int32 in the same order, so that keys can be bisected: 16 significant bits for a 16-bit type, 32
for float32. `group_kernel` sums up groups of entries. From these sums `cut_kernel` finds the cut:
1. `lowest_candidate` bisects keys by the groups' maxima, for top-p by their sums too. The cut lies at the key that it
   finds or above, and parts of groups whose maximum is below are not looked at again.
2. `collect` writes down which tokens lie at that key or above. If there is not room for all, `find_window` narrows the
   keys: to those that are likely by a sample (`likely_keys`), or by half.
3. `reach` bisects the keys that are left by the entries of the list: for top-k, then for top-p among what top-k kept.
4. Of tokens at the cut those of highest id stay, as many as top-p needs (`first_kept_tie`).
5. `lowest_likely` is the cut of min-p. The higher cut holds.
"""

import triton
import triton.language as tl

from .. import launch
from ..rows import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    INT32_MAX,
    LOG2_E,
    exponential,
    inverse_temperature,
    load_logits,
    load_temperature,
    row_lead,
    scale,
    store_pair,
    widen,
)

# The share of top_p from which a mass has reached it, so that the rounding of top_p to float32 keeps no token more.
TOP_P_REACHED = tl.constexpr(1.0 - 2.0**-24)
# What the rounding of sums may add to the mass that groups leave out.
SAFE_SHARE = tl.constexpr(1.0 - 2.0**-10)
# Beyond this a scaled logit may have been clamped.
LARGEST_UNCLAMPED = tl.constexpr(2.0**100)
# Entries that a program looks at at once, and those of its list.
CHUNK = tl.constexpr(1024)
SEARCHED = tl.constexpr(512)
# Entries from which it guesses where the cut is.
SAMPLE = tl.constexpr(4096)


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
    return widen(x)


@triton.jit
def lowest_key(DTYPE: tl.constexpr):
    """The key of the lowest logit that is not excluded, one above that of -inf."""
    return order_key(tl.full((), float("-inf"), tl.float32).to(DTYPE)) + 1


@triton.jit
def group_sums(x, inverse_t):
    """Raw logits [G, GROUP] -> the sums of exponentials relative to the own maximum. The weight of the maximum is
    exactly 1, so that equal logits have equal sums."""
    top = tl.max(x, 1)
    shift = tl.maximum(top, -FLOAT32_MAX)[:, None]
    total = tl.sum(tl.exp2((x - shift) * (inverse_t * LOG2_E)), 1)
    # Only a tile with NaN or values near the ends of float32 is scaled entry by entry.
    highest = tl.max(tl.abs(tl.where(top > float("-inf"), top, 0.0)), 0) * inverse_t
    if ((highest <= LARGEST_UNCLAMPED) & (tl.min((total >= 0).to(tl.int32), 0) > 0)) == 0:
        z = scale(x, inverse_t)
        total = tl.sum(exponential(z - tl.maximum(scale(top, inverse_t), -FLOAT32_MAX)[:, None]), 1)
    return total


@launch.jit
def group_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V] of the same dtype and stride_v, or None
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    top_ptr,  # [B, R + K, num_tiles * TILE / PART] the maximum of each part of a group
    sum_ptr,  # [B, R + K, num_tiles * TILE / GROUP] the sums of exponentials of groups; None without top_p
    stride_b,
    stride_r,
    stride_v,
    stride_draft_b,
    stride_draft_k,
    num_rows,
    num_drafts,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
    temperature = load_temperature(temperature_ptr, b)
    top_k, top_p, min_p = load_filters(b, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size)
    if is_filtered(temperature, top_k, top_p, min_p):
        row_ptr = find_row(logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k)
        x = load_logits(row_ptr, stride_v, row_lead(row_ptr, stride_v), vocab_size, tile, TILE, True)
        GROUPS: tl.constexpr = TILE // GROUP
        PARTS: tl.constexpr = TILE // PART
        place = (b * (num_rows + num_drafts) + r) * num_tiles + tile
        top = tl.max(tl.reshape(x, (PARTS, PART)), 1)
        tl.store(top_ptr + place * PARTS + tl.arange(0, PARTS), top.to(logits_ptr.dtype.element_ty))
        if sum_ptr is not None:
            if (top_p < 1) & (top_k == 0):
                sums = group_sums(tl.reshape(x, (GROUPS, GROUP)), inverse_temperature(temperature_ptr, temperature))
                tl.store(sum_ptr + place * GROUPS + tl.arange(0, GROUPS), sums)


@triton.jit
def average(low, high):
    """Rounded down; of keys that may be further apart than an int32 can say."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def weigh(x, scaling):
    """The weights of raw logits."""
    z_max, inverse_t = scaling
    return exponential(scale(x, inverse_t) - z_max)


@triton.jit
def total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def leaves_out(bound, groups, scaling, DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """At most how much lies below the key `bound`: all of a group whose maximum does, and of any other the rest, but no
    more than GROUP - 1 entries of that key."""
    top, amount, rest = groups
    x = key_value(bound, DTYPE)
    return total(tl.where(top < x, amount, tl.minimum(rest, weigh(x, scaling) * (GROUP - 1))))


@triton.jit
def lowest_candidate(least, highest, allowed, groups, scaling, DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """A key at or below the cut. Between the least maximum of a group and the highest, the last key that leaves out no
    more than is allowed, to the 8 bits that bfloat16 has; the lowest key of all if that leaves out too much."""
    STEP: tl.constexpr = 2 ** (DTYPE.fp_mantissa_width - 7)
    low = lowest_key(DTYPE)
    if leaves_out(least, groups, scaling, DTYPE, GROUP) <= allowed:
        low, high = least, highest + 1
        middle = average(low, high)
        while middle - low >= STEP:
            fits = leaves_out(middle, groups, scaling, DTYPE, GROUP) <= allowed
            low = tl.where(fits, middle, low)
            high = tl.where(fits, high, middle)
            middle = average(low, high)
    return low


@triton.jit
def write_down(list_ptr, first, chosen, count, room, WIDTH: tl.constexpr):
    """Append those of the numbers first [N] + 0 .. WIDTH - 1 that are chosen [N, WIDTH] to a list of `count`, as far as
    there is room; what would come before its beginning is left out too. Returns the new count."""
    chosen = chosen.to(tl.int32)
    own = tl.sum(chosen, 1)
    slot = count + tl.cumsum(own, 0) - own
    # The scan over N is what costs, and over columns there is none.
    bits = tl.sum(chosen << tl.arange(0, WIDTH)[None, :], 1)
    for column in range(WIDTH):
        bit = (bits >> column) & 1
        tl.store(list_ptr + slot, first + column, mask=(bit > 0) & (slot >= 0) & (slot < room))
        slot += bit
    return count + tl.sum(own, 0)


@triton.jit
def amounts(x, is_mass, scaling):
    """What entries count: their weights for top-p, else 1."""
    amount = tl.full(x.shape, 1.0, tl.float32)
    if is_mass:
        amount = weigh(x, scaling)
    return amount


@triton.jit
def collect(low, high, every, skipped, summed, parts, row, held, is_mass, scaling):
    """Write down the entries of keys low .. high - 1 in the order of tokens: behind the first `skipped`, as many as
    there is room for. Returns how many there are with those, and, if `summed`, what they amount to, and what lies above
    them. Of the pieces only one in `every` is looked at."""
    part_ptr, shift, num_pieces = parts
    row_ptr, stride_v, lead, vocab_size = row
    token_ptr, value_ptr, room = held
    end_of_row = lead + vocab_size
    lowest = key_value(low, row_ptr.dtype.element_ty)
    end = key_value(high - 1, row_ptr.dtype.element_ty)
    count = -skipped
    inside = tl.full((), 0.0, tl.float64)
    above = tl.full((), 0.0, tl.float64)
    # 16 bytes.
    PIECE: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    PIECES: tl.constexpr = CHUNK // PIECE
    for start in range(0, tl.cdiv(num_pieces, every), PIECES):
        i = (start + tl.arange(0, PIECES)) * every
        listed = i < num_pieces
        part = tl.load(part_ptr + (i >> shift), mask=listed, other=0)
        # Counted from the row's boundary.
        place = ((part << shift) + (i & ((1 << shift) - 1))) * PIECE
        position = place[:, None] + tl.arange(0, PIECE)[None, :]
        if stride_v is None:
            base = tl.multiple_of(row_ptr - lead, 16)
            whole = (listed & (place >= lead) & (place + PIECE <= end_of_row))[:, None]
            raw = tl.load(base + position, mask=whole, other=float("-inf"))
            # Parts are in the order of tokens.
            last = tl.load(part_ptr + (tl.minimum(every * (start + PIECES - 1), num_pieces - 1) >> shift))
            if ((start == 0) & (lead > 0)) | (((last + 1) << shift) * PIECE > end_of_row):
                split = listed[:, None] & (whole == 0) & (position >= lead) & (position < end_of_row)
                raw = tl.load(base + position, mask=split, other=raw)
        else:
            inside_row = listed[:, None] & (position < vocab_size)
            raw = tl.load(row_ptr + position.to(tl.int64) * stride_v, mask=inside_row, other=float("-inf"))
        x = widen(raw)
        is_above = x > end
        is_inside = (x >= lowest) & (x <= end)
        count = write_down(token_ptr, place - lead, is_inside, count, room, PIECE)
        if summed:
            amount = amounts(x, is_mass, scaling)
            inside += total(tl.where(is_inside, amount, 0.0)).to(tl.float64)
            above += total(tl.where(is_above, amount, 0.0)).to(tl.float64)
    count += skipped
    tl.debug_barrier()
    num_held = tl.minimum(count - skipped, room)
    for start in range(0, num_held, SEARCHED):
        i = start + tl.arange(0, SEARCHED)
        v = tl.load(token_ptr + i, mask=i < num_held, other=0)
        offset = v if stride_v is None else v.to(tl.int64) * stride_v
        tl.store(value_ptr + i, tl.load(row_ptr + offset, mask=i < num_held, other=0.0), mask=i < num_held)
    tl.debug_barrier()
    return count, inside, above


@triton.jit
def amount_from(key, held, count, is_mass, scaling):
    """How much of a list of `count` entries, or of those that it has room for, lies at a key and above it."""
    value_ptr = held[1]
    lowest = key_value(key, value_ptr.dtype.element_ty)
    amount = tl.zeros((SEARCHED,), tl.float32)
    count = tl.minimum(count, held[2])
    for start in range(0, count, SEARCHED):
        i = start + tl.arange(0, SEARCHED)
        x = widen(tl.load(value_ptr + i, mask=i < count, other=float("-inf")))
        amount += tl.where(x >= lowest, amounts(x, is_mass, scaling), 0.0)
    return tl.sum(amount, 0)


@triton.jit
def reach(low, high, wanted, held, count, is_mass, scaling):
    """The highest key of low .. high - 1 such that what is wanted lies at it and above it; low if there is none."""
    middle = average(low, high)
    while middle > low:
        reached = amount_from(middle, held, count, is_mass, scaling) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        middle = average(low, high)
    return low


@triton.jit
def likely_keys(low, high, expected, every, held, count, is_mass, scaling):
    """Those of keys low .. high - 1 that lie around the one where a sample of one in `every` entries reaches what is
    expected of it: as many as should leave a quarter of the room."""
    margin = held[2] * 3 // 8 // every
    if amount_from(low, held, count, False, scaling) > 2 * margin:
        cut = reach(low, high, expected, held, count, is_mass, scaling)
        rank = amount_from(cut, held, count, False, scaling)
        high = reach(cut, high, rank - margin, held, count, False, scaling) + 1
        low = reach(low, cut + 1, rank + margin, held, count, False, scaling)
        # Very many may be equal.
        num_between = amount_from(low, held, count, False, scaling) - amount_from(high, held, count, False, scaling)
        too_many = num_between > held[2] // every
        low = tl.where(too_many, cut, low)
        high = tl.where(too_many, cut + 1, high)
    return low, high


@triton.jit
def mass_wanted(top_p, mass):
    """What of a mass top_p keeps."""
    return tl.maximum(tl.cast(top_p, tl.float64) * TOP_P_REACHED * mass, FLOAT32_TINY)


@triton.jit
def find_window(lo, hi, wanted, top_p, mass, parts, row, held, is_mass, scaling):
    """Narrow keys lo .. hi - 1 down to those whose entries there is room to write down, or to one key, which may have
    more. The cut stays among them: the highest key such that what is wanted lies at it and above it, k entries or a
    part of `mass`, all that the parts have. If it is negative, top_p of what these keys have is wanted.

    Returns the keys, what lies above them, how many entries they have, and what was wanted."""
    room = held[2]
    above = 0.0
    low, high, every, count = lo, hi, 1, 0
    num_entries = parts[2] * (128 // row[0].dtype.element_ty.primitive_bitwidth)
    # What reaches up to the least key is all that matters, and where that is not most of the row, there is likely room.
    if (num_entries > 8 * room) & (wanted >= 0):
        every = tl.cdiv(num_entries, tl.minimum(room, SAMPLE))
        low = tl.where(is_mass, lowest_key(row[0].dtype.element_ty), lo)
    top = hi
    searching = 1
    while searching > 0:
        summed = (every > 1) | (low > lo) | (high < top) | (wanted < 0)
        count, inside, higher = collect(low, high, every, 0, summed, parts, row, held, is_mass, scaling)
        if every > 1:
            expected = wanted / every
            if is_mass:
                # What lies below the cut is spread over many entries, so that a sample tells more about it.
                expected = inside - (mass - wanted) / every
            low, high = likely_keys(lo, hi, expected, every, held, count, is_mass, scaling)
            every = 1
        else:
            wanted = tl.where(wanted < 0, mass_wanted(top_p, inside), wanted)
            if (higher >= wanted) & (high < hi):
                lo = high
            elif (higher + inside < wanted) & (low > lo):
                hi, above = low, (higher + inside).to(tl.float32)
            else:
                lo, hi, above = low, high, higher.to(tl.float32)
                searching = ((count > room) & (average(lo, hi) > lo)).to(tl.int32)
            # A guess that was wrong is not repeated.
            low, high = average(lo, hi), hi
    return lo, hi, above, count, wanted


@triton.jit
def first_kept_tie(cut, skipped, held, count):
    """The token of the first entry of key `cut` behind `skipped` others."""
    token_ptr, value_ptr, _ = held
    value = key_value(cut, value_ptr.dtype.element_ty)
    first = INT32_MAX
    for start in range(0, count, SEARCHED):
        i = start + tl.arange(0, SEARCHED)
        tie = (widen(tl.load(value_ptr + i, mask=i < count, other=float("-inf"))) == value).to(tl.int32)
        kept = (tie > 0) & (tl.cumsum(tie, 0) > skipped)
        first = tl.minimum(first, tl.min(tl.load(token_ptr + i, mask=kept, other=INT32_MAX), 0))
        skipped -= tl.sum(tie, 0)
    return first


@triton.jit
def lowest_likely(low, high, min_p, scaling, DTYPE: tl.constexpr):
    """The first key of low .. high whose scaled logit is at least z_max + log(min_p): scaling keeps the order."""
    z_max, inverse_t = scaling
    gap = tl.log(tl.minimum(min_p, 1.0))
    while low < high:
        middle = average(low, high)
        likely = scale(key_value(middle, DTYPE), inverse_t) - z_max >= gap
        low = tl.where(likely, low, middle + 1)
        high = tl.where(likely, middle, high)
    return high


@launch.jit
def cut_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V] of the same dtype and stride_v, or None
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    top_ptr,  # [B, R + K, num_groups * GROUP / PART]
    sum_ptr,  # [B, R + K, num_groups] or None
    part_ptr,  # [B, R + K, num_groups * GROUP / PART] numbers of the parts that matter
    token_ptr,  # [B, R + K, room] tokens of the entries that may be the cut
    value_ptr,  # [B, R + K, room] and their logits
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
    num_groups,
    room,
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    PART_SHIFT: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1).to(tl.int64)
    program = b * (num_rows + num_drafts) + r
    # Torch looks for what a kernel writes, and does not look into functions: what comes from one that was given a
    # pointer counts as that pointer. So all that decides where the lists are written is loaded here.
    temperature, k, top_p, min_p = 1.0, 0, 1.0, 0.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + b)
    if top_k_ptr is not None:
        k = tl.load(top_k_ptr + b)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + b)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + b)
    top_k = tl.where((k > 0) & (k < vocab_size), k, 0).to(tl.int32)
    lawful = is_lawful(temperature, top_p, min_p)
    cut = tl.where(lawful, float("-inf"), float("inf"))
    first_at_cut = tl.where(lawful, 0, INT32_MAX)
    if is_filtered(temperature, top_k, top_p, min_p):
        DTYPE: tl.constexpr = logits_ptr.dtype.element_ty
        # Groups are a multiple of four, so that four are loaded at once.
        first_group = tl.arange(0, BLOCK_G // 4) * 4
        group = first_group[:, None] + tl.arange(0, 4)[None, :]
        given = (first_group < num_groups)[:, None]
        PARTS: tl.constexpr = GROUP // PART
        top_ptr = tl.multiple_of(top_ptr + program * num_groups * PARTS, 4 * PARTS * DTYPE.primitive_bitwidth // 8)
        part = first_group[:, None] * PARTS + tl.arange(0, 4 * PARTS)[None, :]
        part_top = widen(tl.load(top_ptr + part, mask=given, other=float("-inf")))
        top = tl.max(tl.reshape(part_top, (BLOCK_G // 4, 4, PARTS)), 2)
        finite = top > float("-inf")
        x_max = tl.max(tl.max(tl.where(finite, top, float("-inf")), 1), 0)
        inverse_t = inverse_temperature(True, temperature)
        scaling = (scale(x_max, inverse_t), inverse_t)
        highest = order_key(x_max.to(DTYPE))
        lo = lowest_key(DTYPE)
        if ((top_k > 0) | (top_p < 1)) & (x_max > float("-inf")):
            # Top-k may leave out all groups but k, top-p the mass that it removes.
            amount = tl.where(finite, 1.0, 0.0)
            rest = tl.zeros(top.shape, tl.float32)
            allowed = total(amount) - top_k
            wanted_mass = tl.full((), 0.0, tl.float64)
            if sum_ptr is not None:
                if top_k == 0:
                    weight = weigh(top, scaling)
                    sum_ptr = tl.multiple_of(sum_ptr + program * num_groups, 16)
                    sums = tl.load(sum_ptr + group, mask=given, other=0.0)
                    amount = tl.where(finite, sums * weight, 0.0)
                    rest = tl.maximum(amount - weight, 0.0)
                    mass = total(amount.to(tl.float64))
                    wanted_mass = mass_wanted(top_p, mass)
                    allowed = ((mass - wanted_mass) * SAFE_SHARE).to(tl.float32)
            least = order_key(tl.min(tl.min(tl.where(finite, top, float("inf")), 1), 0).to(DTYPE))
            lo = lowest_candidate(least, highest, allowed, (top, amount, rest), scaling, DTYPE, GROUP)
            listed = finite & (top >= key_value(lo, DTYPE))
            mass = total(tl.where(listed, amount, 0.0))
            part_top = widen(tl.load(top_ptr + part, mask=given, other=float("-inf")))
            matters = (part_top > float("-inf")) & (part_top >= key_value(lo, DTYPE))
            part_ptr += program * num_groups * PARTS
            num_parts = write_down(part_ptr, first_group * PARTS, matters, 0, num_groups * PARTS, 4 * PARTS)
            parts = (part_ptr, PART_SHIFT, num_parts << PART_SHIFT)
            tl.debug_barrier()

            row_ptr = find_row(
                logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k
            )
            row = (row_ptr, stride_v, row_lead(row_ptr, stride_v), vocab_size)
            # Symbolic sizes have 64 bits.
            places = tl.cast(room, tl.int32)
            held = (token_ptr + program * room, value_ptr + program * room, places)
            hi = highest + 1
            count = places + 1
            skipped = 0
            # Top-k, top-p, and of the tokens at the cut the first that top-p keeps. Torch does not follow what comes
            # from the round before (see above), but what comes from a function that was given the row.
            for search in range(3):
                is_mass = search == 1
                if search == 2:
                    if skipped > 0:
                        if count > places:
                            collect(lo, lo + 1, 1, skipped, False, parts, row, held, True, scaling)
                            skipped, count = 0, 1
                        first_at_cut = first_kept_tie(lo, skipped, held, count)
                elif tl.where(is_mass, top_p < 1, top_k > 0):
                    wanted = tl.where(is_mass, wanted_mass, top_k.to(tl.float64))
                    above = 0.0
                    if hi <= highest:
                        hi = highest + 1
                        count = places + 1
                    if is_mass & (top_k > 0):
                        # Of what top-k kept.
                        wanted = tl.full((), -1.0, tl.float64)
                        if count <= places:
                            kept = amount_from(lo, held, count, True, scaling)
                            wanted = mass_wanted(top_p, kept)
                    if count > places:
                        lo, hi, above, count, wanted = find_window(
                            lo, hi, wanted, top_p, mass, parts, row, held, is_mass, scaling
                        )
                    lo = reach(lo, hi, wanted - above, held, count, is_mass, scaling)
                    if is_mass:
                        # Those of highest id, as many as begin below what is wanted.
                        above += amount_from(lo + 1, held, count, True, scaling)
                        num_ties = amount_from(lo, held, count, False, scaling)
                        num_ties -= amount_from(lo + 1, held, count, False, scaling)
                        if count > places:
                            num_ties = count.to(tl.float32)
                        tie_weight = weigh(key_value(lo, DTYPE), scaling).to(tl.float64)
                        num_kept = tl.maximum(tl.ceil(((wanted - above) / tie_weight).to(tl.float32)), 1.0)
                        skipped = tl.maximum(num_ties - num_kept, 0.0).to(tl.int32)
        if min_p_ptr is not None:
            if min_p > 0:
                likely = lowest_likely(lo, highest, min_p, scaling, DTYPE)
                first_at_cut = tl.where(likely > lo, 0, first_at_cut)
                lo = likely
        cut = tl.where(x_max > float("-inf"), key_value(lo, DTYPE), cut)
    store_pair(bounds_ptr + (b * num_bounds + first_row + r) * 2, cut, first_at_cut.to(tl.float32, bitcast=True))
