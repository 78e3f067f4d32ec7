"""What the loop returns: steps while it runs, then the sequences and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .step import DecodeState, unpack_record
from .stopping import Stopping

__all__ = [
    "GenerationOutput",
    "GenerationStats",
    "KeptLogits",
    "Progress",
    "RecordReader",
    "Step",
    "Streamer",
    "collect",
    "streamer_calls",
]


@dataclass(frozen=True)
class Step:
    """One round of drafting and verifying, for every row of the batch.

    Args:
        tokens: the tokens that each row emitted: accepted drafts, then the next token, cut after an eos, at the row's
            limit, and where a stop string ends it. Empty for a row that had already ended.
        num_accepted: drafts that the target accepted, per row, including those that were cut.
        num_proposed: drafts that were verified, per row.
        finished: whether each row has ended.
        seconds: duration of the step, measured on the host.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
    num_proposed: list[int]
    finished: list[bool]
    seconds: float


@dataclass
class GenerationStats:
    """Counts and times, summed over all steps.

    Args:
        seeds: one per row; empty for `generate_many`. Passed as `seed`, they reproduce the output.
        num_steps: steps of the batch.
        num_row_steps: the steps that each row took part in, summed over the rows.
        num_tokens: emitted tokens of all rows, without those that were cut.
        num_accepted, num_proposed: accepted and verified drafts of all rows.
        accepted_at, proposed_at: the same, for each position of a draft in its step.
        seconds: time of the steps, without compilation.
        prefill_seconds: time of reading the prompts with target and draft. An eager loop lets the target read prompts
            of one length in the first step, and that time is then part of `seconds`.
        compile_seconds: time spent compiling and capturing; 0 when nothing was compiled.
        compiled: whether the steps ran compiled, and why.
    """

    seeds: list[int]
    num_steps: int = 0
    num_row_steps: int = 0
    num_tokens: int = 0
    num_accepted: int = 0
    num_proposed: int = 0
    accepted_at: list[int] = field(default_factory=list)
    proposed_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    compiled: str = ""

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per row and step, including the next token: 1 when no draft is accepted."""
        return self.num_tokens / max(self.num_row_steps, 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts / verified drafts; drafts after a rejection count as verified. None without drafts."""
        return self.num_accepted / self.num_proposed if self.num_proposed else None

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Accepted / verified drafts at the first position of a step, the second, ...; not conditional on the drafts
        before."""
        return [
            accepted / proposed if proposed else 0.0
            for accepted, proposed in zip(self.accepted_at, self.proposed_at, strict=True)
        ]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows per second of stepping."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def add(self, step: Step) -> None:
        self.num_steps += 1
        self.seconds += step.seconds
        for tokens, num_accepted, num_proposed in zip(step.tokens, step.num_accepted, step.num_proposed, strict=True):
            self.add_row(len(tokens), num_accepted, num_proposed)

    def add_row(self, num_tokens: int, num_accepted: int, num_proposed: int) -> None:
        """Count one row of a step. A row without a token had already ended, or the target failed."""
        if num_tokens == 0:
            return
        self.num_row_steps += 1
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted
        self.num_proposed += num_proposed
        new_positions = [0] * (num_proposed - len(self.proposed_at))
        self.proposed_at += new_positions
        self.accepted_at += new_positions
        for position in range(num_proposed):
            self.proposed_at[position] += 1
            self.accepted_at[position] += position < num_accepted


@dataclass(frozen=True)
class GenerationOutput:
    """Finished sequences.

    Args:
        sequences: [B, L] int64: the prompt without its padding, the new tokens with their eos, then pad_token_id.
        prompt_lengths: [B] int64.
        lengths: [B] int64, tokens of prompt and output.
        stats: counts and times.
        errors: row -> why it ended early; empty when every row ended normally.
        interrupted: True if a KeyboardInterrupt ended decoding. The output then holds the tokens generated so far.
        logprobs: [B, L] float32, the log-probability of every new token in `sequences` under the target, NaN elsewhere;
            None if not asked for.
        finish_reasons: why each row ended: "eos", "stop" (a stop string or a stopping criterion), "length", "error";
            None = it has not ended.

    Example:
        >>> import torch, torch_specops
        >>> output = torch_specops.GenerationOutput(
        ...     sequences=torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]]), prompt_lengths=torch.tensor([2, 1]),
        ...     lengths=torch.tensor([4, 2]), stats=None)
        >>> output.new_tokens(0), output.new_tokens(1)
        ([7, 8], [3])
    """

    sequences: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    stats: GenerationStats
    errors: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False
    logprobs: Tensor | None = None
    finish_reasons: list[str | None] = field(default_factory=list)

    def new_tokens(self, row: int) -> list[int]:
        """The new tokens of one row."""
        return self.sequences[row, int(self.prompt_lengths[row]) : int(self.lengths[row])].tolist()


@dataclass
class Progress:
    """What the host knows from the records read so far. On CUDA the state on the device may be one step ahead.

    Args:
        limits: the length at which each row ends.
        lengths: tokens of each row.
        finished: whether each row has ended.
        stats: counts and times.
        stopping: other rules that end rows; None = there are none.
        logits: keeps the target's logits; None = they are not kept.
        num_refills: how many sequences each row had before its current one; empty in a batch without refills.
    """

    limits: list[int]
    lengths: list[int]
    finished: list[bool]
    stats: GenerationStats
    stopping: Stopping | None = None
    logits: KeptLogits | None = None
    num_refills: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._prompt_lengths = self.lengths

    @property
    def room(self) -> int:
        """The most tokens that any row may still get."""
        rows = zip(self.limits, self.lengths, self.finished, strict=True)
        return max(0 if ended else limit - length for limit, length, ended in rows)

    def cuts(self) -> dict[int, int]:
        """Rows that a rule of `stopping` ended in the newest step -> their lengths."""
        if self.stopping is None:
            return {}
        return {row: self._prompt_lengths[row] + kept for row, kept in self.stopping.cuts.items()}

    def add(self, record: Tensor, seconds: float) -> tuple[Step, list[int], list[int]]:
        """Count a step.

        Returns:
            The step, and the numbers of drafts proposed and accepted in the rows that took part.
        """
        step = Step(*unpack_record(record), seconds)
        active = [row for row, ended in enumerate(self.finished) if not ended]
        if self.stopping is not None:
            # On CUDA a stopped row has taken part in one more step.
            for row, is_stopped in enumerate(self.stopping.stopped):
                if is_stopped:
                    step.tokens[row], step.num_accepted[row], step.num_proposed[row] = [], 0, 0
        self.stats.add(step)
        if self.logits is not None:
            self.logits.keep(list(map(len, step.tokens)))
        if self.stopping is not None:
            tokens, finished = self.stopping.add(step.tokens, step.finished)
            self.stats.num_tokens += sum(map(len, tokens)) - sum(map(len, step.tokens))
            step = replace(step, tokens=tokens, finished=finished)
        self.lengths = [length + len(tokens) for length, tokens in zip(self.lengths, step.tokens, strict=True)]
        self.finished = step.finished
        return step, [step.num_proposed[row] for row in active], [step.num_accepted[row] for row in active]

    def refill(self, row: int, length: int, limit: int) -> None:
        """Begin to count another sequence in this row."""
        self.lengths[row], self.limits[row], self.finished[row] = length, limit, False
        self.num_refills[row] += 1

    def without_earlier(self, record: Tensor, num_refills: list[int]) -> Tensor:
        """The record of a step that began when `num_refills` were counted, cleared in rows that were refilled since:
        there it is about sequences that had already ended."""
        rows = [row for row, both in enumerate(zip(num_refills, self.num_refills, strict=True)) if both[0] != both[1]]
        if rows:
            record = record.clone()
            record[rows, :-3] = -1
            record[rows, -3:] = 0
        return record


def collect(
    state: DecodeState, progress: Progress, prompt_lengths: Tensor, pad_token_id: int, interrupted: bool
) -> GenerationOutput:
    """The output of a batch, up to the newest record read: on CUDA the state may be one step ahead."""
    lengths = torch.tensor(progress.lengths, device=state.tokens.device)
    width = int(lengths.max())
    inside = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
    sequences = torch.where(inside, state.tokens[:, :width], pad_token_id)
    logprobs = None if state.logprobs is None else torch.where(inside, state.logprobs[:, :width], math.nan)
    newest = state.tokens.gather(1, (lengths - 1).unsqueeze(1))
    ends_with_eos = ((newest == state.eos).any(1) & (lengths > prompt_lengths)).tolist()
    errors: dict[int, str] = {}
    reasons: list[str | None] = []
    for row, (ended, failed) in enumerate(zip(progress.finished, state.failed.tolist(), strict=True)):
        # On the device, a stopped row may have gone on and failed.
        stopped = progress.stopping is not None and progress.stopping.stopped[row]
        if ended and failed and not stopped:
            errors[row] = f"target: no finite logit after {progress.lengths[row]} tokens"
        early = "error" if row in errors else "eos" if ends_with_eos[row] else "stop" if stopped else None
        reasons.append(early or ("length" if ended else None))
    return GenerationOutput(
        sequences=sequences,
        prompt_lengths=prompt_lengths.clone(),
        lengths=lengths,
        stats=progress.stats,
        errors=errors,
        interrupted=interrupted,
        logprobs=logprobs,
        finish_reasons=reasons,
    )


class KeptLogits:
    """The target's logits of every new token, B x L x V x 4 bytes.

    An eager step pushes all of its logits; once the host has read the step's record, only those of the emitted tokens
    are kept.
    """

    def __init__(self, num_rows: int) -> None:
        self._steps: list[Tensor] = []
        self._rows: list[list[Tensor]] = [[] for _ in range(num_rows)]

    def push(self, logits: Tensor) -> None:
        """Add the logits of a step [B, K+1, V]."""
        self._steps.append(logits)

    def keep(self, num_tokens: list[int]) -> None:
        """Of the oldest step that was pushed, keep the first `num_tokens` logits of each row."""
        logits = self._steps.pop(0)
        for row, count in enumerate(num_tokens):
            self._rows[row] += logits[row, :count].to(torch.float32, copy=True)

    def at(self, place: int) -> Tensor:
        """[B, V] float32, the logits that gave each row's new token number `place`; NaN for rows that have none."""
        found = [own[place] if place < len(own) else None for own in self._rows]
        none = next(torch.full_like(logits, math.nan) for logits in found if logits is not None)
        return torch.stack([none if logits is None else logits for logits in found])


class RecordReader:
    """Copies the records of steps to the host, each with a note by the caller.

    On CUDA the copy goes through pinned memory and is read one step late, so that the next step is already queued
    while the host looks at this one.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._queue: list[tuple[Tensor, list[int], torch.cuda.Event | None]] = []

    def push(self, record: Tensor, note: list[int]) -> None:
        if not self._is_cuda:
            self._queue.append((record, note, None))
            return
        pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
        pinned.copy_(record, non_blocking=True)
        event = torch.cuda.Event()
        # The copy is on the stream of the record's device, which need not be the current device.
        event.record(torch.cuda.current_stream(record.device))
        self._queue.append((pinned, note, event))

    def pop(self) -> tuple[Tensor, list[int]] | None:
        """The oldest record and its note; None if it is too early to read them."""
        if self._is_cuda and len(self._queue) < 2:
            return None
        record, note, event = self._queue.pop(0)
        if event is not None:
            event.synchronize()
        return record, note


# Called with every step; or an object with `put(tokens)` and `end()`, like transformers' streamers.
Streamer = Callable[[Step], object] | Any


def streamer_calls(
    streamer: Streamer | None, input_ids: Tensor, num_rows: int
) -> tuple[Callable[[Step], object], Callable[[], object]]:
    """The functions to call with every step, and at the end. A transformers streamer is given the prompt here."""
    if streamer is None:
        return lambda step: None, lambda: None
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        if num_rows != 1:
            raise ValueError(f"streamer: one with put and end takes a batch of one, got {num_rows} rows")
        streamer.put(torch.as_tensor(input_ids).cpu())
        return lambda step: streamer.put(torch.tensor(step.tokens[0], dtype=torch.int64)), streamer.end
    if callable(streamer):
        return streamer, lambda: None
    raise TypeError(f"streamer: expected a callable, or an object with put and end, got {type(streamer)}")
