"""The accept rules of the verify ops, and functions that their kernels and launches share.

    accept_sampled    u l q(x) < p(x)                  `verify_exact`
    accept_greedy     x is the argmax, or nearly       a greedy sequence of `verify_exact`
    accept_scored     u q^(x) < p^(x)                  `verify_sigmoid`

A loop over the drafts ("walk") tests WALK drafts at a time in parallel, in `verify_exact` with `accept_drafts`. The
rule of `verify_block`, which depends on the whole block, is in `block.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..arguments import SigmoidArguments, VerifyArguments
from . import launch
from .residual import LARGEST_EXPONENT, draft_stats
from .tiles import FLOAT32_MAX, combine_argmax, combine_stats, keep, load_partials, scale

# The most drafts tested in parallel, and the most partials held in registers for these drafts. If there are more
# drafts, the loop runs several times, so that the number of registers is bounded for any K and V.
MAX_WALK = 8
MAX_PARTIALS = 1024


def walk_width(block_t: int) -> int:
    """The number of drafts that a kernel tests at once, if it holds `block_t` partial results for each: one per tile of
    the vocabulary, padded to a power of two. The number is a power of two and does not depend on K."""
    return min(MAX_WALK, max(MAX_PARTIALS // block_t, 1))


def shared_values(
    args: VerifyArguments | SigmoidArguments, tile: int, num_tiles: int, rows_per_sequence: int
) -> dict[str, Any]:
    """The kernel arguments that all verify ops share, by parameter name: inputs, outputs, sizes, and scratch for the
    partials of `rows_per_sequence` rows."""
    target, draft = args.target_logits, args.draft_logits
    batch, num_rows, vocab_size = target.shape
    block_t, device = launch.padded_power_of_2(num_tiles), target.device
    return {
        "target_ptr": target,
        "draft_ptr": draft,
        "draft_tokens_ptr": launch.contiguous(args.draft_tokens),
        "accept_uniforms_ptr": launch.contiguous(args.accept_uniforms),
        "sample_uniforms_ptr": launch.contiguous(args.sample_uniforms),
        "temperature_ptr": launch.contiguous(args.temperature),
        "partial_ptr": torch.empty(batch, rows_per_sequence, num_tiles, 2, dtype=torch.float32, device=device),
        "num_accepted_ptr": torch.empty(batch, dtype=torch.int64, device=device),
        "output_tokens_ptr": torch.empty(batch, num_rows, dtype=torch.int64, device=device),
        **launch.logits_strides(("stride_target_b", "stride_target_k", "stride_target_v"), target),
        **launch.logits_strides(("stride_draft_b", "stride_draft_k", "stride_draft_v"), draft),
        "num_drafts": num_rows - 1,
        "vocab_size": vocab_size,
        "num_tiles": num_tiles,
        "rows_per_sequence": rows_per_sequence,
        "TILE": tile,
        "BLOCK_K": launch.padded_power_of_2(num_rows),
        "BLOCK_T": block_t,
        "WALK": walk_width(block_t),
    }


@triton.jit
def accept_sampled(u, lenience, p_x, p_sum, q_x, q_sum):
    """True if u * l * q < p, p > 0 and q > 0, with p = p_x / p_sum and q = q_x / q_sum. Both sides are multiplied by
    the two sums, because a float64 division would be a function call."""
    threshold = u.to(tl.float64) * lenience * q_x * p_sum.to(tl.float64)
    return (p_x > 0) & (q_x > 0) & (threshold < p_x * q_sum.to(tl.float64))


@triton.jit
def accept_greedy(x, z_x, tile_max, tile_token, argmax_gap):
    """True if x is the argmax of its row. With `argmax_gap`, the log of the lenience, True if z(x) is at least the
    maximum plus the gap."""
    if argmax_gap is None:
        accepted = combine_argmax(tile_max, tile_token).to(tl.int64) == x
    else:
        accepted = (z_x > float("-inf")) & (z_x - tl.max(tile_max, 1) >= argmax_gap)
    return accepted


@triton.jit
def accept_scored(u, z_p, z_q, alpha, inverse_range):
    """True if u * q^ < p^ for the scores sigmoid((z - alpha) * inverse_range). Both sides are multiplied by the two
    denominators, because a float64 division would be a function call."""
    p_denominator = 1.0 + tl.exp((alpha - z_p.to(tl.float64)) * inverse_range)
    q_denominator = 1.0 + tl.exp((alpha - z_q.to(tl.float64)) * inverse_range)
    scored = (z_p > float("-inf")) & (z_q > float("-inf"))
    return scored & (u.to(tl.float64) * p_denominator < q_denominator)


@triton.jit
def accepted_prefix_length(accepted):
    """The number of accepted drafts before the first rejection, given accepted [WALK]."""
    WALK: tl.constexpr = accepted.shape[0]
    return tl.min(tl.where(accepted, WALK, tl.arange(0, WALK)), 0)


@triton.jit
def count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K: tl.constexpr):
    """The number of drafts before the first padding token. Drafts after padding are ignored."""
    # BLOCK_K is at least 32, because the minimum over a whole warp is one instruction, and over a part of a warp
    # several.
    k = tl.arange(0, BLOCK_K)
    x = tl.load(tokens_ptr + k, mask=k < num_drafts, other=-1)
    return tl.min(tl.where((x >= 0) & (x < vocab_size), BLOCK_K, k), 0)


@triton.jit
def load_token_logits(sequence_ptr, stride_k, stride_v, i, x, live, inverse_t, bounds_ptr, bounds_row):
    """The scaled logits of tokens x in rows i of a sequence; -inf if not live or outside the bounds of the row."""
    offset = x if stride_v is None else x * stride_v
    z = tl.load(sequence_ptr + i * stride_k + offset, mask=live, other=float("-inf"))
    if bounds_ptr is not None:
        cut = tl.load(bounds_ptr + bounds_row * 2, mask=live, other=float("inf"))
        first_at_cut = tl.load(bounds_ptr + bounds_row * 2 + 1, mask=live, other=0.0).to(tl.int32, bitcast=True)
        z = keep(z, x, cut, first_at_cut)
    return scale(z, inverse_t)


@triton.jit
def token_weights(z, z_max, z_sum):
    """exp(z - max) of single scaled logits in float64, which is the probability times the sum of the row; 0 if the sum
    is 0."""
    exponent = z.to(tl.float64) - tl.maximum(z_max, -FLOAT32_MAX).to(tl.float64)
    weight = tl.exp(tl.minimum(exponent, LARGEST_EXPONENT))
    return tl.where(z_sum > 0, weight, 0.0)


@triton.jit
def accept_drafts(
    i, live, b, target, draft, draft_lse_ptr, accept_uniforms_ptr, partial_ptr, sizes, rule, BLOCK_T: tl.constexpr
):
    """[WALK], True where draft i of sequence b is accepted if all drafts before it are; False if not live."""
    target_ptr, stride_target_b, stride_target_k, stride_target_v, bounds_ptr = target
    draft_ptr, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, tokens_ptr, one_hot_ptr = draft
    num_drafts, _, num_tiles, rows_per_sequence, num_bounds = sizes
    temperature, inverse_t, lenience, argmax_gap = rule
    x = tl.load(tokens_ptr + i, mask=live, other=0).to(tl.int64)
    target_row = b * rows_per_sequence + i
    bounds_row = b * num_bounds + i
    target_ptr += b * stride_target_b
    tile_max, sum_or_token = load_partials(partial_ptr, target_row, num_tiles, live, BLOCK_T)
    if temperature == 0:
        z_x = load_token_logits(target_ptr, stride_target_k, stride_target_v, i, x, live, inverse_t, None, 0)
        accepted = live & accept_greedy(x, z_x, tile_max, sum_or_token, argmax_gap)
    else:
        p_max, p_sum = combine_stats(tile_max, sum_or_token)
        z_p = load_token_logits(
            target_ptr, stride_target_k, stride_target_v, i, x, live, inverse_t, bounds_ptr, bounds_row
        )
        p_x = token_weights(z_p, p_max, p_sum)
        if draft_ptr is None:
            q_x = tl.full(i.shape, 1.0, tl.float64)
            q_sum = tl.full(i.shape, 1.0, tl.float32)
        else:
            draft_row = target_row + num_drafts + 1
            read = live if one_hot_ptr is None else live & ~tl.load(one_hot_ptr + b)
            q_max, q_sum = draft_stats(
                partial_ptr, draft_row, draft_lse_ptr, b * num_drafts + i, num_tiles, read, BLOCK_T
            )
            z_q = load_token_logits(
                draft_ptr + b * stride_draft_b,
                stride_draft_k,
                stride_draft_v,
                i,
                x,
                read,
                inverse_t,
                draft_bounds_ptr,
                bounds_row + num_drafts + 1,
            )
            q_x = token_weights(z_q, q_max, q_sum)
            if one_hot_ptr is not None:
                q_x = tl.where(read, q_x, 1.0)
                q_sum = tl.where(read, q_sum, 1.0)
        u = tl.load(accept_uniforms_ptr + b * num_drafts + i, mask=live, other=0.0)
        accepted = live & accept_sampled(u, lenience, p_x, p_sum, q_x, q_sum)
    return accepted


@triton.jit
def store_accepted(output_tokens_ptr, draft_tokens_ptr, b, n, num_drafts, BLOCK_K: tl.constexpr):
    """Store the n accepted drafts of sequence b, and -1 after the next token. `store_next` stores the next token."""
    k = tl.arange(0, BLOCK_K)
    # `minimum(k, n)` is k in the lanes that load. It makes the compiler compute the addresses again: those of
    # `count_valid` would occupy two registers until here.
    place = b * num_drafts + tl.minimum(k, n)
    kept = tl.load(draft_tokens_ptr + place, mask=k < n, other=-1).to(tl.int64)
    tl.store(output_tokens_ptr + (b * (num_drafts + 1) + k), kept, mask=(k <= num_drafts) & (k != n))


@triton.jit
def store_next(output_tokens_ptr, b, n, num_drafts, next_token, BLOCK_K: tl.constexpr):
    """Store the next token as token n of sequence b. The address must not depend on n: torch treats every tensor that a
    store address depends on as written, and n depends on the inputs. So every lane has an address, and n is used only
    in the mask."""
    k = tl.arange(0, BLOCK_K)
    tl.store(output_tokens_ptr + (b * (num_drafts + 1) + k), tl.cast(next_token, tl.int64), mask=k == n)
