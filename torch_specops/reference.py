"""The specification of the ops, in float64 and with plain loops over sequences and drafts. It imports nothing from this
package.

Symbols (docs/math.md): p is the target's distribution, q is the draft's, x is a draft token, u and s are the uniforms
for the acceptance test and the next token, l is the lenience, and n is the number of accepted drafts.

Papers: Leviathan et al. 2023 (arXiv 2211.17192) Algorithm 1 and appendix A.5; Chen et al. 2023 (arXiv 2302.01318)
Algorithm 2; Wagner et al. 2024 (arXiv 2406.11016) equation 5 for sigmoid scores; Sun et al. 2024 (arXiv 2403.10444)
Algorithm 2 for block verification; Daliri et al. 2024 (arXiv 2408.07978) for shared Gumbel noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).smallest_normal
# A residual with at most this mass counts as empty.
LEAST_RESIDUAL = 2.0**-100
# q(x) is clamped to exp of this number, so that it is finite in float64 for any `draft_lse`.
LARGEST_EXPONENT = 700.0
# A mass counts as top_p if it reaches this share of it. float32(0.8), for example, is above 0.8: without the factor,
# eight of ten equal tokens would not reach it, and a ninth would be kept.
TOP_P_REACHED = 1.0 - 2.0**-24


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """[V] logits / T in float64. NaN becomes -inf, which masks the token. Other values are clamped to the finite range
    of float32, and 1 / T is clamped to its normal range. T = 0 does not divide, because a greedy row only compares the
    logits."""
    x = logits.double()
    z = x / min(max(temperature, 1.0 / FLOAT32_MAX), 1.0 / FLOAT32_TINY) if temperature > 0 else x
    return z.clamp(-FLOAT32_MAX, FLOAT32_MAX).masked_fill(~(x > -math.inf), -math.inf)


def comparable_logits(logits: Tensor) -> Tensor:
    """[V] the values by which filters sort tokens, in float64. NaN becomes -inf, and +inf remains above all finite
    values."""
    return logits.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """[V] softmax(logits / T); all zero if no entry is finite."""
    z = scaled_logits(logits, temperature)
    if not (z > -math.inf).any():
        return torch.zeros_like(z)
    weights = torch.exp(z - z.max())
    return weights / weights.sum()


def sigmoid_scores(logits: Tensor, temperature: float, alpha: float, beta: float) -> Tensor:
    """[V] sigmoid((z - alpha) / (beta - alpha)) (Wagner et al. equation 5). It is 0 for masked tokens, else at least
    sigmoid(-80), which float32 can represent."""
    z = scaled_logits(logits, temperature)
    scores = torch.sigmoid(((z - alpha) / (beta - alpha)).clamp(min=-80.0))
    return torch.where(z > -math.inf, scores, 0.0)


def inverse_cdf(weights: Tensor, s: float) -> int:
    """The smallest v with sum(weights[: v + 1]) > s * sum(weights), else the largest v of positive weight; -1 if all
    weights are zero."""
    positive = (weights > 0).nonzero()
    if len(positive) == 0:
        return -1
    above = ((weights.cumsum(0) > s * weights.sum()) & (weights > 0)).nonzero()
    return int(above[0]) if len(above) else int(positive[-1])


def argmax(logits: Tensor) -> int:
    """The lowest index of the maximum; -1 if no entry is finite."""
    z = scaled_logits(logits, 0.0)
    return -1 if z.max() == -math.inf else int((z == z.max()).nonzero()[0])


def filter_bounds(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[float, int]:
    """The bounds (cut, first) of a row [V]. The filters keep each v with x_v > cut, and each v >= first with x_v = cut,
    where x are the `comparable_logits`.

    (-inf, 0) keeps every token that is not masked, and (inf, V) keeps none. A greedy row keeps all tokens. A row with a
    negative temperature, or with NaN as temperature, top_p or min_p, keeps none.
    """
    if temperature == 0:
        return -math.inf, 0
    if not temperature > 0 or math.isnan(top_p) or math.isnan(min_p):
        return math.inf, len(logits)
    if top_k <= 0 and top_p >= 1 and min_p <= 0:
        return -math.inf, 0
    x, z = comparable_logits(logits).tolist(), scaled_logits(logits, temperature).tolist()
    # Sort by descending logit. Among equal logits the higher index comes first.
    kept = sorted((v for v in reversed(range(len(x))) if x[v] > -math.inf), key=x.__getitem__, reverse=True)
    if not kept:
        return -math.inf, 0

    if 0 < top_k < len(kept):
        kth = x[kept[top_k - 1]]
        kept = [v for v in kept if x[v] >= kth]
    z_max = z[kept[0]]
    if top_p < 1:
        weights = [math.exp(z[v] - z_max) for v in kept]
        total = sum(weights)
        num_kept, before = 1, weights[0]
        while num_kept < len(kept) and before < top_p * TOP_P_REACHED * total:
            before += weights[num_kept]
            num_kept += 1
        kept = kept[:num_kept]
    if min_p > 0:
        lowest = min(math.log(min_p), 0.0)
        kept = [v for v in kept if z[v] - z_max >= lowest]
    return x[kept[-1]], min(v for v in kept if x[v] == x[kept[-1]])


def filtered(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """[V] the logits with -inf for NaN and for tokens that the filters remove."""
    x = comparable_logits(logits)
    cut, first = filter_bounds(logits, temperature, top_k, top_p, min_p)
    kept = x > cut
    if cut > -math.inf:
        kept |= (x == cut) & (torch.arange(len(x)) >= first)
    return logits.masked_fill(~kept, -math.inf)


def _of_row(values: Tensor | float | None, r: int, default: float) -> float:
    """The value for row r. A number is the value for all rows, and None means the default."""
    return default if values is None else float(values[r]) if isinstance(values, Tensor) else values


def _filters(
    r: int, top_k: Tensor | float | None, top_p: Tensor | float | None, min_p: Tensor | float | None
) -> tuple[int, float, float]:
    return int(_of_row(top_k, r, 0)), _of_row(top_p, r, 1.0), _of_row(min_p, r, 0.0)


def filter_logits(
    logits: Tensor,
    temperature: Tensor | float | None = None,
    top_k: Tensor | float | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
) -> Tensor:
    """`specops::filter_logits` in float64; shapes and dtypes as in `torch_specops.filter_logits`."""
    output = torch.empty(logits.shape, dtype=logits.dtype)
    for r in range(logits.shape[0]):
        t = _of_row(temperature, r, 1.0)
        output[r] = filtered(logits[r], t, *_filters(r, top_k, top_p, min_p))
    return output


def accepts(u: float, p_x: float, q_x: float) -> bool:
    """True if u q(x) < p(x). Drafts with p(x) = 0 or q(x) = 0 are rejected for any u, even outside [0, 1)."""
    return p_x > 0 and q_x > 0 and u * q_x < p_x


def accepts_greedily(logits: Tensor, x: int, argmax_lenience: float) -> bool:
    """True if a greedy row accepts x. It accepts the argmax, and with lenience l < 1 any x with p(x) >= l max p, where
    p is the softmax at temperature 1 (Leviathan et al. appendix A.5)."""
    if argmax_lenience == 1:
        return x == argmax(logits)
    z = scaled_logits(logits, 0.0)
    return bool(z[x] > -math.inf) and float(z[x] - z.max()) >= math.log(argmax_lenience)


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | float | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: Tensor | float | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    argmax_lenience: float = 1.0,
    filter_draft: bool = True,
    draft_is_one_hot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`specops::verify_exact` in float64; shapes and dtypes as in `torch_specops.verify_exact`."""
    batch, num_drafts = draft_tokens.shape
    vocab_size = target_logits.shape[-1]
    output_tokens = torch.full((batch, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int64)

    for b in range(batch):
        t = _of_row(temperature, b, 1.0)
        filters = _filters(b, top_k, top_p, min_p)
        draft_filters = filters if filter_draft else _filters(b, None, None, None)
        logits = None if draft_is_one_hot is not None and draft_is_one_hot[b] else draft_logits
        s = float(sample_uniforms[b])
        n = 0
        for i in range(num_drafts):
            x = int(draft_tokens[b, i])
            if not 0 <= x < vocab_size or not t >= 0:
                break
            if t == 0:
                accepted = accepts_greedily(target_logits[b, i], x, argmax_lenience)
            else:
                p = probabilities(filtered(target_logits[b, i], t, *filters), t)
                q = _draft_probabilities(logits, draft_lse, b, i, x, t, draft_filters, vocab_size)
                accepted = accepts(float(accept_uniforms[b, i]) * lenience, float(p[x]), float(q[x]))
            if not accepted:
                break
            output_tokens[b, i] = x
            n += 1

        if not t >= 0:
            next_token = -1
        elif t == 0:
            next_token = argmax(target_logits[b, n])
        else:
            weights = probabilities(filtered(target_logits[b, n], t, *filters), t)
            if n < num_drafts and 0 <= (x := int(draft_tokens[b, n])) < vocab_size:
                q = _draft_probabilities(logits, draft_lse, b, n, x, t, draft_filters, vocab_size)
                residual = (weights - q).clamp(min=0)
                weights = residual if residual.sum() > LEAST_RESIDUAL else weights
            next_token = inverse_cdf(weights, s)
        output_tokens[b, n] = next_token
        num_accepted[b] = n
    return output_tokens, num_accepted


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | float | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: Tensor | float | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    filter_draft: bool = True,
    draft_is_one_hot: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`specops::verify_block` in float64; shapes and dtypes as in `torch_specops.verify_block`."""
    batch, num_drafts = draft_tokens.shape
    vocab_size = target_logits.shape[-1]
    output_tokens = torch.full((batch, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int64)

    for b in range(batch):
        t = _of_row(temperature, b, 1.0)
        if not t > 0:
            # Verify greedy rows, and rows without a distribution, token by token.
            row = slice(b, b + 1)
            args = (target_logits[row], draft_tokens[row], None, accept_uniforms[row], sample_uniforms[row])
            output_tokens[row], num_accepted[row] = verify_exact(*args, torch.tensor([t]))
            continue

        filters = _filters(b, top_k, top_p, min_p)
        draft_filters = filters if filter_draft else _filters(b, None, None, None)
        logits = None if draft_is_one_hot is not None and draft_is_one_hot[b] else draft_logits
        targets = [probabilities(filtered(logits, t, *filters), t) for logits in target_logits[b]]
        drafts = []
        # P_0, P_1 and so on up to the end of the block. The block ends at the first position without a draft or without
        # a finite target logit.
        reach = [1.0]
        for i in range(num_drafts):
            x = int(draft_tokens[b, i])
            if not 0 <= x < vocab_size:
                break
            p, q = targets[i], _draft_probabilities(logits, draft_lse, b, i, x, t, draft_filters, vocab_size)
            if p.sum() == 0:
                break
            drafts.append(q)
            reach.append(min(reach[i] * float(p[x]) / float(q[x]), 1.0) if q[x] > 0 else 0.0)

        end, n = len(drafts), 0
        residuals = [(reach[i] * targets[i] - drafts[i]).clamp(min=0) for i in range(end)]
        masses = [mass if mass > LEAST_RESIDUAL else 0.0 for mass in (float(each.sum()) for each in residuals)]
        for i in range(1, end + 1):
            h = reach[i] if i == end or reach[i] == 1 else masses[i] / (masses[i] + 1 - reach[i])
            if reach[i] > 0 and float(accept_uniforms[b, i - 1]) < h:
                n = i
        weights = residuals[n] if n < end and masses[n] > 0 else targets[n]
        output_tokens[b, :n] = draft_tokens[b, :n]
        output_tokens[b, n] = inverse_cdf(weights, float(sample_uniforms[b]))
        num_accepted[b] = n
    return output_tokens, num_accepted


def _draft_probabilities(
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    b: int,
    i: int,
    x: int,
    t: float,
    filters: tuple[int, float, float],
    vocab_size: int,
) -> Tensor:
    """[V] q_i. It is one-hot at x if `draft_logits` is None, else the softmax over the kept tokens, normalised by
    `draft_lse` if that is given."""
    if draft_logits is None:
        q = torch.zeros(vocab_size, dtype=torch.float64)
        q[x] = 1.0
        return q
    kept = filtered(draft_logits[b, i], t, *filters)
    if draft_lse is None:
        return probabilities(kept, t)
    lse = float(draft_lse[b, i].flatten()[0])
    if not math.isfinite(lse):
        return torch.zeros(vocab_size, dtype=torch.float64)
    return torch.exp((scaled_logits(kept, t) - lse).clamp(max=LARGEST_EXPONENT))


def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float = -1e3,
    beta: float = 1e3,
    temperature: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """`specops::verify_sigmoid` in float64; shapes and dtypes as in `torch_specops.verify_sigmoid`."""
    batch, num_drafts = draft_tokens.shape
    vocab_size = target_logits.shape[-1]
    output_tokens = torch.full((batch, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int64)

    for b in range(batch):
        t = _of_row(temperature, b, 1.0)
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
                accepted = accepts(float(accept_uniforms[b, i]), float(p_hat[x]), float(q_hat[x]))
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


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | float | None = None,
    top_k: Tensor | float | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    with_bounds: bool = False,
) -> tuple[Tensor, Tensor]:
    """`specops::sample` in float64; shapes and dtypes as in `torch_specops.sample`."""
    tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64)
    lse = torch.full((logits.shape[0],), -math.inf, dtype=torch.float32)
    # A token is kept if its logit is above the cut, or equals it and the id is at least `first`.
    cut, first = torch.full_like(lse, math.nan), torch.zeros_like(tokens, dtype=torch.int32)
    for r in range(logits.shape[0]):
        t = _of_row(temperature, r, 1.0)
        kept = filtered(logits[r], t, *_filters(r, top_k, top_p, min_p))
        z = scaled_logits(kept, t)
        if not t >= 0 or not (z > -math.inf).any():
            continue
        cut[r] = lowest = kept[kept > -math.inf].min()
        first[r] = (kept == lowest).nonzero().min()
        if t == 0:
            tokens[r] = argmax(logits[r])
            lse[r] = 0.0
        else:
            tokens[r] = inverse_cdf(probabilities(kept, t), float(uniforms[r]))
            lse[r] = torch.logsumexp(z, 0).float()
    return tokens, torch.stack([lse, cut, first.view(torch.float32)], 1) if with_bounds else lse


MASK = 2**32 - 1


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """The two noise keys of a position. They are the first two words of Philox 4x32-10 (Salmon et al. 2011) with the 64
    bits of the seed as its key and the counter (0, 4, position low, position high)."""
    (k0, k1), (c0, c1, c2, c3) = (seed & MASK, seed >> 32 & MASK), (0, 4, position & MASK, position >> 32 & MASK)
    for _ in range(10):
        x, y = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (y >> 32) ^ c1 ^ k0, y & MASK, (x >> 32) ^ c3 ^ k1, x & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1


def noise_hash(seed: int, position: int, vocab_size: int) -> Tensor:
    """[V] int64, the hash h(v) in [0, 2**32) of each token v."""
    k0, k1 = noise_keys(seed, position)
    x = torch.arange(vocab_size) * 0x9E3779B9 & MASK ^ k0
    # The product may overflow 64 bits, which does not change its low 32 bits.
    x = (x ^ x >> 16) * (k1 | 1) & MASK
    return (x ^ x >> 15) * 0x735A2D97 & MASK


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Tensor:
    """[V] g(v) = -log(-log u(v)) with u(v) = 1 - w(v) and w(v) = (h(v) + 1/2) / 2**32."""
    w = (noise_hash(seed, position, vocab_size).double() + 0.5) / 2**32
    return -torch.log(-torch.log1p(-w))


def gumbel_scores(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """[V] the scores (z - max z) / T + g. If g is Gumbel noise, their argmax has the distribution softmax(z / T). The
    score of a masked token is -inf."""
    x = comparable_logits(logits).clamp(max=FLOAT32_MAX)
    gap = torch.where(x > -math.inf, x - x.max(), 0.0).clamp(min=-FLOAT32_MAX)
    if temperature == math.inf:
        gap = torch.zeros_like(gap)
    gap = gap / min(max(temperature, 1.0 / FLOAT32_MAX), 1.0 / FLOAT32_TINY)
    return torch.where(x > -math.inf, gap.clamp(min=-FLOAT32_MAX) + noise, -math.inf)


def sample_gumbel(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | float | None = None,
    top_k: Tensor | float | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
) -> Tensor:
    """`specops::sample_gumbel` in float64; shapes and dtypes as in `torch_specops.sample_gumbel`."""
    tokens = torch.full((logits.shape[0],), -1, dtype=torch.int64)
    for r in range(logits.shape[0]):
        t = _of_row(temperature, r, 1.0)
        if t > 0:
            noise = gumbel_noise(int(seeds[r]), int(positions[r]), logits.shape[1])
            tokens[r] = argmax(gumbel_scores(filtered(logits[r], t, *_filters(r, top_k, top_p, min_p)), noise, t))
        elif t == 0:
            tokens[r] = argmax(logits[r])
    return tokens


def verify_gumbel(
    target_logits: Tensor,
    draft_tokens: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | float | None = None,
    top_k: Tensor | float | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """`specops::verify_gumbel` in float64; shapes and dtypes as in `torch_specops.verify_gumbel`."""
    batch, num_drafts = draft_tokens.shape
    output_tokens = torch.full((batch, num_drafts + 1), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int64)
    going = torch.ones(batch, dtype=torch.bool)
    for i in range(num_drafts + 1):
        y = sample_gumbel(target_logits[:, i], seeds, positions + i, temperature, top_k, top_p, min_p)
        output_tokens[going, i] = y[going]
        if i < num_drafts:
            going &= (draft_tokens[:, i] == y) & (y >= 0)
            num_accepted += going
    return output_tokens, num_accepted
