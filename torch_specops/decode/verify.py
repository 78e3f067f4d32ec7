"""Verifies the drafts of a step with the op and the parameters that the user chose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import checks
from ..drafts import Draft
from ..ops import filter_logits, sample, verify_block, verify_exact, verify_sigmoid
from ..sampling import SamplingTensors

__all__ = ["Verifier", "log_probabilities"]


@dataclass(frozen=True)
class Verifier:
    """Calls one of the verify ops with the tensors of a step.

    Args:
        op: "exact", "block" or "sigmoid".
        lenience, argmax_lenience: in (0, 1], as in `verify_exact`; below 1 only with "exact".
    """

    op: str = "exact"
    lenience: float = 1.0
    argmax_lenience: float = 1.0

    def __post_init__(self) -> None:
        checks.check_numbers(lenience=self.lenience, argmax_lenience=self.argmax_lenience)
        for name, value in (("lenience", self.lenience), ("argmax_lenience", self.argmax_lenience)):
            checks.check_fraction(name, value)
            if value < 1.0 and self.op != "exact":
                raise ValueError(
                    f"{name}: only verify='exact' can be lenient; expected 1, got {value} with {self.op!r}"
                )
        if self.op not in ("exact", "block", "sigmoid"):
            raise ValueError(f"verify: expected 'exact', 'block' or 'sigmoid', got {self.op!r}")

    def __call__(
        self, target_logits: Tensor, draft: Draft, uniforms: tuple[Tensor, Tensor], sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        """Accept drafts, and draw the next token.

        Args:
            target_logits: [B, K+1, V].
            draft: tokens [B, K], with their logits [B, K, V] and logsumexp [B, K] if they were sampled.
            uniforms: [B, K] and [B] float32 in [0, 1), for the acceptance tests and for the next token.
            sampling: temperature and filters of each row.

        Returns:
            output_tokens [B, K+1] int64: accepted drafts, the next token, then -1.
            num_accepted [B] int64.

        Raises:
            ValueError: logits of another shape, as from a model that ignores `num_logits`.
        """
        expected = (draft.tokens.shape[0], draft.tokens.shape[1] + 1)
        if target_logits.shape[:-1] != expected:
            raise ValueError(
                f"target: expected logits {[*expected, 'V']} from forward with num_logits = {expected[1]}, "
                f"got shape {list(target_logits.shape)}"
            )
        temperature, filters = sampling.temperature, sampling.filters
        if draft.tokens.shape[1] == 0:
            # Without drafts every op draws from the target's row, which `sample` does with less work.
            tokens, _ = sample(target_logits[:, 0], uniforms[1], temperature, **filters)
            return tokens.unsqueeze(1), torch.zeros_like(tokens)
        if self.op == "sigmoid":
            # This op takes no filters, so both sides are filtered first.
            target_logits, filters = _filtered(target_logits, sampling), {}
            if draft.logits is not None:
                draft_logits = _filtered(draft.logits, sampling)
                return verify_sigmoid(target_logits, draft.tokens, draft_logits, *uniforms, temperature=temperature)
        arguments = (target_logits, draft.tokens, draft.logits, *uniforms, temperature, draft.lse)
        if self.op == "block":
            return verify_block(*arguments, **filters)
        return verify_exact(*arguments, self.lenience, **filters, argmax_lenience=self.argmax_lenience)


def log_probabilities(target_logits: Tensor, tokens: Tensor, sampling: SamplingTensors, logprobs: str) -> Tensor:
    """[B, n] float32, the log-probability of each token under its row of logits; undefined for a token of -1.

    Args:
        target_logits: [B, n, V]; for "processed", after the processors.
        tokens: [B, n] int64.
        sampling: temperature and filters of each row.
        logprobs: "raw" = of the softmax of the logits as they come; "processed" = with temperature and filters.
    """
    temperature = torch.ones_like(sampling.temperature)
    if logprobs == "processed":
        target_logits = _filtered(target_logits, sampling)
        temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # As the ops read logits: NaN masks a token, and infinity is the largest float32.
    largest = torch.finfo(torch.float32).max
    z = (target_logits.float() / temperature.view(-1, 1, 1)).nan_to_num(-math.inf, largest, -math.inf)
    found = z.gather(2, tokens.clamp(min=0).unsqueeze(2)).squeeze(2) - z.logsumexp(2)
    return torch.where((sampling.temperature == 0).unsqueeze(1), 0.0, found) if logprobs == "processed" else found


def _filtered(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """[B, n, V] logits, with -inf for what top-k, top-p and min-p of each row remove."""
    if not sampling.filters:
        return logits
    num_logits = logits.shape[1]
    filters = {name: values.repeat_interleave(num_logits) for name, values in sampling.filters.items()}
    temperature = sampling.temperature.repeat_interleave(num_logits)
    return filter_logits(logits.flatten(0, 1), temperature, **filters).unflatten(0, logits.shape[:2])
