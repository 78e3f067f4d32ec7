"""The outputs of `custom_generate` for calls that ask for more than the tokens."""

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
    """The same for an encoder-decoder model."""

    stats: GenerationStats | None = None


class Predictions:
    """Scores and logits of a call, as transformers' `generate` returns them: for each new token [B, V] float32.

    An eager step pushes all of the target's logits. Once the host has read the step's record, only the logits of
    emitted tokens are kept: B x L x V x 4 bytes in the end.

    Args:
        processors: turn logits into scores.
        prompts: [B, P], padding included.
        config: says which of them the call requests.
    """

    def __init__(self, processors: LogitsProcessorList, prompts: Tensor, config: GenerationConfig) -> None:
        self._processors = processors
        self._num_prompt = prompts.shape[1]
        self._config = config
        self._steps: list[Tensor] = []
        self._rows: list[list[Tensor]] = [[] for _ in prompts]
        self._scores: tuple[Tensor, ...] = ()

    def push(self, logits: Tensor) -> None:
        """Add the logits of a step [B, K+1, V]."""
        self._steps.append(logits)

    def keep(self, num_tokens: list[int]) -> None:
        """Keep the first `num_tokens` logits of each row of the oldest pushed step."""
        logits = self._steps.pop(0)
        for row, count in enumerate(num_tokens):
            self._rows[row] += logits[row, :count].to(torch.float32, copy=True)

    def scores(self, input_ids: Tensor) -> tuple[Tensor, ...] | None:
        """The scores of all new tokens of `input_ids` [B, P + n]; None if the call does not request scores."""
        if not self._config.output_scores:
            return None
        for place in range(len(self._scores), input_ids.shape[1] - self._num_prompt):
            text = input_ids[:, : self._num_prompt + place]
            # Give processors zeros for a row that has ended: its logits are NaN.
            logits = self._logits(place)
            logits = torch.where(logits.isnan().all(1, keepdim=True), 0.0, logits)
            self._scores += (self._processors(text, logits.to(text.device)),)
        return self._scores

    def fields(self, sequences: Tensor, lengths: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """`scores` and `logits`, if requested; NaN where a row has no token.

        Args:
            sequences: [B, P + L].
            lengths: [B], new tokens of each row.
        """
        found = {"scores": self.scores(sequences)}
        if self._config.output_logits:
            places = range(sequences.shape[1] - self._num_prompt)
            found["logits"] = tuple(self._logits(place).to(sequences.device) for place in places)
        return {
            name: tuple(each.masked_fill((lengths <= n).unsqueeze(1), math.nan) for n, each in enumerate(values))
            for name, values in found.items()
            if values is not None
        }

    def _logits(self, place: int) -> Tensor:
        """The logits [B, V] float32 of each row's new token number `place`; NaN for rows without that token."""
        found = [own[place] if place < len(own) else None for own in self._rows]
        none = next(torch.full_like(logits, math.nan) for logits in found if logits is not None)
        return torch.stack([none if logits is None else logits for logits in found])
