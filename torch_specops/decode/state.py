"""The state of a batch of sequences, on the device, and one step of the loop over it.

A step drafts, reads the drafts with the target, verifies them and moves every row's length by what it emits. Nothing in
it waits for the device, no shape depends on data, and every tensor of the state keeps its address, so that a step can
be compiled as one graph, or captured into one CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafts import Draft, DraftSource, LanguageModel
from ..uniforms import verification_uniforms

__all__ = ["DecodeState", "Verify", "record_of", "speculative_step", "verify_and_commit"]

# (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature, draft_lse)
Verify = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DecodeState:
    """Everything a step reads and writes, but for the caches.

    Args:
        tokens: [B, W] int64, each sequence from index 0 on; W exceeds the largest limit by K + 1.
        lengths: [B] int64, tokens of each sequence. The target has read all but the newest one.
        limits: [B] int64, the length at which a row ends.
        eos: [B, E] int64, tokens that end a row; -1 is none.
        finished: [B] bool.
        failed: [B] bool, rows that ended because the target gave no finite logit.
        seeds: [B] int64.
        temperature: [B] float32.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    eos: Tensor
    finished: Tensor
    failed: Tensor
    seeds: Tensor
    temperature: Tensor


def speculative_step(
    target: LanguageModel, draft: DraftSource | None, state: DecodeState, num_draft_tokens: int, verify: Verify
) -> Tensor:
    """Draft up to K tokens, verify them, commit what is emitted; return the step's record (`record_of`)."""
    proposal = propose(draft, state, num_draft_tokens)
    return verify_and_commit(target, state, proposal.tokens, proposal.logits, proposal.lse, verify)


def propose(draft: DraftSource | None, state: DecodeState, num_draft_tokens: int) -> Draft:
    if draft is None or num_draft_tokens == 0:
        return Draft(state.tokens[:, :0])
    return draft.propose(state.tokens, state.lengths, num_draft_tokens, state.temperature, state.seeds)


def verify_and_commit(
    target: LanguageModel,
    state: DecodeState,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    verify: Verify,
) -> Tensor:
    """Read the newest token and the drafts with the target, verify, and commit."""
    num_draft_tokens = draft_tokens.shape[1]
    newest = (state.lengths - 1).unsqueeze(1)
    unread = torch.cat([state.tokens.gather(1, newest), draft_tokens.clamp(min=0)], 1)
    positions = newest + torch.arange(num_draft_tokens + 1, device=newest.device)
    accept_uniforms, sample_uniforms = verification_uniforms(state.seeds, state.lengths, num_draft_tokens)
    output_tokens, num_accepted = verify(
        target.forward(unread, positions),
        draft_tokens,
        draft_logits,
        accept_uniforms,
        sample_uniforms,
        state.temperature,
        draft_lse,
    )
    num_proposed = (draft_tokens >= 0).long().cumprod(1).sum(1)
    return _commit(state, output_tokens, num_accepted, num_proposed)


def record_of(record: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Take a record apart: emitted tokens [B, K+1] (-1 where none), drafts accepted [B], drafts proposed [B], whether
    the row took part [B], whether it is finished now [B]."""
    return record[:, :-4], record[:, -4], record[:, -3], record[:, -2], record[:, -1]


def _commit(state: DecodeState, output_tokens: Tensor, num_accepted: Tensor, num_proposed: Tensor) -> Tensor:
    index = torch.arange(output_tokens.shape[1], device=output_tokens.device)
    active = ~state.finished
    no_token = output_tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1) < 0
    num_emitted = num_accepted + 1 - no_token.long()

    is_eos = (output_tokens.unsqueeze(2) == state.eos.unsqueeze(1)).any(2) & (output_tokens >= 0)
    up_to_eos = torch.where(is_eos, index, index.shape[0]).amin(1) + 1
    room = state.limits - state.lengths
    count = torch.where(active, torch.minimum(torch.minimum(num_emitted, up_to_eos), room), 0)
    # An eos or the limit before the place without a token ends the row in good order.
    failed = active & no_token & (count == num_emitted) & (num_emitted < torch.minimum(up_to_eos, room))

    is_emitted = index < count.unsqueeze(1)
    slots = state.lengths.unsqueeze(1) + index
    emitted = torch.where(is_emitted, output_tokens, -1)
    state.tokens.scatter_(1, slots, torch.where(is_emitted, output_tokens, state.tokens.gather(1, slots)))
    state.lengths.add_(count)
    state.failed.logical_or_(failed)
    state.finished.logical_or_(failed | (active & ((count == up_to_eos) | (count == room))))
    columns = torch.stack([num_accepted, num_proposed, active.long(), state.finished.long()], 1)
    return torch.cat([emitted, columns], 1)
