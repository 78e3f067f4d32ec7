"""Verification and sampling for logits that are sharded over the vocabulary, as tensor-parallel heads produce them.

Each rank of a process group holds some columns of the logits, and does not send them to other ranks. A call makes a
fixed number of all-gathers of a few numbers per row: three in `verify_exact` and two in `sample` (docs/design.md lists
what they contain). All other arguments (draft tokens, uniforms, temperature, draft_lse) must be equal on all ranks. The
functions can be compiled with `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

from .checks import check_int, check_tensor
from .ops import private
from .ops.arguments import Filters, VerifyArguments, check_kinds, check_sample, check_verify_exact, filters_of
from .ops.cpu import walk
from .ops.cpu.softmax import FLOAT32_MAX, draw, inverse_temperature, lowest_argmax, scale, softmax_row, softmax_stats

__all__ = ["sample", "verify_exact"]


def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | float | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    *,
    argmax_lenience: float = 1.0,
    draft_is_one_hot: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch_specops.verify_exact` for logits whose columns are split over ranks.

    The tokens are the same as those of the op for the whole logits, except where float32 rounding decides; in greedy
    rows they are always the same. Every rank gets the same tokens. Every rank of the group must call the function, with
    its columns of the logits and with otherwise equal arguments; this is not checked.

    Args:
        target_logits: one of three forms. [B, K+1, V_r]: the columns of this rank, which follow the columns of the
            previous rank. [B, K+1, V]: whole logits, equal on every rank. Or a DTensor with placements Shard(-1) and
            Replicate(). Columns are split as in DTensor and `torch.chunk`: each of the R ranks has V_r = ceil(V / R)
            columns until none are left. Dtypes and special values are as in the op.
        draft_tokens: [B, K], tokens of the whole vocabulary, as in the op; equal on all ranks.
        draft_logits: [B, K, V_r] or [B, K, V], in one of the forms of `target_logits`. None = deterministic drafts.
        accept_uniforms, sample_uniforms, temperature: [B, K], [B], [B] or a number, as in the op; equal on all ranks
            (computed from one seed, or sent by one rank).
        draft_lse: [B, K], the logsumexp over the whole vocabulary that `torch_specops.sample` or
            `torch_specops.vocab_parallel.sample` returned.
        lenience, argmax_lenience, draft_is_one_hot: as in the op; equal on all ranks. The op's filters (top_k, top_p,
            min_p, filter_draft) are not supported here.
        group: the ranks, in the order of their columns: a process group or a mesh of one dimension. None = the
            DTensors' group, else the default group.
        vocab_size: V. None = the V of the DTensors, else R times the number of columns of `target_logits`. Pass it if R
            does not divide V, or if the logits are whole tensors.

    Returns:
        output_tokens [B, K+1] int64 and num_accepted [B] int64, as the op returns them, on every rank.

    Raises:
        TypeError: an argument is not a tensor, number or group, or has another dtype.
        ValueError: a shape does not fit the split, a placement, mesh or device is wrong, a lenience is out of range, or
            there is no process group. If only some ranks raise, the others wait forever.

    Examples:
        >>> import torch, torch_specops.vocab_parallel
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> target = torch.full((1, 3, 4), -torch.inf)
        >>> target[0, 0, 2] = target[0, 1, 3] = target[0, 2, 1] = 0.0      # the target says 2, 3, 1
        >>> draft_tokens = torch.tensor([[2, 0]])
        >>> torch_specops.vocab_parallel.verify_exact(target, draft_tokens, None, torch.rand(1, 2), torch.rand(1))
        (tensor([[ 2,  3, -1]]), tensor([1]))
        >>> torch.distributed.destroy_process_group()
    """
    args = VerifyArguments(
        target_logits,
        draft_tokens,
        draft_logits,
        accept_uniforms,
        sample_uniforms,
        filters_of("target_logits", target_logits, temperature, plain=False).temperature,
        draft_lse,
        lenience,
        argmax_lenience=argmax_lenience,
        draft_is_one_hot=draft_is_one_hot,
    )
    check_kinds(args, plain=False)
    shards, local = _place(args._asdict(), 3, group, vocab_size)
    args = VerifyArguments(**local)
    check_verify_exact(args)
    return _verify(args.without_bounds(), shards)


def _verify(args: VerifyArguments, shards: Shards) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = args.target_logits, args.draft_tokens, args.draft_logits
    temperature = args.temperature
    batch, num_drafts = draft_tokens.shape
    if batch == 0:
        return draft_tokens.new_zeros(0, num_drafts + 1, dtype=torch.int64), draft_tokens.new_zeros(0).long()
    inverse_t = inverse_temperature(temperature)  # [B]
    in_vocab = (draft_tokens >= 0) & (draft_tokens < shards.vocab_size)
    x = draft_tokens.long() - shards.offset
    x = torch.where((x >= 0) & (x < shards.size), x, -1)  # [B, K], columns of this shard, or -1

    def of_drafts(logits: Tensor) -> Tensor:
        """[B, K] the scaled logits of drafts whose columns this shard holds; -inf for other drafts."""
        return torch.where(x >= 0, scale(walk.logits_of(logits, x.clamp(min=0)), inverse_t), -torch.inf)

    z_target = scale(target_logits, inverse_t)  # [B, K+1, V_r]
    z_max, z_sum = softmax_stats(z_target)  # [B, K+1]
    local_numbers = {"p_max": z_max, "p_sum": z_sum, "z_px": of_drafts(target_logits[:, :num_drafts])}
    if temperature is not None:
        local_numbers["argmax"] = lowest_argmax(z_target, z_max) + shards.offset
    if draft_logits is not None:
        local_numbers["z_qx"] = of_drafts(draft_logits)
        if args.draft_lse is None:
            local_numbers["q_max"], local_numbers["q_sum"] = softmax_stats(scale(draft_logits, inverse_t))
    # 1. Exchange the softmax statistics of every row, and the logit of each draft from the rank that holds its column.
    gathered = _all_gather(torch.cat([numbers.double() for numbers in local_numbers.values()], 1), shards)
    widths = [numbers.shape[1] for numbers in local_numbers.values()]
    every = dict(zip(local_numbers, gathered.split(widths, 2), strict=True))  # name -> [R, B, ..]

    p_max, p_sum, _ = _merge_stats(every["p_max"], every["p_sum"])
    z_px = every["z_px"].amax(0)
    p_x = walk.probability(z_px, p_max[:, :-1], p_sum[:, :-1])
    q_x = torch.ones_like(p_x)
    if draft_logits is not None:
        if args.draft_lse is None:
            q_max, q_sum, _ = _merge_stats(every["q_max"], every["q_sum"])
        else:
            q_max, q_sum = walk.stats_from_lse(args.draft_lse)
        q_x = walk.probability(every["z_qx"].amax(0), q_max, q_sum)
    if args.draft_is_one_hot is not None:
        q_x = torch.where(args.draft_is_one_hot.unsqueeze(-1), 1.0, q_x)
    accepted = walk.accepts(args.accept_uniforms.double() * args.lenience, p_x, q_x, in_vocab)
    greedy_tokens = None if temperature is None else _merge_argmax(every["p_max"], every["argmax"])
    near_argmax = None
    if args.argmax_lenience < 1:
        near_argmax = in_vocab & walk.is_near_argmax(z_px, p_max[:, :-1], args.argmax_lenience)
    n = walk.prefix_lengths(walk.apply_greedy(accepted, greedy_tokens, draft_tokens, temperature, near_argmax))  # [B]

    rows = torch.arange(batch, device=n.device)
    z_p = z_target[rows, n]  # [B, V_r]
    weights = softmax_row(z_p, p_max[rows, n].float(), p_sum[rows, n])
    masses = [weights.sum(-1, dtype=torch.float64)]
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        is_one_hot = args.draft_is_one_hot
        if draft_logits is None or is_one_hot is not None:
            of_shard, differs = walk.residual(weights, z_p, x[rows, rejected], None), torch.ones_like(masses[0])
        if draft_logits is not None:
            z_q = scale(draft_logits[rows, rejected], inverse_t)
            q = softmax_row(z_q, q_max[rows, rejected].float(), q_sum[rows, rejected])
            of_rows = (weights - q).clamp(min=0)
            # If the logits are equal, p = q and the residual is empty. Compare the logits, because by rounding (also of
            # a given draft_lse) the difference may not be 0.
            rows_differ = (z_p != z_q).any(-1).double()
            if is_one_hot is None:
                of_shard, differs = of_rows, rows_differ
            else:
                of_shard = torch.where(is_one_hot.unsqueeze(-1), of_shard, of_rows)
                differs = torch.where(is_one_hot, differs, rows_differ)
        masses += [of_shard.sum(-1, dtype=torch.float64), differs]
    # 2. Exchange three numbers of each shard for row n of each sequence: the sums of p and of the residual over its
    # columns, and whether the logits of target and draft differ there.
    mass, *of_residual = _all_gather(torch.stack(masses), shards).unbind(1)  # [R, B] each
    if num_drafts > 0:
        residual_mass, differs = of_residual
        use_residual = (n < num_drafts) & in_vocab[rows, rejected]
        use_residual = use_residual & (residual_mass.sum(0) > walk.LEAST_RESIDUAL) & (differs > 0).any(0)
        mass = torch.where(use_residual, residual_mass, mass)
        weights = torch.where(use_residual.unsqueeze(-1), of_shard, weights)

    drawn = _draw_own(weights, mass, args.sample_uniforms, shards)
    # 3. Exchange the next token, which only one rank draws, and n. All ranks use the n of rank 0, in case rounding
    # differs between ranks.
    last = _all_gather(torch.stack([n, drawn]), shards)
    n = last[0, 0]
    return walk.output_rows(draft_tokens, n, last[:, 1].amax(0), greedy_tokens, temperature), n


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | float | None = None,
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`torch_specops.sample` for logits whose columns are split over ranks.

    It makes two all-gathers. As with `torch_specops.vocab_parallel.verify_exact`, every rank must call it, and the
    tokens are the same as those of the op.

    Args:
        logits: [N, V_r] or [N, V], in one of the forms of `target_logits` in that function.
        uniforms: [N], as in the op; equal on all ranks.
        temperature: [N] or a number, as in the op; equal on all ranks.
        group, vocab_size: as in `torch_specops.vocab_parallel.verify_exact`.

    Returns:
        tokens [N] int64 and lse [N] float32, as the op returns them, bitwise equal on all ranks.

    Raises:
        TypeError, ValueError: as in `torch_specops.vocab_parallel.verify_exact`.

    Examples:
        >>> import torch, torch_specops.vocab_parallel
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> logits = torch.tensor([[0.0, 0.0, -torch.inf], [1.0, 5.0, 2.0]])
        >>> torch_specops.vocab_parallel.sample(logits, torch.tensor([0.75, 0.5]), torch.tensor([1.0, 0.0]))
        (tensor([1, 1]), tensor([0.6931, 0.0000]))
        >>> torch.distributed.destroy_process_group()
    """
    filters = filters_of("logits", logits, temperature, plain=False)
    check_tensor("uniforms", uniforms, plain=False)
    check_kinds(filters, plain=False)
    arguments = {"logits": logits, "uniforms": uniforms, "temperature": filters.temperature}
    shards, local = _place(arguments, 2, group, vocab_size)
    z, u, t = local["logits"], local["uniforms"], local["temperature"]
    check_sample(z, u, Filters(t))
    if z.shape[0] == 0:
        return u.new_zeros(0, dtype=torch.int64), u.new_zeros(0, dtype=torch.float32)
    z = scale(z, inverse_temperature(t))
    z_max, z_sum = softmax_stats(z)
    local_numbers = [z_max, z_sum]
    if t is not None:
        local_numbers.append(lowest_argmax(z, z_max) + shards.offset)
    every = _all_gather(torch.stack([numbers.double() for numbers in local_numbers]), shards).unbind(1)
    top, total, parts = _merge_stats(every[0], every[1])
    # Compute weights relative to the maximum of the shard, so that no weight that matters underflows.
    weights = torch.exp(z - z_max.clamp(min=-FLOAT32_MAX).unsqueeze(-1))
    drawn = _draw_own(weights, parts, u, shards)
    last = _all_gather(torch.stack([drawn.double(), top + total.log()]), shards)
    tokens, lse = last[:, 0].amax(0).long(), last[0, 1].float()
    if t is None:
        return tokens, lse
    has_law = (top > -torch.inf) & (t >= 0)
    greedy = t == 0
    tokens = torch.where(has_law, torch.where(greedy, _merge_argmax(every[0], every[2]), tokens), -1)
    return tokens, torch.where(has_law, torch.where(greedy, 0.0, lse), -torch.inf)


class Shards(NamedTuple):
    """How a vocabulary is split over the ranks of a group, and which columns this rank has."""

    group: ProcessGroup
    vocab_size: int
    offset: int
    size: int


def _all_gather(x: Tensor, shards: Shards) -> Tensor:
    """[...] -> [R, ...] by one functional collective, which works in eager and in compiled code."""
    num_ranks = shards.group.size()
    return private.all_gather(x.contiguous(), num_ranks, shards.group).view(num_ranks, *x.shape)


def _merge_stats(z_max: Tensor, z_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maxima and sums of exp(z - maximum) of all shards, [R, ...] float64 -> the maximum over all shards [...], the sum
    relative to it [...], and the part of each shard in that sum [R, ...]."""
    top = z_max.amax(0)
    parts = z_sum * torch.exp(z_max - top.clamp(min=-FLOAT32_MAX))
    return top, parts.sum(0), parts


def _merge_argmax(z_max: Tensor, index: Tensor) -> Tensor:
    """The maximum of each shard and its index, [R, ...] float64 -> the lowest index of the maximum over all shards; -1
    if no entry is finite."""
    top = z_max.amax(0)
    lowest = torch.where(z_max == top, index, torch.inf).amin(0)
    return torch.where(top > -torch.inf, lowest, -1.0).long()


def _draw_own(weights: Tensor, mass: Tensor, uniforms: Tensor, shards: Shards) -> Tensor:
    """Weights [N, V_r], masses of the shards [R, N], uniforms [N] -> [N], the token that the inverse CDF over all
    shards selects if it is in this shard, else -1."""
    shard = draw(mass.transpose(0, 1), uniforms)
    cdf = mass.cumsum(0)
    index = shard.clamp(min=0).unsqueeze(0)
    shard_mass = mass.gather(0, index).squeeze(0)
    before = cdf.gather(0, index).squeeze(0) - shard_mass
    within = (uniforms.double() * cdf[-1] - before) / torch.where(shard_mass > 0, shard_mass, 1.0)
    return torch.where(shard == shards.group.rank(), draw(weights, within.clamp(0.0, 1.0)) + shards.offset, -1)


def _place(
    arguments: dict[str, Any], rank: int, group: ProcessGroup | DeviceMesh | None, vocab_size: int | None
) -> tuple[Shards, dict[str, Any]]:
    """Determine how the vocabulary is split, and convert the arguments to plain tensors. The logits are reduced to the
    columns of this rank, or to one column of -inf if it has none."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a mesh of one dimension, got {group.ndim}; take one by mesh['name']")
        group = group.get_group()
    elif group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {type(group)}")
    columns = {name: value for name, value in arguments.items() if name.endswith("logits") and value is not None}
    for name, value in columns.items():
        if value.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions, got shape {list(value.shape)}")
        if isinstance(value, DTensor):
            group = _group_of(name, value, group)
            if vocab_size not in (None, value.shape[-1]):
                raise ValueError(f"{name}: expected a vocabulary of {vocab_size}, got {value.shape[-1]}")
            vocab_size = value.shape[-1]
    if group is None:
        if not dist.is_initialized():
            raise ValueError("group: expected a ProcessGroup or a DeviceMesh, or an initialised default group")
        group = dist.group.WORLD
    assert group is not None
    if vocab_size is None:
        vocab_size = next(iter(columns.values())).shape[-1] * group.size()
    vocab_size = check_int("vocab_size", vocab_size, 1)
    width = -(-vocab_size // group.size())
    offset = min(group.rank() * width, vocab_size)
    shards = Shards(group, vocab_size, offset, min(width, vocab_size - offset))
    local = arguments | {name: _cut(name, value, shards) for name, value in columns.items()}
    for name, value in arguments.items():
        if name not in columns and isinstance(value, DTensor):
            if not all(isinstance(placement, Replicate) for placement in value.placements):
                raise ValueError(f"{name}: expected placements Replicate(), got {value.placements}")
            local[name] = value.to_local()
    return shards, local


def _group_of(name: str, logits: DTensor, group: ProcessGroup | None) -> ProcessGroup | None:
    """The group over which the columns of a DTensor are sharded. For whole logits, it is the group of their mesh if the
    mesh has one dimension, else the given group."""
    mesh, placements = logits.device_mesh, logits.placements
    sharded = [i for i, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    for placement in (placements[i] for i in sharded):
        if len(sharded) > 1 or type(placement) is not Shard or placement.dim not in (-1, logits.dim() - 1):
            raise ValueError(f"{name}: expected placements Replicate(), and at most one Shard(-1), got {placements}")
    if not sharded and mesh.ndim > 1:
        return group
    mesh_group = mesh.get_group(sharded[0] if sharded else 0)
    if group is not None and group.group_name != mesh_group.group_name:
        raise ValueError(f"{name}: expected a DTensor sharded over the group of the call, got another mesh")
    return mesh_group


def _cut(name: str, logits: Tensor, shards: Shards) -> Tensor:
    local = (logits.to_local() if isinstance(logits, DTensor) else logits).detach()
    if local.shape[-1] == shards.vocab_size:
        local = local.narrow(-1, shards.offset, shards.size)
    elif local.shape[-1] != shards.size:
        raise ValueError(
            f"{name}: expected {shards.size} columns, the shard of rank {shards.group.rank()} of {shards.group.size()} "
            f"of a vocabulary of {shards.vocab_size}, or the whole, got shape {list(local.shape)}"
        )
    return local if shards.size > 0 else pad(local, (0, 1), value=float("-inf"))
