"""Models in which some layers keep a state (linear attention, Mamba, short convolutions)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.kv_cache import Window
from .architecture import ATTENTION_OF, STATE_KINDS, layers_of
from .models import Seen, TransformersModel
from .regions import large_layers
from .states import StateCache, StateReader, state_modules


class HybridModel(TransformersModel):
    """A causal transformers model with layers that keep a state, with or without attention.

    The cache has rings of states for these layers (`states.py`). A ring holds the states before the positions of one
    step. So a sequence can be rolled back within its newest step but not into its prompt, and no token after a prompt
    may be read together with the prompt.

    Attributes:
        state_bytes: the memory of all rings.
    """

    keeps_states = True
    # A module with a state reads each row's tokens in order, so rows cannot be packed.
    packs_rows = False
    _cache_kind = StateCache
    _num_slots = 2
    _of_calls: ClassVar[Sequence[str]] = ("_readers",)

    def _begin(self) -> None:
        self._readers: dict[nn.Module, StateReader] = {}
        super()._begin()

    def expect(self, num_tokens: int) -> None:
        """Called before `start`: forwards that may be rolled back have at most `num_tokens` tokens."""
        self._num_slots = num_tokens + 1

    def begin_texts(self, lengths: Tensor, rows: Tensor | None = None) -> None:
        super().begin_texts(lengths, rows)
        self._require_cache().begin_texts(lengths, rows)

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        rings = () if self._cache is None else self._cache.rings
        return sum(ring.numel() * ring.element_size() for ring in rings)

    def _take_over(self) -> None:
        super()._take_over()
        modules = {module: self._readers.get(module) for module in state_modules(self.prepared)}
        self._readers = {module: reader or StateReader(module) for module, reader in modules.items()}
        for reader in self._readers.values():
            reader.attach()

    def _understand(self) -> None:
        super()._understand()
        self._sees_all = False
        parameters = inspect.signature(type(self.model).forward).parameters
        # A model without attention reads neither positions nor a mask.
        self._has_attention = "position_ids" in parameters
        self._num_states = getattr(self._config, "number_of_conv_states", 1)
        self._large_layers = large_layers(layers_of(self.prepared))

    def _cache_sizes(self) -> tuple[int, ...]:
        return self.num_layers, self._num_slots, self._num_states

    def _require_cache(self) -> StateCache:
        cache = super()._require_cache()
        assert isinstance(cache, StateCache)
        return cache

    def _read(self, tokens: Tensor, positions: Tensor, mask: Seen, num_logits: int | None) -> Tensor:
        cache = self._require_cache()
        with cache.beginning(cache.rows):
            return super()._read(tokens, positions, mask, num_logits)

    def forward_tree(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """Raises ValueError: a tree would need a state for each of its nodes."""
        raise ValueError(
            f"model: {type(self.model).__name__} keeps a state of its text, and beam search would need one for each "
            "node of a tree; expected a model with attention alone"
        )

    def decoded(self, tokens: Tensor) -> Tensor:
        """Logits [1, n, V] of a sequence [1, n] that transformers reads token by token with its own cache."""
        logits, cache = [], None
        for position in range(tokens.shape[1]):
            at = torch.full((1, 1), position, device=tokens.device)
            given = {"input_ids": tokens[:, position : position + 1], self._cache_argument: cache}
            output = self.prepared(**given, **({"position_ids": at} if self._has_attention else {}), use_cache=True)
            cache = getattr(output, self._cache_argument)
            logits.append(output.logits)
        return torch.cat(logits, 1)

    def _for_layers(self, seen: Callable[[Window | None], Tensor]) -> Seen:
        """Masks for the kinds of attention layer. Layers with a state get no mask, because they read no padding."""
        kinds = {"full_attention": None} | self._windows
        # Some families look up the mask of a layer with attention and a state by the name of its attention.
        kinds |= {ATTENTION_OF[kind]: window for kind, window in self._windows.items() if kind in ATTENTION_OF}
        masks = {window: seen(window) for window in set(kinds.values())}
        return {kind: masks[window] for kind, window in kinds.items()} | dict.fromkeys(STATE_KINDS)

    def _arguments(self, tokens: Tensor, positions: Tensor, mask: Seen, num_logits: int | None) -> dict[str, Any]:
        arguments = super()._arguments(tokens, positions, mask, num_logits)
        if not self._has_attention:
            del arguments["attention_mask"], arguments["position_ids"]
        return arguments
