"""Fills fresh memory with values that reveal reads of it."""

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
    """While active, torch.empty, empty_like, empty_strided and Tensor.new_empty return NaN, or the lowest
    integer plus 7.

    This reveals an op that reads memory it did not write, or leaves part of an output unwritten.
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
