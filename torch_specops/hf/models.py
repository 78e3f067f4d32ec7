"""Transformers models as `LanguageModel`s: ragged rows, a static cache, explicit masks and positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.base import FeatureModel, RowState, TreeModel, settings_of
from ..ops.attention import is_long_text, spans_of, spans_serve
from ..ops.invariant import whole_width
from ..ops.kv_cache import RaggedKeyValues, Window, visible_slots
from ..ops.tracing import is_eager_cpu
from .architecture import (
    Reading,
    check_can_decode,
    computes_positions,
    layers_of,
    max_length,
    ranks_of,
    why_not_compiled,
    windows,
)
from .attention import INVARIANT, use_grouped_attention
from .cache import FeatureBuffer, RaggedCache, cache_argument
from .invariant import check_bits, exchange, refuse_autocast, refuse_modules
from .regions import compile_once, large_layers
from .rotary import ReadLengths, follow_lengths, growing_rotaries
from .shadow_model import ShadowModel

# The tests compare these families token for token with transformers' decoding. Other decoder-only families are checked
# on a few tokens when they are first used.
TESTED_FAMILIES = {
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3"),
    *("t5", "whisper"),
}

# The mask of a token that sees every slot; `grouped_attention` drops it.
ALL_SEEN = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cpu")

# The mask argument of attention: a mask or spans of slots [B, 1, n, 2], or a dict of them for each kind of layer.
Seen = Tensor | Mapping[str, Tensor | None]


# Decides how a model is read; None = like the tested families.
Check = Callable[["TransformersModel"], Reading | None]


class TransformersModel(FeatureModel, TreeModel):
    """A causal transformers model with a ragged static cache (`LanguageModel`).

    The model is not changed: forwards run in `prepared`, a second set of modules over the same weights (`ShadowModel`).
    A forward writes each row's tokens to that row's slots, with an explicit 4D mask and explicit positions. Layers with
    a sliding window keep all slots too, and the mask hides the old ones, so rollback is always possible. Logits are
    float32 or the model's 16-bit dtype.

    Args:
        model: a causal language model on one device.
        num_layers: run only this many first layers, then the final norm and the head; None = all layers.
        check: called when a look finds a change, to decide how the model is read; None = like the tested families.
        invariant: as in `SpeculativeDecoder`.
        is_checked: True = its bits need no comparison at first use.

    Attributes:
        model: the user's model.
        prepared: the copy of the model in evaluation mode, updated by `look` and by `start`.
        eager_because: the caller's reason not to compile; None = no reason.
        max_length: the most tokens that the model can read or was made for; None = any number.
        limited_by: the reason for `max_length`; None = the number of its positions.
        reads_beyond: True = the model was made for `max_length` tokens but can read more.
        supports_spans: True = attention may get spans of slots or packed rows, because the model uses transformers'
            "sdpa".
        not_compiled: the reason why the forward cannot be compiled; None = it can.
        reads_rows: True = `forward` can read a subset of the rows.
        reads_inputs: True = the model reads the input of an encoder besides the tokens.
        use_spans: False = attention always gets a mask over the whole cache.

    Raises:
        ValueError: a model that cannot be read this way (`language_model`); a number of layers out of range.
    """

    reads_rows = True
    use_spans = True
    _cache_kind: type[RaggedCache] = RaggedCache
    # Attributes that copies leave out (`settings_of`); `_begin` sets them again.
    _of_calls: ClassVar[Sequence[str]] = (
        *("prepared", "_cache", "_cache_held", "_cache_key", "_copy", "_is_looked_at", "_large_layers"),
        *("_prompt_lengths", "_read_lengths", "_rotaries", "_understood"),
    )

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers: int | None = None,
        check: Check | None = None,
        *,
        invariant: bool = False,
        is_checked: bool = False,
    ) -> None:
        self.model = model
        self.invariant = invariant
        self._is_checked = is_checked
        self.eager_because: str | None = None
        self._first_layers = num_layers
        self._check = check
        self._cache_argument = cache_argument(type(model).forward)
        self._features: FeatureBuffer | None = None
        self._begin()

    def _begin(self) -> None:
        """Set the state of an adapter that has read nothing: a new one or a copy."""
        self._understood = 0
        self._cache: RaggedCache | None = None
        self._cache_key: Hashable = None
        self._read_lengths = ReadLengths()
        self._is_looked_at = False
        self._prompt_lengths: Tensor | None = None
        self._copy = ShadowModel()
        self._take_over()

    def __getstate__(self) -> dict[str, Any]:
        return settings_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def look(self) -> None:
        """Apply changes of the user's model to the copy: classes, configs, modules, hooks and attributes. If
        `start` is the next call, `start` does not look again.

        Raises:
            ValueError: the model cannot be read any more (`language_model`).
            RuntimeError: running sequences cannot continue, because the dtype, the device or the number of layers
                changed. `start` drops them.
        """
        self._take_over()
        self._is_looked_at = True
        if self._cache is not None and self._cache_held != self._cache_holds():
            held, holds = (", ".join(map(str, each)) for each in (self._cache_held, self._cache_holds()))
            raise RuntimeError(f"model: its layers, dtype and device changed while texts run: were {held}, are {holds}")

    def _take_over(self) -> None:
        self.prepared = self._copy.of(self.model, own_layers=bool(self._first_layers or self._features))
        if self._understood != self.version:
            self._understand()
            self._understood = self.version
        # Apply our changes to the copy again, because updating the copy may have rebuilt its modules.
        if self._first_layers is not None:
            layers = layers_of(self.prepared)
            assert layers._modules is not layers_of(self.model)._modules, "only the copy loses layers"
            del layers[self._first_layers :]
        if self.invariant:
            exchange(self.prepared)
        compile_once(self._large_layers)
        if self._features is not None:
            self._features.attach(layers_of(self.prepared), self.prepared.get_decoder(), self.hidden_size)
        follow_lengths(self._rotaries, self._read_lengths)

    def _understand(self) -> None:
        """Derive from the model everything that stays the same until a look finds a change."""
        check_can_decode(self.model)
        self._config = self.model.config.get_text_config(decoder=True)
        attention = self._config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise ValueError(
                f"model: attention {attention!r} takes no mask for ragged rows; "
                "call model.set_attn_implementation('sdpa') or 'eager' first"
            )
        if self._first_layers is not None and not 1 <= self._first_layers <= len(layers_of(self.model)):
            raise ValueError(f"num_layers: expected 1 to {len(layers_of(self.model))}, got {self._first_layers}")
        self._additive_mask = attention == "eager"
        self._is_tested_decoder = self._config.model_type in TESTED_FAMILIES and not self.reads_inputs
        self.supports_spans = attention == "sdpa" and self._is_tested_decoder
        self.max_length, self.limited_by = max_length(self._config)
        if self._check is not None and (found := self._check(self)) is not None:
            self.supports_spans, self.max_length, self.limited_by = found
        self._windows = windows(self._config)
        self._sees_all = self.supports_spans and set(self._windows.values()) == {None}
        self._computes_positions = computes_positions(self.model)
        self._rotaries = [rotary for rotary, _ in growing_rotaries(self.prepared)]
        if self.invariant:
            refuse_modules(self.model)
            if self._rotaries:
                raise ValueError("invariant: the model's rotary embedding depends on the longest text of a forward")
        for config in self._copy.newest.configs:
            if self.invariant:
                config._attn_implementation = INVARIANT
            else:
                use_grouped_attention(config, self.supports_spans)
        self._large_layers = large_layers(layers_of(self.prepared)) if self._is_tested_decoder else []
        self._obstacle = self._copy.newest.not_followed or why_not_compiled(self.model)

    @property
    def version(self) -> int:  # type: ignore[override]
        return self._copy.version

    @property
    def compile_key(self) -> Hashable:  # type: ignore[override]
        return tuple(self._copy.newest.code)

    @property
    def is_observed(self) -> bool:  # type: ignore[override]
        return self._copy.newest.is_observed

    @property
    def not_compiled(self) -> str | None:  # type: ignore[override]
        return self.eager_because or ("invariant" if self.invariant else None) or self._obstacle

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self._config.vocab_size

    @property
    def reads_beyond(self) -> bool:  # type: ignore[override]
        return self._computes_positions and self.limited_by is None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.model.device

    @property
    def ranks(self) -> Any:
        return ranks_of(self.model)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The eos tokens of the generation config. A tokenizer rebuilt from a GGUF file may have a wrong eos token."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def pad_token_id(self) -> int | None:  # type: ignore[override]
        return self.model.generation_config.pad_token_id if self.model.generation_config else None

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        if inputs:
            raise ValueError(f"inputs: a decoder-only model reads tokens alone, got {', '.join(inputs)}")
        if not self._is_looked_at:
            self._take_over()
        self._is_looked_at = False
        self._prompt_lengths = None
        key = self._cache_sizes()
        if self._cache is None or self._cache_key != key:
            self._cache, self._cache_key = self._cache_kind(*key), key
        self._cache_held = self._cache_holds()
        if self._features is not None:
            self._features.cache = self._cache
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        capacity = self._width(capacity)
        for state in self._row_states():
            state.start(batch, capacity, like)

    def _row_states(self) -> list[RowState]:
        """The tensors that the model keeps for each row. They are started, cleared and copied in this order."""
        return [self._require_cache(), *([] if self._features is None else [self._features])]

    def begin_texts(self, lengths: Tensor, rows: Tensor | None = None) -> None:
        if self.invariant and not self._is_checked:
            refuse_autocast()
            check_bits(self)
        self._is_looked_at = False
        if rows is None or self._prompt_lengths is None:
            self._prompt_lengths = lengths.new_zeros(self._require_cache().batch)
        self._prompt_lengths[slice(None) if rows is None else rows] = lengths

    def _cache_sizes(self) -> tuple[int, ...]:
        return (self.num_layers,)

    def _cache_holds(self) -> tuple[int, torch.dtype, torch.device]:
        return self.num_layers, self.dtype, self.device

    def clear_rows(self, rows: Tensor) -> None:
        for state in self._row_states():
            state.clear_rows(rows)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        """Copy to row i the first `width` slots of row sources[i]."""
        for state in self._row_states():
            state.copy_rows(sources, width)

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        return self._first_layers or self._config.num_hidden_layers

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        return self._config.hidden_size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.model.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        return self.prepared.get_input_embeddings()(tokens)

    @property
    def embeddings(self) -> Tensor:  # type: ignore[override]
        return self.prepared.get_input_embeddings().weight

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.prepared.get_output_embeddings()(hidden)
        return logits.float() if logits.dtype == torch.float64 else logits

    def keep_features(self, layers: Sequence[int]) -> None:
        kept = () if self._features is None else self._features.layers
        if kept != tuple(layers):
            self._features = FeatureBuffer(tuple(layers)) if layers else None
            self._is_looked_at = False

    @property
    def features(self) -> Tensor:  # type: ignore[override]
        if self._features is None or self._features.values is None:
            raise RuntimeError("features: none are kept; call keep_features, then start")
        return self._features.values

    @property
    def key_values(self) -> list[RaggedKeyValues]:
        """The caches of the layers that a forward has allocated. Callers may replace their tensors by others of the
        same shape, such as the buffers of a module to be exported."""
        return [layer for layer in self._require_cache().layers if layer.is_initialized]

    def static_tensors(self) -> list[Tensor]:
        """The weights, and the tensors that rows keep."""
        kept = [tensor for state in self._row_states() for tensor in state.static_tensors()]
        return [*self.prepared.parameters(), *self.prepared.buffers(), *kept]

    def forward(
        self, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        serve = spans_serve(positions, self._require_cache().capacity, self.dtype)
        use_spans = self.supports_spans and self.use_spans and serve and not self.invariant
        return self.read(tokens, positions, use_spans, num_logits, rows)

    @property
    def packs_rows(self) -> bool:  # type: ignore[override]
        """Whether `forward_packed` gives the logits of `forward`. Packed rows need our attention; all other modules
        work token by token."""
        return self.supports_spans

    def forward_packed(self, tokens: Tensor, positions: Tensor, is_read: Tensor, rows: Tensor | None = None) -> Tensor:
        """`forward` for the tokens [A, n] that `is_read` [A, n] bool selects, which are the first tokens of each row.
        Returns their logits [N, V], row by row. Waits for the device."""
        members, places = is_read.nonzero(as_tuple=True)
        packed, at = (each[members, places].unsqueeze(0) for each in (tokens, positions))
        owners = (members if rows is None else rows[members]).unsqueeze(0)
        slots = torch.arange(self._width(int(at.amax()) + 1), device=at.device).unsqueeze(0)
        # Drop columns that are padding in every row. A single row then has no padding, and attention reads it as usual.
        positions, is_read = (each[:, : int(places.amax()) + 1] for each in (positions, is_read))
        # Padding queries have an empty mask.
        seen = self._mask(positions, slots, (slots <= positions.unsqueeze(2)) & is_read.unsqueeze(2))
        with self._require_cache().writing_at(at, slots.shape[1], rows, owners):
            return self._read(packed, at, seen, None)[0]

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        use_spans: bool,
        num_logits: int | None = None,
        rows: Tensor | None = None,
        width: int | None = None,
    ) -> Tensor:
        """`forward`, with spans or a mask for attention, over the first `width` slots."""
        cache = self._require_cache()
        if width is None:
            # Except in eager calls on a CPU, read all slots, because shapes must not change.
            width = self._width(int(positions.amax()) + 1) if is_eager_cpu(positions) else cache.capacity
        with cache.writing_at(positions, width, rows):
            if use_spans:
                seen = self._spans(positions)
            elif self._sees_all and cache.first == width - 1:
                # Each row has one token, at the last slot that is read, so the token sees all these slots.
                seen = ALL_SEEN
            else:
                seen = self._mask(positions, torch.arange(width, device=positions.device).unsqueeze(0))
            return self._read(tokens, positions, seen, num_logits)

    def _width(self, num_slots: int) -> int:
        """The number of slots that attention reads if texts have `num_slots` tokens."""
        return whole_width(num_slots) if self.invariant else num_slots

    def forward_tree(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """Read nodes of a tree of sequences (`TreeModel`).

        Raises:
            ValueError: a family whose attention was not tested with slots in any order, or an invariant model.
        """
        if self.invariant:
            raise ValueError("invariant: expected False for trees, whose tokens have slots in any order")
        if self._config.model_type not in TESTED_FAMILIES:
            raise ValueError(
                f"model: trees, which beam search reads, were not tested with {type(self.model).__name__}; "
                f"expected one of {', '.join(sorted(TESTED_FAMILIES))}"
            )
        with self._require_cache().writing_at(slots, visible.shape[2]):
            return self._read(tokens, positions, self._mask(positions, slot_positions, visible), None)

    def _read(self, tokens: Tensor, positions: Tensor, mask: Seen, num_logits: int | None) -> Tensor:
        arguments = self._arguments(tokens, positions, mask, num_logits)
        # Compute these lengths only for rotary embeddings that depend on them, because the tensor of the prompts'
        # lengths is another one in each batch, and a captured graph would keep it. Without such embeddings the argument
        # is unused.
        with self.reading_at(self._lengths_at(positions) if self._rotaries else positions):
            logits: Tensor = self.prepared(**arguments, use_cache=True).logits
        logits = logits.float() if logits.dtype == torch.float64 else logits
        # Not every model takes `logits_to_keep`.
        return logits if num_logits in (None, logits.shape[1]) else logits[:, -num_logits:]

    def reading_at(self, lengths: Tensor) -> AbstractContextManager[None]:
        """Inside the block, rotary embeddings that depend on the sequence length use these lengths [A, n]."""
        return self._read_lengths.at(lengths) if self._rotaries else nullcontext()

    def _lengths_at(self, positions: Tensor) -> Tensor:
        """The sequence lengths at which `generate` with a cache reads the tokens at positions [A, n]: the prompt's
        length for prompt tokens, position + 1 for later tokens."""
        lengths = positions + 1
        if self._prompt_lengths is None:
            return lengths
        return torch.maximum(lengths, self._prompt_lengths[self._require_cache().owners])

    def _arguments(self, tokens: Tensor, positions: Tensor, mask: Seen, num_logits: int | None) -> dict[str, Any]:
        return {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": self._position_ids(positions),
            self._cache_argument: self._require_cache(),
            "logits_to_keep": self._logits_to_keep(tokens.shape[1], num_logits),
        }

    def _logits_to_keep(self, num_tokens: int, num_logits: int | None) -> int | Tensor:
        """The model's argument `logits_to_keep` for the last `num_logits` logits of a forward; None = all."""
        if self._features is None or num_logits in (None, num_tokens):
            return num_logits or 0
        # Pass indices: given a number, Gemma 4 with shared keys skips the other tokens in its last layers, and their
        # features would be missing.
        return torch.arange(num_tokens - num_logits, num_tokens, device=self.device)

    def rounding_of(self, logits: Tensor) -> float:
        """A bound on differences that rounding explains: far above actual rounding of these logits, far below the
        effect of a wrong token."""
        # Many models compute rotary embeddings or experts' weights in float32, whatever their dtype; under autocast
        # they compute in 16 bits.
        dtypes = self.dtype, torch.float32, *(layer.values.dtype for layer in self.key_values[:1])
        return max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5 * float(logits.abs().amax())

    def first_layers(self, num_layers: int) -> TransformersModel:
        """A model of the first layers, with the same final norm, head and weights.

        Raises:
            ValueError: a number of layers out of range, or a model whose layers are not found.
        """
        return type(self)(self.model, num_layers, self._check)

    def _require_cache(self) -> RaggedCache:
        if self._cache is None:
            raise RuntimeError("forward: nothing can be read before start")
        return self._cache

    def _position_ids(self, positions: Tensor) -> Tensor:
        return positions

    def _for_layers(self, seen: Callable[[Window | None], Tensor]) -> Seen:
        """Apply `seen` to the layers' window; with several kinds of layer, to the window of each kind."""
        found = {kind: seen(window) for kind, window in self._windows.items()}
        return next(iter(found.values())) if len(found) == 1 else found

    def _spans(self, positions: Tensor) -> Seen:
        """Spans of slots for the attention of tokens at positions [A, n], empty where a layer attends to all earlier
        tokens of long texts (`grouped_attention`)."""
        count = positions.shape[1]
        is_long = is_long_text(positions)

        def spans(window: Window | None) -> Tensor:
            seen = spans_of(positions, window).unsqueeze(1)
            return seen[..., :0] if is_long and (window is None or window.size >= count) else seen

        return self._for_layers(spans)

    def _mask(self, positions: Tensor, slot_positions: Tensor, own_text: Tensor | None = None) -> Seen:
        def mask(window: Window | None) -> Tensor:
            visible = visible_slots(positions, slot_positions, window, own_text)
            if not self._additive_mask:
                return visible
            # Eager attention adds the mask to the scores.
            dtype = self.model.dtype
            return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)

        return self._for_layers(mask)
