"""The programs of examples/aot_verify as modules, and the decoding loop around a step, as main.cpp has it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tiny_models import perturbed, tiny
from torch import Tensor, nn

FOLDER = Path(__file__).parents[2] / "examples" / "aot_verify"
# What the prompts below need, with drafts beyond the last token.
CAPACITY, NUM_DRAFTS = 20, 2
PROMPTS = [[5, 9, 33, 5, 9], [17, 4]]
MAX_NEW_TOKENS = 12


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"aot_verify_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


package = load("package")


def tiny_pair() -> tuple[nn.Module, nn.Module]:
    target = tiny("llama", num_hidden_layers=1).float()
    return target, perturbed(target, 0.05)


def tiny_step(device: str = "cpu", num_drafts: int = NUM_DRAFTS) -> nn.Module:
    target, draft = (model.to(device) for model in tiny_pair())
    return package.DecoderStep(target, draft, len(PROMPTS), CAPACITY, num_drafts)


def step_state(device: str = "cpu") -> list[Tensor]:
    """Two rows, the first one greedy."""
    state = package.step_inputs(PROMPTS, MAX_NEW_TOKENS, CAPACITY, 0.8)
    state[7][0] = 0.0
    return [value.to(device) for value in state]


@torch.no_grad()
def decode(step: Callable[..., Any], state: list[Tensor]) -> list[list[int]]:
    """Read the prompts, step until every row has ended, return the texts."""
    tokens, lengths, _, _, finished = state[:5]
    prompt_lengths = lengths.clone()
    finished.fill_(True)
    for read in range(1, int(prompt_lengths.max()) + 1):
        lengths.copy_(prompt_lengths.clamp(max=read))
        step(*state)
    finished.fill_(False)
    while not bool(finished.all()):
        step(*state)
    return [row[:length].tolist() for row, length in zip(tokens, lengths.tolist(), strict=True)]
