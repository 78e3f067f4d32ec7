"""Makes and searches the list of a row's candidates: entries that may be at the cut or above it."""

import triton
import triton.language as tl

from ..tiles import INT32_MAX, widen
from .groups import total, weigh
from .keys import average, key_value

# Entries of the row that a program reads at once, and entries of its list.
CHUNK = tl.constexpr(2048)
SEARCHED = tl.constexpr(1024)


@triton.jit
def write_down(list_ptr, first, chosen, count, room, WIDTH: tl.constexpr):
    """Append the chosen [N, WIDTH] of the numbers first [N] + 0 .. WIDTH - 1 to a list of `count` entries, as long as
    there is room; numbers for negative places are dropped too. Returns the new count."""
    chosen = chosen.to(tl.int32)
    own = tl.sum(chosen, 1)
    slot = count + tl.cumsum(own, 0) - own
    # Only the scan over N is costly, so columns use bits instead of a scan.
    bits = tl.sum(chosen << tl.arange(0, WIDTH)[None, :], 1)
    for column in range(WIDTH):
        bit = (bits >> column) & 1
        tl.store(list_ptr + slot, first + column, mask=(bit > 0) & (slot >= 0) & (slot < room))
        slot += bit
    return count + tl.sum(own, 0)


@triton.jit
def amounts(x, is_mass, scaling):
    """The amounts of entries: their weights for top-p, else 1."""
    amount = tl.full(x.shape, 1.0, tl.float32)
    if is_mass:
        amount = weigh(x, scaling)
    return amount


@triton.jit
def collect(low, high, every, skipped, summed, parts, row, held, is_mass, scaling):
    """List the entries of keys low .. high - 1 in the order of tokens, without the first `skipped`, as long as there is
    room. Returns their number including those, and, if `summed`, their amount and the amount above them. Reads only one
    in `every` pieces."""
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
    """The amount at a key and above it, in a list of `count` entries (or of those that it has room for)."""
    _, value_ptr, room = held
    lowest = key_value(key, value_ptr.dtype.element_ty)
    amount = tl.zeros((SEARCHED,), tl.float32)
    count = tl.minimum(count, room)
    for start in range(0, count, SEARCHED):
        i = start + tl.arange(0, SEARCHED)
        x = widen(tl.load(value_ptr + i, mask=i < count, other=float("-inf")))
        amount += tl.where(x >= lowest, amounts(x, is_mass, scaling), 0.0)
    return tl.sum(amount, 0)


@triton.jit
def bisect_cut(low, high, wanted, held, count, is_mass, scaling):
    """The highest key of low .. high - 1 with at least the wanted amount at it and above; low if there is none."""
    middle = average(low, high)
    while middle > low:
        reached = amount_from(middle, held, count, is_mass, scaling) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        middle = average(low, high)
    return low


@triton.jit
def first_kept_tie(cut, skipped, held, count):
    """The token of the first entry of key `cut` after `skipped` others."""
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
