"""Other implementations of the verification step, where their packages are installed, for `bench_verify.py --peers`,
and of a step of a hybrid, for `bench_hybrid.py`.

    transformers     `_speculative_sampling`, for one sequence at a time, after a float32 copy of both sides. No CUDA
                     graph of it can be made, because it branches on the host
    FlashInfer       `chain_speculative_sampling`, after torch's softmax of both sides to float32. It compiles its
                     kernels with nvcc when it is first called
    FlashInfer, its softmax   the same after its own softmax, which first copies 16-bit logits to float32
    vLLM             `rejection_sample` of its GPU model runner, after the float32 copy of the target rows that the
                     engine makes
    vLLM, no copy    the same on the logits as they are

The time of a call includes the work for each new set of logits (copy, softmax), and leaves out the buffers that an
engine keeps from step to step. All draw their own random numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from problems import Inputs, Result
from torch import Tensor, nn


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
        prepare: makes buffers, and returns the call that is timed.
        answer: turns the call's result into that of `verify_exact`: [B, K+1] and [B] int64.
        captured: whether a CUDA graph of the call can be made.
    """

    prepare: Callable[[Inputs], Callable[[], Any]]
    answer: Callable[[Any, Inputs], Result]
    captured: bool = True

    def __call__(self, inputs: Inputs) -> Result:
        return self.answer(self.prepare(inputs)(), inputs)


def find() -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers by name, and by name why one is not there."""
    makers: dict[str, Callable[[], Peer]] = {"transformers": transformers, "FlashInfer": flashinfer, "vLLM": vllm}
    found, skipped = {}, {}
    makers["FlashInfer, its softmax"] = partial(flashinfer, own_softmax=True)
    makers["vLLM, no copy"] = partial(vllm, copied=False)
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            skipped[name] = f"not installed: {error}"
    return found, skipped


def padded(tokens: Tensor, num_accepted: Tensor) -> Result:
    """The result of `verify_exact` from [B, K+1] tokens that may hold anything behind the next token."""
    n = num_accepted.long()
    behind = torch.arange(tokens.shape[1], device=tokens.device) > n.unsqueeze(-1)
    return tokens.long().masked_fill(behind, -1), n


def transformers() -> Peer:
    from transformers.generation.utils import _speculative_sampling as function

    # transformers 5.17 tells it that the drafts end the text.
    more = (False,) if "is_done_candidate" in inspect.signature(function).parameters else ()

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        x, target, draft = (inputs[name] for name in ("draft_tokens", "target_logits", "draft_logits"))

        def call() -> list[Any]:
            p, q = target.float(), draft.float()
            rows = (slice(b, b + 1) for b in range(len(x)))
            return [function(x[row], q[row], x.shape[1], p[row], *more) for row in rows]

        return call

    def answer(returned: Any, inputs: Inputs) -> Result:
        batch, num_drafts = inputs["draft_tokens"].shape
        output = inputs["draft_tokens"].new_full((batch, num_drafts + 1), -1)
        for b, (tokens, _) in enumerate(returned):
            output[b, : tokens.shape[1]] = tokens[0]
        return output, torch.tensor([int(n) for _, n in returned], device=output.device)

    return Peer(prepare, answer, captured=False)


def flashinfer(own_softmax: bool = False) -> Peer:
    from flashinfer.sampling import chain_speculative_sampling, softmax

    def probabilities(logits: Tensor) -> Tensor:
        if own_softmax:
            # It takes [N, V].
            return softmax(logits.flatten(0, 1)).view(logits.shape)
        return logits.softmax(-1, dtype=torch.float32)

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        tokens = inputs["draft_tokens"].int()
        target, draft = inputs["target_logits"], inputs["draft_logits"]
        # The kernel adds to these counters, and makes new ones where it gets none: an engine keeps them.
        counters = [torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device) for _ in range(2)]

        def call() -> Any:
            q, p = probabilities(draft), probabilities(target)
            # A graph repeats the numbers of a seed that is an integer, which costs the same.
            return chain_speculative_sampling(q, tokens, p, *counters, seed=1, offset=0)

        return call

    # -1 stands behind the next token.
    return Peer(prepare, lambda returned, _: padded(returned[0], (returned[0] >= 0).sum(-1) - 1))


def vllm(copied: bool = True) -> Peer:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        tokens = inputs["draft_tokens"]
        (batch, num_drafts), device = tokens.shape, tokens.device
        width = num_drafts + 1
        target = inputs["target_logits"].view(batch * width, -1)
        sequence = torch.arange(batch, dtype=torch.int32, device=device)
        arguments = {
            "draft_logits": inputs["draft_logits"],
            # Row i is verified with the token behind it: entry 0 is the newest token, entry i the i-th draft.
            "draft_sampled": torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1).flatten().int(),
            "cu_num_logits": torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device),
            "pos": torch.arange(width, device=device).repeat(batch),
            "idx_mapping": sequence,
            "expanded_idx_mapping": sequence.repeat_interleave(width),
            "expanded_local_pos": torch.arange(width, dtype=torch.int32, device=device).repeat(batch),
            "temperature": torch.ones(batch, device=device),
            "seed": torch.arange(batch, device=device),
            "num_speculative_steps": num_drafts,
        }
        if not copied:
            return lambda: rejection_sample(target, **arguments)
        return lambda: rejection_sample(target.to(torch.float32, copy=True), **arguments)

    return Peer(prepare, lambda returned, _: padded(returned[0], returned[1] - 1))


def economize_step(
    model: nn.Module, ids: Tensor, positions: Tensor, accepted: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """A step of economize, which reads the last K + 1 of the tokens ids [B, n] at their positions [B, K + 1] and keeps
    `accepted` [B] drafts of each row, and what undoes it. The tokens before are read at once."""
    from economize.arch import adapter_for
    from economize.runtime import LayerRunner

    length = ids.shape[1] - positions.shape[1]
    runner = LayerRunner(adapter_for(model))
    cache = runner.new_cache(ids.shape[1] + 1, len(ids))
    runner.forward(ids[:, :length], runner.context(cache, torch.arange(length).expand(len(ids), -1)))
    begun = cache.snapshot()

    def step() -> Tensor:
        snapshot = cache.snapshot()
        exact = runner.forward(ids[:, length:], runner.context(cache, positions, trusted=True))
        logits = runner.logits(exact.final)
        runner.replay(cache, snapshot, ids[:, length:], positions[:, 0], accepted + 1)
        return logits

    return step, lambda: cache.restore(begun)
