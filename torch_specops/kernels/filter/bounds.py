"""The bounds of rows of logits under top_k, top_p and min_p, without sorting: docs/math.md has the law, docs/design.md
why the search is made so.

Two numbers say what a row keeps: the lowest logit (`cut`), and the lowest id that is kept of the tokens with it
(`first_at_cut`). They are 8 bytes a row, and other kernels apply them to what they load. Nothing of size [.., V] is
written, sorted or converted. Launches for bfloat16 and float16 (float32):
    top_k                   4 (8) narrow + 1 finish
    top_p                   4 (8) narrow + 1 finish
    both, with or without min_p   8 (16) narrow + 1 finish
    min_p                   1 (1) narrow + 1 finish
1. `narrow_kernel`, one program per (row, tile): combines the sums of the pass before in a fixed order (every program of
   a row finds the same bucket), then sums up the entries, or their weights, of its tile in each of 16 buckets.
2. `finish_kernel`, one program per row: the cut from the last pass, whose buckets are single keys and are counted per
   tile; so only the tile in which the first kept tie lies is read once more.

Bytes: a pass reads a row at most once, V * s. It skips tiles without an entry in the bucket, and rows whose entries
left all lie in one bucket of the pass. So the passes of top_p after top_k read only tiles in which top_k left
something. Greedy rows, rows without a lawful temperature and rows whose filters are off are not read. There are 16
buckets, not 4 or 8, because the time of a small batch is that of its launches, and 16 need the fewest.
Scratch: 132 bytes per (row, tile) and 64 per row. No float atomics: bitwise repeatable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...arguments import Filters
from .. import launch
from .search import BUCKETS, ENTRIES, MASS, NOTHING, finish_kernel, narrow_kernel

# Key bits that a pass settles.
PASS_BITS = 4


def filter_bounds(logits: Tensor, filters: Filters, draft_logits: Tensor | None = None, *, tile: int) -> Tensor:
    """Bounds [B, R, 2] float32 of the rows of logits [B, R, V] under filters [B]: the cut, and the first id kept at it
    as the bits of a float32. With `draft_logits` [B, K, V] the bounds are [B, R + K, 2], its rows behind the others."""
    batch, num_rows, _ = logits.shape
    num_drafts = 0 if draft_logits is None else draft_logits.shape[1]
    bounds = torch.empty(batch, num_rows + num_drafts, 2, dtype=torch.float32, device=logits.device)
    filters = Filters(*map(launch.contiguous, filters))
    if draft_logits is None or num_drafts == 0:
        _search(logits, None, filters, bounds, 0, tile)
    elif draft_logits.dtype == logits.dtype and draft_logits.stride(2) == logits.stride(2):
        _search(logits, draft_logits, filters, bounds, 0, tile)
    else:
        _search(logits, None, filters, bounds, 0, tile)
        _search(draft_logits, None, filters, bounds, num_rows, tile)
    return bounds


def _search(
    logits: Tensor, draft_logits: Tensor | None, filters: Filters, bounds: Tensor, first_row: int, tile: int
) -> None:
    """Write the bounds of the rows of both tensors, in each sequence from row `first_row` on."""
    batch, num_rows, vocab_size = logits.shape
    num_drafts = 0 if draft_logits is None else draft_logits.shape[1]
    rows = batch * (num_rows + num_drafts)
    num_tiles = launch.num_tiles(logits, tile)

    def scratch(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    # A pass writes one and reads what the pass before wrote into the other.
    amounts = [scratch(num_tiles, BUCKETS.value, dtype=torch.float32) for _ in range(2)]
    searches = [scratch(4, dtype=torch.float64) for _ in range(2)]
    values = {
        "logits_ptr": logits,
        "draft_ptr": draft_logits,
        "temperature_ptr": filters.temperature,
        "top_k_ptr": filters.top_k,
        "top_p_ptr": filters.top_p,
        "min_p_ptr": filters.min_p,
        "top_ptr": scratch(num_tiles, dtype=torch.int32),
        "bounds_ptr": bounds,
        **launch.logits_strides(("stride_b", "stride_r", "stride_v"), logits),
        **launch.logits_strides(("stride_draft_b", "stride_draft_k", "stride_draft_v"), draft_logits),
        "num_rows": num_rows,
        "num_drafts": num_drafts,
        "first_row": first_row,
        "num_bounds": bounds.shape[1],
        "vocab_size": vocab_size,
        "num_tiles": num_tiles,
        "TILE": tile,
        "BLOCK_T": launch.lanes(num_tiles),
    }
    num_warps = launch.num_warps(tile)
    # Of each pass: what is counted, and the key bits that it leaves undecided.
    shifts = range(8 * logits.element_size() - PASS_BITS, -1, -PASS_BITS)
    counted = [ENTRIES.value] * (filters.top_k is not None) + [MASS.value] * (filters.top_p is not None)
    passes = [(search, shift) for search in counted for shift in shifts] or [(NOTHING.value, 0)]
    for index, (search, shift) in enumerate(passes):
        previous_search, previous_shift = passes[max(index - 1, 0)]
        values |= {
            "previous_ptr": amounts[(index + 1) % 2] if index > 0 else None,
            "current_ptr": amounts[index % 2],
            "previous_search_ptr": searches[(index + 1) % 2] if index > 0 else None,
            "search_ptr": searches[index % 2],
            "index": index,
            "search": search,
            "shift": shift,
            "previous_search": previous_search,
            "previous_shift": previous_shift,
        }
        launch.run(narrow_kernel, (batch, num_tiles, num_rows + num_drafts), values, num_warps)
    values["amounts_ptr"] = values["current_ptr"]
    launch.run(finish_kernel, (batch, num_rows + num_drafts), values, num_warps)
