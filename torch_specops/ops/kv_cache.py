"""A static KV cache for rows of different lengths.

The keys and values of the token at position j are in slot j. A forward writes the slots of the tokens it reads, and
each token attends to the slots up to its position. A rejected draft is not removed from the cache: the next forward
overwrites its slot, and until then no token attends to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tracing import normal_tensors


@dataclass(frozen=True)
class Window:
    """The window of tokens that a token attends to: itself and the size - 1 tokens before it. With `in_chunks`, it is
    itself and the earlier tokens of its chunk, where chunks begin at multiples of the size."""

    size: int
    in_chunks: bool = False

    def first(self, positions: Tensor) -> Tensor:
        """The position, >= 0, of the first token that the token at each position attends to."""
        return positions // self.size * self.size if self.in_chunks else (positions - self.size + 1).clamp(min=0)


class RaggedKeyValues:
    """The keys and values of one attention layer, in buffers whose address and shape never change, as CUDA graphs
    require.

    Args:
        keys, values: [B, heads, n, head_dim], examples that define the shape (except n), dtype and device of the
            buffers.
        capacity: the number of slots per sequence.
    """

    @normal_tensors()
    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        self.keys = keys.new_zeros(keys.shape[0], keys.shape[1], capacity, keys.shape[3])
        self.values = values.new_zeros(values.shape[0], values.shape[1], capacity, values.shape[3])

    def fits(self, keys: Tensor, values: Tensor) -> bool:
        """True if keys and values [A, heads, n, head_dim] can be written to the buffers."""
        return all(
            (new.shape[1], new.shape[3], new.dtype, new.device)
            == (buffer.shape[1], buffer.shape[3], buffer.dtype, buffer.device)
            for buffer, new in ((self.keys, keys), (self.values, values))
        )

    def clear(self, rows: Tensor | None = None) -> None:
        """Zero the slots of the sequences `rows` [A]; None = all. Masked slots must be finite too, because attention
        multiplies their values by 0, and 0 times NaN is NaN."""
        for buffer in (self.keys, self.values):
            if rows is None:
                buffer.zero_()
            else:
                buffer.index_fill_(0, rows, 0)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        """Copy the first `width` slots of sequence sources[i] to sequence i, for all i."""
        for buffer in (self.keys, self.values):
            buffer[:, :, :width] = buffer[sources, :, :width]

    def write(self, keys: Tensor, values: Tensor, slots: Tensor | int, rows: Tensor | None = None) -> None:
        """Write keys and values [A, heads, n, head_dim] to slots [A, n] of the sequences `rows`. `rows` has the shape
        [A] or [A, 1], or [A, n] if slots of one row belong to different sequences; None = all sequences. If `slots` is
        an int, write to n consecutive slots from there on in all sequences."""
        if isinstance(slots, int):
            # `narrow` and `copy_` take a quarter of the time of an index assignment.
            for buffer, new in ((self.keys, keys), (self.values, values)):
                buffer.narrow(2, slots, new.shape[2]).copy_(new)
            return
        if rows is None:
            rows = torch.arange(slots.shape[0], device=slots.device)
        rows = rows.unsqueeze(1) if rows.dim() == 1 else rows
        # Use an index assignment, because Inductor writes it in place, and turns `scatter_` into two copies of the
        # whole buffer.
        for buffer, new in ((self.keys, keys), (self.values, values)):
            buffer[rows, :, slots] = new.transpose(1, 2)

    def read(self, width: int | None = None, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read keys and values [A, heads, width, head_dim] of the first `width` slots of the sequences `rows` [A]; None
        = all.

        Returns views of the buffers if `rows` is None, otherwise copies.
        """
        width = self.keys.shape[2] if width is None else width
        # Use `narrow`, because it takes half the time of indexing.
        keys, values = self.keys.narrow(2, 0, width), self.values.narrow(2, 0, width)
        return (keys, values) if rows is None else (keys.index_select(0, rows), values.index_select(0, rows))


def emptied(cache: RaggedKeyValues | None, keys: Tensor, capacity: int) -> RaggedKeyValues:
    """An empty cache for keys and values like `keys`. If the given cache already has the shape [B, heads, capacity,
    head_dim], it is cleared and returned, so that its address does not change."""
    if cache is not None and cache.keys.shape[:3:2] == (keys.shape[0], capacity) and cache.fits(keys, keys):
        cache.clear()
        return cache
    return RaggedKeyValues(keys, keys, capacity)


def visible_slots(
    positions: Tensor, slot_positions: Tensor, window: Window | None = None, own_text: Tensor | None = None
) -> Tensor:
    """[B, 1, n, S] bool: True where a token attends to a slot.

    Args:
        positions: [B, n] int64.
        slot_positions: [B or 1, S] int64, the position of the token in each slot.
        window: the window that a token attends to; None = all tokens up to its position.
        own_text: [B, n, S] bool, for each token the slots that belong to its sequence; None = all slots up to its
            position.
    """
    slot_positions = slot_positions.unsqueeze(1)
    visible = slot_positions <= positions.unsqueeze(2) if own_text is None else own_text
    if window is not None:
        visible = visible & (slot_positions >= window.first(positions).unsqueeze(2))
    return visible.unsqueeze(1)
