"""The formulas of Leviathan et al. 2023 (arXiv 2211.17192) for the speedup of speculative decoding, for tensors.

alpha is the probability that a draft is accepted, given that all drafts before it were. K (gamma in the paper) is the
number of drafts per step, and c is the cost ratio. All functions of alpha assume that drafts are accepted independently
with the same probability, and that the target reads K + 1 tokens in the time of one. Arithmetic is float64. Arguments
are numbers or tensors, and broadcast against each other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_fraction, check_int, check_number, is_number

FLOAT32_MAX, FLOAT64_MAX = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max
Number = float | Tensor


def expected_tokens_per_step(alpha: Number, num_draft_tokens: int | Tensor) -> Tensor:
    """The expected number of tokens per step, (1 - alpha ** (K + 1)) / (1 - alpha) (equation 1). At alpha = 1 the
    number is the limit K + 1. The result is float64 in the broadcast shape. It is accurate to a few units in the last
    place, even for alpha near 1.

    Args:
        alpha: in [0, 1]. Another type raises TypeError, and another number raises ValueError.
        num_draft_tokens: K, integers >= 0, with the same errors. Shapes that do not broadcast raise ValueError.

    Examples:
        >>> from torch_specops.analysis import expected_tokens_per_step
        >>> expected_tokens_per_step(0.5, 3)
        tensor(1.8750, dtype=torch.float64)
    """
    return _tokens(*_arguments(alpha=alpha, num_draft_tokens=num_draft_tokens))


def walltime_factor(alpha: Number, cost_ratio: Number, num_draft_tokens: int | Tensor) -> Tensor:
    """The expected speed relative to decoding without drafts, (1 - alpha ** (K + 1)) / ((1 - alpha) (K c + 1)) (theorem
    3.8).

    Args:
        alpha, num_draft_tokens: as in `expected_tokens_per_step`, with the same errors and type of result.
        cost_ratio: c, finite and >= 0, the time of one draft forward / the time of one target forward.

    Examples:
        >>> from torch_specops.analysis import walltime_factor
        >>> walltime_factor(0.75, 0.02, 7)
        tensor(3.1575, dtype=torch.float64)
    """
    a, c, count = _arguments(alpha=alpha, cost_ratio=cost_ratio, num_draft_tokens=num_draft_tokens)
    return _tokens(a, count) / (count * c + 1)


def operations_factor(alpha: Number, operations_ratio: Number, num_draft_tokens: int | Tensor) -> Tensor:
    """The number of arithmetic operations relative to decoding without drafts, (1 - alpha) (K c^ + K + 1) / (1 - alpha
    ** (K + 1)) (theorem 3.11).

    Args:
        alpha, num_draft_tokens: as in `expected_tokens_per_step`, with the same errors and type of result. The result
            is >= 1.
        operations_ratio: c^, finite and >= 0, operations per token of the draft / operations per token of the target.

    Examples:
        >>> from torch_specops.analysis import operations_factor
        >>> operations_factor(0.8, 0.0, 5)
        tensor(1.6263, dtype=torch.float64)
    """
    a, c, count = _arguments(alpha=alpha, operations_ratio=operations_ratio, num_draft_tokens=num_draft_tokens)
    return (count * c + count + 1) / _tokens(a, count)


def memory_access_factor(alpha: Number, num_draft_tokens: int | Tensor, memory_ratio: Number = 0.0) -> Tensor:
    """The bytes of weights and KV caches read, relative to decoding without drafts: (K m + 1) (1 - alpha) / (1 - alpha
    ** (K + 1)) (section 3.4, which ignores the draft's reads, m = 0). If reads determine the time of a forward, then c
    = m, and the result is the inverse of `walltime_factor`.

    Args:
        alpha, num_draft_tokens: as in `expected_tokens_per_step`, with the same errors and type of result.
        memory_ratio: m, finite and >= 0, bytes read for one draft / bytes read in one target forward.

    Examples:
        >>> from torch_specops.analysis import memory_access_factor
        >>> memory_access_factor(0.8, 5)
        tensor(0.2711, dtype=torch.float64)
    """
    a, m, count = _arguments(alpha=alpha, memory_ratio=memory_ratio, num_draft_tokens=num_draft_tokens)
    return (count * m + 1) / _tokens(a, count)


def optimal_num_draft_tokens(alpha: Number, cost_ratio: Number, maximum: int = 1000) -> Tensor:
    """The K that maximises `walltime_factor` (section 3.5, figure 3), and the smallest such K if several do. The result
    is int64 in the broadcast shape.

    It is above 0 iff alpha > c, and the walltime factor is then at least (1 + alpha) / (1 + c) (corollary 3.9). For c =
    0 and alpha > 0, more drafts are always better, and the result is `maximum`.

    Args:
        alpha, cost_ratio: as for `walltime_factor`, with the same errors.
        maximum: the largest K that is considered, an int >= 0.

    Examples:
        >>> from torch_specops.analysis import optimal_num_draft_tokens
        >>> optimal_num_draft_tokens(0.8, 0.05)
        tensor(8)
    """
    a, c = _arguments(alpha=alpha, cost_ratio=cost_ratio)
    check_int("maximum", maximum, 0)
    best = torch.zeros_like(a, dtype=torch.int64)
    paying = torch.ones_like(best, dtype=torch.bool)
    power, tokens = a.clone(), torch.ones_like(a)
    # With alpha = `a` and K = `count`, draft K + 1 increases the factor iff alpha ** (K + 1) (K c + 1) > c (1 + alpha +
    # .. + alpha ** K). The left side minus the right side decreases with K, by (1 - alpha) alpha ** K (K c + 1). So
    # stop at the first K for which the inequality fails.
    for count in range(maximum):
        # For c = 0 every draft increases the factor, even if the power of alpha has underflowed to 0.
        paying = paying & ((power * (count * c + 1) > c * tokens) | ((c == 0) & (a > 0)))
        if not bool(paying.any()):
            break
        best += paying
        tokens = tokens + power
        power = power * a
    return best


def oracle_walltime_factor(alpha: Number, cost_ratio: Number) -> Tensor:
    """The walltime factor if each step drafted exactly the tokens that will be accepted: 1 / (1 - alpha + c alpha).
    This factor is an upper bound for any choice of K (section 3.5). For c > 1 the factor is 1, because drafting nothing
    is best; for alpha = 1 and c = 0 the factor is infinite. Arguments, result and errors are as in `walltime_factor`.

    Examples:
        >>> from torch_specops.analysis import oracle_walltime_factor
        >>> oracle_walltime_factor(0.8, 0.05)
        tensor(4.1667, dtype=torch.float64)
    """
    a, c = _arguments(alpha=alpha, cost_ratio=cost_ratio)
    # A step emits 1 / (1 - alpha) tokens on average. All except one are drafts, and each draft costs c. For c > 1 the
    # factor is that of c = 1, because nothing is drafted.
    return 1 / (1 - a + c.clamp(max=1.0) * a)


def acceptance_probability(
    target_logits: Tensor,
    draft_logits: Tensor,
    temperature: Number = 1.0,
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
) -> Tensor:
    """The probability that a draft drawn from q is accepted, beta = sum_x min(p(x) / l, q(x)) (theorem 3.5; with
    lenience, appendix A.5). The mean of beta over positions is alpha (corollary 3.6). The result is [..] float64 in [0,
    1], and 0 if either row has no finite logit.

    At temperature 0 both distributions are one-hot at their argmax (the lowest index of the maximum), so beta is 1 or
    0. With l = `argmax_lenience` below 1, the draft's argmax x is accepted if s(x) >= l max s, where s is the softmax
    of the target logits.

    Args:
        target_logits: [.., V] of any floating dtype. -inf and NaN mask a token, and +inf counts as the largest float32.
        draft_logits: [.., V], broadcast against the target's.
        temperature: finite and >= 0, a number or a tensor that broadcasts against [..]; applied to both sides.
        lenience: l in (0, 1], at temperatures above 0; 1 = lossless.
        argmax_lenience: l in (0, 1], at temperature 0; 1 = lossless.

    Raises:
        TypeError, ValueError: an argument has another type, vocabularies differ, shapes do not broadcast, or a number
            is out of range.

    Examples:
        >>> import torch, torch_specops.analysis
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.8, 0.1, 0.1])
        >>> torch_specops.analysis.acceptance_probability(p.log(), q.log(), lenience=0.5)
        tensor(0.9000, dtype=torch.float64)
    """
    q, accepted = _accepted(target_logits, draft_logits, temperature, lenience, argmax_lenience)
    # Clamp, because rounding may make the sum larger than 1.
    return (q * accepted).sum(-1).clamp(max=1.0)


def coupled_acceptance_probability(target_logits: Tensor, draft_logits: Tensor, temperature: Number = 1.0) -> Tensor:
    """The probability that `sample_gumbel` draws the same token from both rows with the same noise, so that
    `verify_gumbel` accepts it: sum_v 1 / sum_w max(p(w) / p(v), q(w) / q(v)) (Daliri et al. 2024, arXiv 2408.07978).
    The result is [..] float64 in [0, 1], and 0 if either row has no finite logit.

    It lies between (1 - TV) / (1 + TV) and 1 - TV, where TV is the `divergence` of the rows, and 1 - TV is their
    `acceptance_probability`. Proofs are in docs/math.md, section 17.

    Args:
        target_logits, draft_logits, temperature: as in `acceptance_probability`, with the same errors.

    Examples:
        >>> import torch, torch_specops.analysis
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.8, 0.1, 0.1])
        >>> torch_specops.analysis.coupled_acceptance_probability(p.log(), q.log())
        tensor(0.5706, dtype=torch.float64)
    """
    (t,) = _arguments(temperature=temperature)
    p = _distribution("target_logits", target_logits, t, target_logits)
    q = _distribution("draft_logits", draft_logits, t, target_logits)
    p, q = torch.broadcast_tensors(p, q)
    # Target and draft both draw v with probability 1 / (the sum over w of max(p(w) / p(v), q(w) / q(v))). In descending
    # order of p / q, the maximum is p(w) / p(v) for w up to v, and q(w) / q(v) for w after v, because p(w) / p(v) >=
    # q(w) / q(v) iff p(w) / q(w) >= p(v) / q(v).
    order = (p / q).nan_to_num(nan=0.0, posinf=math.inf).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    of_p, of_q = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    matches = torch.where((p > 0) & (q > 0), 1 / (of_p / p + of_q.clamp(min=0.0) / q), 0.0)
    return matches.sum(-1).clamp(max=1.0)


def token_acceptance_probability(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    temperature: Number = 1.0,
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
) -> Tensor:
    """The probability that this draft token x is accepted, min(1, p(x) / (l q(x))). The result is [..] float64 in [0,
    1]; at temperature 0 it is 1 or 0. The mean of the result over x drawn from q is `acceptance_probability` (first
    line of the proof of theorem 3.5).

    Args:
        target_logits, temperature, lenience, argmax_lenience: as in `acceptance_probability`, with the same errors.
        draft_tokens: [..] int64 or int32; a token outside [0, V) is padding and is never accepted.
        draft_logits: [.., V]. None = deterministic drafts: q is one-hot, and the result is min(1, p(x) / l). At
            temperatures above 0 the result is 0 if q(x) is 0, because such a draft is never drawn.

    Examples:
        >>> import torch, torch_specops.analysis
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.8, 0.1, 0.1])
        >>> torch_specops.analysis.token_acceptance_probability(p.log(), torch.tensor([0, 1, 2]), q.log())
        tensor([0.6250, 1.0000, 0.0000], dtype=torch.float64)
    """
    _check_integers(draft_tokens=draft_tokens)
    _, accepted = _accepted(target_logits, draft_logits, temperature, lenience, argmax_lenience)
    shape = _broadcast_shape("draft_tokens", draft_tokens.shape, accepted.shape[:-1])
    x = draft_tokens.long().clamp(0, accepted.shape[-1] - 1).expand(shape).unsqueeze(-1)
    of_tokens = accepted.expand(*shape, -1).gather(-1, x).squeeze(-1)
    return torch.where((draft_tokens >= 0) & (draft_tokens < accepted.shape[-1]), of_tokens, 0.0)


def alpha_from_counts(num_accepted: Tensor, num_proposed: Tensor) -> Tensor:
    """An estimate of alpha from the steps of a loop: accepted drafts / (accepted drafts + rejections). The result is a
    float64 scalar, and NaN if there were no drafts.

    Drafts after the first rejection of a step are not tested and do not count. This is the maximum-likelihood estimate
    for the capped geometric variable of equation 1. In contrast, `GenerationStats.acceptance_rate` divides by all
    drafts, tested or not, and therefore decreases as K increases.

    Args:
        num_accepted, num_proposed: int64 or int32 of the same shape, with 0 <= num_accepted <= num_proposed. Other
            dtypes raise TypeError, and other shapes or values raise ValueError.

    Examples:
        >>> import torch, torch_specops.analysis
        >>> torch_specops.analysis.alpha_from_counts(torch.tensor([5, 2, 0]), torch.tensor([5, 5, 5]))
        tensor(0.7778, dtype=torch.float64)
    """
    _check_integers(num_accepted=num_accepted, num_proposed=num_proposed)
    if (shape := num_accepted.shape) != num_proposed.shape:
        raise ValueError(f"num_proposed: expected the shape of num_accepted, {shape}, got {num_proposed.shape}")
    if bool((num_accepted < 0).any()) or bool((num_accepted > num_proposed).any()):
        raise ValueError(f"num_accepted: expected counts from 0 to num_proposed, {num_proposed}, got {num_accepted}")
    accepted = num_accepted.sum().double()
    return accepted / (accepted + (num_accepted < num_proposed).sum())


def divergence(target_logits: Tensor, draft_logits: Tensor, temperature: Number = 1.0) -> Tensor:
    """The divergence D_LK(p, q) = sum_x |p(x) - M(x)| with M = (p + q) / 2 (definition 3.2). The result is [..] float64
    in [0, 1], and 1 if either row has no finite logit.

    This is the total variation distance. The divergence is symmetric and equal to 1 - `acceptance_probability` (lemma
    3.3, theorem 3.5), but is computed without cancellation if p and q are close. Arguments and errors are as in
    `acceptance_probability`.

    Examples:
        >>> import torch, torch_specops.analysis
        >>> torch_specops.analysis.divergence(torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.8, 0.1, 0.1]).log())
        tensor(0.4000, dtype=torch.float64)
    """
    (t,) = _arguments(temperature=temperature)
    p = _distribution("target_logits", target_logits, t, target_logits)
    q = _distribution("draft_logits", draft_logits, t, target_logits)
    has_law = (p > 0).any(-1) & (q > 0).any(-1)
    return torch.where(has_law, ((p - q).abs().sum(-1) / 2).clamp(max=1.0), 1.0)


def _arguments(**given: Number) -> tuple[Tensor, ...]:
    """Check that numbers are finite and >= 0, that alpha is at most 1, and that K is an integer. Returns them as
    float64 tensors, broadcast to one shape and on one device."""
    tensors: list[Tensor] = []
    shape = torch.Size()
    for name, value in given.items():
        x = torch.as_tensor(value, dtype=torch.float64, device="cpu") if is_number(value) else value
        if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_complex():
            raise TypeError(f"{name}: expected a number or a tensor of numbers, got {value!r}")
        if name == "num_draft_tokens" and torch.as_tensor(value).is_floating_point():
            raise TypeError(f"{name}: expected integers, got {value!r}")
        tensors.append(x.double())
        limit, expected = (1.0, "numbers in [0, 1]") if name == "alpha" else (FLOAT64_MAX, "finite numbers >= 0")
        if not bool(((tensors[-1] >= 0) & (tensors[-1] <= limit)).all()):
            raise ValueError(f"{name}: expected {expected}, got {value}")
        shape = _broadcast_shape(name, x.shape, shape)
    device = next((x.device for x in tensors if x.dim() > 0), tensors[0].device)
    return torch.broadcast_tensors(*(x.to(device) if x.dim() == 0 else x for x in tensors))


def _broadcast_shape(name: str, shape: torch.Size, other: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(shape, other)
    except RuntimeError as error:
        raise ValueError(f"{name}: expected a shape that broadcasts with {list(other)}, got {list(shape)}") from error


def _tokens(alpha: Tensor, count: Tensor) -> Tensor:
    # Use expm1, because 1 - alpha ** (K + 1) has cancellation near alpha = 1. At alpha = 0 the log is -inf, which gives
    # the correct 1.
    tokens = -torch.expm1((count + 1) * alpha.log()) / (1 - alpha)
    return torch.where(alpha == 1, count + 1, tokens)


def _accepted(
    target_logits: Tensor, draft_logits: Tensor | None, temperature: Number, lenience: float, argmax_lenience: float
) -> tuple[Tensor, Tensor]:
    """q [.., V] (1 everywhere for one-hot drafts), and the probability [.., V] that each token is accepted if it is the
    draft."""
    lenience = check_number("lenience", lenience)
    argmax_lenience = check_number("argmax_lenience", argmax_lenience)
    check_fraction("lenience", lenience)
    check_fraction("argmax_lenience", argmax_lenience)
    (t,) = _arguments(temperature=temperature)
    p = greedy = _distribution("target_logits", target_logits, t, target_logits)
    q = torch.ones_like(p) if draft_logits is None else _distribution("draft_logits", draft_logits, t, target_logits)
    if argmax_lenience < 1:
        x = _clean(target_logits)
        greedy = ((x >= x.amax(-1, keepdim=True) + math.log(argmax_lenience)) & (x > -math.inf)).double()
    sampled = torch.where(q > 0, (p / lenience / q).clamp(max=1.0), 0.0)
    return q, torch.where(t.to(p.device).unsqueeze(-1) == 0, greedy, sampled)


def _distribution(name: str, logits: Tensor, temperature: Tensor, target_logits: Tensor) -> Tensor:
    """softmax(logits / T), or one-hot at T = 0; all zero for a row without a finite entry (docs/math.md, section 3)."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {getattr(logits, 'dtype', type(logits))}")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name}: expected [.., V] with V >= 1, got shape {list(logits.shape)}")
    if (size := logits.shape[-1]) != target_logits.shape[-1]:
        raise ValueError(f"{name}: expected the target's vocabulary, {target_logits.shape[-1]} tokens, got {size}")
    _broadcast_shape(name, logits.shape, target_logits.shape)
    _broadcast_shape("temperature", temperature.shape, logits.shape[:-1])
    t, x = temperature.to(logits.device).unsqueeze(-1), _clean(logits)
    z = (x / t.clamp(min=1 / FLOAT32_MAX)).clamp(-FLOAT32_MAX, FLOAT32_MAX).masked_fill(x == -math.inf, -math.inf)
    one_hot = torch.zeros_like(x).scatter(-1, x.argmax(-1, keepdim=True), 1.0).masked_fill(x == -math.inf, 0.0)
    # The softmax of a row without a finite entry is NaN; replace it by 0.
    return torch.where(t == 0, one_hot, z.softmax(-1).nan_to_num(0.0))


def _clean(logits: Tensor) -> Tensor:
    """[.., V] float64, where NaN becomes -inf, and +inf becomes the largest float32."""
    return logits.double().nan_to_num(nan=-math.inf, posinf=FLOAT32_MAX, neginf=-math.inf).clamp(max=FLOAT32_MAX)


def _check_integers(**values: Tensor) -> None:
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name}: expected an int64 or int32 tensor, got {getattr(value, 'dtype', type(value))}")
