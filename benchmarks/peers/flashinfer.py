"""FlashInfer's `chain_speculative_sampling`: one launch, on probabilities.

It wants float32 probabilities of all rows of both sides, so their softmax belongs to a step. It draws its own numbers,
from a seed and an offset that are passed as integers here: a graph then repeats them, which costs the same. Where
FlashInfer is not installed, copies of its sampling functions serve (`gather.py`), without the rest of the package. Its
kernels are compiled when they are first called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs, Problem, Result

from .protocol import BarePackages, FunctionPeer, external_folder, padded, prepare_nvcc, row_count, softmax_bytes

MODULE = "flashinfer.sampling"
NAMES = ("draft_probs", "draft_token_ids", "target_probs", "seed", "offset")


class FlashInfer(FunctionPeer):
    name = "FlashInfer"
    arguments = NAMES
    needs = "softmax of both sides to float32"
    is_built = True

    def find(self) -> Callable[..., Any] | None:
        try:
            module = importlib.import_module(MODULE)
        except ModuleNotFoundError as error:
            folder = external_folder() / "flashinfer"
            if error.name not in ("flashinfer", MODULE) or not folder.is_dir():
                return None
            sys.path.append(str(external_folder() / "apache-tvm-ffi"))
            sys.meta_path.append(BarePackages(folder, "flashinfer"))
            module = importlib.import_module(MODULE)
        return module.chain_speculative_sampling

    def place_of_copy(self) -> str:
        return str(external_folder() / "flashinfer")

    def unavailable(self, device: torch.device) -> str | None:
        # FlashInfer says itself if it cannot build.
        prepare_nvcc()
        return super().unavailable(device)

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        assert self._function is not None
        chain = self._function
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
