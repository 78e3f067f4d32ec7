"""`specops::verify_exact` on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .filters import row_bounds, scale_kept, scale_kept_tokens
from .rows import all_greedy, draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats
from .walk import (
    apply_greedy,
    gather,
    greedy_rows,
    leading,
    near_argmax,
    output,
    probability,
    residual_or_target,
    stats_from_lse,
)


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None,
    draft_lse: Tensor | None,
    lenience: float,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    argmax_lenience: float,
) -> tuple[Tensor, Tensor]:
    if temperature is not None and all_greedy(temperature):
        return greedy_rows(target_logits, draft_tokens, temperature, argmax_lenience)
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse = inverse_temperature(temperature)
    in_vocab = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    x = torch.where(in_vocab, draft_tokens, 0).long()

    p_bounds = row_bounds(target_logits, temperature, top_k, top_p, min_p)
    scaled_target = scale_kept(target_logits, inverse, p_bounds)
    p_max, p_sum = softmax_stats(scaled_target)
    tested = None if p_bounds is None else p_bounds.at(slice(None), slice(num_drafts))
    z_px = scale_kept_tokens(gather(target_logits[:, :num_drafts], x), x, inverse, tested)
    p_x = probability(z_px, p_max[:, :-1], p_sum[:, :-1])
    q_bounds = None
    if draft_logits is None:
        q_max = q_sum = None
        q_x = torch.ones_like(p_x)
    else:
        q_bounds = row_bounds(draft_logits, temperature, top_k, top_p, min_p)
        if draft_lse is None:
            q_max, q_sum = softmax_stats(scale_kept(draft_logits, inverse, q_bounds))
        else:
            q_max, q_sum = stats_from_lse(draft_lse)
        q_x = probability(scale_kept_tokens(gather(draft_logits, x), x, inverse, q_bounds), q_max, q_sum)

    accepted = in_vocab & (q_x > 0) & (accept_uniforms.double() * lenience * q_x < p_x)
    greedy_tokens = None if temperature is None else lowest_argmax(scaled_target, p_max)
    near = None if argmax_lenience == 1 else in_vocab & near_argmax(z_px, p_max[:, :-1], argmax_lenience)
    accepted = apply_greedy(accepted, greedy_tokens, draft_tokens, temperature, near)
    n = leading(accepted)

    rows = torch.arange(n.shape[0], device=n.device)
    z_p = scaled_target[rows, n]
    p = softmax_row(z_p, p_max[rows, n], p_sum[rows, n])
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        if q_max is None or q_sum is None or draft_logits is None:
            is_draft = torch.arange(vocab_size, device=p.device) == x[rows, rejected].unsqueeze(-1)
            residual = torch.where(is_draft, 0.0, p)
        else:
            at_rejection = None if q_bounds is None else q_bounds.at(rows, rejected)
            z_q = scale_kept(draft_logits[rows, rejected], inverse, at_rejection)
            q = softmax_row(z_q, q_max[rows, rejected], q_sum[rows, rejected])
            # Equal logits mean p = q, which the rounding of a given draft_lse would hide.
            residual = torch.where((z_p != z_q).any(-1, keepdim=True), (p - q).clamp(min=0), 0.0)
        p = residual_or_target(residual, p, (n < num_drafts) & in_vocab[rows, rejected])
    drawn = draw(p, sample_uniforms)
    return output(draft_tokens, n, drawn, greedy_tokens, temperature), n
