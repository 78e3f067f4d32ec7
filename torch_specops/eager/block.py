"""`specops::verify_block` for eager calls on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dense
from ..arguments import VerifyArguments
from ..dense.walk import LEAST_RESIDUAL
from .drafts import Drafts
from .rows import Rows, inverse_of, prefers_dense, read_rows
from .walk import Outcome, next_tokens, num_leading, output_of, parts, verify_greedy


def verify_block(given: VerifyArguments) -> tuple[Tensor, Tensor]:
    if prefers_dense(given.target_logits, given.temperature):
        return dense.verify_block(given)
    outcomes = (_verify_sampled(part) if is_sampled else verify_greedy(part) for is_sampled, part in parts(given))
    return output_of(given.draft_tokens, outcomes)


def _verify_sampled(given: VerifyArguments) -> list[Outcome]:
    batch, num_drafts = given.draft_tokens.shape
    inverse = inverse_of(given.temperature)
    drafts, u = Drafts(given, inverse), given.accept_uniforms.tolist()
    p = read_rows(given.target_logits, inverse, given.filters)
    p_x, q_x = p.probabilities(drafts.x), drafts.read(0, num_drafts)

    n: list[int] = []
    residuals: dict[int, Tensor] = {}
    for b in range(batch):
        # The block ends at padding, or at a target row without a finite logit.
        end = num_leading(drafts.in_vocab[b][i] and p.total[b][i] > 0 for i in range(num_drafts))
        reach = [1.0]
        for i in range(end):
            p_i, q_i = p_x(b, i), q_x(b, i)
            reach.append(min(reach[i] * p_i / q_i, 1.0) if q_i > 0 else 0.0)
        accepted, residual = _longest(u[b], reach, p, drafts, b)
        n.append(accepted)
        if residual is not None:
            residuals[b] = residual
    rest = torch.cat(list(residuals.values())) if residuals else None
    tokens = next_tokens(p, list(enumerate(n)), list(residuals), rest, given.sample_uniforms.tolist())
    return list(zip(n, tokens, strict=True))


def _longest(u: list[float], reach: list[float], p: Rows, drafts: Drafts, b: int) -> tuple[int, Tensor | None]:
    """How many drafts of sequence b are accepted, from the probabilities P_0 .. P_e to reach each; and the residual
    [1, V] after them, or None at the end of the block."""
    end = len(reach) - 1
    if end == 0 or (reach[end] > 0 and u[end - 1] < reach[end]):
        return end, None
    for i in range(end - 1, 0, -1):
        # The accept rule of a block: u_i < h_i, h_i = S_i / (S_i + 1 - P_i), which is at most P_i. P_i = 1 accepts,
        # even if the residual is empty.
        if reach[i] > 0 and u[i - 1] < reach[i]:
            residual = drafts.residual(p.pick([(b, i)]), [(b, i)], reach[i])
            mass = float(residual.sum(dtype=torch.float64))
            mass = mass if mass > LEAST_RESIDUAL else 0.0
            if reach[i] == 1 or u[i - 1] * (mass + 1 - reach[i]) < mass:
                return i, residual
    return 0, drafts.residual(p.pick([(b, 0)]), [(b, 0)])
