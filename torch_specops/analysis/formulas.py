"""Speed, operations and reads from alpha, c and K (Leviathan et al. 2023, sections 3.1 to 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import as_alpha, as_counts, as_ratio, broadcast

__all__ = [
    "expected_tokens_per_step",
    "memory_access_factor",
    "operations_factor",
    "optimal_num_draft_tokens",
    "oracle_walltime_factor",
    "walltime_factor",
]


def expected_tokens_per_step(alpha: float | Tensor, num_draft_tokens: int | Tensor) -> Tensor:
    """(1 - alpha ** (K + 1)) / (1 - alpha), the expected number of tokens that a step emits (Leviathan et al. 2023,
    equation 1); K + 1, its limit, at alpha = 1. Accurate to a few units in the last place also near 1.

    Args:
        alpha: in [0, 1].
        num_draft_tokens: K, integers >= 0.

    Returns:
        float64, of the shape to which the arguments broadcast.

    Raises:
        TypeError: an alpha that is no number, a K that is no integer.
        ValueError: a number out of range, shapes that do not broadcast.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import expected_tokens_per_step
        >>> expected_tokens_per_step(torch.tensor([0.0, 0.5, 1.0]), 3)
        tensor([1.0000, 1.8750, 4.0000], dtype=torch.float64)
    """
    a, count = broadcast(alpha=as_alpha(alpha), num_draft_tokens=as_counts(num_draft_tokens) + 1)
    # 1 - alpha is exact near 1, and expm1 keeps what 1 - alpha ** (K + 1) would lose. At alpha = 0 the log is -inf.
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
        float64, of the shape to which the arguments broadcast.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import walltime_factor
        >>> walltime_factor(0.75, 0.02, 7)
        tensor(3.1575, dtype=torch.float64)
    """
    tokens = expected_tokens_per_step(alpha, num_draft_tokens)
    tokens, c, count = broadcast(
        alpha=tokens, cost_ratio=as_ratio("cost_ratio", cost_ratio), num_draft_tokens=as_counts(num_draft_tokens)
    )
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
        float64 >= 1, of the shape to which the arguments broadcast.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import operations_factor
        >>> operations_factor(0.8, 0.0, 5)
        tensor(1.6263, dtype=torch.float64)
    """
    tokens = expected_tokens_per_step(alpha, num_draft_tokens)
    tokens, c, count = broadcast(
        alpha=tokens,
        operations_ratio=as_ratio("operations_ratio", operations_ratio),
        num_draft_tokens=as_counts(num_draft_tokens),
    )
    return (count * c + count + 1) / tokens


def memory_access_factor(
    alpha: float | Tensor, num_draft_tokens: int | Tensor, memory_ratio: float | Tensor = 0.0
) -> Tensor:
    """(K m + 1) (1 - alpha) / (1 - alpha ** (K + 1)), reads of weights and key-value caches relative to decoding
    without drafts (Leviathan et al. 2023, section 3.4, which leaves the draft out: m = 0).

    The target's weights and cache are read once per step, for all of its tokens. Where reading is what takes the time,
    c = m, and this is the inverse of `walltime_factor`.

    Args:
        alpha: in [0, 1].
        num_draft_tokens: K, integers >= 0.
        memory_ratio: m, finite and >= 0, bytes read for one draft / bytes read in one target forward.

    Returns:
        float64, of the shape to which the arguments broadcast.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import memory_access_factor
        >>> memory_access_factor(0.8, 5)
        tensor(0.2711, dtype=torch.float64)
    """
    tokens = expected_tokens_per_step(alpha, num_draft_tokens)
    tokens, m, count = broadcast(
        alpha=tokens,
        memory_ratio=as_ratio("memory_ratio", memory_ratio),
        num_draft_tokens=as_counts(num_draft_tokens),
    )
    return (count * m + 1) / tokens


def optimal_num_draft_tokens(alpha: float | Tensor, cost_ratio: float | Tensor, maximum: int = 1000) -> Tensor:
    """The K that maximises `walltime_factor` (Leviathan et al. 2023, section 3.5 and figure 3); the smallest of equals.

    It is 0 unless alpha > c: then some K helps, by (1 + alpha) / (1 + c) at least (corollary 3.9). Free drafts have no
    best K: at c = 0 and alpha > 0 the result is `maximum`.

    One draft more pays iff alpha ** (K + 1) (K c + 1) > c (1 + alpha + .. + alpha ** K), and the left side minus the
    right one falls with K, by (1 - alpha) alpha ** K (K c + 1); so the first K that does not pay is the best one.

    Args:
        alpha: in [0, 1].
        cost_ratio: c, finite and >= 0.
        maximum: the largest K considered, >= 0.

    Returns:
        int64 in 0..maximum, of the shape to which the arguments broadcast.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> import torch
        >>> from torch_specops.analysis import optimal_num_draft_tokens
        >>> optimal_num_draft_tokens(torch.tensor([0.04, 0.5, 0.8, 0.9]), 0.05)
        tensor([ 0,  3,  8, 13])
    """
    a, c = broadcast(alpha=as_alpha(alpha), cost_ratio=as_ratio("cost_ratio", cost_ratio))
    if isinstance(maximum, bool) or not isinstance(maximum, int):
        raise TypeError(f"maximum: expected an int, got {maximum!r}")
    if maximum < 0:
        raise ValueError(f"maximum: expected a number >= 0, got {maximum}")
    best = torch.zeros(a.shape, dtype=torch.int64, device=a.device)
    paying = torch.ones_like(best, dtype=torch.bool)
    power, tokens = a.clone(), torch.ones_like(a)
    for count in range(maximum):
        # At c = 0 every draft pays, also where its power has vanished.
        paying = paying & ((power * (count * c + 1) > c * tokens) | ((c == 0) & (a > 0)))
        if not bool(paying.any()):
            break
        best += paying
        tokens = tokens + power
        power = power * a
    return best


def oracle_walltime_factor(alpha: float | Tensor, cost_ratio: float | Tensor) -> Tensor:
    """1 / (1 - alpha + c alpha), the walltime factor if K were always the number of drafts that will be accepted: a
    bound on what any choice of K can reach (Leviathan et al. 2023, section 3.5). Above c = 1 it is 1: K stays 0.

    Such a step emits 1 / (1 - alpha) tokens on average, all drafts but one, and every draft has its price c. The paper
    gives the number of tokens, and "up to ~60%" for what the oracle gains over the best constant K.

    Args:
        alpha: in [0, 1].
        cost_ratio: c, finite and >= 0.

    Returns:
        float64, of the shape to which the arguments broadcast; infinite at alpha = 1 and c = 0.

    Raises:
        TypeError, ValueError: as `expected_tokens_per_step`.

    Example:
        >>> from torch_specops.analysis import oracle_walltime_factor
        >>> oracle_walltime_factor(0.8, 0.05)
        tensor(4.1667, dtype=torch.float64)
    """
    a, c = broadcast(alpha=as_alpha(alpha), cost_ratio=as_ratio("cost_ratio", cost_ratio))
    return 1 / (1 - a + c.clamp(max=1.0) * a)
