"""Argument checks that the whole package shares. The checks read only the metadata of tensors, so they do not
synchronise with a device, and work on fake tensors too."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

# Tensor subclasses that are refused here, because their dispatch would raise an error that does not name the argument.
REFUSED_KINDS = {
    "DTensor": "; torch_specops.vocab_parallel takes sharded logits",
    "NestedTensor": "",
    "MaskedTensor": "",
}


def check_tensor(name: str, value: object, plain: bool = True, expected: str = "a tensor") -> None:
    """Raise TypeError unless the value is a tensor. If `plain`, also raise for the subclasses in `REFUSED_KINDS`;
    others pass."""
    if type(value) is Tensor and not value.is_nested:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type(value)}")
    if plain:
        kind = "NestedTensor" if value.is_nested else type(value).__name__
        if kind in REFUSED_KINDS:
            raise TypeError(f"{name}: expected a plain tensor, got a {kind}{REFUSED_KINDS[kind]}")


def is_int(value: object) -> TypeGuard[int]:
    """True for an integer of Python or NumPy, or a traced size, but not for a bool."""
    # Try `int` first: `isinstance` against an abstract class is slow, and an eager op checks every number it is given.
    return type(value) is int or (isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    """True for a real number of Python or NumPy, but not for a bool."""
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def check_number(name: str, value: Any) -> float:
    """Return the number as a Python number, because sums with a NumPy number may be rounded, and comparisons may
    overflow."""
    if not is_number(value):
        raise TypeError(f"{name}: expected a number, got {type(value)}")
    if type(value) in (int, float):
        return value
    return int(value) if is_int(value) else float(value)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value)}")


def check_fraction(name: str, value: float) -> None:
    """Raise unless the number, which may be traced, is in (0, 1]."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name}: expected a number in (0, 1], got {value}")


def check_int(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """The value as a Python int; raises unless it is an int in [least, most]."""
    if not is_int(value):
        raise TypeError(f"{name}: expected an int, got {type(value)}")
    if value < least:
        raise ValueError(f"{name}: expected a number >= {least}, got {value}")
    if value > most:
        raise ValueError(f"{name}: expected a number <= {most}, got {value}")
    return int(value)


def check_bounds(alpha: float, beta: float) -> None:
    """Check alpha and beta, the bounds of the scores of `verify_sigmoid`."""
    # Within these bounds, 1 / (beta - alpha) and the lowest scaled logit, alpha - 80 (beta - alpha), fit float32.
    if not (-1e36 < alpha < -1e-36):
        raise ValueError(f"alpha: expected a number in (-1e36, -1e-36), got {alpha}")
    if not (1e-36 < beta < 1e36):
        raise ValueError(f"beta: expected a number in (1e-36, 1e36), got {beta}")
