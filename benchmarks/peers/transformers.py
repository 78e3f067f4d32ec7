"""`_speculative_sampling` of transformers: what its assisted generation calls, for one sequence at a time.

Its `generate` hands it float32 logits of both models, so a float32 copy of both sides belongs to a step. The function
takes the softmax of what it gets, branches in Python on how many drafts were accepted (so that torch.compile compiles
the pieces, and those behind the branch once for each number), and draws by `torch.multinomial`. Larger batches are a
loop over sequences here; transformers refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs, Problem, Result

from .protocol import Peer, row_count, softmax_bytes


class Transformers(Peer):
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

            from torch_specops.hf.assisted import KNOWN, NAME, code_digest
        except ImportError as error:
            return f"not installed: {error.name}"
        function = getattr(utils, NAME, None)
        if function is None or code_digest(function) not in KNOWN:
            return f"another version: {NAME} is known as of {', '.join(KNOWN.values())}"
        self._function = torch.compile(function, dynamic=False) if self.compiled else function
        return None

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        assert self._function is not None
        function, tokens = self._function, inputs["draft_tokens"]
        target, draft = inputs["target_logits"], inputs["draft_logits"]
        batch, num_drafts = tokens.shape

        def call() -> list[Any]:
            p, q = target.float(), draft.float()
            return [function(tokens[b : b + 1], q[b : b + 1], num_drafts, p[b : b + 1], False) for b in range(batch)]

        return call

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        batch, num_drafts = inputs["draft_tokens"].shape
        output = inputs["draft_tokens"].new_full((batch, num_drafts + 1), -1)
        num_accepted = torch.empty(batch, dtype=torch.int64, device=output.device)
        for b, (tokens, n) in enumerate(returned):
            output[b, : tokens.shape[1]] = tokens[0]
            num_accepted[b] = n
        return output, num_accepted

    def needs_bytes(self, problem: Problem) -> int:
        return 0 if problem.dtype == "float32" else softmax_bytes(problem, row_count(problem))
