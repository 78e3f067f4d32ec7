"""`torch_specops.verify_exact`, through the same protocol as everybody else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from problems import Inputs, Result, op_arguments

import torch_specops

from .protocol import Peer


class Specops(Peer):
    takes_uniforms = True

    def __init__(self, with_lse: bool = False, compiled: bool = False) -> None:
        self.with_lse = with_lse
        self.compiled = compiled
        self.name = "specops" + ", lse" * with_lse + " compiled" * compiled
        self._verify: Callable[..., Any] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        if self._verify is None:
            verify = torch_specops.verify_exact
            self._verify = torch.compile(verify, fullgraph=True, dynamic=False) if self.compiled else verify
        return partial(self._verify, **op_arguments("sampled", inputs, self.with_lse))

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        return returned
