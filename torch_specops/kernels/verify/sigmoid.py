"""`specops::verify_sigmoid` on CUDA: sigmoid scores in place of probabilities. Lossy.

p^(v) = sigmoid((z_p(v) / T - alpha) / (beta - alpha)), q^ likewise; accept x_i iff u_i * q^_i(x_i) < p^_i(x_i), at the
first failure n draw from max(p^_n - q^_n, 0), after K acceptances from softmax(z_p,K / T). A score needs its own
logit only, so an acceptance test reads two logits and no row.

Bytes per sequence: 2 K logits, and one row pair V * (s_p + s_q) (the bonus: one row), once and one tile of it again.
A greedy sequence reads its K + 1 target rows, V * (K + 1) * s_p, as the argmax demands. Scratch: 8 bytes per (row,
tile). Two launches:
1. `score_kernel`, one program per (sequence, tile): walks the drafts to n (every program of a sequence computes the
   same n), then sums its tile's weights; for greedy sequences the argmax of its tile in each row.
2. `draw_kernel`, one program per sequence: picks the tile that s falls into, rescans it, writes the output row.

p^ - q^ cancels (at +-1e4 it is about 1e-4 of p^). With a, b the scaled logits, sigmoid(a) - sigmoid(b) =
sigmoid(a) * sigmoid(-b) * (1 - exp(b - a)), and the last factor is a polynomial in a - b where that is small.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...arguments import SigmoidArguments
from .. import launch
from ..rows import (
    FLOAT32_MAX,
    combine_argmax,
    combine_stats,
    exponential,
    inverse_temperature,
    load_partials,
    load_row_partials,
    load_scaled,
    load_scaled_beside,
    load_temperature,
    pick_tile,
    pick_token,
    row_argmax,
    row_lead,
    scaled_stats,
    store_pair,
    tile_argmax,
    tile_tokens,
)
from .accept import accept_scored, count_valid, leading, load_token_logits, shared_values, store_output

# Drafts per turn of the walk over single logits, which holds no partials.
SCORE_WALK = tl.constexpr(16)


@triton.jit
def one_minus_exp(gap):
    """1 - exp(-gap) for gap >= 0 without cancellation: Taylor to gap**6 below 1/4, where the next term is < 5e-8."""
    series = 1.0 - gap * (1.0 / 6)
    series = 1.0 - gap * (1.0 / 5) * series
    series = 1.0 - gap * (1.0 / 4) * series
    series = 1.0 - gap * (1.0 / 3) * series
    series = 1.0 - gap * (1.0 / 2) * series
    return tl.where(gap < 0.25, gap * series, 1.0 - exponential(-gap))


@triton.jit
def floor(z, lowest):
    """Scaled logits not below `lowest`, whose score is sigmoid(-80) and which float32 still holds; -inf stays."""
    return tl.where(z > float("-inf"), tl.maximum(z, lowest), z)


@triton.jit
def score(z, alpha, inverse_range):
    """sigmoid((z - alpha) / (beta - alpha)), 0 for an excluded logit."""
    return tl.where(z > float("-inf"), 1.0 / (1.0 + exponential((alpha - z) * inverse_range)), 0.0)


@triton.jit
def residual_score(z_p, z_q, alpha, inverse_range):
    """max(p^ - q^, 0); p^ where q^ is 0."""
    p = score(z_p, alpha, inverse_range)
    has_q = z_q > float("-inf")
    q_logit = tl.where(has_q, z_q, 0.0)
    gap = tl.maximum((z_p - q_logit) * inverse_range, 0.0)
    # p > 0 wherever the gap is: an excluded target logit leaves no gap.
    difference = p * one_minus_exp(gap) / (1.0 + exponential((q_logit - alpha) * inverse_range))
    return tl.where(has_q, difference, p)


@launch.jit
def score_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    partial_ptr,  # [B, K+1, num_tiles, 2]; a sampled sequence uses row 0
    num_accepted_ptr,  # [B]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    alpha,
    inverse_range,
    lowest,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    # Inductor passes a Python float as float64, a launch as float32.
    alpha, inverse_range = tl.cast(alpha, tl.float32), tl.cast(inverse_range, tl.float32)
    lowest = tl.cast(lowest, tl.float32)
    target_ptr += b * stride_target_b
    draft_ptr += b * stride_draft_b
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    partial_row_ptr = partial_ptr + (b * (num_drafts + 1) * num_tiles + tile) * 2

    if temperature == 0:
        # Addresses hoisted out of the loop made `ptxas` spill in small tiles, those left in it in large ones.
        for k in tl.range(0, num_drafts + 1, disable_licm=TILE < 4096):
            r = k + tl.zeros((), tl.int64)
            if r <= num_valid:
                row_ptr = target_ptr + r * stride_target_k
                lead = row_lead(row_ptr, stride_target_v)
                z = load_scaled(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, None, 0, TILE)
                tile_max, token = tile_argmax(z, tile_tokens(lead, tile, TILE))
                store_pair(partial_row_ptr + r * num_tiles * 2, tile_max, token)

    if temperature > 0:
        n = 0
        walking = num_valid > 0
        for start in range(0, num_drafts, SCORE_WALK):
            i = (start + tl.arange(0, SCORE_WALK)).to(tl.int64)
            live = walking & (i < num_valid)
            x = tl.load(tokens_ptr + i, mask=live, other=0).to(tl.int64)
            z_p = load_token_logits(target_ptr, stride_target_k, stride_target_v, i, x, live, inverse_t, None, 0)
            z_q = load_token_logits(draft_ptr, stride_draft_k, stride_draft_v, i, x, live, inverse_t, None, 0)
            u = tl.load(accept_uniforms_ptr + b * num_drafts + i, mask=live, other=0.0)
            accepted = live & accept_scored(u, floor(z_p, lowest), floor(z_q, lowest), alpha, inverse_range)
            run = leading(accepted)
            n += run
            walking = walking & (run == SCORE_WALK)

        row_ptr = target_ptr + n.to(tl.int64) * stride_target_k
        lead = row_lead(row_ptr, stride_target_v)
        z_p = load_scaled(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, None, 0, TILE)
        if n == num_drafts:
            residual_or_max, weight_sum = scaled_stats(z_p)
        else:
            z_p = floor(z_p, lowest)
            weight_sum = tl.sum(score(z_p, alpha, inverse_range), 0)
            residual_or_max = 0.0
            if n < num_valid:
                draft_row_ptr = draft_ptr + n.to(tl.int64) * stride_draft_k
                z_q = load_scaled_beside(
                    draft_row_ptr, stride_draft_v, lead, vocab_size, tile, inverse_t, None, 0, TILE
                )
                residual_or_max = tl.sum(residual_score(z_p, floor(z_q, lowest), alpha, inverse_range), 0)
        store_pair(partial_row_ptr, residual_or_max, weight_sum)
        if tile == 0:
            tl.store(num_accepted_ptr + b, n.to(tl.int64))


@launch.jit
def draw_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    sample_uniforms_ptr,  # [B]
    temperature_ptr,  # [B] or None
    partial_ptr,  # [B, K+1, num_tiles, 2]
    num_accepted_ptr,  # [B]
    output_tokens_ptr,  # [B, K+1]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    alpha,
    inverse_range,
    lowest,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    # Inductor passes a Python float as float64, a launch as float32.
    alpha, inverse_range = tl.cast(alpha, tl.float32), tl.cast(inverse_range, tl.float32)
    lowest = tl.cast(lowest, tl.float32)
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    first_row = b * (num_drafts + 1)
    temperature = load_temperature(temperature_ptr, b)

    n = tl.zeros((), tl.int64)
    next_token = -1
    if temperature == 0:
        walking = num_valid > 0
        for start in range(0, num_drafts, WALK):
            i = (start + tl.arange(0, WALK)).to(tl.int64)
            live = walking & (i < num_valid)
            x = tl.load(tokens_ptr + i, mask=live, other=0).to(tl.int64)
            tile_max, token = load_partials(partial_ptr, first_row + i, num_tiles, live, BLOCK_T)
            run = leading(live & (combine_argmax(tile_max, token).to(tl.int64) == x))
            n += run
            walking = walking & (run == WALK)
        next_token = row_argmax(partial_ptr, first_row + n, num_tiles, BLOCK_T)
    if temperature > 0:
        n = tl.load(num_accepted_ptr + b)
        inverse_t = inverse_temperature(temperature_ptr, temperature)
        residual_or_max, weight_sum = load_row_partials(partial_ptr, first_row, num_tiles, BLOCK_T)
        row_max, _ = combine_stats(residual_or_max, weight_sum)
        shift = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
        residual = tl.where(residual_or_max > 0, residual_or_max, 0.0)
        has_residual = (n < num_valid) & (tl.sum(tl.sum(residual, 1), 0) > 0)
        # The residual after a rejection; p^ after padding and for an empty residual; softmax for the bonus.
        bonus = weight_sum * exponential(residual_or_max - shift)
        mass = tl.where(has_residual, residual, tl.where(n == num_drafts, bonus, weight_sum))
        tile, threshold = pick_tile(tl.max(mass, 0), tl.load(sample_uniforms_ptr + b))

        row_ptr = target_ptr + b * stride_target_b + n * stride_target_k
        lead = row_lead(row_ptr, stride_target_v)
        z_p = load_scaled(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, None, 0, TILE)
        weight = exponential(z_p - shift)
        if n < num_drafts:
            z_p = floor(z_p, lowest)
            weight = score(z_p, alpha, inverse_range)
        if has_residual:
            draft_row_ptr = draft_ptr + b * stride_draft_b + n * stride_draft_k
            z_q = load_scaled_beside(draft_row_ptr, stride_draft_v, lead, vocab_size, tile, inverse_t, None, 0, TILE)
            weight = residual_score(z_p, floor(z_q, lowest), alpha, inverse_range)
        next_token = pick_token(weight, tile_tokens(lead, tile, TILE), threshold)
    tl.store(num_accepted_ptr + b, n)
    store_output(output_tokens_ptr + b * (num_drafts + 1), tokens_ptr, n, num_drafts, next_token, BLOCK_K)


def verify_sigmoid(given: SigmoidArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch `specops::verify_sigmoid`, which has checked its arguments. Tests and benchmarks choose the tile."""
    target, alpha, width = given.target_logits, given.alpha, given.beta - given.alpha
    batch, num_rows, vocab_size = target.shape
    tile = tile or launch.tile_size(vocab_size, batch)
    num_tiles = launch.num_tiles(target, tile)
    launch.check_grid("target_logits", target, 1, num_tiles)
    values = shared_values(given, tile, num_tiles, num_rows) | {
        "alpha": alpha,
        "inverse_range": 1.0 / width,
        "lowest": alpha - 80.0 * width,
    }
    num_warps = launch.num_warps(tile)
    launch.run(score_kernel, (batch, num_tiles), values, num_warps)
    launch.run(draw_kernel, (batch,), values, num_warps)
    return values["output_tokens_ptr"], values["num_accepted_ptr"]
