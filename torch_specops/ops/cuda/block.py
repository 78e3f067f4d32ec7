"""`specops::verify_block` on CUDA: find the number of accepted drafts, then draw from the residual (defined in
docs/math.md).

With P_0 = 1 and P_i = min(P_{i-1} p(x_i) / q(x_i), 1), n is the largest i with u_i < h_i. At the end of the block h_i =
P_i. Before it h_i = S_i / (S_i + 1 - P_i) with S_i = sum max(P_i p_i - q_i, 0), where p_i and q_i are the rows after
x_1 .. x_i. This sum reads rows a second time, but only at positions i where the block may still end ("candidates"):
- If u < P at the end of the block, the whole block is accepted, and there are no candidates.
- A position with u_i >= P_i is no candidate, because h_i <= P_i.
- A position before the last i with P_i = 1 is no candidate, because h_i = 1 there.

Bytes per sequence, with s_p and s_q bytes per logit of target and draft, and C candidates, 0 <= C <= K:
    without draft_lse   V * ((K + 1 + C) * s_p + (K + C) * s_q)
    with draft_lse      V * ((K + 1 + C) * s_p + C * s_q)
    one-hot drafts      V * (K + 1 + C) * s_p
In addition, one tile of a target row and of a draft row is read again. With filters, the search for the bounds of all
rows comes first. As in `verify_exact`, these are not read: rows after a padded draft, draft rows of greedy sequences,
and sequences with a negative or NaN temperature. Nothing of size [.., V] is written. Scratch: 8 bytes per (row, tile)
of the rows in the first launch, 8 per (draft, tile), 32 per draft and 4 per sequence.

There are three launches. No two programs write the same scratch, and sums are taken in a fixed order, so results are
bitwise repeatable. For K = 0 the op calls `verify_exact`.
1. `stats_kernel` in `stats.py`, one program per (row, tile).
2. `reach_kernel`, one program per draft: combines the partials of its two rows and computes p / q of its token. The
   last program of a sequence computes all P_i, and finds the candidates, or n if there are none.
3. `draw_kernel`, one program per (sequence, few tiles), and per draft if there would be few programs: sums the residual
   weights of its tiles in the rows of the candidates. The last program of a sequence finds n, selects the tile that s
   falls into, reads it again, and writes the output row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import VerifyArguments
from . import launch
from .accept import MAX_PARTIALS, count_valid, load_token_logits, store_accepted, store_next
from .exact import verify_exact
from .residual import (
    LARGEST_EXPONENT,
    LEAST_RESIDUAL,
    draft_row_stats,
    draw_token,
    load_state,
    sum_residual,
)
from .stats import exact_values, run_stats
from .tiles import (
    exponential,
    inverse_temperature,
    is_last_program,
    load_partials,
    load_temperature,
    reciprocal,
    row_argmax,
    row_stats,
    store_pair,
)

# The float64 exp of any smaller number is 0.
LEAST_EXPONENT = tl.constexpr(-745.0)
# exp(LARGEST_RATIO_EXPONENT) is finite in float64, and so is its product with LARGEST_SCALE.
LARGEST_RATIO_EXPONENT = tl.constexpr(300.0)
LARGEST_SCALE = tl.constexpr(1e150)


@triton.jit
def compose(scale, cap, next_scale, next_cap):
    """The composition of x -> min(x * scale, cap) and then x -> min(x * next_scale, next_cap), as one such map."""
    return tl.minimum(scale * next_scale, LARGEST_SCALE), tl.minimum(cap * next_scale, next_cap)


@launch.jit
def reach_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    draft_lse_ptr,  # [B, K] or None
    one_hot_ptr,  # [B] bool, True: drafts are one-hot although draft_ptr is given; or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    draft_bounds_ptr,  # bounds_ptr again if the draft is filtered, else None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
    state_ptr,  # [B, K, 4]
    ratio_ptr,  # [B, K] float64, p / q of draft i; -1 if the block ends before it, or a greedy row rejects it
    reach_ptr,  # [B, K] float64, P_i if i is a candidate, else -1
    count_ptr,  # [B], the number of programs that have stored their ratio
    num_accepted_ptr,  # [B]; -1 if it depends on the residuals, which the next kernel sums
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
            if draft_ptr is not None and (one_hot_ptr is None or not tl.load(one_hot_ptr + b)):
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
                q_exponent = z_q.to(tl.float64) - q_max.to(tl.float64)
                has_ratio = has_ratio & (q_exponent > LEAST_EXPONENT) & (q_sum > 0)
                exponent -= tl.minimum(q_exponent, LARGEST_EXPONENT)
            # If both rows have the same sum, use exactly 1, which a product with a rounded reciprocal may miss.
            sums = tl.where(q_sum == p_sum, 1.0, q_sum * reciprocal(p_sum)).to(tl.float64)
            exponent = tl.where(has_ratio, tl.minimum(exponent, LARGEST_RATIO_EXPONENT), 0.0)
            value = tl.where(has_ratio, tl.exp(exponent) * sums, 0.0)
            ratio = tl.where(p_sum > 0, value, ratio)
            store_pair(state_ptr + row * 4, p_max, reciprocal(p_sum))
            store_pair(state_ptr + row * 4 + 2, q_max, reciprocal(q_sum))
    tl.store(ratio_ptr + row, ratio)

    if is_last_program(count_ptr + b, num_drafts):
        k = tl.arange(0, BLOCK_K)
        ratios = tl.load(ratio_ptr + b * num_drafts + k, mask=k < num_drafts, other=-1.0)
        # n is the length of the block, or the number of drafts that a greedy sequence accepts.
        n = tl.min(tl.where(ratios >= 0, BLOCK_K, k), 0)
        one = tl.full((BLOCK_K,), 1.0, tl.float64)
        scale, cap = tl.associative_scan((tl.maximum(ratios, 0.0), one), 0, compose)

        # Lane k has the values for accepting k + 1 drafts, the drafts 0 .. k.
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


@triton.jit
def longest(
    b,
    accept_uniforms_ptr,
    reach_ptr,
    state_ptr,
    mass_ptr,
    draft,
    sizes,
    n,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    """The number of accepted drafts of sequence b, from the residual masses of its candidates; at least n."""
    draft_ptr, _, _, _, _, _, _ = draft
    num_drafts, _, num_tiles, _, _ = sizes
    first_draft = b * num_drafts
    for start in range(0, num_drafts, WALK):
        i = (start + tl.arange(0, WALK)).to(tl.int64)
        reach = tl.load(reach_ptr + first_draft + i, mask=i < num_drafts, other=-1.0)
        candidate = reach > 0
        mass, differs = load_partials(mass_ptr, first_draft + i, num_tiles, candidate, BLOCK_T)
        total = tl.sum(tl.maximum(mass, 0.0).to(tl.float64), 1)
        if draft_ptr is not None:
            state = state_ptr + (first_draft + i) * 4
            p_shift = tl.load(state, mask=candidate, other=0.0)
            p_weight = tl.load(state + 1, mask=candidate, other=1.0)
            q_shift = tl.load(state + 2, mask=candidate, other=0.0)
            q_weight = tl.load(state + 3, mask=candidate, other=0.0)
            # If a target row and its draft row have equal logits, q = c p with c = `multiple`, and the residual max(P p
            # - q, 0) is (P - c) p, or 0. Its mass is P - c, or 0.
            multiple = exponential(p_shift - q_shift) * (q_weight / p_weight)
            total = tl.where(tl.max(differs, 1) > 0, total, reach - multiple)
        total = tl.where(total > LEAST_RESIDUAL, total, 0.0)
        u_ptr = accept_uniforms_ptr + first_draft + i - 1
        u = tl.load(u_ptr, mask=candidate & (i > 0), other=0.0).to(tl.float64)
        # A candidate with P = 1 (`reach`) is accepted even if its residual is empty.
        accepted = candidate & ((reach == 1) | (u * (total + (1.0 - reach)) < total))
        n = tl.maximum(n, tl.max(tl.where(accepted, i, -1), 0))
    return n


@launch.jit
def draw_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    sample_uniforms_ptr,  # [B]
    temperature_ptr,  # [B] or None
    one_hot_ptr,  # [B] bool, True: drafts are one-hot although draft_ptr is given; or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    draft_bounds_ptr,  # bounds_ptr again if the draft is filtered, else None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
    reach_ptr,  # [B, K] float64
    state_ptr,  # [B, K, 4]
    mass_ptr,  # [B, K, num_tiles, 2] residual mass, and 1 if p and q differ in the tile
    count_ptr,  # [B], the number of programs that have summed their part of the residuals
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
    tiles_per_program,
    rows_per_sequence,
    num_bounds,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1) * tiles_per_program
    first_draft = b * num_drafts
    tokens_ptr = draft_tokens_ptr + first_draft
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    target = (target_ptr, stride_target_b, stride_target_k, stride_target_v, bounds_ptr)
    draft = (draft_ptr, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, tokens_ptr, one_hot_ptr)
    sizes = (num_drafts, vocab_size, num_tiles, rows_per_sequence, num_bounds)
    n = tl.load(num_accepted_ptr + b)
    undecided = n < 0

    if undecided:
        for k in tl.range(tl.program_id(2), num_drafts, tl.num_programs(2)):
            i = tl.cast(k, tl.int64)
            row = first_draft + i
            reach = tl.load(reach_ptr + row)
            if reach > 0:
                p_shift, p_weight, q_shift, q_weight = load_state(state_ptr + row * 4)
                state = (p_shift, p_weight * reach.to(tl.float32), q_shift, q_weight)
                masses = mass_ptr + row * num_tiles * 2
                sum_residual(b, i, first_tile, tiles_per_program, masses, target, draft, sizes, inverse_t, state, TILE)

    if is_last_program(count_ptr + b, tl.num_programs(1) * tl.num_programs(2)):
        # Load n again, so that it occupies no register in between.
        n = tl.load(num_accepted_ptr + b)
        undecided = n < 0
        if undecided:
            n = longest(b, accept_uniforms_ptr, reach_ptr, state_ptr, mass_ptr, draft, sizes, n, BLOCK_T, WALK)
            tl.store(num_accepted_ptr + b, n)
        store_accepted(output_tokens_ptr, draft_tokens_ptr, b, n, num_drafts, BLOCK_K)
        next_token = -1
        if temperature == 0:
            next_token = row_argmax(partial_ptr, b * rows_per_sequence + n, num_tiles, BLOCK_T)
        if temperature > 0:
            if undecided:
                row = first_draft + n
                p_shift, p_weight, q_shift, q_weight = load_state(state_ptr + row * 4)
                p_weight = p_weight * tl.load(reach_ptr + row).to(tl.float32)
            else:
                p_shift, p_sum = row_stats(partial_ptr, b * rows_per_sequence + n, num_tiles, BLOCK_T)
                p_weight = reciprocal(p_sum)
                q_shift, q_weight = 0.0, 0.0
            next_token = draw_token(
                tl.load(sample_uniforms_ptr + b),
                b,
                n,
                mass_ptr + (first_draft + n) * num_tiles * 2,
                undecided,
                partial_ptr,
                target,
                draft,
                sizes,
                inverse_t,
                (p_shift, p_weight, q_shift, q_weight),
                TILE,
                BLOCK_T,
            )
        store_next(output_tokens_ptr, b, n, num_drafts, next_token, BLOCK_K)


def verify_block(args: VerifyArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `specops::verify_block`, which has checked the arguments. Tests and benchmarks set
    `tile`."""
    batch, num_rows, _ = args.target_logits.shape
    num_drafts = num_rows - 1
    if num_drafts == 0:
        return verify_exact(args, tile=tile)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(batch, *shape, dtype=dtype, device=args.target_logits.device)

    values = exact_values(args, tile)
    num_tiles, num_warps = values["num_tiles"], launch.num_warps(values["TILE"])
    # If there would be few programs, launch a program for each position. Otherwise each program loops over the
    # positions of a sequence.
    parallel_rows = num_drafts if launch.tiles_per_program(batch * num_tiles * num_drafts) == 1 else 1
    tiles_per_program = launch.tiles_per_program(batch * num_tiles * parallel_rows)
    values |= {
        "ratio_ptr": scratch(num_drafts, dtype=torch.float64),
        "reach_ptr": scratch(num_drafts, dtype=torch.float64),
        "state_ptr": scratch(num_drafts, 4),
        "mass_ptr": scratch(num_drafts, num_tiles, 2),
        "tiles_per_program": tiles_per_program,
    }
    run_stats(args, values)
    # This kernel holds partials in registers and no tile of logits, so its number of warps does not depend on the tile.
    launch.run(reach_kernel, (batch, num_drafts), values, launch.num_warps(MAX_PARTIALS))
    launch.run(draw_kernel, (batch, triton.cdiv(num_tiles, tiles_per_program), parallel_rows), values, num_warps)
    return values["output_tokens_ptr"], values["num_accepted_ptr"]
