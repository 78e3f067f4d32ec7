"""Suffix lookup: the text so far, earlier outputs and the input of an encoder are the draft model. No weights, no
forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import checks
from ..sampling import SamplingTensors
from .base import Draft
from .lookup import LookupDraft, match_lengths

__all__ = ["SuffixLookup"]

# Long matches are looked for only at the NUM_PLACES newest places that share most of the row's last NUM_TOKENS tokens.
NUM_PLACES, NUM_TOKENS = 32, 3


class SuffixLookup(LookupDraft):
    """Finds the longest end of a sequence earlier in it, or in finished sequences, and proposes what followed there.

    Unlike `PromptLookup`, it remembers finished sequences, looks for long matches, lets all places where the longest
    match occurs vote for the next token, and proposes tokens only while they are likely enough (suffix decoding, Oliaro
    et al. 2024). After a match of m tokens, a token's probability is estimated as m / (m + 1) times its share of the
    votes of the places that agree with the drafts so far. Drafts are deterministic: they have no logits. Like
    `PromptLookup`, it also looks into the tokens that the target's encoder reads.

    The tokens of a seed depend on what is remembered, because drafts decide how random numbers are used. The law of the
    output does not. `memory=0` remembers nothing; `forget` empties the memory.

    Args:
        max_ngram: longest match looked for, >= min_ngram.
        min_ngram: shortest match that counts, >= 1.
        min_probability: in [0, 1]. Drafts end before the product of their probabilities falls below it.
        memory: tokens of finished sequences that are remembered, >= 0; the oldest are forgotten first.

    Example:
        >>> import torch
        >>> from torch_specops.drafts import SuffixLookup
        >>> tokens = torch.tensor([[5, 6, 7, 8, 4, 5, 6, 7, 9, 3, 4, 5, 6, 7]])
        >>> SuffixLookup().propose(tokens, torch.tensor([14]), 3).tokens
        tensor([[9, 3, 4]])
    """

    def __init__(
        self, max_ngram: int = 32, min_ngram: int = 2, min_probability: float = 0.1, memory: int = 8192
    ) -> None:
        checks.check_int("min_ngram", min_ngram, 1)
        checks.check_int("max_ngram", max_ngram, min_ngram)
        checks.check_numbers(min_probability=min_probability)
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability: expected a number in [0, 1], got {min_probability}")
        checks.check_int("memory", memory, 0)
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.min_probability = min_probability
        # Texts, each followed by a -1, the newest last.
        self._memory = torch.full((memory,), -1)

    def forget(self) -> None:
        """Empty the memory."""
        self._memory = torch.full_like(self._memory, -1)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        super().start(tokens, lengths, capacity, inputs)
        self._memory = self._memory.to(tokens.device)

    def end(self, tokens: Tensor, lengths: Tensor) -> None:
        if len(self._memory) == 0:
            return
        for row, length in zip(tokens, lengths.tolist(), strict=True):
            text = torch.cat([self._memory, row[:length], row.new_full((1,), -1)])
            self._memory.copy_(text[-len(self._memory) :])

    def static_tensors(self) -> Sequence[Tensor]:
        return (self._memory, *super().static_tensors())

    def propose(
        self,
        tokens: Tensor,
        lengths: Tensor,
        num_draft_tokens: int,
        sampling: SamplingTensors | None = None,
        seeds: Tensor | None = None,
    ) -> Draft:
        """[B, K] tokens that followed the longest match; -1 where nothing matches or is likely enough."""
        text, own = self._behind_input(tokens)
        text = torch.cat([self._memory.expand(len(tokens), -1), text], 1)  # [B, N], the row's own from `own` on
        own += len(self._memory)
        last = (own + lengths - 1).unsqueeze(1)  # [B, 1]
        end, length = self._matches(text, last, own)  # [B, C], the newest first
        longest = length.amax(1, keepdim=True)
        agrees = (length == longest) & (longest >= self.min_ngram)

        # The text that follows each match, up to K tokens. At the row's end it repeats from the match's end.
        step = torch.arange(num_draft_tokens, device=text.device)
        period = torch.where(end >= own, last - end, num_draft_tokens).clamp(min=1)
        source = (end + 1).unsqueeze(2) + step % period.unsqueeze(2)
        following = text.gather(1, source.clamp(max=text.shape[1] - 1).flatten(1)).view_as(source)  # [B, C, K]

        probability = torch.ones_like(longest, dtype=torch.float32)
        drafts = [tokens[:, :0]]
        for ahead, token in enumerate(following.unbind(2)):
            has_vote = agrees & (token >= 0)
            votes = ((token.unsqueeze(1) == token.unsqueeze(2)) & has_vote.unsqueeze(1)).sum(2) * has_vote
            most, best = votes.max(1, keepdim=True)
            # NaN if no place agrees, which compares as not likely enough.
            share = most / agrees.sum(1, keepdim=True)
            probability = probability * share * (longest + ahead) / (longest + ahead + 1)
            is_likely = (probability >= self.min_probability) & (most > 0)
            draft = torch.where(is_likely, token.gather(1, best), -1)
            agrees = agrees & is_likely & (token == draft)
            drafts.append(draft)
        return Draft(torch.cat(drafts, 1))

    def _matches(self, text: Tensor, last: Tensor, own: int) -> tuple[Tensor, Tensor]:
        """[B, C] places, the newest first, and the number of tokens, read backwards, that equal those at the row's
        end."""
        # The places that share most of the row's last few tokens.
        num_equal = match_lengths(text, last, min(NUM_TOKENS, self.max_ngram), own)
        position = torch.arange(text.shape[1], device=text.device)
        rank = torch.where(num_equal > 0, num_equal * text.shape[1] + position, -1)
        rank, end = rank.topk(min(NUM_PLACES, text.shape[1]))

        # The number of tokens that they share in all.
        back = torch.arange(self.max_ngram, device=text.device)
        is_inside = (end.unsqueeze(2) >= back) & (last.unsqueeze(2) - back >= own)
        before = text.gather(1, (end.unsqueeze(2) - back).clamp(min=0).flatten(1)).view_as(is_inside)
        suffix = text.gather(1, (last - back).clamp(min=0)).unsqueeze(1)
        return end, (is_inside & (before == suffix)).cumprod(2).sum(2) * (rank >= 0)
