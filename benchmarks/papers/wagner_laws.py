"""The law of the token that verification with scores emits, in closed form, and its distance from the target's.

A step that drafts x from q, accepts it with probability a(x) = min(1, s_p(x) / s_q(x)) and else draws from the weights
max(s_p - s_q, 0) (s_p if they are all zero) emits v with probability

    q(v) a(v) + (1 - sum_x q(x) a(x)) r(v),   r = norm(max(s_p - s_q, 0)).

With s = softmax that is p. Wagner et al. 2024, equation 5, has sigmoids in its place. Everything here is float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def emitted_law(q: Tensor, target_scores: Tensor, draft_scores: Tensor) -> tuple[Tensor, Tensor]:
    """[N, V] the law of the emitted token, and [N] the probability that a draft is accepted."""
    accept = torch.where(draft_scores > 0, (target_scores / draft_scores).clamp(max=1), 0.0)
    kept = (q * accept).sum(-1, keepdim=True)
    residual = (target_scores - draft_scores).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_scores)
    return q * accept + (1 - kept) * residual / residual.sum(-1, keepdim=True), kept.squeeze(-1)


def lenient_law(p: Tensor, q: Tensor, lenience: float) -> tuple[Tensor, Tensor]:
    """The same for `verify_exact` with a lenience below 1 (docs/math.md section 8)."""
    accept = torch.where(q > 0, (p / (lenience * q)).clamp(max=1), 0.0)
    kept = (q * accept).sum(-1, keepdim=True)
    residual = (p - q).clamp(min=0)
    return q * accept + (1 - kept) * residual / residual.sum(-1, keepdim=True), kept.squeeze(-1)


def total_variation(law: Tensor, other: Tensor) -> Tensor:
    return (law - other).abs().sum(-1) / 2


def filtered(logits: Tensor, top_k: int) -> Tensor:
    """[N, V] float64 logits, -inf outside the k largest; k = 0 keeps all."""
    z = logits.double()
    if top_k == 0:
        return z
    return torch.where(z >= z.topk(top_k, -1).values[:, -1:], z, -torch.inf)


def score(z: Tensor, offset: Tensor | float, width: float = 1.0) -> Tensor:
    return torch.sigmoid((z - offset) / width)


def score_pairs(z_p: Tensor, z_q: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """By name, the scores of both sides: the paper's constants, others, and normalisers that cost less than their own.

    Rows are consecutive positions of one text, or of several after one another: "the row before" is the row above.
    """
    own_p, own_q = z_p.logsumexp(-1, keepdim=True), z_q.logsumexp(-1, keepdim=True)
    before_p, before_q = own_p.roll(1, 0), own_q.roll(1, 0)
    yield "softmax", z_p.softmax(-1), z_q.softmax(-1)
    for scale in (1e5, 1e4, 1e3, 1e2, 1e1, 1e0):
        yield f"sigmoid, +-{scale:g}", score(z_p, -scale, 2 * scale), score(z_q, -scale, 2 * scale)
    # The narrowest that alpha < 0 < beta allows: the logit itself.
    yield "sigmoid, alpha -> 0, beta = 1", score(z_p, 0.0), score(z_q, 0.0)
    offsets = {
        # A number for each model, fixed beforehand.
        "mean lse": (own_p.mean(), own_q.mean()),
        "lse of the row before": (before_p, before_q),
        "lse of the row before (target), own (draft)": (before_p, own_q),
        "own lse": (own_p, own_q),
    }
    for name, (of_p, of_q) in offsets.items():
        for more in (0, 10):
            yield f"sigmoid, offset {name} + {more}", score(z_p, of_p + more), score(z_q, of_q + more)


def distances(z_p: Tensor, z_q: Tensor) -> dict[str, dict[str, float]]:
    """By name of the scores: "distance", mean total variation from the target's law; "from_draft", from the draft's;
    "accepted", mean acceptance rate; "tail", mean probability of tokens that neither law gives a thousandth."""
    p, q = z_p.softmax(-1), z_q.softmax(-1)
    rare = (p < 1e-3) & (q < 1e-3)

    def laws() -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        for name, *scores in score_pairs(z_p, z_q):
            yield name, emitted_law(q, *scores)
        for lenience in (0.5, 0.3, 0.1):
            yield f"softmax, lenience {lenience}", lenient_law(p, q, lenience)
        yield "the draft alone", (q, torch.ones(len(q)))

    found = {}
    for name, (law, kept) in laws():
        parts = {"distance": total_variation(law, p), "from_draft": total_variation(law, q)}
        parts |= {"accepted": kept, "tail": (law * rare).sum(-1)}
        found[name] = {part: round(float(values.mean()), 6) for part, values in parts.items()}
    return found
