"""The cache that an unmodified transformers model writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..ops.kv_cache import RaggedKeyValues
from ..ops.tracing import is_eager_cpu

__all__ = ["RaggedCache", "first_slot"]


class RaggedCache(Cache):
    """Keys and values of every layer, written at the slots that `writing_at` names."""

    def __init__(self, batch: int, capacity: int, num_layers: int) -> None:
        super().__init__(layers=[_RaggedLayer(self) for _ in range(num_layers)])
        self.batch = batch
        self.capacity = capacity
        self.slots: Tensor | None = None
        self.first: int | None = None
        self.width: int | None = None
        self.rows: Tensor | None = None

    @contextmanager
    def writing_at(self, slots: Tensor, width: int | None = None, rows: Tensor | None = None) -> Iterator[None]:
        """Within it a forward writes at `slots` [A, n] of the sequences `rows` [A], None = all, and reads the first
        `width` slots of these sequences, None = all.
        """
        self.slots, self.width, self.rows = slots, width, rows
        self.first = first_slot(slots) if rows is None else None
        yield
        self.slots = self.first = self.width = self.rows = None

    @property
    def key_values(self) -> list[RaggedKeyValues]:
        """The keys and values of every layer that a forward has written."""
        return [layer for layer in self.layers if layer.is_initialized]


class _RaggedLayer(CacheLayerMixin, RaggedKeyValues):
    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache) -> None:
        CacheLayerMixin.__init__(self)
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # A first forward may write some rows only.
        keys, values = (states[:1].expand(self._cache.batch, -1, -1, -1) for states in (key_states, value_states))
        RaggedKeyValues.__init__(self, keys, values, self._cache.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._cache.slots if self._cache.first is None else self._cache.first
        assert slots is not None
        self.write(key_states, value_states, slots, self._cache.rows)
        return self.read(self._cache.width, self._cache.rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0

    def get_seq_length(self) -> int:
        # Rows have different lengths, and a forward is given positions and masks.
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity


def first_slot(slots: Tensor) -> int | None:
    """The first of slots [B, n] if an eager call on a CPU writes the same n neighbouring slots of every sequence, from
    the first on; else None."""
    if not is_eager_cpu(slots) or slots.numel() == 0:
        return None
    rows = slots.tolist()
    first: int = rows[0][0]
    neighbours = list(range(first, first + len(rows[0])))
    return first if all(row == neighbours for row in rows) else None
