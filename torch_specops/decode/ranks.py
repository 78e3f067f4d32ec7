"""Compares the calls of the ranks that share a sharded target. Ranks that read different texts would compute nonsense
together, and a rank that makes a step alone would wait for the others."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .compiled import CompiledSteps
from .inputs import Prompts
from .models import models_of
from .state import tensors_of

# Tensors of a state -> the arguments that they come from.
ARGUMENTS = {"tokens": "input_ids", "limits": "max_new_tokens", "eos": "eos_token_id", "seeds": "seed"}


def check_ranks(steps: CompiledSteps, prompts: Mapping[str, Prompts], **more: object) -> None:
    """Compare the settings of the steps, these prompts by name, and other values. Does nothing if the target is whole.

    Raises:
        RuntimeError: on every rank, with the names of what differs.
    """
    ranks = steps.target.ranks
    if ranks is None:
        return
    drafts = [type(part).__name__ for part in models_of(steps.draft)]
    parts: dict[str, Any] = {"draft": drafts, "num_draft_tokens or schedule": steps.buckets, "verify": steps.verify}
    parts |= more
    for name, prompt in prompts.items():
        tensors = tensors_of(prompt.state) | dict(prompt.inputs or {})
        lengths = tensors.pop("lengths")
        tensors["tokens"] = torch.cat([tensors["tokens"], lengths.unsqueeze(1)], 1)
        tensors["limits"] = tensors["limits"] - lengths
        if not prompt.state.is_sampled:
            # Nobody gave a seed that nothing reads.
            del tensors["seeds"]
        parts |= {name + ARGUMENTS.get(key, key): tensor for key, tensor in tensors.items()}
    digests = {name: _digest(part.tolist() if isinstance(part, Tensor) else part) for name, part in parts.items()}
    own = torch.tensor(_digest(digests), device=steps.target.device)
    every = [torch.empty_like(own) for _ in range(ranks.size())]
    dist.all_gather(every, own, group=ranks)
    if all(torch.equal(other, own) for other in every):
        return
    of_ranks: list[Any] = [None] * len(every)
    dist.all_gather_object(of_ranks, digests, group=ranks)
    names = dict.fromkeys(name for each in of_ranks for name in each)
    different = [name for name in names if len({each.get(name) for each in of_ranks}) > 1]
    raise RuntimeError(f"target: its ranks must make the same calls, but differ in {', '.join(different)}")


def _digest(value: object) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "big")
