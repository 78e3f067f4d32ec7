"""Convert transformers' logits processors to `SamplingParams` where possible, and call the others unchanged."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import generation
from transformers.generation import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ...drafts import AnyDraft
from ...sampling import ALWAYS, Bias, Processors, SamplingParams, SamplingTensors

# The stages in which `SamplingParams` applies processors. Processors of one stage may be in any order, because a
# processor that only excludes tokens commutes with penalties. `InfNanRemoveLogitsProcessor` (`remove_invalid_values`)
# is ignored: docs/what_verify_computes.md defines the results for logits that are not finite.
_STAGES: tuple[tuple[type, ...], ...] = (
    (generation.SequenceBiasLogitsProcessor,),
    (
        generation.RepetitionPenaltyLogitsProcessor,
        generation.NoRepeatNGramLogitsProcessor,
        generation.NoBadWordsLogitsProcessor,
        generation.MinLengthLogitsProcessor,
        generation.MinNewTokensLengthLogitsProcessor,
        generation.InfNanRemoveLogitsProcessor,
        generation.SuppressTokensLogitsProcessor,
        generation.SuppressTokensAtBeginLogitsProcessor,
    ),
    (generation.TemperatureLogitsWarper,),
    (generation.TopKLogitsWarper,),
    (generation.TopPLogitsWarper,),
    (generation.MinPLogitsWarper,),
    (generation.LogitNormalization,),
)
STAGE = {kind: stage for stage, kinds in enumerate(_STAGES) for kind in kinds}
FIRST_WARPER = STAGE[generation.TemperatureLogitsWarper]
# Processors that depend on earlier calls. They are listed because `_HostProcessors`, which calls a processor a second
# time with the arguments of its first call, may not notice them: there may be too few calls, or a grammar may stay in
# one state.
_STATEFUL = generation.SynthIDTextWatermarkLogitsProcessor
_GRAMMARS = ("llguidance", "outlines", "xgrammar")
# Round the width of the prompt padding up to a multiple of this number, so that batches with different padding share
# compiled code.
PADDING_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class ProcessorSampling(SamplingParams):
    """`SamplingParams` that are equivalent to a list of transformers' processors.

    Args:
        biases: the same for all rows.
        padding: [B, P], the left padding of the prompts; the pad token at all other positions. It is needed because
            transformers' processors treat padding like other tokens.
        num_padding: [B] int64, the number of padding tokens of each prompt.
        num_ignored: [B] int64, how many tokens from the left, padding included, a repetition penalty ignores; None = 0.
        called: processors without an equivalent, which are called unchanged.
        pad_token_id: the token that these processors get where a row has no token.
        asked_once: True = these processors are called once per token, as in transformers. This needs a call without
            drafts and without `output_scores`.
    """

    biases: tuple[Bias, ...]
    padding: Tensor
    num_padding: Tensor
    num_ignored: Tensor | None = None
    called: list[LogitsProcessor]
    pad_token_id: int
    asked_once: bool

    @property
    def not_compiled(self) -> str | None:
        """The reason why steps are not compiled; None if they may be compiled."""
        names = ", ".join(type(each).__name__ for each in self.called)
        return f"{names} of logits_processor: called as they are" if names else None

    def tensors(self, batch: int, device: torch.device | str = "cpu", **prompts: Any) -> SamplingTensors:
        tensors = super().tensors(batch, device, **prompts)
        if self.called:
            return replace(tensors, processors=_HostProcessors(self, prompts["prompt_lengths"], prompts["eos"]))
        processors = tensors.processors
        if not isinstance(processors, Processors):
            return tensors
        if self.num_ignored is not None:
            processors = replace(processors, num_ignored=self.num_ignored.to(device))
        if processors.read_text and bool((self.num_padding > 0).any()):
            width = -(-int(self.num_padding.max()) // PADDING_MULTIPLE) * PADDING_MULTIPLE
            processors = replace(
                processors,
                prompt_lengths=processors.prompt_lengths + self.num_padding,
                padding=pad(self.padding, (0, max(width - self.padding.shape[1], 0)))[:, :width],
                num_padding=self.num_padding,
            )
        return replace(tensors, processors=processors)

    def _biases(self, batch: int, eos: list[list[int]]) -> list[list[Bias]]:
        return [list(self.biases)] * batch


def read_processors(
    processors: LogitsProcessorList,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: GenerationConfig,
    vocab_size: int,
    draft: AnyDraft,
) -> ProcessorSampling:
    """Convert processors to `SamplingParams`. If a processor has no equivalent, the list is split: the processors up to
    the last one that is not a convertible warper are called unchanged, and only the warpers after it are converted.

    Args:
        input_ids, attention_mask: [B, P], the padded prompts.
        config: the generation config that `generate` prepared.

    Raises:
        NotImplementedError: a processor depends on earlier calls, and there is a draft or `output_scores`.
    """
    asked_once = draft is None and not config.output_scores
    pad = getattr(config, "_pad_token_tensor", None)
    pad_token_id = 0 if pad is None else int(pad)
    for processor in processors:
        remembers = isinstance(processor, _STATEFUL) or type(processor).__module__.split(".")[0] in _GRAMMARS
        if remembers and not asked_once:
            raise _refused(processor, "remembers its calls")
    mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).cpu()
    num_padding = (mask.cumsum(1) == 0).sum(1)
    is_padding = torch.arange(input_ids.shape[1], device="cpu") < num_padding.unsqueeze(1)
    widths = num_padding + mask.sum(1)
    fields = [_fields_of(processor, input_ids.shape[1], widths, vocab_size) for processor in processors]
    num_called, merged = 0, _merged(processors, fields, 0)
    while merged is None:
        num_called += 1
        merged = _merged(processors[num_called:], fields[num_called:], FIRST_WARPER)
    if not config.do_sample:
        # Drop the temperature and the filters, because they do not change the argmax.
        merged = {name: value for name, value in merged.items() if name not in ("top_k", "top_p", "min_p")}
        merged["temperature"] = 0.0
    return ProcessorSampling(
        **merged,
        padding=torch.where(is_padding, input_ids.cpu(), pad_token_id),
        num_padding=num_padding,
        called=processors[:num_called],
        pad_token_id=pad_token_id,
        asked_once=asked_once,
    )


def _merged(
    processors: list[LogitsProcessor], fields: list[dict[str, Any] | None], stage: int
) -> dict[str, Any] | None:
    """Merge the fields of all processors. None if a processor has no fields, if two set the same field, or if their
    stages do not ascend from `stage` on."""
    merged: dict[str, Any] = {"biases": ()}
    for processor, added in zip(processors, fields, strict=True):
        if added is None or STAGE[type(processor)] < stage or (added.keys() & merged.keys()) - {"biases"}:
            return None
        merged |= added | {"biases": merged["biases"] + added.get("biases", ())}
        stage = STAGE[type(processor)]
    return merged


def _fields_of(processor: Any, prompt_width: int, widths: Tensor, vocab_size: int) -> dict[str, Any] | None:
    """The fields of `ProcessorSampling` that are equivalent to a processor; None if it has no equivalent."""

    def excluded(tokens: Tensor, until: int) -> dict[str, Any]:
        # Ignore tokens outside the vocabulary, as these processors of transformers do.
        known = [token for token in tokens.flatten().tolist() if 0 <= token < vocab_size and until > 0]
        return {"biases": tuple(Bias((token,), -math.inf, until) for token in known)}

    # Compare the exact type, because a subclass may behave differently.
    if type(processor) not in STAGE or getattr(processor, "filter_value", -math.inf) != -math.inf:
        return None
    match processor:
        # This case includes the subclass for bad words, which has already removed eos tokens.
        case generation.SequenceBiasLogitsProcessor():
            # transformers 5.17 ignores the bias of a token sequence that is longer than the padded prompt. `Bias` does
            # not, so do not convert such a processor.
            if any(len(tokens) > prompt_width for tokens in processor.sequence_bias):
                return None
            return {"biases": tuple(Bias(tuple(map(int, key)), bias) for key, bias in processor.sequence_bias.items())}
        case generation.MinLengthLogitsProcessor():
            return excluded(processor.eos_token_id, processor.min_length - prompt_width)
        case generation.MinNewTokensLengthLogitsProcessor():
            fewest = processor.prompt_length_to_skip + processor.min_new_tokens
            return excluded(processor.eos_token_id, fewest - prompt_width)
        case generation.SuppressTokensLogitsProcessor():
            return excluded(processor.suppress_tokens, ALWAYS)
        case generation.SuppressTokensAtBeginLogitsProcessor() if processor.begin_index <= prompt_width:
            return excluded(processor.begin_suppress_tokens, processor.begin_index - prompt_width + 1)
        case generation.RepetitionPenaltyLogitsProcessor():
            # From transformers 5.23 on, `generate` sets `prompt_ignore_length` to the number of padding tokens of each
            # row.
            ignore_length = processor.prompt_ignore_length
            ignored = torch.as_tensor(0 if ignore_length is None else ignore_length, device="cpu")
            if ignored.shape not in ((), widths.shape) or bool(((ignored < 0) | (ignored >= widths)).any()):
                return None
            return {"repetition_penalty": processor.penalty, "num_ignored": ignored.expand_as(widths).contiguous()}
        case generation.NoRepeatNGramLogitsProcessor():
            return {"no_repeat_ngram_size": processor.ngram_size}
        case generation.TemperatureLogitsWarper():
            return {"temperature": processor.temperature}
        case generation.TopKLogitsWarper():
            return {"top_k": processor.top_k}
        case generation.TopPLogitsWarper() if processor.min_tokens_to_keep == 1 and processor.top_p > 0:
            return {"top_p": processor.top_p}
        case generation.MinPLogitsWarper() if processor.min_tokens_to_keep == 1:
            return {"min_p": processor.min_p}
        case generation.LogitNormalization() | generation.InfNanRemoveLogitsProcessor():
            return {}
    return None


class _Row:
    """The state of one row during a call of `_HostProcessors`.

    Attributes:
        new: the new tokens of the row and its drafts in this step; -1 where there is no draft.
        first, last: processors are called for the prefixes that have `first` to `last` of these tokens. The longest
            prefix ends before an eos, before a draft that a processor excludes, or with the last draft.
        has_ended: True = an eos follows the longest prefix.
    """

    def __init__(self, tokens: Tensor, padding: Tensor, lengths: list[int], start: int, eos: list[int]) -> None:
        self._tokens, self._padding, self._start = tokens, padding, start
        self.new: list[int] = tokens[start : lengths[-1]].tolist()
        # A draft that cannot read a row gets one token of it. The row's drafts are dropped, so nothing is asked for it.
        self.first = lengths[0] - start if lengths[0] >= start else len(self.new) + 1
        self.last = min((self.new.index(token) for token in {-1, *eos} if token in self.new), default=len(self.new))
        self.has_ended = self.last < len(self.new) and self.new[self.last] >= 0

    def text(self, count: int, pad_token_id: int) -> Tensor:
        """The tokens [P + count] that this row shows in a call for rows with `count` new tokens."""
        text = pad(self._padding, (0, count), value=pad_token_id)
        num_shown = min(count, self.last + self.has_ended)
        begin = len(text) - self._start - (count if self.has_ended else num_shown)
        text[begin:][: self._start + num_shown] = self._tokens[: self._start + num_shown]
        return text


class _HostProcessors:
    """Call processors as transformers does: with the tokens of all rows, padding included, and one more token in each
    call.

    Rows may have different numbers of new tokens. Each call passes all rows, because a processor may identify rows by
    their index. The result is used only for rows that have the call's number of new tokens. Other rows must still have
    valid inputs: a longer row is truncated, a shorter row gets more padding on its left, and a row that has ended gets
    padding after its eos, as in transformers.

    Unless `asked_once`, the first call is repeated after a later one. A processor that returns a different result is
    refused, because it depends on earlier calls.

    Args:
        prompt_lengths: [B], without padding.
        eos: [B, E], the tokens that end each row; -1 = no token.
    """

    def __init__(self, sampling: ProcessorSampling, prompt_lengths: Tensor, eos: Tensor) -> None:
        self._processors = [self._of_rows_asked(processor) for processor in sampling.called]
        self._sampling = sampling
        self._prompt_lengths = prompt_lengths
        self._eos = eos
        self._num_asked = 0
        # The arguments and results of the first call; None after it has been repeated.
        self._first: tuple[tuple[Tensor, Tensor, list[bool]], list[Tensor]] | None = None
        self._rows_asked: list[bool] = []

    @property
    def constants(self) -> Hashable:
        # Return an object that is unique to this `generate` call, because another call has other processors.
        return self

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        padding, pad_token = self._sampling.padding, self._sampling.pad_token_id
        columns = text.cpu(), padding, lengths.tolist(), self._prompt_lengths.tolist(), self._eos.tolist()
        rows = [_Row(*row) for row in zip(*columns, strict=True)]
        index = torch.arange(len(rows), device=text.device)
        processed = logits.to(torch.float32, copy=True)
        for count in sorted({count for row in rows for count in range(row.first, row.last + 1)}):
            asked = [row.first <= count <= row.last for row in rows]
            if not any(asked):
                continue
            texts = torch.stack([row.text(count, pad_token) for row in rows]).to(text.device)
            places = [min(max(count - row.first, 0), logits.shape[1] - 1) for row in rows]
            question = texts, processed[index, places], asked
            *_, scores = answers = self._answers(*question)
            if self._num_asked == 0 and not self._sampling.asked_once:
                self._first = question, answers
            self._num_asked += 1
            drafts = [row.new[count] if count < len(row.new) else 0 for row in rows]
            is_excluded = (~(scores[index, drafts] > -math.inf)).tolist()
            for b, row in enumerate(rows):
                if asked[b]:
                    processed[b, places[b]] = scores[b]
                    if is_excluded[b]:
                        row.last, row.has_ended = count, False
        if self._first is not None and self._num_asked > 1:
            (question, answers), self._first = self._first, None
            for processor, before, after in zip(self._processors, answers, self._answers(*question), strict=True):
                # Allow for rounding: on a GPU the order of additions may differ between calls.
                if not torch.allclose(before, after, rtol=1e-4, atol=1e-4, equal_nan=True):
                    raise _refused(processor, "answered one text in two ways")
        return processed

    def _answers(self, texts: Tensor, logits: Tensor, rows_asked: list[bool]) -> list[Tensor]:
        """The scores [B, V] after each processor. Each processor gets a copy, because it may write to its input."""
        self._rows_asked = rows_asked
        answers = [logits]
        for processor in self._processors:
            try:
                answers.append(processor(texts, answers[-1].clone()))
            except Exception as error:
                if self._sampling.asked_once or self._num_asked == 0:
                    raise
                raise _refused(processor, f"raised {type(error).__name__} on a later text") from error
        return answers[1:]

    def _of_rows_asked(self, processor: Any) -> Any:
        """Return the processor. If it calls a user's function for each row, wrap it so that the function is called only
        for rows whose result is used."""
        if type(processor) is not generation.PrefixConstrainedLogitsProcessor or processor._num_beams != 1:
            return processor
        allowed = processor._prefix_allowed_tokens_fn

        def allowed_if_asked(row: int, text: Tensor) -> Any:
            # The scores of other rows are not used, so the allowed tokens do not matter.
            return allowed(row, text) if self._rows_asked[row] else [0]

        return generation.PrefixConstrainedLogitsProcessor(allowed_if_asked, 1)


def _refused(processor: object, what: str) -> NotImplementedError:
    kind = type(processor)
    return NotImplementedError(
        f"logits_processor: {kind.__module__}.{kind.__qualname__} {what}; with a draft or output_scores, expected a "
        "function of the text and the scores, because texts are not asked about once and in order; decode without them "
        "(a grammar is passed as grammar=)"
    )
