"""The tensors of a batch: their layout, their way to a device, and another sequence in a row."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..sampling import NEUTRAL, Processors, SamplingTensors

__all__ = ["DecodeState", "constants_of", "moved", "refilled", "tensors_of"]

# The value that fills the rest of a row that is shorter than its tensor; 0 for tensors that are not named.
_FILL = NEUTRAL | {"eos": -1, "logprobs": math.nan, "sequences": -1, "top_tokens": -1, "top_values": math.nan}
# Tensors with an entry for each slot of a row.
_PER_SLOT = ("tokens", "logprobs", "top_tokens", "top_values")


@dataclass(frozen=True)
class DecodeState:
    """A batch of sequences. With the caches of the models, this is all that a step reads and writes.

    Args:
        tokens: [B, W] int64, each sequence from index 0 on. In a step, W exceeds the largest limit by K + 1.
        lengths: [B] int64 >= 1, tokens of each sequence. The target has read all but the newest one.
        limits: [B] int64, the length at which a row ends.
        eos: [B, E] int64, tokens that end a row; -1 is none.
        finished: [B] bool.
        failed: [B] bool, rows that ended because the target gave no finite logit; read around an exported step.
        seeds: [B] int64.
        sampling: temperature, filters and processors of each row.
        is_sampled: whether any temperature is above 0. If none is, a step draws no random numbers.
        logprobs: [B, W] float32, the log-probability of every emitted token under the target, NaN elsewhere; None = not
            wanted.
        logprobs_of: as `logprobs` of `log_probabilities`; None = not wanted.
        top_tokens, top_values: [B, W, N] int64 and float32, the N most likely tokens at each emitted token and their
            log-probabilities, -1 and NaN elsewhere; None = not wanted.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    eos: Tensor
    finished: Tensor
    failed: Tensor
    seeds: Tensor
    sampling: SamplingTensors
    is_sampled: bool
    logprobs: Tensor | None = None
    logprobs_of: str | None = None
    top_tokens: Tensor | None = None
    top_values: Tensor | None = None

    @property
    def capacity(self) -> int:
        """W, slots for the tokens of a row."""
        return self.tokens.shape[1]


# The objects that hold a state's tensors.
_STATE_CLASSES = (DecodeState, SamplingTensors, Processors)


def constants_of(state: DecodeState) -> Hashable:
    """The values other than tensors that determine what a step computes."""
    processors = state.sampling.processors
    return state.is_sampled, state.logprobs_of, None if processors is None else processors.constants


def tensors_of(values: object) -> dict[str, Tensor]:
    """Every tensor of a state by name."""
    tensors: dict[str, Tensor] = {}
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, _STATE_CLASSES):
            tensors |= tensors_of(value)
    return tensors


def moved(values: Any, device: torch.device, capacity: int) -> Any:
    """A state with copies of its tensors on the device, and room for `capacity` tokens in a row."""
    changes: dict[str, Any] = {}
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            changes[name] = copy = value.to(device, copy=True)
            if name in _PER_SLOT:
                changes[name] = _filled(name, copy, (value.shape[0], capacity, *value.shape[2:]))
        elif isinstance(value, _STATE_CLASSES):
            changes[name] = moved(value, device, capacity)
    return replace(values, **changes)


def refilled(state: DecodeState, row: int, values: DecodeState) -> DecodeState:
    """The batch with another sequence in a row. It is the same object, written in place, if its tensors have room for
    the sequence. They have none for the first sequence that is sampled or uses some filter or processor, nor for one
    with more eos tokens or biases than any before.

    Args:
        values: of the sequence alone, on any device.
    """
    old, new = tensors_of(state), tensors_of(values)
    tensors = {name: _with_row(name, old.get(name), new.get(name), row, state.tokens) for name in old | new}
    is_sampled = state.is_sampled or values.is_sampled
    longest_ngram = max(_longest_ngram(state), _longest_ngram(values))
    if (is_sampled, longest_ngram) == (state.is_sampled, _longest_ngram(state)) and all(
        tensor is old.get(name) for name, tensor in tensors.items()
    ):
        return state
    has_processors = "prompt_lengths" in tensors
    processors = _of_tensors(Processors, tensors, longest_ngram=longest_ngram) if has_processors else None
    sampling = _of_tensors(SamplingTensors, tensors, processors=processors)
    return _of_tensors(DecodeState, tensors, sampling=sampling, is_sampled=is_sampled, logprobs_of=state.logprobs_of)


def _longest_ngram(state: DecodeState) -> int:
    processors = state.sampling.processors
    return processors.longest_ngram if isinstance(processors, Processors) else 0


def _of_tensors(kind: Any, tensors: dict[str, Tensor], **others: Any) -> Any:
    """An object of one of the `_STATE_CLASSES`, from the tensors that it has fields for."""
    return kind(**{field.name: tensors[field.name] for field in fields(kind) if field.name in tensors}, **others)


def _with_row(name: str, old: Tensor | None, new: Tensor | None, row: int, tokens: Tensor) -> Tensor:
    """A tensor of the batch [B, ...] with the row's [1, ...], or nothing, in one row: the same tensor if it has room.
    `tokens` are the batch's."""
    shapes = [tensor.shape[1:] for tensor in (old, new) if tensor is not None]
    if old is None:
        assert new is not None
        old = new[:0].to(tokens.device)
    whole = _filled(name, old, (len(tokens), *(max(sizes) for sizes in zip(*shapes, strict=True))))
    whole[row] = _FILL.get(name, 0)
    if new is not None:
        _corner(name, whole[row : row + 1], new.shape).copy_(new)
    return whole


def _filled(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor itself if it has this shape, otherwise a larger one with its entries."""
    if tensor.shape == shape:
        return tensor
    larger = tensor.new_full(shape, _FILL.get(name, 0))
    _corner(name, larger, tensor.shape).copy_(tensor)
    return larger


def _corner(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """The part of a tensor where the entries of a smaller one belong."""
    part = tensor[tuple(map(slice, shape))]
    # Sequences are aligned to the right.
    return tensor[: shape[0], : shape[1], tensor.shape[2] - shape[2] :] if name == "sequences" else part
