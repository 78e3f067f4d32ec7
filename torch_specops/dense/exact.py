"""`specops::verify_exact` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import VerifyArguments
from .filters import row_bounds, scale_kept, scale_kept_tokens
from .rows import draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats
from .walk import (
    LEAST_RESIDUAL,
    accepts,
    apply_greedy,
    draft_indices,
    is_near_argmax,
    logits_of,
    num_leading,
    output_rows,
    probability,
    residual,
    residual_or_target,
    stats_from_lse,
)


def verify_exact(given: VerifyArguments) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = given.target_logits, given.draft_tokens, given.draft_logits
    temperature, filters = given.temperature, given.filters
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse_t = inverse_temperature(temperature)  # [B]
    x, in_vocab = draft_indices(draft_tokens, vocab_size)  # [B, K]

    # p(x) and q(x), [B, K], from the maximum and the sum of each row.
    p_bounds = row_bounds(target_logits, filters)
    z_target = scale_kept(target_logits, inverse_t, p_bounds)  # [B, K+1, V]
    p_max, p_sum = softmax_stats(z_target)  # [B, K+1]
    bounds = None if p_bounds is None else p_bounds.at(slice(None), slice(num_drafts))
    z_px = scale_kept_tokens(logits_of(target_logits[:, :num_drafts], x), x, inverse_t, bounds)
    p_x = probability(z_px, p_max[:, :-1], p_sum[:, :-1])
    q_bounds = None
    if draft_logits is None:
        q_max = q_sum = None
        q_x = torch.ones_like(p_x)
    else:
        q_bounds = row_bounds(draft_logits, given.draft_filters)
        if given.draft_lse is None:
            q_max, q_sum = softmax_stats(scale_kept(draft_logits, inverse_t, q_bounds))
        else:
            q_max, q_sum = stats_from_lse(given.draft_lse)
        q_x = probability(scale_kept_tokens(logits_of(draft_logits, x), x, inverse_t, q_bounds), q_max, q_sum)

    # The walk: n drafts are accepted.
    accepted = accepts(given.accept_uniforms.double() * given.lenience, p_x, q_x, in_vocab)
    greedy_tokens = None if temperature is None else lowest_argmax(z_target, p_max)
    near_argmax = None
    if given.argmax_lenience != 1:
        near_argmax = in_vocab & is_near_argmax(z_px, p_max[:, :-1], given.argmax_lenience)
    n = num_leading(apply_greedy(accepted, greedy_tokens, draft_tokens, temperature, near_argmax))  # [B]

    # The next token, from the residual max(p - q, 0) of row n, or from p.
    rows = torch.arange(n.shape[0], device=n.device)
    z_p = z_target[rows, n]  # [B, V]
    p = softmax_row(z_p, p_max[rows, n], p_sum[rows, n])
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)  # [B]
        q = None
        if q_max is not None and q_sum is not None and draft_logits is not None:
            bounds = None if q_bounds is None else q_bounds.at(rows, rejected)
            z_q = scale_kept(draft_logits[rows, rejected], inverse_t, bounds)  # [B, V]
            q = z_q, q_max[rows, rejected], q_sum[rows, rejected]
        weights = residual(p, z_p, x[rows, rejected], q)
        p = residual_or_target(weights, p, (n < num_drafts) & in_vocab[rows, rejected], LEAST_RESIDUAL)
    drawn = draw(p, given.sample_uniforms)
    return output_rows(draft_tokens, n, drawn, greedy_tokens, temperature), n
