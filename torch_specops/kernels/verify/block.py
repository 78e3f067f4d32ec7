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
(draft, tile) and 32 per draft.

Five launches (three for K = 0), each a grid over what it writes, so there are no races, atomics or counters:
1. `stats_kernel` of `verify_exact`, one program per (row, tile).
2. `ratio_kernel` (`block_reach.py`), one program per draft: combines the partials of its two rows, p / q of its token.
3. `reach_kernel` (`block_reach.py`), one program per sequence: P_i; which rows are left, or n if none is.
4. `residual_kernel`, one program per (draft, tile): sums the residual weights of its tile, if its row is left.
5. `draw_kernel`, one program per sequence: decides n, picks the tile that s falls into, rescans it, writes the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import launch
from ..filter import filter_bounds
from ..launch import wrap_triton
from ..rows import (
    FLOAT32_MAX,
    bounds_of,
    combine_argmax,
    combine_stats,
    inverse_temperature,
    load_own_tile,
    load_partials,
    pick_tile,
    pick_token,
    reciprocal,
    row_lead,
    tile_tokens,
)
from . import walk
from .block_reach import ratio_kernel, reach_kernel
from .exact import stats_kernel
from .exact_residual import residual_weights
from .walk import store_output

__all__ = ["verify_block"]


@triton.jit(
    do_not_specialize=[
        "stride_target_b",
        "stride_target_k",
        "stride_target_v",
        "stride_draft_b",
        "stride_draft_k",
        "stride_draft_v",
        "stride_tokens_b",
        "stride_tokens_k",
        "stride_t",
        "num_drafts",
        "vocab_size",
        "num_tiles",
        "num_bounds",
    ]
)
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
    program = tl.program_id(0).to(tl.int64)
    tile = (program % num_tiles).to(tl.int32)
    row = program // num_tiles
    reach = tl.load(reach_ptr + row)
    if reach > 0:
        b = row // num_drafts
        i = row % num_drafts
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
            tl.exp(z_p - p_shift) * p_weight,
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
        tl.store(mass_ptr + program * 2, tl.sum(weight, 0))
        tl.store(mass_ptr + program * 2 + 1, differs)


@triton.jit
def load_mass(mass_ptr, row, num_tiles, live, BLOCK_T: tl.constexpr):
    """[R, BLOCK_T] residual masses of every tile of rows [R]; zero where not live, or where p and q are equal."""
    mass, differs = load_partials(mass_ptr, row, num_tiles, live, BLOCK_T)
    return tl.where(tl.max(differs, 1)[:, None] > 0, tl.maximum(mass, 0.0), 0.0)


@triton.jit(
    do_not_specialize=[
        "stride_target_b",
        "stride_target_k",
        "stride_target_v",
        "stride_draft_b",
        "stride_draft_k",
        "stride_draft_v",
        "stride_tokens_b",
        "stride_tokens_k",
        "stride_u_b",
        "stride_u_k",
        "stride_s",
        "stride_t",
        "num_drafts",
        "vocab_size",
        "num_tiles",
        "num_bounds",
    ]
)
def draw_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    sample_uniforms_ptr,  # [B]
    temperature_ptr,  # [B]
    partial_ptr,  # [B, R, num_tiles, 2]
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    mass_ptr,  # [B, K, num_tiles, 2]
    bounds_ptr,  # [B, K+1 or 2K+1, 2]
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
    stride_u_b,
    stride_u_k,
    stride_s,
    stride_t,
    num_drafts,
    vocab_size,
    num_tiles,
    num_bounds,
    HAS_TEMPERATURE: tl.constexpr,
    ONE_HOT: tl.constexpr,
    DRAFT_STATS: tl.constexpr,
    FILTERED: tl.constexpr,
    TARGET_UNIT_STRIDE: tl.constexpr,
    DRAFT_UNIT_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + b * stride_t)
    inverse_t = inverse_temperature(temperature, HAS_TEMPERATURE)
    rows_per_sequence = num_drafts + 1
    if DRAFT_STATS:
        rows_per_sequence += num_drafts
    tokens_ptr = draft_tokens_ptr + b * stride_tokens_b

    n = tl.load(num_accepted_ptr + b)
    open = n < 0
    if open:
        for start in range(0, num_drafts, WALK):
            i = (start + tl.arange(0, WALK)).to(tl.int64)
            reach = tl.load(reach_ptr + b * num_drafts + i, mask=i < num_drafts, other=-1.0)
            candidate = reach > 0
            total = tl.sum(load_mass(mass_ptr, b * num_drafts + i, num_tiles, candidate, BLOCK_T).to(tl.float64), 1)
            u_ptr = accept_uniforms_ptr + b * stride_u_b + (i - 1) * stride_u_k
            u = tl.load(u_ptr, mask=candidate & (i > 0), other=0.0).to(tl.float64)
            # Where P = 1 all that is accepted later is accepted here too, also where the residual is empty.
            accepted = candidate & ((reach == 1) | (u * (total + (1.0 - reach)) < total))
            n = tl.maximum(n, tl.max(tl.where(accepted, i, -1), 0))
        tl.store(num_accepted_ptr + b, n)

    next_token = -1
    if temperature >= 0:
        only = b * rows_per_sequence + n + tl.zeros((1,), tl.int64)
        first, second = load_partials(partial_ptr, only, num_tiles, only >= 0, BLOCK_T)
        if temperature == 0:
            next_token = tl.max(combine_argmax(first, second), 0)
        else:
            row_max, row_sum = combine_stats(first, second)
            p_shift = tl.maximum(tl.max(row_max, 0), -FLOAT32_MAX)
            p_weight = reciprocal(tl.max(row_sum, 0))
            only = b * num_drafts + n + tl.zeros((1,), tl.int64)
            residual = tl.max(load_mass(mass_ptr, only, num_tiles, (only >= 0) & open, BLOCK_T), 0)
            # The residual before the end of the block; p there, and for an empty residual.
            has_residual = tl.sum(residual, 0) > 0
            p_mass = tl.max(second * tl.exp(first - p_shift) * p_weight, 0)
            s = tl.load(sample_uniforms_ptr + b * stride_s)
            tile, threshold = pick_tile(tl.where(has_residual, residual, p_mass), s)

            target_row_ptr = target_ptr + b * stride_target_b + n * stride_target_k
            lead = row_lead(target_row_ptr, TARGET_UNIT_STRIDE)
            v = tile_tokens(lead, tile, TILE)
            z_p = load_own_tile(
                target_row_ptr,
                stride_target_v,
                lead,
                vocab_size,
                tile,
                inverse_t,
                TILE,
                TARGET_UNIT_STRIDE,
                bounds_of(bounds_ptr, b, n, num_bounds, FILTERED),
                FILTERED,
            )
            weight = tl.exp(z_p - p_shift) * p_weight
            if has_residual:
                state = state_ptr + (b * num_drafts + n) * 4
                reach = tl.load(reach_ptr + b * num_drafts + n).to(tl.float32)
                weight, _ = residual_weights(
                    tl.exp(z_p - tl.load(state)) * (tl.load(state + 1) * reach),
                    z_p,
                    v,
                    draft_ptr + b * stride_draft_b + n * stride_draft_k,
                    stride_draft_v,
                    lead,
                    vocab_size,
                    tile,
                    inverse_t,
                    tl.load(state + 2),
                    tl.load(state + 3),
                    tl.load(tokens_ptr + n * stride_tokens_k).to(tl.int32),
                    ONE_HOT,
                    DRAFT_UNIT_STRIDE,
                    TILE,
                    bounds_of(bounds_ptr, b, num_drafts + 1 + n, num_bounds, FILTERED),
                    FILTERED,
                )
            next_token = pick_token(weight, v, threshold)
    store_output(
        output_tokens_ptr + b * (num_drafts + 1), tokens_ptr, stride_tokens_k, n, num_drafts, next_token, BLOCK_K
    )


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
    device = target_logits.device
    output_tokens = torch.empty(batch, num_rows, dtype=torch.int64, device=device)
    num_accepted = torch.empty(batch, dtype=torch.int64, device=device)
    if batch == 0:
        return output_tokens, num_accepted

    draft_stats = draft_logits is not None and draft_lse is None and num_drafts > 0
    rows_per_sequence = num_rows + (num_drafts if draft_stats else 0)
    tile = tile or launch.tile_size(vocab_size, batch * rows_per_sequence)
    num_tiles = launch.num_tiles(target_logits, tile)
    if draft_logits is not None:
        num_tiles = max(num_tiles, launch.num_tiles(draft_logits, tile))
    partial = torch.empty(batch, rows_per_sequence, num_tiles, 2, dtype=torch.float32, device=device)
    mass = torch.empty(batch, num_drafts, num_tiles, 2, dtype=torch.float32, device=device)
    state = torch.empty(batch, num_drafts, 4, dtype=torch.float32, device=device)
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
    u_strides = accept_uniforms.stride()
    block_k, block_t = launch.next_power_of_2(num_rows), launch.next_power_of_2(num_tiles)
    one_hot, has_temperature = draft_logits is None, temperature is not None
    drafts = {"ONE_HOT": one_hot, "HAS_TEMPERATURE": has_temperature, "FILTERED": filtered}
    tiles = {
        "TARGET_UNIT_STRIDE": target_logits.stride(2) == 1,
        "DRAFT_UNIT_STRIDE": draft.stride(2) == 1,
        "TILE": tile,
        "num_warps": launch.num_warps(tile),
    }
    few_warps = launch.num_warps(walk.MAX_PARTIALS)
    wrap_triton(stats_kernel)[(batch * rows_per_sequence * num_tiles,)](
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
        **tiles,
    )
    if num_drafts > 0:
        wrap_triton(ratio_kernel)[(batch * num_drafts,)](
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
        *u_strides,
        t.stride(0),
        num_drafts,
        HAS_TEMPERATURE=has_temperature,
        BLOCK_K=block_k,
        num_warps=few_warps,
    )
    if num_drafts > 0:
        wrap_triton(residual_kernel)[(batch * num_drafts * num_tiles,)](
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
    wrap_triton(draw_kernel)[(batch,)](
        target_logits,
        draft,
        draft_tokens,
        accept_uniforms,
        sample_uniforms,
        t,
        partial,
        reach,
        state,
        mass,
        bounds,
        num_accepted,
        output_tokens,
        *strides,
        *u_strides,
        sample_uniforms.stride(0),
        t.stride(0),
        num_drafts,
        vocab_size,
        num_tiles,
        bounds.shape[1],
        DRAFT_STATS=draft_stats,
        BLOCK_K=block_k,
        WALK=walk.width(block_t),
        BLOCK_T=block_t,
        **drafts,
        **tiles,
    )
    return output_tokens, num_accepted
