"""One step of the loop: draft, let the target read the drafts, verify them with an op, and commit the emitted tokens.

Nothing here waits for the device, no shape depends on data, and every tensor of the state keeps its address. So a step
can be compiled as one graph, or captured as a CUDA graph and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import checks
from ..drafts import Draft, DraftSource
from ..drafts.base import proposal_of, without_undrafted
from ..grammars import allowed_logits
from ..models.base import LanguageModel, readable_positions
from ..models.reading import read_ragged
from ..ops import sample, verify_block, verify_exact, verify_gumbel, verify_sigmoid
from ..ops.uniforms import verification_uniforms
from ..sampling import SamplingTensors
from ..sampling.logprobs import LogProbabilities, filtered, log_probabilities
from .state import DecodeState

# Takes a step's drafts and the number of drafts of each row [B]. Returns how many drafts of each row to verify.
Choose = Callable[[Draft, Tensor], list[int]]
# Takes a step's drafts. Returns the drafts to verify, and the bitmask that `verify_and_commit` takes.
Masks = Callable[[Draft], tuple[Draft, Tensor]]
# For each row: its emitted tokens, the numbers of accepted and of proposed drafts, its first rejected draft or -1, and
# whether it has ended.
RowResults = tuple[list[list[int]], list[int], list[int], list[int], list[bool]]


@dataclass(frozen=True)
class StepPlan:
    """The settings of a step.

    Args:
        num_draft_tokens: the number of drafts per row, K.
        is_compiled: whether the step is compiled. If so, all rows have the same number of drafts, padding included, and
            the target has read the prompts.
        masks: asks the grammars after drafting and before verification; None = no row has a grammar.
        choose: on a CPU, chooses how many drafts of each row to verify. An eager step then reads no padding. A compiled
            step verifies the largest chosen number in all rows, and a compiled step of that size must be ready. None =
            verify all K.
        prefill_length: the length of every row if the target has read nothing yet; None = the target has read all but
            the newest token.
        on_logits: called with the target's logits [B, K+1, V].
    """

    num_draft_tokens: int
    is_compiled: bool = False
    masks: Masks | None = None
    choose: Choose | None = None
    prefill_length: int | None = None
    on_logits: Callable[[Tensor], object] | None = None


@dataclass(frozen=True)
class Verifier:
    """How drafts are verified: a verify op and its settings.

    Args:
        op: "exact", "block", "gumbel" or "sigmoid" (lossy).
        lenience, argmax_lenience: in (0, 1], as in `verify_exact`; below 1 only with "exact".
        alpha, beta: as in `verify_sigmoid`; values other than the defaults only with "sigmoid".

    Raises:
        TypeError, ValueError: a wrong argument, by name.

    Examples:
        >>> from torch_specops import Verifier
        >>> Verifier("exact", lenience=0.5)
        Verifier(op='exact', lenience=0.5, argmax_lenience=1.0, alpha=-1000.0, beta=1000.0)
    """

    op: str = "exact"
    lenience: float = 1.0
    argmax_lenience: float = 1.0
    alpha: float = -1e3
    beta: float = 1e3

    def __post_init__(self) -> None:
        numbers = {"alpha": "sigmoid", "beta": "sigmoid", "lenience": "exact", "argmax_lenience": "exact"}
        for name in numbers:
            object.__setattr__(self, name, checks.check_number(name, getattr(self, name)))
        checks.check_bounds(self.alpha, self.beta)
        checks.check_fraction("lenience", self.lenience)
        checks.check_fraction("argmax_lenience", self.argmax_lenience)
        for name, op in numbers.items():
            value, default = getattr(self, name), getattr(Verifier, name)
            if value != default and self.op != op:
                raise ValueError(f"{name}: only verify={op!r} has it; expected {default}, got {value} with {self.op!r}")
        if self.op not in ("exact", "block", "gumbel", "sigmoid"):
            raise ValueError(f"verify: expected 'exact', 'block', 'gumbel' or 'sigmoid', got {self.op!r}")

    def __call__(
        self, target_logits: Tensor, draft: Draft, numbers: tuple[Tensor, Tensor], sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        """Accept drafts, and draw the next token.

        Args:
            target_logits: [B, K+1, V].
            draft: tokens [B, K], with their logits [B, K, V] and logsumexp [B, K] if they were sampled, and
                `is_one_hot` [B] if only some rows were.
            numbers: [B, K] and [B] float32 in [0, 1), for the acceptance tests and for the next token; for "gumbel" the
                seeds and the lengths of the sequences, both [B] int64.
            sampling: temperature and filters of each row.

        Returns:
            output_tokens [B, K+1] int64: accepted drafts, the next token, then -1.
            num_accepted [B] int64.

        Raises:
            ValueError: logits of a wrong shape, as from a model that ignores `num_logits`; "sigmoid" with rows that are
                one-hot.
        """
        expected = (draft.tokens.shape[0], draft.tokens.shape[1] + 1)
        if target_logits.shape[:-1] != expected:
            raise ValueError(
                f"target: expected logits {[*expected, 'V']} from forward with num_logits = {expected[1]}, "
                f"got shape {list(target_logits.shape)}"
            )
        temperature, filters = sampling.temperature, sampling.filters
        if self.op == "gumbel":
            return verify_gumbel(target_logits, draft.tokens, *numbers, temperature, **filters)
        if draft.tokens.shape[1] == 0:
            # Without drafts, all verify ops only draw from the target's distribution, and `sample` does that with less
            # work.
            tokens, _ = sample(target_logits[:, 0], numbers[1], temperature, **filters)
            return tokens.unsqueeze(1), torch.zeros_like(tokens)
        if self.op == "sigmoid":
            # `verify_sigmoid` takes no filters, so filter the logits of target and draft first.
            if draft.is_one_hot is not None:
                raise ValueError("verify: 'sigmoid' expects a draft with probabilities in all rows, got `is_one_hot`")
            target_logits, filters = filtered(target_logits, sampling), {}
            if draft.logits is not None:
                draft_logits = filtered(draft.logits, sampling)
                arguments = (target_logits, draft.tokens, draft_logits, *numbers)
                return verify_sigmoid(*arguments, self.alpha, self.beta, temperature)
        drafts = (draft.tokens, draft.logits, *numbers, temperature, draft.lse)
        options = filters | {"draft_is_one_hot": draft.is_one_hot}
        if self.op == "block":
            return verify_block(target_logits, *drafts, **options)
        return verify_exact(target_logits, *drafts, self.lenience, **options, argmax_lenience=self.argmax_lenience)


def speculative_step(
    target: LanguageModel, draft: DraftSource | None, state: DecodeState, num_draft_tokens: int, verify: Verifier
) -> Tensor:
    """Draft up to K tokens, verify them, and commit the emitted tokens. Returns the step's record [B, 2 K+4], for
    `unpack_record`."""
    proposal = propose(draft, state, num_draft_tokens, target.vocab_size)
    return verify_and_commit(target, state, proposal, verify)


def propose(draft: DraftSource | None, state: DecodeState, num_draft_tokens: int, vocab_size: int) -> Draft:
    """Propose up to K drafts for each row. The proposals of user-defined sources are checked."""
    return proposal_of(draft, state.tokens, state.lengths, num_draft_tokens, state.sampling, state.seeds, vocab_size)


def verify_and_commit(
    target: LanguageModel,
    state: DecodeState,
    proposal: Draft,
    verify: Verifier,
    bitmask: Tensor | None = None,
    plan: StepPlan | None = None,
) -> Tensor:
    """Let the target read the drafts, verify them, and commit the emitted tokens. Returns the step's record.

    Args:
        proposal: tokens [B, K].
        bitmask: [B, K+1, ceil(V / 32)] int32, the tokens that a grammar allows at each position; None = all.
        plan: the plan of an eager step; None = all drafts are verified, and the target has read all but the newest
            token.
    """
    plan = StepPlan(proposal.tokens.shape[1]) if plan is None else plan
    proposal, num_proposed = _chosen_drafts(target, state, proposal, plan)
    target_logits = _read_drafts(target, state, proposal.tokens, num_proposed, plan)
    processed = _processed(state, proposal.tokens, target_logits, bitmask)
    output_tokens, num_accepted = verify(processed, proposal, _random_numbers(state, proposal, verify), state.sampling)
    logprobs = _logprobs(state, target_logits, processed, output_tokens)
    results = _commit(state, output_tokens, num_accepted, num_proposed, logprobs)
    return torch.cat([proposal.tokens, *results], 1)


def unpack_record(record: Tensor) -> RowResults:
    """Unpack a record [B, 2 K+4]."""
    rows, num_draft_tokens = record.tolist(), record.shape[1] // 2 - 2
    tokens = [[token for token in row[num_draft_tokens:-3] if token >= 0] for row in rows]
    num_accepted, num_proposed = [row[-3] for row in rows], [row[-2] for row in rows]
    # A row begins with its drafts.
    rejected = [row[row[-3]] if row[-3] < row[-2] else -1 for row in rows]
    return tokens, num_accepted, num_proposed, rejected, [row[-1] == 1 for row in rows]


def checked_drafts(proposal: Draft, state: DecodeState, target: LanguageModel) -> tuple[Draft, Tensor]:
    """Replace drafts outside the vocabulary or beyond the row's limit by -1 (padding). In deterministic drafts, also
    replace the tokens in `target.undrafted`. Returns the drafts, and the number of drafts before the first padding of
    each row [B]."""
    proposal, room = without_undrafted(proposal, target), _room(state)
    tokens = proposal.tokens
    if tokens.shape[1] == 0:
        return proposal, torch.zeros_like(room)
    # The last token before the limit needs no draft, because every step emits a next token.
    is_inside = torch.arange(1, tokens.shape[1] + 1, device=tokens.device) < room.unsqueeze(1)
    is_draft = is_inside & (tokens >= 0) & (tokens < target.vocab_size)
    return replace(proposal, tokens=torch.where(is_draft, tokens, -1)), is_draft.cumprod(1).sum(1)


def _chosen_drafts(target: LanguageModel, state: DecodeState, proposal: Draft, plan: StepPlan) -> tuple[Draft, Tensor]:
    """The drafts to verify, and the number of drafts of each row [B]."""
    proposal, num_proposed = checked_drafts(proposal, state, target)
    if plan.choose is None or proposal.tokens.shape[1] == 0:
        return proposal, num_proposed
    counts = plan.choose(proposal, num_proposed)
    most, num_proposed = max(counts), torch.tensor(counts, device="cpu")
    if min(counts) == proposal.tokens.shape[1]:
        return proposal, num_proposed
    tokens = torch.where(torch.arange(most, device="cpu") < num_proposed.unsqueeze(1), proposal.tokens[:, :most], -1)
    logits, lse = (None if each is None else each[:, :most] for each in (proposal.logits, proposal.lse))
    return replace(proposal, tokens=tokens, logits=logits, lse=lse), num_proposed


def _read_drafts(
    target: LanguageModel, state: DecodeState, drafts: Tensor, num_proposed: Tensor, plan: StepPlan
) -> Tensor:
    """Let the target read each row's unread tokens and the drafts [B, K]. Returns its logits [B, K+1, V]."""
    num_unread, num_draft_tokens = plan.prefill_length or 1, drafts.shape[1]
    index = torch.arange(num_unread + num_draft_tokens, device=drafts.device)
    positions = readable_positions(target, (state.lengths - num_unread).unsqueeze(1) + index)
    unread = state.tokens.gather(1, positions[:, :num_unread])
    if num_draft_tokens > 0:
        # Replace padding by the newest token: in a row at the model's limit, padding has a clamped position and writes
        # to the newest token's slot.
        unread = torch.cat([unread, torch.where(drafts < 0, unread[:, -1:], drafts)], 1)
    if plan.choose is not None and plan.prefill_length is None and unread.shape[0] > 1 and target.reads_rows:
        # Set the logits of skipped positions to 0, because processors and `on_logits` get them too and may not handle
        # NaN.
        is_filled = plan.on_logits is not None or state.sampling.processors is not None
        logits = read_ragged(target, unread, positions, num_proposed, state.finished, is_filled=is_filled)
    else:
        logits = target.forward(unread, positions, num_draft_tokens + 1)
    if plan.on_logits is not None:
        plan.on_logits(logits)
    return logits


def _processed(state: DecodeState, drafts: Tensor, logits: Tensor, bitmask: Tensor | None) -> Tensor:
    """Apply processors and grammars to the target's logits. Position i follows the sequence and the first i drafts [B,
    K]."""
    if state.sampling.processors is not None:
        lengths = state.lengths.unsqueeze(1) + torch.arange(drafts.shape[1] + 1, device=drafts.device)
        text = state.tokens.scatter(1, lengths[:, :-1], drafts)
        logits = state.sampling.process(logits, text, lengths)
    return logits if bitmask is None else allowed_logits(logits, bitmask[:, : drafts.shape[1] + 1])


def _random_numbers(state: DecodeState, proposal: Draft, verify: Verifier) -> tuple[Tensor, Tensor]:
    """The random numbers that `Verifier` takes as `numbers`."""
    if verify.op == "gumbel":
        return state.seeds, state.lengths
    batch, num_draft_tokens = proposal.tokens.shape
    if state.is_sampled:
        return verification_uniforms(state.seeds, state.lengths, num_draft_tokens)
    zeros = torch.zeros(batch, num_draft_tokens + 1, dtype=torch.float32, device=state.seeds.device)
    return zeros[:, 1:], zeros[:, 0]


def _logprobs(state: DecodeState, raw: Tensor, processed: Tensor, tokens: Tensor) -> LogProbabilities | None:
    """The log-probabilities of the tokens [B, K+1], before or after the processors; None = not computed."""
    if state.logprobs_of is None:
        return None
    logits = raw if state.logprobs_of == "raw" else processed
    num_top = 0 if state.top_tokens is None else state.top_tokens.shape[2]
    return log_probabilities(logits, tokens, state.sampling, state.logprobs_of, num_top)


def _room(state: DecodeState) -> Tensor:
    """The number of new tokens that each row may still get, [B]."""
    return torch.where(state.finished, 0, state.limits - state.lengths)


def _commit(
    state: DecodeState, tokens: Tensor, num_accepted: Tensor, num_proposed: Tensor, logprobs: LogProbabilities | None
) -> tuple[Tensor, ...]:
    """Append tokens [B, K+1] and their log-probabilities to the unfinished rows. Returns the step's record without its
    drafts."""
    width = tokens.shape[1]
    index = torch.arange(width, device=tokens.device)
    num_tokens = (tokens >= 0).sum(1)
    # Padding matches too: `eos` is padded with -1, and -1 follows the emitted tokens. Such a match changes nothing,
    # because it comes after all emitted tokens.
    is_eos = (tokens.unsqueeze(2) == state.eos.unsqueeze(1)).any(2)
    up_to_eos = torch.where(is_eos, index, width).amin(1) + 1
    most = torch.minimum(up_to_eos, _room(state))
    count = torch.minimum(num_tokens, most)
    # A row has not failed if it reaches an eos token or its limit before the position without a finite logit.
    failed = (num_tokens == num_accepted) & (count < most)

    is_emitted = index < count.unsqueeze(1)
    emitted = torch.where(is_emitted, tokens, -1)
    slots = state.lengths.unsqueeze(1) + index
    state.tokens.scatter_(1, slots, torch.where(is_emitted, tokens, state.tokens.gather(1, slots)))
    if logprobs is not None:
        wanted = state.logprobs, state.top_tokens, state.top_values
        for stored, new, nothing in zip(wanted, logprobs, (math.nan, -1, math.nan), strict=True):
            if stored is not None:
                # Top log-probabilities have one more dimension, so expand the indices.
                places, is_new = slots, is_emitted
                if new.dim() == 3:
                    places, is_new = (each.unsqueeze(2).expand_as(new) for each in (slots, is_emitted))
                stored.scatter_(1, places, torch.where(is_new, new, nothing))
    state.lengths.add_(count)
    state.failed.logical_or_(failed)
    state.finished.logical_or_(failed | (count == most))
    return emitted, *(each.unsqueeze(1) for each in (num_accepted, num_proposed, state.finished))
