"""The first kernel of the search, which reduces groups of entries, and functions that read its results in the second
kernel."""

import triton
import triton.language as tl

from .. import launch
from ..tiles import (
    FLOAT32_MAX,
    LOG2_E,
    exponential,
    inverse_temperature,
    load_logits,
    load_temperature,
    row_lead,
    scale,
)
from .keys import average, key_value, lowest_key

# A scaled logit above this number may have been clamped.
LARGEST_UNCLAMPED = tl.constexpr(2.0**100)


@triton.jit
def load_filters(b, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
    """The top_k (0 = off), top_p (1 = off) and min_p (0 = off) of a sequence."""
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
    """True if the row has a distribution, and therefore keeps at least one token. Greedy rows ignore top_p and
    min_p."""
    return (temperature == 0) | ((temperature > 0) & (top_p == top_p) & (min_p == min_p))


@triton.jit
def is_filtered(temperature, top_k, top_p, min_p):
    """True if a filter may remove tokens, so that the row must be read."""
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    return is_lawful(temperature, top_p, min_p) & (temperature > 0) & filtered


@triton.jit
def find_row(logits_ptr, draft_ptr, b, r, num_rows, stride_b, stride_r, stride_draft_b, stride_draft_k):
    """A pointer to row r of a sequence. The draft's rows come after the rows of `logits`."""
    row_ptr = logits_ptr + b * stride_b + r * stride_r
    if draft_ptr is not None:
        if r >= num_rows:
            row_ptr = draft_ptr + b * stride_draft_b + (r - num_rows) * stride_draft_k
    return row_ptr


@triton.jit
def group_sums(x, inverse_t):
    """Raw logits [G, GROUP] -> for each group the sum of exp(z - the group's maximum). The weight of the maximum is
    exactly 1, so that groups of equal logits have equal sums."""
    top = tl.max(x, 1)
    shift = tl.maximum(top, -FLOAT32_MAX)[:, None]
    total = tl.sum(tl.exp2((x - shift) * (inverse_t * LOG2_E)), 1)
    # Scale entry by entry only if the tile has NaN or values near the limits of float32.
    highest = tl.max(tl.abs(tl.where(top > float("-inf"), top, 0.0)), 0) * inverse_t
    if ((highest <= LARGEST_UNCLAMPED) & (tl.min((total >= 0).to(tl.int32), 0) > 0)) == 0:
        z = scale(x, inverse_t)
        total = tl.sum(exponential(z - tl.maximum(scale(top, inverse_t), -FLOAT32_MAX)[:, None]), 1)
    return total


@launch.jit
def group_kernel(
    logits_ptr,  # [B, R, V]
    draft_ptr,  # [B, K, V] of the same dtype and stride_v, or None
    one_hot_ptr,  # [B] bool, True: the draft's rows are not read; None = all are
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
    num_rows,  # R, the rows of `logits` in a sequence
    num_drafts,  # K, the draft's rows in a sequence
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
    if one_hot_ptr is not None:
        # A row with temperature 0 is not read.
        temperature = tl.where((r >= num_rows) & tl.load(one_hot_ptr + b), 0.0, temperature)
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
def weigh(x, scaling):
    """The weights exp(z - maximum) of raw logits."""
    z_max, inverse_t = scaling
    return exponential(scale(x, inverse_t) - z_max)


@triton.jit
def total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def leaves_out(bound, groups, scaling, DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """An upper bound of the total amount of entries below the key `bound`. `groups` holds for each group its maximum,
    its amount, and its amount without the maximum. A group whose maximum is below counts completely. In any other
    group, at most GROUP - 1 entries are below; their amount is at most that of the group without its maximum, and at
    most GROUP - 1 times the weight of the key."""
    top, amount, rest = groups
    x = key_value(bound, DTYPE)
    return total(tl.where(top < x, amount, tl.minimum(rest, weigh(x, scaling) * (GROUP - 1))))


@triton.jit
def lowest_candidate(least, highest, allowed, groups, scaling, DTYPE: tl.constexpr, GROUP: tl.constexpr):
    """A lower bound of the cut, as an `order_key`. Of the keys from the smallest to the largest maximum of a group, the
    bound is the highest key for which the entries below have at most the allowed amount, rounded down to the 8
    significant bits of bfloat16. If there is no such key, the bound is the lowest key of all."""
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
