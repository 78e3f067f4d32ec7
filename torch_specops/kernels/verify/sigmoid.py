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

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..launch import wrap_triton
from ..rows import (
    FLOAT32_MAX,
    combine_argmax,
    combine_stats,
    exponential,
    inverse_temperature,
    load_own_tile,
    load_partials,
    load_tile_of,
    pick_tile,
    pick_token,
    row_lead,
    scaled_stats,
    tile_argmax,
    tile_tokens,
)
from . import walk
from .walk import count_valid, load_scaled, store_output

__all__ = ["verify_sigmoid"]

# Drafts per turn of the walk over single logits, which holds no partials.
SCORE_WALK = 16


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
    temperature_ptr,  # [B]
    partial_ptr,  # [B, K+1, num_tiles, 2]; a sampled sequence uses row 0
    num_accepted_ptr,  # [B]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_u_b,
    stride_u_k,
    stride_t,
    num_drafts,
    vocab_size,
    num_tiles,
    alpha,
    inverse_range,
    lowest,
    HAS_TEMPERATURE: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    # Inductor passes a Python float as float64, a launch as float32.
    alpha, inverse_range = tl.cast(alpha, tl.float32), tl.cast(inverse_range, tl.float32)
    lowest = tl.cast(lowest, tl.float32)
    tile = tl.program_id(1)
    tokens_ptr = draft_tokens_ptr + b * stride_tokens_b
    num_valid = count_valid(tokens_ptr, stride_tokens_k, num_drafts, vocab_size, BLOCK_K)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
    partial_row_ptr = partial_ptr + (b * (num_drafts + 1) * num_tiles + tile) * 2

    if temperature == 0:
        # Addresses hoisted out of the loop made `ptxas` spill in small tiles, those left in it in large ones.
        for k in tl.range(0, num_drafts + 1, disable_licm=TILE < 4096):
            r = k + tl.zeros((), tl.int64)
            if r <= num_valid:
                row_ptr = target_ptr + b * stride_target_b + r * stride_target_k
                lead = row_lead(row_ptr, TARGET_UNIT_STRIDE)
                z = load_own_tile(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, TILE, TARGET_UNIT_STRIDE)
                first, second = tile_argmax(z, tile_tokens(lead, tile, TILE))
                tl.store(partial_row_ptr + r * num_tiles * 2, first)
                tl.store(partial_row_ptr + r * num_tiles * 2 + 1, second)

    if temperature > 0:
        n = 0
        walking = num_valid > 0
        for start in range(0, num_drafts, WALK):
            lane = tl.arange(0, WALK)
            i = (start + lane).to(tl.int64)
            live = walking & (i < num_valid)
            x = tl.load(tokens_ptr + i * stride_tokens_k, mask=live, other=0).to(tl.int64)
            z_p = load_scaled(
                target_ptr + b * stride_target_b, i * stride_target_k, x * stride_target_v, inverse_t, live
            )
            z_q = load_scaled(draft_ptr + b * stride_draft_b, i * stride_draft_k, x * stride_draft_v, inverse_t, live)
            z_p = floor(z_p, lowest)
            z_q = floor(z_q, lowest)
            u = tl.load(accept_uniforms_ptr + b * stride_u_b + i * stride_u_k, mask=live, other=0.0)
            # u * q^ < p^ with both sides multiplied by the two denominators: float64 division would cost a call.
            p_denominator = 1.0 + tl.exp((alpha - z_p.to(tl.float64)) * inverse_range)
            q_denominator = 1.0 + tl.exp((alpha - z_q.to(tl.float64)) * inverse_range)
            scored = (z_p > float("-inf")) & (z_q > float("-inf"))
            accepted = live & scored & (u.to(tl.float64) * p_denominator < q_denominator)
            run = tl.min(tl.where(accepted, WALK, lane), 0)
            n += run
            walking = walking & (run == WALK)

        row_ptr = target_ptr + b * stride_target_b + n.to(tl.int64) * stride_target_k
        lead = row_lead(row_ptr, TARGET_UNIT_STRIDE)
        z_p = load_own_tile(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, TILE, TARGET_UNIT_STRIDE)
        if n == num_drafts:
            first, second = scaled_stats(z_p)
        else:
            z_p = floor(z_p, lowest)
            second = tl.sum(score(z_p, alpha, inverse_range), 0)
            first = 0.0
            if n < num_valid:
                z_q = load_tile_of(
                    draft_ptr + b * stride_draft_b + n.to(tl.int64) * stride_draft_k,
                    stride_draft_v,
                    lead,
                    vocab_size,
                    tile,
                    inverse_t,
                    TILE,
                    DRAFT_UNIT_STRIDE,
                )
                first = tl.sum(residual_score(z_p, floor(z_q, lowest), alpha, inverse_range), 0)
        tl.store(partial_row_ptr, first)
        tl.store(partial_row_ptr + 1, second)
        if tile == 0:
            tl.store(num_accepted_ptr + b, n.to(tl.int64))


@launch.jit
def draw_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    sample_uniforms_ptr,  # [B]
    temperature_ptr,  # [B]
    partial_ptr,  # [B, K+1, num_tiles, 2]
    num_accepted_ptr,  # [B]
    output_tokens_ptr,  # [B, K+1]
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_s,
    stride_t,
    num_drafts,
    vocab_size,
    num_tiles,
    alpha,
    inverse_range,
    lowest,
    HAS_TEMPERATURE: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    # Inductor passes a Python float as float64, a launch as float32.
    alpha, inverse_range = tl.cast(alpha, tl.float32), tl.cast(inverse_range, tl.float32)
    lowest = tl.cast(lowest, tl.float32)
    tokens_ptr = draft_tokens_ptr + b * stride_tokens_b
    num_valid = count_valid(tokens_ptr, stride_tokens_k, num_drafts, vocab_size, BLOCK_K)
    first_row = b * (num_drafts + 1)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)

    n = tl.zeros((), tl.int64)
    next_token = -1
    if temperature == 0:
        walking = num_valid > 0
        for start in range(0, num_drafts, WALK):
            lane = tl.arange(0, WALK)
            i = (start + lane).to(tl.int64)
            live = walking & (i < num_valid)
            x = tl.load(tokens_ptr + i * stride_tokens_k, mask=live, other=0).to(tl.int64)
            first, second = load_partials(partial_ptr, first_row + i, num_tiles, live, BLOCK_T)
            accepted = live & (combine_argmax(first, second).to(tl.int64) == x)
            run = tl.min(tl.where(accepted, WALK, lane), 0)
            n += run
            walking = walking & (run == WALK)
        only = first_row + n + tl.zeros((1,), tl.int64)
        first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
        next_token = tl.max(combine_argmax(first, second), 0)
    if temperature > 0:
        n = tl.load(num_accepted_ptr + b)
        inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
        only = first_row + tl.zeros((1,), tl.int64)
        first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
        row_max, _ = combine_stats(first, second)
        shift = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
        residual = tl.where(first > 0, first, 0.0)
        has_residual = (n < num_valid) & (tl.sum(tl.sum(residual, 1), 0) > 0)
        # The residual after a rejection; p^ after padding and for an empty residual; softmax for the bonus.
        mass = tl.where(has_residual, residual, tl.where(n == num_drafts, second * exponential(first - shift), second))
        tile, threshold = pick_tile(tl.max(mass, 0), tl.load(sample_uniforms_ptr + b * stride_s))

        row_ptr = target_ptr + b * stride_target_b + n * stride_target_k
        lead = row_lead(row_ptr, TARGET_UNIT_STRIDE)
        z_p = load_own_tile(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, TILE, TARGET_UNIT_STRIDE)
        weight = exponential(z_p - shift)
        if n < num_drafts:
            z_p = floor(z_p, lowest)
            weight = score(z_p, alpha, inverse_range)
        if has_residual:
            z_q = load_tile_of(
                draft_ptr + b * stride_draft_b + n * stride_draft_k,
                stride_draft_v,
                lead,
                vocab_size,
                tile,
                inverse_t,
                TILE,
                DRAFT_UNIT_STRIDE,
            )
            weight = residual_score(z_p, floor(z_q, lowest), alpha, inverse_range)
        next_token = pick_token(weight, tile_tokens(lead, tile, TILE), threshold)
    tl.store(num_accepted_ptr + b, n)
    store_output(
        output_tokens_ptr + b * (num_drafts + 1), tokens_ptr, stride_tokens_k, n, num_drafts, next_token, BLOCK_K
    )


def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float = -1e3,
    beta: float = 1e3,
    temperature: Tensor | None = None,
    *,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch `specops::verify_sigmoid`; arguments as the op's, checked there. `tile` overrides the table (tests,
    benchmarks)."""
    batch, num_rows, vocab_size = target_logits.shape
    num_drafts = num_rows - 1
    device = target_logits.device
    output_tokens = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    if launch.hint(batch) == 0:
        return output_tokens, num_accepted

    tile = tile or launch.tile_size(vocab_size, batch)
    num_tiles = launch.num_tiles(target_logits, tile)
    launch.check_grid("target_logits", target_logits, 1, num_tiles)
    block_t = launch.lanes(num_tiles)
    partial = torch.empty(batch, num_rows, num_tiles, 2, dtype=torch.float32, device=device)
    # An absent tensor is passed as a present one that the kernels do not touch.
    t = sample_uniforms if temperature is None else temperature
    flags = {
        "HAS_TEMPERATURE": temperature is not None,
        "TARGET_UNIT_STRIDE": target_logits.stride(2) == 1,
        "DRAFT_UNIT_STRIDE": draft_logits.stride(2) == 1,
        "TILE": tile,
        "BLOCK_K": launch.lanes(num_rows),
        "num_warps": launch.num_warps(tile),
    }
    score_range = (alpha, 1.0 / (beta - alpha), alpha - 80.0 * (beta - alpha))
    wrap_triton(score_kernel)[(batch, num_tiles)](
        target_logits,
        draft_logits,
        draft_tokens,
        accept_uniforms,
        t,
        partial,
        num_accepted,
        *target_logits.stride(),
        *draft_logits.stride(),
        *draft_tokens.stride(),
        *accept_uniforms.stride(),
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        *score_range,
        WALK=SCORE_WALK,
        **flags,
    )
    wrap_triton(draw_kernel)[(batch,)](
        target_logits,
        draft_logits,
        draft_tokens,
        sample_uniforms,
        t,
        partial,
        num_accepted,
        output_tokens,
        *target_logits.stride(),
        *draft_logits.stride(),
        *draft_tokens.stride(),
        sample_uniforms.stride(0),
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        *score_range,
        WALK=walk.width(block_t),
        BLOCK_T=block_t,
        **flags,
    )
    return output_tokens, num_accepted
