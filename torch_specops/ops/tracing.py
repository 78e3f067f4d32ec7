"""How a call runs: whether it can read the data of its tensors, and on which device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import private

__all__ = ["is_eager_cpu", "on_device_of"]


def is_eager_cpu(*tensors: Tensor) -> bool:
    """True if the data can be read without waiting: plain CPU tensors in an eager call, which is one that is not
    compiled, exported, recorded, faked or mapped."""
    if torch.compiler.is_compiling() or private.is_recording() or private.num_modes() > 0:
        return False
    return all(type(x) is Tensor and x.is_cpu and not private.is_mapped(x) for x in tensors)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, on which Triton launches. A traced call launches nothing, and the code
    that Inductor generates sets the device itself."""
    return nullcontext() if private.is_fake(tensor) else torch.cuda.device(tensor.device)
