"""The results of the loop: steps while it runs, then the sequences and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from reprlib import Repr
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pieces import CONTEXT
from .planning import PlannedStep
from .rows import RowStep
from .view import View, ViewRow, beginning, view

# Cut long lists in a `repr`, because lists with an entry per row may have hundreds of entries.
_SHORT = Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 8
_SHORT.maxstring, _SHORT.maxother = 200, 400


def shortened(name: str, **values: object) -> str:
    """The `repr` of an object with these values; long values are cut."""
    return f"{name}({', '.join(f'{key}={_SHORT.repr(value)}' for key, value in values.items())})"


def acceptance_of(steps: list[RowStep]) -> float | None:
    num_proposed = sum(step.num_proposed for step in steps)
    return sum(step.num_accepted for step in steps) / num_proposed if num_proposed else None


@dataclass(frozen=True)
class Step:
    """One round of drafting and verifying, for every row of the batch. A notebook shows it as `show` does.

    Args:
        tokens: the tokens that each row emitted: accepted drafts, then the next token. The tokens are cut after an eos
            token, at the row's limit, and where a stop string ends the row. Empty for a row that had already ended.
        num_accepted: drafts that the target accepted, per row, including those that were cut.
        num_proposed: drafts that were verified, per row.
        rejected: the first draft that the target rejected, per row; -1 = none.
        finished: whether each row has ended.
        seconds: duration of the step, measured on the host.
    """

    tokens: list[list[int]]
    num_accepted: list[int]
    num_proposed: list[int]
    rejected: list[int]
    finished: list[bool]
    seconds: float

    def show(self, tokenizer: Any = None) -> View:
        """What each row emitted, as `GenerationOutput.show` shows it, but decoded without the text before it.

        Examples:
            >>> from torch_specops.decode import Step
            >>> Step([[5, 6]], [1], num_proposed=[3], rejected=[9], finished=[False], seconds=0.1).show()
            row 0: 1 of 3 drafts accepted
             5~~ 9~~[ 6]
        """
        return view(tokenizer, self._rows())

    def _rows(self) -> Iterator[ViewRow]:
        rows = zip(self.tokens, self.num_accepted, self.num_proposed, self.rejected, strict=True)
        for row, (tokens, accepted, proposed, rejected) in enumerate(rows):
            yield f"row {row}: {accepted} of {proposed} drafts accepted", [(tokens, accepted, rejected)], (), ()

    def _repr_html_(self) -> str:
        return beginning(self._rows())


class TopLogprobs(NamedTuple):
    """The most likely tokens at each position, in descending order; ties are ordered by index."""

    tokens: Tensor  # [B, L, N] int64 ([n, N] in a `Completion`), -1 where no token was generated
    values: Tensor  # float32 log-probabilities; NaN where no token was generated, -inf for excluded tokens


@dataclass(repr=False)
class GenerationStats:
    """Counts and times, summed over all steps.

    Args:
        seeds: the seed of each row, which reproduces the output if passed as `seed`; empty for sessions and
            `generate_many`.
        num_steps: steps of the batch.
        num_row_steps: the number of steps in which a row took part, summed over the rows.
        num_tokens: emitted tokens of all rows, without those that were cut.
        num_accepted, num_proposed: accepted and verified drafts of all rows.
        accepted_at, proposed_at: the same counts, separately for each position of a draft in its step.
        seconds: time of the steps, without compilation.
        prefill_seconds: time of the prefill by target and draft. If steps are eager and all prompts have the same
            length, the target reads them in the first step, and that time is part of `seconds`.
        compile_seconds: time spent compiling and capturing; 0 when nothing was compiled.
        compiled: whether the steps were compiled, and why.
        verify: how drafts are verified: "exact", "block", "gumbel" or "sigmoid"; empty before the first batch.
        state_bytes: memory of the recurrent states of target and draft (linear attention, Mamba), without keys and
            values; 0 if they have no such layers.
        invariant: whether the target's logits depend on the text alone, to the last bit.
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
    verify: str = ""
    state_bytes: int = 0
    invariant: bool = False

    def __repr__(self) -> str:
        return shortened(
            "GenerationStats",
            num_tokens=self.num_tokens,
            num_steps=self.num_steps,
            mean_acceptance_length=round(self.mean_acceptance_length, 2),
            acceptance_rate_per_position=[round(rate, 2) for rate in self.acceptance_rate_per_position],
            tokens_per_second=round(self.tokens_per_second, 1),
            compiled=self.compiled.partition(":")[0],
            verify=self.verify,
        )

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
        """Accepted drafts / verified drafts for each position of a draft in its step. A draft after a rejected draft
        counts as verified and not accepted."""
        return [
            accepted / proposed if proposed else 0.0
            for accepted, proposed in zip(self.accepted_at, self.proposed_at, strict=True)
        ]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens of all rows / `seconds`."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def add(self, num_tokens: list[int], num_accepted: list[int], num_proposed: list[int]) -> None:
        """Add the counts of a step. Rows without a new token are skipped: they had already ended, or the target
        failed."""
        self.num_steps += 1
        for new, accepted, proposed in zip(num_tokens, num_accepted, num_proposed, strict=True):
            if new == 0:
                continue
            self.num_row_steps += 1
            self.num_tokens += new
            self.num_accepted += accepted
            self.num_proposed += proposed
            new_positions = [0] * (proposed - len(self.proposed_at))
            self.proposed_at += new_positions
            self.accepted_at += new_positions
            for position in range(proposed):
                self.proposed_at[position] += 1
                self.accepted_at[position] += position < accepted


@dataclass(frozen=True, eq=False, repr=False)
class GenerationOutput:
    """Finished sequences. A notebook shows them as `show` does, with the numbers of tokens.

    Args:
        sequences: [B, L] int64: the prompt without its padding, the new tokens with their eos, then pad_token_id. New
            tokens begin at `prompt_lengths`, even if the prompts were padded to a larger width; `texts` and
            `new_tokens` extract them.
        prompt_lengths: [B] int64.
        lengths: [B] int64, tokens of prompt and output.
        stats: counts and times.
        errors: maps a row to the reason why it ended early; empty when every row ended normally.
        logprobs: [B, L] float32, the log-probability of every new token in `sequences` under the target, NaN elsewhere;
            None if not asked for.
        top_logprobs: the most likely tokens at the position of every new token; None if not asked for.
        finish_reasons: why each row ended: "eos", "stop" (a stop string or a stopping criterion), "length", "error";
            None = it has not ended.
        steps: for each row, the steps in which it took part (`torch_specops.decode.RowStep`).

    Examples:
        >>> import torch, torch_specops
        >>> output = torch_specops.GenerationOutput(
        ...     sequences=torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]]), prompt_lengths=torch.tensor([2, 1]),
        ...     lengths=torch.tensor([4, 2]), stats=None)
        >>> output.new_tokens(0), output.new_tokens(1)
        ([7, 8], [3])
        >>> output
        GenerationOutput(prompt_lengths=[2, 1], num_new_tokens=[2, 1], finish_reasons=[], stats=None)
    """

    sequences: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    stats: GenerationStats
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: Tensor | None = None
    finish_reasons: list[str | None] = field(default_factory=list)
    top_logprobs: TopLogprobs | None = None
    steps: list[list[RowStep]] = field(default_factory=list)

    def __repr__(self) -> str:
        values: dict[str, object] = {
            "prompt_lengths": self.prompt_lengths.tolist(),
            "num_new_tokens": (self.lengths - self.prompt_lengths).tolist(),
            "finish_reasons": self.finish_reasons,
        }
        if self.errors:
            values["errors"] = self.errors
        return shortened(type(self).__name__, **values, stats=self.stats)

    def new_tokens(self, row: int) -> list[int]:
        """The new tokens of one row."""
        return self.sequences[row, int(self.prompt_lengths[row]) : int(self.lengths[row])].tolist()

    def texts(self, tokenizer: Any, **decode_arguments: Any) -> list[str]:
        """The new text of every row. A stop string that ended a row stays in its text.

        Args:
            tokenizer: a tokenizer of transformers, or another object with its `decode`.
            decode_arguments: passed to `decode`. The default is `skip_special_tokens=True`, which also leaves out the
                eos token that ended a row, special or not. `skip_special_tokens=False` keeps every new token.
        """
        arguments = {"skip_special_tokens": True} | decode_arguments
        texts = []
        for row in range(len(self.lengths)):
            tokens, start = self.new_tokens(row), int(self.prompt_lengths[row])
            if arguments["skip_special_tokens"] and self.finish_reasons[row : row + 1] == ["eos"]:
                tokens.pop()
            before = self.sequences[row, max(start - CONTEXT, 0) : start].tolist()
            prompt, whole = (tokenizer.decode(ids, **arguments) for ids in (before, before + tokens))
            is_longer = whole.startswith(prompt)
            texts.append(whole[len(prompt) :] if is_longer else tokenizer.decode(tokens, **arguments))
        return texts

    @property
    def acceptance(self) -> list[float | None]:
        """Accepted drafts / verified drafts of each row, as in `stats.acceptance_rate`; None without drafts."""
        return list(map(acceptance_of, self.steps))

    def show(self, tokenizer: Any = None) -> View:
        """The new text of every row: accepted drafts, the first rejected draft of each step if it has a text, and the
        target's own tokens. A rejected line break is shown as ↵. A rejected draft may stand a few characters early,
        because the text of the tokens before it may still change.

        Args:
            tokenizer: as in `texts`; None = show the numbers of the tokens.

        Returns:
            A string, with the target's own tokens in brackets and rejected drafts between ~~, which a notebook shows in
            colours. A character of several tokens is an accepted draft if all of them were.

        Examples:
            >>> import torch, torch_specops
            >>> from torch_specops.decode import RowStep
            >>> output = torch_specops.GenerationOutput(
            ...     sequences=torch.tensor([[5, 6, 7, 8, 9]]), prompt_lengths=torch.tensor([1]),
            ...     lengths=torch.tensor([5]), stats=None, finish_reasons=["length"],
            ...     steps=[[RowStep(3, 2, 4, rejected=1), RowStep(1, 0, 4, rejected=3)]])
            >>> output.show()
            row 0: 4 tokens in 2 steps, 2 of 8 drafts accepted, ended by length
             6 7~~ 1~~[ 8]~~ 3~~[ 9]
        """
        return view(tokenizer, self._rows())

    def _rows(self) -> Iterator[ViewRow]:
        for row, (steps, reason) in enumerate(zip(self.steps, self.finish_reasons, strict=True)):
            tokens, prompt = self.new_tokens(row), self.sequences[row, : int(self.prompt_lengths[row])].tolist()
            accepted, proposed = sum(step.num_accepted for step in steps), sum(step.num_proposed for step in steps)
            title = f"row {row}: {len(tokens)} tokens in {len(steps)} steps, {accepted} of {proposed} drafts accepted"
            title += "" if reason is None else f", ended by {reason}"
            left = iter(tokens)
            text = [(list(islice(left, step.num_tokens)), step.num_accepted, step.rejected) for step in steps]
            yield title, text, prompt, tokens[-1:] if reason == "eos" else ()

    def _repr_html_(self) -> str:
        return beginning(self._rows())


class RecordReader:
    """Copies the records of steps to the host, and keeps the plan of each step.

    On CUDA, records are copied to pinned memory and read one step late, so that the device runs the next step while the
    host processes a record.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._queue: list[tuple[Tensor, PlannedStep, torch.cuda.Event | None]] = []

    def push(self, record: Tensor, planned: PlannedStep) -> None:
        if not self._is_cuda:
            self._queue.append((record, planned, None))
            return
        pinned = torch.empty(record.shape, dtype=record.dtype, device="cpu", pin_memory=True)
        pinned.copy_(record, non_blocking=True)
        event = torch.cuda.Event()
        # Record the event on the stream of the copy, because the record's device need not be the current device.
        event.record(torch.cuda.current_stream(record.device))
        self._queue.append((pinned, planned, event))

    def pop(self, early: bool = False) -> tuple[Tensor, PlannedStep] | None:
        """The oldest record and its plan, or None if there is none. On CUDA, the newest record is returned only if
        `early`, because reading it waits for the device."""
        if len(self._queue) < (2 if self._is_cuda and not early else 1):
            return None
        record, planned, event = self._queue.pop(0)
        if event is not None:
            event.synchronize()
        return record, planned


# A function that takes every step, or an object with `put(tokens)` and `end()`, like transformers' streamers.
Streamer = Callable[[Step], object] | Any


def streamer_calls(
    streamer: Streamer | None, input_ids: Any, num_rows: int
) -> tuple[Callable[[Step], object], Callable[[], object]]:
    """The function to call with every step, and the function to call at the end. A transformers streamer gets the
    prompt here."""
    if streamer is None:
        return lambda step: None, lambda: None
    if hasattr(streamer, "put") and hasattr(streamer, "end"):
        if num_rows != 1:
            raise ValueError(f"streamer: an object with put and end takes one row, got {num_rows} rows")
        # There is one row, so a list of prompts has exactly one prompt.
        prompt = torch.as_tensor(input_ids[0])[None].long() if isinstance(input_ids, (list, tuple)) else input_ids
        streamer.put(torch.as_tensor(prompt, device="cpu"))
        return lambda step: streamer.put(torch.tensor(step.tokens[0], dtype=torch.int64, device="cpu")), streamer.end
    if callable(streamer):
        return streamer, lambda: None
    raise TypeError(f"streamer: expected a callable, or an object with put and end, got {type(streamer)}")
