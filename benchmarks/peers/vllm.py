"""`rejection_sample` of vLLM's GPU model runner: four Triton launches, on logits.

It reads logits of any float type. The engine first writes a float32 copy of the target rows, in which it applies the
sampling parameters; that copy is part of a step there, and of "vLLM" here. "vLLM, no copy" leaves it out: what the
kernels alone could do. It draws its own numbers from a seed and a position per row. Where vLLM is not installed, a
clone serves: its file and what that imports need Triton alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from problems import Inputs, Problem, Result

from .protocol import BarePackages, FunctionPeer, external_folder, padded, softmax_bytes

MODULE = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
NAME = "rejection_sample"
NAMES = (
    *("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping"),
    *("expanded_idx_mapping", "expanded_local_pos", "temperature", "seed", "num_speculative_steps"),
)


def path_of_copy() -> Path:
    """In a clone of the repository, or a folder with its files at the same places."""
    return external_folder() / "vllm" / (MODULE.replace(".", "/") + ".py")


def find() -> Callable[..., Any] | None:
    """The function of the installed package, else of the copies; None if there is neither."""
    try:
        return getattr(importlib.import_module(MODULE), NAME, None)
    except ImportError:
        return getattr(load_copies(), NAME, None) if path_of_copy().exists() else None


def load_copies() -> ModuleType:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    stand_in = ModuleType("vllm.triton_utils")
    # Triton's interpreter has no library of a device.
    tldevice = SimpleNamespace(log1p=lambda x: tl.log(1 + x)) if os.environ.get("TRITON_INTERPRET") else libdevice
    vars(stand_in).update(triton=triton, tl=tl, tldevice=tldevice, HAS_TRITON=True)
    # What was loaded goes again with these: nothing else shall take the copies for the package.
    with (
        mock.patch.object(sys, "meta_path", [BarePackages(external_folder() / "vllm", "vllm"), *sys.meta_path]),
        mock.patch.dict(sys.modules, {"vllm.triton_utils": stand_in}),
    ):
        return importlib.import_module(MODULE)


class VLLM(FunctionPeer):
    arguments = NAMES

    def __init__(self, copied: bool = True) -> None:
        self.copied = copied
        self.name = "vLLM" if copied else "vLLM, no copy"
        self.needs = "a float32 copy of the target rows" if copied else ""

    def find(self) -> Callable[..., Any] | None:
        return find()

    def place_of_copy(self) -> str:
        return str(path_of_copy())

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        assert self._function is not None
        function, tokens = self._function, inputs["draft_tokens"]
        batch, num_drafts = tokens.shape
        width, device = num_drafts + 1, tokens.device
        target = inputs["target_logits"].view(batch * width, -1)
        sequence = torch.arange(batch, dtype=torch.int32, device=device)
        # Row i of a sequence is verified with the token behind it: entry 0 is the newest token, entry i the i-th draft.
        drafted = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1).flatten().int()
        arguments = {
            "draft_logits": inputs["draft_logits"],
            "draft_sampled": drafted,
            "cu_num_logits": torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device),
            "pos": torch.arange(width, device=device).repeat(batch),
            "idx_mapping": sequence,
            "expanded_idx_mapping": sequence.repeat_interleave(width),
            "expanded_local_pos": torch.arange(width, dtype=torch.int32, device=device).repeat(batch),
            "temperature": torch.ones(batch, device=device),
            "seed": torch.arange(batch, device=device),
            "num_speculative_steps": num_drafts,
        }
        if not self.copied:
            return lambda: function(target, **arguments)
        return lambda: function(target.to(torch.float32, copy=True), **arguments)

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        tokens, num_emitted = returned
        return padded(tokens, num_emitted - 1)

    def needs_bytes(self, problem: Problem) -> int:
        rows = problem.batch * (problem.num_draft_tokens + 1)
        return softmax_bytes(problem, rows) if self.copied else 0
