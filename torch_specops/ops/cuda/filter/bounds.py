"""Find the bounds of rows of logits under top_k, top_p and min_p, without sorting. docs/math.md defines the filters,
and docs/design.md explains why the search works this way.

Two numbers describe the kept tokens: the lowest kept logit (`cut`), and the lowest kept id among the tokens with that
logit (`first_at_cut`). The bounds take 8 bytes per row, and other kernels mask their loads by the bounds. Nothing of
size [.., V] is written, sorted or converted. There are two launches for any filters and any dtype:
1. `group_kernel`, one program per (row, tile): for each group of 64 adjacent entries, it stores the maximum of each
   half. If the row has top_p without top_k, it also stores the sum of the exponentials of the group.
2. `cut_kernel`, one program per row: from these numbers it finds a key (a logit as an integer) at or below the cut, and
   selects the halves whose maximum is at least that key. It lists the entries of these halves that are at least that
   key, and finds the cut in the list by bisection. If the selected halves are most of the row, the kernel first
   estimates from a sample which keys are near the cut. A wrong estimate costs another pass over the halves.

Bytes: each row once, V * s, and then the selected halves again; for top_k these are little more than k halves. The
total in reads of a row of 128,256 logits:
    top_k = 50, with or without the others  1.01
    top_k = 1000                            1.32
    top_p alone, 0.9 in some 100 tokens     1.01 to 1.04
    top_p alone, 0.9 in thousands           2.1
    min_p alone                             1
With top_p after a top_k of V / 16 or more, the total is 4 to 8. These are not read: greedy rows, rows whose filters are
off, and rows without a distribution (a negative or NaN temperature, or a NaN top_p or min_p).

A kernel that then sums rows or scores their tokens does not read them again. It reads the maxima (3.1 % of the size of
a row) and the halves in which a token is kept (`load_kept_parts`); of top_k tokens these are at most top_k halves. Rows
that the search did not read are read completely.

Scratch for each group of 64 entries: 2 s + 8 bytes, 4 more with top_p, and 4 s + 16 for the list. That is 31 % of the
size of bfloat16 rows. The first kernel writes 3.1 % of the size of such a row (6.2 % with top_p), which the second
reads once. Of the lists, only the used entries are written.

Sums are taken in a fixed order and without atomics, so results are bitwise repeatable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...arguments import Filters
from .. import launch
from .groups import group_kernel
from .search import cut_kernel

# A group has this many adjacent entries of a row, and this many parts. The second kernel reads or skips a part as a
# whole; 32 entries of a 16-bit type are two sectors of memory.
GROUP = 64
PARTS = 2
# The list of a row has room for ROOM * (number of groups of the row) entries.
ROOM = 4
# Rows of up to this many groups use 8 warps. With 8 warps for longer or strided rows, or with 4 warps, ptxas spills
# registers.
FEW_GROUPS = 2048


def cut_warps(block_g: int, is_contiguous: bool) -> int:
    return 8 if block_g <= FEW_GROUPS and is_contiguous else 16


def group_size(tile: int) -> int:
    return min(GROUP, tile // 4)


def part_size(tile: int) -> int:
    # A part has at least 8 entries, which are 16 bytes of a 16-bit type.
    return max(group_size(tile) // PARTS, 8)


def filter_bounds(
    logits: Tensor,
    filters: Filters,
    draft_logits: Tensor | None = None,
    draft_is_one_hot: Tensor | None = None,
    found: tuple[Tensor, Tensor] | None = None,
    *,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """The bounds [B, R, 2] float32 of logits [B, R, V] under filters [B]: the cut, and the lowest kept id at the cut,
    whose bits are stored as a float32. With `draft_logits` [B, K, V] the bounds are [B, R + K, 2], and the draft's rows
    come last. Those of sequences with `draft_is_one_hot` [B] are not read, and have no bounds.

    If `found` is given, the draft's rows are not searched. It has a `draft_lse` with bounds [B, K, 3], of which the
    bounds are copied to the result, and a tensor [B, K] that the logsumexp is copied to.

    Also returns the maxima of the parts of rows, [B, R + K, number of parts], or [B, R, number of parts] if the draft's
    rows had a separate search or none. `load_kept_parts` uses them."""
    batch, num_rows, _ = logits.shape
    num_drafts = 0 if draft_logits is None else draft_logits.shape[1]
    bounds = torch.empty(batch, num_rows + num_drafts, 2, dtype=torch.float32, device=logits.device)
    filters = Filters(*map(launch.contiguous, filters))
    draft = draft_logits if num_drafts > 0 and found is None else None
    one_hot = None if draft is None else launch.contiguous(draft_is_one_hot)
    if draft is not None and (draft.dtype != logits.dtype or draft.stride(2) != logits.stride(2)):
        # Search the draft's rows in a separate launch, because one launch handles only one dtype and stride.
        temperature = filters.temperature
        if one_hot is not None:
            # A row with temperature 0 is not read.
            temperature = (~one_hot).float() if temperature is None else temperature.masked_fill(one_hot, 0.0)
        _search(draft, None, None, filters._replace(temperature=temperature), bounds, num_rows, tile)
        draft = one_hot = None
    return bounds, _search(logits, draft, one_hot, filters, bounds, 0, tile, found)


def top_values(top: Tensor | None, tile: int) -> dict[str, Any]:
    """The kernel arguments of `load_kept_parts`, by parameter name, from the second result of `filter_bounds`."""
    _, num_tops, num_parts = (0, 0, 0) if top is None else top.shape
    return {"top_ptr": top, "num_tops": num_tops, "num_parts": num_parts, "PART": part_size(tile)}


def _search(
    logits: Tensor,
    draft_logits: Tensor | None,
    one_hot: Tensor | None,
    filters: Filters,
    bounds: Tensor,
    first_row: int,
    tile: int,
    found: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Write the bounds of the rows of both tensors to `bounds`, in each sequence from row `first_row` on. Returns the
    maxima of the parts of these rows."""
    batch, num_rows, vocab_size = logits.shape
    num_drafts = 0 if draft_logits is None else draft_logits.shape[1]
    num_tiles = launch.num_tiles(logits, tile)
    group, part = group_size(tile), part_size(tile)
    num_groups, num_parts = num_tiles * (tile // group), num_tiles * (tile // part)
    room = ROOM * num_groups

    def scratch(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(batch, num_rows + num_drafts, size, dtype=dtype, device=logits.device)

    top = scratch(num_parts, dtype=logits.dtype)
    block_g = launch.padded_power_of_2(num_groups)
    values = {
        "logits_ptr": logits,
        "draft_ptr": draft_logits,
        "one_hot_ptr": one_hot,
        "temperature_ptr": filters.temperature,
        "top_k_ptr": filters.top_k,
        "top_p_ptr": filters.top_p,
        "min_p_ptr": filters.min_p,
        "top_ptr": top,
        "sum_ptr": None if filters.top_p is None else scratch(num_groups, dtype=torch.float32),
        "part_ptr": scratch(num_parts, dtype=torch.int32),
        "token_ptr": scratch(room, dtype=torch.int32),
        "value_ptr": scratch(room, dtype=logits.dtype),
        "found_ptr": None if found is None else launch.contiguous(found[0]),
        "lse_ptr": None if found is None else found[1],
        "bounds_ptr": bounds,
        **launch.logits_strides(("stride_b", "stride_r", "stride_v"), logits),
        **launch.logits_strides(("stride_draft_b", "stride_draft_k", "stride_draft_v"), draft_logits),
        "num_rows": num_rows,
        "num_drafts": num_drafts,
        "first_row": first_row,
        "num_bounds": bounds.shape[1],
        "vocab_size": vocab_size,
        "num_tiles": num_tiles,
        "num_groups": num_groups,
        "room": room,
        "TILE": tile,
        "GROUP": group,
        "PART": part,
        "PART_SHIFT": (part * logits.element_size() // 16).bit_length() - 1,
        "BLOCK_G": block_g,
    }
    launch.run(group_kernel, (batch, num_tiles, num_rows + num_drafts), values, launch.stats_warps(tile))
    written_rows = num_rows + num_drafts if found is None else bounds.shape[1]
    launch.run(cut_kernel, (batch, written_rows), values, cut_warps(block_g, logits.stride(2) == 1))
    return top
