"""The specification of the ops: float64, one loop per sequence and per draft, nothing of ours imported.

Symbols (docs/math.md): p is the target's distribution, q the draft's, x a draft token, u and s the uniforms of
the acceptance test and of the next token, l the lenience, n the number of accepted drafts.
Paper: Leviathan et al. 2023 (arXiv 2211.17192) Algorithm 1 and appendix A.5; Chen et al. 2023 (arXiv 2302.01318)
Algorithm 2; Wagner et al. 2024 (arXiv 2406.11016) equation 5 for the sigmoid law.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "inverse_cdf",
    "probabilities",
    "sample",
    "scaled_logits",
    "score_logits",
    "sigmoid_scores",
    "verify_exact",
    "verify_sigmoid",
]

FLOAT32_MAX = torch.finfo(torch.float32).max


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """[V] logits / T in float64: NaN counts as -inf (excluded); a finite value stays within float32's finite range,
    and so does +inf. 1 / T saturates at the largest float32. T = 0 leaves the values as they are (a greedy row
    compares them, nothing else)."""
    x = logits.double()
    z = x / max(temperature, 1.0 / FLOAT32_MAX) if temperature > 0 else x
    z = torch.where(x == math.inf, FLOAT32_MAX, z.clamp(-FLOAT32_MAX, FLOAT32_MAX))
    return torch.where(x.isnan() | (x == -math.inf), -math.inf, z)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """[V] softmax(logits / T); all zero when no entry is finite."""
    z = scaled_logits(logits, temperature)
    if not (z > -math.inf).any():
        return torch.zeros_like(z)
    weights = torch.exp(z - z.max())
    return weights / weights.sum()


def score_logits(logits: Tensor, temperature: float, alpha: float, beta: float) -> Tensor:
    """[V] scaled logits not below the one whose score is sigmoid(-80), which float32 still holds; -inf stays."""
    z = scaled_logits(logits, temperature)
    return torch.where(z > -math.inf, z.clamp(min=alpha - 80.0 * (beta - alpha)), z)


def sigmoid_scores(logits: Tensor, temperature: float, alpha: float, beta: float) -> Tensor:
    """[V] sigmoid((z - alpha) / (beta - alpha)), z = `score_logits`: Wagner et al. equation 5; 0 where excluded."""
    z = score_logits(logits, temperature, alpha, beta)
    return torch.where(z > -math.inf, torch.sigmoid((z - alpha) / (beta - alpha)), 0.0)


def inverse_cdf(weights: Tensor, s: float) -> int:
    """The smallest v with sum(weights[: v + 1]) > s * sum(weights), else the largest v of positive weight; -1 when
    the weights are all zero."""
    positive = (weights > 0).nonzero()
    if len(positive) == 0:
        return -1
    above = ((weights.cumsum(0) > s * weights.sum()) & (weights > 0)).nonzero()
    return int(above[0]) if len(above) else int(positive[-1])


def argmax(logits: Tensor) -> int:
    """The lowest index of the maximum; -1 when no entry is finite."""
    z = scaled_logits(logits, 0.0)
    return -1 if z.max() == -math.inf else int((z == z.max()).nonzero()[0])


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`specops::verify_exact` by its law; shapes and dtypes as in `torch_specops.verify_exact`."""
    num_rows, num_drafts = draft_tokens.shape
    vocab_size = target_logits.shape[-1]
    output_tokens = torch.full((num_rows, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(num_rows, dtype=torch.int64)

    for b in range(num_rows):
        t = 1.0 if temperature is None else float(temperature[b])
        s = float(sample_uniforms[b])
        n = 0
        for i in range(num_drafts):
            x = int(draft_tokens[b, i])
            if not 0 <= x < vocab_size or not t >= 0:
                break
            if t == 0:
                accepted = x == argmax(target_logits[b, i])
            else:
                p = probabilities(target_logits[b, i], t)
                q = _draft_probabilities(draft_logits, draft_lse, b, i, x, t, vocab_size)
                accepted = bool(q[x] > 0) and float(accept_uniforms[b, i]) * lenience * float(q[x]) < float(p[x])
            if not accepted:
                break
            output_tokens[b, i] = x
            n += 1

        if not t >= 0:
            next_token = -1
        elif t == 0:
            next_token = argmax(target_logits[b, n])
        else:
            weights = probabilities(target_logits[b, n], t)
            if n < num_drafts and 0 <= (x := int(draft_tokens[b, n])) < vocab_size:
                q = _draft_probabilities(draft_logits, draft_lse, b, n, x, t, vocab_size)
                residual = (weights - q).clamp(min=0)
                weights = residual if residual.sum() > 0 else weights
            next_token = inverse_cdf(weights, s)
        output_tokens[b, n] = next_token
        num_accepted[b] = n
    return output_tokens, num_accepted


def _draft_probabilities(
    draft_logits: Tensor | None, draft_lse: Tensor | None, b: int, i: int, x: int, t: float, vocab_size: int
) -> Tensor:
    """[V] q_i: one-hot at x without logits, else softmax, normalised by `draft_lse` where it was given."""
    if draft_logits is None:
        q = torch.zeros(vocab_size, dtype=torch.float64)
        q[x] = 1.0
        return q
    if draft_lse is None:
        return probabilities(draft_logits[b, i], t)
    lse = float(draft_lse[b, i])
    if not math.isfinite(lse):
        return torch.zeros(vocab_size, dtype=torch.float64)
    return torch.exp(scaled_logits(draft_logits[b, i], t) - lse)


def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float = -1e3,
    beta: float = 1e3,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`specops::verify_sigmoid` by its law; shapes and dtypes as in `torch_specops.verify_sigmoid`."""
    num_rows, num_drafts = draft_tokens.shape
    vocab_size = target_logits.shape[-1]
    output_tokens = torch.full((num_rows, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(num_rows, dtype=torch.int64)

    for b in range(num_rows):
        t = 1.0 if temperature is None else float(temperature[b])
        s = float(sample_uniforms[b])
        n = 0
        for i in range(num_drafts):
            x = int(draft_tokens[b, i])
            if not 0 <= x < vocab_size or not t >= 0:
                break
            if t == 0:
                accepted = x == argmax(target_logits[b, i])
            else:
                p_hat = sigmoid_scores(target_logits[b, i], t, alpha, beta)
                q_hat = sigmoid_scores(draft_logits[b, i], t, alpha, beta)
                accepted = bool(q_hat[x] > 0) and float(accept_uniforms[b, i]) * float(q_hat[x]) < float(p_hat[x])
            if not accepted:
                break
            output_tokens[b, i] = x
            n += 1

        if not t >= 0:
            next_token = -1
        elif t == 0:
            next_token = argmax(target_logits[b, n])
        elif n == num_drafts:
            next_token = inverse_cdf(probabilities(target_logits[b, n], t), s)
        else:
            weights = sigmoid_scores(target_logits[b, n], t, alpha, beta)
            if 0 <= int(draft_tokens[b, n]) < vocab_size:
                residual = (weights - sigmoid_scores(draft_logits[b, n], t, alpha, beta)).clamp(min=0)
                weights = residual if residual.sum() > 0 else weights
            next_token = inverse_cdf(weights, s)
        output_tokens[b, n] = next_token
        num_accepted[b] = n
    return output_tokens, num_accepted


def sample(logits: Tensor, uniforms: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`specops::sample` by its law; shapes and dtypes as in `torch_specops.sample`."""
    tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64)
    lse = torch.full((logits.shape[0],), -math.inf, dtype=torch.float32)
    for r in range(logits.shape[0]):
        t = 1.0 if temperature is None else float(temperature[r])
        z = scaled_logits(logits[r], t)
        if not t >= 0 or not (z > -math.inf).any():
            continue
        if t == 0:
            tokens[r] = argmax(logits[r])
            lse[r] = 0.0
        else:
            tokens[r] = inverse_cdf(probabilities(logits[r], t), float(uniforms[r]))
            lse[r] = torch.logsumexp(z, 0).float()
    return tokens, lse
