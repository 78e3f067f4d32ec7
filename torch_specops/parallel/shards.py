"""How the columns of the logits are split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad


def shard_sizes(vocab_size: int, num_ranks: int) -> tuple[int, ...]:
    """How DTensor (and torch.chunk) split a vocabulary: ceil(V / R) columns a rank until none are left.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> from torch_specops.parallel import shard_sizes
        >>> shard_sizes(50257, 4), shard_sizes(5, 4)
        ((12565, 12565, 12565, 12562), (2, 2, 1, 0))
    """
    if vocab_size < 1 or num_ranks < 1:
        raise ValueError(f"vocab_size, num_ranks: expected numbers above 0, got {vocab_size}, {num_ranks}")
    full = -(-vocab_size // num_ranks)
    return tuple(min(full, max(vocab_size - rank * full, 0)) for rank in range(num_ranks))


class Shards(NamedTuple):
    """A vocabulary split over the ranks of a group, in rank order."""

    group: ProcessGroup
    sizes: tuple[int, ...]
    rank: int

    @property
    def vocab_size(self) -> int:
        return sum(self.sizes)

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def offset(self) -> int:
        return sum(self.sizes[: self.rank])


class Columns(NamedTuple):
    """The logits that a rank was given: its name, the local columns, and what a DTensor says of the others."""

    name: str
    local: Tensor
    is_sharded: bool | None = None
    vocab_size: int | None = None
    group: ProcessGroup | None = None


def columns(name: str, logits: Tensor, rank: int) -> Columns:
    if logits.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimensions, got shape {list(logits.shape)}")
    if not isinstance(logits, DTensor):
        return Columns(name, logits.detach())
    sharded = []
    for i, placement in enumerate(logits.placements):
        if type(placement) is Shard and placement.dim in (-1, rank - 1):
            sharded.append(i)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{name}: expected placements Shard(-1) or Replicate(), got {placement}")
    if len(sharded) > 1:
        raise ValueError(f"{name}: expected Shard(-1) on one dimension of the mesh, got {logits.placements}")
    mesh = logits.device_mesh
    group = mesh.get_group(sharded[0]) if sharded else mesh.get_group() if mesh.ndim == 1 else None
    return Columns(name, logits.to_local().detach(), bool(sharded), logits.shape[-1], group)


def place(
    group: ProcessGroup | DeviceMesh | None, sizes: Sequence[int] | None, logits: Sequence[Columns]
) -> tuple[Shards, list[Tensor]]:
    """The split, and this rank's columns of all logits: cut out if a rank has them whole, and padded to at least one
    column (-inf). The first of the logits, if a plain tensor, are a shard."""
    found = _group(group, logits)
    num_ranks, rank = found.size(), found.rank()
    local_size = logits[0].local.shape[-1]
    vocab_sizes = [each.vocab_size for each in logits if each.vocab_size is not None]
    if sizes is not None:
        split = tuple(sizes)
        if len(split) != num_ranks or any(size < 0 for size in split) or sum(split) < 1:
            raise ValueError(f"shard_sizes: expected {num_ranks} numbers of columns, one a rank, got {list(split)}")
    else:
        split = shard_sizes(vocab_sizes[0], num_ranks) if vocab_sizes else (local_size,) * num_ranks
    shards = Shards(found, split, rank)
    for each in logits:
        if each.vocab_size not in (None, shards.vocab_size):
            raise ValueError(
                f"{each.name}: expected a vocabulary of {shards.vocab_size}, as the shards have, got {each.vocab_size}"
            )
    return shards, [_cut(each, shards, may_be_whole=i > 0) for i, each in enumerate(logits)]


def _group(group: ProcessGroup | DeviceMesh | None, logits: Sequence[Columns]) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, got {group.ndim}; take one by mesh['name']")
        group = group.get_group()
    elif group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group)}")
    for each in logits:
        if each.group is None:
            continue
        if group is not None and group.group_name != each.group.group_name:
            raise ValueError(f"{each.name}: expected a DTensor sharded over the group of the call, got another mesh")
        group = each.group
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group: expected a ProcessGroup or a DeviceMesh, or an initialised default group")
        group = dist.group.WORLD
    assert group is not None
    return group


def _cut(logits: Columns, shards: Shards, may_be_whole: bool) -> Tensor:
    local, width = logits.local, logits.local.shape[-1]
    if width == shards.vocab_size and (may_be_whole if logits.is_sharded is None else not logits.is_sharded):
        local = local.narrow(-1, shards.offset, shards.size)
    elif width != shards.size:
        whole = f" or {shards.vocab_size}, the whole vocabulary" if may_be_whole else ""
        raise ValueError(
            f"{logits.name}: expected {shards.size} columns, the shard of rank {shards.rank} of {list(shards.sizes)}"
            f"{whole}, got shape {list(local.shape)}"
        )
    return local if shards.size > 0 else pad(local, (0, 1), value=float("-inf"))


def replicated(name: str, value: Any) -> Any:
    """An argument that every rank has whole; of a DTensor the local tensor."""
    if not isinstance(value, DTensor):
        return value
    if not all(isinstance(placement, Replicate) for placement in value.placements):
        raise ValueError(f"{name}: expected placements Replicate(), got {value.placements}")
    return value.to_local()
