"""Whether a call may look at the data of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["may_look"]


def may_look(*tensors: Tensor) -> bool:
    """True for plain CPU tensors in an eager call: one that is not compiled, exported, recorded, faked or mapped."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(
        type(x) is Tensor and x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        for x in tensors
    )
