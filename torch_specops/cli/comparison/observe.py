"""Time spent in the forwards of models."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def forwards_watched(
    models: Sequence[nn.Module], device: torch.device
) -> Iterator[tuple[Counter[nn.Module], list[float]]]:
    """Yields how many forwards each model ran inside, and the seconds of each forward."""
    calls: Counter[nn.Module] = Counter()
    seconds: list[float] = []
    started = 0.0

    def before(model: nn.Module, inputs: object) -> None:
        nonlocal started
        synchronize(device)
        started = time.perf_counter()

    def after(model: nn.Module, inputs: object, output: object) -> None:
        synchronize(device)
        seconds.append(time.perf_counter() - started)
        calls[model] += 1

    hooks = [model.register_forward_pre_hook(before) for model in models]
    hooks += [model.register_forward_hook(after) for model in models]
    try:
        yield calls, seconds
    finally:
        for hook in hooks:
            hook.remove()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
