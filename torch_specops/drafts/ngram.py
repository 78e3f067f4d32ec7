"""Drafts from n-gram tables, which count the tokens that followed each context in a text. The tables are looked up on
the device, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import checks
from ..ops.uniforms import uniforms
from ..sampling import SamplingTensors
from .base import Draft, DraftSource, stacked


class NGram(DraftSource):
    """Proposes the tokens that followed the last tokens of a sequence in a given text (Leviathan et al. 2023, section
    3.6).

    `NGram.from_tokens` builds the tables. A table of order n has contexts of 0 (the unigram) to n - 1 tokens. A
    proposal comes from the longest context in the table that matches the end of the sequence, earlier drafts of the
    step included.

    Without probabilities, the proposal is the most frequent continuation (among equals the lowest token), and
    `Draft.logits` is None. With probabilities, the proposal is drawn in proportion to the counts: the logits are the
    logs of the counts, and -inf for every token that did not follow the context.

    Memory: a text of N tokens has at most N contexts of each length. Without probabilities, a context takes 12 bytes.
    With probabilities, it takes 16 bytes, and 8 bytes for each of its continuations, of which there are at most
    `max_candidates`; `propose` then also writes float32 logits [B, K, V]. Building a table takes about 100 bytes per
    token of the text and length of context.

    Examples:
        >>> import torch
        >>> from torch_specops.drafts.ngram import NGram
        >>> from torch_specops.sampling import SamplingTensors
        >>> source = NGram.from_tokens(torch.tensor([1, 2, 3, 1, 2, 4, 1, 2, 3]), vocab_size=5)
        >>> tokens, lengths, seeds = torch.tensor([[0, 1, 2], [4, 0, 0]]), torch.tensor([3, 1]), torch.tensor([7, 8])
        >>> source.propose(tokens, lengths, 2, SamplingTensors(torch.ones(2)), seeds).tokens
        tensor([[3, 1],
                [1, 2]])
    """

    vocab_size: int
    device: torch.device

    def __init__(
        self,
        contexts: Tensor,
        starts: Tensor | None,
        continuations: Tensor,
        log_counts: Tensor | None,
        *,
        vocab_size: int,
        order: int,
        max_candidates: int,
    ) -> None:
        # [C] int64, ascending. A context is a number in base V + 1, with the newest token as its lowest digit. The
        # digit of a token is token + 1, and 0 means no token. The unigram is therefore context 0, and longer contexts
        # are larger numbers.
        self._contexts = contexts
        # [C + 1], the index of the first continuation of each context; None = each context has exactly one.
        self._starts = starts
        # [T] int32 and [T] float32, the continuations of each context in order of falling counts, and the logs of the
        # counts.
        self._continuations = continuations
        self._log_counts = log_counts
        self._powers = (vocab_size + 1) ** torch.arange(order - 1, device=contexts.device)
        self.vocab_size = vocab_size
        self.order = order
        self.max_candidates = max_candidates
        self.deterministic = self.looks_up = log_counts is None
        self.device = contexts.device

    @classmethod
    def from_tokens(
        cls,
        tokens: Tensor | Sequence[Tensor],
        *,
        vocab_size: int,
        order: int = 3,
        probabilities: bool = False,
        max_candidates: int = 64,
        device: torch.device | str | None = None,
    ) -> NGram:
        """Count the n-grams of a text.

        Args:
            tokens: [N] int64 in [0, vocab_size), or a list of such texts. No n-gram crosses from one text to the next.
            vocab_size: the target's V. (V + 1) ** (order - 1) must be below 2**63, so that a context fits an int64.
            order: the length of the longest n-grams, >= 1: 1 = unigrams, 2 = bigrams, 3 = trigrams.
            probabilities: False = propose the most frequent continuation; True = sample from the counts.
            max_candidates: the number of continuations that are kept for a context, >= 1; used only with probabilities.
                The most frequent are kept, and among equals the lowest tokens.
            device: the device of the tables, on which `propose` runs; None = the device of the first text.

        Raises:
            TypeError: `tokens` are not int64 tensors, or a number is not an int.
            ValueError: a text is not one-dimensional, there are no tokens, a token is outside the vocabulary, or a
                number is out of range.
        """
        vocab_size, order = checks.check_int("vocab_size", vocab_size, 1), checks.check_int("order", order, 1)
        max_candidates = checks.check_int("max_candidates", max_candidates, 1)
        base = vocab_size + 1
        if base ** (order - 1) >= 2**63:
            raise ValueError(
                f"order: expected (vocab_size + 1) ** (order - 1) below 2**63, got order {order} "
                f"for a vocabulary of {vocab_size}"
            )
        if vocab_size >= 2**31:
            raise ValueError(f"vocab_size: expected a number below 2**31, got {vocab_size}")
        texts = _checked_texts(tokens, vocab_size)
        text = torch.cat([piece.to(texts[0].device if device is None else device) for piece in texts])

        sizes = torch.tensor([len(piece) for piece in texts], device=text.device)
        position = torch.arange(len(text), device=text.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        context = torch.zeros_like(text)
        contexts, continuations = [], []
        for length in range(order):
            if length > 0:
                context = context + (text.roll(length) + 1) * base ** (length - 1)
            inside = position >= length
            contexts.append(context[inside])
            continuations.append(text[inside])
        num_kept = max_candidates if probabilities else 1
        unique_contexts, starts, kept_continuations, counts = _most_frequent(
            torch.cat(contexts), torch.cat(continuations), vocab_size, num_kept
        )
        return cls(
            unique_contexts,
            starts if probabilities else None,
            kept_continuations.int(),
            counts.double().log().float() if probabilities else None,
            vocab_size=vocab_size,
            order=order,
            max_candidates=num_kept,
        )

    def static_tensors(self) -> Sequence[Tensor]:
        # The tables never change and never move, so a CUDA graph of a step stays valid.
        return ()

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Propose tokens [B, K]; with probabilities also their logits [B, K, V] and lse [B, K]. A token is -1 if
        processors exclude every continuation."""
        recent = self._recent(tokens, lengths)
        text = pad(tokens, (0, num_draft_tokens))
        numbers: Sequence[Tensor] = [seeds] * num_draft_tokens
        if not self.deterministic and not sampling.coupled:
            numbers = uniforms(seeds, lengths, num_draft_tokens, "propose").unbind(1)

        drawn: list[Sequence[Tensor | None]] = []
        for index, number in enumerate(numbers):
            context = self._longest_context(recent)
            if self.deterministic:
                token = self._continuations[context].long()
                drawn.append((token, None, None))
            else:
                place = (lengths + index).unsqueeze(1)
                token, *rest = sampling.draw(self._logits(context).unsqueeze(1), number, text, place)
                text = text.scatter(1, place, token.unsqueeze(1))
                drawn.append((token, *rest))
            recent = torch.cat([token.unsqueeze(1) + 1, recent], 1)[:, : self.order - 1]
        return stacked(drawn)

    def _recent(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B, order - 1], the digits of the last tokens, newest first: token + 1, or 0 if there is no token."""
        back = torch.arange(self.order - 1, device=tokens.device)
        position = lengths.unsqueeze(1) - 1 - back
        recent = tokens.gather(1, position.clamp(min=0))
        known = (position >= 0) & (recent >= 0) & (recent < self.vocab_size)
        return torch.where(known, recent + 1, 0)

    def _longest_context(self, recent: Tensor) -> Tensor:
        """[B], the index of the longest context in the table that matches the end of the row; 0, the unigram, if no
        longer context matches."""
        contexts = pad((recent * self._powers).cumsum(1), (1, 0))
        index = torch.searchsorted(self._contexts, contexts).clamp(max=len(self._contexts) - 1)
        return torch.where(self._contexts[index] == contexts, index, 0).amax(1)

    def _logits(self, context: Tensor) -> Tensor:
        """[B, V], the log of the count for each continuation of the context, and -inf for other tokens."""
        assert self._starts is not None and self._log_counts is not None
        start, end = self._starts[context], self._starts[context + 1]
        candidate = start.unsqueeze(1) + torch.arange(self.max_candidates, device=context.device)
        # A context with fewer candidates repeats its last candidate, which writes the same number to the same place
        # again.
        candidate = torch.minimum(candidate, end.unsqueeze(1) - 1)
        row = self._log_counts.new_full((context.shape[0], self.vocab_size), -torch.inf)
        return row.scatter(1, self._continuations[candidate].long(), self._log_counts[candidate])


def _most_frequent(
    contexts: Tensor, continuations: Tensor, vocab_size: int, max_candidates: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the distinct contexts [C] in ascending order; the index [C + 1] of each context's first continuation; the
    continuations [T], the most frequent first and among equals the lowest token first; and their counts [T]."""
    unique_contexts, context = torch.unique(contexts, return_inverse=True)
    pairs, counts = torch.unique(context * vocab_size + continuations, return_counts=True)
    # Pairs are sorted by context, then by token. Stable sorts keep that order among equals.
    by_count = counts.argsort(descending=True, stable=True)
    ranked = by_count[(pairs[by_count] // vocab_size).argsort(stable=True)]
    pairs, counts = pairs[ranked], counts[ranked]

    context = pairs // vocab_size
    first = torch.searchsorted(context, torch.arange(len(unique_contexts), device=context.device))
    is_kept = torch.arange(len(pairs), device=context.device) - first[context] < max_candidates
    starts = pad(torch.bincount(context[is_kept], minlength=len(unique_contexts)).cumsum(0), (1, 0))
    return unique_contexts, starts, (pairs % vocab_size)[is_kept], counts[is_kept]


def _checked_texts(tokens: Tensor | Sequence[Tensor], vocab_size: int) -> list[Tensor]:
    texts = [tokens] if isinstance(tokens, Tensor) else tokens
    if not isinstance(texts, Sequence) or not all(isinstance(piece, Tensor) for piece in texts):
        raise TypeError(f"tokens: expected an int64 tensor [N] or a list of them, got {type(tokens)}")
    for piece in texts:
        if piece.dtype != torch.int64:
            raise TypeError(f"tokens: expected int64, got {str(piece.dtype).removeprefix('torch.')}")
        if piece.dim() != 1:
            raise ValueError(f"tokens: expected texts of shape [N], got {list(piece.shape)}")
        wrong = piece[(piece < 0) | (piece >= vocab_size)]
        if len(wrong) > 0:
            raise ValueError(f"tokens: expected tokens in [0, {vocab_size}), got {int(wrong[0])}")
    if sum(len(piece) for piece in texts) == 0:
        raise ValueError("tokens: expected at least one token, got none")
    return list(texts)
