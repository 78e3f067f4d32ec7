"""`specops::verify_block` on CUDA: accept as many drafts as the block allows, then draw from the residual (docs/math.md
has the law).

With P_0 = 1 and P_i = min(P_{i-1} p(x_i) / q(x_i), 1), n is the largest i with u_i < h_i: h_i = P_i at the end of the
block, before it S_i / (S_i + 1 - P_i), S_i = sum max(P_i p_i - q_i, 0), p_i and q_i the rows after x_1 .. x_i. The sum
needs these rows a second time, but only those where the block may still end: none if u < P at its end; else none with
u_i >= P_i, as h_i <= P_i; and none before the last with P_i = 1, as h_i = 1 there.

Bytes per sequence, with s_p and s_q bytes a logit and C rows left, 0 <= C <= K:
    without draft_lse   V * ((K + 1 + C) * s_p + (K + C) * s_q)
    with draft_lse      V * ((K + 1 + C) * s_p + C * s_q)
    one-hot drafts      V * (K + 1 + C) * s_p
and one tile of a row pair once more; with filters, the search for the bounds of all rows comes first. As in
`verify_exact`, rows behind a padded draft, draft rows of greedy sequences and sequences without a lawful temperature
are not read. Nothing of size [.., V] is written; the scratch is 8 bytes per (row, tile) of the rows read first, 8 per
(draft, tile) and (sequence, tile), and 32 per draft.

Six launches, each a grid over what it writes, so there are no races, atomics or counters; for K = 0 those of
`verify_exact`, which is then the same op:
1. `stats_kernel` of `verify_exact`, one program per (row, tile).
2. `ratio_kernel`, one program per draft: combines the partials of its two rows, p / q of its token.
3. `reach_kernel`, one program per sequence: P_i; which rows are left, or n if none is.
4. `residual_kernel`, one program per (draft, tile): sums the residual weights of its tile, if its row is left.
5. `decide_kernel`, one program per sequence: n, and what the next kernel needs of row n.
6. `draw_kernel` of `verify_exact`, one program per sequence: picks the tile that s falls into, rescans it, writes the
   output row.
The second, third and fifth are in `block_walk.py`.
"""

import torch
import triton.language as tl
from torch import Tensor

from .. import launch
from ..filter import filter_bounds
from ..launch import wrap_triton
from ..rows import (
    bounds_of,
    exponential,
    inverse_temperature,
    load_own_tile,
    row_lead,
    tile_tokens,
)
from . import walk
from .block_walk import decide_kernel, ratio_kernel, reach_kernel
from .exact import draw_kernel, stats_kernel, verify_exact
from .exact_residual import residual_weights

__all__ = ["verify_block"]


@launch.jit
def residual_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B]
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    bounds_ptr,  # [B, K+1 or 2K+1, 2]
    mass_ptr,  # [B, K, num_tiles, 2] residual mass, and whether p and q differ there
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    stride_tokens_b,
    stride_tokens_k,
    stride_t,
    num_drafts,
    vocab_size,
    num_tiles,
    num_bounds,
    HAS_TEMPERATURE: tl.constexpr,
    ONE_HOT: tl.constexpr,
    FILTERED: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tl.program_id(2).to(tl.int64)
    row = b * num_drafts + i
    reach = tl.load(reach_ptr + row)
    if reach > 0:
        temperature = 1.0
        if HAS_TEMPERATURE:
            temperature = tl.load(temperature_ptr + b * stride_t)
        inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
        target_row_ptr = target_ptr + b * stride_target_b + i * stride_target_k
        lead = row_lead(target_row_ptr, TARGET_UNIT_STRIDE)
        z_p = load_own_tile(
            target_row_ptr,
            stride_target_v,
            lead,
            vocab_size,
            tile,
            inverse_t,
            TILE,
            TARGET_UNIT_STRIDE,
            bounds_of(bounds_ptr, b, i, num_bounds, FILTERED),
            FILTERED,
        )
        p_shift = tl.load(state_ptr + row * 4)
        p_weight = tl.load(state_ptr + row * 4 + 1) * reach.to(tl.float32)
        weight, differs = residual_weights(
            exponential(z_p - p_shift) * p_weight,
            z_p,
            tile_tokens(lead, tile, TILE),
            draft_ptr + b * stride_draft_b + i * stride_draft_k,
            stride_draft_v,
            lead,
            vocab_size,
            tile,
            inverse_t,
            tl.load(state_ptr + row * 4 + 2),
            tl.load(state_ptr + row * 4 + 3),
            tl.load(draft_tokens_ptr + b * stride_tokens_b + i * stride_tokens_k).to(tl.int32),
            ONE_HOT,
            DRAFT_UNIT_STRIDE,
            TILE,
            bounds_of(bounds_ptr, b, num_drafts + 1 + i, num_bounds, FILTERED),
            FILTERED,
        )
        own_mass_ptr = mass_ptr + (row * num_tiles + tile) * 2
        tl.store(own_mass_ptr, tl.sum(weight, 0))
        tl.store(own_mass_ptr + 1, differs)


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch `specops::verify_block`; arguments as the op's, checked there. `tile` overrides the table (tests,
    benchmarks)."""
    batch, num_rows, vocab_size = target_logits.shape
    num_drafts = num_rows - 1
    if num_drafts == 0:
        filters = (top_k, top_p, min_p)
        args = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature, draft_lse)
        return verify_exact(*args, lenience, *filters, tile=tile)
    device = target_logits.device
    output_tokens = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    if launch.hint(batch) == 0:
        return output_tokens, num_accepted

    draft_stats = draft_logits is not None and draft_lse is None
    rows_per_sequence = num_rows + (num_drafts if draft_stats else 0)
    tile = tile or launch.tile_size(vocab_size, batch * rows_per_sequence)
    num_tiles = launch.num_tiles(target_logits, tile, draft_logits)
    launch.check_grid("target_logits", target_logits, num_rows + num_drafts, num_tiles)
    partial = torch.empty(batch, rows_per_sequence, num_tiles, 2, dtype=torch.float32, device=device)
    mass = torch.empty(batch, num_drafts, num_tiles, 2, dtype=torch.float32, device=device)
    state = torch.empty(batch, num_drafts, 4, dtype=torch.float32, device=device)
    row_mass = torch.empty(batch, num_tiles, 2, dtype=torch.float32, device=device)
    row_state = torch.empty(batch, 4, dtype=torch.float32, device=device)
    ratio = torch.empty(batch, num_drafts, dtype=torch.float64, device=device)
    reach = torch.empty_like(ratio)

    filtered = top_k is not None or top_p is not None or min_p is not None
    # An absent tensor is passed as a present one that the kernels do not touch.
    bounds = partial
    if filtered:
        bounds = filter_bounds(target_logits, temperature, top_k, top_p, min_p, draft_logits, tile=tile)
    draft = target_logits if draft_logits is None else draft_logits
    t = sample_uniforms if temperature is None else temperature
    lse = accept_uniforms if draft_lse is None else draft_lse
    strides = (*target_logits.stride(), *draft.stride(), *draft_tokens.stride())
    block_k, block_t = launch.lanes(num_rows), launch.lanes(num_tiles)
    one_hot, has_temperature = draft_logits is None, temperature is not None
    drafts = {"ONE_HOT": one_hot, "HAS_TEMPERATURE": has_temperature, "FILTERED": filtered}
    tiles = {
        "TARGET_UNIT_STRIDE": target_logits.stride(2) == 1,
        "DRAFT_UNIT_STRIDE": draft.stride(2) == 1,
        "TILE": tile,
        "num_warps": launch.num_warps(tile),
    }
    few_warps = launch.num_warps(walk.MAX_PARTIALS)
    wrap_triton(stats_kernel)[(batch, num_tiles, rows_per_sequence)](
        target_logits,
        draft,
        draft_tokens,
        t,
        partial,
        *strides,
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds_ptr=bounds,
        num_bounds=bounds.shape[1],
        HAS_TEMPERATURE=has_temperature,
        FILTERED=filtered,
        DRAFT_STATS=draft_stats,
        BLOCK_K=block_k,
        **(tiles | {"num_warps": launch.stats_warps(tile)}),
    )
    wrap_triton(ratio_kernel)[(batch, num_drafts)](
        target_logits,
        draft,
        draft_tokens,
        t,
        lse,
        partial,
        bounds,
        state,
        ratio,
        *strides,
        t.stride(0),
        *lse.stride(),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds.shape[1],
        DRAFT_STATS=draft_stats,
        BLOCK_K=block_k,
        BLOCK_T=block_t,
        num_warps=few_warps,
        **drafts,
    )
    wrap_triton(reach_kernel)[(batch,)](
        accept_uniforms,
        t,
        ratio,
        reach,
        num_accepted,
        *accept_uniforms.stride(),
        t.stride(0),
        num_drafts,
        HAS_TEMPERATURE=has_temperature,
        BLOCK_K=block_k,
        num_warps=few_warps,
    )
    wrap_triton(residual_kernel)[(batch, num_tiles, num_drafts)](
        target_logits,
        draft,
        draft_tokens,
        t,
        reach,
        state,
        bounds,
        mass,
        *strides,
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds.shape[1],
        **drafts,
        **tiles,
    )
    wrap_triton(decide_kernel)[(batch,)](
        accept_uniforms,
        t,
        partial,
        reach,
        state,
        mass,
        row_state,
        row_mass,
        num_accepted,
        *accept_uniforms.stride(),
        t.stride(0),
        num_drafts,
        num_tiles,
        HAS_TEMPERATURE=has_temperature,
        DRAFT_STATS=draft_stats,
        WALK=walk.width(block_t),
        BLOCK_T=block_t,
        num_warps=few_warps,
    )
    wrap_triton(draw_kernel)[(batch,)](
        target_logits,
        draft,
        draft_tokens,
        sample_uniforms,
        t,
        partial,
        row_mass,
        row_state,
        bounds,
        num_accepted,
        output_tokens,
        *strides,
        sample_uniforms.stride(0),
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds.shape[1],
        DRAFT_STATS=draft_stats,
        BLOCK_K=block_k,
        BLOCK_T=block_t,
        **drafts,
        **tiles,
    )
    return output_tokens, num_accepted
