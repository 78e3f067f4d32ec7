"""The draft's rows in `verify_exact` and `verify_block`: their statistics, and the residual max(p - q, 0).

A state is four numbers of a sequence that describe the row pair that the next token is drawn from:
p(v) = exp(z_p(v) - p_shift) * p_weight, and q likewise.
"""

import triton
import triton.language as tl

from ..rows import FLOAT32_MAX, combine_stats, exponential, load_partials, row_stats, store_pair


@triton.jit
def stats_from_lse(lse):
    """The (max, sum) that give exp(z - lse); no probability at all where lse is not finite."""
    finite = tl.abs(lse) <= FLOAT32_MAX
    return tl.where(finite, lse, 0.0), tl.where(finite, 1.0, 0.0)


@triton.jit
def draft_stats(partial_ptr, partial_row, draft_lse_ptr, lse_index, num_tiles, live, BLOCK_T: tl.constexpr):
    """[R] maximum and sum of exponentials of draft rows: by draft_lse if it is given, else from their partials."""
    if draft_lse_ptr is None:
        tile_max, tile_sum = load_partials(partial_ptr, partial_row, num_tiles, live, BLOCK_T)
        z_max, z_sum = combine_stats(tile_max, tile_sum)
    else:
        z_max, z_sum = stats_from_lse(tl.load(draft_lse_ptr + lse_index, mask=live, other=0.0))
    return z_max, z_sum


@triton.jit
def draft_row_stats(partial_ptr, partial_row, draft_lse_ptr, lse_index, num_tiles, BLOCK_T: tl.constexpr):
    """`draft_stats` of one row, with a finite maximum."""
    if draft_lse_ptr is None:
        z_max, z_sum = row_stats(partial_ptr, partial_row, num_tiles, BLOCK_T)
    else:
        z_max, z_sum = stats_from_lse(tl.load(draft_lse_ptr + lse_index))
    return z_max, z_sum


@triton.jit
def residual_weights(p, z_p, z_q, q_shift, q_weight):
    """[TILE] max(p - q, 0), and whether the two rows differ in this tile at all. Equal logits mean p = q, which the
    difference of two rounded distributions need not show: their sums may have been taken in another order, or come with
    `draft_lse`."""
    weight = tl.maximum(p - exponential(z_q - q_shift) * q_weight, 0.0)
    return weight, tl.max((z_p != z_q).to(tl.int32), 0).to(tl.float32)


@triton.jit
def load_state(state_ptr):
    """p_shift, p_weight, q_shift, q_weight."""
    return tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2), tl.load(state_ptr + 3)


@triton.jit
def store_state(state_ptr, p_shift, p_weight, q_shift, q_weight):
    store_pair(state_ptr, p_shift, p_weight)
    store_pair(state_ptr + 2, q_shift, q_weight)
