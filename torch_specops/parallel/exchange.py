"""The exchanges between ranks, and what follows from them: every rank does the same arithmetic on the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .. import private
from ..dense.rows import FLOAT32_MAX, draw
from .shards import Shards


def all_gather(x: Tensor, shards: Shards) -> Tensor:
    """[...] -> [R, ...] by one functional collective, which eager calls run and the compiler traces."""
    num_ranks = len(shards.sizes)
    return private.all_gather(x.contiguous(), num_ranks, shards.group).view(num_ranks, *x.shape)


def exchange(own: dict[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    """All-gathers the values of each name, [B, k] -> [R, B, k] in float64, in one exchange."""
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
    """[R, N] masses of the shards, [N] uniforms -> [N] the shard that the inverse CDF selects (-1 without any mass),
    and the uniform number for the draw within it."""
    shard = draw(mass.transpose(0, 1), uniforms)
    cdf = mass.cumsum(0)
    index = shard.clamp(min=0).unsqueeze(0)
    own = mass.gather(0, index).squeeze(0)
    before = cdf.gather(0, index).squeeze(0) - own
    within = (uniforms.double() * cdf[-1] - before) / torch.where(own > 0, own, 1.0)
    return shard, within.clamp(0.0, 1.0)


def check_agreement(shards: Shards, arguments: Mapping[str, Any]) -> None:
    """Compare arguments that must be the same on every rank (for logits, the shape except for the columns), and raise
    the same error on all ranks."""
    if torch.compiler.is_compiling():
        raise ValueError("check_ranks: expected False in a compiled call, because it reads data; got True")
    own = {"shard_sizes": str(shards.sizes)} | {name: _description(name, value) for name, value in arguments.items()}
    gathered: list[dict[str, str]] = [{}] * len(shards.sizes)
    dist.all_gather_object(gathered, own, group=shards.group)
    # Every rank goes through rank 0's names, so that all raise for the same argument.
    for name, expected in gathered[0].items():
        differing = [rank for rank, other in enumerate(gathered) if other.get(name) != expected]
        if differing:
            raise ValueError(f"{name}: expected the same on every rank, got another value on ranks {differing}")


def _description(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if name.endswith("logits"):
        return str(list(value.shape[:-1]))
    return f"{list(value.shape)} {value.dtype} {value.tolist()}"


def wire_bytes(
    batch: int,
    num_draft_tokens: int,
    num_ranks: int,
    draft: Literal["logits", "lse", "one_hot"] = "logits",
    temperature: bool = True,
) -> int:
    """Bytes that each rank receives in one call of `torch_specops.parallel.verify_exact`.

    Every rank sends 8 B c bytes to each other rank, c numbers of 8 bytes per sequence, and receives 8 B c (R - 1):

    | exchange | numbers per sequence |
    | --- | --- |
    | 1 | 3 K + 2, and with a `temperature` K + 1; K with `draft_lse`, 3 K without it, 0 for one-hot drafts |
    | 2 | 3 (1 where K = 0) |
    | 3 | 2 |

    An all-gather of the logits would bring each rank B (K + 1) (V - V_r) of the target's and B K (V - V_r) of the
    draft's.

    Args:
        batch: B.
        num_draft_tokens: K.
        num_ranks: R.
        draft: "logits" (also if every rank has them whole), "lse" if `draft_lse` is given too, "one_hot" for None.
        temperature: whether a temperature is given.

    Raises:
        ValueError: another draft, or a number out of range.

    Example:
        >>> from torch_specops.parallel import wire_bytes
        >>> wire_bytes(1, 5, 4)
        1032
    """
    per_draft = {"logits": 3, "lse": 1, "one_hot": 0}
    if draft not in per_draft:
        raise ValueError(f"draft: expected one of {', '.join(per_draft)}, got {draft!r}")
    if batch < 0 or num_draft_tokens < 0 or num_ranks < 1:
        raise ValueError(
            "batch, num_draft_tokens, num_ranks: expected at least 0, 0 and 1, "
            f"got {batch}, {num_draft_tokens}, {num_ranks}"
        )
    k = num_draft_tokens
    first = 3 * k + 2 + (k + 1 if temperature else 0) + per_draft[draft] * k
    second = 3 if k > 0 else 1
    return 8 * batch * (first + second + 2) * (num_ranks - 1)
