"""The hidden states of a model that a feature draft reads, kept for every position of every row."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from .cache import RaggedCache

__all__ = ["FeatureBuffer"]

# One name for all: torch's own would be new in every batch, and what is compiled looks at the names of hooks.
HOOK = "torch_specops.features"


class FeatureBuffer:
    """The inputs of the layers `layers` of a model, in a buffer whose address and shape never change.

    A forward writes it as it writes the cache: the feature of the token at position j stands in slot j.

    Args:
        layers: which layers.
        size: the width of a hidden state, H.

    Attributes:
        values: [B, capacity, len(layers) * H], the layers side by side; None before `start`.
    """

    def __init__(self, layers: tuple[int, ...], size: int) -> None:
        self.layers = layers
        self.size = size
        self.values: Tensor | None = None
        self._cache: RaggedCache | None = None
        self._keepers: dict[int, _Keeper] = {}
        for part, layer in enumerate(layers):
            self._keepers.setdefault(layer, _Keeper(self)).parts.append(part)

    def start(self, batch: int, cache: RaggedCache, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for what forwards with this cache will read."""
        shape = (batch, cache.capacity, len(self.layers) * self.size)
        old = self.values
        if old is not None and (tuple(old.shape), old.dtype, old.device) == (shape, dtype, device):
            old.zero_()
        else:
            self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._cache = cache

    def attach(self, layers: nn.ModuleList) -> None:
        """Let these layers hand out what they read. They must be the copies of a `ShadowModel`."""
        for index, keeper in self._keepers.items():
            layer = layers[index]
            # The copies share the hooks of the model itself.
            layer._forward_pre_hooks = OrderedDict(layer._forward_pre_hooks, **{HOOK: keeper})
            with_arguments = layer._forward_pre_hooks_with_kwargs
            layer._forward_pre_hooks_with_kwargs = OrderedDict(with_arguments, **{HOOK: True})

    def copy_rows(self, sources: Tensor, width: int) -> None:
        """Copy rows, like `RaggedKeyValues.copy_rows`."""
        assert self.values is not None
        self.values[:, :width] = self.values[sources, :width]

    def write(self, part: int, hidden: Tensor) -> None:
        """Write [A, n, H] at the slots and rows that the cache is writing at."""
        assert self.values is not None and self._cache is not None and self._cache.slots is not None
        slots, rows = self._cache.slots, self._cache.rows
        if rows is None:
            rows = torch.arange(slots.shape[0], device=slots.device)
        self.values[rows.unsqueeze(1), slots, part * self.size : (part + 1) * self.size] = hidden


class _Keeper:
    """The hook of one layer."""

    def __init__(self, buffer: FeatureBuffer) -> None:
        self.buffer = buffer
        self.parts: list[int] = []

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else named["hidden_states"]
        for part in self.parts:
            self.buffer.write(part, hidden)
