"""Processors change the logits of a position according to the tokens before it.

Position i of a step follows the sequence and the drafts before i, so each position is processed for different tokens.
Accepted drafts become part of the output, so the logits after them must be processed as if the drafts were accepted.

A call does not wait for the device, and no shape depends on data, except in eager steps on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ops.tracing import is_eager_cpu


class AnyProcessors(Protocol):
    """The interface of `SamplingTensors.processors`."""

    @property
    def constants(self) -> Hashable:
        """The values other than tensors that a call depends on. Compiled steps treat them as constants."""

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """New logits [B, n, V], float32; the arguments are as in `SamplingTensors.process`."""


@dataclass(frozen=True)
class Processors:
    """The processors of a batch, as tensors on its device. A processor that no row uses is None.

    A row that does not use a processor has its neutral value: repetition_penalty 1, other numbers 0, and no words. The
    numbers of words and of their tokens are rounded up (`round_up`), so that most batches have the same shapes. The
    cost of a step grows with the number of tokens in all words and with the logarithm of `longest_ngram`.

    Args:
        prompt_lengths: [B] int64; later tokens are new.
        repetition_penalty: [B] float32, r > 0. The logit z of a token of the sequence becomes z / r, or z * r if z < 0.
        presence_penalty: [B] float32, subtracted from the logit of each new token.
        frequency_penalty: [B] float32, subtracted from the logit of each new token, times the number of its
            occurrences.
        no_repeat_ngram_size: [B] int64, n; a token that would repeat an n-gram of the sequence gets -inf. 0 = none.
        longest_ngram: at least the largest n.
        words: [M, 3] int64, three numbers for each word: its row; its last token, which gets the bias if the sequence
            ends with the word's other tokens; and `until`: the bias applies only while there are fewer new tokens.
            Unused entries are 0, -1, 0.
        biases: [M] float32, finite or -inf.
        pieces: [N, 3] int64, the other tokens of all words: the word's index, the token's place (1 = last in the
            sequence, 2 = before that), and the token. Unused entries are 0.
        padding: [B, N] int64; the first `num_padding` tokens of a row count as part of its sequence and come before its
            first token. `prompt_lengths` include them.
        num_padding: [B] int64, the number of padding tokens of each row.
        num_ignored: [B] int64; the repetition penalty ignores this many tokens at the start of padding and prompt, but
            never all of them. None = 0.
    """

    prompt_lengths: Tensor
    repetition_penalty: Tensor | None = None
    presence_penalty: Tensor | None = None
    frequency_penalty: Tensor | None = None
    no_repeat_ngram_size: Tensor | None = None
    longest_ngram: int = 0
    words: Tensor | None = None
    biases: Tensor | None = None
    pieces: Tensor | None = None
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
        has_words = self.pieces is not None and bool(self.pieces.any())
        return has_words or any(value is not None for value in values)

    def __call__(self, logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """Apply the biases, then the penalties in the order of the fields, then the n-gram rule."""
        if is_eager_cpu(text):
            text = text[:, : int(lengths.max())]
        text = text.clamp(min=0)
        if self.padding is not None and self.num_padding is not None:
            text, lengths = _behind(self.padding, self.num_padding, text), lengths + self.num_padding.unsqueeze(1)
        # Copy, because processors write in place.
        logits = logits.to(torch.float32, copy=True)
        self._add_biases(logits, text, lengths)
        index = torch.arange(text.shape[1], device=text.device)
        is_before = index < lengths.unsqueeze(2)
        is_new = is_before & (index >= self.prompt_lengths.view(-1, 1, 1))
        every = text.unsqueeze(1).expand_as(is_before)
        if self.repetition_penalty is not None:
            penalty = self.repetition_penalty.view(-1, 1, 1)
            ignored = torch.zeros_like(self.prompt_lengths) if self.num_ignored is None else self.num_ignored
            # Every position writes a logit; positions with equal tokens write equal numbers. A position that does not
            # count repeats the write of the first position that counts.
            counts = is_before & (index >= ignored.view(-1, 1, 1))
            tokens = torch.where(counts, every, text.gather(1, ignored.unsqueeze(1)).unsqueeze(1))
            old = logits.gather(2, tokens)
            _write(logits, tokens, torch.where(old < 0, old * penalty, old / penalty))
        if self.presence_penalty is not None:
            # A position that is not new repeats the write of the first new position. If there is no new position, the
            # penalty is 0 and the write changes nothing.
            first = text.gather(1, self.prompt_lengths.clamp(max=text.shape[1] - 1).unsqueeze(1)).unsqueeze(1)
            tokens = torch.where(is_new, every, first)
            any_new = lengths > self.prompt_lengths.unsqueeze(1)
            penalty = torch.where(any_new, self.presence_penalty.unsqueeze(1), 0.0).unsqueeze(2)
            _write(logits, tokens, logits.gather(2, tokens) - penalty)
        if self.frequency_penalty is not None:
            _write(logits, every, torch.where(is_new, -self.frequency_penalty.view(-1, 1, 1), 0.0), add=True)
        if self.no_repeat_ngram_size is not None:
            matches = is_before & self._ends_ngram(self.no_repeat_ngram_size, text, lengths)
            _write(logits, every, torch.where(matches, -math.inf, 0.0), add=True)
        return logits

    def _add_biases(self, logits: Tensor, text: Tensor, lengths: Tensor) -> None:
        if self.words is None or self.biases is None or self.pieces is None:
            return
        (rows, last, until), (word, back, token) = self.words.unbind(1), self.pieces.unbind(1)
        ends = lengths[rows]
        places = ends[word] - back.unsqueeze(1)
        actual = text[rows[word].unsqueeze(1), places.clamp(0, text.shape[1] - 1)]
        differs = (back > 0).unsqueeze(1) & ((places < 0) | (actual != token.unsqueeze(1)))
        num_different = torch.zeros_like(ends).index_add_(0, word, differs.long())
        is_early = ends - self.prompt_lengths[rows].unsqueeze(1) < until.unsqueeze(1)
        counts = (num_different == 0) & is_early & (last >= 0).unsqueeze(1)
        biases = torch.where(counts, self.biases.unsqueeze(1), 0.0).to(logits.dtype)
        index = torch.arange(lengths.shape[1], device=text.device)
        logits.index_put_((rows.unsqueeze(1), index, last.clamp(min=0).unsqueeze(1)), biases, accumulate=True)

    def _ends_ngram(self, size: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        """[B, n, W] bool: whether the token at this index of `text` would repeat an n-gram if it came next. The token
        would if the `size` - 1 tokens before the index equal the last `size` - 1 tokens of the sequence. Stretches of
        1, 2, 4, ... tokens are numbered, and equal stretches get equal numbers. Two stretches, which may overlap, cover
        `size` - 1 tokens, so the cost grows with the logarithm of `size`."""
        width = text.shape[1]
        num_before = (size - 1).clamp(0, width).unsqueeze(1)
        names = chosen = text
        stretch, stretches = 1, torch.ones_like(num_before)
        while 2 * stretch <= min(self.longest_ngram - 1, width):
            names = _named(names, names.roll(-stretch, 1))
            stretch *= 2
            is_long = num_before >= stretch
            chosen, stretches = torch.where(is_long, names, chosen), torch.where(is_long, stretch, stretches)
        index = torch.arange(width, device=text.device)

        def equals(back: Tensor) -> Tensor:
            at_index = chosen.gather(1, (index - back).clamp(min=0))
            return at_index.unsqueeze(1) == chosen.gather(1, (lengths - back).clamp(0, width - 1)).unsqueeze(2)

        matches = equals(num_before) & equals(stretches) | (num_before == 0).unsqueeze(2)
        return matches & ((size.unsqueeze(1) > 0) & (index + 1 >= size.unsqueeze(1))).unsqueeze(1)


def count_words(processors: AnyProcessors | None) -> tuple[int, int]:
    """The numbers of words and of pieces, without unused entries. Waits for the device."""
    if not isinstance(processors, Processors) or processors.words is None or processors.pieces is None:
        return 0, 0
    return int((processors.words[:, 1] >= 0).sum()), int((processors.pieces[:, 1] > 0).sum())


def joined_words(texts: Mapping[int, AnyProcessors | None], num_words: int, num_pieces: int) -> dict[str, Tensor]:
    """Join the words of several rows into the tensors of one batch. The processors of each row are those of a batch of
    one, on the CPU."""
    words = torch.tensor([0, -1, 0], device="cpu").repeat(num_words, 1)
    pieces = torch.zeros(num_pieces, 3, dtype=torch.int64, device="cpu")
    biases = torch.zeros(num_words, dtype=torch.float32, device="cpu")
    word = piece = 0
    for row, own in texts.items():
        num_row_words, num_row_pieces = count_words(own)
        if isinstance(own, Processors) and own.words is not None and own.pieces is not None and own.biases is not None:
            words[word : word + num_row_words] = own.words[:num_row_words]
            words[word : word + num_row_words, 0] = row
            biases[word : word + num_row_words] = own.biases[:num_row_words]
            pieces[piece : piece + num_row_pieces] = own.pieces[:num_row_pieces]
            pieces[piece : piece + num_row_pieces, 0] += word
            word, piece = word + num_row_words, piece + num_row_pieces
    return {"words": words, "biases": biases, "pieces": pieces}


def round_up(size: int, least: int) -> int:
    """The smallest power of two >= `size`, but at least `least`."""
    return max(1 << (size - 1).bit_length(), least)


def _write(logits: Tensor, tokens: Tensor, values: Tensor, add: bool = False) -> None:
    """Write values [B, n, m] into the logits [B, n, V] of tokens [B, n, m], or add them. `index_put_` is used because
    Inductor compiles it in place, whereas `scatter_` would copy all logits."""
    batch, places = (torch.arange(size, device=tokens.device) for size in tokens.shape[:2])
    # Cast, because `torch.where` of two Python numbers has torch's default dtype.
    values = values.to(logits.dtype)
    logits.index_put_((batch.view(-1, 1, 1), places.view(1, -1, 1), tokens), values, accumulate=add)


def _named(first: Tensor, second: Tensor) -> Tensor:
    """Number the pairs (first, second) [B, W] of each row: equal pairs get equal numbers in [0, W). The inputs are in
    [0, 2**31)."""
    ordered, order = (first * 2**31 + second).sort(1)
    names = torch.nn.functional.pad((ordered[:, 1:] != ordered[:, :-1]).long().cumsum(1), (1, 0))
    return torch.empty_like(names).scatter(1, order, names)


def _behind(padding: Tensor, num_padding: Tensor, text: Tensor) -> Tensor:
    """[B, N + W], the padding of each row followed by its sequence."""
    width = padding.shape[1]
    index = torch.arange(width + text.shape[1], device=text.device)
    is_text = index >= num_padding.unsqueeze(1)
    place = torch.where(is_text, width + index - num_padding.unsqueeze(1), index)
    return torch.cat([padding, text], 1).gather(1, place.clamp(max=width + text.shape[1] - 1))
