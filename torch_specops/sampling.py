"""Sampling parameters, and the draft's sampler: the one whose law `verify_exact` expects."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from . import checks, ops

__all__ = ["SamplingParams", "sample"]


def sample(logits: Tensor, uniforms: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw one token per row of softmax(logits / T) by inverse CDF, and return the row's logsumexp.

    Sampling the draft with this op and passing the same logits and the returned `lse` to `verify_exact` keeps q the
    distribution that was really sampled from (Leviathan et al. 2023, Algorithm 1, the draws from M_q).

    Args:
        logits: [N, V] float32, bfloat16 or float16; any strides. -inf masks a token, NaN counts as -inf, +inf as the
            largest float32.
        uniforms: [N] float32 or float64 in [0, 1).
        temperature: [N] float32 >= 0; None = 1, 0 = argmax (lowest index of the maximum).

    Returns:
        tokens [N] int64: the smallest v with sum_{j <= v} w_j > uniform * sum(w), never one of weight zero; -1 for a
        row with no finite entry, or of a negative or NaN temperature.
        lse [N] float32: logsumexp(logits / T); 0 for a greedy row, -inf where the token is -1.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: a shape that does not fit, or another device.

    Example:
        >>> import torch, torch_specops
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 5.0, 2.0]])
        >>> torch_specops.sample(logits, torch.tensor([0.75, 0.5]), temperature=torch.tensor([1.0, 0.0]))
        (tensor([1, 1]), tensor([0.6931, 0.0000]))
    """
    checks.check_tensors(logits=logits, uniforms=uniforms)
    checks.check_optional_tensors(temperature=temperature)
    return ops.sample(logits, uniforms, temperature)


@dataclass(frozen=True)
class SamplingParams:
    """How a decoding loop turns the target's logits into its law; each field a number, or one per sequence.

    Args:
        temperature: >= 0; 0 = greedy.
        top_k: keep the k likeliest tokens; 0 = all. Only the default is implemented.
        top_p: keep the smallest set of mass >= top_p; 1 = all. Only the default is implemented.
        min_p: keep tokens of probability >= min_p * max; 0 = all. Only the default is implemented.

    Raises:
        TypeError: a field that is no number and no sequence of numbers.
        ValueError: a temperature that is negative, not finite, or either of these in float32.
        NotImplementedError: a filter other than its default, by name.

    Example:
        >>> import torch_specops
        >>> torch_specops.SamplingParams(temperature=[0.0, 0.7]).temperatures(batch=2)
        tensor([0.0000, 0.7000])
    """

    temperature: float | list[float] | Tensor = 1.0
    top_k: int | list[int] | Tensor = 0
    top_p: float | list[float] | Tensor = 1.0
    min_p: float | list[float] | Tensor = 0.0

    def __post_init__(self) -> None:
        values = {field.name: _as_tensor(field.name, getattr(self, field.name)) for field in fields(self)}
        temperature = values.pop("temperature")
        used = temperature.float()
        if not bool(((used >= 0) & (used < math.inf) & ((used > 0) | (temperature == 0))).all()):
            raise ValueError(f"temperature: expected finite numbers >= 0, got {self.temperature}")
        defaults = {"top_k": 0, "top_p": 1, "min_p": 0}
        for name, value in values.items():
            if not bool((value == defaults[name]).all()):
                raise NotImplementedError(
                    f"{name}: this version samples the whole vocabulary; expected {defaults[name]}, "
                    f"got {getattr(self, name)}"
                )

    def temperatures(self, batch: int, device: torch.device | str = "cpu") -> Tensor:
        """[batch] float32, one temperature per sequence."""
        temperature = _as_tensor("temperature", self.temperature).to(device=device, dtype=torch.float32)
        if temperature.dim() == 0:
            return temperature.expand(batch).contiguous()
        if temperature.shape != (batch,):
            raise ValueError(f"temperature: expected one number or {batch}, got shape {list(temperature.shape)}")
        return temperature


def _as_tensor(name: str, value: float | list[float] | Tensor) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
        if not isinstance(value, Tensor) and tensor.is_floating_point():
            # As float32, the default, a number could overflow or vanish before it is judged.
            tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number or one per sequence, got {value!r}") from error
    if tensor.dtype == torch.bool or tensor.is_complex() or tensor.dim() > 1:
        raise TypeError(f"{name}: expected a number or one per sequence, got {value!r}")
    return tensor
