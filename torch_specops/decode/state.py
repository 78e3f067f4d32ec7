"""The tensors of a batch: their layout, their way to a device, and another sequence in a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.tracing import normal_tensors
from ..sampling import NEUTRAL, Processors, SamplingTensors
from ..sampling.processors import count_words, joined_words, round_up
from .guard import autocast_of

__all__ = ["ROOM", "DecodeState", "Texts", "copy_state", "moved", "shape_of", "shapes_of", "tensors_of"]

# The value that fills the rest of a row that is shorter than its tensor; 0 for tensors that are not named.
_FILL = {"logprobs": math.nan, "top_tokens": -1, "top_values": math.nan}
# Tensors with an entry for each slot of a row.
_PER_SLOT = ("tokens", *_FILL)
# What a row has that is no part of its sampling.
_OF_ROWS = (*_PER_SLOT, "lengths", "limits", "finished", "failed", "seeds")
# The tensors that hold all rows together.
PER_WORD = ("words", "biases", "pieces")
# What compiled steps of a session have room for, words and pieces for each row. With a request that needs more, steps
# run eagerly: no request compiles something for itself alone.
ROOM = {"eos": 8, "longest_ngram": 8, **dict.fromkeys(PER_WORD, 32)}
# A row without a text is greedy, because that costs least.
_FREE = NEUTRAL | {"temperature": 0.0, "prompt_lengths": 0}
# How much a step computes besides the models: 1 for each tensor of the sampling with a number per row and for
# `is_sampled`, the length of the other tensors, and `longest_ngram`. Those that are not needed are left out.
Sizes = dict[str, int]


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


def tensors_of(values: object) -> dict[str, Tensor]:
    """Every tensor of a state by name."""
    tensors: dict[str, Tensor] = {}
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, _STATE_CLASSES):
            tensors |= tensors_of(value)
    return tensors


@normal_tensors()
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


def copy_state(old: DecodeState, new: DecodeState) -> None:
    """Copy a state into the tensors of another one of its shape."""
    for own, value in zip(tensors_of(old).values(), tensors_of(new).values(), strict=True):
        if own is not value:
            own.copy_(value)


def shape_of(state: DecodeState) -> Hashable:
    """Everything that a compiled piece takes as constant for a batch, except for K and the inputs."""
    processors = state.sampling.processors
    constants = state.is_sampled, state.logprobs_of, None if processors is None else processors.constants
    return autocast_of(state.tokens.device), constants, shapes_of(tensors_of(state))


def shapes_of(tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


class Texts:
    """The texts that were begun in rows of a batch one by one, and the state that steps need for them."""

    def __init__(self) -> None:
        self._texts: dict[int, DecodeState] = {}
        self._is_fitted = True
        # Of the newest state, and of compiled steps.
        self._sizes: Sizes = {}
        self._compiled_sizes: Sizes = {}

    def begin(self, state: DecodeState, texts: Mapping[int, DecodeState]) -> None:
        """Write texts, each alone in its batch on any device, into rows, but for their sampling and eos tokens."""
        for row, text in texts.items():
            for name in _OF_ROWS:
                whole, new = getattr(state, name), getattr(text, name)
                if whole is not None:
                    whole[row] = _FILL.get(name, 0)
                    whole[row][tuple(map(slice, new.shape[1:]))] = new[0].to(whole.device)
        self._texts |= texts
        self._is_fitted, self._sizes = False, {}

    def end(self, rows: Iterable[int]) -> None:
        """The texts of these rows have ended; the next state has no room for them."""
        for row in rows:
            self._is_fitted = self._texts.pop(row, None) is None and self._is_fitted

    def fitted(self, state: DecodeState, compiled: bool) -> tuple[DecodeState | None, bool]:
        """The state with the sampling and eos tokens of the texts, in new tensors, and whether it is that of compiled
        steps; None = the state has them. Eager steps have room for these alone. Compiled ones have it for whatever came
        before, up to `ROOM`; texts that need more get a state for eager steps."""
        if self._is_fitted:
            return None, False
        self._is_fitted = True
        sizes = _sizes_of(self._texts.values(), state.capacity)
        room = {name: ROOM.get(name, 1) * (len(state.lengths) if name in PER_WORD else 1) for name in sizes}
        fits = compiled and all(size <= room[name] for name, size in sizes.items())
        if fits:
            self._compiled_sizes |= room
            sizes = dict(self._compiled_sizes)
        if sizes == self._sizes:
            return None, False
        self._sizes = sizes
        return _fitted(state, self._texts, sizes), fits


def _sizes_of(texts: Collection[DecodeState], capacity: int) -> Sizes:
    """What texts, each alone in its batch, need together in rows of this capacity."""
    sizes: Sizes = {"eos": 1, "temperature": 1}
    for text in texts:
        processors = text.sampling.processors
        own = {**dict.fromkeys(tensors_of(text.sampling), 1), "eos": text.eos.shape[1], "is_sampled": text.is_sampled}
        if isinstance(processors, Processors):
            # No n-gram is longer than the row.
            own["longest_ngram"] = min(processors.longest_ngram, round_up(capacity, 4))
        sizes = {name: max(own.get(name, 0), sizes.get(name, 0)) for name in own | sizes}
    if "words" in sizes:
        counts = [count_words(text.sampling.processors) for text in texts]
        words, pieces = (round_up(sum(each), 8) for each in zip(*counts, strict=True))
        sizes |= {"words": words, "biases": words, "pieces": pieces}
    return {name: int(size) for name, size in sizes.items() if size}


@normal_tensors()
def _fitted(state: DecodeState, texts: Mapping[int, DecodeState], sizes: Sizes) -> DecodeState:
    """The batch with the eos tokens and the sampling of these texts, by row, in new tensors of these sizes."""
    batch, rows = len(state.lengths), {row: tensors_of(text) for row, text in texts.items()}
    tensors: dict[str, Tensor] = {}
    for name in (name for name in _FREE if name in sizes):
        free = _FREE[name]
        values = [rows[row][name].item() if name in rows.get(row, ()) else free for row in range(batch)]
        tensors[name] = torch.tensor(values, dtype=torch.float32 if isinstance(free, float) else None, device="cpu")
    eos = torch.full((batch, sizes["eos"]), -1, device="cpu")
    for row, text in texts.items():
        eos[row, : text.eos.shape[1]] = text.eos[0]
    if "words" in sizes:
        own = {row: text.sampling.processors for row, text in texts.items()}
        tensors |= joined_words(own, sizes["words"], sizes["pieces"])
    tensors = {name: tensor.to(state.tokens.device) for name, tensor in tensors.items()}
    processors = None
    if "prompt_lengths" in tensors:
        processors = _of_tensors(Processors, tensors, longest_ngram=sizes.get("longest_ngram", 0))
    sampling = _of_tensors(SamplingTensors, tensors, processors=processors, coupled=state.sampling.coupled)
    return replace(state, eos=eos.to(state.tokens.device), sampling=sampling, is_sampled="is_sampled" in sizes)


def _of_tensors(kind: Any, tensors: dict[str, Tensor], **others: Any) -> Any:
    """An object of one of the `_STATE_CLASSES`, from the tensors that it has fields for."""
    return kind(**{field.name: tensors[field.name] for field in fields(kind) if field.name in tensors}, **others)


def _filled(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A larger tensor with the entries of this one."""
    larger = tensor.new_full(shape, _FILL.get(name, 0))
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger
