"""Functions of `verify_exact` and `verify_block`: statistics of draft rows, the residual max(p - q, 0), and the draw of
the next token.

A target row and its draft row have a state of four numbers, with p(v) = exp(z_p(v) - p_shift) * p_weight and q(v) =
exp(z_q(v) - q_shift) * q_weight.
"""

import triton
import triton.language as tl

from .tiles import (
    FLOAT32_MAX,
    combine_stats,
    exponential,
    load_kept,
    load_kept_beside,
    load_partials,
    load_row_partials,
    pick_tile,
    pick_token,
    row_lead,
    row_stats,
    scale,
    store_pair,
    tile_tokens,
)

LARGEST_PLAIN_SHIFT = tl.constexpr(2.0**100)
# q(x) is clamped to exp of this number, so that it is finite in float64 for any `draft_lse`.
LARGEST_EXPONENT = tl.constexpr(700.0)
# A residual with at most this mass counts as empty.
LEAST_RESIDUAL = tl.constexpr(2.0**-100)


@triton.jit
def stats_from_lse(lse):
    """The maximum and the sum for which exp(z - max) / sum is exp(z - lse), or 0 if lse is not finite."""
    finite = tl.abs(lse) <= FLOAT32_MAX
    # Use inf as the maximum, so that exp(z - inf) is 0. With another maximum, exp could overflow, and inf times 0 is
    # NaN.
    return tl.where(finite, lse, float("inf")), tl.where(finite, 1.0, 0.0)


@triton.jit
def draft_stats(partial_ptr, partial_row, draft_lse_ptr, lse_index, num_tiles, live, BLOCK_T: tl.constexpr):
    """The maximum [R] and the sum of exponentials [R] of draft rows, from draft_lse if it is given, else from their
    partials."""
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
def load_state(state_ptr):
    """The state of a pair of rows: p_shift, p_weight, q_shift, q_weight."""
    return tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2), tl.load(state_ptr + 3)


@triton.jit
def scale_in_row(x, inverse_t, shift):
    """A faster `scale` for a row whose largest scaled logit is `shift`. Unless `shift` is extreme, no clamping is
    needed: only logits of weight 0 can overflow, and `maximum` turns NaN into -inf."""
    plain = tl.abs(shift) <= LARGEST_PLAIN_SHIFT
    return tl.maximum(x * inverse_t, float("-inf")) if plain else scale(x, inverse_t)


@triton.jit
def subtract_draft(p, z_p, b, n, lead, tile, draft, sizes, inverse_t, state, TILE: tl.constexpr):
    """[TILE] max(p - q, 0) at position n of sequence b, and 1 if any logits of target and draft differ in this tile,
    else 0. The second result is needed because q is a multiple of p if all logits are equal. The difference would then
    consist of rounding errors, because the two sums may be taken in different orders, or q's sum may come from
    `draft_lse`."""
    draft_ptr, stride_b, stride_k, stride_v, bounds_ptr, tokens_ptr, one_hot_ptr = draft
    num_drafts, vocab_size, _, _, num_bounds = sizes
    _, _, q_shift, q_weight = state
    if draft_ptr is None or (one_hot_ptr is not None and tl.load(one_hot_ptr + b)):
        token = tl.load(tokens_ptr + n).to(tl.int32)
        weight, differs = tl.where(tile_tokens(lead, tile, TILE) == token, 0.0, p), tl.full((), 1.0, tl.float32)
    else:
        row_ptr = draft_ptr + (b * stride_b + n * stride_k)
        bounds_row = b * num_bounds + n + (num_drafts + 1)
        x_q = load_kept_beside(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE)
        z_q = scale_in_row(x_q, inverse_t, q_shift)
        weight = tl.maximum(p - exponential(z_q - q_shift) * q_weight, 0.0)
        differs = tl.max((z_p != z_q).to(tl.int32), 0).to(tl.float32)
    return weight, differs


@triton.jit
def sum_residual(
    b, n, first_tile, tiles_per_program, mass_ptr, target, draft, sizes, inverse_t, state, TILE: tl.constexpr
):
    """For each tile of this program, store the residual mass at position n of sequence b, and whether p and q differ in
    the tile."""
    target_ptr, stride_b, stride_k, stride_v, bounds_ptr = target
    _, vocab_size, num_tiles, _, num_bounds = sizes
    p_shift, p_weight, _, _ = state
    row_ptr = target_ptr + (b * stride_b + n * stride_k)
    bounds_row = b * num_bounds + n
    lead = row_lead(row_ptr, stride_v)
    end = tl.minimum(first_tile + tiles_per_program, num_tiles).to(tl.int32)
    # Disable hoisting, because with hoisted addresses `ptxas` spilled registers.
    for tile in tl.range(first_tile, end, disable_licm=True):
        x_p = load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, bounds_row, TILE)
        z_p = scale_in_row(x_p, inverse_t, p_shift)
        p = exponential(z_p - p_shift) * p_weight
        weight, differs = subtract_draft(p, z_p, b, n, lead, tile, draft, sizes, inverse_t, state, TILE)
        store_pair(mass_ptr + tile * 2, tl.sum(weight, 0), differs)


@triton.jit
def draw_token(
    uniform,
    b,
    n,
    mass_ptr,
    weighed,
    partial_ptr,
    target,
    draft,
    sizes,
    inverse_t,
    state,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Draw the next token at position n of sequence b: find the tile that the uniform falls into, then the token in the
    tile. The token is drawn from the residual if the residual was summed (`weighed`) and is not empty, else from p."""
    target_ptr, stride_b, stride_k, stride_v, bounds_ptr = target
    _, vocab_size, num_tiles, rows_per_sequence, num_bounds = sizes
    p_shift, p_weight, _, _ = state
    index = tl.arange(0, BLOCK_T)
    summed = index < tl.where(weighed, num_tiles, 0)
    residual = tl.load(mass_ptr + index * 2, mask=summed, other=0.0)
    differs = tl.load(mass_ptr + index * 2 + 1, mask=summed, other=0.0)
    has_residual = (tl.sum(residual, 0) > LEAST_RESIDUAL) & (tl.max(differs, 0) > 0)
    tile_max, tile_sum = load_row_partials(partial_ptr, b * rows_per_sequence + n, num_tiles, BLOCK_T)
    p_mass = tl.max(tile_sum * exponential(tile_max - p_shift) * p_weight, 0)
    tile, threshold = pick_tile(tl.where(has_residual, residual, p_mass), uniform)

    row_ptr = target_ptr + (b * stride_b + n * stride_k)
    lead = row_lead(row_ptr, stride_v)
    x_p = load_kept(row_ptr, stride_v, lead, vocab_size, tile, bounds_ptr, b * num_bounds + n, TILE)
    z_p = scale_in_row(x_p, inverse_t, p_shift)
    weight = exponential(z_p - p_shift) * p_weight
    if has_residual:
        weight, _ = subtract_draft(weight, z_p, b, n, lead, tile, draft, sizes, inverse_t, state, TILE)
    return pick_token(weight, tile_tokens(lead, tile, TILE), threshold)
