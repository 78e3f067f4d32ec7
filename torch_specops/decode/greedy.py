"""Plain greedy decoding beside an output: what a speculative decode at temperature 0 must have given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafts import LanguageModel

__all__ = ["GreedyCheck", "GreedyDifference", "check_greedy"]


@dataclass(frozen=True)
class GreedyDifference:
    """A token that plain greedy decoding would not have emitted there.

    Args:
        index: place in the output, from 0.
        expected_token: the target's greedy choice, reading one token at a time.
        token: what was emitted.
        logit_gap: logit of expected_token minus logit of token, >= 0.
        rounding_bound: the gap that float32 rounding may explain.
    """

    index: int
    expected_token: int
    token: int
    logit_gap: float
    rounding_bound: float


@dataclass(frozen=True)
class GreedyCheck:
    """Plain greedy decoding beside an output: the differences, in order, and how long it took."""

    num_tokens: int
    differences: list[GreedyDifference]
    seconds: float

    @property
    def identical(self) -> bool:
        return not self.differences

    @property
    def only_rounding(self) -> bool:
        return all(difference.logit_gap <= difference.rounding_bound for difference in self.differences)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)


# A forward over K+1 tokens sums in another order than one over a single token, so their float32 logits differ: by
# 3e-6 of the largest logit at most where we measured it (135M parameters, 30 layers, K up to 10). Two tokens may swap
# within twice the difference; the bound leaves a factor of five for other models. A defect moves logits by far more.
ROUNDING = 3e-5


@torch.inference_mode()
def check_greedy(target: LanguageModel, input_ids: Tensor, output_tokens: Sequence[int]) -> GreedyCheck:
    """Decode greedily, one token per forward and without the ops, and compare with `output_tokens` token by token.

    After a difference the check goes on along `output_tokens`, so that every token is checked given the ones before
    it. With no difference the output is that of plain greedy decoding.
    """
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one prompt [1, P], got {list(input_ids.shape)}")
    text = torch.cat([input_ids.to(target.device), torch.tensor([output_tokens], device=target.device).long()], 1)
    prompt_length, length = input_ids.shape[1], text.shape[1]
    started = time.perf_counter()
    target.start(1, length)
    differences = []
    read = 0
    for index in range(prompt_length, length):
        positions = torch.arange(read, index, device=target.device).unsqueeze(0)
        logits = target.forward(text[:, read:index], positions, 1)[0, -1]
        read = index
        token, expected_token = int(text[0, index]), int(logits.argmax())
        if expected_token != token:
            gap = float(logits[expected_token] - logits[token])
            bound = ROUNDING * float(logits.abs().amax())
            differences.append(GreedyDifference(index - prompt_length, expected_token, token, gap, bound))
    return GreedyCheck(len(output_tokens), differences, time.perf_counter() - started)
