"""Log-probabilities of tokens, before or after processors, temperature and filters."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import filter_logits
from .parameters import SamplingTensors


class LogProbabilities(NamedTuple):
    """Log-probabilities of emitted tokens, and the most likely tokens at their positions."""

    of_tokens: Tensor  # [B, n] float32, undefined where the token is -1
    top_tokens: Tensor  # [B, n, N] int64, most likely first, the lower index first among equals
    top_values: Tensor  # [B, n, N] float32, -inf for excluded tokens


def log_probabilities(
    target_logits: Tensor, tokens: Tensor, sampling: SamplingTensors, logprobs: str, num_top: int = 0
) -> LogProbabilities:
    """The log-probability of each token under its row of logits.

    Args:
        target_logits: [B, n, V]; for "processed", after the processors.
        tokens: [B, n] int64.
        sampling: temperature and filters of each row.
        logprobs: "raw" = under the softmax of `target_logits`; "processed" = after temperature and filters.
        num_top: N <= V, the number of most likely tokens to return.
    """
    temperature = torch.ones_like(sampling.temperature)
    if logprobs == "processed":
        target_logits = filtered(target_logits, sampling)
        temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    z = _without_nan(target_logits.float() / temperature.view(-1, 1, 1))
    lse = _logsumexp(z)
    of_tokens = (z.gather(2, tokens.clamp(min=0).unsqueeze(2)) - lse).squeeze(2)
    top_tokens = _most_likely(z, num_top)
    top_values = z.gather(2, top_tokens) - lse
    if logprobs == "processed":
        is_greedy = (sampling.temperature == 0).unsqueeze(1)
        of_tokens = torch.where(is_greedy, 0.0, of_tokens)
        # The distribution of a greedy row is one-hot: its most likely token has log-probability 0, all others have
        # -inf.
        is_first = torch.arange(num_top, device=z.device) == 0
        one_hot = torch.where(is_first, 0.0, -math.inf).to(z.dtype)
        top_values = torch.where(is_greedy.unsqueeze(2), one_hot, top_values)
    return LogProbabilities(of_tokens, top_tokens, top_values)


def raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens under the softmax of logits: the bits of `output.logprobs` with
    `logprobs="raw"`, if the logits have the bits that the loop had.

    `torch.log_softmax` rounds otherwise.

    Args:
        logits: [..., V] float32, bfloat16 or float16.
        tokens: [...] int64 in [0, V).

    Returns:
        [...] float32, with gradients for the logits.

    Raises:
        ValueError: shapes do not fit.

    Examples:
        >>> import torch, torch_specops
        >>> torch_specops.raw_logprobs(torch.tensor([[0.0, 0.0], [3.0, 3.0]]), torch.tensor([0, 1]))
        tensor([-0.6931, -0.6931])
    """
    if logits.shape[:-1] != tokens.shape or logits.dim() == 0:
        raise ValueError(
            f"tokens: expected {list(logits.shape[:-1])}, as the logits have rows, got {list(tokens.shape)}"
        )
    z = _without_nan(logits.float())
    return (z.gather(-1, tokens.unsqueeze(-1)) - _logsumexp(z)).squeeze(-1)


def _logsumexp(z: Tensor) -> Tensor:
    """[..., V] -> [..., 1]. The bits of a row do not depend on the other rows."""
    if z.is_cpu and z.shape[:-1].numel() == 1:
        # Several threads would share the sum of a single long row, and add in another order.
        rows = z.reshape(1, -1).expand(2, -1)
        return rows.logsumexp(1, keepdim=True)[0].view(*z.shape[:-1], 1)
    return z.logsumexp(-1, keepdim=True)


def _without_nan(z: Tensor) -> Tensor:
    """Treat logits as the ops do: NaN masks a token, and infinity becomes the largest float32."""
    return z.nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)


def _most_likely(z: Tensor, count: int) -> Tensor:
    """The tokens with the `count` largest entries of z, [B, n, count] int64, in descending order; the lower index comes
    first among equal entries. z is [B, n, V] float32 without NaN. `topk` does not order equal entries, so each entry
    gets a unique int64 key: the upper 32 bits hold its value, and the lower 32 bits its index."""
    if count == 0:
        return z.new_zeros(*z.shape[:2], 0, dtype=torch.int64)
    bits = (z + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = torch.arange(z.shape[2], device=z.device)
    return (ordered * 2**32 + (2**32 - 1 - index)).topk(count, 2).indices


def filtered(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Logits [B, n, V], -inf for the tokens that each row's top-k, top-p and min-p remove."""
    if not sampling.filters:
        return logits
    num_logits = logits.shape[1]
    filters = {name: values.repeat_interleave(num_logits) for name, values in sampling.filters.items()}
    temperature = sampling.temperature.repeat_interleave(num_logits)
    return filter_logits(logits.flatten(0, 1), temperature, **filters).unflatten(0, logits.shape[:2])
