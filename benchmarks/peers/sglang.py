"""SGLang's Triton kernel for a chain of drafts: one program per sequence, on probabilities.

It wants float32 probabilities of all rows of both sides, so their softmax belongs to a step, and takes the uniforms as
they are. Its file needs Triton alone: a copy of it serves where SGLang is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from problems import Inputs, Problem, Result

from .protocol import (
    FunctionPeer,
    external_folder,
    load_file,
    padded,
    row_count,
    softmax_bytes,
)

MODULES = ("sglang.kernels.ops.speculative.reject_sampling", "sglang.srt.speculative.reject_sampling")
PATH = "sglang/python/sglang/kernels/ops/speculative/reject_sampling.py"
NAME = "chain_speculative_sampling_triton"
NAMES = (
    *("predicts", "accept_index", "accept_token_num", "candidates", "retrive_index", "retrive_next_token"),
    *("retrive_next_sibling", "uniform_samples", "uniform_samples_for_final_sampling", "target_probs", "draft_probs"),
    *("threshold_single", "threshold_acc", "deterministic"),
)


def find() -> Callable[..., Any] | None:
    """The function of the installed package, else of the copy; None if there is neither."""
    for module in MODULES:
        try:
            return getattr(importlib.import_module(module), NAME, None)
        except ImportError:
            continue
    path = external_folder() / PATH
    return getattr(load_file(path, "sglang_reject_sampling"), NAME, None) if path.exists() else None


class SGLang(FunctionPeer):
    name = "SGLang"
    arguments = NAMES
    needs = "softmax of both sides to float32"
    takes_uniforms = True

    def find(self) -> Callable[..., Any] | None:
        return find()

    def place_of_copy(self) -> str:
        return f"{PATH} in {external_folder()}"

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        assert self._function is not None
        function, tokens = self._function, inputs["draft_tokens"]
        batch, num_drafts = tokens.shape
        target, draft = inputs["target_logits"], inputs["draft_logits"]

        def filled(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=tokens.device)

        # Slot 0 of a sequence is the newest token, slot i the i-th draft; slots are numbered through the batch.
        candidates = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1)
        index = torch.arange(candidates.numel(), device=tokens.device).view_as(candidates)
        following = torch.where(torch.arange(num_drafts + 1, device=tokens.device) < num_drafts, index + 1, -1)
        outputs = {
            "predicts": filled(candidates.numel(), value=-1),
            "accept_index": filled(batch, num_drafts + 1, value=-1),
            "accept_token_num": filled(batch, value=0),
        }
        arguments = {
            "candidates": candidates,
            "retrive_index": index,
            "retrive_next_token": following,
            "retrive_next_sibling": torch.full_like(index, -1),
            "uniform_samples": inputs["accept_uniforms"].float(),
            "uniform_samples_for_final_sampling": inputs["sample_uniforms"].float(),
            "threshold_single": 1.0,
            "threshold_acc": 1.0,
            "deterministic": True,
        }

        def call() -> Any:
            q = draft.softmax(-1, dtype=torch.float32)
            p = target.softmax(-1, dtype=torch.float32)
            function(**outputs, **arguments, target_probs=p, draft_probs=q)
            return outputs["predicts"], outputs["accept_token_num"]

        return call

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        predicts, num_accepted = returned
        return padded(predicts.view(len(num_accepted), -1), num_accepted)

    def needs_bytes(self, problem: Problem) -> int:
        return softmax_bytes(problem, row_count(problem))
