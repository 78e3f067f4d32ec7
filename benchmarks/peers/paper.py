"""The CUDA kernels of Wagner et al. 2024 (arXiv 2406.11016), where the authors' extension modules are installed.

One function, for one sequence and float32 logits, with the arguments of transformers' `_speculative_sampling` and the
largest number of drafts to accept. It synchronises the device after its kernel, counts on the host and draws by
`torch.multinomial`. Larger batches are a loop over sequences here. The repository has a kernel for float16 too, and
none for bfloat16.

`PaperSigmoid` has another law (docs/math.md): its scores are sigmoids of the logits / 20,000 + 0.5, clamped beyond
+-10,000, and the weights of its next token have a floor of 1e-5 a token, so that chance decides on every input. Its
number of accepted drafts is compared on logits of +-20,000, where scores are 0 and 1; its tokens are not. It overwrites
the target rows with their scores, so a copy of them belongs to a step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs, Problem, determined

from .protocol import OneByOne, no_cuda, row_count, softmax_bytes


class PaperExact(OneByOne):
    name = "Wagner et al., exact"
    module = "paper_speculative_sampling_fp32"
    needs = "a float32 copy of both sides; a loop over sequences"
    not_captured = "it synchronises the device and counts accepted drafts on the host"

    def __init__(self) -> None:
        self._function: Callable[..., Any] | None = None

    def unavailable(self, device: torch.device) -> str | None:
        try:
            self._function = importlib.import_module(self.module).sampling_cuda
        except ImportError as error:
            return f"no module {self.module}: {error}"
        return no_cuda(device)

    def sampling_function(
        self, candidate_ids: torch.Tensor, draft: torch.Tensor, num_drafts: int, target: torch.Tensor, is_done: bool
    ) -> tuple[torch.Tensor, int]:
        assert self._function is not None
        return self._function(candidate_ids, draft, num_drafts, target, is_done, num_drafts)


class PaperSigmoid(PaperExact):
    name = "Wagner et al., sigmoid"
    module = "paper_speculative_sampling_fp32_sigmoid"
    needs = "a float32 copy of both sides, of the target's in any case; a loop over sequences"

    def copied(self, target: torch.Tensor) -> torch.Tensor:
        return target.to(torch.float32, copy=True)

    def check(self, problem: Problem, inputs: Inputs) -> None:
        certain = determined(inputs)
        certain |= {name: certain[name] * 20 for name in ("target_logits", "draft_logits")}
        _, n = self.answer(self.prepare(certain)(), certain)
        if not torch.equal(n, inputs["num_accepted"]):
            raise RuntimeError(f"{problem}: {self.name} is wrong in its numbers of accepted drafts, {n.tolist()}")

    def needs_bytes(self, problem: Problem) -> int:
        rows = problem.batch * (problem.num_draft_tokens + 1) if problem.dtype == "float32" else row_count(problem)
        return softmax_bytes(problem, rows)
