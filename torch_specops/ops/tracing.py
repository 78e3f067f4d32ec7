"""Tests for eager calls, and a context for creating tensors that any mode may write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import private


def is_traced() -> bool:
    """True if calls are compiled, exported, recorded by `torch.jit.trace` or run under a dispatch mode."""
    return torch.compiler.is_compiling() or private.is_recording() or private.num_modes() > 0


def is_eager(*tensors: Tensor) -> bool:
    """True if the call may read the data of these tensors: they are plain tensors, and the call is not compiled,
    exported, recorded by `torch.jit.trace`, run on fake tensors or inside `vmap`."""
    return not is_traced() and all(type(x) is Tensor and not private.is_mapped(x) for x in tensors)


def is_eager_cpu(*tensors: Tensor) -> bool:
    """True if the call may read the data of these tensors without waiting for a device."""
    return is_eager(*tensors) and all(x.is_cpu for x in tensors)


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Disable gradients, and create tensors that can later be written both inside and outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
