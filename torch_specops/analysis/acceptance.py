"""Acceptance from logits and from counts: beta, alpha and D_LK (Leviathan et al. 2023, section 3.2, appendix A.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_fraction, check_numbers
from .formulas import as_numbers

FLOAT32_MAX = torch.finfo(torch.float32).max


def acceptance_probability(
    target_logits: Tensor,
    draft_logits: Tensor,
    temperature: float | Tensor = 1.0,
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
) -> Tensor:
    """beta = sum_x min(p(x) / l, q(x)), the probability that a draft drawn from q is accepted (Leviathan et al. 2023,
    theorem 3.5; with lenience, appendix A.5). Its mean over positions is alpha (corollary 3.6).

    At temperature 0 both laws are one-hot at their argmax (the lowest index of the maximum), so beta is 1 or 0. With
    `argmax_lenience` below 1, the draft's argmax x is accepted if softmax(target_logits)(x) >= l max softmax(..).

    Args:
        target_logits: [.., V] of any floating dtype; -inf and NaN exclude a token, +inf is the largest float32.
        draft_logits: [.., V], broadcast against the target's.
        temperature: >= 0, a number or a tensor that broadcasts against [..]; applied to both sides.
        lenience: l in (0, 1], at temperatures above 0; 1 = lossless.
        argmax_lenience: l in (0, 1], at temperature 0; 1 = lossless.

    Returns:
        [..] float64 in [0, 1]; 0 where either row has no finite logit.

    Raises:
        TypeError: logits that are not floating-point tensors, a number of another type.
        ValueError: vocabularies that differ, shapes that do not broadcast, a number out of range.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import acceptance_probability
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.8, 0.1, 0.1])
        >>> acceptance_probability(p.log(), q.log()), acceptance_probability(p.log(), q.log(), lenience=0.5)
        (tensor(0.6000, dtype=torch.float64), tensor(0.9000, dtype=torch.float64))
    """
    _check_lenience(lenience=lenience, argmax_lenience=argmax_lenience)
    _check_pair(target_logits, draft_logits)
    p, q = _probabilities(target_logits, temperature), _probabilities(draft_logits, temperature)
    # Rounding may bring the sum above 1.
    sampled = torch.minimum(p / lenience, q).sum(-1).clamp(max=1.0)
    greedy = (q * _accepted_when_greedy(target_logits, argmax_lenience)).sum(-1)
    return torch.where(_temperature(temperature, target_logits) == 0, greedy, sampled)


def token_acceptance_probability(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    lenience: float = 1.0,
    argmax_lenience: float = 1.0,
) -> Tensor:
    """min(1, p(x) / (l q(x))), the probability that this draft token is accepted. Its mean over x drawn from q is
    `acceptance_probability` (Leviathan et al. 2023, the first line of the proof of theorem 3.5).

    Args:
        target_logits: [.., V], as for `acceptance_probability`.
        draft_tokens: [..] integers; one outside [0, V) is padding and is never accepted.
        draft_logits: [.., V]; None = deterministic drafts: q is one-hot, and the result is min(1, p(x) / l).
        temperature, lenience, argmax_lenience: as for `acceptance_probability`.

    Returns:
        [..] float64 in [0, 1]; 0 where q(x) is 0, because such a draft is never drawn. At temperature 0 the result is 1
        or 0, whatever q is.

    Raises:
        TypeError, ValueError: as `acceptance_probability`; tokens of another dtype than int64 or int32.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import token_acceptance_probability
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.8, 0.1, 0.1])
        >>> token_acceptance_probability(p.log(), torch.tensor([0, 1, 2]), q.log())
        tensor([0.6250, 1.0000, 0.0000], dtype=torch.float64)
    """
    _check_lenience(lenience=lenience, argmax_lenience=argmax_lenience)
    _check_logits("target_logits", target_logits)
    _check_integers("draft_tokens", draft_tokens)
    if draft_logits is not None:
        _check_pair(target_logits, draft_logits)
    vocab_size = target_logits.shape[-1]
    is_token = (draft_tokens >= 0) & (draft_tokens < vocab_size)
    index = draft_tokens.long().clamp(0, vocab_size - 1)
    p = _at(_probabilities(target_logits, temperature), index)
    q = torch.ones_like(p) if draft_logits is None else _at(_probabilities(draft_logits, temperature), index)
    accepted = torch.where(q > 0, (p / (lenience * q)).clamp(max=1.0), 0.0)
    greedy = _at(_accepted_when_greedy(target_logits, argmax_lenience), index).double()
    accepted = torch.where(_temperature(temperature, target_logits) == 0, greedy, accepted)
    return torch.where(is_token, accepted, 0.0)


def alpha_from_counts(num_accepted: Tensor, num_proposed: Tensor) -> Tensor:
    """alpha estimated from the steps of a decoding loop: accepted / (accepted + rejections).

    A step ends at its first rejection, so a step whose drafts were not all accepted had exactly one rejection, and the
    drafts after it were not tried. This is the maximum-likelihood estimate of alpha for the capped geometric variable
    of equation 1. `GenerationStats.acceptance_rate` is a different number: it divides by all drafts, tried or not, and
    falls as K grows.

    Args:
        num_accepted, num_proposed: integers of one shape, 0 <= num_accepted <= num_proposed.

    Returns:
        A float64 scalar in [0, 1]; NaN when no draft was tried.

    Raises:
        TypeError: counts that are not integer tensors.
        ValueError: counts of unequal shape or out of range.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import alpha_from_counts
        >>> alpha_from_counts(torch.tensor([5, 2, 0]), torch.tensor([5, 5, 5]))
        tensor(0.7778, dtype=torch.float64)
    """
    _check_integers("num_accepted", num_accepted)
    _check_integers("num_proposed", num_proposed)
    if num_accepted.shape != num_proposed.shape:
        raise ValueError(
            f"num_proposed: expected the shape of num_accepted, {list(num_accepted.shape)}, "
            f"got {list(num_proposed.shape)}"
        )
    if bool((num_accepted < 0).any()) or bool((num_accepted > num_proposed).any()):
        raise ValueError("num_accepted: expected counts from 0 to num_proposed")
    accepted = num_accepted.sum().double()
    return accepted / (accepted + (num_accepted < num_proposed).sum())


def divergence(target_logits: Tensor, draft_logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """D_LK(p, q) = sum_x |p(x) - M(x)|, M = (p + q) / 2 (Leviathan et al. 2023, definition 3.2).

    It is the total variation distance: symmetric, and equal to 1 - `acceptance_probability` (lemma 3.3, theorem 3.5),
    but without cancellation where p and q are close.

    Args:
        target_logits, draft_logits, temperature: as for `acceptance_probability`.

    Returns:
        [..] float64 in [0, 1]; 1 where either row has no finite logit.

    Raises:
        TypeError, ValueError: as `acceptance_probability`.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import divergence
        >>> divergence(torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.8, 0.1, 0.1]).log())
        tensor(0.4000, dtype=torch.float64)
    """
    _check_pair(target_logits, draft_logits)
    p, q = _probabilities(target_logits, temperature), _probabilities(draft_logits, temperature)
    has_law = (p > 0).any(-1) & (q > 0).any(-1)
    return torch.where(has_law, ((p - q).abs().sum(-1) / 2).clamp(max=1.0), 1.0)


def _probabilities(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """[.., V] float64 softmax(logits / T), one-hot at T = 0; zero where no entry is finite (docs/math.md,
    section 3)."""
    t = _temperature(temperature, logits).unsqueeze(-1)
    x = _clean(logits)
    z = (x / t.clamp(min=1 / FLOAT32_MAX)).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    # Without a finite entry all are -inf, and softmax gives NaN.
    law = z.masked_fill_(x == -math.inf, -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.where(t == 0, _accepted_when_greedy(logits, 1.0).double(), law)


def _accepted_when_greedy(logits: Tensor, argmax_lenience: float) -> Tensor:
    """[.., V] bool, the drafts that a greedy row accepts."""
    x = _clean(logits)
    if argmax_lenience == 1.0:
        accepted = torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.argmax(-1, keepdim=True), True)
    else:
        accepted = x >= x.amax(-1, keepdim=True) + math.log(argmax_lenience)
    return accepted & (x > -math.inf)


def _clean(logits: Tensor) -> Tensor:
    """[.., V] float64: NaN is -inf, +inf the largest float32."""
    return logits.double().nan_to_num(nan=-math.inf, posinf=FLOAT32_MAX, neginf=-math.inf).clamp(max=FLOAT32_MAX)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [.., V] at index [..], both broadcast against each other."""
    shape = _broadcast_shape("draft_tokens", index.shape, values.shape[:-1])
    expanded = values.expand(*shape, values.shape[-1])
    return expanded.gather(-1, index.expand(shape).unsqueeze(-1)).squeeze(-1)


def _temperature(temperature: float | Tensor, logits: Tensor) -> Tensor:
    value = as_numbers("temperature", temperature).to(logits.device)
    if not bool(((value >= 0) & (value < math.inf)).all()):
        raise ValueError(f"temperature: expected finite numbers >= 0, got {temperature}")
    _broadcast_shape("temperature", value.shape, logits.shape[:-1])
    return value


def _broadcast_shape(name: str, shape: torch.Size, other: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(shape, other)
    except RuntimeError as error:
        raise ValueError(
            f"{name}: expected a shape that broadcasts against {list(other)}, got {list(shape)}"
        ) from error


def _check_pair(target_logits: Tensor, draft_logits: Tensor) -> None:
    _check_logits("target_logits", target_logits)
    _check_logits("draft_logits", draft_logits)
    if target_logits.shape[-1] != draft_logits.shape[-1]:
        raise ValueError(
            f"draft_logits: expected the target's vocabulary, {target_logits.shape[-1]} tokens, "
            f"got {draft_logits.shape[-1]}"
        )
    _broadcast_shape("draft_logits", draft_logits.shape, target_logits.shape)


def _check_logits(name: str, logits: Tensor) -> None:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point tensor, got {getattr(logits, 'dtype', type(logits))}")
    if logits.dim() < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{name}: expected [.., V] with V >= 1, got shape {list(logits.shape)}")


def _check_integers(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: expected an int64 or int32 tensor, got {getattr(value, 'dtype', type(value))}")


def _check_lenience(**values: float) -> None:
    check_numbers(**values)
    for name, value in values.items():
        check_fraction(name, value)
