"""A plain speculative decoding loop over the ops: one sequence, eager, readable.

One step: the draft source proposes up to K tokens; the target reads the tokens it has not read yet and the drafts in
one forward; `verify_exact` accepts a prefix of the drafts and draws the next token. The emitted tokens have exactly
the target's law (temperature 0: its greedy choice), whatever the draft. Batches are refused here; ragged batches,
compilation and CUDA graphs belong to a loop with state on the device, which this one is not: it waits for the result
of every step.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafts import CachedModel, Draft, DraftSource
from .sampling import SamplingParams
from .uniforms import uniforms
from .verification import verify_exact

__all__ = ["DecodeStats", "GreedyCheck", "GreedyDifference", "Step", "check_greedy", "decode"]


@dataclass(frozen=True)
class Step:
    """One round of drafting and verifying.

    Args:
        tokens: what the step emitted: accepted drafts, then the next token; cut after an eos.
        num_accepted: drafts that the target accepted (without the next token; also those cut after an eos).
        num_proposed: drafts that were verified, 0..K.
        seconds: time of the step; the first one reads the prompt.
    """

    tokens: list[int]
    num_accepted: int
    num_proposed: int
    seconds: float


@dataclass(frozen=True)
class DecodeStats:
    """What the steps of one decode add up to."""

    steps: Sequence[Step]

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per step, the next token included: 1 when no draft is ever accepted."""
        return len(self.tokens) / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / verified drafts (those after a rejection count as verified); None if there were none."""
        num_proposed = sum(step.num_proposed for step in self.steps)
        return sum(step.num_accepted for step in self.steps) / num_proposed if num_proposed else None

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second, the reading of the prompt included."""
        return len(self.tokens) / max(self.seconds, 1e-9)


def decode(
    target: CachedModel,
    input_ids: Tensor,
    *,
    draft: DraftSource | None = None,
    max_new_tokens: int = 128,
    num_draft_tokens: int = 5,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    eos_token_id: int | Collection[int] | None = None,
) -> Iterator[Step]:
    """Continue one prompt, yielding each step as it is done.

    The arguments are checked at the call, before the first step. A step never proposes more than may still be emitted,
    so neither model reads beyond the prompt and `max_new_tokens`.

    Args:
        target: the model whose law is kept.
        input_ids: [1, P] int64, P >= 1.
        draft: where drafts come from; None = one token per step.
        max_new_tokens: stop after this many tokens, >= 1.
        num_draft_tokens: K, the most drafts per step, >= 0.
        sampling: temperature 0 = greedy; None = temperature 1.
        seed: every random number is a function of it and of the position in the text.
        eos_token_id: one or several tokens that end the text; an eos is emitted, nothing after it.

    Yields:
        `Step`s; `DecodeStats(list_of_steps)` sums them up.

    Raises:
        TypeError, ValueError: an argument of a wrong type or out of range, by name.
        RuntimeError: the target gave a row of logits without a finite entry.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype != torch.int64:
        raise TypeError(
            f"input_ids: expected an int64 tensor [1, P], got {getattr(input_ids, 'dtype', type(input_ids))}"
        )
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected [1, P] with P >= 1, got shape {list(input_ids.shape)}")
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: this loop decodes one sequence, expected [1, P], got {list(input_ids.shape)}")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= target.vocab_size:
        span = f"{int(input_ids.min())}..{int(input_ids.max())}"
        raise ValueError(f"input_ids: expected tokens in [0, {target.vocab_size}), got {span}")
    for name, value, least in (("max_new_tokens", max_new_tokens, 1), ("num_draft_tokens", num_draft_tokens, 0)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value)}")
        if value < least:
            raise ValueError(f"{name}: expected a number >= {least}, got {value}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int, got {type(seed)}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected a 64-bit number, got {seed}")
    final_length = input_ids.shape[1] + max_new_tokens
    if target.max_length is not None and final_length > target.max_length:
        raise ValueError(
            f"max_new_tokens: expected at most {target.max_length - input_ids.shape[1]} after a prompt of "
            f"{input_ids.shape[1]} tokens (the model reads {target.max_length}), got {max_new_tokens}"
        )
    temperature = (sampling or SamplingParams()).temperatures(1, target.device)
    eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
    return _steps(
        target,
        input_ids.to(target.device),
        draft,
        final_length,
        num_draft_tokens,
        temperature,
        torch.tensor([seed], device=target.device),
        eos,
    )


@torch.inference_mode()
def _steps(
    target: CachedModel,
    tokens: Tensor,
    draft: DraftSource | None,
    final_length: int,
    num_draft_tokens: int,
    temperature: Tensor,
    seeds: Tensor,
    eos: set[int],
) -> Iterator[Step]:
    # The target has read everything but the newest token of the text; before the first step, nothing.
    num_read = 0
    while tokens.shape[1] < final_length:
        started = time.perf_counter()
        length = tokens.shape[1]
        lengths = torch.tensor([length], device=tokens.device)
        proposal = _propose(
            draft, tokens, lengths, min(num_draft_tokens, final_length - length - 1), temperature, seeds
        )
        num_proposed = proposal.tokens.shape[1]

        unread = torch.cat([tokens[:, num_read:], proposal.tokens], 1)
        output_tokens, num_accepted = verify_exact(
            target.forward(unread, num_read, num_proposed + 1),
            proposal.tokens,
            proposal.logits,
            uniforms(seeds, lengths, num_proposed, "accept"),
            uniforms(seeds, lengths, 1, "sample")[:, 0],
            temperature,
            proposal.lse,
        )
        emitted = output_tokens[0, : int(num_accepted[0]) + 1].tolist()
        if emitted[-1] < 0:
            raise RuntimeError(f"target: no finite logit after {length + len(emitted) - 1} tokens")
        emitted = _until_eos(emitted, eos)
        tokens = torch.cat([tokens, torch.tensor([emitted], device=tokens.device)], 1)
        num_read = tokens.shape[1] - 1
        yield Step(emitted, int(num_accepted[0]), num_proposed, time.perf_counter() - started)
        if emitted[-1] in eos:
            return


def _propose(
    draft: DraftSource | None,
    tokens: Tensor,
    lengths: Tensor,
    num_draft_tokens: int,
    temperature: Tensor,
    seeds: Tensor,
) -> Draft:
    """The proposal without its padding, so that the target reads no more than there is."""
    if draft is None or num_draft_tokens == 0:
        return Draft(tokens[:, :0])
    proposal = draft.propose(tokens, lengths, num_draft_tokens, temperature, seeds)
    num_proposed = int((proposal.tokens >= 0).long().cumprod(1).sum())
    return Draft(
        proposal.tokens[:, :num_proposed],
        None if proposal.logits is None else proposal.logits[:, :num_proposed],
        None if proposal.lse is None else proposal.lse[:, :num_proposed],
    )


def _until_eos(tokens: list[int], eos: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in eos:
            return tokens[: index + 1]
    return tokens


@dataclass(frozen=True)
class GreedyDifference:
    """A token that plain greedy decoding would not have emitted there.

    Args:
        index: place in the output, from 0.
        expected_token: the target's greedy choice, reading one token at a time.
        token: what was emitted.
        logit_gap: logit of expected_token minus logit of token, >= 0.
        rounding_bound: the gap that float32 rounding may explain.
    """

    index: int
    expected_token: int
    token: int
    logit_gap: float
    rounding_bound: float


@dataclass(frozen=True)
class GreedyCheck:
    """Plain greedy decoding beside an output: the differences, in order, and how long it took."""

    num_tokens: int
    differences: list[GreedyDifference]
    seconds: float

    @property
    def identical(self) -> bool:
        return not self.differences

    @property
    def only_rounding(self) -> bool:
        return all(difference.logit_gap <= difference.rounding_bound for difference in self.differences)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)


# A forward over K+1 tokens sums in another order than one over a single token, so their float32 logits differ: by
# 3e-6 of the largest logit at most where we measured it (135M parameters, 30 layers, K up to 10). Two tokens may swap
# within twice the difference; the bound leaves a factor of five for other models. A defect moves logits by far more.
ROUNDING = 3e-5


@torch.inference_mode()
def check_greedy(target: CachedModel, input_ids: Tensor, output_tokens: Sequence[int]) -> GreedyCheck:
    """Decode greedily, one token per forward and without the ops, and compare with `output_tokens` token by token.

    After a difference the check goes on along `output_tokens`, so that every token is checked given the ones before
    it. With no difference the output is that of plain greedy decoding.
    """
    started = time.perf_counter()
    differences = []
    unread, num_read = input_ids.to(target.device), 0
    for index, token in enumerate(output_tokens):
        logits = target.forward(unread, num_read, 1)[0, -1]
        num_read += unread.shape[1]
        expected_token = int(logits.argmax())
        if expected_token != token:
            gap = float(logits[expected_token] - logits[token])
            bound = ROUNDING * float(logits.abs().amax())
            differences.append(GreedyDifference(index, expected_token, token, gap, bound))
        unread = torch.tensor([[token]], device=target.device)
    return GreedyCheck(len(output_tokens), differences, time.perf_counter() - started)
