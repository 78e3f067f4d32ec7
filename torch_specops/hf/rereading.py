"""Models that read a sequence again once it exceeds the pretraining length of their rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from ..models.reading import FORWARD_COST, groups_by_length
from .cache import RaggedCache, RaggedLayer
from .models import TransformersModel
from .rotary import rereads_at

OTHER_ROTARY = "model: its rotary embedding has become another kind, which is read otherwise; make a new decoder"


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
    _caches: tuple[RaggedCache, ...] = ()
    _of_calls: ClassVar[Sequence[str]] = ("_caches", "_is_long", "_num_read", "_texts")

    def _take_over(self) -> None:
        switch = rereads_at(self.model)
        if switch is None:
            raise ValueError(OTHER_ROTARY)
        self.switch = switch
        super()._take_over()

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        # A fork during a forward may have left the cache of short prefixes here.
        self._cache = self._caches[True] if self._caches else None
        super().start(batch, capacity, inputs)
        # A short prefix has at most `switch` tokens.
        short = RaggedCache(batch, min(capacity, self.switch), self.num_layers)
        self._caches = short, self._require_cache()
        self._is_long = True
        self._texts = torch.zeros(batch, capacity, dtype=torch.int64, device=self.device)
        # For each cache, the number of tokens read of each row.
        self._num_read = [0] * batch, [0] * batch

    @property
    def _cache_layers(self) -> list[RaggedLayer]:
        return [layer for cache in self._caches for layer in cache.layers]

    def clear_rows(self, rows: Tensor) -> None:
        super().clear_rows(rows)
        for num_read in self._num_read:
            for row in rows.tolist():
                num_read[row] = 0

    def copy_rows(self, sources: Tensor, width: int) -> None:
        super().copy_rows(sources, width)
        self._texts[:, :width] = self._texts[sources, :width]
        for num_read in self._num_read:
            num_read[:] = [num_read[source] for source in sources.tolist()]

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
        self._texts[members.unsqueeze(1), positions] = tokens
        for row, first in zip(members.tolist(), positions.amin(1).tolist(), strict=True):
            for num_read in self._num_read:
                num_read[row] = min(num_read[row], first)
        wanted = positions[:, -(num_logits or positions.shape[1]) :]
        logits: Tensor | None = None
        for is_long in (False, True):
            here = (wanted >= self.switch) == is_long
            indices = here.any(1).nonzero().flatten()
            firsts = wanted.masked_fill(~here, self._texts.shape[1])[indices].amin(1).tolist()
            lasts = wanted.masked_fill(~here, -1)[indices].amax(1).tolist()
            num_read, own_rows = self._num_read[is_long], members[indices].tolist()
            begins = [min(num_read[row], first) for row, first in zip(own_rows, firsts, strict=True)]
            counts = [last + 1 - begin for begin, last in zip(begins, lasts, strict=True)]
            for group in groups_by_length(counts, FORWARD_COST):
                longest, group = counts[group[0]], sorted(group)
                # A row with fewer unread tokens reads some again.
                begin = torch.tensor([[max(lasts[each] + 1 - longest, 0)] for each in group], device=tokens.device)
                at = begin + torch.arange(longest, device=tokens.device)
                num_wanted = longest - min(firsts[each] - int(at[i, 0]) for i, each in enumerate(group))
                index = indices[group]
                chosen = None if rows is None and len(group) == len(tokens) else members[index]
                texts = self._texts[members[index].unsqueeze(1), at]
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
        self._cache, self._is_long = self._caches[is_long], is_long
        if self._features is not None:
            self._features.cache = self._cache
        try:
            yield self._cache.capacity
        finally:
            self._cache, self._is_long = self._caches[True], True

    def _lengths_at(self, positions: Tensor) -> Tensor:
        return torch.full_like(positions, self.switch + self._is_long)
