"""`sample` on sharded logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import checks
from ..arguments import Filters
from ..dense.rows import FLOAT32_MAX, draw, inverse_temperature, lowest_argmax, scale, softmax_stats
from .exchange import all_gather, check_agreement, merge_argmax, merge_stats, shard_of
from .shards import Shards, columns, place, replicated


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | float | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    shard_sizes: Sequence[int] | None = None,
    check_ranks: bool = False,
) -> tuple[Tensor, Tensor]:
    """`torch_specops.sample` where every rank holds some columns of the logits: the same law, the same tokens.

    It makes two all-gathers of a few numbers per row. Ranks must call it as `torch_specops.parallel.verify_exact`.

    Args:
        logits: [N, V_r], the columns of this rank; or a DTensor [N, V] with placement Shard(-1) or Replicate().
        uniforms: [N], as in the op; equal on all ranks.
        temperature: [N] or a number, as in the op; equal on all ranks.
        group, shard_sizes, check_ranks: as in `torch_specops.parallel.verify_exact`.

    Returns:
        tokens [N] int64 and lse [N] float32, as the op returns them, bitwise equal on all ranks.

    Raises:
        TypeError, ValueError: as `torch_specops.parallel.verify_exact`.

    Example:
        >>> import os, tempfile, torch, torch_specops.parallel
        >>> store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 5.0, 2.0]])
        >>> torch_specops.parallel.sample(logits, torch.tensor([0.75, 0.5]), torch.tensor([1.0, 0.0]))
        (tensor([1, 1]), tensor([0.6931, 0.0000]))
        >>> torch.distributed.destroy_process_group()
    """
    filters = checks.filters_of("logits", logits, temperature, plain=False)
    checks.check_tensor("uniforms", uniforms, plain=False)
    checks.check_kinds(filters, plain=False)
    shards, (local,) = place(group, shard_sizes, [columns("logits", logits, 2)])
    uniforms, filters = replicated("uniforms", uniforms), Filters(replicated("temperature", filters.temperature))
    checks.check_sample(local, uniforms, filters)
    if check_ranks:
        check_agreement(shards, {"logits": local, "uniforms": uniforms, "temperature": filters.temperature})
    return _sample(local, uniforms, filters.temperature, shards)


def _sample(logits: Tensor, uniforms: Tensor, temperature: Tensor | None, shards: Shards) -> tuple[Tensor, Tensor]:
    if logits.shape[0] == 0:
        return uniforms.new_zeros(0, dtype=torch.int64), uniforms.new_zeros(0, dtype=torch.float32)
    z = scale(logits, inverse_temperature(temperature))
    z_max, z_sum = softmax_stats(z)
    own = [z_max, z_sum]
    if temperature is not None:
        own.append(lowest_argmax(z, z_max) + shards.offset)
    every = all_gather(torch.stack([number.double() for number in own]), shards).unbind(1)
    top, total, parts = merge_stats(every[0], every[1])
    shard, within = shard_of(parts, uniforms)

    # Relative to the shard's own maximum, no weight that matters vanishes.
    weights = torch.exp(z - z_max.clamp(min=-FLOAT32_MAX).unsqueeze(-1))
    drawn = torch.where(shard == shards.rank, draw(weights, within) + shards.offset, -1)
    last = all_gather(torch.stack([drawn.double(), top + total.log()]), shards)
    tokens, lse = last[:, 0].amax(0).long(), last[0, 1].float()
    if temperature is None:
        return tokens, lse
    has_law = (top > -torch.inf) & (temperature >= 0)
    greedy = temperature == 0
    tokens = torch.where(has_law, torch.where(greedy, merge_argmax(every[0], every[2]), tokens), -1)
    return tokens, torch.where(has_law, torch.where(greedy, 0.0, lse), -torch.inf)
