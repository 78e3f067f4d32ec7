"""The outputs of `custom_generate` with `return_dict_in_generate=True`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationConfig,
    LogitsProcessorList,
)

from ...decode.output import GenerationStats


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """The output for `return_dict_in_generate=True`: `sequences`, `stats`, and `scores` and `logits` if requested; the
    other fields are None."""

    stats: GenerationStats | None = None


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """`DecoderOnlyOutput` for an encoder-decoder model."""

    stats: GenerationStats | None = None


class Predictions:
    """The scores and logits of a call, one [B, V] float32 tensor per new token, as transformers' `generate` returns
    them.

    Each step first calls `push` with the target's logits at all its positions. When the step's number of emitted tokens
    is known, `keep` drops the logits of other positions. In the end B x L x V x 4 bytes are kept.

    Args:
        processors: the logits processors that convert logits to scores.
        prompts: [B, P], padding included.
        config: its `output_scores` and `output_logits` say which outputs the call requests.
    """

    def __init__(self, processors: LogitsProcessorList, prompts: Tensor, config: GenerationConfig) -> None:
        self._processors = processors
        self._num_prompt = prompts.shape[1]
        self._config = config
        self._steps: list[Tensor] = []
        self._rows: list[list[Tensor]] = [[] for _ in prompts]
        self._scores: tuple[Tensor, ...] = ()

    def push(self, logits: Tensor) -> None:
        """Store the logits [B, K+1, V] of a step."""
        self._steps.append(logits)

    def keep(self, num_tokens: list[int]) -> None:
        """Keep the logits of the first num_tokens[b] positions of each row b of the oldest pushed step, and drop the
        others."""
        logits = self._steps.pop(0)
        for row, count in enumerate(num_tokens):
            self._rows[row] += logits[row, :count].to(torch.float32, copy=True)

    def scores(self, input_ids: Tensor) -> tuple[Tensor, ...] | None:
        """The scores of all new tokens of `input_ids` [B, P + n]; None if the call does not request scores."""
        if not self._config.output_scores:
            return None
        for place in range(len(self._scores), input_ids.shape[1] - self._num_prompt):
            text = input_ids[:, : self._num_prompt + place]
            # The logits of a row that has ended are NaN. Replace them by zeros, because a processor may fail on NaN.
            logits = self._logits(place)
            logits = torch.where(logits.isnan().all(1, keepdim=True), 0.0, logits)
            self._scores += (self._processors(text, logits.to(text.device)),)
        return self._scores

    def fields(self, sequences: Tensor, lengths: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """The requested outputs `scores` and `logits`. Tensors contain NaN in rows that have no token there.

        Args:
            sequences: [B, P + L].
            lengths: [B], the number of new tokens of each row.
        """
        outputs = {"scores": self.scores(sequences)}
        if self._config.output_logits:
            places = range(sequences.shape[1] - self._num_prompt)
            outputs["logits"] = tuple(self._logits(place).to(sequences.device) for place in places)
        return {
            name: tuple(each.masked_fill((lengths <= n).unsqueeze(1), math.nan) for n, each in enumerate(tensors))
            for name, tensors in outputs.items()
            if tensors is not None
        }

    def _logits(self, place: int) -> Tensor:
        """The logits [B, V] float32 of each row's new token number `place`; NaN for rows without that token."""
        row_logits = [row[place] if place < len(row) else None for row in self._rows]
        none = next(torch.full_like(logits, math.nan) for logits in row_logits if logits is not None)
        return torch.stack([none if logits is None else logits for logits in row_logits])
