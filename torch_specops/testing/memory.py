"""Fill new tensors with values that show if an op reads memory that it has not written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def poison_memory() -> Iterator[None]:
    """Inside the `with` block, torch.empty, empty_like, empty_strided and Tensor.new_empty return tensors filled with
    NaN, or with the lowest integer plus 7.

    A test then fails if an op reads memory that it has not written, or does not write all of its output.
    """

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(math.nan)
            return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min + 7)

        return allocate_poisoned

    owners = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))
    with ExitStack() as patches:
        for owner, name in owners:
            patches.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield
