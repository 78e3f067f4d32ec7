"""`specops::verify_exact` for eager calls on a CPU."""

from __future__ import annotations

from torch import Tensor

from .. import dense
from ..arguments import VerifyArguments
from ..dense.walk import accepts
from .drafts import Drafts
from .rows import inverse_of, prefers_dense, read_rows, rows_at_a_time
from .walk import Outcome, next_tokens, num_leading, output_of, parts, verify_greedy


def verify_exact(given: VerifyArguments) -> tuple[Tensor, Tensor]:
    if prefers_dense(given.target_logits, given.temperature):
        return dense.verify_exact(given)
    outcomes = (_verify_sampled(part) if is_sampled else verify_greedy(part) for is_sampled, part in parts(given))
    return output_of(given.draft_tokens, outcomes)


def _verify_sampled(given: VerifyArguments) -> list[Outcome]:
    batch, num_drafts = given.draft_tokens.shape
    inverse = inverse_of(given.temperature)
    drafts, u = Drafts(given, inverse), given.accept_uniforms.tolist()

    # The walk. Several sequences are read at once, with all their rows; one sequence, as many rows at a time as stay in
    # the cache.
    step = num_drafts + 1 if batch > 1 else rows_at_a_time(given.target_logits.shape[2])
    for first in range(0, num_drafts + 1, step):
        stop = min(first + step, num_drafts)
        p = read_rows(given.target_logits[:, first : first + step], inverse, given.filters)
        p_x, q_x = p.probabilities(drafts.x[:, first:stop]), drafts.read(first, stop)
        n = [
            first
            + num_leading(
                accepts(u[b][first + i] * given.lenience, p_x(b, i), q_x(b, i), drafts.in_vocab[b][first + i])
                for i in range(stop - first)
            )
            for b in range(batch)
        ]
        if n[0] < stop:
            break

    # The next token, from the residual max(p - q, 0) of row n, or from p.
    rejected = [b for b in range(batch) if n[b] < num_drafts and drafts.in_vocab[b][n[b]]]
    ends = [(b, n[b] - first) for b in range(batch)]
    residual = drafts.residual(p.pick([ends[b] for b in rejected]), [(b, n[b]) for b in rejected]) if rejected else None
    return list(zip(n, next_tokens(p, ends, rejected, residual, given.sample_uniforms.tolist()), strict=True))
