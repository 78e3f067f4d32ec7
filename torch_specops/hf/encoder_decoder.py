"""Transformers models whose decoder attends to an encoder (Whisper, T5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, EncoderDecoderCache, PreTrainedModel, WhisperForCausalLM
from transformers.cache_utils import StaticLayer

from ..models.base import LanguageModel, RowState, placed
from ..ops.kv_cache import visible_slots
from ..ops.tracing import normal_tensors
from .architecture import layers_of
from .models import Seen, TransformersModel


class EncoderDecoderModel(TransformersModel):
    """A transformers model whose decoder attends to an encoder (Whisper, T5). Tokens are the decoder's tokens.

    The encoder runs once, in `start`. The first forward computes the keys and values of the encoder's output and keeps
    them. A draft with the same encoder, or without an encoder, reads the target's encoder output.
    """

    # The encoder's output if it has already run; `start` then does not run it.
    encoder_outputs: Tensor | None = None
    # In a draft: the target whose encoder output the draft reads.
    _encodes_for_us: EncoderDecoderModel | None = None
    # The newest inputs of the encoder.
    _inputs: Mapping[str, Tensor] | None = None
    _of_calls: ClassVar[Sequence[str]] = (
        *("encoder_outputs", "_both", "_encoded", "_encodes_for_us", "_inputs", "_relative_bias"),
    )

    def _begin(self) -> None:
        self._encoded = EncoderOutput()
        super()._begin()

    def _take_over(self) -> None:
        super()._take_over()
        self._relative_bias = _relative_bias_of(self.prepared)
        self._is_t5 = self._relative_bias is not None
        if self._is_t5:
            self.max_length = None

    # A forward of some rows would copy the encoder's keys and values, which are most of what a step reads.
    reads_rows = False
    reads_inputs = True

    @property
    def num_layers(self) -> int:  # type: ignore[override]
        return len(layers_of(self.prepared))

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        super().start(batch, capacity)
        self._inputs = inputs
        if self._take_encoded(inputs):
            return
        inputs = inputs or {}
        states = self._encode(batch, inputs) if self.encoder_outputs is None else self.encoder_outputs
        mask = inputs.get("attention_mask") if self._is_t5 else None
        mask = None if mask is None else placed(self._encoded.mask, mask.to(self.device, copy=True))
        self._cross_attend(placed(self._encoded.states, states.clone()), mask)

    def share_encoder(self, draft: LanguageModel) -> LanguageModel:
        """Let a draft with this encoder, or a `WhisperForCausalLM`, read this model's encoder output. Returns the draft
        or another adapter of it.

        Raises:
            ValueError: a `WhisperForCausalLM` for encoder states of another width.
        """
        if not isinstance(draft, TransformersModel) or draft is self:
            return draft
        if isinstance(draft.model, WhisperForCausalLM) and not self._is_t5:
            width, expected = draft.model.config.d_model, self.model.config.d_model
            if width != expected:
                raise ValueError(f"draft: expected a decoder of encoder states of width {expected}, got {width}")
            draft = draft if isinstance(draft, WhisperDecoder) else WhisperDecoder(draft.model)
        elif not isinstance(draft, EncoderDecoderModel) or draft.model.get_encoder() is not self.model.get_encoder():
            return draft
        draft._encodes_for_us = self
        return draft

    def _take_encoded(self, inputs: Mapping[str, Tensor] | None) -> bool:
        """Use the target's encoder output if it belongs to these inputs. Returns whether it does, because another
        decoder may have replaced the output."""
        other = self._encodes_for_us
        if other is None or other._encoded.states is None or other._inputs is not inputs:
            return False
        self._cross_attend(other._encoded.states, other._encoded.mask)
        return True

    def _cross_attend(self, states: Tensor, mask: Tensor | None) -> None:
        """Attend to these encoder states from now on. The next forward computes their keys and values."""
        self._both = EncoderDecoderCache(self._require_cache(), self._encoded.attend(states, mask, self.num_layers))

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Encode new inputs [1, ...] for a row. The next forward computes the keys and values."""
        self._inputs = inputs
        if self._take_encoded(inputs):
            return
        new, states, mask = self._encode(1, inputs), self._encoded.states, self._encoded.mask
        assert states is not None
        length = max(new.shape[1], states.shape[1])
        if self._is_t5:
            mask = states.new_ones(states.shape[:2]) if mask is None else mask
            new_mask = inputs.get("attention_mask", new.new_ones(new.shape[:2]))
            mask = pad(mask.to(self.device), (0, length - mask.shape[1]))
            mask[row] = pad(new_mask.to(mask), (0, length - new.shape[1]))
            mask = placed(self._encoded.mask, mask)
        elif new.shape[1] != states.shape[1]:
            raise ValueError(
                f"inputs: expected {states.shape[1]} encoder positions, as other rows have, got {new.shape[1]}"
            )
        if length > states.shape[1]:
            states = pad(states, (0, 0, 0, length - states.shape[1]))
        states[row] = pad(new, (0, 0, 0, length - new.shape[1]))
        self._cross_attend(states, mask)

    def _row_states(self) -> list[RowState]:
        return [*super()._row_states(), self._encoded]

    def _encode(self, batch: int, inputs: Mapping[str, Tensor]) -> Tensor:
        name = self.model.main_input_name
        if name not in inputs:
            raise ValueError(f"inputs: expected {name} for the encoder, got {', '.join(inputs) or 'nothing'}")
        if inputs[name].shape[0] != batch:
            raise ValueError(f"inputs: expected {name} for {batch} rows, got {inputs[name].shape[0]}")
        # Encode once per prompt, because its sequences have the same input.
        repeats = [all(each[row].equal(each[row - 1]) for each in inputs.values()) for row in range(1, batch)]
        is_new = ~torch.tensor([False, *repeats], device="cpu")
        own = {key: value[is_new].to(self.device) for key, value in inputs.items()}
        return self.prepared.get_encoder()(**own)[0][is_new.cumsum(0) - 1]

    def _arguments(self, tokens: Tensor, positions: Tensor, mask: Seen, num_logits: int | None) -> dict[str, Any]:
        if self._relative_bias is not None:
            arguments = {"attention_mask": self._encoded.mask}
        else:
            arguments = {"decoder_position_ids": positions}
        return arguments | {
            "decoder_input_ids": tokens,
            "decoder_attention_mask": mask,
            "encoder_outputs": (self._encoded.states,),
            self._cache_argument: self._both,
        }

    def _mask(self, positions: Tensor, slot_positions: Tensor, own_text: Tensor | None = None) -> Seen:
        if self._relative_bias is None:
            return super()._mask(positions, slot_positions, own_text)
        bias = self._relative_bias(positions, slot_positions)
        visible = visible_slots(positions, slot_positions, own_text=own_text)
        return torch.where(visible, bias, torch.finfo(bias.dtype).min)


class EncoderOutput(RowState):
    """An encoder's output, and the keys and values that the decoder computes from it.

    Attributes:
        states: [B, S, H]; None before `attend`.
        mask: [B, S], the positions that are no padding; None = all.
    """

    states: Tensor | None = None
    mask: Tensor | None = None
    # The cache of `attend`. Its tensors keep their addresses as long as `attend` gets the same `states`.
    _cache: Cache | None = None

    def attend(self, states: Tensor, mask: Tensor | None, num_layers: int) -> Cache:
        """Attend to these encoder states from now on; the next forward computes their keys and values, in the cache
        that is returned."""
        if self._cache is None or states is not self.states:
            self._cache = Cache(layers=[_EncoderLayer(states.shape[1]) for _ in range(num_layers)])
        self.states, self.mask = states, mask
        self._cache.reset()
        return self._cache

    def static_tensors(self) -> list[Tensor]:
        layers = [] if self._cache is None else self._cache.layers
        pairs = [(layer.keys, layer.values) for layer in layers if layer.is_initialized]
        return [tensor for tensor in (self.states, self.mask, *chain(*pairs)) if tensor is not None]


class _EncoderLayer(StaticLayer):
    """The keys and values of the encoder's output, which one forward writes completely."""

    is_initialized: bool

    @normal_tensors()
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        # Allocate again if the previous batch ran under another autocast.
        is_fit = self.is_initialized and (key_states.shape, key_states.dtype) == (self.keys.shape, self.keys.dtype)
        self.is_initialized = is_fit
        return super().update(key_states, value_states, *args, **kwargs)


class WhisperDecoder(EncoderDecoderModel):
    """A `WhisperForCausalLM` (such as Distil-Whisper) as a draft that reads the encoder output of a Whisper target."""

    def _encode(self, batch: int, inputs: Mapping[str, Tensor]) -> Tensor:
        raise ValueError("draft: expected the target whose encoder this WhisperForCausalLM reads, got another one")

    def _arguments(self, tokens: Tensor, positions: Tensor, mask: Seen, num_logits: int | None) -> dict[str, Any]:
        arguments = super()._arguments(tokens, positions, mask, num_logits)
        return {name.removeprefix("decoder_"): value for name, value in arguments.items()}


def _relative_bias_of(model: PreTrainedModel) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A function that corrects T5's position bias for ragged rows; None = the model is not a T5.

    T5 itself adds the bias of positions 0, 1, ... in every row. The function takes the positions of tokens [B, n] and
    of slots [B or 1, S], and returns the right bias minus T5's, which the mask adds.
    """
    blocks = getattr(model.get_decoder(), "block", None)
    if blocks is None:
        return None
    attention = blocks[0].layer[0].SelfAttention

    def correction(positions: Tensor, slot_positions: Tensor) -> Tensor:
        buckets = attention._relative_position_bucket(
            slot_positions.unsqueeze(1) - positions.unsqueeze(2),
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        wanted = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
        query_length, key_length = positions.shape[1], slot_positions.shape[1]
        added = attention.compute_bias(query_length, key_length, device=positions.device, past_seen_tokens=0)
        return wanted - added

    return correction
