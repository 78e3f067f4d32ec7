"""`specops::verify_sigmoid` on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arguments import Filters, SigmoidArguments
from .eager_rows import draw_tokens, inverse_of, pick_rows, read_rows, takes_dense_form
from .eager_walk import Outcome, prefix_length, verify_parts
from .softmax import argmax, draw, inverse_temperature, scale, softmax_row, softmax_stats
from .walk import accepts, apply_greedy, draft_indices, logits_of, output_rows, prefix_lengths, residual_or_target


def verify_sigmoid(args: SigmoidArguments) -> tuple[Tensor, Tensor]:
    if takes_dense_form(args.target_logits, args.temperature):
        return dense(args)
    return verify_parts(args, _verify_sampled)


def _verify_sampled(args: SigmoidArguments) -> list[Outcome]:
    target_logits, draft_logits = args.target_logits, args.draft_logits
    scores = args.alpha, args.beta
    batch, num_drafts = args.draft_tokens.shape
    inverse_t = inverse_of(args.temperature)  # [B]
    x, in_vocab = draft_indices(args.draft_tokens, target_logits.shape[2])

    # Test the drafts with scores instead of probabilities. n is the number of drafts before the first rejection.
    p_x, q_x = (
        score(floor(scale(logits_of(logits, x), inverse_t), *scores).double(), *scores)
        for logits in (target_logits[:, :num_drafts], draft_logits)
    )
    accepted = accepts(args.accept_uniforms.double(), p_x, q_x, in_vocab).tolist()
    n = [prefix_length(row) for row in accepted]

    # Draw the next token from the softmax if all K drafts were accepted, else from the residual of the scores.
    bonus = [b for b in range(batch) if n[b] == num_drafts]
    others = [b for b in range(batch) if n[b] < num_drafts]
    tokens = dict.fromkeys(range(batch), -1)
    s = args.sample_uniforms.tolist()
    if bonus:
        last = pick_rows(target_logits, [(b, num_drafts) for b in bonus]).unsqueeze(1)
        rows = read_rows(last, None if inverse_t is None else inverse_t[bonus], Filters())
        tokens.update(zip(bonus, draw_tokens(rows.weights.squeeze(1), [s[b] for b in bonus]), strict=True))
    if others:
        where = [(b, n[b]) for b in others]
        inverse = None if inverse_t is None else inverse_t[others]
        z_p, z_q = (
            floor(scale(pick_rows(logits, where), inverse), *scores) for logits in (target_logits, draft_logits)
        )
        p = score(z_p, *scores)
        is_draft = pick_rows(in_vocab.unsqueeze(-1), where).flatten()
        weights = residual_or_target(residual(p, z_p, z_q, *scores), p, is_draft)
        tokens.update(zip(others, draw_tokens(weights, [s[b] for b in others]), strict=True))
    return list(zip(n, tokens.values(), strict=True))


def dense(args: SigmoidArguments) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = args.target_logits, args.draft_tokens, args.draft_logits
    temperature, alpha, beta = args.temperature, args.alpha, args.beta
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse_t = inverse_temperature(temperature)  # [B]
    x, in_vocab = draft_indices(draft_tokens, vocab_size)  # [B, K]

    # Test the drafts with scores instead of probabilities. n is the number of drafts before the first rejection.
    z_px = floor(scale(logits_of(target_logits[:, :num_drafts], x), inverse_t), alpha, beta)  # [B, K]
    z_qx = floor(scale(logits_of(draft_logits, x), inverse_t), alpha, beta)
    p_x, q_x = score(z_px.double(), alpha, beta), score(z_qx.double(), alpha, beta)
    accepted = accepts(args.accept_uniforms.double(), p_x, q_x, in_vocab)
    greedy_tokens = None if temperature is None else argmax(target_logits)  # [B, K+1]
    n = prefix_lengths(apply_greedy(accepted, greedy_tokens, draft_tokens, temperature))  # [B]

    # Draw the next token from the softmax if all K drafts were accepted, else from the residual of the scores.
    rows = torch.arange(n.shape[0], device=n.device)
    z_p = scale(target_logits[rows, n], inverse_t)  # [B, V]
    weights = softmax_row(z_p, *softmax_stats(z_p))
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        z_p = floor(z_p, alpha, beta)
        z_q = floor(scale(draft_logits[rows, rejected], inverse_t), alpha, beta)
        p = score(z_p, alpha, beta)
        scores = residual_or_target(residual(p, z_p, z_q, alpha, beta), p, in_vocab[rows, rejected])
        weights = torch.where((n < num_drafts).unsqueeze(-1), scores, weights)
    drawn = draw(weights, args.sample_uniforms)
    return output_rows(draft_tokens, n, drawn, greedy_tokens, temperature), n


def floor(z: Tensor, alpha: float, beta: float) -> Tensor:
    """Clamp scaled logits from below, at the logit with score sigmoid(-80). float32 can represent that score, so the
    scores of a row never all underflow to 0. -inf is not clamped."""
    return torch.where(z > -math.inf, z.clamp(min=alpha - 80.0 * (beta - alpha)), z)


def score(z: Tensor, alpha: float, beta: float) -> Tensor:
    """The sigmoid score (Wagner et al. 2024, equation 5); 0 for a masked logit."""
    return torch.where(z > -math.inf, torch.sigmoid((z - alpha) / (beta - alpha)), 0.0)


def residual(p: Tensor, z_p: Tensor, z_q: Tensor, alpha: float, beta: float) -> Tensor:
    """[B, V] max(sigmoid(a) - sigmoid(b), 0), where a and b are the sigmoid arguments of target and draft. For a > b
    this is computed as sigmoid(a) sigmoid(-b) (1 - exp(b - a)), which has no cancellation."""
    inverse = 1.0 / (beta - alpha)
    gap = ((z_p - z_q) * inverse).clamp(min=0)
    difference = p * torch.sigmoid((alpha - z_q) * inverse) * -torch.expm1(-gap)
    return torch.where(z_p > -math.inf, torch.where(z_q > -math.inf, difference, p), 0.0)
