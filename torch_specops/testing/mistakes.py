"""A plain version of `verify_exact`, correct or with a plausible mistake, to check that tests detect mistakes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

MISTAKES = (
    *("u < p", "u < q / p", "u < (p / q) ** 2", "u < min(p / q, 0.9)", "u < 1 - p / q where q > p"),
    *("p of the row after", "q of another token", "counts all acceptances"),
    *("p in place of the residual", "|p - q|", "q - p", "residual of the first row", "q of the row before"),
    *("bonus from the row before", "u draws the next token", "1 - s", "sum before the token", "not normalised"),
)


def verify_with_mistake(
    mistake: str | None,
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """`verify_exact` in plain float64, with a chosen mistake.

    A test of an op must fail with every mistake. A test of a loop's distribution must fail with every mistake except "1
    - s", which does not change the distribution. Such a test needs more sequences if the bias is small, as with "u <
    min(p / q, 0.9)".

    Args:
        mistake: one of `MISTAKES`; None = no mistake.
        target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms: as in `verify_exact`. All draft
            tokens must be in the vocabulary.
        temperature: a number above 0, or [B]; None = 1.

    Returns:
        output_tokens [B, K+1] and num_accepted [B], as `verify_exact` returns them.

    Raises:
        ValueError: `mistake` is not in `MISTAKES`.

    Examples:
        >>> from torch_specops.testing import compare, sample_inputs, verify_with_mistake
        >>> (case,) = sample_inputs("verify_exact", vocab_sizes=[17], names=["k3"])
        >>> compare(case, verify_with_mistake(None, **case.args))
        Comparison(rows=6, rounding=0, wrong=[])
        >>> compare(case, verify_with_mistake("u < p", **case.args)).wrong
        [0, 3, 4]
    """
    if mistake is not None and mistake not in MISTAKES:
        raise ValueError(f"mistake: expected None or one of {MISTAKES}, got {mistake!r}")
    temperatures = torch.as_tensor(1.0 if temperature is None else temperature, device=target_logits.device)
    scale = 1.0 / temperatures.double().view(-1, 1, 1)
    p, x = (target_logits.double() * scale).softmax(-1), draft_tokens.long().unsqueeze(-1)
    q = one_hot(x[..., 0], p.shape[-1]).double()
    if draft_logits is not None:
        q = (draft_logits.double() * scale).softmax(-1)
    u, s = accept_uniforms, sample_uniforms.unsqueeze(-1)
    num_drafts, rows = x.shape[1], torch.arange(len(x), device=x.device)
    p_x, q_x = p[:, :-1].gather(2, x).squeeze(-1), q.gather(2, x).squeeze(-1)
    acceptance = {
        "u < p": u < p_x,
        "u < q / p": u * p_x < q_x,
        "u < (p / q) ** 2": u < (p_x / q_x) ** 2,
        "u < min(p / q, 0.9)": u < (p_x / q_x).clamp(max=0.9),
        "u < 1 - p / q where q > p": (q_x <= p_x) | (u < 1 - p_x / q_x),
        "p of the row after": u * q_x < p[:, 1:].gather(2, x).squeeze(-1),
        "q of another token": u * q.gather(2, x.roll(1, 1)).squeeze(-1) < p_x,
    }
    accepted = acceptance.get(mistake or "", u * q_x < p_x)
    n = accepted.sum(1) if mistake == "counts all acceptances" else accepted.long().cumprod(1).sum(1)
    p_n, q_n = p[rows, n], pad(q, (0, 0, 0, 1))[rows, n]
    residual, is_bonus = (p_n - q_n).clamp(min=0), (n == num_drafts).unsqueeze(-1)
    row_weights = {
        "p in place of the residual": p_n,
        "|p - q|": (p_n - q_n).abs(),
        "q - p": torch.where(is_bonus, p_n, (q_n - p_n).clamp(min=0)),
        "residual of the first row": (p[:, 0] - q[:, 0]).clamp(min=0) if num_drafts > 0 else residual,
        "q of the row before": (p_n - q[rows, (n - 1).clamp(min=0)]).clamp(min=0) if num_drafts > 0 else residual,
        "bonus from the row before": torch.where(is_bonus, p[:, -2:][:, 0], residual),
    }
    weights = row_weights.get(mistake or "", residual)
    s = u[:, :1] if mistake == "u draws the next token" and num_drafts > 0 else s
    sums, total = weights.cumsum(-1), weights.sum(-1, keepdim=True)
    above = {
        "1 - s": sums > (1 - s) * total,
        "sum before the token": sums - weights > s * total,
        "not normalised": sums > s,
    }
    next_token = above.get(mistake or "", sums > s * total).int().argmax(-1)
    output = torch.where(torch.arange(num_drafts + 1, device=x.device) < n.unsqueeze(-1), pad(x[..., 0], (0, 1)), -1)
    output[rows, n] = next_token
    return output, n
