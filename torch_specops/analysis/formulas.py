"""Speed, operations and memory reads as functions of alpha, c and K (Leviathan et al. 2023, sections 3.1 to 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_int

FLOAT64_MAX = torch.finfo(torch.float64).max


def expected_tokens_per_step(alpha: float | Tensor, num_draft_tokens: int | Tensor) -> Tensor:
    """(1 - alpha ** (K + 1)) / (1 - alpha), the expected number of tokens that a step emits (Leviathan et al. 2023,
    equation 1); K + 1, its limit, at alpha = 1. Accurate to a few units in the last place, also near 1.

    Args:
        alpha: in [0, 1].
        num_draft_tokens: K, integers >= 0.

    Returns:
        float64, in the broadcast shape of the arguments.

    Raises:
        TypeError: an alpha that is not a number, a K that is not an integer.
        ValueError: a number out of range, shapes that do not broadcast.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import expected_tokens_per_step
        >>> expected_tokens_per_step(torch.tensor([0.0, 0.5, 1.0]), 3)
        tensor([1.0000, 1.8750, 4.0000], dtype=torch.float64)
    """
    return _tokens(*_arguments(alpha=alpha, num_draft_tokens=num_draft_tokens))


def walltime_factor(alpha: float | Tensor, cost_ratio: float | Tensor, num_draft_tokens: int | Tensor) -> Tensor:
    """(1 - alpha ** (K + 1)) / ((1 - alpha) (K c + 1)), the expected speed relative to decoding without drafts
    (Leviathan et al. 2023, theorem 3.8).

    Args:
        alpha, num_draft_tokens: as in `expected_tokens_per_step`, also the result and errors.
        cost_ratio: c, finite and >= 0, the time of one draft forward / the time of one target forward.

    Example:
        >>> from torch_specops.analysis import walltime_factor
        >>> walltime_factor(0.75, 0.02, 7)
        tensor(3.1575, dtype=torch.float64)
    """
    a, c, count = _arguments(alpha=alpha, cost_ratio=cost_ratio, num_draft_tokens=num_draft_tokens)
    return _tokens(a, count) / (count * c + 1)


def operations_factor(
    alpha: float | Tensor, operations_ratio: float | Tensor, num_draft_tokens: int | Tensor
) -> Tensor:
    """(1 - alpha) (K c^ + K + 1) / (1 - alpha ** (K + 1)), the arithmetic operations relative to decoding without
    drafts (Leviathan et al. 2023, theorem 3.11).

    Args:
        alpha, num_draft_tokens: as in `expected_tokens_per_step`, also the result (>= 1) and errors.
        operations_ratio: c^, finite and >= 0, operations per token of the draft / those of the target.

    Example:
        >>> from torch_specops.analysis import operations_factor
        >>> operations_factor(0.8, 0.0, 5)
        tensor(1.6263, dtype=torch.float64)
    """
    a, c, count = _arguments(alpha=alpha, operations_ratio=operations_ratio, num_draft_tokens=num_draft_tokens)
    return (count * c + count + 1) / _tokens(a, count)


def memory_access_factor(
    alpha: float | Tensor, num_draft_tokens: int | Tensor, memory_ratio: float | Tensor = 0.0
) -> Tensor:
    """(K m + 1) (1 - alpha) / (1 - alpha ** (K + 1)), the reads of weights and key-value caches relative to decoding
    without drafts (Leviathan et al. 2023, section 3.4, which ignores the draft's reads: m = 0).

    The target's weights and cache are read once per step, for all of its tokens. If a forward takes the time of its
    reads, c = m, and this is the inverse of `walltime_factor`.

    Args:
        alpha, num_draft_tokens: as in `expected_tokens_per_step`, also the result and errors.
        memory_ratio: m, finite and >= 0, bytes read for one draft / bytes read in one target forward.

    Example:
        >>> from torch_specops.analysis import memory_access_factor
        >>> memory_access_factor(0.8, 5)
        tensor(0.2711, dtype=torch.float64)
    """
    a, m, count = _arguments(alpha=alpha, memory_ratio=memory_ratio, num_draft_tokens=num_draft_tokens)
    return (count * m + 1) / _tokens(a, count)


def optimal_num_draft_tokens(alpha: float | Tensor, cost_ratio: float | Tensor, maximum: int = 1000) -> Tensor:
    """The K that maximises `walltime_factor` (Leviathan et al. 2023, section 3.5 and figure 3); the smallest of equals.

    It is above 0 iff alpha > c, and the gain is then at least (1 + alpha) / (1 + c) (corollary 3.9). For c = 0 and
    alpha > 0, more drafts are always better, and the result is `maximum`.

    One more draft pays iff alpha ** (K + 1) (K c + 1) > c (1 + alpha + .. + alpha ** K). The left side minus the right
    side falls with K, by (1 - alpha) alpha ** K (K c + 1), so the first K at which it does not pay is the best one.

    Args:
        alpha, cost_ratio: as for `walltime_factor`, also what is raised.
        maximum: the largest K considered, >= 0.

    Returns:
        int64 in 0..maximum, in the broadcast shape of the arguments.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import optimal_num_draft_tokens
        >>> optimal_num_draft_tokens(torch.tensor([0.04, 0.5, 0.8, 0.9]), 0.05)
        tensor([ 0,  3,  8, 13])
    """
    a, c = _arguments(alpha=alpha, cost_ratio=cost_ratio)
    check_int("maximum", maximum, 0)
    best = torch.zeros(a.shape, dtype=torch.int64, device=a.device)
    paying = torch.ones_like(best, dtype=torch.bool)
    power, tokens = a.clone(), torch.ones_like(a)
    for count in range(maximum):
        # For c = 0 every draft pays, even if its power has underflowed to 0.
        paying = paying & ((power * (count * c + 1) > c * tokens) | ((c == 0) & (a > 0)))
        if not bool(paying.any()):
            break
        best += paying
        tokens = tokens + power
        power = power * a
    return best


def oracle_walltime_factor(alpha: float | Tensor, cost_ratio: float | Tensor) -> Tensor:
    """1 / (1 - alpha + c alpha), the walltime factor if K were, in every step, the number of drafts that will be
    accepted: an upper bound for any choice of K (Leviathan et al. 2023, section 3.5). For c > 1 it is 1 (K = 0).

    Such a step emits 1 / (1 - alpha) tokens on average, all but one of them drafts of cost c. The paper gives this
    number of tokens, and "up to ~60%" for the oracle's gain over the best constant K.

    Arguments, result and errors are those of `walltime_factor`. For alpha = 1 and c = 0 the factor is infinite.

    Example:
        >>> from torch_specops.analysis import oracle_walltime_factor
        >>> oracle_walltime_factor(0.8, 0.05)
        tensor(4.1667, dtype=torch.float64)
    """
    a, c = _arguments(alpha=alpha, cost_ratio=cost_ratio)
    return 1 / (1 - a + c.clamp(max=1.0) * a)


def as_numbers(name: str, value: float | Tensor) -> Tensor:
    """A number, or a tensor of numbers (not booleans), as float64."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64)
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name}: expected a number or a tensor of numbers, got {value!r}")
    return value.double()


def _tokens(alpha: Tensor, count: Tensor) -> Tensor:
    """(1 - alpha ** (K + 1)) / (1 - alpha)."""
    # 1 - alpha ** (K + 1) would cancel near alpha = 1; expm1 does not. At alpha = 0 the log is -inf.
    tokens = -torch.expm1((count + 1) * alpha.log()) / (1 - alpha)
    return torch.where(alpha == 1, count + 1, tokens)


def _arguments(**given: float | Tensor) -> tuple[Tensor, ...]:
    """alpha in [0, 1], K whole and >= 0, ratios finite and >= 0: in float64, in one shape, and on one device, to which
    scalars are moved."""
    values = {name: as_numbers(name, value) for name, value in given.items()}
    for name, value in values.items():
        if name == "num_draft_tokens" and torch.as_tensor(given[name]).is_floating_point():
            raise TypeError(f"{name}: expected integers, got {given[name]!r}")
        high, range_of_it = (1.0, "numbers in [0, 1]") if name == "alpha" else (FLOAT64_MAX, "finite numbers >= 0")
        if not bool(((value >= 0) & (value <= high)).all()):
            raise ValueError(f"{name}: expected {range_of_it}, got {given[name]}")
    devices = [value.device for value in values.values() if value.dim() > 0]
    moved = [value.to(devices[0]) if devices and value.dim() == 0 else value for value in values.values()]
    try:
        return torch.broadcast_tensors(*moved)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in values.items())
        raise ValueError(f"alpha: expected shapes that broadcast, got {shapes}") from error
