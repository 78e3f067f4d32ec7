"""`specops::verify_exact` on CUDA: test the drafts, then draw from the residual (defined in docs/math.md).

Draft x_i is accepted iff u_i * l * q_i(x_i) < p_i(x_i) (`accept_drafts` in `accept.py`). Let n be the number of drafts
before the first rejection. The next token is drawn from max(p_n - q_n, 0), or from p_K if all K drafts are accepted.
p_i(v) = exp(z_i(v) - max_i) / sum_i is computed from two numbers per row, so no softmax is written.

Bytes per sequence, with s_p and s_q bytes per logit of target and draft:
    without draft_lse   V * ((K + 1) * s_p + K * s_q), each row once
    with draft_lse      V * ((K + 1) * s_p + s_q): K + 1 target rows and the draft row of the rejection
    one-hot drafts      V * (K + 1) * s_p
In addition, the target row and the draft row of the rejection are read once more (from L2). In a large batch
(`rest_rows`), a sequence that rejects one of its first two drafts reads only two target rows and two draft rows. These
are not read: rows after a padded draft, draft rows of greedy sequences, and sequences with a negative or NaN
temperature. Nothing of size [.., V] is written. Scratch: 8 bytes per (row, tile) and per (sequence, tile), and 20 per
sequence.

With filters, the search for the bounds of the K + 1 target rows and the K draft rows comes first (see
`filter/bounds.py` for its bytes and launches), and loads of a row are masked by its bounds. The statistics of a
filtered row then need only the parts of the row in which a token is kept. The search does not read the draft rows if
`draft_lse` has their bounds, or with `filter_draft=False`, where they have no bounds.

There are two launches, or three for a large batch. No two programs write the same scratch, and sums are taken in a
fixed order. Results are therefore bitwise repeatable, and do not depend on which launch summed a row.
1. `stats_kernel` in `stats.py`, one program per (row, tile): maximum and sum of exponentials (greedy rows: the
   argmax). In a large batch, only the first two rows of target and draft.
2. `rest_kernel`, for a large batch, one program per (row, few tiles): the same for the other rows, if the first two
   drafts were accepted.
3. `draw_kernel`, one program per (sequence, few tiles): combines the partials, tests the drafts to find n (every
   program of a sequence computes the same n in the same order), and sums the residual weights of its tiles. The last
   program of a sequence finds the tile that s falls into, reads it again, and writes the output row.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import VerifyArguments
from . import launch
from .accept import accept_drafts, accepted_prefix_length, count_valid, store_accepted, store_next
from .residual import draft_row_stats, draw_token, load_state, sum_residual
from .stats import exact_values, run_stats, sum_tile
from .tiles import (
    inverse_temperature,
    is_last_program,
    load_temperature,
    reciprocal,
    row_argmax,
    row_stats,
    store_pair,
)

# In a large batch, the first launch sums this many rows of target and draft.
FIRST_ROWS = tl.constexpr(2)
# The extra launch is worth its cost if the other rows have at least this many tiles. On an H200 that is 16 us of reads
# of 16-bit logits.
EARLY_EXIT_TILES = 8192


@launch.jit
def rest_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    draft_lse_ptr,  # [B, K] or None
    one_hot_ptr,  # [B] bool, True: drafts are one-hot although draft_ptr is given; or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    draft_bounds_ptr,  # bounds_ptr again if the draft is filtered, else None
    top_ptr,  # [B, num_tops, num_parts] or None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
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
    num_tops,
    num_parts,
    lenience,
    argmax_gap,  # the log of argmax_lenience; None: greedy rows accept only the argmax
    TILE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1) * tiles_per_program
    r = tl.program_id(2) + FIRST_ROWS
    lenience = tl.cast(lenience, tl.float32)
    if argmax_gap is not None:
        argmax_gap = tl.cast(argmax_gap, tl.float32)
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    target = (target_ptr, stride_target_b, stride_target_k, stride_target_v, bounds_ptr)
    draft = (draft_ptr, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, tokens_ptr, one_hot_ptr)
    sizes = (num_drafts, vocab_size, num_tiles, rows_per_sequence, num_bounds)
    tops = (top_ptr, num_tops, num_parts)
    rule = (temperature, inverse_t, lenience, argmax_gap)
    i = tl.arange(0, FIRST_ROWS).to(tl.int64)
    live = i < tl.where(temperature >= 0, num_valid, 0)
    accepted = accept_drafts(
        i, live, b, target, draft, draft_lse_ptr, accept_uniforms_ptr, partial_ptr, sizes, rule, BLOCK_T
    )
    if draft_lse_ptr is not None:
        # With draft_lse the sums of draft rows are known, so do not read these rows.
        draft = (None, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, tokens_ptr, None)
    if accepted_prefix_length(accepted) == FIRST_ROWS:
        for tile in tl.range(first_tile, tl.minimum(first_tile + tiles_per_program, num_tiles).to(tl.int32)):
            row = tl.where(r <= num_drafts, r, r + FIRST_ROWS)
            sum_tile(
                b, row, tile, partial_ptr, target, draft, sizes, tops, num_valid, temperature, inverse_t, TILE, PART
            )


@triton.jit
def walk(
    reachable,
    b,
    target,
    draft,
    draft_lse_ptr,
    accept_uniforms_ptr,
    partial_ptr,
    sizes,
    rule,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    """The number of accepted drafts of sequence b before the first rejection, among the first `reachable` drafts."""
    num_drafts, _, _, _, _ = sizes
    _, _, _, _, bounds_ptr = target
    _, _, _, argmax_gap = rule
    n = tl.zeros((), tl.int64)
    # Visit all drafts, because in a loop whose end depends on data every reduction would be a function call. Do not
    # hoist the addresses of bounds out of the loop: this made `ptxas` spill, and the loop mostly runs once.
    for start in tl.range(0, num_drafts, WALK, disable_licm=bounds_ptr is not None or argmax_gap is not None):
        i = (start + tl.arange(0, WALK)).to(tl.int64)
        live = i < reachable
        accepted = accept_drafts(
            i, live, b, target, draft, draft_lse_ptr, accept_uniforms_ptr, partial_ptr, sizes, rule, BLOCK_T
        )
        run = accepted_prefix_length(accepted)
        n += run
        reachable = tl.where(run == WALK, reachable, 0)
    return n


@triton.jit
def draft_state(b, n, partial_ptr, draft, draft_lse_ptr, sizes, BLOCK_T: tl.constexpr):
    """The state (q_shift, q_weight) of draft row n of sequence b; zeros for a one-hot draft."""
    draft_ptr, _, _, _, _, _, one_hot_ptr = draft
    num_drafts, _, num_tiles, rows_per_sequence, _ = sizes
    q_shift, q_weight = 0.0, 0.0
    if draft_ptr is not None and (one_hot_ptr is None or not tl.load(one_hot_ptr + b)):
        row = b * rows_per_sequence + n + (num_drafts + 1)
        q_shift, q_sum = draft_row_stats(partial_ptr, row, draft_lse_ptr, b * num_drafts + n, num_tiles, BLOCK_T)
        q_weight = reciprocal(q_sum)
    return q_shift, q_weight


@launch.jit
def draw_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: drafts are one-hot
    draft_tokens_ptr,  # [B, K]
    accept_uniforms_ptr,  # [B, K]
    sample_uniforms_ptr,  # [B]
    temperature_ptr,  # [B] or None
    draft_lse_ptr,  # [B, K] or None
    one_hot_ptr,  # [B] bool, True: drafts are one-hot although draft_ptr is given; or None
    bounds_ptr,  # [B, num_bounds, 2] or None
    draft_bounds_ptr,  # bounds_ptr again if the draft is filtered, else None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]
    mass_ptr,  # [B, num_tiles, 2] residual mass, and 1 if p and q differ in the tile
    state_ptr,  # [B, 4], the state of the rows that the next token is drawn from
    count_ptr,  # [B], the number of programs that have summed their part of the residual
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
    lenience,
    argmax_gap,  # the log of argmax_lenience; None: greedy rows accept only the argmax
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WALK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first_tile = tl.program_id(1) * tiles_per_program
    # Cast, because a Python float arrives as float64 from Inductor and as float32 from a direct launch.
    lenience = tl.cast(lenience, tl.float32)
    if argmax_gap is not None:
        argmax_gap = tl.cast(argmax_gap, tl.float32)
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    target = (target_ptr, stride_target_b, stride_target_k, stride_target_v, bounds_ptr)
    draft = (draft_ptr, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, tokens_ptr, one_hot_ptr)
    sizes = (num_drafts, vocab_size, num_tiles, rows_per_sequence, num_bounds)
    rule = (temperature, inverse_t, lenience, argmax_gap)

    reachable = tl.where(temperature >= 0, num_valid, 0)
    n = walk(reachable, b, target, draft, draft_lse_ptr, accept_uniforms_ptr, partial_ptr, sizes, rule, BLOCK_T, WALK)
    if first_tile == 0:
        tl.store(num_accepted_ptr + b, n)
        store_accepted(output_tokens_ptr, draft_tokens_ptr, b, n, num_drafts, BLOCK_K)

    mass_ptr += b * num_tiles * 2
    state_ptr += b * 4
    if temperature > 0:
        p_shift, p_sum = row_stats(partial_ptr, b * rows_per_sequence + n, num_tiles, BLOCK_T)
        p_weight = reciprocal(p_sum)
        if first_tile == 0:
            store_pair(state_ptr, p_shift, p_weight)
            store_pair(state_ptr + 2, 0.0, 0.0)
        if n < num_valid:
            q_shift, q_weight = draft_state(b, n, partial_ptr, draft, draft_lse_ptr, sizes, BLOCK_T)
            if first_tile == 0:
                store_pair(state_ptr + 2, q_shift, q_weight)
            state = (p_shift, p_weight, q_shift, q_weight)
            sum_residual(b, n, first_tile, tiles_per_program, mass_ptr, target, draft, sizes, inverse_t, state, TILE)

    if is_last_program(count_ptr + b, tl.num_programs(1)):
        # Load these values again to save registers: values loaded before the branch would occupy registers until here.
        n = tl.load(num_accepted_ptr + b)
        temperature = load_temperature(temperature_ptr, b)
        inverse_t = inverse_temperature(temperature_ptr, temperature)
        next_token = -1
        if temperature == 0:
            next_token = row_argmax(partial_ptr, b * rows_per_sequence + n, num_tiles, BLOCK_T)
        if temperature > 0:
            next_token = draw_token(
                tl.load(sample_uniforms_ptr + b),
                b,
                n,
                mass_ptr,
                n < num_valid,
                partial_ptr,
                target,
                draft,
                sizes,
                inverse_t,
                load_state(state_ptr),
                TILE,
                BLOCK_T,
            )
        store_next(output_tokens_ptr, b, n, num_drafts, next_token, BLOCK_K)


def rest_rows(tiles: int, num_rows: int, rows: int) -> int:
    """The number of rows of a sequence that `rest_kernel` sums; 0 = do not launch it. A sequence has `rows` rows, of
    which `num_rows` belong to the target. `tiles` is the number of tiles of one row, times the batch size."""
    rest = rows - FIRST_ROWS.value * (1 if rows == num_rows else 2)
    return rest if launch.hint(tiles * rest) >= EARLY_EXIT_TILES else 0


def verify_exact(args: VerifyArguments, *, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernels of `specops::verify_exact`, which has checked the arguments. Tests and benchmarks set
    `tile`."""
    values = exact_values(args, tile)
    batch, num_rows, _ = args.target_logits.shape
    tile, num_tiles, rows = values["TILE"], values["num_tiles"], values["rows_per_sequence"]
    tiles_per_program = launch.tiles_per_program(batch * num_tiles)
    values |= {
        "mass_ptr": torch.empty(batch, num_tiles, 2, dtype=torch.float32, device=args.target_logits.device),
        "state_ptr": torch.empty(batch, 4, dtype=torch.float32, device=args.target_logits.device),
        "tiles_per_program": tiles_per_program,
        "lenience": args.lenience,
        "argmax_gap": math.log(args.argmax_lenience) if args.argmax_lenience < 1 else None,
    }
    rest = rest_rows(batch * num_tiles, num_rows, rows)
    if rest > 0:
        run_stats(args, values, FIRST_ROWS.value)
        per_program = launch.tiles_per_program(batch * num_tiles * rest)
        grid = (batch, triton.cdiv(num_tiles, per_program), rest)
        launch.run(rest_kernel, grid, values | {"tiles_per_program": per_program}, launch.stats_warps(tile))
    else:
        run_stats(args, values)
    programs = triton.cdiv(num_tiles, tiles_per_program)
    launch.run(draw_kernel, (batch, programs), values, launch.num_warps(tile))
    return values["output_tokens_ptr"], values["num_accepted_ptr"]
