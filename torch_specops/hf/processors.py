"""transformers' logits processors, as `SamplingParams` where they have a counterpart, or called as they are."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.logits_process import WhisperNoSpeechDetection

from ..processors import Processors
from ..sampling import ALWAYS, Bias, SamplingParams, SamplingTensors

__all__ = ["ProcessorSampling", "read_processors"]

# The order in which `SamplingParams` applies them. What only excludes tokens commutes with the penalties before it.
_ORDER: dict[type, int] = {
    SequenceBiasLogitsProcessor: 0,
    RepetitionPenaltyLogitsProcessor: 1,
    NoRepeatNGramLogitsProcessor: 1,
    NoBadWordsLogitsProcessor: 1,
    MinLengthLogitsProcessor: 1,
    MinNewTokensLengthLogitsProcessor: 1,
    # It changes logits that are not finite, whose meaning here is fixed (docs/law.md).
    InfNanRemoveLogitsProcessor: 1,
    SuppressTokensLogitsProcessor: 1,
    SuppressTokensAtBeginLogitsProcessor: 1,
    TemperatureLogitsWarper: 2,
    TopKLogitsWarper: 3,
    TopPLogitsWarper: 4,
    MinPLogitsWarper: 5,
    LogitNormalization: 6,
}
_FIRST_WARPER = 2
# They remember the calls before, and drafts are no steps that they could remember.
_STATEFUL = (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WhisperNoSpeechDetection,
)
# The padding of prompts is rounded up to a multiple of this, so that batches share compiled code.
PADDING_MULTIPLE = 64


@dataclass(frozen=True)
class ProcessorSampling(SamplingParams):
    """`SamplingParams` that mean what a list of transformers' processors means.

    Args:
        biases: the same for all rows.
        input_ids: [B, P] the prompts with their padding, which transformers' processors take for text.
        num_padding: [B] int64, the padding on the left.
        called: processors that are called as they are; None = none.
    """

    biases: tuple[Bias, ...] = ()
    input_ids: Tensor | None = None
    num_padding: Tensor | None = None
    called: LogitsProcessorList | None = None
    pad_token_id: int = 0

    @property
    def not_compiled(self) -> str | None:
        """Why steps are not compiled."""
        if self.called is None:
            return None
        return f"{', '.join(type(each).__name__ for each in self.called)} of logits_processor: called as they are"

    def tensors(self, batch: int, device: torch.device | str = "cpu", **prompts: Any) -> SamplingTensors:
        tensors = super().tensors(batch, device, **prompts)
        assert self.input_ids is not None and self.num_padding is not None
        if self.called is not None:
            called = _Called(self.called, self.input_ids, prompts["prompt_lengths"], prompts["eos"], self.pad_token_id)
            return replace(tensors, processors=called)
        processors = tensors.processors
        if isinstance(processors, Processors) and processors.read_text and bool((self.num_padding > 0).any()):
            width = -(-int(self.num_padding.max()) // PADDING_MULTIPLE) * PADDING_MULTIPLE
            padding = torch.nn.functional.pad(self.input_ids, (0, max(width - self.input_ids.shape[1], 0)))[:, :width]
            processors = replace(
                processors,
                prompt_lengths=processors.prompt_lengths + self.num_padding,
                padding=padding,
                num_padding=self.num_padding,
            )
        return replace(tensors, processors=processors)

    def _biases(self, batch: int, eos: list[list[int]]) -> list[list[Bias]]:
        return [list(self.biases)] * batch


def read_processors(
    processors: LogitsProcessorList,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    do_sample: bool,
    vocab_size: int,
    pad_token_id: int,
) -> ProcessorSampling:
    """The last processors as temperature, filters and the rest of `SamplingParams`; if one before them has no
    counterpart, all up to it are called as they are.

    Args:
        input_ids, attention_mask: [B, P], the prompts with their padding.

    Raises:
        NotImplementedError: a processor that remembers earlier calls.
    """
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise NotImplementedError(
                f"logits_processor: {type(processor).__name__} remembers its earlier calls, and drafts are no steps"
            )
    values = None
    num_called = -1
    while values is None:
        num_called += 1
        values = _understood(processors[num_called:], input_ids.shape[1], vocab_size, num_called > 0)
    if not do_sample:
        # Temperature and filters do not change the argmax.
        values = {name: value for name, value in values.items() if name not in ("top_k", "top_p", "min_p")}
        values["temperature"] = 0.0
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return ProcessorSampling(
        **values,
        input_ids=input_ids.cpu(),
        num_padding=(mask.cumsum(1) == 0).sum(1).cpu(),
        called=LogitsProcessorList(processors[:num_called]) if num_called else None,
        pad_token_id=pad_token_id,
    )


def _understood(
    processors: list[LogitsProcessor], prompt_width: int, vocab_size: int, only_warpers: bool
) -> dict[str, Any] | None:
    """The fields of `ProcessorSampling` that do what these processors do; None if there are none."""
    values: dict[str, Any] = {}
    biases: list[Bias] = []
    last = _FIRST_WARPER if only_warpers else 0
    for processor in processors:
        # Not isinstance: a subclass may do anything.
        order = _ORDER.get(type(processor), -1)
        own, own_biases = _fields_of(processor), _biases_of(processor, prompt_width)
        if order < last or own is None or own_biases is None or own.keys() & values.keys():
            return None
        values |= own
        # transformers ignores tokens that the model cannot emit, but in a bias.
        is_bias = isinstance(processor, SequenceBiasLogitsProcessor)
        biases += [bias for bias in own_biases if is_bias or 0 <= bias.tokens[0] < vocab_size]
        last = order
    return values | {"biases": tuple(biases)}


def _fields_of(processor: Any) -> dict[str, Any] | None:
    """What of `SamplingParams` a processor sets; None if that is not all it does."""
    if getattr(processor, "prompt_ignore_length", None) or getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    match processor:
        case RepetitionPenaltyLogitsProcessor():
            return {"repetition_penalty": processor.penalty}
        case NoRepeatNGramLogitsProcessor():
            return {"no_repeat_ngram_size": processor.ngram_size}
        case TemperatureLogitsWarper():
            return {"temperature": processor.temperature}
        case TopKLogitsWarper():
            return {"top_k": processor.top_k}
        case TopPLogitsWarper() if processor.min_tokens_to_keep == 1 and processor.top_p > 0:
            return {"top_p": processor.top_p}
        case MinPLogitsWarper() if processor.min_tokens_to_keep == 1:
            return {"min_p": processor.min_p}
        case TopPLogitsWarper() | MinPLogitsWarper():
            return None
    return {}


def _biases_of(processor: Any, prompt_width: int) -> list[Bias] | None:
    """The biases that a processor adds; None if they cannot be written so."""
    match processor:
        case SequenceBiasLogitsProcessor():
            # Of words too, without those that are an eos token.
            return [Bias(tuple(map(int, tokens)), value) for tokens, value in processor.sequence_bias.items()]
        case MinLengthLogitsProcessor():
            return _excluded(processor.eos_token_id, processor.min_length - prompt_width)
        case MinNewTokensLengthLogitsProcessor():
            fewest = processor.prompt_length_to_skip + processor.min_new_tokens
            return _excluded(processor.eos_token_id, fewest - prompt_width)
        case SuppressTokensLogitsProcessor():
            return _excluded(processor.suppress_tokens, ALWAYS)
        case SuppressTokensAtBeginLogitsProcessor():
            if processor.begin_index > prompt_width:
                return None
            return _excluded(processor.begin_suppress_tokens, processor.begin_index - prompt_width + 1)
    return []


def _excluded(tokens: Tensor, until: int) -> list[Bias]:
    return [Bias((token,), -math.inf, until) for token in tokens.flatten().tolist() if until > 0]


class _Called:
    """Processors as transformers calls them: on the text of every row, padding included, with one more token each time.

    Rows have different numbers of new tokens. All are in every call, because a processor may know its rows by index,
    and those with the right number are taken. What follows an eos is never read, so no call is made for it.

    Args:
        processors: functions of their arguments.
        input_ids: [B, P], the prompts with their padding.
        prompt_lengths: [B], without it.
        eos: [B, E], tokens that end a row; -1 is none.
        pad_token_id: stands where a row has fewer tokens than the call.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        input_ids: Tensor,
        prompt_lengths: Tensor,
        eos: Tensor,
        pad_token_id: int,
    ) -> None:
        self._processors = processors
        self._input_ids = input_ids
        self._prompt_lengths = prompt_lengths
        self._eos = eos
        self._pad_token_id = pad_token_id

    @property
    def constants(self) -> Hashable:
        # Another call has others.
        return self

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        prompts, starts = self._input_ids.to(text.device), self._prompt_lengths.to(text.device).unsqueeze(1)
        is_new = torch.arange(text.shape[1], device=text.device) >= starts
        is_eos = (text.unsqueeze(2) == self._eos.to(text.device).unsqueeze(1)).any(2) & is_new
        is_read = is_eos.cumsum(1).gather(1, lengths - 1) == 0
        processed = logits.to(torch.float32, copy=True)
        for index in range(logits.shape[1]):
            num_new = lengths[:, index] - starts[:, 0]
            for count in num_new[is_read[:, index]].unique().tolist():
                places = starts + torch.arange(count, device=text.device)
                new = text.gather(1, places.clamp(max=text.shape[1] - 1))
                new = torch.where(places < lengths[:, index : index + 1], new, self._pad_token_id)
                scores = self._processors(torch.cat([prompts, new], 1), logits[:, index].to(torch.float32, copy=True))
                is_its = (num_new == count).unsqueeze(1)
                processed[:, index] = torch.where(is_its, scores, processed[:, index])
        return processed
