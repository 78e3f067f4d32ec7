"""Whether a call may look at the data of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["may_look"]


def may_look(tensor: Tensor) -> bool:
    """True for a plain CPU tensor in an eager call: one that is not compiled, exported, recorded, faked or mapped."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
