"""The draft's side of `verify_exact` and `verify_block`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..arguments import VerifyArguments
from ..dense.filters import row_bounds, scale_kept_tokens
from ..dense.rows import inverse_temperature
from ..dense.walk import logits_of, probability, stats_from_lse
from .rows import Rows, pick_rows, read_rows, scaled_rows


class Drafts:
    """The draft tokens, their probabilities q(x), and the residuals."""

    def __init__(self, given: VerifyArguments) -> None:
        vocab_size = given.target_logits.shape[2]
        self.given = given
        self.tokens = given.draft_tokens.tolist()
        self.in_vocab = [[0 <= token < vocab_size for token in row] for row in self.tokens]
        # [B, K] as indices. What is not in the vocabulary is never accepted, whatever its probability.
        self.x = given.draft_tokens.clamp(0, vocab_size - 1).long()
        self.rows: Rows | None = None
        self.first = 0

    def read(self, first: int, stop: int) -> Callable[[int, int], float]:
        """Read the positions first .. stop - 1. Returns q(x) of sequence b at position first + i, as a function."""
        x, given = self.x[:, first:stop], self.given
        if given.draft_logits is None:
            return lambda b, i: 1.0
        logits = given.draft_logits[:, first:stop]
        if given.draft_lse is None:
            self.rows, self.first = read_rows(logits, given.filters), first
            return self.rows.probabilities(x)
        inverse, bounds = inverse_temperature(given.temperature), row_bounds(logits, given.filters)
        z = scale_kept_tokens(logits_of(logits, x), x, inverse, bounds)
        q_x = probability(z, *stats_from_lse(given.draft_lse[:, first:stop])).tolist()
        return lambda b, i: float(q_x[b][i])

    def residual(self, p: Rows, where: Sequence[tuple[int, int]], reach: float = 1.0) -> Tensor:
        """[N, V] max(reach p - q, 0) of N rows of the target and the drafts (b, i) of those rows, which were read."""
        weights = p.times(reach)
        if self.given.draft_logits is None:
            for row, (b, i) in zip(weights[:, 0], where, strict=True):
                row[self.tokens[b][i]] = 0.0
            return weights.squeeze(1)
        q = self._rows_from_lse(where) if self.rows is None else self.rows.pick([(b, i - self.first) for b, i in where])
        weights.sub_(q.times(1.0)).clamp_(min=0)
        # Equal logits mean p = q, which rounding would hide, also that of a given draft_lse.
        for row in range(len(where)):
            if p.maximum[row] == q.maximum[row] and torch.equal(p.z[row], q.z[row]):
                weights[row] = 0.0
        return weights.squeeze(1)

    def _rows_from_lse(self, where: Sequence[tuple[int, int]]) -> Rows:
        logits, lse = self.given.draft_logits, self.given.draft_lse
        assert logits is not None and lse is not None
        z, maximum = scaled_rows(pick_rows(logits, where), self.given.filters.at([b for b, _ in where]))
        lse = pick_rows(lse.unsqueeze(-1), where)  # [N, 1, 1]
        q = torch.where(lse.isfinite(), (z - lse).exp_(), 0.0)
        return Rows(z, q, maximum, [[1.0]] * len(where))
