"""A smaller model as the draft, with its own cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling import sample
from ..uniforms import uniforms
from .base import CachedModel, Draft

__all__ = ["ModelDraft"]


class ModelDraft:
    """Samples K tokens one after another from a draft model (Leviathan et al. 2023, Algorithm 1, the draws from M_q).

    The first forward of a step reads every token that the cache lacks: after K acceptances that is the last draft
    token, which was sampled but never read, and the bonus token. So the cache never lags, and K forwards make K drafts.
    One sequence at a time.

    Args:
        model: the draft model; its vocabulary must be the target's.
    """

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self._read = torch.empty(0, dtype=torch.int64, device=model.device)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, temperature: Tensor, seeds: Tensor
    ) -> Draft:
        """K tokens [1, K] with the logits they were sampled from [1, K, V] and their logsumexp [1, K]."""
        if tokens.shape[0] != 1:
            raise ValueError(f"tokens: a draft model reads one sequence, expected [1, L], got {list(tokens.shape)}")
        if num_draft_tokens == 0:
            return Draft(tokens.new_empty(1, 0))
        sequence = tokens[0, : int(lengths[0])]
        if len(sequence) == 0:
            raise ValueError("lengths: a draft model continues a text, expected at least 1, got 0")
        position = self._num_read_of(sequence)
        draws = uniforms(seeds, lengths, num_draft_tokens, "propose")

        pending = sequence[position:]
        drafts, logits, lse = [], [], []
        for index in range(num_draft_tokens):
            row = self.model.forward(pending.unsqueeze(0), position, 1)[:, -1]
            self._read = torch.cat([self._read[:position], pending])
            position += len(pending)
            token, row_lse = sample(row, draws[:, index], temperature)
            drafts.append(token)
            logits.append(row)
            lse.append(row_lse)
            # A row without a finite logit gives -1: the loop verifies nothing from there on, so any token may be read.
            pending = token.clamp(min=0)
        return Draft(torch.stack(drafts, 1), torch.stack(logits, 1), torch.stack(lse, 1))

    def _num_read_of(self, sequence: Tensor) -> int:
        """How many leading tokens of the sequence the cache holds; one is always left to read, for its logits."""
        common = min(len(self._read), len(sequence) - 1)
        equal = self._read[:common] == sequence[:common]
        return int(equal.long().cumprod(0).sum())
