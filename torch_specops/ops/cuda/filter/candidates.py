"""Build and search the list of a row's candidates: the entries that may be at the cut (the lowest logit that is kept)
or above it. Entries are compared by their keys (`keys.py`).

Four arguments are tuples: `held` is the list (token ids, logits, and `room`, the most entries that it holds), `row` the
row (pointer, stride, lead, vocabulary size), `parts` the parts of the row to read (their indices, log2 of the pieces
per part, the number of pieces), and `scaling` two numbers: the largest scaled logit and 1 / T.
"""

import triton
import triton.language as tl

from ..tiles import INT32_MAX, widen
from .groups import total, weigh
from .keys import average, key_value

# The number of entries that a program reads from the row at a time, and from the list.
CHUNK = tl.constexpr(2048)
SEARCHED = tl.constexpr(1024)


@triton.jit
def write_down(list_ptr, first, chosen, count, room, WIDTH: tl.constexpr):
    """Append numbers to a list of `count` entries. Row i stands for the numbers first[i] .. first[i] + WIDTH - 1, of
    which those with chosen[i, j] are appended. Numbers beyond the room of the list or at negative places are dropped.
    Returns the new count."""
    chosen = chosen.to(tl.int32)
    own = tl.sum(chosen, 1)
    slot = count + tl.cumsum(own, 0) - own
    # Scan only over the rows i, because scans are slow. Within a row, use bits to count the chosen columns j.
    bits = tl.sum(chosen << tl.arange(0, WIDTH)[None, :], 1)
    for column in range(WIDTH):
        bit = (bits >> column) & 1
        tl.store(list_ptr + slot, first + column, mask=(bit > 0) & (slot >= 0) & (slot < room))
        slot += bit
    return count + tl.sum(own, 0)


@triton.jit
def amounts(x, is_mass, scaling):
    """The amount that each entry counts as: its weight for top-p, else 1."""
    amount = tl.full(x.shape, 1.0, tl.float32)
    if is_mass:
        amount = weigh(x, scaling)
    return amount


@triton.jit
def collect(low, high, every, skipped, summed, parts, row, held, is_mass, scaling):
    """List the entries with keys low .. high - 1 in the order of token ids, without the first `skipped` of them, as
    long as there is room. Returns the number of entries with these keys, including those not listed. If `summed`, also
    returns the total amount of these entries and the total amount of entries with higher keys. Reads only one in
    `every` pieces of the row."""
    part_ptr, shift, num_pieces = parts
    row_ptr, stride_v, lead, vocab_size = row
    token_ptr, value_ptr, room = held
    end_of_row = lead + vocab_size
    lowest = key_value(low, row_ptr.dtype.element_ty)
    end = key_value(high - 1, row_ptr.dtype.element_ty)
    count = -skipped
    inside = tl.full((), 0.0, tl.float64)
    above = tl.full((), 0.0, tl.float64)
    # A piece is 16 bytes.
    PIECE: tl.constexpr = 128 // row_ptr.dtype.element_ty.primitive_bitwidth
    PIECES: tl.constexpr = CHUNK // PIECE
    for start in range(0, tl.cdiv(num_pieces, every), PIECES):
        i = (start + tl.arange(0, PIECES)) * every
        listed = i < num_pieces
        part = tl.load(part_ptr + (i >> shift), mask=listed, other=0)
        # `place` is counted from the 16-byte boundary at or before the row.
        place = ((part << shift) + (i & ((1 << shift) - 1))) * PIECE
        position = place[:, None] + tl.arange(0, PIECE)[None, :]
        if stride_v is None:
            base = tl.multiple_of(row_ptr - lead, 16)
            whole = (listed & (place >= lead) & (place + PIECE <= end_of_row))[:, None]
            raw = tl.load(base + position, mask=whole, other=float("-inf"))
            # Parts are in the order of token ids, so if a part of this chunk reaches beyond the row, the last one does.
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
    """The total amount of the listed entries with at least this key. The list has `count` entries, or as many as
    fit."""
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
    """The highest key in low .. high - 1 for which the entries with at least this key have the wanted amount; low if
    there is none."""
    middle = average(low, high)
    while middle > low:
        reached = amount_from(middle, held, count, is_mass, scaling) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        middle = average(low, high)
    return low


@triton.jit
def first_kept_tie(cut, skipped, held, count):
    """The token id of the first entry with key `cut` after `skipped` other entries with this key."""
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
