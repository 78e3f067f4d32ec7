"""The tree of beams that beam search keeps in one row of a cache.

Each token that was read is a node with a separate slot in the row's cache. Each beam has the set of slots of its
tokens. Reordering beams reorders only these sets; keys and values never move. A slot that no beam sees is free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.base import TreeModel, readable_positions

# The number of slots that a forward attends to is a multiple of this.
WIDTH_MULTIPLE = 32


@dataclass(frozen=True)
class Level:
    """The nodes of one depth: their tokens [B, n], their slots [B, n], and the slots that each node sees [B, n, S].
    Parents [B, n] are indices into the level above; at depth 0 they are indices of beams."""

    tokens: Tensor
    parents: Tensor
    slots: Tensor
    visible: Tensor

    def index_of(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Find nodes by parent [B, w] and token [B, w]. Returns whether each node exists, and its index."""
        same = (self.parents.unsqueeze(1) == parents.unsqueeze(2)) & (self.tokens.unsqueeze(1) == tokens.unsqueeze(2))
        return same.any(2), same.byte().argmax(2)


class BeamTree:
    """The w running beams of each of B rows, and the slots that hold their tokens.

    Args:
        tokens: [B, P] int64, the prompts. All tokens of a prompt but the newest have been read, into the slots of their
            positions.
        lengths: [B] int64 >= 1.
        num_beams: w, the number of beams.
        num_slots: the number of slots per row, S.

    Attributes:
        tokens: [B, w] int64, the newest token of each beam, which has not been read.
        positions: [B] int64, the position of the newest tokens.
        levels: the levels of the round so far, from the newest tokens down.
        width: no beam sees a slot with this index or a larger one.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, num_beams: int, num_slots: int) -> None:
        batch, device = tokens.shape[0], tokens.device
        self.num_slots = num_slots
        self.positions = lengths - 1
        self.tokens = tokens.gather(1, self.positions.unsqueeze(1)).expand(-1, num_beams)
        slot = torch.arange(num_slots, device=device)
        self._sees = (slot < self.positions.unsqueeze(1)).unsqueeze(1).repeat(1, num_beams, 1)
        self._slot_positions = slot.repeat(batch, 1)
        self._parent_tokens = torch.zeros_like(self.tokens)
        self._parent_slots = torch.zeros_like(self.tokens)
        self.width = 0
        self._free = self._parent_slots
        self.levels: list[Level] = []

    def begin(self, num_nodes: int, num_live: int) -> None:
        """Start a round: the newest tokens become the first level. The round has at most `num_nodes` nodes, and at most
        `num_live` slots of a row are in use."""
        wanted = -(-(num_live + num_nodes) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        self.width = min(max(self.width, wanted), self.num_slots)
        is_taken = self._sees[:, :, : self.width].any(1)
        self._free = is_taken.byte().argsort(dim=1, stable=True)[:, :num_nodes]
        parents = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        self.levels = []
        self._add(self.tokens, parents, self._sees[:, :, : self.width])

    def grow(self, parents: Tensor, tokens: Tensor) -> None:
        """Add a level: nodes with `tokens` [B, n] below the nodes `parents` [B, n] of the last level."""
        self._add(tokens, parents, rows_of(self.levels[-1].visible, parents))

    def read(self, model: TreeModel, levels: list[Level], with_parents: bool = False) -> Tensor:
        """Let a model read the nodes of some levels. Returns their logits [B, n, V], level by level. If `with_parents`,
        the model also reads the tokens before the newest tokens, which it has not read yet."""
        tokens, slots, visible = _nodes(levels)
        num_nodes = tokens.shape[1]
        if with_parents:
            # Let every node see itself, even in a row that has ended and sees no other slot.
            parents = self._sees[:, :, : self.width].scatter(2, self._parent_slots.unsqueeze(2), True)
            tokens = torch.cat([self._parent_tokens, tokens], 1)
            slots = torch.cat([self._parent_slots, slots], 1)
            visible = torch.cat([parents, visible], 1)
        slot_positions = self._slot_positions[:, : self.width]
        positions = readable_positions(model, slot_positions.gather(1, slots))
        return model.forward_tree(tokens, positions, slots, visible, slot_positions)[:, -num_nodes:]

    def move(self, parents: Tensor, tokens: Tensor, num_levels: Tensor, done: Tensor) -> None:
        """End the round. The new beams continue the nodes `parents` [B, w] with `tokens` [B, w]; `parents` are indices
        over all levels. `num_levels` [B] tokens were decided. Rows that are `done` [B] free their slots."""
        node_tokens, slots, visible = _nodes(self.levels)
        self._parent_tokens, self._parent_slots = node_tokens.gather(1, parents), slots.gather(1, parents)
        self._sees[:, :, : self.width] = rows_of(visible, parents) & ~done[:, None, None]
        self.tokens = tokens
        self.positions = self.positions + num_levels

    def num_live(self) -> Tensor:
        """[B] the number of slots that some beam sees."""
        return self._sees.any(1).sum(1)

    def _add(self, tokens: Tensor, parents: Tensor, ancestors: Tensor) -> None:
        first = sum(level.tokens.shape[1] for level in self.levels)
        slots = self._free[:, first : first + tokens.shape[1]]
        positions = (self.positions + len(self.levels)).unsqueeze(1).expand_as(slots)
        self._slot_positions.scatter_(1, slots, positions)
        self.levels.append(Level(tokens, parents, slots, ancestors.scatter(2, slots.unsqueeze(2), True)))


def _nodes(levels: list[Level]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [B, n], slots [B, n] and visible [B, n, S] of all nodes."""
    parts = zip(*((level.tokens, level.slots, level.visible) for level in levels), strict=True)
    tokens, slots, visible = (torch.cat(part, 1) for part in parts)
    return tokens, slots, visible


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Gather rows: values [B, n, N] and index [B, m] give [B, m, N]."""
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))
