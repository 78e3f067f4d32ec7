"""`_speculative_sampling` of transformers: what its assisted generation calls, for one sequence at a time.

Its `generate` hands it float32 logits of both models, so a float32 copy of both sides belongs to a step. The function
takes the softmax of what it gets, branches in Python on how many drafts were accepted (so that torch.compile compiles
the pieces, and those behind the branch once for each number), and draws by `torch.multinomial`. Larger batches are a
loop over sequences here; transformers refuses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .protocol import OneByOne


class Transformers(OneByOne):
    needs = "a float32 copy of both sides; a loop over sequences"
    not_captured = "its branches look at the number of accepted drafts on the host"

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self.name = "transformers compiled" if compiled else "transformers"
        if compiled:
            self.needs += "; compiled in the pieces between its branches"
        self._function: Callable[..., Any] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        try:
            from transformers.generation import utils
        except ImportError as error:
            return f"not installed: {error.name}"
        function = getattr(utils, "_speculative_sampling", None)
        names = () if function is None else tuple(inspect.signature(function).parameters)
        if names[:4] != ("candidate_input_ids", "candidate_logits", "candidate_length", "new_logits"):
            return f"another version: _speculative_sampling takes {', '.join(names) or 'nothing'}"
        # transformers 5.17 tells it that the drafts end the text.
        self._num_arguments = 5 if "is_done_candidate" in names else 4
        self._function = torch.compile(function, dynamic=False) if self.compiled else function
        return None

    def sampling_function(self, *arguments: Any) -> tuple[Tensor, int]:
        assert self._function is not None
        return self._function(*arguments[: self._num_arguments])
