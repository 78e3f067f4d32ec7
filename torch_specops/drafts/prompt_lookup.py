"""Prompt lookup: the text so far is the draft model, and so is the input of an encoder. No weights, no forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks
from ..sampling import SamplingTensors
from .base import Draft
from .lookup import LookupDraft, match_lengths

__all__ = ["PromptLookup"]


@dataclass(frozen=True)
class PromptLookup(LookupDraft):
    """Finds the last tokens of a sequence earlier in it, and proposes what followed them there.

    The longest match of max_ngram..min_ngram tokens wins, and among equals the earliest. Drafts are deterministic:
    `Draft.logits` is None. If the target's encoder reads tokens (T5), they count as text before the sequence, so that
    copying tasks are drafted from their input. `PromptLookup(2, 1, repeat=False)` drafts as transformers' prompt lookup
    does by default, which does not look into that input.

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

    def propose(
        self,
        tokens: Tensor,
        lengths: Tensor,
        num_draft_tokens: int,
        sampling: SamplingTensors | None = None,
        seeds: Tensor | None = None,
    ) -> Draft:
        """[B, K] tokens that followed the match; -1 where there is none."""
        text, own = self._behind_input(tokens)
        batch, width = text.shape
        if width == 0:
            return Draft(tokens.new_full((batch, num_draft_tokens), -1))
        position = torch.arange(width, device=tokens.device)
        last = (own + lengths - 1).unsqueeze(1)
        match_length = match_lengths(text, last, self.max_ngram, own)
        rank = torch.where(match_length >= self.min_ngram, match_length * width + width - 1 - position, -1)
        best = rank.amax(1, keepdim=True)

        # The text from the match's end to its own end, repeated or once. That of the input ends with a -1.
        end = width - best % width
        period = (last + 1 - end).clamp(min=1)
        ahead = torch.arange(num_draft_tokens, device=tokens.device)
        found = (best >= 0) & (self.repeat | (ahead < period))
        return Draft(torch.where(found, text.gather(1, (end + ahead % period).clamp(max=width - 1)), -1))
