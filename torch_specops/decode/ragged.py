"""Reading drafts where a forward takes the time of the tokens it reads: without the padding of a batch.

On a CPU, eagerly, a forward over a batch of eight takes several times as long for eleven tokens a row as for one. So a
single row with drafts would make every other row read as many, and a row that has ended would be read to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..drafts import LanguageModel

__all__ = ["RowReader", "as_row_reader", "groups_of", "read_ragged"]

# What a forward costs beside its tokens, in tokens: each reads all weights. SmolLM2 135M in float32: 23 with one
# thread, 36 with two.
FORWARD_COST = 32
# Rows apart from the others are gathered from the cache, so a little that is saved is nothing saved.
MOST_OF_PADDED = 0.75


@runtime_checkable
class RowReader(LanguageModel, Protocol):
    """A language model that can read some rows of its batch and leave the others alone."""

    @property
    def reads_rows(self) -> bool:
        """Whether it can: a model may, and one that wraps it not."""
        ...

    def forward(
        self, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """As `LanguageModel.forward`, for the sequences `rows` [A] int64, which differ; tokens and positions are
        [A, n]. None = all."""
        ...


def as_row_reader(model: LanguageModel) -> RowReader | None:
    return model if isinstance(model, RowReader) and model.reads_rows else None


def groups_of(num_proposed: Sequence[int], active: Sequence[bool]) -> list[tuple[list[int], int]] | None:
    """Which rows to read together, and how many tokens of each: those that have not ended, and the ones with drafts
    apart from the others where that pays. None = all of them, as they are.

    Args:
        num_proposed: drafts of each row.
        active: whether it has not ended.
    """
    width = max(num_proposed, default=0) + 1
    rows = [row for row, is_active in enumerate(active) if is_active]
    drafting = [row for row in rows if num_proposed[row] > 0]
    others = [row for row in rows if num_proposed[row] == 0]
    groups = min(([(rows, width)], [(drafting, width), (others, 1)]), key=_cost)
    return groups if rows and _cost(groups) <= MOST_OF_PADDED * _cost([(active, width)]) else None


def _cost(groups: Sequence[tuple[Sequence[Any], int]]) -> int:
    """In tokens. Of two groups one may be empty, and then is no cheaper than the other alone."""
    return sum(len(rows) * width + FORWARD_COST for rows, width in groups)


def read_ragged(target: RowReader, tokens: Tensor, positions: Tensor, num_proposed: Tensor, finished: Tensor) -> Tensor:
    """[B, n, V] logits of the newest token and the drafts [B, n]; 0 where nothing was read, because nobody asks."""
    batch, width = tokens.shape
    groups = groups_of(num_proposed.tolist(), (~finished).tolist())
    if groups is None:
        return target.forward(tokens, positions, width)
    parts = []
    for members, count in groups:
        rows = torch.tensor(members)
        parts.append((rows, target.forward(tokens[rows, :count], positions[rows, :count], count, rows)))
    logits = parts[0][1].new_zeros(batch, width, parts[0][1].shape[2])
    for rows, part in parts:
        logits[rows, : part.shape[1]] = part
    return logits
