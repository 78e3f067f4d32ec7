"""Scores the beams of every row, and extends them by one token.

The arithmetic is that of transformers' beam search, so that even ties break alike: float32 scores are summed in the
same order, and the same `topk` over the same shapes gives the candidates. In contrast to transformers, every row has a
separate length and may end before the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tree import rows_of

# Added to the score of a beam that must not be chosen. In float32 it outweighs any score.
EXCLUDED = -1.0e9


class BeamScorer:
    """The w running beams and the w finished beams of each of B rows.

    Args:
        num_beams: w >= 1.
        limits: [B] int64 >= 1, the number of new tokens at which a row ends.
        eos: [B, E] int64, tokens that finish a beam; -1 is none.
        length_penalty, early_stopping: as in `beam_search`.

    Attributes:
        tokens: [B, w, N] int64, the new tokens of the running beams, best beam first; N is the largest limit.
        scores: [B, w] float32, the summed log-probabilities of the running beams.
        counts: [B] int64, the number of new tokens of each running beam.
        finished_tokens, finished_scores, finished_lengths, is_finished: [B, w, N], [B, w], [B, w], [B, w], the finished
            beams, best first. Scores of finished beams are divided by the length penalty.
        done: [B] bool, whether a row has ended.
        failed: [B] bool, whether a row has ended because no continuation had a finite score.

    Raises:
        ValueError: a length penalty that no float32 can hold at the largest limit.
    """

    def __init__(
        self, num_beams: int, limits: Tensor, eos: Tensor, length_penalty: float, early_stopping: bool | str
    ) -> None:
        batch, longest = limits.shape[0], int(limits.max())
        self.num_beams = num_beams
        self.limits = limits
        self.eos = eos
        self.early_stopping = early_stopping
        self.length_penalty = length_penalty
        self._penalties = _penalties(longest, length_penalty).to(limits.device)
        # Each beam has at most eos.shape[1] continuations by an eos token, so at least num_beams of the candidates do
        # not end.
        self.num_candidates = max(2, 1 + eos.shape[1]) * num_beams
        self._is_top = torch.arange(self.num_candidates, device=limits.device) < num_beams

        self.tokens = limits.new_zeros(batch, num_beams, longest)
        self.scores = limits.new_full((batch, num_beams), EXCLUDED, dtype=torch.float32)
        # At the start, all beams of a row are equal. Exclude all but the first, or the first step would choose the same
        # continuation num_beams times.
        self.scores[:, 0] = 0.0
        self.counts = torch.zeros_like(limits)
        self.finished_tokens = torch.zeros_like(self.tokens)
        self.finished_scores = torch.full_like(self.scores, EXCLUDED)
        self.finished_lengths = limits.new_zeros(batch, num_beams)
        self.is_finished = torch.zeros_like(self.scores, dtype=torch.bool)
        self.done = torch.zeros_like(limits, dtype=torch.bool)
        self.failed = torch.zeros_like(self.done)

    def advance(self, logits: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
        """Extend the beams of `active` [B] rows by one token, given the logits [B, w, V] after each running beam. Other
        rows do not change.

        Returns:
            parents [B, w] and tokens [B, w]: which beam each new running beam continues, and with which token. Parents
            and tokens are undefined in rows that are not active or that have ended.
        """
        log_probs = logits.float().log_softmax(-1)
        # NaN among the logits of a beam becomes -inf, so that the beam has no continuation.
        scores = (log_probs + self.scores.unsqueeze(2)).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        scores, index = scores.flatten(1).topk(self.num_candidates)
        parents, tokens = index // logits.shape[2], index % logits.shape[2]
        length = self.counts + 1
        at_limit = length >= self.limits
        ends = (tokens.unsqueeze(2) == self.eos.unsqueeze(1)).any(2) | at_limit.unsqueeze(1)
        failed = active & (scores[:, 0] == -torch.inf)
        active = active & ~failed
        texts = rows_of(self.tokens, parents)
        place = (length.clamp(max=texts.shape[2]) - 1)[:, None, None].expand(-1, self.num_candidates, 1)
        texts = texts.scatter(2, place, tokens.unsqueeze(2))

        going_on = scores + ends.float() * EXCLUDED
        best = going_on.topk(self.num_beams).indices
        self._update(active, tokens=rows_of(texts, best), scores=going_on.gather(1, best), counts=length)
        self._finish(active, texts, scores, length, ends & self._is_top)

        done = at_limit | ~self._may_improve(length)
        if self.early_stopping is True:
            done = done | self.is_finished.all(1)
        self.done |= failed | (active & done)
        self.failed |= failed
        return parents.gather(1, best), tokens.gather(1, best)

    def result(self, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """New tokens [B, R, N], lengths [B, R] and scores [B, R] of the best finished beams. Rows that failed give
        their running beams instead."""
        self._update(
            self.failed,
            finished_tokens=self.tokens,
            finished_lengths=self.counts.unsqueeze(1).expand_as(self.finished_lengths),
            finished_scores=self._penalised(self.scores, self.counts),
        )
        best = slice(num_sequences)
        return self.finished_tokens[:, best], self.finished_lengths[:, best], self.finished_scores[:, best]

    def _finish(self, active: Tensor, texts: Tensor, scores: Tensor, length: Tensor, ends: Tensor) -> None:
        """Merge the candidates [B, C] that end with this token into the finished beams."""
        scores = self._penalised(scores, length) + (~ends).float() * EXCLUDED
        lengths = length.unsqueeze(1).expand_as(scores)
        merged = torch.cat([self.finished_scores, scores], 1)
        best = merged.topk(self.num_beams).indices
        self._update(
            active,
            finished_tokens=rows_of(torch.cat([self.finished_tokens, texts], 1), best),
            finished_scores=merged.gather(1, best),
            finished_lengths=torch.cat([self.finished_lengths, lengths], 1).gather(1, best),
            is_finished=torch.cat([self.is_finished, ends], 1).gather(1, best),
        )

    def _may_improve(self, length: Tensor) -> Tensor:
        """[B] whether the best running beam may still score better than the worst finished beam."""
        if self.early_stopping == "never" and self.length_penalty > 0.0:
            length = self.limits
        best = self._penalised(self.scores[:, :1], length)
        worst = torch.where(self.is_finished, self.finished_scores.amin(1, keepdim=True), EXCLUDED)
        return (best > worst).any(1)

    def _penalised(self, scores: Tensor, length: Tensor) -> Tensor:
        """Divide the scores [B, n] of beams with `length` [B] new tokens by the length penalty."""
        return scores / self._penalties[length.clamp(max=len(self._penalties) - 1)].unsqueeze(1)

    def _update(self, active: Tensor, **values: Tensor) -> None:
        for name, new in values.items():
            old = getattr(self, name)
            setattr(self, name, torch.where(active.view(-1, *[1] * (new.dim() - 1)), new, old))


def _penalties(longest: int, length_penalty: float) -> Tensor:
    """[longest + 1] float32, the divisor of a beam's score for each length."""
    divisors = (torch.arange(longest + 1, dtype=torch.float64, device="cpu").clamp(min=1) ** length_penalty).float()
    if not bool((divisors.isfinite() & (divisors > 0)).all()):
        raise ValueError(
            f"length_penalty: expected {longest} to its power within float32, got a length penalty of {length_penalty}"
        )
    return divisors
