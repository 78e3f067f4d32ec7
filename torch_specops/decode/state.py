"""The tensors of a batch: their layout, copies with more capacity, and writing new sequences into their rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops.tracing import normal_tensors
from ..sampling import NEUTRAL, Processors, SamplingTensors
from ..sampling.processors import count_words, joined_words, round_up
from .guard import autocast_of

# Tensors [B, W] or [B, W, N] of a state, where W is the capacity, with the value of a slot that has no token.
PER_SLOT = {"tokens": 0, "logprobs": math.nan, "top_tokens": -1, "top_values": math.nan}
# Tensors [B] of `DecodeState`.
PER_ROW = ("lengths", "limits", "finished", "failed", "seeds")
# Tensors [B] of the sampling parameters, with the value of a free row. Free rows are greedy, because that costs least.
PER_ROW_SAMPLING = NEUTRAL | {"temperature": 0.0, "prompt_lengths": 0}
# The sizes of a session's compiled steps: eos tokens per row, the longest n-gram, and words and pieces per row (of
# which all rows share the sum). While a request needs more, steps run eagerly, so that no step is compiled for a single
# request.
ROOM = {"eos": 8, "longest_ngram": 8, "words": 32, "pieces": 32}
# The sizes of a state: a size for each name in ROOM. `is_sampled` and the names in PER_ROW_SAMPLING have 1 if steps use
# them, else 0.
Sizes = dict[str, int]


@dataclass(frozen=True)
class DecodeState:
    """A batch of sequences. With the caches of the models, this is all that a step reads and writes.

    Args:
        tokens: [B, W] int64, each sequence from index 0 on. In a step, W is at least the largest limit + K + 1.
        lengths: [B] int64 >= 1, tokens of each sequence. The target has read all but the newest.
        limits: [B] int64, the length at which a row ends.
        eos: [B, E] int64, tokens that end a row; -1 is none.
        finished: [B] bool.
        failed: [B] bool, rows that ended because the target gave no finite logit.
        seeds: [B] int64.
        sampling: temperature, filters and processors of each row.
        is_sampled: whether any temperature is above 0. If none is, a step draws no random numbers.
        logprobs: [B, W] float32, the log-probability of every emitted token under the target, NaN elsewhere; None = not
            computed.
        logprobs_of: "raw" or "processed", as in `log_probabilities`; None = not computed.
        top_tokens, top_values: [B, W, N] int64 and float32, the N most likely tokens at each emitted token and their
            log-probabilities, -1 and NaN elsewhere; None = not computed.
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


def tensors_of(state: DecodeState) -> dict[str, Tensor]:
    """Every tensor of a state by name."""
    sampling, processors = state.sampling, state.sampling.processors
    tensors = _tensors_in(state) | _tensors_in(sampling)
    return tensors | _tensors_in(processors) if isinstance(processors, Processors) else tensors


def _tensors_in(part: DecodeState | SamplingTensors | Processors) -> dict[str, Tensor]:
    return {name: value for name, value in vars(part).items() if isinstance(value, Tensor)}


@normal_tensors()
def moved(state: DecodeState, device: torch.device, capacity: int) -> DecodeState:
    """Copy a state and its tensors to the device, with room for `capacity` tokens in each row."""

    def copies(part: DecodeState | SamplingTensors | Processors) -> dict[str, Any]:
        return {name: tensor.to(device, copy=True) for name, tensor in _tensors_in(part).items()}

    tensors, sampling, processors = copies(state), copies(state.sampling), state.sampling.processors
    for name in PER_SLOT.keys() & tensors.keys():
        batch, width, *rest = tensors[name].shape
        more = tensors[name].new_full((batch, capacity - width, *rest), PER_SLOT[name])
        tensors[name] = torch.cat([tensors[name], more], 1)
    if isinstance(processors, Processors):
        sampling["processors"] = replace(processors, **copies(processors))
    return replace(state, **tensors, sampling=replace(state.sampling, **sampling))


def copy_state(old: DecodeState, new: DecodeState) -> None:
    """Copy `new` into the tensors of `old`, which has the same shape."""
    for old_tensor, new_tensor in zip(tensors_of(old).values(), tensors_of(new).values(), strict=True):
        if old_tensor is not new_tensor:
            old_tensor.copy_(new_tensor)


def shape_of(state: DecodeState) -> Hashable:
    """Everything that compiled pieces treat as constant for a batch, except K and the shapes of the inputs."""
    processors = state.sampling.processors
    constants = state.is_sampled, state.logprobs_of, None if processors is None else processors.constants
    return autocast_of(state.tokens.device), constants, shapes_of(tensors_of(state))


def shapes_of(tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())


class Texts:
    """The sequences that were admitted one by one to rows of a batch. Each sequence is the state of a batch of one."""

    def __init__(self) -> None:
        self._texts: dict[int, DecodeState] = {}
        # Whether the newest state has the sampling parameters of exactly the sequences in `_texts`.
        self._is_fitted = True
        # The sizes of the sampling tensors in the newest state that `fitted` made, and in the newest one for compiled
        # steps.
        self._sizes: Sizes = {}
        self._compiled_sizes: Sizes = {}

    def begin(self, state: DecodeState, texts: Mapping[int, DecodeState]) -> None:
        """Write sequences into rows of the state. The tensors of the sequences may be on any device. `fitted` writes
        the sampling parameters and eos tokens."""
        for row, text in texts.items():
            for name in PER_ROW:
                getattr(state, name)[row] = getattr(text, name)[0]
            for name, free in PER_SLOT.items():
                all_rows, new_row = getattr(state, name), getattr(text, name)
                if all_rows is not None:
                    all_rows[row] = free
                    all_rows[row, : new_row.shape[1]] = new_row[0]
        self._texts |= texts
        self._is_fitted, self._sizes = False, {}

    def end(self, rows: Iterable[int]) -> None:
        """Forget the sequences of these rows, so that the next state leaves out their sampling parameters."""
        for row in rows:
            if self._texts.pop(row, None) is not None:
                self._is_fitted = False

    def fitted(self, state: DecodeState, compiled: bool) -> tuple[DecodeState | None, bool]:
        """Make a state with the sampling parameters and the eos tokens of the sequences, in new tensors.

        An eager state has only the filters and processors of these sequences, because three unused filters made steps a
        third slower. A compiled state has every filter and processor that a sequence has used so far, in the sizes of
        `ROOM`.

        Returns:
            The state, or None if the newest state already fits; and whether compiled steps have room for it.
        """
        if self._is_fitted:
            return None, False
        self._is_fitted = True
        batch = len(state.lengths)
        sizes = _sizes_of(self._texts.values(), state.capacity)
        room = ROOM | {"words": ROOM["words"] * batch, "pieces": ROOM["pieces"] * batch}
        fits = compiled and all(sizes[name] <= room[name] for name in room)
        if fits:
            used = {name: size or self._compiled_sizes.get(name) for name, size in sizes.items()}
            self._compiled_sizes = sizes = {name: room.get(name, 1) if used[name] else 0 for name in sizes}
        if sizes == self._sizes:
            return None, False
        self._sizes = sizes
        return _with_sampling(state, self._texts, sizes), fits


def _sizes_of(texts: Collection[DecodeState], capacity: int) -> Sizes:
    """The `Sizes` of a state with these sequences. The longest n-gram is limited by the capacity of the rows."""
    processors = [text.sampling.processors for text in texts]
    counts = [count_words(each) for each in processors]
    ngrams = [each.longest_ngram for each in processors if isinstance(each, Processors)]
    used = {"temperature"}.union(*(tensors_of(text) for text in texts))
    return {
        "eos": max((text.eos.shape[1] for text in texts), default=1),
        "is_sampled": any(text.is_sampled for text in texts),
        # No n-gram is longer than the row, so a larger size would only cost time.
        "longest_ngram": min(max(ngrams, default=0), round_up(capacity, 4)),
        "words": round_up(sum(words for words, _ in counts), 8) if "words" in used else 0,
        "pieces": round_up(sum(pieces for _, pieces in counts), 8) if "words" in used else 0,
        **{name: int(name in used) for name in PER_ROW_SAMPLING},
    }


@normal_tensors()
def _with_sampling(state: DecodeState, texts: Mapping[int, DecodeState], sizes: Sizes) -> DecodeState:
    """Make a state with the eos tokens and the sampling parameters of `texts` (row -> sequence), in new tensors of
    these sizes."""
    batch, device = len(state.lengths), state.tokens.device
    eos = torch.full((batch, sizes["eos"]), -1, device="cpu")
    numbers = {
        name: torch.full((batch,), free, dtype=torch.float32 if isinstance(free, float) else torch.int64, device="cpu")
        for name, free in PER_ROW_SAMPLING.items()
        if sizes[name]
    }
    for row, text in texts.items():
        eos[row, : text.eos.shape[1]] = text.eos[0]
        for name, number in tensors_of(text).items():
            if name in numbers:
                numbers[name][row] = number[0]
    processors_of = {row: text.sampling.processors for row, text in texts.items()}
    words = joined_words(processors_of, sizes["words"], sizes["pieces"]) if sizes["words"] else {}
    tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in (numbers | words).items()}
    sampling = {name: tensors.pop(name) for name in ("temperature", "top_k", "top_p", "min_p") if name in tensors}
    processors = Processors(**tensors, longest_ngram=sizes["longest_ngram"]) if tensors else None
    return replace(
        state,
        eos=eos.to(device),
        sampling=SamplingTensors(**sampling, processors=processors, coupled=state.sampling.coupled),
        is_sampled=bool(sizes["is_sampled"]),
    )
