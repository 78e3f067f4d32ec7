"""The tree of texts that beam search keeps in one row of a cache.

Beams share most of their text, so a row's beams are a tree: each token that was read is a node with a slot of its own
in the row's cache, and each beam knows which slots hold its text. A forward reads many nodes at once, and the mask
shows each node its own ancestors. Beams are reordered by reordering what they see; keys and values never move. A slot
that no beam sees is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..drafts import LanguageModel

__all__ = ["BeamTree", "Level", "TreeModel"]

# Forwards look at a multiple of so many slots.
WIDTH_MULTIPLE = 32


@runtime_checkable
class TreeModel(LanguageModel, Protocol):
    """A language model that can read several continuations of a row in one forward."""

    def forward_tree(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """Read nodes of a tree; return logits [B, n, V].

        Args:
            tokens: [B, n] int64.
            positions: [B, n] int64, their positions in their texts.
            slots: [B, n] int64, where their keys and values are written. A slot may repeat only with the same node.
            visible: [B, n, S] bool, the slots that hold a node's own text, itself included; no other slot, and none
                from S on, has a part in it.
            slot_positions: [B, S] int64, the position of what each slot holds.
        """
        ...


@dataclass(frozen=True)
class Level:
    """The nodes of one depth.

    Args:
        tokens: [B, n] int64.
        parents: [B, n] int64, indices into the level before; at depth 0 the beam itself.
        slots: [B, n] int64.
        visible: [B, n, S] bool.
    """

    tokens: Tensor
    parents: Tensor
    slots: Tensor
    visible: Tensor

    def index_of(self, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes [B, w] by parent and token: whether there are such, and where."""
        same = (self.parents.unsqueeze(1) == parents.unsqueeze(2)) & (self.tokens.unsqueeze(1) == tokens.unsqueeze(2))
        return same.any(2), same.byte().argmax(2)


class BeamTree:
    """The texts of w running beams in each of B rows, and the slots that hold them.

    Args:
        tokens: [B, P] int64, the prompts; all but the newest token of each stand in the slots of their positions.
        lengths: [B] int64 >= 1.
        num_beams: w.
        num_slots: S.

    Attributes:
        tokens: [B, w] int64, the newest token of each beam, not read yet.
        positions: [B] int64, its position.
        width: all slots that any beam sees are below it.
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
        self._levels: list[Level] = []

    def begin(self, num_nodes: int, num_live: int) -> Level:
        """The level of the newest tokens; room for `num_nodes` nodes, theirs included, where `num_live` slots at most
        are taken in any row."""
        wanted = -(-(num_live + num_nodes) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        self.width = min(max(self.width, wanted), self.num_slots)
        is_taken = self._sees[:, :, : self.width].any(1)
        self._free = is_taken.byte().argsort(dim=1, stable=True)[:, :num_nodes]
        parents = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        self._levels = []
        return self._add(self.tokens, parents, self._sees[:, :, : self.width])

    def grow(self, parents: Tensor, tokens: Tensor) -> Level:
        """The next level: nodes [B, n] below `parents` [B, n] of the last one."""
        above = self._levels[-1].visible
        return self._add(tokens, parents, above.gather(1, parents.unsqueeze(2).expand(-1, -1, self.width)))

    def read(self, model: TreeModel, levels: list[Level], with_parents: bool = False) -> Tensor:
        """Logits [B, n, V] of the nodes of some levels, one after another.

        Args:
            with_parents: the model has not read what stands before the newest tokens, and reads that first.
        """
        tokens = torch.cat([level.tokens for level in levels], 1)
        slots = torch.cat([level.slots for level in levels], 1)
        visible = torch.cat([level.visible for level in levels], 1)
        num_nodes = tokens.shape[1]
        if with_parents:
            # A row that has ended sees nothing; even so a node must see itself.
            parents = self._sees[:, :, : self.width].scatter(2, self._parent_slots.unsqueeze(2), True)
            tokens = torch.cat([self._parent_tokens, tokens], 1)
            slots = torch.cat([self._parent_slots, slots], 1)
            visible = torch.cat([parents, visible], 1)
        slot_positions = self._slot_positions[:, : self.width]
        positions = slot_positions.gather(1, slots)
        return model.forward_tree(tokens, positions, slots, visible, slot_positions)[:, -num_nodes:]

    def move(self, parents: Tensor, tokens: Tensor, num_levels: Tensor, done: Tensor) -> None:
        """Make the beams that follow `parents` [B, w], counted over all levels, with `tokens` [B, w]."""
        levels = self._levels
        visible = torch.cat([level.visible for level in levels], 1)
        self._parent_tokens = torch.cat([level.tokens for level in levels], 1).gather(1, parents)
        self._parent_slots = torch.cat([level.slots for level in levels], 1).gather(1, parents)
        sees = visible.gather(1, parents.unsqueeze(2).expand(-1, -1, self.width))
        # A row that has ended needs no slots.
        self._sees[:, :, : self.width] = sees & ~done[:, None, None]
        self.tokens = tokens
        self.positions = self.positions + num_levels

    def num_live(self) -> Tensor:
        """[B] slots that some beam sees."""
        return self._sees.any(1).sum(1)

    def _add(self, tokens: Tensor, parents: Tensor, ancestors: Tensor) -> Level:
        first = sum(level.tokens.shape[1] for level in self._levels)
        slots = self._free[:, first : first + tokens.shape[1]]
        positions = (self.positions + len(self._levels)).unsqueeze(1).expand_as(slots)
        self._slot_positions.scatter_(1, slots, positions)
        level = Level(tokens, parents, slots, ancestors.scatter(2, slots.unsqueeze(2), True))
        self._levels.append(level)
        return level
