"""The first launch of `verify_exact` and `verify_block`, and the kernel arguments that both ops share.

The kernel computes the maximum and the sum of exponentials of each tile of a row. For a greedy sequence it computes the
maximum and its token."""

from typing import Any

import torch
import triton
import triton.language as tl

from ..arguments import VerifyArguments
from . import launch
from .accept import count_valid, shared_values
from .filter import filter_bounds, top_values
from .tiles import (
    inverse_temperature,
    load_kept_parts,
    load_temperature,
    row_lead,
    scale,
    store_pair,
    tile_argmax,
    tile_stats,
    tile_tokens,
)


@triton.jit
def sum_tile(
    b,
    row,
    tile,
    partial_ptr,
    target,
    draft,
    sizes,
    tops,
    num_valid,
    temperature,
    inverse_t,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """Compute and store the partials of one tile of sequence b. `row` is an index into the K + 1 target rows followed
    by the K draft rows."""
    target_ptr, stride_target_b, stride_target_k, stride_target_v, bounds_ptr = target
    draft_ptr, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, _, one_hot_ptr = draft
    num_drafts, vocab_size, num_tiles, rows_per_sequence, num_bounds = sizes
    partial_ptr += ((b * rows_per_sequence + row) * num_tiles + tile) * 2
    bounds_row = b * num_bounds + row
    if row <= num_drafts:
        if (row <= num_valid) & (temperature >= 0):
            row_ptr = target_ptr + b * stride_target_b + row.to(tl.int64) * stride_target_k
            lead = row_lead(row_ptr, stride_target_v)
            x = load_kept_parts(
                row_ptr, stride_target_v, lead, vocab_size, tile, bounds_ptr, bounds_row, tops, b, row, TILE, PART
            )
            if temperature == 0:
                tile_max, sum_or_token = tile_argmax(scale(x, inverse_t), tile_tokens(lead, tile, TILE))
            else:
                tile_max, sum_or_token = tile_stats(x, inverse_t)
            store_pair(partial_ptr, tile_max, sum_or_token)
    if draft_ptr is not None and (one_hot_ptr is None or not tl.load(one_hot_ptr + b)):
        i = row - num_drafts - 1
        if (i >= 0) & (i < num_valid) & (temperature > 0):
            row_ptr = draft_ptr + b * stride_draft_b + i.to(tl.int64) * stride_draft_k
            lead = row_lead(row_ptr, stride_draft_v)
            x = load_kept_parts(
                row_ptr, stride_draft_v, lead, vocab_size, tile, draft_bounds_ptr, bounds_row, tops, b, row, TILE, PART
            )
            tile_max, tile_sum = tile_stats(x, inverse_t)
            store_pair(partial_ptr, tile_max, tile_sum)


@launch.jit
def stats_kernel(
    target_ptr,  # [B, K+1, V]
    draft_ptr,  # [B, K, V]; None: its rows are not read
    draft_tokens_ptr,  # [B, K]
    temperature_ptr,  # [B] or None
    one_hot_ptr,  # [B] bool, True: drafts are one-hot although draft_ptr is given; or None
    bounds_ptr,  # [B, num_bounds, 2] bounds of target rows, then of draft rows if they are filtered; or None
    draft_bounds_ptr,  # bounds_ptr again if the draft is filtered, else None
    top_ptr,  # [B, num_tops, num_parts] maxima of parts of target rows, then of draft rows; or None
    partial_ptr,  # [B, rows_per_sequence, num_tiles, 2]: K+1 target rows, then K draft rows if they are read
    count_ptr,  # [B], set to 0
    stride_target_b,
    stride_target_k,
    stride_target_v,
    stride_draft_b,
    stride_draft_k,
    stride_draft_v,
    num_drafts,
    vocab_size,
    num_tiles,
    target_rows,  # the number of target rows to read; further programs read the first draft rows
    rows_per_sequence,
    num_bounds,
    num_tops,
    num_parts,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    r = tl.program_id(2)
    tl.store(count_ptr + b, 0, mask=(tile == 0) & (r == 0))
    temperature = load_temperature(temperature_ptr, b)
    inverse_t = inverse_temperature(temperature_ptr, temperature)
    tokens_ptr = draft_tokens_ptr + b * num_drafts
    num_valid = count_valid(tokens_ptr, num_drafts, vocab_size, BLOCK_K)
    row = tl.where(r < target_rows, r, r + (num_drafts + 1 - target_rows))
    target = (target_ptr, stride_target_b, stride_target_k, stride_target_v, bounds_ptr)
    draft = (draft_ptr, stride_draft_b, stride_draft_k, stride_draft_v, draft_bounds_ptr, tokens_ptr, one_hot_ptr)
    sizes = (num_drafts, vocab_size, num_tiles, rows_per_sequence, num_bounds)
    tops = (top_ptr, num_tops, num_parts)
    sum_tile(b, row, tile, partial_ptr, target, draft, sizes, tops, num_valid, temperature, inverse_t, TILE, PART)


def exact_values(args: VerifyArguments, tile: int | None) -> dict[str, Any]:
    """The kernel arguments that `verify_exact` and `verify_block` share, by parameter name."""
    target, draft = args.target_logits, args.draft_logits
    batch, num_rows, vocab_size = target.shape
    num_drafts = num_rows - 1
    rows = num_rows + num_drafts if draft is not None and args.draft_lse is None else num_rows
    tile = tile or launch.tile_size(vocab_size, batch * rows)
    num_tiles = launch.num_tiles(target, tile, draft)
    launch.check_grid("target_logits", target, num_rows + num_drafts, num_tiles)
    filtered_draft = draft if args.filter_draft else None
    bounds = top = found = None
    if args.filters.removes_tokens:
        if filtered_draft is not None and args.draft_lse is not None and args.draft_lse.dim() == 3:
            found = args.draft_lse, torch.empty(batch, num_drafts, dtype=torch.float32, device=target.device)
        bounds, top = filter_bounds(target, args.filters, filtered_draft, args.draft_is_one_hot, found, tile=tile)
    return shared_values(args, tile, num_tiles, rows) | {
        "draft_lse_ptr": launch.contiguous(args.without_bounds().draft_lse) if found is None else found[1],
        "one_hot_ptr": launch.contiguous(args.draft_is_one_hot),
        "bounds_ptr": bounds,
        "draft_bounds_ptr": None if filtered_draft is None else bounds,
        "num_bounds": 0 if bounds is None else bounds.shape[1],
        **top_values(top, tile),
        "count_ptr": torch.empty(batch, dtype=torch.int32, device=target.device),
    }


def run_stats(args: VerifyArguments, values: dict[str, Any], first_rows: int | None = None) -> None:
    """Launch the first kernel of both ops, for all rows, or only for the first `first_rows` rows of target and
    draft."""
    batch, num_rows, _ = args.target_logits.shape
    rows = values["rows_per_sequence"]
    sides = 1 if rows == num_rows else 2
    values = values | {
        "draft_ptr": None if sides == 1 else args.draft_logits,
        "target_rows": first_rows or num_rows,
    }
    grid = (batch, values["num_tiles"], sides * first_rows if first_rows else rows)
    launch.run(stats_kernel, grid, values, launch.stats_warps(values["TILE"]))
