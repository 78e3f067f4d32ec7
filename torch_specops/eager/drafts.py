"""The draft tokens of `verify_exact` and `verify_block`: q(x), and the residuals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..arguments import VerifyArguments
from ..dense.filters import row_bounds, scale_kept_tokens
from ..dense.walk import LARGEST_EXPONENT, logits_of, stats_from_lse
from .rows import Rows, pick_rows, read_rows, scaled_rows


class Drafts:
    """The draft tokens, their probabilities q(x), and the residuals. `inverse` is 1 / T [B]."""

    def __init__(self, given: VerifyArguments, inverse: Tensor | None) -> None:
        vocab_size = given.target_logits.shape[2]
        self.given, self.inverse = given, inverse
        self.tokens = given.draft_tokens.tolist()
        self.in_vocab = [[0 <= token < vocab_size for token in row] for row in self.tokens]
        # [B, K] as indices. Tokens outside the vocabulary are never accepted, whatever their probability.
        self.x = given.draft_tokens.clamp(0, vocab_size - 1).long()
        self.lse: list[list[float]] = [] if given.draft_lse is None else given.draft_lse.tolist()
        self.rows: Rows | None = None
        self.first = 0

    def read(self, first: int, stop: int) -> Callable[[int, int], float]:
        """Read the positions first .. stop - 1. Returns the function (b, i) -> q(x) of sequence b at first + i."""
        x, given = self.x[:, first:stop], self.given
        if given.draft_logits is None:
            return lambda b, i: 1.0
        logits = given.draft_logits[:, first:stop]
        if given.draft_lse is None:
            self.rows, self.first = read_rows(logits, self.inverse, given.draft_filters), first
            return self.rows.probabilities(x)
        z = scale_kept_tokens(logits_of(logits, x), x, self.inverse, row_bounds(logits, given.draft_filters)).tolist()

        def probability(b: int, i: int) -> float:
            lse = self.lse[b][first + i]
            return math.exp(min(z[b][i] - lse, LARGEST_EXPONENT)) if math.isfinite(lse) else 0.0

        return probability

    def residual(self, p: Rows, where: Sequence[tuple[int, int]], reach: float = 1.0) -> Tensor:
        """[N, V] max(reach p - q, 0) for N rows of the target and their drafts (b, i), which have been read."""
        if self.given.draft_logits is None:
            weights = p.weights * p.factors(reach)
            for row, (b, i) in zip(weights[:, 0], where, strict=True):
                row[self.tokens[b][i]] = 0.0
            return weights.squeeze(1)
        q = self._rows_from_lse(where) if self.rows is None else self.rows.pick([(b, i - self.first) for b, i in where])
        # Written over q, which is not needed again: allocating memory costs more than the arithmetic.
        minus_q, p_factors = q.weights.mul_(-q.factors()), p.factors()
        # Equal logits mean q = c p, which rounding would hide, and a residual of (reach - c) p. Rows without a finite
        # entry have a c of NaN.
        rests = {
            row: max(0.0, reach + float(minus_q[row].amin() / (p.weights[row].amax() * p_factors[row])))
            for row in range(len(where))
            if p.maximum[row] == q.maximum[row] and torch.equal(p.z[row], q.z[row])
        }
        weights = minus_q.addcmul_(p.weights, p.factors(reach)).clamp_(min=0)
        for row, rest in rests.items():
            weights[row] = p.weights[row] * p_factors[row] * rest
        return weights.squeeze(1)

    def _rows_from_lse(self, where: Sequence[tuple[int, int]]) -> Rows:
        logits, lse, sequences = self.given.draft_logits, self.given.draft_lse, [b for b, _ in where]
        assert logits is not None and lse is not None
        inverse = None if self.inverse is None else self.inverse[sequences]
        z, maximum = scaled_rows(pick_rows(logits, where), inverse, self.given.draft_filters.at(sequences))
        shift, _ = stats_from_lse(pick_rows(lse.unsqueeze(-1), where))
        return Rows(z, (z - shift).exp_(), maximum, [[1.0]] * len(where))
