"""FlashInfer's `chain_speculative_sampling`: one launch, on probabilities.

It wants float32 probabilities of all rows of both sides, so their softmax belongs to a step. It draws its own numbers,
from a seed and an offset that are passed as integers here: a graph then repeats them, which costs the same. Written
for the signature in FlashInfer's documentation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs, Problem, Result

from .protocol import Peer, missing_arguments, no_cuda, padded, row_count, softmax_bytes

NAMES = ("draft_probs", "draft_token_ids", "target_probs", "seed", "offset")


class FlashInfer(Peer):
    name = "FlashInfer"
    needs = "softmax of both sides to float32"

    def unavailable(self, device: torch.device) -> str | None:
        try:
            sampling = importlib.import_module("flashinfer.sampling")
        except ImportError as error:
            return f"not installed: {error.name or error}"
        return missing_arguments(sampling.chain_speculative_sampling, NAMES) or no_cuda(device)

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        chain = importlib.import_module("flashinfer.sampling").chain_speculative_sampling
        target, draft = inputs["target_logits"], inputs["draft_logits"]
        tokens = inputs["draft_tokens"].int()
        # The kernel adds to these counters, and makes new ones where it gets none: an engine keeps them.
        accepted, emitted = (torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device) for _ in range(2))

        def call() -> Any:
            q = draft.softmax(-1, dtype=torch.float32)
            p = target.softmax(-1, dtype=torch.float32)
            return chain(q, tokens, p, accepted, emitted, seed=1, offset=0)

        return call

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        tokens = returned[0]
        # -1 behind the next token.
        return padded(tokens, (tokens >= 0).sum(-1) - 1)

    def needs_bytes(self, problem: Problem) -> int:
        return softmax_bytes(problem, row_count(problem))
