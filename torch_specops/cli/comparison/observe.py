"""Time spent in the forwards of models."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["ForwardTimer", "synchronize"]


class ForwardTimer:
    """Adds up the time in the forwards of models, and counts the forwards of each.

    Attributes:
        seconds: of all forwards.
        calls: from a model to its number of forwards.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self.calls: Counter[nn.Module] = Counter()
        self._device = device
        self._started = 0.0

    @contextmanager
    def watching(self, models: Sequence[nn.Module]) -> Iterator[None]:
        hooks = [model.register_forward_pre_hook(self._before) for model in models]
        hooks += [model.register_forward_hook(self._after) for model in models]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, model: nn.Module, inputs: object) -> None:
        synchronize(self._device)
        self._started = time.perf_counter()

    def _after(self, model: nn.Module, inputs: object, output: object) -> None:
        synchronize(self._device)
        self.seconds += time.perf_counter() - self._started
        self.calls[model] += 1


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
