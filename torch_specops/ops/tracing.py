"""Whether a call can read the data of its tensors, and a context for tensors that any mode may write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import private


def is_eager_cpu(*tensors: Tensor) -> bool:
    """True if the data can be read without waiting: plain CPU tensors in an eager call, that is, a call that is not
    compiled, exported, recorded, faked or mapped."""
    if torch.compiler.is_compiling() or private.is_recording() or private.num_modes() > 0:
        return False
    return all(type(x) is Tensor and x.is_cpu and not private.is_mapped(x) for x in tensors)


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Compute no gradients, and make tensors that can be written both in inference mode and outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield
