"""Reading the rows of a batch in groups, so that rows with few tokens are not padded to the longest.

This pays in eager steps on a CPU, where the time of a forward grows with the number of tokens: for a batch of eight,
eleven tokens per row take several times as long as one. Without groups, one row with drafts would make every other row
read as many tokens, and rows that have ended would be read until the whole batch has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafts.rows import FORWARD_COST, RowReader

__all__ = ["read_ragged", "row_groups"]

# Groups must cost less than this share of the padded forward, because their rows are gathered from the cache.
MAX_RELATIVE_COST = 0.75

# Rows that are read together, and how many tokens of each.
Group = tuple[list[int], int]


def row_groups(num_proposed: Sequence[int], active: Sequence[bool]) -> list[Group] | None:
    """The groups in which to read the active rows: all together, or rows with drafts apart from those without.

    Args:
        num_proposed: drafts of each row.
        active: whether each row has not ended.

    Returns:
        The cheaper grouping; None if one padded forward over all rows is about as cheap.
    """
    width = max(num_proposed, default=0) + 1
    rows = [row for row, is_active in enumerate(active) if is_active]
    drafting = [row for row in rows if num_proposed[row] > 0]
    others = [row for row in rows if num_proposed[row] == 0]
    # If one of the two groups is empty, the single group is the cheaper one.
    groups = min(([(rows, width)], [(drafting, width), (others, 1)]), key=_cost)
    padded = [(list(range(len(active))), width)]
    return groups if rows and _cost(groups) <= MAX_RELATIVE_COST * _cost(padded) else None


def _cost(groups: Sequence[Group]) -> int:
    return sum(len(rows) * width + FORWARD_COST for rows, width in groups)


def read_ragged(target: RowReader, tokens: Tensor, positions: Tensor, num_proposed: Tensor, finished: Tensor) -> Tensor:
    """[B, n, V] logits of each row's newest token and drafts.

    Rows that have ended, and padding among the drafts, may not be read; their logits are then 0.

    Args:
        tokens, positions: [B, n] int64, the newest token and the drafts.
        num_proposed: [B] int64, drafts of each row.
        finished: [B] bool.
    """
    groups = row_groups(num_proposed.tolist(), (~finished).tolist())
    if groups is None:
        return target.forward(tokens, positions, tokens.shape[1])
    logits = None
    for members, width in groups:
        rows = torch.tensor(members)
        part = target.forward(tokens[rows, :width], positions[rows, :width], width, rows)
        if logits is None:
            logits = part.new_zeros(*tokens.shape, part.shape[2])
        logits[rows, :width] = part
    assert logits is not None
    return logits
