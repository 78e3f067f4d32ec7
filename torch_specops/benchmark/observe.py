"""Looking at a run: the time in the forwards of modules, and the peak of memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["ForwardTimer", "peak_memory", "reset_peak_memory", "synchronize"]


class ForwardTimer:
    """Time in the forwards of some modules, and how often each was called."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device
        self._calls: dict[int, int] = {}

    def calls(self, module: nn.Module) -> int:
        return self._calls.get(id(module), 0)

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        # An attribute of the instance stands before the method of its class.
        kept = [(module, vars(module).get("forward")) for module in modules]
        for module in modules:
            vars(module)["forward"] = self._wrapped(module)
        try:
            yield
        finally:
            for module, forward in kept:
                if forward is None:
                    del vars(module)["forward"]
                else:
                    vars(module)["forward"] = forward

    def _wrapped(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        # transformers reads the signature.
        @wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronize(self._device)
            started = time.perf_counter()
            output = forward(*args, **kwargs)
            synchronize(self._device)
            self.seconds += time.perf_counter() - started
            self._calls[id(module)] = self.calls(module) + 1
            return output

        return timed


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> int:
    """Begin a new peak; return what is not to be counted."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    # Linux: 5 resets the process's high-water mark. Where that is not allowed, the mark is the one since its start.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return 0


def peak_memory(device: torch.device, before: int) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) - before
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
