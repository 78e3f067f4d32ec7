"""`specops::verify_block` on CUDA: accept as many drafts as the block allows, then draw from the residual (docs/math.md
has the law).

With P_0 = 1 and P_i = min(P_{i-1} p(x_i) / q(x_i), 1), n is the largest i with u_i < h_i. At the end of the block
h_i = P_i. Before it h_i = S_i / (S_i + 1 - P_i) with S_i = sum max(P_i p_i - q_i, 0), where p_i and q_i are the rows
after x_1 .. x_i. This sum reads the rows a second time, but only where the block may still end:
- nowhere, if u < P at the end of the block;
- not where u_i >= P_i, because h_i <= P_i;
- not before the last i with P_i = 1, because h_i = 1 there.

Bytes per sequence, with s_p and s_q bytes a logit and C rows left, 0 <= C <= K:
    without draft_lse   V * ((K + 1 + C) * s_p + (K + C) * s_q)
    with draft_lse      V * ((K + 1 + C) * s_p + C * s_q)
    one-hot drafts      V * (K + 1 + C) * s_p
and one tile of a row pair once more. With filters, the search for the bounds of all rows comes first. As in
`verify_exact`, rows behind a padded draft, draft rows of greedy sequences and sequences without a lawful temperature
are not read. Nothing of size [.., V] is written. The scratch is 8 bytes per (row, tile) of the rows that are read
first, 8 per (draft, tile) and (sequence, tile), and 32 per draft.

Six launches. Each program writes its own part of the output, so there are no races, atomics or counters. For K = 0
the op is `verify_exact`, and so are its launches.
1. `stats_kernel` of `verify_exact`, one program per (row, tile).
2. `ratio_kernel`, one program per draft: combines the partials of its two rows, p / q of its token.
3. `reach_kernel`, one program per sequence: P_i, and which rows are left; n, if none is.
4. `residual_kernel`, one program per (draft, tile): sums the residual weights of its tile, if its row is left.
5. `decide_kernel`, one program per sequence: n, and what the next kernel needs of row n.
6. `draw_kernel` of `verify_exact`, one program per sequence: picks the tile that s falls into, rescans it, writes the
   output row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments import VerifyArguments
from .. import launch
from ..rows import (
    exponential,
    inverse_temperature,
    load_partials,
    load_scaled,
    load_scaled_beside,
    load_temperature,
    reciprocal,
    row_argmax,
    row_lead,
    row_stats,
    store_pair,
    tile_tokens,
)
from .accept import MAX_PARTIALS, count_valid, load_token_logits
from .exact import draw_kernel, exact_values, run_stats, verify_exact
from .residual import draft_row_stats, load_state, residual_weights, store_state

# exp(LARGEST_EXPONENT) is finite in float64, and so is its product with LARGEST_SCALE.
LARGEST_EXPONENT = tl.constexpr(300.0)
LARGEST_SCALE = tl.constexpr(1e150)


@triton.jit
def compose(scale, cap, next_scale, next_cap):
    """x -> min(x * scale, cap), then x -> min(x * next_scale, next_cap), as one such map."""
    return tl.minimum(scale * next_scale, LARGEST_SCALE), tl.minimum(cap * next_scale, next_cap)


@launch.jit
def ratio_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    draft_lse_ptr,  # [B, K] or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    draft_bounds_ptr,  # the same or None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
    state_ptr,  # [B, K, 4]
    ratio_ptr,  # [B, K] float64 p / q of draft i; -1 where the block ends before it, or a greedy sequence rejects it
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    rows_per_sequence,
    num_bounds,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1).to(tl.int64)
    row = b * num_drafts + i
    partial_row = b * rows_per_sequence + i
    bounds_row = b * num_bounds + i
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)

    ratio = tl.full((), -1.0, tl.float64)
    if (i < num_valid) & (temperature >= 0):
        x = tl.load(tokens_ptr + i).to(tl.int64)
        if temperature == 0:
            argmax = row_argmax(partial_ptr, partial_row, num_tiles, BLOCK_T)
            ratio = tl.where(argmax.to(tl.int64) == x, 1.0, ratio)
        else:
            p_max, p_sum = row_stats(partial_ptr, partial_row, num_tiles, BLOCK_T)
            sequence_ptr = target_ptr + b * stride_target_b
            z_p = load_token_logits(
                sequence_ptr, stride_target_k, stride_target_v, i, x, True, inverse_t, bounds_ptr, bounds_row
            )
            exponent = z_p.to(tl.float64) - p_max.to(tl.float64)
            has_ratio = z_p > float("-inf")
            q_max = 0.0
            q_sum = 1.0
            if draft_ptr is not None:
                draft_row = partial_row + num_drafts + 1
                q_max, q_sum = draft_row_stats(partial_ptr, draft_row, draft_lse_ptr, row, num_tiles, BLOCK_T)
                bounds_row += num_drafts + 1
                draft_sequence_ptr = draft_ptr + b * stride_draft_b
                z_q = load_token_logits(
                    draft_sequence_ptr,
                    stride_draft_k,
                    stride_draft_v,
                    i,
                    x,
                    True,
                    inverse_t,
                    draft_bounds_ptr,
                    bounds_row,
                )
                has_ratio = has_ratio & (z_q > float("-inf")) & (q_sum > 0)
                exponent -= z_q.to(tl.float64) - q_max.to(tl.float64)
            # Where both rows have the same stats the quotient is exactly 1.
            sums = tl.where(q_sum == p_sum, 1.0, q_sum * reciprocal(p_sum)).to(tl.float64)
            exponent = tl.where(has_ratio, tl.minimum(exponent, LARGEST_EXPONENT), 0.0)
            value = tl.where(has_ratio, tl.exp(exponent) * sums, 0.0)
            ratio = tl.where(p_sum > 0, value, ratio)
            store_state(state_ptr + row * 4, p_max, reciprocal(p_sum), q_max, reciprocal(q_sum))
    tl.store(ratio_ptr + row, ratio)


@launch.jit
def reach_kernel(
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    ratio_ptr,  # [B, K] float64
    reach_ptr,  # [B, K] float64 P_i where the block may end before draft i, else -1
    num_accepted_ptr,  # [B]; -1 where the residuals are to decide
    num_drafts,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = load_temperature(temperature_ptr, b)
    k = tl.arange(0, BLOCK_K)
    ratio = tl.load(ratio_ptr + b * num_drafts + k, mask=k < num_drafts, other=-1.0)
    # The length of the block, or what a greedy sequence accepts.
    n = tl.min(tl.where(ratio >= 0, BLOCK_K, k), 0)
    one = tl.full((BLOCK_K,), 1.0, tl.float64)
    scale, cap = tl.associative_scan((tl.maximum(ratio, 0.0), one), 0, compose)

    # Lane k has what concerns the end of the block behind draft k, that is before draft k + 1.
    reach = tl.minimum(scale, cap)
    u = tl.load(accept_uniforms_ptr + b * num_drafts + k, mask=k < n, other=0.0)
    passed = (k < n) & (reach > 0) & (u.to(tl.float64) < reach)
    last_certain = tl.max(tl.where((k + 1 < n) & (reach == 1), k + 1, 0), 0)
    end = tl.max(tl.where(passed, k + 1, 0), 0)
    open = (end < n) & (temperature > 0)
    candidate = open & (passed | (k + 1 == last_certain)) & (k + 1 < n) & (k + 1 >= last_certain)
    reach_ptr += b * num_drafts
    tl.store(reach_ptr + k + 1, tl.where(candidate, reach, -1.0), mask=k + 1 < num_drafts)
    tl.store(reach_ptr, tl.where(open & (last_certain == 0), 1.0, -1.0))
    tl.store(num_accepted_ptr + b, tl.where(open, -1, n).to(tl.int64))


@launch.jit
def residual_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    draft_bounds_ptr,  # the same or None
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    mass_ptr,  # [B, K, num_tiles, 2] residual mass, and whether p and q differ there
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    num_bounds,
    TILE: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    i = tl.program_id(2).to(tl.int64)
    row = b * num_drafts + i
    reach = tl.load(reach_ptr + row)
    if reach > 0:
        inverse_t = inverse_temperature(temperature_ptr, load_temperature(temperature_ptr, b))
        p_shift, p_weight, q_shift, q_weight = load_state(state_ptr + row * 4)
        p_weight = p_weight * reach.to(tl.float32)
        bounds_row = b * num_bounds + i
        row_ptr = target_ptr + b * stride_target_b + i * stride_target_k
        lead = row_lead(row_ptr, stride_target_v)
        z_p = load_scaled(row_ptr, stride_target_v, lead, vocab_size, tile, inverse_t, bounds_ptr, bounds_row, TILE)
        weight = exponential(z_p - p_shift) * p_weight
        if draft_ptr is None:
            x = tl.load(draft_tokens_ptr + row).to(tl.int32)
            weight, differs = tl.where(tile_tokens(lead, tile, TILE) == x, 0.0, weight), 1.0
        else:
            q_row_ptr = draft_ptr + (b * stride_draft_b + i * stride_draft_k)
            q_bounds = bounds_row + num_drafts + 1
            z_q = load_scaled_beside(
                q_row_ptr, stride_draft_v, lead, vocab_size, tile, inverse_t, draft_bounds_ptr, q_bounds, TILE
            )
            weight, differs = residual_weights(weight, z_p, z_q, q_shift, q_weight)
        store_pair(mass_ptr + (row * num_tiles + tile) * 2, tl.sum(weight, 0), differs)


@launch.jit
def decide_kernel(
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    mass_ptr,  # [B, K, num_tiles, 2] residual mass, and whether p and q differ there
    row_state_ptr,  # [B, 4] the state of row n, with P p_n in the place of p_n
    row_mass_ptr,  # [B, num_tiles, 2] the masses of row n; zero where the next token is drawn from p_n
    num_accepted_ptr,  # [B]
    num_drafts,
    num_tiles,
    rows_per_sequence,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    temperature = load_temperature(temperature_ptr, b)
    if temperature > 0:
        n = tl.load(num_accepted_ptr + b)
        tile = tl.arange(0, BLOCK_T)
        is_tile = tile < num_tiles
        chosen_ptr = row_mass_ptr + (b * num_tiles + tile) * 2
        if n < 0:
            for start in range(0, num_drafts, WALK):
                i = (start + tl.arange(0, WALK)).to(tl.int64)
                reach = tl.load(reach_ptr + b * num_drafts + i, mask=i < num_drafts, other=-1.0)
                candidate = reach > 0
                mass, differs = load_partials(mass_ptr, b * num_drafts + i, num_tiles, candidate, BLOCK_T)
                total = tl.sum(tl.maximum(mass, 0.0).to(tl.float64), 1)
                total = tl.where(tl.max(differs, 1) > 0, total, 0.0)
                u_ptr = accept_uniforms_ptr + b * num_drafts + i - 1
                u = tl.load(u_ptr, mask=candidate & (i > 0), other=0.0).to(tl.float64)
                # Where P = 1 all that is accepted later is accepted here too, also where the residual is empty.
                accepted = candidate & ((reach == 1) | (u * (total + (1.0 - reach)) < total))
                n = tl.maximum(n, tl.max(tl.where(accepted, i, -1), 0))
            tl.store(num_accepted_ptr + b, n)
            row = b * num_drafts + n
            source_ptr = mass_ptr + (row * num_tiles + tile) * 2
            for part in tl.static_range(2):
                tl.store(chosen_ptr + part, tl.load(source_ptr + part, mask=is_tile), mask=is_tile)
            p_shift, p_weight, q_shift, q_weight = load_state(state_ptr + row * 4)
            p_weight = p_weight * tl.load(reach_ptr + row).to(tl.float32)
            store_state(row_state_ptr + b * 4, p_shift, p_weight, q_shift, q_weight)
        else:
            p_shift, p_sum = row_stats(partial_ptr, b * rows_per_sequence + n, num_tiles, BLOCK_T)
            for part in tl.static_range(2):
                tl.store(chosen_ptr + part, tl.zeros((BLOCK_T,), tl.float32), mask=is_tile)
            store_state(row_state_ptr + b * 4, p_shift, reciprocal(p_sum), 0.0, 0.0)


def verify_block(given: VerifyArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch `specops::verify_block`, which has checked its arguments. Tests and benchmarks choose the tile."""
    batch, num_rows, _ = given.target_logits.shape
    num_drafts = num_rows - 1
    if num_drafts == 0:
        return verify_exact(given, tile=tile)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=given.target_logits.device)

    values = exact_values(given, tile)
    num_tiles, num_warps = values["num_tiles"], launch.num_warps(values["TILE"])
    row_state, row_mass = scratch(4), scratch(num_tiles, 2)
    values |= {
        "ratio_ptr": scratch(num_drafts, dtype=torch.float64),
        "reach_ptr": scratch(num_drafts, dtype=torch.float64),
        "state_ptr": scratch(num_drafts, 4),
        "mass_ptr": scratch(num_drafts, num_tiles, 2),
        "row_state_ptr": row_state,
        "row_mass_ptr": row_mass,
    }
    # The small kernels hold partials, not logits.
    few_warps = launch.num_warps(MAX_PARTIALS)
    run_stats(given, values)
    launch.run(ratio_kernel, (batch, num_drafts), values, few_warps)
    launch.run(reach_kernel, (batch,), values, few_warps)
    launch.run(residual_kernel, (batch, num_tiles, num_drafts), values, num_warps)
    launch.run(decide_kernel, (batch,), values, few_warps)
    launch.run(draw_kernel, (batch,), values | {"state_ptr": row_state, "mass_ptr": row_mass}, num_warps)
    return values["output_tokens_ptr"], values["num_accepted_ptr"]
