"""`specops::verify_sigmoid` in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..arguments import SigmoidArguments
from .rows import argmax, draw, inverse_temperature, scale, softmax_row, softmax_stats
from .walk import (
    accepts,
    apply_greedy,
    draft_indices,
    logits_of,
    num_leading,
    output_rows,
    residual_or_target,
)


def verify_sigmoid(given: SigmoidArguments) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = given.target_logits, given.draft_tokens, given.draft_logits
    temperature, alpha, beta = given.temperature, given.alpha, given.beta
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse_t = inverse_temperature(temperature)  # [B]
    x, in_vocab = draft_indices(draft_tokens, vocab_size)  # [B, K]

    # The walk, with scores in place of probabilities.
    z_px = floor(scale(logits_of(target_logits[:, :num_drafts], x), inverse_t), alpha, beta)  # [B, K]
    z_qx = floor(scale(logits_of(draft_logits, x), inverse_t), alpha, beta)
    p_x, q_x = score(z_px.double(), alpha, beta), score(z_qx.double(), alpha, beta)
    accepted = accepts(given.accept_uniforms.double(), p_x, q_x, in_vocab)
    greedy_tokens = None if temperature is None else argmax(target_logits)  # [B, K+1]
    n = num_leading(apply_greedy(accepted, greedy_tokens, draft_tokens, temperature))  # [B]

    # The next token: from the softmax after K acceptances, else from the residual of the scores.
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
    drawn = draw(weights, given.sample_uniforms)
    return output_rows(draft_tokens, n, drawn, greedy_tokens, temperature), n


def floor(z: Tensor, alpha: float, beta: float) -> Tensor:
    """Scaled logits, raised to at least the one whose score is sigmoid(-80), which float32 still holds, so that the
    scores of a row never all vanish. -inf stays."""
    return torch.where(z > -math.inf, z.clamp(min=alpha - 80.0 * (beta - alpha)), z)


def score(z: Tensor, alpha: float, beta: float) -> Tensor:
    """Wagner et al. 2024, equation 5; 0 for a masked logit."""
    return torch.where(z > -math.inf, torch.sigmoid((z - alpha) / (beta - alpha)), 0.0)


def residual(p: Tensor, z_p: Tensor, z_q: Tensor, alpha: float, beta: float) -> Tensor:
    """[B, V] max(sigmoid(a) - sigmoid(b), 0) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) for a > b, which does not
    cancel; a and b are the arguments of the scores of target and draft."""
    inverse = 1.0 / (beta - alpha)
    gap = ((z_p - z_q) * inverse).clamp(min=0)
    difference = p * torch.sigmoid((alpha - z_q) * inverse) * -torch.expm1(-gap)
    return torch.where(z_p > -math.inf, torch.where(z_q > -math.inf, difference, p), 0.0)
