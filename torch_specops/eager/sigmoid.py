"""`specops::verify_sigmoid` for eager calls on a CPU."""

from __future__ import annotations

from torch import Tensor

from .. import dense
from ..arguments import Filters, SigmoidArguments
from ..dense.rows import scale
from ..dense.sigmoid import floor, residual, score
from ..dense.walk import accepts, draft_indices, logits_of, residual_or_target
from .rows import draw, inverse_of, pick_rows, prefers_dense, read_rows
from .walk import Outcome, num_leading, output_of, parts, verify_greedy


def verify_sigmoid(given: SigmoidArguments) -> tuple[Tensor, Tensor]:
    if prefers_dense(given.target_logits, given.temperature):
        return dense.verify_sigmoid(given)
    outcomes = (_verify_sampled(part) if is_sampled else verify_greedy(part) for is_sampled, part in parts(given))
    return output_of(given.draft_tokens, outcomes)


def _verify_sampled(given: SigmoidArguments) -> list[Outcome]:
    target_logits, draft_logits = given.target_logits, given.draft_logits
    scores = given.alpha, given.beta
    batch, num_drafts = given.draft_tokens.shape
    inverse_t = inverse_of(given.temperature)  # [B]
    x, in_vocab = draft_indices(given.draft_tokens, target_logits.shape[2])

    # The walk, with scores in place of probabilities.
    p_x, q_x = (
        score(floor(scale(logits_of(logits, x), inverse_t), *scores).double(), *scores)
        for logits in (target_logits[:, :num_drafts], draft_logits)
    )
    accepted = accepts(given.accept_uniforms.double(), p_x, q_x, in_vocab).tolist()
    n = [num_leading(row) for row in accepted]

    # The next token: from the softmax after K acceptances, else from the residual of the scores.
    bonus = [b for b in range(batch) if n[b] == num_drafts]
    others = [b for b in range(batch) if n[b] < num_drafts]
    tokens = dict.fromkeys(range(batch), -1)
    s = given.sample_uniforms.tolist()
    if bonus:
        last = pick_rows(target_logits, [(b, num_drafts) for b in bonus])
        rows = read_rows(last, None if inverse_t is None else inverse_t[bonus], Filters())
        tokens.update(zip(bonus, draw(rows.weights.squeeze(1), [s[b] for b in bonus]), strict=True))
    if others:
        where = [(b, n[b]) for b in others]
        inverse = None if inverse_t is None else inverse_t[others]
        z_p, z_q = (
            floor(scale(pick_rows(logits, where).squeeze(1), inverse), *scores)
            for logits in (target_logits, draft_logits)
        )
        p = score(z_p, *scores)
        is_draft = pick_rows(in_vocab.unsqueeze(-1), where).flatten()
        weights = residual_or_target(residual(p, z_p, z_q, *scores), p, is_draft)
        tokens.update(zip(others, draw(weights, [s[b] for b in others]), strict=True))
    return list(zip(n, tokens.values(), strict=True))
