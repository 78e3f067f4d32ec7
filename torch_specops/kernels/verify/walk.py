"""Device functions of the walk over the drafts, shared by the two verify kernels."""

import triton
import triton.language as tl

from ..rows import FLOAT32_MAX, keep, scale

# Drafts tested side by side, and partials held for them; a longer chain takes several turns, so that registers stay
# bounded for any K and V.
MAX_WALK = 8
MAX_PARTIALS = 1024


def width(block_t: int) -> int:
    """Drafts per turn of a walk that holds `block_t` partials for each; a power of two, whatever K is."""
    return min(MAX_WALK, max(MAX_PARTIALS // block_t, 1))


@triton.jit
def count_valid(tokens_ptr, stride_k, num_drafts, vocab_size, BLOCK_K: tl.constexpr):
    """Drafts before the first padding token; nothing behind it can matter."""
    # The minimum over a whole warp is one instruction, over part of it one exchange after another: BLOCK_K is >= 32.
    k = tl.arange(0, BLOCK_K)
    x = tl.load(tokens_ptr + k.to(tl.int64) * stride_k, mask=k < num_drafts, other=-1)
    return tl.min(tl.where((x >= 0) & (x < vocab_size), BLOCK_K, k), 0)


@triton.jit
def load_scaled(
    sequence_ptr,
    row_offset,
    token_offset,
    inverse_t,
    live,
    token=None,
    bounds_ptr=None,
    FILTERED: tl.constexpr = False,
):
    """[WALK] single scaled logits, one per row; -inf where not live, or outside the bounds [WALK, 2] of their rows."""
    x = tl.load(sequence_ptr + row_offset + token_offset, mask=live, other=float("-inf"))
    if FILTERED:
        cut = tl.load(bounds_ptr, mask=live, other=float("inf"))
        first = tl.load(bounds_ptr + 1, mask=live, other=0.0).to(tl.int32, bitcast=True)
        x = keep(x, token, cut, first)
    return scale(x, inverse_t)


@triton.jit
def token_weight(
    sequence_ptr,
    row_offset,
    token_offset,
    inverse_t,
    z_max,
    z_sum,
    live,
    token=None,
    bounds_ptr=None,
    FILTERED: tl.constexpr = False,
):
    """[WALK] exp(z - max) of single logits in float64, a probability times the row's sum; 0 for a row without one."""
    z = load_scaled(sequence_ptr, row_offset, token_offset, inverse_t, live, token, bounds_ptr, FILTERED)
    weight = tl.exp(z.to(tl.float64) - tl.maximum(z_max, -FLOAT32_MAX).to(tl.float64))
    return tl.where(z_sum > 0, weight, 0.0)


@triton.jit
def stats_from_lse(lse):
    """The (max, sum) that give exp(z - lse); no probability at all where lse is not finite."""
    finite = tl.abs(lse) <= FLOAT32_MAX
    return tl.where(finite, lse, 0.0), tl.where(finite, 1.0, 0.0)


@triton.jit
def store_output(output_ptr, tokens_ptr, stride_k, n, num_drafts, next_token, BLOCK_K: tl.constexpr):
    """[K+1] the accepted drafts, the next token, then -1."""
    k = tl.arange(0, BLOCK_K)
    kept = tl.load(tokens_ptr + k.to(tl.int64) * stride_k, mask=k < n, other=-1).to(tl.int64)
    tl.store(output_ptr + k, tl.where(k == n, next_token, kept), mask=k <= num_drafts)
