"""Sampling parameters, the filters, and the draft's sampler: the one whose law `verify_exact` expects."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from . import checks, ops

__all__ = ["SamplingParams", "SamplingTensors", "filter_logits", "sample"]


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of softmax(logits / T) by inverse CDF, and return the row's logsumexp.

    Sampling the draft with this op and passing the same logits, the same filters and the returned `lse` to
    `verify_exact` keeps q the distribution that was really sampled from (Leviathan et al. 2023, Algorithm 1, the draws
    from M_q). With filters, softmax and logsumexp are those of the tokens that `filter_logits` keeps; no filtered copy
    is written.

    Args:
        logits: [N, V] float32, bfloat16 or float16; any strides. -inf masks a token, NaN counts as -inf, +inf as the
            largest float32.
        uniforms: [N] float32 or float64 in [0, 1).
        temperature: [N] float32 >= 0; None = 1, 0 = argmax (lowest index of the maximum).
        top_k: [N] int64 or int32, as in `filter_logits`.
        top_p: [N] float32, as in `filter_logits`.
        min_p: [N] float32, as in `filter_logits`.

    Returns:
        tokens [N] int64: the smallest v with sum_{j <= v} w_j > uniform * sum(w), never one of weight zero; -1 for a
        row with no finite entry, or of a negative or NaN temperature, or a NaN top_p or min_p.
        lse [N] float32: logsumexp(logits / T) of what was kept; 0 for a greedy row, -inf where the token is -1.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: a shape that does not fit, or another device.

    Example:
        >>> import torch, torch_specops
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 5.0, 2.0]])
        >>> torch_specops.sample(logits, torch.tensor([0.75, 0.5]), temperature=torch.tensor([1.0, 0.0]))
        (tensor([1, 1]), tensor([0.6931, 0.0000]))
    """
    checks.check_plain_tensors(logits=logits, uniforms=uniforms)
    checks.check_optional_plain_tensors(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return ops.sample(logits, uniforms, temperature, top_k, top_p, min_p)


def filter_logits(
    logits: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Mask what top-k, top-p and min-p remove, in this order, each with its own value per row.

    These are the filters of transformers' `generate`, ties included; `sample` and `verify_exact` take them as arguments
    and write no filtered copy, so this op is for other samplers, and for a filter on one of the two models alone. The
    law is in docs/math.md, section 15.

    Args:
        logits: [N, V] float32, bfloat16 or float16; any strides.
        temperature: [N] float32 >= 0; None = 1. It changes what top_p and min_p keep; the logits stay undivided.
            Greedy rows (0) keep every token.
        top_k: [N] int64 or int32: keep the k largest logits and all that equal the k-th; <= 0 or >= V keeps all.
        top_p: [N] float32: of what top_k kept, keep each token before which less than top_p of the probability comes,
            in descending order, of equal logits the higher index first; >= 1 keeps all, <= 0 the first alone.
        min_p: [N] float32: keep tokens of at least min_p times the largest probability; <= 0 keeps all, >= 1 the
            maxima.

    Returns:
        [N, V] in the dtype of the logits: -inf where a token was removed or was NaN, else the logit as it came. A
        negative or NaN temperature, or a NaN top_p or min_p, is no law and removes the whole row.

    Raises:
        TypeError: an argument that is no tensor, or of another dtype.
        ValueError: a shape that does not fit, or another device.

    Example:
        >>> import torch, torch_specops
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 2.0], [1.0, 3.0, 2.0, 2.0]])
        >>> torch_specops.filter_logits(logits, top_k=torch.tensor([2, 0]), top_p=torch.tensor([1.0, 0.7]))
        tensor([[-inf, 3., 2., 2.],
                [-inf, 3., -inf, 2.]])
    """
    checks.check_plain_tensors(logits=logits)
    checks.check_optional_plain_tensors(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return ops.filter_logits(logits, temperature, top_k, top_p, min_p)


@dataclass(frozen=True)
class SamplingParams:
    """How a decoding loop turns the target's logits into its law; each field a number, or one per sequence.

    Args:
        temperature: >= 0; 0 = greedy.
        top_k: keep the k likeliest tokens, and what ties with the k-th; 0 = all.
        top_p: in (0, 1]: of what is left, keep the fewest likeliest tokens of mass >= top_p; 1 = all.
        min_p: in [0, 1]: keep tokens of probability >= min_p times the largest; 0 = all.

    Raises:
        TypeError: a field that is no number and no sequence of numbers, a top_k of floats.
        ValueError: a temperature that is negative, not finite, or either of these in float32; a filter out of range.

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
        top_k, top_p, min_p = values["top_k"], values["top_p"], values["min_p"]
        if top_k.is_floating_point():
            raise TypeError(f"top_k: expected an integer or one per sequence, got {self.top_k!r}")
        if not bool((top_k >= 0).all()):
            raise ValueError(f"top_k: expected integers >= 0, got {self.top_k}")
        if not bool(((top_p > 0) & (top_p <= 1)).all()):
            raise ValueError(f"top_p: expected numbers in (0, 1], got {self.top_p}")
        if not bool(((min_p >= 0) & (min_p <= 1)).all()):
            raise ValueError(f"min_p: expected numbers in [0, 1], got {self.min_p}")

    def temperatures(self, batch: int, device: torch.device | str = "cpu") -> Tensor:
        """[batch] float32, one temperature per sequence."""
        return _per_sequence("temperature", self.temperature, torch.float32, batch, device)

    def top_ks(self, batch: int, device: torch.device | str = "cpu") -> Tensor | None:
        """[batch] int64, one top_k per sequence; None if none filters."""
        values = _per_sequence("top_k", self.top_k, torch.int64, batch, device)
        return values if bool((_as_tensor("top_k", self.top_k) > 0).any()) else None

    def top_ps(self, batch: int, device: torch.device | str = "cpu") -> Tensor | None:
        """[batch] float32, one top_p per sequence; None if none filters."""
        values = _per_sequence("top_p", self.top_p, torch.float32, batch, device)
        return values if bool((_as_tensor("top_p", self.top_p) < 1).any()) else None

    def min_ps(self, batch: int, device: torch.device | str = "cpu") -> Tensor | None:
        """[batch] float32, one min_p per sequence; None if none filters."""
        values = _per_sequence("min_p", self.min_p, torch.float32, batch, device)
        return values if bool((_as_tensor("min_p", self.min_p) > 0).any()) else None

    def tensors(self, batch: int, device: torch.device | str = "cpu") -> SamplingTensors:
        """What the ops take for a batch of this size."""
        filters = (self.top_ks(batch, device), self.top_ps(batch, device), self.min_ps(batch, device))
        return SamplingTensors(self.temperatures(batch, device), *filters)


@dataclass(frozen=True)
class SamplingTensors:
    """`SamplingParams` of a batch as the ops take them, on its device. A filter that no row uses is None.

    Args:
        temperature: [B] float32, >= 0; 0 = greedy.
        top_k: [B] int64, or None.
        top_p: [B] float32, or None.
        min_p: [B] float32, or None.
    """

    temperature: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None

    @property
    def filters(self) -> dict[str, Any]:
        """Those of top_k, top_p and min_p that some row uses, by the names the ops give them."""
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in filters.items() if value is not None}


def _per_sequence(
    name: str,
    value: float | list[float] | list[int] | Tensor,
    dtype: torch.dtype,
    batch: int,
    device: torch.device | str,
) -> Tensor:
    values = _as_tensor(name, value).to(device=device, dtype=dtype)
    if values.dim() == 0:
        return values.expand(batch).contiguous()
    if values.shape != (batch,):
        raise ValueError(f"{name}: expected one number or {batch}, got shape {list(values.shape)}")
    return values


def _as_tensor(name: str, value: float | list[float] | list[int] | Tensor) -> Tensor:
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
