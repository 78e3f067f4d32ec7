"""One step of the loop: draft, read the drafts with the target, verify them, and commit what is emitted.

Nothing here waits for the device, no shape depends on data, and every tensor of the state keeps its address. So a step
can be compiled as one graph, or captured into a CUDA graph and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..drafts import Draft, DraftSource, LanguageModel
from ..sampling import SamplingTensors
from ..uniforms import verification_uniforms
from .ragged import RowReader, read_ragged
from .verify import Verifier

__all__ = [
    "DecodeState",
    "count_proposed",
    "propose",
    "shorten",
    "speculative_step",
    "unpack_record",
    "verify_and_commit",
]


@dataclass(frozen=True)
class DecodeState:
    """A batch of sequences. With the caches of the models, this is all that a step reads and writes.

    Args:
        tokens: [B, W] int64, each sequence from index 0 on. W exceeds the largest limit by K + 1.
        lengths: [B] int64, tokens of each sequence. The target has read all but the newest one.
        limits: [B] int64, the length at which a row ends.
        eos: [B, E] int64, tokens that end a row; -1 is none.
        finished: [B] bool.
        failed: [B] bool, rows that ended because the target gave no finite logit.
        seeds: [B] int64.
        sampling: temperature and filters of each row.
        is_sampled: whether any temperature is above 0. If none is, a step draws no random numbers.
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
    target: LanguageModel, draft: DraftSource | None, state: DecodeState, num_draft_tokens: int, verify: Verifier
) -> Tensor:
    """Draft up to K tokens, verify them, and commit what is emitted. Returns the step's record [B, K+4], which
    `unpack_record` takes apart."""
    proposal = propose(draft, state, num_draft_tokens)
    return verify_and_commit(target, state, proposal, verify)


def propose(draft: DraftSource | None, state: DecodeState, num_draft_tokens: int) -> Draft:
    """K drafts for each row. Rows that have ended, and places beyond a row's limit, hold -1 (padding)."""
    if draft is None or num_draft_tokens == 0:
        return Draft(state.tokens[:, :0])
    proposal = draft.propose(state.tokens, state.lengths, num_draft_tokens, state.sampling, state.seeds)
    # The last token before the limit is the next token, which needs no draft.
    room = torch.where(state.finished, 0, state.limits - state.lengths - 1)
    index = torch.arange(num_draft_tokens, device=room.device)
    return replace(proposal, tokens=torch.where(index < room.unsqueeze(1), proposal.tokens, -1))


def shorten(proposal: Draft, num_draft_tokens: int) -> Draft:
    """The first drafts of every row."""
    return Draft(
        proposal.tokens[:, :num_draft_tokens],
        None if proposal.logits is None else proposal.logits[:, :num_draft_tokens],
        None if proposal.lse is None else proposal.lse[:, :num_draft_tokens],
    )


def verify_and_commit(
    target: LanguageModel,
    state: DecodeState,
    proposal: Draft,
    verify: Verifier,
    unread_length: int | None = None,
    row_reader: RowReader | None = None,
) -> Tensor:
    """Let the target read the drafts, verify them, and commit what is emitted. Returns the step's record.

    Args:
        proposal: tokens [B, K].
        unread_length: the length of every row if the target has read nothing yet; None = it has read all but the
            newest token.
        row_reader: the target, if it may read some rows apart from the others (`read_ragged`); the host then waits for
            the drafts.
    """
    num_draft_tokens = proposal.tokens.shape[1]
    in_vocab = (proposal.tokens >= 0) & (proposal.tokens < target.vocab_size)
    proposal = replace(proposal, tokens=torch.where(in_vocab, proposal.tokens, -1))
    if unread_length is None:
        first = (state.lengths - 1).unsqueeze(1)
        unread = state.tokens.gather(1, first)
    else:
        first = torch.zeros_like(state.lengths).unsqueeze(1)
        unread = state.tokens[:, :unread_length]
    positions = first + torch.arange(unread.shape[1] + num_draft_tokens, device=first.device)
    unread = torch.cat([unread, proposal.tokens.clamp(min=0)], 1)
    num_proposed = count_proposed(proposal)
    if row_reader is not None and unread_length is None:
        target_logits = read_ragged(row_reader, unread, positions, num_proposed, state.finished)
    else:
        target_logits = target.forward(unread, positions, num_draft_tokens + 1)
    output_tokens, num_accepted = verify(target_logits, proposal, _uniforms(state, num_draft_tokens), state.sampling)
    return _commit(state, output_tokens, num_accepted, num_proposed)


def count_proposed(proposal: Draft) -> Tensor:
    """[B] int64, drafts of each row before its first padding."""
    return (proposal.tokens >= 0).long().cumprod(1).sum(1)


def unpack_record(record: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A record [B, K+4] as emitted tokens [B, K+1] (-1 where there is none), accepted drafts [B], proposed drafts [B],
    and whether each row has finished [B] (0 or 1)."""
    return record[:, :-3], record[:, -3], record[:, -2], record[:, -1]


def _uniforms(state: DecodeState, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """[B, K] for the acceptance tests and [B] for the next token."""
    if state.is_sampled:
        return verification_uniforms(state.seeds, state.lengths, num_draft_tokens)
    zeros = torch.zeros(state.lengths.shape[0], num_draft_tokens + 1, device=state.lengths.device)
    return zeros[:, 1:], zeros[:, 0]


def _commit(state: DecodeState, output_tokens: Tensor, num_accepted: Tensor, num_proposed: Tensor) -> Tensor:
    """Append what was accepted and drawn [B, K+1] to the unfinished rows; returns the step's record."""
    index = torch.arange(output_tokens.shape[1], device=output_tokens.device)
    active = ~state.finished
    no_token = output_tokens.gather(1, num_accepted.unsqueeze(1)).squeeze(1) < 0
    num_emitted = num_accepted + 1 - no_token.long()

    is_eos = (output_tokens.unsqueeze(2) == state.eos.unsqueeze(1)).any(2) & (output_tokens >= 0)
    up_to_eos = torch.where(is_eos, index, index.shape[0]).amin(1) + 1
    room = state.limits - state.lengths
    count = torch.where(active, torch.minimum(torch.minimum(num_emitted, up_to_eos), room), 0)
    # A row that reaches an eos or its limit before the missing token has not failed.
    failed = active & no_token & (count == num_emitted) & (num_emitted < torch.minimum(up_to_eos, room))

    is_emitted = index < count.unsqueeze(1)
    slots = state.lengths.unsqueeze(1) + index
    emitted = torch.where(is_emitted, output_tokens, -1)
    state.tokens.scatter_(1, slots, torch.where(is_emitted, output_tokens, state.tokens.gather(1, slots)))
    state.lengths.add_(count)
    state.failed.logical_or_(failed)
    state.finished.logical_or_(failed | (active & ((count == up_to_eos) | (count == room))))
    return torch.cat([emitted, torch.stack([num_accepted, num_proposed, state.finished.long()], 1)], 1)
