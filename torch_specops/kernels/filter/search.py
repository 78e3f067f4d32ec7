"""The two kernels of the search for a row's bounds (`bounds.py`): a summary of groups of entries, and a search in the
groups that matter.

A key is a logit as an int32 in the same order: 16 significant bits for a 16-bit type, 32 for float32. A candidate is
an entry that may lie at the cut or above it.
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
)

# The share of top_p from which a mass has reached it, so that the rounding of top_p to float32 keeps no token more.
TOP_P_REACHED = tl.constexpr(1.0 - 2.0**-24)
# What the rounding of sums may add to the mass that groups leave out.
SAFE_SHARE = tl.constexpr(1.0 - 2.0**-10)
# Beyond this a scaled logit may have been clamped.
LARGEST_UNCLAMPED = tl.constexpr(2.0**100)
# After so many passes that missed the cut, or one that found it among too many entries, a pass looks at half of them.
HALVING = tl.constexpr(3)
# Below every key: that of an excluded entry, and the highest of a group that has no other.
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
def entry_key(x):
    """The same, NO_KEY for what is excluded."""
    return tl.where(x.to(tl.float32) > float("-inf"), order_key(x), NO_KEY)


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
def group_sums(x, top, inverse_t):
    """Raw logits [G, GROUP] and their maxima [G] -> the sums of exponentials relative to the own maximum. The weight of
    the maximum is exactly 1, so that equal logits have equal sums."""
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
    top_ptr,  # [B, R + K, num_tiles * TILE / GROUP] the maximum of each group
    sum_ptr,  # the same of the sums of exponentials; None without top_p
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
        x = tl.reshape(x, (GROUPS, GROUP))
        top = tl.max(x, 1)
        group = ((b * (num_rows + num_drafts) + r) * num_tiles + tile) * GROUPS + tl.arange(0, GROUPS)
        tl.store(top_ptr + group, top.to(logits_ptr.dtype.element_ty))
        if sum_ptr is not None:
            if (top_p < 1) & (top_k == 0):
                tl.store(sum_ptr + group, group_sums(x, top, inverse_temperature(temperature_ptr, temperature)))


@triton.jit
def leaves_out(key, amount, rest, bound, z_max, inverse_t, DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """At most how much lies below the key `bound`: all of a group whose maximum does, and of any other the rest, but no
    more than GROUP - 1 entries of that key."""
    most = exponential(scale(key_value(bound, DTYPE), inverse_t) - z_max) * (GROUP - 1)
    return tl.sum(tl.where(key < bound, amount, tl.minimum(rest, most)), 0)


@triton.jit
def lowest_candidate(key, amount, rest, allowed, top, z_max, inverse_t, DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """A key at or below the cut that leaves out no more than is allowed. It lies below the highest such key by less
    than an eighth of that one's distance from the maximum, or by a few keys."""
    lowest = lowest_key(DTYPE).to(tl.int64)
    highest = top.to(tl.int64)
    distance = tl.full((), 2 ** (DTYPE.fp_mantissa_width - 4), tl.int64)
    bound = highest
    fits = leaves_out(key, amount, rest, top, z_max, inverse_t, DTYPE, GROUP) <= allowed
    while (fits == 0) & (bound > lowest):
        distance *= 2
        bound = tl.maximum(highest - distance, lowest)
        fits = leaves_out(key, amount, rest, bound.to(tl.int32), z_max, inverse_t, DTYPE, GROUP) <= allowed
    distance = distance >> 1
    for _ in range(3):
        distance = distance >> 1
        middle = tl.minimum(bound + distance, highest)
        fits = leaves_out(key, amount, rest, middle.to(tl.int32), z_max, inverse_t, DTYPE, GROUP) <= allowed
        bound = tl.where(fits, middle, bound)
    return bound.to(tl.int32)


@triton.jit
def find_candidates(i, list_ptr, row_ptr, stride_v, lead, vocab_size, count, bits, every):
    """Pointers to candidates i, which of them there are, and their tokens. The list is of entries (bits = 0) or of
    groups of 2**bits, counted from the row's boundary, of which one in `every` is taken."""
    place = (i >> bits) * every
    item = tl.load(list_ptr + place, mask=place < (count >> bits), other=0)
    v = (item << bits) + (i & ((1 << bits) - 1)) - lead
    offset = v.to(tl.int64) if stride_v is None else v.to(tl.int64) * stride_v
    return row_ptr + offset, (place < (count >> bits)) & (v >= 0) & (v < vocab_size), v


@triton.jit
def candidate_amount(x, is_mass, z_max, inverse_t):
    """What an entry counts: its weight for top-p, else 1."""
    amount = tl.full(x.shape, 1.0, tl.float32)
    if is_mass:
        amount = exponential(scale(x, inverse_t) - z_max)
    return amount


@triton.jit
def append(list_ptr, item, chosen, count, capacity):
    """Write what is chosen behind the `count` items of a list, if there is room; returns how many there are now."""
    slot = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(list_ptr + slot, item, mask=chosen & (slot < capacity))
    return count + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def reach(key, amount, lo, hi, wanted):
    """The highest key of lo .. hi - 1 such that what is wanted lies at it and above it; lo if there is none."""
    step = tl.full((), 1, tl.int64)
    while step < hi.to(tl.int64) - lo:
        step *= 2
    while step > 1:
        step = step >> 1
        middle = tl.minimum(lo.to(tl.int64) + step, hi).to(tl.int32)
        reached = (tl.sum(tl.where(key >= middle, amount, 0.0), 0) >= wanted) & (middle < hi)
        lo = tl.where(reached, middle, lo)
    return lo


@triton.jit
def find_cut(
    list_ptr,
    row_ptr,
    stride_v,
    lead,
    vocab_size,
    num_groups,
    offset,
    bits,
    count,
    lowest,
    hi,
    wanted,
    share,
    row_mass,
    is_mass,
    z_max,
    inverse_t,
    HELD: tl.constexpr,
):
    """The cut among the candidates: the highest key such that what is wanted, k entries or a mass, lies at it and above
    it. It is one of `lowest` .. hi - 1. A negative mass means `share` of the candidates' own; any other is of
    `row_mass`, theirs and what lies below them in their groups.

    Returns the cut, what lies above it, what was wanted, how many entries tie at it, and a list that has them all: its
    offset, kind and length, and the end of the keys that it has."""
    i = tl.arange(0, HELD)
    floor = lowest
    above = tl.full((), 0.0, tl.float64)
    num_ties = 0
    passes = 0
    searching = 1
    while searching > 0:
        # All candidates if there are few, else a sample: groups at equal distances.
        every = (count + HELD - 1) // HELD
        x_ptr, inside, _ = find_candidates(
            i, list_ptr + offset, row_ptr, stride_v, lead, vocab_size, count, bits, every
        )
        x = tl.load(x_ptr, mask=inside, other=float("-inf"))
        key = entry_key(x)
        amount = candidate_amount(x, is_mass, z_max, inverse_t)
        total = tl.sum(tl.where(key >= floor, amount, 0.0).to(tl.float64), 0)
        if every <= 1:
            wanted = tl.where(wanted < 0, tl.maximum(share * total, FLOAT32_TINY), wanted)
            lowest = reach(key, amount, lowest, hi, wanted - above)
            above += tl.sum(tl.where(key > lowest, amount, 0.0).to(tl.float64), 0)
            num_ties = tl.sum((key == lowest).to(tl.int32), 0)
            searching = 0
        else:
            # Candidates a .. end - 1 are to fit: all of them, or those near to where the sample has the cut.
            a, end = lowest, hi
            num_inside = tl.sum(((key >= lowest) & (key < hi)).to(tl.int32), 0) * every
            if (passes > 0) | (num_inside > HELD // 4 * 3):
                share_taken = 1.0 / every.to(tl.float32)
                expected = wanted.to(tl.float32) * share_taken
                margin = 3.0 * tl.sqrt(expected) + 1.0
                if is_mass:
                    # What lies below the cut is spread over many entries, so that a sample tells more about it.
                    tail = (row_mass - wanted.to(tl.float32)) * share_taken
                    expected = tl.sum(amount, 0) - tail
                    if wanted < 0:
                        tail = ((1.0 - share) * total).to(tl.float32)
                        expected = total.to(tl.float32) - tail
                    margin = tail / 16
                margin = margin * (1 << passes)
                if passes >= HALVING:
                    half = tl.maximum((hi.to(tl.int64) - lowest) // 2, 1)
                    a = tl.maximum(reach(key, amount, lowest, hi, expected) - half // 2, lowest).to(tl.int32)
                    end = tl.minimum(a + half, hi).to(tl.int32)
                else:
                    a = reach(key, amount, lowest, hi, expected + margin)
                    end = reach(key, amount, lowest, hi, expected - margin) + 1
            higher = tl.full((), 0.0, tl.float64)
            middle = tl.full((), 0.0, tl.float64)
            total = tl.full((), 0.0, tl.float64)
            num_inside = 0
            for start in range(0, count, HELD):
                x_ptr, inside, v = find_candidates(
                    start + i, list_ptr, row_ptr, stride_v, lead, vocab_size, count, bits, 1
                )
                x = tl.load(x_ptr, mask=inside, other=float("-inf"))
                key = entry_key(x)
                is_higher = key >= end
                is_inside = (key >= a) & (is_higher == 0)
                num_inside = append(list_ptr + num_groups, v + lead, is_inside, num_inside, HELD)
                amount = candidate_amount(x, is_mass, z_max, inverse_t)
                higher += tl.sum(tl.where(is_higher, amount, 0.0), 0).to(tl.float64)
                middle += tl.sum(tl.where(is_inside, amount, 0.0), 0).to(tl.float64)
                total += tl.sum(tl.where(key >= floor, amount, 0.0), 0).to(tl.float64)
            tl.debug_barrier()
            wanted = tl.where(wanted < 0, tl.maximum(share * total, FLOAT32_TINY), wanted)
            passes += 1
            if (higher >= wanted) & (end < hi):
                lowest = end
            elif (higher + middle < wanted) & (a > lowest):
                hi = a
            else:
                lowest = a
                hi = end
                above = higher
                passes = HALVING
                if num_inside <= HELD:
                    offset, bits, count = num_groups, 0, num_inside
                elif end - a == 1:
                    num_ties = num_inside
                    searching = 0
    return lowest, above, wanted, num_ties, offset, bits, count, hi


@triton.jit
def first_kept_tie(list_ptr, row_ptr, stride_v, lead, vocab_size, count, bits, cut, skipped, HELD: tl.constexpr):
    """The token of the first entry of key `cut` behind `skipped` others."""
    first = INT32_MAX
    for start in range(0, count, HELD):
        i = start + tl.arange(0, HELD)
        x_ptr, inside, v = find_candidates(i, list_ptr, row_ptr, stride_v, lead, vocab_size, count, bits, 1)
        tie = (entry_key(tl.load(x_ptr, mask=inside, other=float("-inf"))) == cut).to(tl.int32)
        kept = (tie > 0) & (tl.cumsum(tie, 0) > skipped)
        first = tl.minimum(first, tl.min(tl.where(kept, v, INT32_MAX), 0))
        skipped -= tl.sum(tie, 0)
    return first


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
def cut_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V] of the same dtype and stride_v, or None
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    top_ptr,  # [B, R + K, num_groups]
    sum_ptr,  # [B, R + K, num_groups] or None
    list_ptr,  # [B, R + K, num_groups + HELD] numbers of groups, and places of entries
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
    GROUP: tl.constexpr,
    GROUP_BITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HELD: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1).to(tl.int64)
    row = b * (num_rows + num_drafts) + r
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
        inverse_t = inverse_temperature(True, temperature)
        group = tl.arange(0, BLOCK_G)
        x = tl.load(top_ptr + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
        key = entry_key(x)
        top = tl.max(key, 0)
        z_max = scale(key_value(top, DTYPE), inverse_t)
        lo = lowest_key(DTYPE)
        if ((top_k > 0) | (top_p < 1)) & (top > NO_KEY):
            # Top-k may leave out all groups but k, top-p the mass that it removes.
            amount = tl.where(key > NO_KEY, 1.0, 0.0)
            rest = tl.zeros((BLOCK_G,), tl.float32)
            allowed = tl.sum(amount, 0) - top_k
            mass = tl.full((), 0.0, tl.float64)
            wanted_mass = tl.full((), -1.0, tl.float64)
            share = top_p.to(tl.float64) * TOP_P_REACHED if top_p_ptr is not None else wanted_mass
            if sum_ptr is not None:
                if top_k == 0:
                    weight = exponential(scale(x, inverse_t) - z_max)
                    total = tl.load(sum_ptr + row * num_groups + group, mask=key > NO_KEY, other=0.0)
                    amount = tl.where(key > NO_KEY, total * weight, 0.0)
                    rest = tl.maximum(amount - weight, 0.0)
                    mass = tl.sum(amount.to(tl.float64), 0)
                    wanted_mass = tl.maximum(share * mass, FLOAT32_TINY)
                    allowed = (((1.0 - share) * mass) * SAFE_SHARE).to(tl.float32)
            lo = lowest_candidate(key, amount, rest, allowed, top, z_max, inverse_t, DTYPE, GROUP)
            mass -= tl.sum(tl.where(key < lo, amount, 0.0).to(tl.float64), 0)

            row_ptr = find_row(
                logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k
            )
            lead = row_lead(row_ptr, stride_v)
            list_ptr += row * (num_groups + HELD)
            # Symbolic sizes have 64 bits.
            num_places = tl.cast(num_groups, tl.int32)
            num_candidates = append(list_ptr, group, key >= lo, 0, num_places) * GROUP
            tl.debug_barrier()
            hi, offset, bits, count = top + 1, 0, GROUP_BITS, num_candidates
            for search in range(2):
                is_mass = search == 1
                if tl.where(is_mass, top_p < 1, top_k > 0):
                    if hi <= top:
                        hi, offset, bits, count = top + 1, 0, GROUP_BITS, num_candidates
                    wanted = tl.where(is_mass, wanted_mass, top_k.to(tl.float64))
                    lo, above, wanted, num_ties, offset, bits, count, hi = find_cut(
                        list_ptr,
                        row_ptr,
                        stride_v,
                        lead,
                        vocab_size,
                        num_places,
                        offset,
                        bits,
                        count,
                        lo,
                        hi,
                        wanted,
                        share,
                        mass.to(tl.float32),
                        is_mass,
                        z_max,
                        inverse_t,
                        HELD,
                    )
                    if is_mass:
                        # Of the tokens at the cut, those of highest id, as many as begin below what is wanted.
                        tie_weight = exponential(scale(key_value(lo, DTYPE), inverse_t) - z_max).to(tl.float64)
                        num_kept = tl.maximum(tl.ceil(((wanted - above) / tie_weight).to(tl.float32)), 1.0)
                        if num_kept < num_ties:
                            skipped = num_ties - num_kept.to(tl.int32)
                            first_at_cut = first_kept_tie(
                                list_ptr + offset, row_ptr, stride_v, lead, vocab_size, count, bits, lo, skipped, HELD
                            )
        if min_p_ptr is not None:
            if min_p > 0:
                likely = lowest_likely(top, z_max, min_p, inverse_t, DTYPE)
                first_at_cut = tl.where(likely > lo, 0, first_at_cut)
                lo = tl.maximum(likely, lo)
        cut = tl.where(top > NO_KEY, key_value(lo, DTYPE), cut)
    store_pair(bounds_ptr + (b * num_bounds + first_row + r) * 2, cut, first_at_cut.to(tl.float32, bitcast=True))
