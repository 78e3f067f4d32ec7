"""Speed, operations and memory reads as functions of alpha, c and K (Leviathan et al. 2023, sections 3.1 to 3.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import check_int

__all__ = [
    "as_numbers",
    "expected_tokens_per_step",
    "memory_access_factor",
    "operations_factor",
    "optimal_num_draft_tokens",
    "oracle_walltime_factor",
    "walltime_factor",
]


def expected_tokens_per_step(alpha: float | Tensor, num_draft_tokens: int | Tensor) -> Tensor:
    """(1 - alpha ** (K + 1)) / (1 - alpha), the expected number of tokens that a step emits (Leviathan et al. 2023,
    equation 1); K + 1, its limit, at alpha = 1. Accurate to a few units in the last place, also near 1.

    Args:
        alpha: in [0, 1].
        num_draft_tokens: K, integers >= 0.

    Returns:
        float64, in the broadcast shape of the arguments.

    Raises:
        TypeError: an alpha that is no number, a K that is no integer.
        ValueError: a number out of range, shapes that do not broadcast.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import expected_tokens_per_step
        >>> expected_tokens_per_step(torch.tensor([0.0, 0.5, 1.0]), 3)
        tensor([1.0000, 1.8750, 4.0000], dtype=torch.float64)
    """
    a, count = _broadcast(alpha=_as_alpha(alpha), num_draft_tokens=_as_counts(num_draft_tokens) + 1)
    # 1 - alpha ** (K + 1) would cancel near alpha = 1; expm1 does not. At alpha = 0 the log is -inf.
    tokens = -torch.expm1(count * a.log()) / (1 - a)
    return torch.where(a == 1, count, tokens)


def walltime_factor(alpha: float | Tensor, cost_ratio: float | Tensor, num_draft_tokens: int | Tensor) -> Tensor:
    """(1 - alpha ** (K + 1)) / ((1 - alpha) (K c + 1)), the expected speed relative to decoding without drafts
    (Leviathan et al. 2023, theorem 3.8).

    Args:
        alpha: in [0, 1].
        cost_ratio: c, finite and >= 0, the time of one draft forward / the time of one target forward.
        num_draft_tokens: K, integers >= 0.

    Returns:
        float64, in the broadcast shape of the arguments.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import walltime_factor
        >>> walltime_factor(0.75, 0.02, 7)
        tensor(3.1575, dtype=torch.float64)
    """
    tokens, c, count = _tokens_ratio_count(alpha, num_draft_tokens, cost_ratio=cost_ratio)
    return tokens / (count * c + 1)


def operations_factor(
    alpha: float | Tensor, operations_ratio: float | Tensor, num_draft_tokens: int | Tensor
) -> Tensor:
    """(1 - alpha) (K c^ + K + 1) / (1 - alpha ** (K + 1)), the arithmetic operations relative to decoding without
    drafts (Leviathan et al. 2023, theorem 3.11).

    Args:
        alpha: in [0, 1].
        operations_ratio: c^, finite and >= 0, operations per token of the draft / those of the target.
        num_draft_tokens: K, integers >= 0.

    Returns:
        float64 >= 1, in the broadcast shape of the arguments.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import operations_factor
        >>> operations_factor(0.8, 0.0, 5)
        tensor(1.6263, dtype=torch.float64)
    """
    tokens, c, count = _tokens_ratio_count(alpha, num_draft_tokens, operations_ratio=operations_ratio)
    return (count * c + count + 1) / tokens


def memory_access_factor(
    alpha: float | Tensor, num_draft_tokens: int | Tensor, memory_ratio: float | Tensor = 0.0
) -> Tensor:
    """(K m + 1) (1 - alpha) / (1 - alpha ** (K + 1)), the reads of weights and key-value caches relative to decoding
    without drafts (Leviathan et al. 2023, section 3.4, which ignores the draft's reads: m = 0).

    The target's weights and cache are read once per step, for all of its tokens. If a forward takes the time of its
    reads, c = m, and this is the inverse of `walltime_factor`.

    Args:
        alpha: in [0, 1].
        num_draft_tokens: K, integers >= 0.
        memory_ratio: m, finite and >= 0, bytes read for one draft / bytes read in one target forward.

    Returns:
        float64, in the broadcast shape of the arguments.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import memory_access_factor
        >>> memory_access_factor(0.8, 5)
        tensor(0.2711, dtype=torch.float64)
    """
    tokens, m, count = _tokens_ratio_count(alpha, num_draft_tokens, memory_ratio=memory_ratio)
    return (count * m + 1) / tokens


def optimal_num_draft_tokens(alpha: float | Tensor, cost_ratio: float | Tensor, maximum: int = 1000) -> Tensor:
    """The K that maximises `walltime_factor` (Leviathan et al. 2023, section 3.5 and figure 3); the smallest of equals.

    It is above 0 iff alpha > c, and the gain is then at least (1 + alpha) / (1 + c) (corollary 3.9). At c = 0 and
    alpha > 0 more drafts are always better, and the result is `maximum`.

    One draft more pays iff alpha ** (K + 1) (K c + 1) > c (1 + alpha + .. + alpha ** K). Left side minus right side
    falls with K, by (1 - alpha) alpha ** K (K c + 1), so the first K that does not pay is the best one.

    Args:
        alpha: in [0, 1].
        cost_ratio: c, finite and >= 0.
        maximum: the largest K considered, >= 0.

    Returns:
        int64 in 0..maximum, in the broadcast shape of the arguments.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import optimal_num_draft_tokens
        >>> optimal_num_draft_tokens(torch.tensor([0.04, 0.5, 0.8, 0.9]), 0.05)
        tensor([ 0,  3,  8, 13])
    """
    a, c = _broadcast(alpha=_as_alpha(alpha), cost_ratio=_as_ratio("cost_ratio", cost_ratio))
    check_int("maximum", maximum, 0)
    best = torch.zeros(a.shape, dtype=torch.int64, device=a.device)
    paying = torch.ones_like(best, dtype=torch.bool)
    power, tokens = a.clone(), torch.ones_like(a)
    for count in range(maximum):
        # At c = 0 every draft pays, even when its power has underflowed to 0.
        paying = paying & ((power * (count * c + 1) > c * tokens) | ((c == 0) & (a > 0)))
        if not bool(paying.any()):
            break
        best += paying
        tokens = tokens + power
        power = power * a
    return best


def oracle_walltime_factor(alpha: float | Tensor, cost_ratio: float | Tensor) -> Tensor:
    """1 / (1 - alpha + c alpha), the walltime factor if K were in every step the number of drafts that will be
    accepted: an upper bound for any way to choose K (Leviathan et al. 2023, section 3.5). For c > 1 it is 1 (K = 0).

    Such a step emits 1 / (1 - alpha) tokens on average, all but one of them drafts of cost c. The paper gives this
    number of tokens, and "up to ~60%" for the oracle's gain over the best constant K.

    Args:
        alpha: in [0, 1].
        cost_ratio: c, finite and >= 0.

    Returns:
        float64, in the broadcast shape of the arguments; infinite at alpha = 1 and c = 0.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import oracle_walltime_factor
        >>> oracle_walltime_factor(0.8, 0.05)
        tensor(4.1667, dtype=torch.float64)
    """
    a, c = _broadcast(alpha=_as_alpha(alpha), cost_ratio=_as_ratio("cost_ratio", cost_ratio))
    return 1 / (1 - a + c.clamp(max=1.0) * a)


def as_numbers(name: str, value: float | Tensor) -> Tensor:
    """A number, or a tensor of numbers but no booleans, as float64."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name}: expected a number or a tensor of numbers, got {value!r}")
    return value.double()


def _as_alpha(alpha: float | Tensor) -> Tensor:
    value = as_numbers("alpha", alpha)
    if not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(f"alpha: expected numbers in [0, 1], got {alpha}")
    return value


def _as_ratio(name: str, ratio: float | Tensor) -> Tensor:
    value = as_numbers(name, ratio)
    if not bool(((value >= 0) & (value < math.inf)).all()):
        raise ValueError(f"{name}: expected finite numbers >= 0, got {ratio}")
    return value


def _as_counts(num_draft_tokens: int | Tensor) -> Tensor:
    value = as_numbers("num_draft_tokens", num_draft_tokens)
    if torch.as_tensor(num_draft_tokens).is_floating_point():
        raise TypeError(f"num_draft_tokens: expected integers, got {num_draft_tokens!r}")
    if not bool((value >= 0).all()):
        raise ValueError(f"num_draft_tokens: expected numbers >= 0, got {num_draft_tokens}")
    return value


def _tokens_ratio_count(
    alpha: float | Tensor, num_draft_tokens: int | Tensor, **ratio: float | Tensor
) -> tuple[Tensor, ...]:
    """The expected tokens per step, the named ratio and K, in one shape."""
    tokens = expected_tokens_per_step(alpha, num_draft_tokens)
    ratios = {name: _as_ratio(name, value) for name, value in ratio.items()}
    return _broadcast(alpha=tokens, **ratios, num_draft_tokens=_as_counts(num_draft_tokens))


def _broadcast(**tensors: Tensor) -> tuple[Tensor, ...]:
    """All in one shape; scalars are moved to the device of the others."""
    devices = [tensor.device for tensor in tensors.values() if tensor.dim() > 0]
    moved = [tensor.to(devices[0]) if devices and tensor.dim() == 0 else tensor for tensor in tensors.values()]
    try:
        return torch.broadcast_tensors(*moved)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{next(iter(tensors))}: expected shapes that broadcast, got {shapes}") from error
