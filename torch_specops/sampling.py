"""Sampling parameters: what a user says once, and what the ops take for each row of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["SamplingParams", "SamplingTensors"]

# Fields of a transformers `GenerationConfig` that decide the law of the text and have no counterpart here, with the
# value besides None that changes nothing.
_ALWAYS_READ: dict[str, Any] = {
    "assistant_ensemble_weight": 1.0,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "repetition_penalty": 1.0,
    "sequence_bias": None,
    "suppress_tokens": None,
    "token_healing": False,
    "watermarking_config": None,
}
# Those that greedy decoding does not read.
_READ_IF_SAMPLED: dict[str, Any] = {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "typical_p": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """How a decoding loop turns the target's logits into a distribution; each field a number, or one per sequence.

    Args:
        temperature: >= 0; 0 = greedy.
        top_k: keep the k most likely tokens, and those that tie with the k-th; 0 = all.
        top_p: in (0, 1]: of these, keep the smallest set of most likely tokens whose probability is >= top_p; 1 = all.
        min_p: in [0, 1]: keep tokens of probability >= min_p times the largest; 0 = all.

    Raises:
        TypeError: a field that is neither a number nor a sequence of numbers; a top_k of floats.
        ValueError: a temperature that is negative or not finite, in float32 too; a filter out of range.

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

    @classmethod
    def from_generation_config(cls, config: Any) -> SamplingParams:
        """What transformers' `generate` does with a `GenerationConfig`: do_sample, temperature, top_k, top_p and min_p.

        Without `do_sample` that is greedy decoding. Where the config has None, transformers' own defaults count: a
        temperature of 1 and a top_k of 50. Lengths, stop strings and special tokens are arguments of the loop.

        Args:
            config: `model.generation_config`, or another one.

        Raises:
            TypeError: no `GenerationConfig`.
            ValueError: fields that change the law of the text in other ways, by name; a value out of range.

        Example:
            >>> import transformers, torch_specops
            >>> config = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8, top_k=20)
            >>> torch_specops.SamplingParams.from_generation_config(config)
            SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.0)
        """
        if not hasattr(config, "do_sample"):
            raise TypeError(f"config: expected a GenerationConfig of transformers, got {type(config)}")
        read = _ALWAYS_READ | (_READ_IF_SAMPLED if config.do_sample else {})
        values = {name: getattr(config, name, None) for name in read}
        others = [f"{name} = {value!r}" for name, value in values.items() if value not in (None, [], read[name])]
        if others:
            raise ValueError(f"config: SamplingParams has no {', no '.join(others)}")
        if not config.do_sample:
            return cls(temperature=0.0)
        defaults: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
        given = {name: getattr(config, name, None) for name in defaults}
        return cls(**{name: defaults[name] if value is None else value for name, value in given.items()})

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
