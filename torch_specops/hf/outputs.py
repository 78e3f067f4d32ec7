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

from ..decode.output import GenerationStats

__all__ = ["DecoderOnlyOutput", "EncoderDecoderOutput", "KeptLogits", "Predictions"]


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """The output for `return_dict_in_generate=True`: `sequences`, `stats`, and `scores` and `logits` where they are
    asked for; the other fields are None."""

    stats: GenerationStats | None = None


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder model."""

    stats: GenerationStats | None = None


class KeptLogits:
    """The target's logits of every new token, B x L x V x 4 bytes.

    An eager step pushes all of its logits; once the host has read the step's record, only those of the emitted tokens
    are kept.
    """

    def __init__(self, num_rows: int) -> None:
        self._steps: list[Tensor] = []
        self._rows: list[list[Tensor]] = [[] for _ in range(num_rows)]

    def push(self, logits: Tensor) -> None:
        """Add the logits of a step [B, K+1, V]."""
        self._steps.append(logits)

    def keep(self, num_tokens: list[int]) -> None:
        """Keep the first `num_tokens` logits of each row of the oldest step that was pushed."""
        logits = self._steps.pop(0)
        for row, count in enumerate(num_tokens):
            self._rows[row] += logits[row, :count].to(torch.float32, copy=True)

    def at(self, place: int) -> Tensor:
        """[B, V] float32, the logits that gave each row's new token number `place`; NaN for rows that have none."""
        found = [own[place] if place < len(own) else None for own in self._rows]
        none = next(torch.full_like(logits, math.nan) for logits in found if logits is not None)
        return torch.stack([none if logits is None else logits for logits in found])


class Predictions:
    """Scores and logits of a call, as transformers' `generate` returns them: for each new token [B, V] float32.

    Args:
        kept: the target's logits.
        processors: turn logits into scores.
        num_prompt: the prompts' length, padding included.
        config: says what is asked for.
    """

    def __init__(
        self, kept: KeptLogits, processors: LogitsProcessorList, num_prompt: int, config: GenerationConfig
    ) -> None:
        self.kept = kept
        self._processors = processors
        self._num_prompt = num_prompt
        self._config = config
        self._scores: tuple[Tensor, ...] = ()

    @staticmethod
    def wanted(config: GenerationConfig) -> bool:
        return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))

    def scores(self, input_ids: Tensor) -> tuple[Tensor, ...] | None:
        """The scores of all new tokens of `input_ids` [B, P + n]; None if the call does not ask for scores."""
        if not self._config.output_scores:
            return None
        for place in range(len(self._scores), input_ids.shape[1] - self._num_prompt):
            text = input_ids[:, : self._num_prompt + place]
            # Give processors zeros for a row that has ended: its logits are NaN.
            logits = self.kept.at(place)
            logits = torch.where(logits.isnan().all(1, keepdim=True), 0.0, logits)
            self._scores += (self._processors(text, logits.to(text.device)),)
        return self._scores

    def fields(self, sequences: Tensor, lengths: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """`scores` and `logits`, as far as they are asked for. NaN stands where a row has no token.

        Args:
            sequences: [B, P + L].
            lengths: [B], new tokens of each row.
        """
        fields = {}
        scores = self.scores(sequences)
        if scores is not None:
            fields["scores"] = scores
        if self._config.output_logits:
            num_new = sequences.shape[1] - self._num_prompt
            fields["logits"] = tuple(self.kept.at(place).to(sequences.device) for place in range(num_new))
        return {
            name: tuple(
                values.masked_fill((lengths <= place).unsqueeze(1), math.nan) for place, values in enumerate(found)
            )
            for name, found in fields.items()
        }
