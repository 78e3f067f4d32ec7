"""Checks whether greedy output is the output that the target alone would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafts import LanguageModel


@dataclass(frozen=True)
class GreedyDifference:
    """A token that plain greedy decoding would not emit after the same tokens."""

    index: int  # index in the output, from 0
    token: int
    expected_token: int
    logit_gap: float  # logit of the expected token - logit of `token`, >= 0
    rounding_bound: float  # the largest gap that float32 rounding explains
    row: int = 0  # the row in the batch

    @property
    def is_rounding(self) -> bool:
        return self.logit_gap <= self.rounding_bound

    def describe(self, decode_text: Callable[[list[int]], str]) -> str:
        token, expected_token = (repr(decode_text([each])) for each in (self.token, self.expected_token))
        return (
            f"token {self.index} is {token} instead of {expected_token}; their logits differ by {self.logit_gap:.1e}, "
            f"and rounding explains up to {self.rounding_bound:.1e}"
        )


def worst_of(differences: Sequence[GreedyDifference]) -> GreedyDifference:
    """The difference with the largest logit gap, relative to its rounding bound."""
    return max(differences, key=lambda difference: difference.logit_gap / difference.rounding_bound)


def verdict(differences: Sequence[GreedyDifference], is_16_bit: bool = False) -> str:
    """Summarise differences as "identical", "near ties" or "different". For 16-bit logits, "rounding" stands for the
    last two, because they cannot be told apart."""
    if not differences:
        return "identical"
    if is_16_bit:
        return "rounding"
    return "near ties" if all(difference.is_rounding for difference in differences) else "different"


# A forward over K+1 tokens sums in another order than a forward over one token, so their float32 logits differ.
# Measured differences are at most 3e-6 of the largest logit (135M parameters, 30 layers, K up to 10). Two tokens may
# swap if their logits are within twice that difference. The bound leaves a factor of five for other models. A bug
# changes logits by far more.
ROUNDING = 3e-5


def check_greedy(
    target: LanguageModel, input_ids: Tensor, output_tokens: Sequence[int], row: int = 0
) -> list[GreedyDifference]:
    """Decode greedily with one token per forward and without the ops, and compare each token with `output_tokens`.

    After a difference, the check continues from `output_tokens`, so that every token is checked in its real context.

    Args:
        input_ids: [1, P] int64, the prompt.
        row: stored in the differences.
    """
    differences = greedy_differences(target, input_ids, output_tokens, row)
    return [difference for difference in differences if difference is not None]


@torch.inference_mode()
def greedy_differences(
    target: LanguageModel, input_ids: Tensor, output_tokens: Sequence[int], row: int = 0
) -> Iterator[GreedyDifference | None]:
    """`check_greedy` as an iterator, with one forward for each token. Yields a difference or None for each token."""
    text = torch.cat([input_ids.to(target.device), torch.tensor([output_tokens], device=target.device).long()], 1)
    prompt_length, length = input_ids.shape[1], text.shape[1]
    target.start(1, length)
    read = 0
    for index in range(prompt_length, length):
        positions = torch.arange(read, index, device=target.device).unsqueeze(0)
        logits = target.forward(text[:, read:index], positions, 1)[0, -1]
        read = index
        token, expected_token = int(text[0, index]), int(logits.argmax())
        difference = None
        if expected_token != token:
            gap = float(logits[expected_token] - logits[token])
            # Ignore -inf and the lowest float, which models give to excluded tokens. Such logits would make the bound
            # useless.
            usual = logits[logits > torch.finfo(logits.dtype).min]
            bound = ROUNDING * float(usual.abs().amax())
            difference = GreedyDifference(index - prompt_length, token, expected_token, gap, bound, row)
        yield difference
