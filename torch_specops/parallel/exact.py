"""`verify_exact` on sharded logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .. import checks
from ..arguments import VerifyArguments
from ..dense.rows import draw, inverse_temperature, lowest_argmax, scale, softmax_row, softmax_stats
from ..dense.walk import (
    LEAST_RESIDUAL,
    accepts,
    apply_greedy,
    is_near_argmax,
    logits_of,
    num_leading,
    output_rows,
    probability,
    residual,
    stats_from_lse,
)
from .exchange import all_gather, check_agreement, exchange, merge_argmax, merge_stats, shard_of
from .shards import Shards, columns, place, replicated


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
    group: ProcessGroup | DeviceMesh | None = None,
    shard_sizes: Sequence[int] | None = None,
    check_ranks: bool = False,
) -> tuple[Tensor, Tensor]:
    """`torch_specops.verify_exact` where every rank holds some columns of the logits: the same law, the same tokens.

    Except where float32 rounding decides, the tokens are those of the op on the whole logits; in greedy rows they
    always are. On every rank they are the same. Every rank of the group must call it, with its own logits and otherwise
    equal arguments.

    Args:
        target_logits: [B, K+1, V_r], the columns of this rank, which follow those of the previous rank; or a DTensor
            [B, K+1, V] with placement Shard(-1) or Replicate(). Dtypes and special values as in the op.
        draft_tokens: [B, K], tokens of the whole vocabulary, as in the op; equal on all ranks.
        draft_logits: [B, K, V_r], sharded as the target's, or [B, K, V], whole and equal on every rank, or a DTensor.
            None = deterministic drafts.
        accept_uniforms, sample_uniforms, temperature: [B, K], [B], [B] or a number, as in the op; equal on all ranks
            (computed from one seed, or sent by one rank).
        draft_lse: [B, K], logsumexp over the whole vocabulary as `torch_specops.sample` or
            `torch_specops.parallel.sample` returned it.
        lenience, argmax_lenience: as in the op. Its filters (top_k, top_p, min_p, filter_draft) are not supported here.
        group: the ranks, in the order of their columns: a process group or a mesh of one dimension. None = that of the
            DTensors, else the default group.
        shard_sizes: the number of columns of every rank; they may differ or be 0 (then V_r = 0). None = as a DTensor is
            split, else equal on all ranks.
        check_ranks: compare the arguments that must be equal on all ranks, by a fourth exchange, and raise if they are
            not. It reads data: for tests and first runs, not for a compiled step.

    Returns:
        output_tokens [B, K+1] int64 and num_accepted [B] int64, as the op returns them, on every rank.

    Raises:
        TypeError: an argument that is not a tensor, number or group, or has another dtype.
        ValueError: a shape that does not fit the split, another placement, mesh or device, a lenience out of range, no
            process group; with `check_ranks`, an argument that differs between ranks. Without it, an error that only
            some ranks raise leaves the others waiting.

    Example:
        >>> import os, tempfile, torch, torch_specops.parallel
        >>> store = torch.distributed.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> target = torch.full((1, 3, 4), -torch.inf)
        >>> target[0, 0, 2] = target[0, 1, 3] = target[0, 2, 1] = 0.0      # the target says 2, 3, 1
        >>> draft_tokens = torch.tensor([[2, 0]])
        >>> torch_specops.parallel.verify_exact(target, draft_tokens, None, torch.rand(1, 2), torch.rand(1))
        (tensor([[ 2,  3, -1]]), tensor([1]))
        >>> torch.distributed.destroy_process_group()
    """
    given = VerifyArguments(
        target_logits,
        draft_tokens,
        draft_logits,
        accept_uniforms,
        sample_uniforms,
        checks.filters_of("target_logits", target_logits, temperature, plain=False).temperature,
        draft_lse,
        lenience,
        argmax_lenience=argmax_lenience,
    )
    checks.check_kinds(given, plain=False)
    # From here on there are only plain tensors: this rank's columns of the logits, everything else whole.
    names = ["target_logits"] if draft_logits is None else ["target_logits", "draft_logits"]
    shards, logits = place(group, shard_sizes, [columns(name, getattr(given, name), 3) for name in names])
    local = given._asdict() | dict(zip(names, logits, strict=True))
    given = VerifyArguments(**{name: replicated(name, value) for name, value in local.items()})
    checks.check_verify_exact(given)
    if check_ranks:
        check_agreement(shards, given._asdict())
    return _verify(given, shards)


def _verify(given: VerifyArguments, shards: Shards) -> tuple[Tensor, Tensor]:
    target_logits, draft_tokens, draft_logits = given.target_logits, given.draft_tokens, given.draft_logits
    temperature = given.temperature
    batch, num_drafts = draft_tokens.shape
    if batch == 0:
        return draft_tokens.new_zeros(0, num_drafts + 1, dtype=torch.int64), draft_tokens.new_zeros(0).long()
    inverse_t = inverse_temperature(temperature)  # [B]
    in_vocab = (draft_tokens >= 0) & (draft_tokens < shards.vocab_size)
    x = draft_tokens.long() - shards.offset  # [B, K] columns of this shard
    in_shard = (x >= 0) & (x < shards.size)
    x = torch.where(in_shard, x, 0)

    def of_drafts(logits: Tensor) -> Tensor:
        """[B, K] the scaled logits of the drafts that this shard holds, else -inf."""
        return torch.where(in_shard, scale(logits_of(logits, x), inverse_t), -torch.inf)

    # 1. The softmax statistics of every row, and the logit of each draft, from the rank that holds it.
    z_target = scale(target_logits, inverse_t)  # [B, K+1, V_r]
    z_max, z_sum = softmax_stats(z_target)  # [B, K+1]
    own = {"p_max": z_max, "p_sum": z_sum, "z_px": of_drafts(target_logits[:, :num_drafts])}
    if temperature is not None:
        own["argmax"] = lowest_argmax(z_target, z_max) + shards.offset
    if draft_logits is not None:
        own["z_qx"] = of_drafts(draft_logits)
        if given.draft_lse is None:
            own["q_max"], own["q_sum"] = softmax_stats(scale(draft_logits, inverse_t))
    every = exchange(own, shards)  # [R, B, ..] under each name

    p_max, p_sum, _ = merge_stats(every["p_max"], every["p_sum"])
    z_px = every["z_px"].amax(0)
    p_x = probability(z_px, p_max[:, :-1], p_sum[:, :-1])
    if draft_logits is None:
        q_x = torch.ones_like(p_x)
    else:
        if given.draft_lse is None:
            q_max, q_sum, _ = merge_stats(every["q_max"], every["q_sum"])
        else:
            q_max, q_sum = stats_from_lse(given.draft_lse)
        q_x = probability(every["z_qx"].amax(0), q_max, q_sum)
    accepted = accepts(given.accept_uniforms.double() * given.lenience, p_x, q_x, in_vocab)
    greedy_tokens = None if temperature is None else merge_argmax(every["p_max"], every["argmax"])
    near_argmax = None
    if given.argmax_lenience < 1:
        near_argmax = in_vocab & is_near_argmax(z_px, p_max[:, :-1], given.argmax_lenience)
    n = num_leading(apply_greedy(accepted, greedy_tokens, draft_tokens, temperature, near_argmax))  # [B]

    # 2. The mass of p and of the residual in each shard of row n.
    rows = torch.arange(batch, device=n.device)
    z_p = z_target[rows, n]  # [B, V_r]
    weights = softmax_row(z_p, p_max[rows, n].float(), p_sum[rows, n])
    masses = [weights.sum(-1, dtype=torch.float64)]
    if num_drafts > 0:
        rejected = n.clamp(max=num_drafts - 1)
        if draft_logits is None:
            of_shard = residual(weights, z_p, torch.where(in_shard, x, -1)[rows, rejected], None)
            differs = torch.ones_like(masses[0])
        else:
            z_q = scale(draft_logits[rows, rejected], inverse_t)
            q = softmax_row(z_q, q_max[rows, rejected].float(), q_sum[rows, rejected])
            of_shard = (weights - q).clamp(min=0)
            # Equal logits mean p = q, which rounding (also of a given draft_lse) would hide.
            differs = (z_p != z_q).any(-1).double()
        masses += [of_shard.sum(-1, dtype=torch.float64), differs]
    mass, *of_residual = all_gather(torch.stack(masses), shards).unbind(1)  # [R, B] each
    if num_drafts > 0:
        residual_mass, differs = of_residual
        use_residual = (n < num_drafts) & in_vocab[rows, rejected]
        use_residual = use_residual & (residual_mass.sum(0) > LEAST_RESIDUAL) & (differs > 0).any(0)
        mass = torch.where(use_residual, residual_mass, mass)
        weights = torch.where(use_residual.unsqueeze(-1), of_shard, weights)
    shard, within = shard_of(mass, given.sample_uniforms)

    # 3. The token, from the rank that holds it. All ranks should have the same n; taking rank 0's makes it certain.
    drawn = torch.where(shard == shards.rank, draw(weights, within) + shards.offset, -1)
    last = all_gather(torch.stack([n, drawn]), shards)
    n = last[0, 0]
    return output_rows(draft_tokens, n, last[:, 1].amax(0), greedy_tokens, temperature), n
