"""`specops::verify_exact` for eager calls on a CPU."""

from __future__ import annotations

from torch import Tensor

from ..arguments import VerifyArguments
from ..dense.walk import accepts, draft_indices
from .rows import read_rows, rows_at_a_time
from .walk import Outcome, next_tokens, num_leading, read_drafts, residual, verify


def verify_exact(given: VerifyArguments) -> tuple[Tensor, Tensor]:
    return verify(given, _verify_sampled)


def _verify_sampled(given: VerifyArguments) -> list[Outcome]:
    batch, num_drafts = given.draft_tokens.shape
    vocab_size = given.target_logits.shape[2]
    x, in_vocab = draft_indices(given.draft_tokens, vocab_size)

    # The walk. All rows of several sequences are read at once; of one sequence, as many as stay in the cache.
    step = num_drafts + 1 if batch > 1 else rows_at_a_time(vocab_size)
    for first in range(0, num_drafts + 1, step):
        stop = min(first + step, num_drafts)
        p = read_rows(given.target_logits[:, first : first + step], given.filters)
        p_x = p.probabilities(x[:, first:stop])
        q, q_x = read_drafts(given, x, first, stop)
        u = (given.accept_uniforms[:, first:stop].double() * given.lenience).tolist()
        is_draft = in_vocab[:, first:stop].tolist()
        n = [first + num_leading(map(accepts, *numbers)) for numbers in zip(u, p_x, q_x, is_draft, strict=True)]
        if n[0] < stop:
            break

    # The next token, from the residual max(p - q, 0) of row n, or from p.
    rows = [p.at(b, n[b] - first) for b in range(batch)]
    residuals = [
        residual(given, rows[b], None if q is None else q.at(b, n[b] - first), b, n[b])
        if n[b] < num_drafts and is_draft[b][n[b] - first]
        else None
        for b in range(batch)
    ]
    return list(zip(n, next_tokens(rows, residuals, given.sample_uniforms), strict=True))
