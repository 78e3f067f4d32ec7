"""`specops::verify_sigmoid` for eager calls on a CPU."""

from __future__ import annotations

from torch import Tensor

from ..arguments import Filters, SigmoidArguments
from ..dense.rows import inverse_temperature, scale
from ..dense.sigmoid import floor, residual, score
from ..dense.walk import accepts, draft_indices, logits_of
from .rows import Row, read_rows
from .walk import Outcome, next_tokens, num_leading, verify


def verify_sigmoid(given: SigmoidArguments) -> tuple[Tensor, Tensor]:
    return verify(given, _verify_sampled)


def _verify_sampled(given: SigmoidArguments) -> list[Outcome]:
    target_logits, draft_logits = given.target_logits, given.draft_logits
    temperature, scores = given.temperature, (given.alpha, given.beta)
    batch, num_drafts = given.draft_tokens.shape
    inverse_t = inverse_temperature(temperature)  # [B]
    x, in_vocab = draft_indices(given.draft_tokens, target_logits.shape[2])

    # The walk, with scores in place of probabilities.
    p_x, q_x = (
        score(floor(scale(logits_of(logits, x), inverse_t), *scores).double(), *scores).tolist()
        for logits in (target_logits[:, :num_drafts], draft_logits)
    )
    u, is_draft = given.accept_uniforms.double().tolist(), in_vocab.tolist()
    n = [num_leading(map(accepts, *numbers)) for numbers in zip(u, p_x, q_x, is_draft, strict=True)]

    # The next token: from the softmax after K acceptances, else from the residual of the scores.
    rows: list[Row] = []
    residuals: list[Tensor | None] = []
    for b in range(batch):
        this = slice(b, b + 1)
        rest = None
        if n[b] == num_drafts:
            row = read_rows(target_logits[this, n[b]].unsqueeze(1), Filters(temperature).at(this)).at(0, 0)
        else:
            inverse = None if inverse_t is None else inverse_t[this]
            z_p = floor(scale(target_logits[this, n[b]], inverse), *scores)
            p = score(z_p, *scores)
            row = Row(z_p[0], p[0], 1.0)
            if is_draft[b][n[b]]:
                z_q = floor(scale(draft_logits[this, n[b]], inverse), *scores)
                rest = residual(p, z_p, z_q, *scores)[0]
        rows.append(row)
        residuals.append(rest)
    return list(zip(n, next_tokens(rows, residuals, given.sample_uniforms), strict=True))
