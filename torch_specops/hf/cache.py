"""The cache objects that an unmodified transformers model writes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..kv_cache import RaggedKeyValues

__all__ = ["CrossCache", "RaggedCache"]


class RaggedCache(Cache):
    """Keys and values of every layer, written at the slots that `writing_at` names."""

    def __init__(self, capacity: int, num_layers: int) -> None:
        super().__init__(layers=[_RaggedLayer(self) for _ in range(num_layers)])
        self.capacity = capacity
        self.slots: Tensor | None = None
        self.width: int | None = None
        self.rows: Tensor | None = None

    @contextmanager
    def writing_at(self, slots: Tensor, width: int | None = None, rows: Tensor | None = None) -> Iterator[None]:
        """Within it a forward writes at `slots` [A, n] of the sequences `rows` [A], None = all, and reads the first
        `width` slots of these sequences, None = all.
        """
        self.slots, self.width, self.rows = slots, width, rows
        yield
        self.slots = self.width = self.rows = None

    @property
    def key_values(self) -> list[RaggedKeyValues]:
        """Of every layer that a forward has written."""
        return [layer._buffer for layer in self.layers if layer._buffer is not None]

    def clear(self) -> None:
        for layer in self.layers:
            layer.clear()


class _RaggedLayer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self._cache = cache
        self._buffer: RaggedKeyValues | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._buffer = RaggedKeyValues(key_states, value_states, self._cache.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._buffer is None:
            self.lazy_initialization(key_states, value_states)
        buffer, slots = self._buffer, self._cache.slots
        assert buffer is not None and slots is not None
        buffer.write(key_states, value_states, slots, self._cache.rows)
        return buffer.read(self._cache.width, self._cache.rows)

    def clear(self) -> None:
        if self._buffer is not None:
            self._buffer.clear()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0

    def get_seq_length(self) -> int:
        # Rows have different lengths, and a forward is given positions and masks.
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity


class CrossCache(Cache):
    """Keys and values of the encoder's output, written once per batch, always at the same addresses."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_CrossLayer() for _ in range(num_layers)])

    @property
    def key_values(self) -> list[Tensor]:
        """Keys and values of every layer that a forward has written."""
        return [tensor for layer in self.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]


class _CrossLayer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states.clone(), value_states.clone()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            self.keys.copy_(key_states)
            self.values.copy_(value_states)
        else:
            self.lazy_initialization(key_states, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.get_seq_length()
