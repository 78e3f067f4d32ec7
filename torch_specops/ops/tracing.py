"""How a call runs: whether it can read the data of its tensors, where, and who may write what it makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from . import private

__all__ = ["is_eager_cpu", "normal_tensors", "on_device_of"]


def is_eager_cpu(*tensors: Tensor) -> bool:
    """True if the data can be read without waiting: plain CPU tensors in an eager call, that is, a call that is not
    compiled, exported, recorded, faked or mapped."""
    if torch.compiler.is_compiling() or private.is_recording() or private.num_modes() > 0:
        return False
    return all(type(x) is Tensor and x.is_cpu and not private.is_mapped(x) for x in tensors)


@contextmanager
def normal_tensors() -> Iterator[None]:
    """Within it no gradients are computed, and what is made may be written in inference mode and outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device current, because Triton launches on it. A traced call launches nothing, and the code
    that Inductor generates sets the device itself."""
    return nullcontext() if private.is_fake(tensor) else torch.cuda.device(tensor.device)
