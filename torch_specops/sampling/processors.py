"""Processors change the logits of a position according to the text before it.

Position i of a step follows the prefix and the drafts before i, so each position has its own text. If the drafts before
it are accepted, they are part of the text, and only logits that were processed for that text have the right law.

Nothing here waits for the device, and no shape depends on data.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ops.tracing import is_eager_cpu

__all__ = ["AnyProcessors", "Processors", "round_up"]


class AnyProcessors(Protocol):
    """The interface of `SamplingTensors.processors`."""

    @property
    def constants(self) -> Hashable:
        """The values other than tensors that determine what a call computes."""

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """New logits [B, n, V], float32; the arguments are those of `SamplingTensors.process`."""


@dataclass(frozen=True)
class Processors:
    """The processors of a batch, as tensors on its device. A processor that no row uses is None.

    A row that uses none has neutral entries: 1, 0, 0, 0, and sequences of -1. Another row can replace it if it uses no
    others, has at most M sequences of at most L tokens, and no n-grams longer than `longest_ngram`. These sizes are
    rounded up (`round_up`), so that most batches share them.

    Args:
        prompt_lengths: [B] int64; later tokens are new.
        repetition_penalty: [B] float32, r > 0. The logit z of a token of the text becomes z / r, or z * r if z < 0.
        presence_penalty: [B] float32, taken from the logit of each new token.
        frequency_penalty: [B] float32, taken from it as often as it occurred.
        no_repeat_ngram_size: [B] int64, n; a token that would repeat an n-gram of the text gets -inf. 0 = none.
        longest_ngram: at least the largest n.
        sequences: [B, M, L] int64, tokens aligned to the right, -1 before them. If the text ends with all but the last
            token of a sequence, the last token gets its bias.
        biases: [B, M] float32, finite or -inf.
        until: [B, M] int64; a sequence counts only while there are fewer new tokens.
        padding: [B, N] int64, tokens that count as text before each row's own, the first `num_padding`. The
            `prompt_lengths` then count them too.
        num_padding: [B] int64.
        num_ignored: [B] int64, the tokens that the repetition penalty leaves out: the first of padding and prompt, but
            not all of them. None = 0.
    """

    prompt_lengths: Tensor
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    no_repeat_ngram_size: Tensor | None = None
    longest_ngram: int = 0
    sequences: Tensor | None = None
    biases: Tensor | None = None
    until: Tensor | None = None
    padding: Tensor | None = None
    num_padding: Tensor | None = None
    num_ignored: Tensor | None = None

    @property
    def constants(self) -> Hashable:
        return self.longest_ngram

    @property
    def read_text(self) -> bool:
        """True if any processor depends on the tokens, not only on their number. Waits for the device."""
        values = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.no_repeat_ngram_size)
        has_words = self.sequences is not None and bool((self.sequences[:, :, :-1] >= 0).any())
        return has_words or any(value is not None for value in values)

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """Biases first, then the penalties in the order above, then n-grams."""
        if is_eager_cpu(text):
            text = text[:, : int(lengths.max())]
        text = text.clamp(min=0)
        if self.padding is not None and self.num_padding is not None:
            text, lengths = _behind(self.padding, self.num_padding, text), lengths + self.num_padding.unsqueeze(1)
        # A copy, which may be written into.
        logits = logits.to(torch.float32, copy=True)
        self._add_biases(logits, text, lengths)
        index = torch.arange(text.shape[1], device=text.device)
        is_before = index < lengths.unsqueeze(2)
        is_new = is_before & (index >= self.prompt_lengths.view(-1, 1, 1))
        every = text.unsqueeze(1).expand_as(is_before)
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty.view(-1, 1, 1)
            ignored = torch.zeros_like(self.prompt_lengths) if self.num_ignored is None else self.num_ignored
            # Equal tokens write equal numbers. Other places stand for the first token that counts.
            counts = is_before & (index >= ignored.view(-1, 1, 1))
            tokens = torch.where(counts, every, text.gather(1, ignored.unsqueeze(1)).unsqueeze(1))
            found = logits.gather(2, tokens)
            _write(logits, tokens, torch.where(found < 0, found * penalty, found / penalty))
        if self.presence_penalty is not None:
            # Without new tokens, the logit of the first place after the prompt is written back unchanged.
            first = text.gather(1, self.prompt_lengths.clamp(max=text.shape[1] - 1).unsqueeze(1)).unsqueeze(1)
            tokens = torch.where(is_new, every, first)
            any_new = lengths > self.prompt_lengths.unsqueeze(1)
            penalty = torch.where(any_new, self.presence_penalty.unsqueeze(1), 0.0).unsqueeze(2)
            _write(logits, tokens, logits.gather(2, tokens) - penalty)
        if self.frequency_penalty is not None:
            _write(logits, every, torch.where(is_new, -self.frequency_penalty.view(-1, 1, 1), 0.0), add=True)
        if self.no_repeat_ngram_size is not None:
            size = self.no_repeat_ngram_size.view(-1, 1, 1)
            # Places at which an n-gram ends whose first n - 1 tokens are those at the end of the text.
            matches = is_before & (size > 0) & (index + 1 >= size)
            for back in range(1, self.longest_ngram):
                earlier = text.gather(1, (index - back).clamp(min=0).expand_as(text)).unsqueeze(1)
                matches = matches & ((back >= size) | (earlier == _from_end(text, lengths, back).unsqueeze(2)))
            _write(logits, every, torch.where(matches, -math.inf, 0.0), add=True)
        return logits

    def _add_biases(self, logits: Tensor, text: Tensor, lengths: Tensor) -> None:
        if self.sequences is None or self.biases is None or self.until is None:
            return
        num_new = lengths - self.prompt_lengths.unsqueeze(1)
        sizes = (self.sequences >= 0).sum(2)
        counts = (num_new.unsqueeze(2) < self.until.unsqueeze(1)) & (lengths.unsqueeze(2) >= sizes.unsqueeze(1) - 1)
        last, *others = reversed(self.sequences.unsqueeze(1).unbind(3))
        for back, wanted in enumerate(others, 1):
            counts = counts & ((wanted < 0) | (wanted == _from_end(text, lengths, back).unsqueeze(2)))
        biases = torch.where(counts & (last >= 0), self.biases.unsqueeze(1), 0.0)
        _write(logits, last.clamp(min=0).expand_as(biases), biases, add=True)


def round_up(size: int, least: int) -> int:
    """The next power of two that is not below `least`."""
    return max(1 << (size - 1).bit_length(), least)


def _write(logits: Tensor, tokens: Tensor, values: Tensor, add: bool = False) -> None:
    """Write values [B, n, m] into the logits [B, n, V] of tokens [B, n, m], or add them. Inductor compiles this in
    place, where `scatter_` would copy all logits."""
    batch, places = (torch.arange(size, device=tokens.device) for size in tokens.shape[:2])
    # A choice between two numbers has torch's default dtype.
    values = values.to(logits.dtype)
    logits.index_put_((batch.view(-1, 1, 1), places.view(1, -1, 1), tokens), values, accumulate=add)


def _from_end(text: Tensor, lengths: Tensor, back: int) -> Tensor:
    """[B, n] the last token (back = 1), the one before it, and so on; any token if there is none."""
    return text.gather(1, (lengths - back).clamp(min=0))


def _behind(padding: Tensor, num_padding: Tensor, text: Tensor) -> Tensor:
    """[B, N + W] each row's padding, then its text."""
    width = padding.shape[1]
    index = torch.arange(width + text.shape[1], device=text.device)
    is_text = index >= num_padding.unsqueeze(1)
    place = torch.where(is_text, width + index - num_padding.unsqueeze(1), index)
    return torch.cat([padding, text], 1).gather(1, place.clamp(max=width + text.shape[1] - 1))
