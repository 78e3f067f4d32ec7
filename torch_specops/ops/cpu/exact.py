"""`specops::verify_exact` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import VerifyArguments
from .eager_rows import columns, inverse_of, read_rows, rows_at_a_time, takes_dense_form
from .eager_walk import Drafts, Outcome, next_tokens, prefix_length, verify_parts
from .filters import row_bounds, scale_kept, scale_kept_tokens
from .softmax import draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats
from .walk import (
    LEAST_RESIDUAL,
    accepts,
    apply_greedy,
    draft_indices,
    is_near_argmax,
    logits_of,
    output_rows,
    prefix_lengths,
    probability,
    residual,
    residual_or_target,
    stats_from_lse,
)


def verify_exact(args: VerifyArguments) -> tuple[Tensor, Tensor]:
    if takes_dense_form(args.target_logits, args.temperature):
        return dense(args)
    return verify_parts(args, _verify_sampled)


def _verify_sampled(args: VerifyArguments) -> list[Outcome]:
    batch, num_drafts = args.draft_tokens.shape
    inverse = inverse_of(args.temperature)
    drafts, u = Drafts(args, inverse), args.accept_uniforms.tolist()

    # Test the drafts. For a batch, read all rows at once. For a single sequence, read as many rows at a time as fit in
    # the CPU's cache, and stop after a rejection.
    step = num_drafts + 1 if batch > 1 else rows_at_a_time(args.target_logits.shape[2])
    for first in range(0, num_drafts + 1, step):
        stop = min(first + step, num_drafts)
        rows = columns(args.target_logits, first, min(first + step, num_drafts + 1))
        p = read_rows(rows, inverse, args.filters)
        p_x, q_x = p.probabilities(columns(drafts.x, first, stop)), drafts.read(first, stop)
        n = [
            first
            + prefix_length(
                accepts(u[b][first + i] * args.lenience, p_x(b, i), q_x(b, i), drafts.in_vocab[b][first + i])
                for i in range(stop - first)
            )
            for b in range(batch)
        ]
        if n[0] < stop:
            break

    # Draw the next token from the residual max(p - q, 0) of row n, or from p.
    rejected = [b for b in range(batch) if n[b] < num_drafts and drafts.in_vocab[b][n[b]]]
    ends = [(b, n[b] - first) for b in range(batch)]
    residual = drafts.residual(p, [ends[b] for b in rejected]) if rejected else None
    return list(zip(n, next_tokens(p, ends, rejected, residual, args.sample_uniforms.tolist()), strict=True))


def dense(args: VerifyArguments) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = args.target_logits, args.draft_tokens, args.draft_logits
    temperature = args.temperature
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse_t = inverse_temperature(temperature)  # [B]
    x, in_vocab = draft_indices(draft_tokens, vocab_size)  # [B, K]

    # p(x) and q(x), [B, K], from the maximum and the sum of each row.
    z_target = scale_kept(target_logits, inverse_t, row_bounds(target_logits, args.filters))  # [B, K+1, V]
    p_max, p_sum = softmax_stats(z_target)  # [B, K+1]
    z_px = logits_of(z_target[:, :num_drafts], x)
    p_x = probability(z_px, p_max[:, :-1], p_sum[:, :-1])
    q_x = torch.ones_like(p_x)
    if draft_logits is not None:
        q_bounds = row_bounds(draft_logits, args.draft_filters)
        if args.draft_lse is None:
            q_max, q_sum = softmax_stats(scale_kept(draft_logits, inverse_t, q_bounds))
        else:
            q_max, q_sum = stats_from_lse(args.draft_lse)
        q_x = probability(scale_kept_tokens(logits_of(draft_logits, x), x, inverse_t, q_bounds), q_max, q_sum)
    if args.draft_is_one_hot is not None:
        q_x = torch.where(args.draft_is_one_hot.unsqueeze(-1), 1.0, q_x)

    # n is the number of drafts before the first rejection.
    accepted = accepts(args.accept_uniforms.double() * args.lenience, p_x, q_x, in_vocab)
    greedy_tokens = None if temperature is None else lowest_argmax(z_target, p_max)
    near_argmax = None
    if args.argmax_lenience != 1:
        near_argmax = in_vocab & is_near_argmax(z_px, p_max[:, :-1], args.argmax_lenience)
    n = prefix_lengths(apply_greedy(accepted, greedy_tokens, draft_tokens, temperature, near_argmax))  # [B]

    # Draw the next token from the residual max(p - q, 0) of row n, or from p.
    rows = torch.arange(n.shape[0], device=n.device)
    z_p = z_target[rows, n]  # [B, V]
    p = softmax_row(z_p, p_max[rows, n], p_sum[rows, n])
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)  # [B]
        q = None
        if draft_logits is not None:
            bounds = None if q_bounds is None else q_bounds.at(rows, rejected)
            z_q = scale_kept(draft_logits[rows, rejected], inverse_t, bounds)  # [B, V]
            q = z_q, q_max[rows, rejected], q_sum[rows, rejected]
        weights = residual(p, z_p, x[rows, rejected], q, is_one_hot=args.draft_is_one_hot)
        p = residual_or_target(weights, p, (n < num_drafts) & in_vocab[rows, rejected], LEAST_RESIDUAL)
    drawn = draw(p, args.sample_uniforms)
    return output_rows(draft_tokens, n, drawn, greedy_tokens, temperature), n
