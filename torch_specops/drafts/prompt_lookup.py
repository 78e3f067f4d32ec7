"""Prompt lookup: the text so far is the draft model. No weights, no forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks
from ..sampling import SamplingTensors
from .base import Draft, DraftSource

__all__ = ["PromptLookup", "match_lengths"]


@dataclass(frozen=True)
class PromptLookup(DraftSource):
    """Finds the last tokens of a sequence earlier in it, and proposes what followed them there.

    The longest match of max_ngram..min_ngram tokens wins, and among equals the earliest. Drafts are deterministic:
    `Draft.logits` is None. `PromptLookup(2, 1, repeat=False)` drafts as transformers' prompt lookup does by default.

    Args:
        max_ngram: longest match looked for, >= min_ngram.
        min_ngram: shortest match that counts, >= 1. A single token matches often, and rarely predicts what follows.
        repeat: if fewer than K tokens follow the match, repeat them from the match's end.

    Example:
        >>> import torch
        >>> from torch_specops.drafts import PromptLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 5, 6]])
        >>> PromptLookup().propose(tokens, torch.tensor([6]), 3).tokens
        tensor([[7, 8, 5]])
    """

    max_ngram: int = 3
    min_ngram: int = 2
    repeat: bool = True

    def __post_init__(self) -> None:
        checks.check_int("min_ngram", self.min_ngram, 1)
        checks.check_int("max_ngram", self.max_ngram, self.min_ngram)

    def static_tensors(self) -> Sequence[Tensor]:
        return ()

    def propose(
        self,
        tokens: Tensor,
        lengths: Tensor,
        num_draft_tokens: int,
        sampling: SamplingTensors | None = None,
        seeds: Tensor | None = None,
    ) -> Draft:
        """[B, K] tokens that followed the match; -1 where there is none."""
        batch, width = tokens.shape
        if width == 0:
            return Draft(tokens.new_full((batch, num_draft_tokens), -1))
        position = torch.arange(width, device=tokens.device)
        last = (lengths - 1).unsqueeze(1)
        match_length = match_lengths(tokens, last, self.max_ngram)
        rank = torch.where(match_length >= self.min_ngram, match_length * width + width - 1 - position, -1)
        best = rank.amax(1, keepdim=True)

        # The text from the match's end to its own end, repeated or once.
        end = width - best % width
        period = (last + 1 - end).clamp(min=1)
        ahead = torch.arange(num_draft_tokens, device=tokens.device)
        found = (best >= 0) & (self.repeat | (ahead < period))
        return Draft(torch.where(found, tokens.gather(1, (end + ahead % period).clamp(max=width - 1)), -1))


def match_lengths(text: Tensor, last: Tensor, most: int, first: int = 0) -> Tensor:
    """[B, N] for each place before the row's end, how many tokens, read backwards from it, equal those read backwards
    from the end.

    Args:
        text: [B, N].
        last: [B, 1], the index of each row's last token.
        most: the longest match to look for.
        first: where the rows begin; text before it is not theirs.
    """
    position = torch.arange(text.shape[1], device=text.device)
    alive = position < last
    lengths = torch.zeros_like(text)
    for back in range(most):
        token = text.gather(1, (last - back).clamp(min=first))
        alive = alive & (position >= back) & (last - back >= first) & (text.roll(back, 1) == token)
        lengths += alive
    return lengths
