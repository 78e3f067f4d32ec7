"""The state of a batch of sequences, on the device, and one step of the loop over it.

A step drafts, reads the drafts with the target, verifies them and moves every row's length by what it emits. Nothing in
it waits for the device, no shape depends on data, and every tensor of the state keeps its address, so that a step can
be compiled as one graph, or captured into one CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..drafts import Draft, DraftSource, LanguageModel
from ..sampling import SamplingTensors
from ..uniforms import verification_uniforms
from .ragged import RowReader, read_ragged

__all__ = [
    "DecodeState",
    "Verify",
    "num_proposed_of",
    "propose",
    "record_of",
    "shortened",
    "speculative_step",
    "verify_and_commit",
]

# (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, sampling, draft_lse)
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
        sampling: each row's temperature, top-k, top-p and min-p.
        is_sampled: whether any temperature is above 0; without one, no step needs a random number.
    """

    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    eos: Tensor
    finished: Tensor
    failed: Tensor
    seeds: Tensor
    sampling: SamplingTensors
    is_sampled: bool


def speculative_step(
    target: LanguageModel, draft: DraftSource | None, state: DecodeState, num_draft_tokens: int, verify: Verify
) -> Tensor:
    """Draft up to K tokens, verify them, commit what is emitted; return the step's record (`record_of`)."""
    proposal = propose(draft, state, num_draft_tokens)
    return verify_and_commit(target, state, proposal.tokens, proposal.logits, proposal.lse, verify)


def propose(draft: DraftSource | None, state: DecodeState, num_draft_tokens: int) -> Draft:
    """What the draft proposes; padding where a row has ended, or would pass its limit even without a next token."""
    if draft is None or num_draft_tokens == 0:
        return Draft(state.tokens[:, :0])
    proposal = draft.propose(state.tokens, state.lengths, num_draft_tokens, state.sampling, state.seeds)
    room = torch.where(state.finished, 0, state.limits - state.lengths - 1)
    index = torch.arange(num_draft_tokens, device=room.device)
    return replace(proposal, tokens=torch.where(index < room.unsqueeze(1), proposal.tokens, -1))


def shortened(proposal: Draft, width: int) -> Draft:
    """The first `width` drafts of every row."""
    return Draft(
        proposal.tokens[:, :width],
        None if proposal.logits is None else proposal.logits[:, :width],
        None if proposal.lse is None else proposal.lse[:, :width],
    )


def verify_and_commit(
    target: LanguageModel,
    state: DecodeState,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    draft_lse: Tensor | None,
    verify: Verify,
    unread_length: int | None = None,
    row_reader: RowReader | None = None,
) -> Tensor:
    """Read what the target has not read and the drafts, verify, and commit.

    Args:
        unread_length: the length of every row, when the target has read nothing yet; None = it has read all but the
            newest token.
        row_reader: the target, to read rows apart where that is less work (`read_ragged`); the host looks at the
            drafts.
    """
    num_draft_tokens = draft_tokens.shape[1]
    in_vocab = (draft_tokens >= 0) & (draft_tokens < target.vocab_size)
    draft_tokens = torch.where(in_vocab, draft_tokens, -1)
    if unread_length is None:
        first = (state.lengths - 1).unsqueeze(1)
        unread = state.tokens.gather(1, first)
    else:
        first = torch.zeros_like(state.lengths).unsqueeze(1)
        unread = state.tokens[:, :unread_length]
    positions = first + torch.arange(unread.shape[1] + num_draft_tokens, device=first.device)
    unread = torch.cat([unread, draft_tokens.clamp(min=0)], 1)
    if state.is_sampled:
        accept_uniforms, sample_uniforms = verification_uniforms(state.seeds, state.lengths, num_draft_tokens)
    else:
        accept_uniforms = torch.zeros(draft_tokens.shape, device=draft_tokens.device)
        sample_uniforms = torch.zeros(draft_tokens.shape[:1], device=draft_tokens.device)
    num_proposed = num_proposed_of(draft_tokens)
    if row_reader is not None and unread_length is None:
        target_logits = read_ragged(row_reader, unread, positions, num_proposed, state.finished)
    else:
        target_logits = target.forward(unread, positions, num_draft_tokens + 1)
    output_tokens, num_accepted = verify(
        target_logits,
        draft_tokens,
        draft_logits,
        accept_uniforms,
        sample_uniforms,
        state.sampling,
        draft_lse,
    )
    return _commit(state, output_tokens, num_accepted, num_proposed)


def num_proposed_of(draft_tokens: Tensor) -> Tensor:
    """[B, K] -> [B] drafts before the first padding."""
    return (draft_tokens >= 0).long().cumprod(1).sum(1)


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
