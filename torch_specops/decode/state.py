"""Makes a batch's state from its prompts, moves it to a device, and puts another sequence into a row."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..processors import Processors
from ..sampling import NEUTRAL, SamplingTensors
from .inputs import Prompts
from .step import DecodeState

__all__ = ["constants_of", "first_state", "moved", "refilled", "tensors_of"]

# What fills the rest of a row that is shorter than its tensor; 0 for tensors that are not named.
_FILL = NEUTRAL | {"eos": -1, "logprobs": math.nan, "sequences": -1, "top_tokens": -1, "top_values": math.nan}


def first_state(prompts: Prompts, capacity: int, logprobs: str | None = None, top_logprobs: int = 0) -> DecodeState:
    """The state before the first step, with room for `capacity` tokens in a row. A row without new tokens has ended.

    Args:
        logprobs, top_logprobs: as `SpeculativeDecoder.generate` takes them, checked.
    """
    tokens = pad(prompts.tokens, (0, capacity - prompts.tokens.shape[1]))
    finished = prompts.limits <= prompts.lengths
    top = (*tokens.shape, top_logprobs)
    return DecodeState(
        tokens=tokens,
        lengths=prompts.lengths,
        limits=prompts.limits,
        eos=prompts.eos,
        finished=finished,
        failed=torch.zeros_like(finished),
        seeds=prompts.seeds,
        sampling=prompts.sampling,
        is_sampled=bool((prompts.sampling.temperature > 0).any()),
        logprobs=None if logprobs is None else torch.full(tokens.shape, math.nan),
        logprobs_of=logprobs or ("raw" if top_logprobs else None),
        top_tokens=torch.full(top, -1) if top_logprobs else None,
        top_values=torch.full(top, math.nan) if top_logprobs else None,
    )


def constants_of(state: DecodeState) -> Hashable:
    """The values other than tensors that determine what a step computes."""
    processors = state.sampling.processors
    return state.is_sampled, state.logprobs_of, None if processors is None else processors.constants


# The objects that hold a state's tensors.
_STATE_CLASSES = (DecodeState, SamplingTensors, Processors)


def tensors_of(values: object) -> dict[str, Tensor]:
    """Every tensor of a state by name."""
    tensors: dict[str, Tensor] = {}
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, _STATE_CLASSES):
            tensors |= tensors_of(value)
    return tensors


def moved(values: Any, device: torch.device) -> Any:
    """A state with copies of its tensors on the device."""
    changes: dict[str, Any] = {}
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            changes[name] = value.to(device, copy=True)
        elif isinstance(value, _STATE_CLASSES):
            changes[name] = moved(value, device)
    return replace(values, **changes)


def refilled(state: DecodeState, row: int, values: DecodeState) -> DecodeState:
    """The batch with another sequence in a row. It is the same object, written in place, if its tensors have room for
    the sequence. They have none for the first sequence that is sampled or uses some filter or processor, nor for one
    with more eos tokens or biases than any before.

    Args:
        state: of the batch.
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
    """A tensor of the batch with one row replaced: the same tensor if it has room.

    Args:
        old: the batch's tensor [B, ...], or None.
        new: the row's tensor [1, ...], or None.
        tokens: the batch's tokens, for their number of rows and device.
    """
    nothing = _FILL.get(name, 0)
    if old is None or (new is not None and any(n > m for n, m in zip(new.shape[1:], old.shape[1:], strict=True))):
        assert new is not None
        sizes = new.shape[1:] if old is None else [max(pair) for pair in zip(old.shape[1:], new.shape[1:], strict=True)]
        wider = torch.full((len(tokens), *sizes), nothing, dtype=new.dtype, device=tokens.device)
        if old is not None:
            _corner(name, wider, old.shape).copy_(old)
        old = wider
    old[row] = nothing
    if new is not None:
        _corner(name, old[row : row + 1], new.shape).copy_(new)
    return old


def _corner(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """The part of a tensor where the entries of a smaller one belong."""
    part = tensor[tuple(map(slice, shape))]
    # Sequences are aligned to the right.
    return tensor[: shape[0], : shape[1], tensor.shape[2] - shape[2] :] if name == "sequences" else part
