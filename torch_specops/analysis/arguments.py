"""Arguments as float64 tensors, or an error that names them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["as_alpha", "as_counts", "as_ratio", "broadcast", "number"]


def number(name: str, value: float | Tensor) -> Tensor:
    """As float64; integers are numbers, booleans are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise TypeError(f"{name}: expected a number or a tensor of numbers, got {value!r}")
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise TypeError(f"{name}: expected a number or a tensor of numbers, got {tensor.dtype}")
    return tensor.double()


def as_alpha(alpha: float | Tensor) -> Tensor:
    value = number("alpha", alpha)
    if not bool(((value >= 0) & (value <= 1)).all()):
        raise ValueError(f"alpha: expected numbers in [0, 1], got {alpha}")
    return value


def as_ratio(name: str, ratio: float | Tensor) -> Tensor:
    value = number(name, ratio)
    if not bool(((value >= 0) & (value < math.inf)).all()):
        raise ValueError(f"{name}: expected finite numbers >= 0, got {ratio}")
    return value


def as_counts(num_draft_tokens: int | Tensor) -> Tensor:
    value = number("num_draft_tokens", num_draft_tokens)
    is_integer = isinstance(num_draft_tokens, int) or (
        isinstance(num_draft_tokens, Tensor) and not num_draft_tokens.is_floating_point()
    )
    if not is_integer:
        raise TypeError(f"num_draft_tokens: expected integers, got {num_draft_tokens!r}")
    if not bool((value >= 0).all()):
        raise ValueError(f"num_draft_tokens: expected numbers >= 0, got {num_draft_tokens}")
    return value


def broadcast(**tensors: Tensor) -> tuple[Tensor, ...]:
    """All of one shape, and numbers on the device where the tensors are."""
    devices = [tensor.device for tensor in tensors.values() if tensor.dim() > 0]
    moved = [tensor.to(devices[0]) if devices and tensor.dim() == 0 else tensor for tensor in tensors.values()]
    try:
        return torch.broadcast_tensors(*moved)
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{next(iter(tensors))}: expected shapes that broadcast, got {shapes}") from error
