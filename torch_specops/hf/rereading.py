"""Models that read a sequence again once it exceeds the pretraining length of their rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from ..models.base import RowState
from ..models.reading import FORWARD_COST, groups_by_length
from .cache import RaggedCache
from .models import TransformersModel
from .rotary import rereads_at

OTHER_ROTARY = "model: its rotary embedding has become another kind, which is read otherwise; make a new decoder"


class Prefixes(RowState):
    """The tokens of each row, the cache of short prefixes, and the numbers of tokens that each of the caches has read.

    Args:
        switch: the largest length of a short prefix.

    Attributes:
        tokens: [B, capacity] int64.
        num_read: for the short and the long cache, the number of tokens read of each row.
    """

    def __init__(self, num_layers: int, switch: int) -> None:
        self.short = RaggedCache(num_layers)
        self._switch = switch

    def start(self, batch: int, capacity: int, like: Tensor) -> None:
        self.short.start(batch, min(capacity, self._switch), like)
        self.tokens = like.new_zeros(batch, capacity, dtype=torch.int64)
        self.num_read = [0] * batch, [0] * batch

    def clear_rows(self, rows: Tensor) -> None:
        # A new sequence is read from position 0, which resets `num_read`.
        self.short.clear_rows(rows)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        self.short.copy_rows(sources, width)
        self.tokens[:, :width] = self.tokens[sources, :width]
        for num_read in self.num_read:
            num_read[:] = [num_read[source] for source in sources.tolist()]

    def static_tensors(self) -> Sequence[Tensor]:
        return self.short.static_tensors()


class RereadingModel(TransformersModel):
    """A longrope model whose `generate` drops its cache at the switch and reads the sequence again (Phi-3). A token's
    frequencies depend on the length of the prefix that is read.

    There is one cache for short prefixes and one for long ones. A forward reads into each cache the unread tokens that
    its logits need: usually the tokens of the call, and once, at the switch, the whole sequence of a row. Rejected
    drafts across the switch cost no additional reads. Features come from the newest read.

    Attributes:
        switch: the largest length of a short prefix.
    """

    packs_rows = False
    _of_calls: ClassVar[Sequence[str]] = ("_is_long", "_long", "_prefixes")

    def _take_over(self) -> None:
        switch = rereads_at(self.model)
        if switch is None:
            raise ValueError(OTHER_ROTARY)
        self.switch = switch
        super()._take_over()

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._prefixes = Prefixes(self.num_layers, self.switch)
        super().start(batch, capacity, inputs)
        self._long, self._is_long = self._require_cache(), True

    def _row_states(self) -> list[RowState]:
        return [*super()._row_states(), self._prefixes]

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        use_spans: bool,
        num_logits: int | None = None,
        rows: Tensor | None = None,
        width: int | None = None,
    ) -> Tensor:
        members = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
        prefixes = self._prefixes
        prefixes.tokens[members.unsqueeze(1), positions] = tokens
        for row, first in zip(members.tolist(), positions.amin(1).tolist(), strict=True):
            for num_read in prefixes.num_read:
                num_read[row] = min(num_read[row], first)
        wanted = positions[:, -(num_logits or positions.shape[1]) :]
        logits: Tensor | None = None
        for is_long in (False, True):
            here = (wanted >= self.switch) == is_long
            indices = here.any(1).nonzero().flatten()
            firsts = wanted.masked_fill(~here, prefixes.tokens.shape[1])[indices].amin(1).tolist()
            lasts = wanted.masked_fill(~here, -1)[indices].amax(1).tolist()
            num_read, own_rows = prefixes.num_read[is_long], members[indices].tolist()
            begins = [min(num_read[row], first) for row, first in zip(own_rows, firsts, strict=True)]
            counts = [last + 1 - begin for begin, last in zip(begins, lasts, strict=True)]
            for group in groups_by_length(counts, FORWARD_COST):
                longest, group = counts[group[0]], sorted(group)
                # A row with fewer unread tokens than the longest of the group reads some tokens again.
                begin = torch.tensor([[max(lasts[each] + 1 - longest, 0)] for each in group], device=tokens.device)
                at = begin + torch.arange(longest, device=tokens.device)
                num_wanted = longest - min(firsts[each] - int(at[i, 0]) for i, each in enumerate(group))
                index = indices[group]
                chosen = None if rows is None and len(group) == len(tokens) else members[index]
                texts = prefixes.tokens[members[index].unsqueeze(1), at]
                with self._reading(is_long) as capacity:
                    whole = None if width is None else min(width, capacity)
                    part = super().read(texts, at, use_spans, num_wanted, chosen, whole)
                for each in group:
                    num_read[own_rows[each]] = lasts[each] + 1
                places = (wanted[index] - at[:, -num_wanted].unsqueeze(1)).clamp(0, num_wanted - 1)
                found = part.gather(1, places.unsqueeze(2).expand(-1, -1, part.shape[2]))
                logits = part.new_zeros(*wanted.shape, part.shape[2]) if logits is None else logits
                logits[index] = torch.where(here[index].unsqueeze(2), found, logits[index])
        assert logits is not None
        return logits

    @contextmanager
    def _reading(self, is_long: bool) -> Iterator[int]:
        """Inside the block, the cache for long or short prefixes is in use. Yields its capacity."""
        self._cache, self._is_long = self._long if is_long else self._prefixes.short, is_long
        if self._features is not None:
            self._features.cache = self._cache
        try:
            yield self._require_cache().capacity
        finally:
            self._cache, self._is_long = self._long, True

    def _lengths_at(self, positions: Tensor) -> Tensor:
        return torch.full_like(positions, self.switch + self._is_long)
