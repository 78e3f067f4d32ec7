"""More requests than rows: a row whose sequence has ended takes the next request."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..drafts.rows import read_texts
from ..sampling import SamplingParams, SamplingTensors
from .inputs import (
    BatchRequest,
    Prompts,
    Seed,
    check_logprobs,
    check_room,
    checked_sampling,
    keep_features,
    read_prompts,
    read_seeds,
)
from .loop import Loop
from .output import GenerationStats, Progress
from .state import first_state
from .step import DecodeState

__all__ = ["Completion", "Request", "RequestRows"]

# A request with more eos tokens widens the state, and its pieces are compiled again.
EOS_TOKENS = 8


@dataclass(eq=False)
class Request:
    """A prompt for `SpeculativeDecoder.generate_many`, and how to continue it.

    Args:
        input_ids: [P] int64, a tensor, an array of numpy or a list, P >= 1, without padding.
        max_new_tokens: the most tokens to emit, >= 0.
        sampling: None = the decoder's.
        seed: an int, from which the row's seed is made as for the first row of `generate`; or the row's own seed, as a
            list or tensor of one. None draws an int when the request is read.
        eos_token_id: a token or several; () = none; None = those of the target's generation config.

    Example:
        >>> import transformers, torch_specops
        >>> from torch_specops import Request, SamplingParams
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
        >>> decoder = torch_specops.SpeculativeDecoder(transformers.LlamaForCausalLM(config).eval())
        >>> greedy = SamplingParams(temperature=0.0)
        >>> requests = [Request([5, 6], 9, seed=1), Request([7], 2, greedy), Request([8, 9], 3, greedy)]
        >>> for completion in decoder.generate_many(requests, batch_size=2):
        ...     print(completion.index, len(completion.tokens), completion.finish_reason)
        1 3 length
        2 5 length
        0 11 length
    """

    input_ids: Tensor | Sequence[int]
    max_new_tokens: int = 128
    sampling: SamplingParams | None = None
    seed: Seed = None
    eos_token_id: int | Sequence[int] | None = None


@dataclass(frozen=True, eq=False)
class Completion:
    """The result of a request. Its tensors are on the CPU.

    Args:
        index: the request's place in the input, from 0 on.
        tokens: [P + n] int64, the prompt and the new tokens; the last one may be an eos token.
        new_tokens: [n] int64.
        logprobs: [n] float32, the log-probability of every new token under the target; None if not asked for.
        seed: the row's seed; a request with `seed=[completion.seed]` gets the same tokens. None if the request was
            refused.
        finish_reason: "eos", "length" or "error".
        error: why the request was refused or ended early; None = it ended normally.

    Example:
        >>> import torch, torch_specops
        >>> tokens = torch.tensor([5, 6, 7, 2])
        >>> torch_specops.Completion(0, tokens, tokens[2:], None, seed=1, finish_reason="eos").error is None
        True
    """

    index: int
    tokens: Tensor
    new_tokens: Tensor
    logprobs: Tensor | None
    seed: int | None
    finish_reason: str
    error: str | None = None


@dataclass
class _Text:
    """A request in its row.

    Args:
        values: of its row, before the first step.
        new: its tokens so far.
    """

    index: int
    values: DecodeState
    new: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return int(self.values.lengths[0])

    @property
    def limit(self) -> int:
        return int(self.values.limits[0])

    def completion(self, logprobs: Tensor | None) -> Completion:
        """The request's completion, now that its row has ended.

        Args:
            logprobs: [n], or None.
        """
        reason, error = "length", None
        if self.new and self.new[-1] in self.values.eos[0].tolist():
            reason = "eos"
        elif self.length + len(self.new) < self.limit:
            reason, error = "error", f"target: no finite logit after {self.length + len(self.new)} tokens"
        # Outside inference mode, because users train on what was generated.
        with torch.inference_mode(False):
            prompt, new = self.values.tokens[0].clone(), torch.tensor(self.new, dtype=torch.int64)
            own = None if logprobs is None else logprobs.clone()
            return Completion(self.index, torch.cat([prompt, new]), new, own, int(self.values.seeds[0]), reason, error)


class RequestRows:
    """The rows of a batch; each holds a request or is free. The arguments are those of `generate_many`.

    Args:
        loop: runs the steps.
        sampling: of requests that have none.
    """

    def __init__(
        self,
        loop: Loop,
        sampling: SamplingParams,
        requests: Iterable[Any],
        batch_size: int,
        max_length: int | None,
        logprobs: str | None,
    ) -> None:
        if isinstance(requests, (Request, str)) or not isinstance(requests, Iterable):
            raise TypeError(f"requests: expected an iterable of Request, got {type(requests)}")
        checks.check_int("batch_size", batch_size, 1)
        check_logprobs(logprobs)
        if getattr(loop.target, "reads_inputs", False):
            raise ValueError("target: generate_many takes no encoder-decoder model, because a Request has no inputs")
        if loop.draft is not None and not loop.draft.can_restart:
            raise ValueError("draft: generate_many needs the method restart (DraftSource) of a draft that has start")
        if max_length is not None:
            checks.check_int("max_length", max_length, 2)
        elif not isinstance(requests, Collection):
            raise ValueError("max_length: expected a number, because requests that are read lazily have no longest one")
        longest, total = _largest(requests) if isinstance(requests, Collection) else (0, 0)
        self._loop = loop
        self._sampling = sampling
        self._requests = requests
        self._max_length = max_length or longest
        self._logprobs = logprobs
        self._texts: list[_Text | None] = [None] * batch_size
        # Rows whose text is not yet on the device.
        self._unread: list[int] = []
        self._total = total

    def completions(self, working: Callable[[], AbstractContextManager[object]]) -> Iterator[Completion]:
        """The completions, in the order in which requests finish.

        Args:
            working: a context manager that is entered for each step, but not while a request is read or a completion is
                used.
        """
        requests = enumerate(self._requests)
        is_open = True
        while True:
            while is_open and None in self._texts:
                read = next(requests, None)
                is_open = read is not None
                completion = None if read is None else self._add(*read)
                if completion is not None:
                    yield completion
            if all(text is None for text in self._texts):
                return
            with working():
                completions = self._advance()
            yield from completions

    def start(self) -> Progress:
        """Make room in the models, before the first completion. Returns the progress of the batch."""
        loop, batch = self._loop, len(self._texts)
        loop.choose_compile(self._total / batch)
        # A row without a request is a finished sequence of one token.
        stats = GenerationStats(seeds=[], compiled=loop.compile_reason)
        self._progress = Progress([1] * batch, [1] * batch, [True] * batch, stats, num_refills=[0] * batch)
        self._steps = loop.steps(self._progress)
        readable = [model.max_length for model in (loop.target, loop.draft) if model is not None]
        capacity = loop.capacity(min(length for length in (self._max_length, *readable) if length is not None))
        ones = torch.ones(batch, dtype=torch.int64)
        prompts = Prompts(torch.zeros_like(ones).unsqueeze(1), ones, ones, torch.full((batch, EOS_TOKENS), -1), 0)
        greedy = SamplingTensors(torch.zeros(batch))
        state = loop.runner.start(first_state(prompts, greedy, torch.zeros_like(ones), capacity, self._logprobs), {})
        keep_features(loop.target, loop.draft)
        loop.target.start(batch, capacity)
        # The first forward allocates the cache.
        loop.target.forward(state.tokens[:, :1], torch.zeros_like(state.tokens[:, :1]), 1)
        loop.start_draft(capacity)
        return self._progress

    def _add(self, index: int, request: Any) -> Completion | None:
        """Put a request into a free row. One that is refused, or asks for no tokens, is completed at once."""
        try:
            text = _Text(index, self._read(request))
        except (TypeError, ValueError) as error:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Completion(index, nothing, nothing.clone(), self._no_logprobs(), None, "error", str(error))
        if text.length == text.limit:
            return text.completion(self._no_logprobs())
        row = self._texts.index(None)
        self._texts[row] = text
        self._unread.append(row)
        return None

    def _advance(self) -> list[Completion]:
        """Run a step; returns the completions of the requests that end with it."""
        if self._unread:
            self._refill()
        step = next(self._steps)
        ended = []
        for row, text in enumerate(self._texts):
            if text is not None:
                text.new += step.tokens[row]
                if step.finished[row]:
                    ended.append(row)
        if ended and self._loop.draft is not None:
            state = self._loop.runner.state
            self._loop.draft.end(state.tokens[ended], state.lengths[ended])
        return [self._completed(row) for row in ended]

    def _no_logprobs(self) -> Tensor | None:
        return None if self._logprobs is None else torch.zeros(0)

    def _completed(self, row: int) -> Completion:
        """Free the row; returns the completion of its request."""
        text = self._texts[row]
        assert text is not None
        logprobs = self._loop.runner.state.logprobs
        if logprobs is not None:
            logprobs = logprobs[row, text.length : text.length + len(text.new)].cpu()
        self._texts[row] = None
        return text.completion(logprobs)

    def _read(self, given: Any) -> DecodeState:
        """The values of a row for this request.

        Raises:
            TypeError, ValueError: what `generate` would refuse.
        """
        request = given if isinstance(given, Request) else Request(given)
        prompt, limit, eos = _as_row(request.input_ids), request.max_new_tokens, request.eos_token_id
        prompts = read_prompts(self._loop.target, BatchRequest(prompt, max_new_tokens=limit, eos_token_id=eos))
        check_room(self._loop.target, self._loop.draft, int(prompts.limits[0]), self._max_length)
        sampling = (checked_sampling(request.sampling) or self._sampling).tensors(
            1, prompt_lengths=prompts.lengths, eos=prompts.eos, vocab_size=self._loop.target.vocab_size
        )
        return first_state(prompts, sampling, read_seeds(request.seed, 1), prompts.tokens.shape[1])

    def _refill(self) -> None:
        """Put the new requests into their rows, and let the models read their prompts."""
        started, loop = time.perf_counter(), self._loop
        for row in self._unread:
            text = self._texts[row]
            assert text is not None
            loop.runner.refill(row, text.values)
            self._progress.refill(row, text.length, text.limit)
        state = loop.runner.state
        rows = torch.tensor(self._unread, device=state.tokens.device)
        read_texts(loop.target, state.tokens, state.lengths, rows, num_unread=1)
        if loop.draft is not None:
            loop.draft.compile(loop.runner.draft_shape)
            loop.draft.restart(state.tokens, state.lengths, rows)
        self._unread = []
        self._progress.stats.prefill_seconds += time.perf_counter() - started


def _as_row(input_ids: Any) -> Tensor:
    """[1, P] of a prompt [P]."""
    try:
        tokens = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"input_ids: expected an int64 tensor [P] or a list of tokens, got {type(input_ids)}"
        ) from error
    if tokens.dim() != 1 or len(tokens) == 0:
        raise ValueError(f"input_ids: expected [P] with P >= 1, got shape {list(tokens.shape)}")
    return tokens.unsqueeze(0)


def _largest(requests: Collection[Any]) -> tuple[int, int]:
    """The length of the longest request, prompt and new tokens, and the new tokens of all requests together. Requests
    that cannot be read are skipped."""
    longest = total = 0
    for request in requests:
        given = request if isinstance(request, Request) else Request(request)
        try:
            length, new = len(given.input_ids), int(given.max_new_tokens)
        except (TypeError, ValueError):
            continue
        longest, total = max(longest, length + new), total + new
    return longest, total
