"""`specops::verify_block` for eager calls on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..arguments import VerifyArguments
from ..dense.walk import draft_indices
from .rows import read_rows
from .walk import Outcome, next_tokens, num_leading, read_drafts, residual, verify


def verify_block(given: VerifyArguments) -> tuple[Tensor, Tensor]:
    return verify(given, _verify_sampled)


def _verify_sampled(given: VerifyArguments) -> list[Outcome]:
    batch, num_drafts = given.draft_tokens.shape
    x, in_vocab = draft_indices(given.draft_tokens, given.target_logits.shape[2])
    p = read_rows(given.target_logits, given.filters)
    p_x = p.probabilities(x)
    q, q_x = read_drafts(given, x, 0, num_drafts)
    u, is_draft = given.accept_uniforms.tolist(), in_vocab.tolist()

    n: list[int] = []
    residuals: list[Tensor | None] = []
    for b in range(batch):

        def residual_of(i: int, reach: float, b: int = b) -> Tensor:
            return residual(given, p.at(b, i), None if q is None else q.at(b, i), b, i, reach)

        # The block ends at padding, or where the target has no law.
        end = num_leading(drafted and total > 0 for drafted, total in zip(is_draft[b], p.total[b], strict=False))
        reach = [1.0]
        for p_i, q_i in zip(p_x[b][:end], q_x[b], strict=False):
            reach.append(min(reach[-1] * p_i / q_i, 1.0) if q_i > 0 else 0.0)
        accepted, rest = _longest(u[b], reach, residual_of)
        n.append(accepted)
        residuals.append(rest)
    rows = [p.at(b, n[b]) for b in range(batch)]
    return list(zip(n, next_tokens(rows, residuals, given.sample_uniforms), strict=True))


def _longest(
    u: list[float], reach: list[float], residual_of: Callable[[int, float], Tensor]
) -> tuple[int, Tensor | None]:
    """How many drafts stand, from the probabilities P_0 .. P_e to reach each, and the residual behind them."""
    end = len(reach) - 1
    if end == 0 or u[end - 1] < reach[end]:
        return end, None
    for i in range(end - 1, 0, -1):
        # The accept rule of a block: u_i < h_i, h_i = S_i / (S_i + 1 - P_i), which is at most P_i. P_i = 1 accepts, also
        # where the residual is empty.
        if u[i - 1] < reach[i]:
            rest = residual_of(i, reach[i])
            mass = float(rest.sum(dtype=torch.float64))
            if reach[i] == 1 or u[i - 1] * (mass + 1 - reach[i]) < mass:
                return i, rest
    return 0, residual_of(0, 1.0)
