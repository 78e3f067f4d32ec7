"""`specops::verify_sigmoid` on CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rows import all_greedy, argmax, draw, inverse_temperature, scale, softmax_row, softmax_stats
from .walk import apply_greedy, gather, greedy_rows, leading, output, residual_or_target


def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float,
    beta: float,
    temperature: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if temperature is not None and all_greedy(temperature):
        return greedy_rows(target_logits, draft_tokens, temperature)
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse = inverse_temperature(temperature)
    in_vocab = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    x = torch.where(in_vocab, draft_tokens, 0).long()

    z_px = _floor(scale(gather(target_logits[:, :num_drafts], x), inverse), alpha, beta)
    z_qx = _floor(scale(gather(draft_logits, x), inverse), alpha, beta)
    p_x = _sigmoid_score(z_px.double(), alpha, beta)
    q_x = _sigmoid_score(z_qx.double(), alpha, beta)
    accepted = in_vocab & (q_x > 0) & (accept_uniforms.double() * q_x < p_x)
    greedy_tokens = None if temperature is None else argmax(target_logits)
    accepted = apply_greedy(accepted, greedy_tokens, draft_tokens, temperature)
    n = leading(accepted)

    rows = torch.arange(n.shape[0], device=n.device)
    z_p = scale(target_logits[rows, n], inverse)
    weights = softmax_row(z_p, *softmax_stats(z_p))
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        z_p = _floor(z_p, alpha, beta)
        z_q = _floor(scale(draft_logits[rows, rejected], inverse), alpha, beta)
        p = _sigmoid_score(z_p, alpha, beta)
        residual = _sigmoid_residual(p, z_p, z_q, alpha, beta)
        p = residual_or_target(residual, p, in_vocab[rows, rejected])
        weights = torch.where((n < num_drafts).unsqueeze(-1), p, weights)
    drawn = draw(weights, sample_uniforms)
    return output(draft_tokens, n, drawn, greedy_tokens, temperature), n


def _floor(z: Tensor, alpha: float, beta: float) -> Tensor:
    """Scaled logits not below the one whose score is sigmoid(-80), which float32 still holds: a row never loses all
    its scores. -inf stays."""
    return torch.where(z > -math.inf, z.clamp(min=alpha - 80.0 * (beta - alpha)), z)


def _sigmoid_score(z: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.where(z > -math.inf, torch.sigmoid((z - alpha) / (beta - alpha)), 0.0)


def _sigmoid_residual(p: Tensor, z_p: Tensor, z_q: Tensor, alpha: float, beta: float) -> Tensor:
    """[B, V] max(sigmoid(a) - sigmoid(b), 0) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)) for a > b, which does not
    cancel; a and b are the scaled logits of target and draft."""
    scale = 1.0 / (beta - alpha)
    gap = ((z_p - z_q) * scale).clamp(min=0)
    difference = p * torch.sigmoid((alpha - z_q) * scale) * -torch.expm1(-gap)
    return torch.where(z_p > -math.inf, torch.where(z_q > -math.inf, difference, p), 0.0)
