"""Functions that the eager forms of the verify ops share: split the batch, read the drafts, verify greedy rows, and
draw the next token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..arguments import SigmoidArguments, VerifyArguments
from .eager_rows import Rows, argmax_by_tiles, columns, draw_tokens, integers, pick_rows, read_rows, runs, scaled_rows
from .filters import row_bounds, scale_kept_tokens
from .softmax import scale
from .walk import LARGEST_EXPONENT, LEAST_RESIDUAL, draft_indices, is_near_argmax, logits_of, stats_from_lse

Arguments = TypeVar("Arguments", VerifyArguments, SigmoidArguments)
# The result for one sequence: the number of accepted drafts, and the next token.
Outcome = tuple[int, int]


def verify_parts(args: Arguments, verify_sampled: Callable[[Arguments], list[Outcome]]) -> tuple[Tensor, Tensor]:
    """output_tokens [B, K+1] and num_accepted [B]. The batch is split by `runs`. `verify_sampled` verifies the sampled
    runs, and `_verify_greedy` the other runs."""
    logits, draft_tokens = args.target_logits, args.draft_tokens
    outcomes: list[Outcome] = []
    one_hot = args.draft_is_one_hot if isinstance(args, VerifyArguments) else None
    for is_sampled, where in runs(logits, args.temperature, one_hot):
        part = args
        if where != slice(0, logits.shape[0]):
            part_tensors: Any = {name: x[where] for name, x in args._asdict().items() if isinstance(x, Tensor)}
            part = args._replace(**part_tensors)
        if one_hot is not None:
            part = part._replace(draft_is_one_hot=None)
            if one_hot[where.start]:
                part = part._replace(draft_logits=None, draft_lse=None)
        outcomes += verify_sampled(part) if is_sampled else _verify_greedy(part)
    num_drafts = draft_tokens.shape[1]
    output: list[int] = []
    for drafts, (n, token) in zip(draft_tokens.tolist(), outcomes, strict=True):
        output += drafts[:n] + [token] + [-1] * (num_drafts - n)
    return integers(output).view(-1, num_drafts + 1), integers([n for n, _ in outcomes])


def _verify_greedy(args: VerifyArguments | SigmoidArguments) -> list[Outcome]:
    """Verify sequences with temperature 0. Drafts are accepted as long as they are the argmax, or close enough to it if
    `argmax_lenience` is below 1. With a negative or NaN temperature, no draft is accepted."""
    assert args.temperature is not None
    target_logits, draft_tokens = args.target_logits, args.draft_tokens
    best = argmax_by_tiles(target_logits)
    greedy_tokens = best.tolist()
    if isinstance(args, VerifyArguments) and args.argmax_lenience < 1:
        x, in_vocab = draft_indices(draft_tokens, target_logits.shape[2])
        z, z_max = (scale(logits_of(target_logits[:, :-1], tokens), None) for tokens in (x, best[:, :-1].clamp(min=0)))
        matches = (in_vocab & is_near_argmax(z, z_max, args.argmax_lenience)).tolist()
    else:
        rows = zip(draft_tokens.tolist(), greedy_tokens, strict=True)
        matches = [[x == y >= 0 for x, y in zip(drafts, tokens, strict=False)] for drafts, tokens in rows]
    outcomes = []
    for t, tokens, accepted in zip(args.temperature.tolist(), greedy_tokens, matches, strict=True):
        n = prefix_length(accepted)
        outcomes.append((n, tokens[n]) if t == 0 else (0, -1))
    return outcomes


def prefix_length(accepted: Iterable[bool]) -> int:
    """The number of accepted drafts before the first rejection."""
    return sum(1 for _ in takewhile(bool, accepted))


def next_tokens(
    p: Rows,
    ends: Sequence[tuple[int, int]],  # for each sequence, the row (b, i) of p after its accepted drafts
    rejected: Sequence[int],  # the sequences that have a residual
    residual: Tensor | None,  # [len(rejected), V]
    uniforms: Sequence[float],
) -> list[int]:
    """Draw the next token of each sequence, from its residual, or from p if there is no residual or it is empty."""
    tokens = [-1] * len(ends)
    if residual is not None:
        drawn = draw_tokens(residual, [uniforms[b] for b in rejected], LEAST_RESIDUAL)
        for b, token in zip(rejected, drawn, strict=True):
            tokens[b] = token
    others = [b for b, token in enumerate(tokens) if token == -1]
    if others:
        drawn = draw_tokens(pick_rows(p.weights, [ends[b] for b in others]), [uniforms[b] for b in others])
        for b, token in zip(others, drawn, strict=True):
            tokens[b] = token
    return tokens


class Drafts:
    """The draft tokens of a call, their probabilities q(x), and the residuals. `inverse` [B] is 1 / T."""

    def __init__(self, args: VerifyArguments, inverse: Tensor | None) -> None:
        vocab_size = args.target_logits.shape[2]
        self.args, self.inverse = args, inverse
        self.tokens = args.draft_tokens.tolist()
        self.in_vocab = [[0 <= token < vocab_size for token in row] for row in self.tokens]
        # The tokens [B, K] as valid indices. Tokens outside the vocabulary are rejected anyway, so their index does not
        # matter.
        self.x = args.draft_tokens.clamp(0, vocab_size - 1).long()
        self.lse: list[list[float]] = [] if args.draft_lse is None else args.draft_lse.tolist()
        self.rows: Rows | None = None
        self.first = 0

    def read(self, first: int, stop: int) -> Callable[[int, int], float]:
        """Read the draft rows at positions first .. stop - 1. Returns a function (b, i) -> q(x) of sequence b at
        position first + i."""
        x, args, self.first = columns(self.x, first, stop), self.args, first
        if args.draft_logits is None:
            return lambda b, i: 1.0
        logits = columns(args.draft_logits, first, stop)
        if args.draft_lse is None:
            self.rows = read_rows(logits, self.inverse, args.draft_filters)
            return self.rows.probabilities(x)
        z = scale_kept_tokens(logits_of(logits, x), x, self.inverse, row_bounds(logits, args.draft_filters)).tolist()

        def probability(b: int, i: int) -> float:
            lse = self.lse[b][first + i]
            return math.exp(min(z[b][i] - lse, LARGEST_EXPONENT)) if math.isfinite(lse) else 0.0

        return probability

    def residual(self, p: Rows, where: Sequence[tuple[int, int]], reach: float = 1.0) -> Tensor:
        """[N, V] max(reach p - q, 0) for N rows (b, i) of p and the draft rows at the same positions. Call `read`
        first."""
        p_weights, p_factors = pick_rows(p.weights, where), p.factors(where, reach)
        if self.args.draft_logits is None:
            weights = p_weights * p_factors
            for row, (b, i) in zip(weights, where, strict=True):
                row[self.tokens[b][self.first + i]] = 0.0
            return weights
        if self.rows is not None:
            q, drafts, q_weights = self.rows, where, pick_rows(self.rows.weights, where)
        else:
            q, drafts = self._rows_from_lse(where), [(row, 0) for row in range(len(where))]
            q_weights = q.weights.squeeze(1)
        # Compute in place, because allocating memory would cost more than the arithmetic. q is not needed again.
        minus_q = q_weights.mul_(q.factors(drafts, -1.0))
        for row, ((b, i), (c, j)) in enumerate(zip(where, drafts, strict=True)):
            if p.maximum[b][i] == q.maximum[c][j] and torch.equal(p.z[b, i], q.z[c, j]):
                # If a target row and its draft row have equal logits, q = m * reach * p for a number m, and the
                # residual is (1 - m) * reach * p. Compute it in this form, because the difference of the rows would
                # consist of rounding errors. In rows without a finite entry m is NaN.
                minus_m = float(minus_q[row].amin() / (p_weights[row].amax() * p_factors[row]))
                p_factors[row] *= max(0.0, 1.0 + minus_m)
                minus_q[row] = 0.0
        return minus_q.addcmul_(p_weights, p_factors).clamp_(min=0)

    def _rows_from_lse(self, where: Sequence[tuple[int, int]]) -> Rows:
        """The draft rows at N positions (b, i), as N sequences of one row, normalised by `draft_lse`."""
        logits, lse, sequences = self.args.draft_logits, self.args.draft_lse, [b for b, _ in where]
        assert logits is not None and lse is not None
        inverse = None if self.inverse is None else self.inverse[sequences]
        where = [(b, self.first + i) for b, i in where]
        z, maximum = scaled_rows(pick_rows(logits, where).unsqueeze(1), inverse, self.args.draft_filters.at(sequences))
        shift, _ = stats_from_lse(pick_rows(lse.unsqueeze(-1), where).unsqueeze(1))
        return Rows(z, (z - shift).exp_(), maximum, [[1.0]] * len(where))
