"""`specops::verify_block` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arguments import VerifyArguments
from .eager_rows import Rows, inverse_of, read_rows, takes_dense_form
from .eager_walk import Drafts, Outcome, next_tokens, prefix_length, verify_parts
from .filters import row_bounds, scale_kept
from .softmax import draw, inverse_temperature, lowest_argmax, softmax_row, softmax_stats
from .walk import (
    LEAST_RESIDUAL,
    apply_greedy,
    draft_indices,
    logits_of,
    output_rows,
    prefix_lengths,
    probability,
    residual,
    residual_or_target,
    stats_from_lse,
)


def verify_block(args: VerifyArguments) -> tuple[Tensor, Tensor]:
    if takes_dense_form(args.target_logits, args.temperature):
        return dense(args)
    return verify_parts(args, _verify_sampled)


def _verify_sampled(args: VerifyArguments) -> list[Outcome]:
    batch, num_drafts = args.draft_tokens.shape
    inverse = inverse_of(args.temperature)
    drafts, u = Drafts(args, inverse), args.accept_uniforms.tolist()
    p = read_rows(args.target_logits, inverse, args.filters)
    p_x, q_x = p.probabilities(drafts.x), drafts.read(0, num_drafts)

    n: list[int] = []
    residuals: dict[int, Tensor] = {}
    for b in range(batch):
        # The block ends at padding, or at a target row without a finite logit.
        end = prefix_length(drafts.in_vocab[b][i] and p.total[b][i] > 0 for i in range(num_drafts))
        reach = [1.0]
        for i in range(end):
            p_i, q_i = p_x(b, i), q_x(b, i)
            reach.append(min(reach[i] * p_i / q_i, 1.0) if q_i > 0 else 0.0)
        accepted, residual = _longest(u[b], reach, p, drafts, b)
        n.append(accepted)
        if residual is not None:
            residuals[b] = residual
    rest = torch.cat(list(residuals.values())) if residuals else None
    tokens = next_tokens(p, list(enumerate(n)), list(residuals), rest, args.sample_uniforms.tolist())
    return list(zip(n, tokens, strict=True))


def _longest(u: list[float], reach: list[float], p: Rows, drafts: Drafts, b: int) -> tuple[int, Tensor | None]:
    """The number of accepted drafts of sequence b, and the residual [1, V] for the next token, or None if the whole
    block is accepted. `reach` holds P_0, P_1 and so on up to the end of the block."""
    end = len(reach) - 1
    if end == 0 or (reach[end] > 0 and u[end - 1] < reach[end]):
        return end, None
    for i in range(end - 1, 0, -1):
        # Accept i drafts if u_i < h_i, with h_i = S_i / (S_i + 1 - P_i) <= P_i, where S_i is the sum of the residual
        # max(P_i p - q, 0). If P_i = 1, accept them even if the residual is empty.
        if reach[i] > 0 and u[i - 1] < reach[i]:
            residual = drafts.residual(p, [(b, i)], reach[i])
            mass = float(residual.sum(dtype=torch.float64))
            mass = mass if mass > LEAST_RESIDUAL else 0.0
            if reach[i] == 1 or u[i - 1] * (mass + 1 - reach[i]) < mass:
                return i, residual
    return 0, drafts.residual(p, [(b, 0)])


def dense(args: VerifyArguments) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = args.target_logits, args.draft_tokens, args.draft_logits
    temperature = args.temperature
    num_drafts, vocab_size = draft_tokens.shape[1], target_logits.shape[2]
    inverse_t = inverse_temperature(temperature)  # [B]
    x, in_vocab = draft_indices(draft_tokens, vocab_size)  # [B, K]

    # p(x) and q(x), [B, K], from the maximum and the sum of each row.
    z_p = scale_kept(target_logits, inverse_t, row_bounds(target_logits, args.filters))  # [B, K+1, V]
    p_max, p_sum = softmax_stats(z_p)  # [B, K+1]
    p_x = probability(logits_of(z_p[:, :num_drafts], x), p_max[:, :-1], p_sum[:, :-1])
    q, q_x = None, torch.ones_like(p_x)
    if draft_logits is not None:
        z_q = scale_kept(draft_logits, inverse_t, row_bounds(draft_logits, args.draft_filters))  # [B, K, V]
        q = z_q, *(softmax_stats(z_q) if args.draft_lse is None else stats_from_lse(args.draft_lse))
        q_x = probability(logits_of(z_q, x), *q[1:])
    one_hot = args.draft_is_one_hot
    if one_hot is not None:
        q_x = torch.where(one_hot.unsqueeze(-1), 1.0, q_x)

    # The block ends at padding, or at a target row without a finite logit.
    end = prefix_lengths(in_vocab & (p_sum[:, :-1] > 0))  # [B]
    n = end
    if num_drafts > 0:
        # [B, K+1], P_0 = 1, then P_1 .. P_K (`_reach`).
        reach = pad(_reach(p_x, q_x), (1, 0), value=1.0)
        equal = None
        if q is not None:
            # If a target row and its draft row have equal logits, q = c p. c differs from 1 by rounding, or because of
            # a given `draft_lse`. The residual max(P p - q, 0) is then (P - c) p, or 0. `equal` [B, K] is P_i - c_i, at
            # least 0.
            equal = (reach[:, :-1] - p_sum[:, :-1] * probability(p_max[:, :-1], q[1], q[2])).clamp(min=0)

        def residual_at(p: Tensor, z: Tensor, *index: Tensor | slice) -> Tensor:
            """[..., V] max(P p - q, 0), given rows p of the target and their scaled logits."""
            weights = p * reach[index].float().unsqueeze(-1)
            if q is None or equal is None:
                return residual(weights, z, x[index], None)
            z_q, q_max, q_sum = (each[index] for each in q)
            is_one_hot = None if one_hot is None else one_hot.unsqueeze(-1).expand_as(x)[index]
            equal_rest = p * equal[index].float().unsqueeze(-1)
            return residual(weights, z, x[index], (z_q, q_max, q_sum), equal_rest, is_one_hot)

        # Skip row 0, because P_0 = 1 is accepted whatever S_0 is. If K is symbolic, compute row 0 too: a slice from 1
        # on would add a guard that K is at least 3.
        first = 1 if type(num_drafts) is int else 0
        inner = slice(None), slice(first, num_drafts)
        weights = residual_at(softmax_row(z_p[inner], p_max[inner], p_sum[inner]), z_p[inner], *inner)
        mass = weights.sum(-1, dtype=torch.float64)
        # [B, K+1], the residual masses S_0 .. S_{K-1} (S_0 = 0 if row 0 was skipped), then 0.
        mass = pad(torch.where(mass > LEAST_RESIDUAL, mass, 0.0), (first, 1))
        u = pad(args.accept_uniforms.double(), (1, 0))
        position, last = torch.arange(num_drafts + 1, device=end.device), end.unsqueeze(-1)
        # Accept i drafts if u_i < h_i, with h_i = P_i at the end of the block and h_i = S_i / (S_i + 1 - P_i) before
        # it. If P_i = 1, accept i drafts even if the residual is empty.
        accepted = (reach == 1) | (u * (mass + 1 - reach) < mass)
        accepted = torch.where(position == last, u < reach, accepted) & (position <= last) & (reach > 0)
        n = torch.where(accepted, position, 0).amax(1)
    greedy_tokens = None if temperature is None else lowest_argmax(z_p, p_max)
    if temperature is not None:
        # Verify greedy rows token by token.
        by_token = prefix_lengths(apply_greedy(torch.zeros_like(in_vocab), greedy_tokens, draft_tokens, temperature))
        n = torch.where(temperature > 0, n, by_token)

    # Draw the next token from the residual max(P_n p - q, 0) of row n, or from p.
    rows = torch.arange(n.shape[0], device=n.device)
    p = softmax_row(z_p[rows, n], p_max[rows, n], p_sum[rows, n])  # [B, V]
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        weights = residual_at(p, z_p[rows, n], rows, rejected)
        p = residual_or_target(weights, p, n < end, LEAST_RESIDUAL)
    drawn = draw(p, args.sample_uniforms)
    return output_rows(draft_tokens, n, drawn, greedy_tokens, temperature), n


def _reach(p_x: Tensor, q_x: Tensor) -> Tensor:
    """[B, K] P_1 .. P_K with P_i = min(P_{i-1} p / q, 1). P_i is the minimum of 1 and all products of adjacent ratios p
    / q that end at position i."""
    ratio = torch.where(q_x > 0, p_x / q_x, 0.0)
    index = torch.arange(ratio.shape[1], device=ratio.device)
    products = torch.where(index >= index.unsqueeze(-1), ratio.unsqueeze(1), 1.0).cumprod(-1)
    # A product that overflows to inf before it is multiplied by a ratio of 0 is NaN. Replace it by 0.
    return torch.where(products.isnan(), 0.0, products).amin(1).clamp(max=1.0)
