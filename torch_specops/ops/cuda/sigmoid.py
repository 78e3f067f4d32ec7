"""`specops::verify_sigmoid` on CUDA: verification with sigmoid scores instead of probabilities. It is lossy.

The target's score is p^(v) = sigmoid((z_p(v) / T - alpha) / (beta - alpha)); the draft's score q^ is computed in the
same way. Draft x_i is accepted iff u_i * q^_i(x_i) < p^_i(x_i). Let n be the number of drafts before the first
rejection. The next token is drawn from max(p^_n - q^_n, 0), or from softmax(z_p,K / T) if all K drafts are accepted. A
score depends on a single logit, so an acceptance test reads two logits and no whole row.

Bytes per sequence, with s_p and s_q bytes per logit: 2 K logits, and V * (s_p + s_q) for the target row and the draft
row of the rejection (only the target row for a bonus token), of which one tile is read again. A greedy sequence reads
its K + 1 target rows, V * (K + 1) * s_p, for the argmax. Scratch: 8 bytes per (row, tile). Two launches:
1. `score_kernel`, one program per (sequence, few tiles): tests the drafts to find n (every program of a sequence
   computes the same n), then sums the weights of each tile. For greedy sequences, it finds the argmax of its tiles in
   each row.
2. `draw_kernel`, one program per sequence: selects the tile that s falls into, reads it again, and writes the output
   row.

The logits of target and draft are converted to float32 (`widen`) only after both are loaded. The loads then overlap,
and until the conversion a register holds two 16-bit logits.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..arguments import SigmoidArguments
from . import launch
from .accept import (
    accept_scored,
    accepted_prefix_length,
    count_valid,
    load_token_logits,
    shared_values,
    store_accepted,
    store_next,
)
from .tiles import (
    FLOAT32_MAX,
    LN_2,
    LOG2_E,
    combine_argmax,
    combine_stats,
    exponential,
    inverse_temperature,
    load_logits,
    load_logits_beside,
    load_partials,
    load_row_partials,
    load_scaled,
    load_temperature,
    pick_tile,
    pick_token,
    row_argmax,
    row_lead,
    scale,
    store_pair,
    tile_argmax,
    tile_stats,
    tile_tokens,
    widen,
)

# The number of drafts tested at a time. It is larger than in the other ops, because the tests hold no partials in
# registers.
SCORE_WALK = tl.constexpr(16)


@triton.jit
def floor(z, lowest):
    """Clamp logits from below at `lowest`, whose score sigmoid(-80) float32 can represent. -inf is not clamped."""
    return tl.where(z > float("-inf"), tl.maximum(z, lowest), float("-inf"))


@triton.jit
def for_raw_logits(inverse_t, alpha, inverse_range, lowest):
    """The constants (slope, middle, lowest x) for scores of raw logits x: (z - alpha) / (beta - alpha) = (slope x -
    middle) ln 2."""
    slope = tl.minimum(inverse_t * (inverse_range * LOG2_E), FLOAT32_MAX)
    return slope, alpha * inverse_range * LOG2_E, lowest / inverse_t


@triton.jit
def score(x, slope, middle, lowest):
    """The score sigmoid((z - alpha) / (beta - alpha)) of raw logits x; 0 for a masked logit."""
    p = 1.0 / (1.0 + tl.exp2(tl.fma(tl.maximum(x, lowest), -slope, middle)))
    return tl.where(x > float("-inf"), p, 0.0)


@triton.jit
def residual_score(x, y, slope, middle, lowest):
    """max(p^ - q^, 0) for raw logits x of the target and y of the draft, computed without cancellation; p^ where q^ is
    0.

    If a and b are the arguments of the two sigmoids, this is (1 - exp(b - a)) / ((1 + exp(-a)) (1 + exp(b)))."""
    y = floor(y, lowest)
    exp_minus_a = tl.exp2(tl.fma(tl.maximum(x, lowest), -slope, middle))
    exp_b = tl.exp2(tl.fma(y, slope, -middle))
    gap = (x - y) * (slope * LN_2)
    # A Taylor series up to gap**6. For gap < 0.25 the next term is below 5e-8 of the sum.
    series = 1.0 / 2 - gap * (1.0 / 6 - gap * (1.0 / 24 - gap * (1.0 / 120 - gap * (1.0 / 720))))
    numerator = tl.where(gap < 0.25, gap - gap * gap * series, 1.0 - exp_minus_a * exp_b)
    factor = 1.0 + exp_b
    difference = numerator / tl.fma(exp_minus_a, factor, factor)
    # The gap of a masked x is -inf or NaN, which gives 0. If exp(b) overflows, both scores are 1, and their difference
    # is 0.
    return tl.where((gap > 0) & (exp_b < float("inf")), difference, 0.0)


@launch.jit
def score_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    partial_ptr,  # [B, K+1, num_tiles, 2]; a sampled sequence uses only row 0
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
    tiles_per_program,
    alpha,
    inverse_range,
    lowest,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1) * tiles_per_program
    last_tile = tl.minimum(first_tile + tiles_per_program, num_tiles).to(tl.int32)
    # Cast, because a Python float arrives as float64 from Inductor and as float32 from a direct launch.
    alpha, inverse_range = tl.cast(alpha, tl.float32), tl.cast(inverse_range, tl.float32)
    lowest = tl.cast(lowest, tl.float32)
    target_ptr += b * stride_target_b
    draft_ptr += b * stride_draft_b
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    partial_ptr += b * (num_drafts + 1) * num_tiles * 2

    if temperature == 0:
        # Hoist addresses only for large tiles. `ptxas` spilled registers with hoisting for small tiles, and without it
        # for large tiles.
        for k in tl.range(0, num_drafts + 1, disable_licm=TILE < 4096):
            r = k + tl.zeros((), tl.int64)
            if r <= num_valid:
                row_ptr = target_ptr + r * stride_target_k
                lead = row_lead(row_ptr, stride_target_v)
                for tile in tl.range(first_tile, last_tile):
                    z = load_scaled(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, None, 0, TILE)
                    tile_max, token = tile_argmax(z, tile_tokens(lead, tile, TILE))
                    store_pair(partial_ptr + (r * num_tiles + tile) * 2, tile_max, token)

    if temperature > 0:
        n = 0
        reachable = num_valid
        for start in range(0, num_drafts, SCORE_WALK):
            i = (start + tl.arange(0, SCORE_WALK)).to(tl.int64)
            live = i < reachable
            x = tl.load(tokens_ptr + i, mask=live, other=0).to(tl.int64)
            z_p = load_token_logits(target_ptr, stride_target_k, stride_target_v, i, x, live, inverse_t, None, 0)
            z_q = load_token_logits(draft_ptr, stride_draft_k, stride_draft_v, i, x, live, inverse_t, None, 0)
            u = tl.load(accept_uniforms_ptr + b * num_drafts + i, mask=live, other=0.0)
            accepted = live & accept_scored(u, floor(z_p, lowest), floor(z_q, lowest), alpha, inverse_range)
            run = accepted_prefix_length(accepted)
            n += run
            reachable = tl.where(run == SCORE_WALK, reachable, 0)

        row_ptr = target_ptr + n.to(tl.int64) * stride_target_k
        draft_row_ptr = draft_ptr + n.to(tl.int64) * stride_draft_k
        lead = row_lead(row_ptr, stride_target_v)
        slope, middle, lowest_x = for_raw_logits(inverse_t, alpha, inverse_range, lowest)
        for tile in tl.range(first_tile, last_tile):
            x = load_logits(row_ptr, stride_target_v, lead, vocab_size, tile, TILE)
            if n == num_drafts:
                residual_or_max, weight_sum = tile_stats(x, inverse_t)
            else:
                residual_or_max = 0.0
                weight_sum = 0.0
                if n < num_valid:
                    y = load_logits_beside(draft_row_ptr, stride_draft_v, lead, vocab_size, tile, TILE)
                    residual_or_max = tl.sum(residual_score(widen(x), widen(y), slope, middle, lowest_x), 0)
                # The sum of p^ is needed only if the residual of this tile is empty: a row with any residual is not
                # drawn from p^.
                if residual_or_max == 0:
                    weight_sum = tl.sum(score(widen(x), slope, middle, lowest_x), 0)
            store_pair(partial_ptr + tile * 2, residual_or_max, weight_sum)
        if first_tile == 0:
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
    # Cast, because a Python float arrives as float64 from Inductor and as float32 from a direct launch.
    alpha, inverse_range = tl.cast(alpha, tl.float32), tl.cast(inverse_range, tl.float32)
    lowest = tl.cast(lowest, tl.float32)
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    first_row = b * (num_drafts + 1)
    temperature = load_temperature(temperature_ptr, b)
    s = tl.load(sample_uniforms_ptr + b)

    n = tl.zeros((), tl.int64)
    next_token = -1
    if temperature == 0:
        reachable = num_valid
        for start in range(0, num_drafts, WALK):
            i = (start + tl.arange(0, WALK)).to(tl.int64)
            live = i < reachable
            x = tl.load(tokens_ptr + i, mask=live, other=0).to(tl.int64)
            tile_max, token = load_partials(partial_ptr, first_row + i, num_tiles, live, BLOCK_T)
            run = accepted_prefix_length(live & (combine_argmax(tile_max, token).to(tl.int64) == x))
            n += run
            reachable = tl.where(run == WALK, reachable, 0)
        next_token = row_argmax(partial_ptr, first_row + n, num_tiles, BLOCK_T)
    if temperature > 0:
        n = tl.load(num_accepted_ptr + b)
        inverse_t = inverse_temperature(temperature_ptr, temperature)
        residual_or_max, weight_sum = load_row_partials(partial_ptr, first_row, num_tiles, BLOCK_T)
        row_max, _ = combine_stats(residual_or_max, weight_sum)
        shift = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
        residual = tl.where(residual_or_max > 0, residual_or_max, 0.0)
        has_residual = (n < num_valid) & (tl.sum(tl.sum(residual, 1), 0) > 0)
        # `mass` holds the masses of the tiles. After a rejection it is the residual, and for a bonus token the softmax.
        # At padding, or if the residual is empty, it is p^.
        bonus = weight_sum * exponential(residual_or_max - shift)
        mass = tl.where(has_residual, residual, tl.where(n == num_drafts, bonus, weight_sum))
        tile, threshold = pick_tile(tl.max(mass, 0), s)

        row_ptr = target_ptr + b * stride_target_b + n * stride_target_k
        lead = row_lead(row_ptr, stride_target_v)
        slope, middle, lowest_x = for_raw_logits(inverse_t, alpha, inverse_range, lowest)
        x = load_logits(row_ptr, stride_target_v, lead, vocab_size, tile, TILE)
        if has_residual:
            draft_row_ptr = draft_ptr + b * stride_draft_b + n * stride_draft_k
            y = load_logits_beside(draft_row_ptr, stride_draft_v, lead, vocab_size, tile, TILE)
            weight = residual_score(widen(x), widen(y), slope, middle, lowest_x)
        elif n < num_drafts:
            weight = score(widen(x), slope, middle, lowest_x)
        else:
            weight = exponential(scale(x, inverse_t) - shift)
        next_token = pick_token(weight, tile_tokens(lead, tile, TILE), threshold)
    tl.store(num_accepted_ptr + b, n)
    store_accepted(output_tokens_ptr, draft_tokens_ptr, b, n, num_drafts, BLOCK_K)
    store_next(output_tokens_ptr, b, n, num_drafts, next_token, BLOCK_K)


def verify_sigmoid(args: SigmoidArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `specops::verify_sigmoid`, which has checked the arguments. Tests and benchmarks set
    `tile`."""
    target, alpha, width = args.target_logits, args.alpha, args.beta - args.alpha
    batch, num_rows, vocab_size = target.shape
    tile = tile or launch.tile_size(vocab_size, batch)
    num_tiles = launch.num_tiles(target, tile)
    launch.check_grid("target_logits", target, 1, num_tiles)
    values = shared_values(args, tile, num_tiles, num_rows) | {
        "tiles_per_program": launch.tiles_per_program(batch * num_tiles),
        "alpha": alpha,
        "inverse_range": 1.0 / width,
        "lowest": alpha - 80.0 * width,
    }
    num_warps = launch.num_warps(tile)
    launch.run(score_kernel, (batch, triton.cdiv(num_tiles, values["tiles_per_program"])), values, num_warps)
    launch.run(draw_kernel, (batch,), values, num_warps)
    return values["output_tokens_ptr"], values["num_accepted_ptr"]
