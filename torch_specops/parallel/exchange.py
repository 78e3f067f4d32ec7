"""What the ranks tell each other, and what follows from it. The same numbers go through the same arithmetic on every
rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..dense.rows import FLOAT32_MAX, draw
from .shards import Shards

__all__ = ["all_gather", "check_agreement", "exchange", "merge_argmax", "merge_stats", "shard_of"]


def all_gather(x: Tensor, shards: Shards) -> Tensor:
    """[...] -> [R, ...] by one functional collective, which eager calls run and the compiler traces."""
    num_ranks = len(shards.sizes)
    collectives = torch.ops._c10d_functional
    gathered = collectives.all_gather_into_tensor(x.contiguous(), num_ranks, shards.group.group_name)
    return collectives.wait_tensor(gathered).view(num_ranks, *x.shape)


def exchange(own: dict[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    """What every rank sends under each name: [B, k] -> [R, B, k] in float64, by one all-gather."""
    widths = [numbers.shape[1] for numbers in own.values()]
    every = all_gather(torch.cat([numbers.double() for numbers in own.values()], 1), shards)
    return dict(zip(own, every.split(widths, 2), strict=True))


def merge_stats(z_max: Tensor, z_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[R, ...] maxima and sums of exp(z - maximum), float64 -> the maximum over all shards [...], and relative to it
    the sum [...] and each shard's part of it [R, ...]."""
    top = z_max.amax(0)
    parts = z_sum * torch.exp(z_max - top.clamp(min=-FLOAT32_MAX))
    return top, parts.sum(0), parts


def merge_argmax(z_max: Tensor, index: Tensor) -> Tensor:
    """[R, ...] maxima and the index of each shard's own, float64 -> the lowest index of the maximum over all shards,
    -1 without a finite entry."""
    top = z_max.amax(0)
    lowest = torch.where(z_max == top, index, torch.inf).amin(0)
    return torch.where(top > -torch.inf, lowest, -1.0).long()


def shard_of(mass: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """[R, N] masses of the shards, [N] uniforms -> [N] the shard that the inverse CDF ends in (-1 without any mass),
    and the uniform number for the draw inside it."""
    shard = draw(mass.transpose(0, 1), uniforms)
    cdf = mass.cumsum(0)
    index = shard.clamp(min=0).unsqueeze(0)
    own = mass.gather(0, index).squeeze(0)
    before = cdf.gather(0, index).squeeze(0) - own
    within = (uniforms.double() * cdf[-1] - before) / torch.where(own > 0, own, 1.0)
    return shard, within.clamp(0.0, 1.0)


def check_agreement(shards: Shards, arguments: Mapping[str, Any]) -> None:
    """Compare arguments that must be the same on every rank (of logits the shape but for the columns), and raise on all
    ranks alike."""
    if torch.compiler.is_compiling():
        raise ValueError("check_ranks: expected False in a compiled call, for it reads data; got True")
    own = {"shard_sizes": str(shards.sizes)} | {name: _digest(name, value) for name, value in arguments.items()}
    gathered: list[dict[str, str]] = [{}] * len(shards.sizes)
    dist.all_gather_object(gathered, own, group=shards.group)
    # Every rank walks over rank 0's names, so that all raise for the same argument.
    for name, expected in gathered[0].items():
        differing = [rank for rank, other in enumerate(gathered) if other.get(name) != expected]
        if differing:
            raise ValueError(f"{name}: expected the same on every rank, got another value on ranks {differing}")


def _digest(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if name.endswith("logits"):
        return str(list(value.shape[:-1]))
    data = bytes(value.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())
    return f"{list(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()}"
