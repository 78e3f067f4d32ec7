"""Tensors that a forward of an unmodified transformers model writes: keys, values, features for drafts."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..models.base import RowState
from ..ops.attention import attention_dtype
from ..ops.kv_cache import RaggedKeyValues
from ..ops.tracing import is_eager_cpu

# Names of the cache argument: up to transformers 5.23, from 5.24 on, and in models without attention. Third-party code
# may use either of the first two in any version.
CACHE_NAMES = ("past_key_values", "cache", "cache_params")


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name of a forward's cache argument."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


class RaggedCache(Cache, RowState):
    """Keys and values of every layer, written at the slots that `writing_at` names.

    Attributes:
        batch, capacity: as in `start`; 0 before it.
        owners: inside `writing_at`, the sequence of each slot, [A, 1], or [1, N] in a packed forward.
    """

    layers: list[Any]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[self._new_layer() for _ in range(num_layers)])
        self.batch = self.capacity = 0
        self.slots: Tensor | None = None
        self.first: int | None = None
        self.width: int | None = None
        self.rows: Tensor | None = None
        self.owners: Tensor | None = None

    def _new_layer(self) -> RaggedLayer:
        return RaggedLayer(self)

    def start(self, batch: int, capacity: int, like: Tensor) -> None:
        """`RowState.start`. A layer reuses its memory if the first write fits."""
        if (self.batch, self.capacity) != (batch, capacity):
            self.batch, self.capacity = batch, capacity
            # Free the memory of all layers before the first of them allocates.
            self.layers = [self._new_layer() for _ in self.layers]
        for layer in self.layers:
            layer.is_begun = False

    def clear_rows(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.clear(rows)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        for layer in self.layers:
            layer.copy_rows(sources, width)

    def static_tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers for tensor in layer.static_tensors()]

    @contextmanager
    def writing_at(
        self, slots: Tensor, width: int, rows: Tensor | None = None, owners: Tensor | None = None
    ) -> Iterator[None]:
        """Inside the block, a forward writes at `slots` [A, n] of the sequences `rows` [A] (None = all) and reads their
        first `width` slots. A packed forward writes at `slots` [1, N] of the sequences `owners` [1, N]."""
        self.slots, self.width, self.rows = slots, width, rows
        self.first = first_slot(slots) if rows is None and owners is None else None
        if owners is None:
            # Make the indices once for all layers, because a small model's forward on a CPU spends much time in small
            # operations.
            owners = (torch.arange(slots.shape[0], device=slots.device) if rows is None else rows).unsqueeze(1)
        self.owners = owners
        yield
        self.slots = self.first = self.width = self.rows = self.owners = None


class RaggedLayer(CacheLayerMixin, RaggedKeyValues):
    is_compileable = True
    is_sliding = False
    is_initialized: bool

    def __init__(self, cache: RaggedCache) -> None:
        CacheLayerMixin.__init__(self)
        self._cache = cache
        self.is_begun = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if self.is_initialized and self.fits(key_states, value_states):
            RaggedKeyValues.clear(self)
        else:
            # Allocate the buffers for all rows, because the first forward may write only some rows.
            keys, values = (states[:1].expand(self._cache.batch, -1, -1, -1) for states in (key_states, value_states))
            RaggedKeyValues.__init__(self, keys, values, self._cache.capacity)
        self.is_initialized = self.is_begun = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Under autocast, a rotary embedding may make keys float32 while values have 16 bits.
        key_states, value_states = (each.to(attention_dtype(each)) for each in (key_states, value_states))
        if not self.is_begun:
            self.lazy_initialization(key_states, value_states)
        elif key_states.dtype != self.keys.dtype or key_states.shape[1::2] != self.keys.shape[1::2]:
            (old, old_sizes), (new, new_sizes) = (
                (each.dtype, list(each.shape[1::2])) for each in (self.keys, key_states)
            )
            raise RuntimeError(
                f"forward: what was read since start has {old} keys, heads and sizes {old_sizes}, and this forward "
                f"gives {new}, {new_sizes}; read all of a text with the same attention under the same torch.autocast"
            )
        slots = self._cache.slots if self._cache.first is None else self._cache.first
        assert slots is not None
        self.write(key_states, value_states, slots, self._cache.owners)
        return self.read(self._cache.width, self._cache.rows)

    def clear(self, rows: Tensor | None = None) -> None:
        if self.is_initialized:
            super().clear(rows)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        if self.is_initialized:
            super().copy_rows(sources, width)

    def static_tensors(self) -> list[Tensor]:
        return [self.keys, self.values] if self.is_initialized else []

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width or self._cache.capacity, 0

    def get_seq_length(self) -> int:
        # Report a length of 0: rows have different lengths, so forwards get explicit positions and masks.
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity


class FeatureBuffer(RowState):
    """The inputs of a model's layers with the indices `layers`, in a buffer with a fixed address and shape. The index
    after the last layer selects the output of the final norm.

    A forward writes the buffer like the cache: the feature of the token at position j is in slot j.

    Attributes:
        values: [B, capacity, len(layers) * H], the layers side by side; None before `start`.
        cache: the cache whose slots and rows the buffer uses; set before a forward.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.values: Tensor | None = None
        self.cache: RaggedCache | None = None
        # Use the same names and objects in every batch, because compiled code guards on both.
        self._hooks = {f"torch_specops.features.{part}": partial(self._keep, part) for part in range(len(layers))}

    def __reduce__(self) -> tuple[type[FeatureBuffer], tuple[tuple[int, ...]]]:
        return FeatureBuffer, (self.layers,)

    # Allocate outside of inference mode, because a batch may continue outside of the inference mode that it began in.
    @torch.inference_mode(False)
    def start(self, batch: int, capacity: int, like: Tensor) -> None:
        old, shape = self.values, (batch, capacity, len(self.layers) * self._hidden_size)
        if old is not None and (tuple(old.shape), old.dtype, old.device) == (shape, like.dtype, like.device):
            old.zero_()
        else:
            # Free the old tensor before the new one is allocated.
            old = self.values = None
            self.values = like.new_zeros(shape)

    def attach(self, layers: nn.ModuleList, decoder: nn.Module, hidden_size: int) -> None:
        """Hook these layers and the decoder that contains them. They must be the copies of a `ShadowModel`."""
        self._hidden_size = hidden_size
        for index, (name, hook) in zip(self.layers, self._hooks.items(), strict=True):
            # Assign new dicts, because a copy may share its dicts of hooks with the user's model.
            if index == len(layers):
                decoder._forward_hooks = OrderedDict(decoder._forward_hooks, **{name: hook})
                continue
            layer = layers[index]
            layer._forward_pre_hooks = OrderedDict(layer._forward_pre_hooks, **{name: hook})
            with_arguments = layer._forward_pre_hooks_with_kwargs
            layer._forward_pre_hooks_with_kwargs = OrderedDict(with_arguments, **{name: True})

    def copy_rows(self, sources: Tensor, width: int) -> None:
        assert self.values is not None
        self.values[:, :width] = self.values[sources, :width]

    def static_tensors(self) -> Sequence[Tensor]:
        return () if self.values is None else (self.values,)

    def _keep(self, part: int, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Write the input of a layer or the output of the decoder [A, n, H] to the slots where the cache writes.
        `named` are the layer's keyword arguments, or the decoder's output."""
        if "last_hidden_state" in named:
            hidden = named["last_hidden_state"]
        else:
            hidden = arguments[0] if arguments else named["hidden_states"]
        assert self.values is not None and self.cache is not None
        slots = self.cache.slots
        if slots is None:
            # A model's first images are also read without a cache, to compare the logits.
            return
        if hidden.shape[:2] != slots.shape:
            raise RuntimeError(
                f"forward: expected hidden states of all {list(slots.shape)} tokens in layer {self.layers[part]}, got "
                f"{list(hidden.shape[:2])}; a draft that reads them cannot draft for this model"
            )
        first, size = part * hidden.shape[-1], hidden.shape[-1]
        self.values[self.cache.owners, slots, first : first + size] = hidden.to(self.values.dtype)


def first_slot(slots: Tensor) -> int | None:
    """The first slot if an eager call on a CPU writes the same n consecutive slots [B, n] of every sequence; else
    None."""
    if not is_eager_cpu(slots) or slots.numel() == 0:
        return None
    rows = slots.tolist()
    first: int = rows[0][0]
    neighbours = list(range(first, first + len(rows[0])))
    return first if all(row == neighbours for row in rows) else None
