"""The second kernel of the search for a row's bounds (`bounds.py`). The search works on keys (`keys.py`).

`group_kernel` reduces groups of entries (`groups.py`). `cut_kernel` uses the results to find the cut:
1. `lowest_candidate` bisects the keys with the maxima of groups, and for top-p also with their sums. The cut is at the
   key that is found, or above. Parts of groups whose maximum is below this key are not read again.
2. `collect` lists the tokens at that key or above (`candidates.py`). If the list has not enough room, `find_window`
   narrows the range of keys: to those that a sample shows to be likely (`likely_keys`), or by half.
3. `bisect_cut` bisects the remaining keys with the entries of the list: first for top-k, then for top-p of the tokens
   that top-k kept.
4. Of the tokens at the cut, those with the highest ids are kept, as many as top-p needs (`first_kept_tie`).
5. `lowest_likely` is the cut of min-p. The higher of both cuts is used.
"""

import triton
import triton.language as tl

from .. import launch
from ..tiles import FLOAT32_TINY, INT32_MAX, inverse_temperature, row_lead, scale, store_pair, widen
from .candidates import amount_from, bisect_cut, collect, first_kept_tie, write_down
from .groups import find_row, is_filtered, is_lawful, lowest_candidate, total, weigh
from .keys import average, key_value, lowest_key, order_key

# A mass counts as top_p if it reaches this share of it, so that rounding top_p to float32 does not add a token.
TOP_P_REACHED = tl.constexpr(1.0 - 2.0**-24)
# The mass that top-p may remove is multiplied by this factor, so that rounding errors of sums cannot remove too much.
SAFE_SHARE = tl.constexpr(1.0 - 2.0**-10)
# The number of entries in the sample from which a program estimates the cut.
SAMPLE = tl.constexpr(4096)
# The phases of the search: find the top-k cut, find the top-p cut, choose which tokens tied at the top-p cut are kept.
TOP_K, TOP_P, TIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def likely_keys(low, high, expected, every, held, count, is_mass, scaling):
    """Narrow the keys low .. high - 1 to a range around the key at which a sample of one in `every` entries reaches the
    expected amount. The range is chosen so that its entries are expected to fill three quarters of the list."""
    _, _, room = held
    margin = room * 3 // 8 // every
    if amount_from(low, held, count, False, scaling) > 2 * margin:
        cut = bisect_cut(low, high, expected, held, count, is_mass, scaling)
        rank = amount_from(cut, held, count, False, scaling)
        high = bisect_cut(cut, high, rank - margin, held, count, False, scaling) + 1
        low = bisect_cut(low, cut + 1, rank + margin, held, count, False, scaling)
        # If too many entries have keys in the range, because many are equal, use a single key.
        num_between = amount_from(low, held, count, False, scaling) - amount_from(high, held, count, False, scaling)
        too_many = num_between > room // every
        low = tl.where(too_many, cut, low)
        high = tl.where(too_many, cut + 1, high)
    return low, high


@triton.jit
def mass_wanted(top_p, mass):
    """The mass that top_p must keep, out of the total `mass`."""
    return tl.maximum(tl.cast(top_p, tl.float64) * TOP_P_REACHED * mass, FLOAT32_TINY)


@triton.jit
def find_window(lo, hi, wanted, top_p, mass, parts, row, held, is_mass, scaling):
    """Narrow keys lo .. hi - 1 to a range that includes the cut and whose entries fit the list, or to a single key,
    which may have more entries. The cut is the highest key for which the entries with at least this key have the wanted
    amount: k entries, or a part of `mass`, the total mass of the parts. If `wanted` is negative, the wanted amount is
    the share top_p of the mass of these keys.

    Returns the range of keys, the amount above it, the number of its entries, and the wanted amount."""
    row_ptr, _, _, _ = row
    _, _, num_pieces = parts
    _, _, room = held
    DTYPE: tl.constexpr = row_ptr.dtype.element_ty
    above = 0.0
    low, high, every, count = lo, hi, 1, 0
    num_entries = num_pieces * (128 // DTYPE.primitive_bitwidth)
    # Take a sample first only if most entries of the row may have keys >= lo. Otherwise the list probably has room for
    # all entries with such keys.
    if (num_entries > 8 * room) & (wanted >= 0):
        every = tl.cdiv(num_entries, tl.minimum(room, SAMPLE))
        low = tl.where(is_mass, lowest_key(DTYPE), lo)
    top = hi
    searching = 1
    while searching > 0:
        summed = (every > 1) | (low > lo) | (high < top) | (wanted < 0)
        count, inside, higher = collect(low, high, every, 0, summed, parts, row, held, is_mass, scaling)
        if every > 1:
            expected = wanted / every
            if is_mass:
                # Estimate the mass below the cut, because it is spread over many entries. A sample estimates it more
                # accurately than the mass above the cut.
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
            # After a wrong estimate, halve the range of keys instead.
            low, high = average(lo, hi), hi
    return lo, hi, above, count, wanted


@triton.jit
def count_left_out(cut, above, wanted, held, count, scaling):
    """The number of tokens at the cut that top-p removes. A token at the cut is kept if the mass before it is below the
    wanted mass."""
    _, value_ptr, room = held
    above += amount_from(cut + 1, held, count, True, scaling)
    num_ties = amount_from(cut, held, count, False, scaling)
    num_ties -= amount_from(cut + 1, held, count, False, scaling)
    if count > room:
        num_ties = count.to(tl.float32)
    tie_weight = weigh(key_value(cut, value_ptr.dtype.element_ty), scaling).to(tl.float64)
    num_kept = tl.maximum(tl.ceil(((wanted - above) / tie_weight).to(tl.float32)), 1.0)
    return tl.maximum(num_ties - num_kept, 0.0).to(tl.int32)


@triton.jit
def lowest_likely(low, high, min_p, scaling, DTYPE: tl.constexpr):
    """The first key in low .. high whose scaled logit is at least z_max + log(min_p). Bisection is possible because
    scaling keeps the order."""
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
    one_hot_ptr,  # [B] bool, True: the draft's rows are not read; None = all are
    temperature_ptr,  # [B] or None
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    top_ptr,  # [B, R + K, num_groups * GROUP / PART]
    sum_ptr,  # [B, R + K, num_groups] or None
    part_ptr,  # [B, R + K, num_groups * GROUP / PART] indices of the parts to read again
    token_ptr,  # [B, R + K, room] token ids of the entries that may be the cut
    value_ptr,  # [B, R + K, room] logits of the entries in token_ptr
    found_ptr,  # [B, num_bounds - R, 3] the logsumexp and the bounds of draft rows that are not searched, or None
    lse_ptr,  # [B, num_bounds - R] the logsumexp alone, or None
    bounds_ptr,  # [B, num_bounds, 2], of which rows first_row .. first_row + R + K are written
    stride_b,
    stride_r,
    stride_v,
    stride_draft_b,
    stride_draft_k,
    num_rows,  # R, the rows of `logits` in a sequence
    num_drafts,  # K, the draft's rows in a sequence
    first_row,
    num_bounds,
    vocab_size,
    num_groups,
    room,  # the most entries that the lists hold for a row
    GROUP: tl.constexpr,
    PART: tl.constexpr,
    PART_SHIFT: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1).to(tl.int64)
    program = b * (num_rows + num_drafts) + r
    # Load here all values that determine where the lists are written. torch analyses which tensors a kernel writes, but
    # does not look into functions: it treats a function's result as the pointer that the function was given.
    temperature, k, top_p, min_p = 1.0, 0, 1.0, 0.0
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + b)
    if one_hot_ptr is not None:
        # A row with temperature 0 is not read.
        temperature = tl.where((r >= num_rows) & tl.load(one_hot_ptr + b), 0.0, temperature)
    if found_ptr is not None:
        temperature = tl.where(r >= num_rows, 0.0, temperature)
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
        # Load four groups at once, because the number of groups is a multiple of four.
        first_group = tl.arange(0, BLOCK_G // 4) * 4
        group = first_group[:, None] + tl.arange(0, 4)[None, :]
        is_group = (first_group < num_groups)[:, None]
        PARTS: tl.constexpr = GROUP // PART
        top_ptr = tl.multiple_of(top_ptr + program * num_groups * PARTS, 4 * PARTS * DTYPE.primitive_bitwidth // 8)
        part = first_group[:, None] * PARTS + tl.arange(0, 4 * PARTS)[None, :]
        part_top = widen(tl.load(top_ptr + part, mask=is_group, other=float("-inf")))
        top = tl.max(tl.reshape(part_top, (BLOCK_G // 4, 4, PARTS)), 2)
        finite = top > float("-inf")
        x_max = tl.max(tl.max(tl.where(finite, top, float("-inf")), 1), 0)
        inverse_t = inverse_temperature(True, temperature)
        scaling = (scale(x_max, inverse_t), inverse_t)
        highest = order_key(x_max.to(DTYPE))
        lo = lowest_key(DTYPE)
        if ((top_k > 0) | (top_p < 1)) & (x_max > float("-inf")):
            amount = tl.where(finite, 1.0, 0.0)
            rest = tl.zeros(top.shape, tl.float32)
            # `allowed` limits the amount below the candidate key. For top-k the amount is a number of groups: all
            # groups except k, so that k maxima are at the key or above. For top-p it is the mass to remove.
            allowed = total(amount) - top_k
            wanted_mass = tl.full((), 0.0, tl.float64)
            if sum_ptr is not None:
                if top_k == 0:
                    weight = weigh(top, scaling)
                    sum_ptr = tl.multiple_of(sum_ptr + program * num_groups, 16)
                    sums = tl.load(sum_ptr + group, mask=is_group, other=0.0)
                    amount = tl.where(finite, sums * weight, 0.0)
                    rest = tl.maximum(amount - weight, 0.0)
                    mass = total(amount.to(tl.float64))
                    wanted_mass = mass_wanted(top_p, mass)
                    allowed = ((mass - wanted_mass) * SAFE_SHARE).to(tl.float32)
            least = order_key(tl.min(tl.min(tl.where(finite, top, float("inf")), 1), 0).to(DTYPE))
            lo = lowest_candidate(least, highest, allowed, (top, amount, rest), scaling, DTYPE, GROUP)
            listed = finite & (top >= key_value(lo, DTYPE))
            mass = total(tl.where(listed, amount, 0.0))
            # Load these values again, so that they occupy no registers during the search.
            part_top = widen(tl.load(top_ptr + part, mask=is_group, other=float("-inf")))
            matters = (part_top > float("-inf")) & (part_top >= key_value(lo, DTYPE))
            part_ptr += program * num_groups * PARTS
            num_parts = write_down(part_ptr, first_group * PARTS, matters, 0, num_groups * PARTS, 4 * PARTS)
            parts = (part_ptr, PART_SHIFT, num_parts << PART_SHIFT)
            tl.debug_barrier()

            row_ptr = find_row(
                logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k
            )
            row = (row_ptr, stride_v, row_lead(row_ptr, stride_v), vocab_size)
            # Cast, because symbolic sizes are passed as 64-bit integers.
            places = tl.cast(room, tl.int32)
            held = (token_ptr + program * room, value_ptr + program * room, places)
            hi = highest + 1
            count = places + 1
            skipped = 0
            # Run top-k, top-p and the ties as iterations of one loop, so that the code of the searches is generated
            # once. The code cannot be a function: torch's analysis (see the comment at the loads) would take the
            # function's result for its pointer argument. The analysis ignores values that a loop carries from one
            # iteration to the next.
            for phase in range(3):
                is_mass = phase == TOP_P
                if phase == TIES:
                    # Of tied tokens, keep those with the highest ids.
                    if skipped > 0:
                        if count > places:
                            collect(lo, lo + 1, 1, skipped, False, parts, row, held, True, scaling)
                            skipped, count = 0, 1
                        first_at_cut = first_kept_tie(lo, skipped, held, count)
                elif tl.where(is_mass, top_p < 1, top_k > 0):
                    wanted = tl.where(is_mass, wanted_mass, top_k.to(tl.float64))
                    above = 0.0
                    if hi <= highest:
                        # The search for top-k may have narrowed the list to keys below the highest one, so build the
                        # list again.
                        hi = highest + 1
                        count = places + 1
                    if is_mass & (top_k > 0):
                        # Apply top-p to the tokens that top-k kept: a negative number makes `find_window` sum their
                        # mass.
                        wanted = tl.full((), -1.0, tl.float64)
                        if count <= places:
                            kept = amount_from(lo, held, count, True, scaling)
                            wanted = mass_wanted(top_p, kept)
                    if count > places:
                        lo, hi, above, count, wanted = find_window(
                            lo, hi, wanted, top_p, mass, parts, row, held, is_mass, scaling
                        )
                    lo = bisect_cut(lo, hi, wanted - above, held, count, is_mass, scaling)
                    if is_mass:
                        skipped = count_left_out(lo, above, wanted, held, count, scaling)
        if min_p_ptr is not None:
            if DTYPE.primitive_bitwidth == 32:
                # Load min_p again, because on sm_80 ptxas would spill registers to hold it during the search.
                min_p = tl.load(min_p_ptr + b)
            if min_p > 0:
                likely = lowest_likely(lo, highest, min_p, scaling, DTYPE)
                first_at_cut = tl.where(likely > lo, 0, first_at_cut)
                lo = likely
        cut = tl.where(x_max > float("-inf"), key_value(lo, DTYPE), cut)
    first_bits = first_at_cut.to(tl.float32, bitcast=True)
    if found_ptr is not None:
        if r >= num_rows:
            row = b * (num_bounds - num_rows) + r - num_rows
            tl.store(lse_ptr + row, tl.load(found_ptr + row * 3))
            cut = tl.load(found_ptr + row * 3 + 1)
            first_bits = tl.load(found_ptr + row * 3 + 2)
    store_pair(bounds_ptr + (b * num_bounds + first_row + r) * 2, cut, first_bits)
