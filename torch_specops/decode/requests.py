"""A request for a row of a batch, the handle of a submitted request, and its completion."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from torch import Tensor

from .. import checks
from ..grammars import Grammar
from ..models import LanguageModel
from ..sampling import SamplingParams
from .inputs import Prompts, Sampling, Seed, as_prompt, read_prompts
from .keywords import refuse_unknown
from .output import TopLogprobs, acceptance_of, shortened
from .rows import RowStep


@dataclass(init=False, eq=False, repr=False)
class Request:
    """A prompt for a session or `SpeculativeDecoder.generate_many`, and how to continue it.

    Args:
        input_ids: [P] int64, a tensor, an array of numpy or a list, P >= 1, without padding.
        max_new_tokens: the most tokens to emit, >= 0.
        sampling: None = the decoder's. A mapping has fields of `SamplingParams`, which are checked when the request is
            submitted: a wrong field is this request's error.
        seed: an int, hashed to the row's seed as for the first row of `generate`; or the row's seed itself, as a list
            or tensor of length 1. None draws an int when the request is submitted.
        eos_token_id: a token or several; () = none; None = as in the target's generation config.
        stop_strings, tokenizer: as in `SpeculativeDecoder.generate`.
        max_time: seconds from the request's admission to a row until the step that ends it, >= 0; None = no limit.
        inputs: the input of the target's encoder, by name, with a batch of 1; or the images of the prompt.
        grammar: a `Grammar` that no other request uses.

    Examples:
        >>> import transformers, torch_specops
        >>> from torch_specops import Request, SamplingParams
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> decoder = torch_specops.SpeculativeDecoder(transformers.GPT2LMHeadModel(config).eval())
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
    sampling: Sampling = None
    seed: Seed = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    tokenizer: Any = None
    max_time: float | None = None
    inputs: Mapping[str, Tensor] | None = None
    grammar: Grammar | None = None

    # The `__init__` that a dataclass would generate, but with a helpful error for unknown keywords.
    def __init__(
        self,
        input_ids: Tensor | Sequence[int],
        max_new_tokens: int = 128,
        sampling: Sampling = None,
        seed: Seed = None,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        max_time: float | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        grammar: Grammar | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown("Request", unknown)
        self.input_ids = input_ids
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.seed = seed
        self.eos_token_id = eos_token_id
        self.stop_strings = stop_strings
        self.tokenizer = tokenizer
        self.max_time = max_time
        self.inputs = inputs
        self.grammar = grammar

    def __repr__(self) -> str:
        values = {name: value for name, value in vars(self).items() if value is not None}
        for name in ("input_ids", "seed"):
            if isinstance(values.get(name), Tensor) and not values[name].is_meta:
                values[name] = values[name].tolist()
        if self.tokenizer is not None:
            values["tokenizer"] = type(self.tokenizer)
        if isinstance(self.inputs, Mapping):
            values["inputs"] = list(self.inputs)
        return shortened("Request", **values)


@dataclass(frozen=True, eq=False, repr=False)
class Completion:
    """The result of a request. Its tensors are on the CPU.

    Args:
        index: the number of the request in the order of submission, from 0.
        tokens: [P + n] int64, the prompt and the new tokens; the last may be an eos token.
        new_tokens: [n] int64.
        logprobs: [n] float32, the log-probability of every new token under the target; None if not asked for.
        seed: the row's seed; a request with `seed=[completion.seed]` gets the same tokens. None if the request was
            refused.
        finish_reason: "eos", "length", "stop" (a stop string), "time" (`max_time`), "cancelled" or "error".
        error: why the request was refused or ended early; None = it ended normally or was cancelled.
        top_logprobs: the most likely tokens [n, N] at the position of every new token; None if not asked for.
        steps: the steps of the request, as in `GenerationOutput`.

    Examples:
        >>> import torch, torch_specops
        >>> tokens = torch.tensor([5, 6, 7, 2])
        >>> torch_specops.Completion(0, tokens, tokens[2:], None, seed=1, finish_reason="eos")
        Completion(index=0, num_tokens=4, num_new_tokens=2, seed=1, finish_reason='eos')
    """

    index: int
    tokens: Tensor
    new_tokens: Tensor
    logprobs: Tensor | None
    seed: int | None
    finish_reason: str
    error: str | None = None
    top_logprobs: TopLogprobs | None = None
    steps: list[RowStep] = field(default_factory=list)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts / verified drafts; None without drafts."""
        return acceptance_of(self.steps)

    def __repr__(self) -> str:
        values = {
            "index": self.index,
            "num_tokens": len(self.tokens),
            "num_new_tokens": len(self.new_tokens),
            "seed": self.seed,
            "finish_reason": self.finish_reason,
        }
        return shortened("Completion", **values, **({} if self.error is None else {"error": self.error}))


class Handle:
    """A request that was submitted to a `Session`. Any thread may use a handle; some thread has to run the session's
    steps.

    Tasks of asyncio may use a handle too, in any event loop. `async for token in handle` is like `tokens`, and `await
    handle` is like `result`. A loop that ends early (a break, an exception, `aclose`) cancels the request. If a task is
    cancelled or times out while it waits, the request is cancelled too. `asyncio.shield(handle)` prevents this.

    Attributes:
        index: the request's place in the order of submission. The other attributes and `add`, `end` and `wake` are for
            the session alone.

    Examples:
        >>> import transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> decoder = torch_specops.SpeculativeDecoder(transformers.GPT2LMHeadModel(config).eval())
        >>> session = decoder.session(batch_size=2, max_length=32)
        >>> handle = session.submit(torch_specops.Request([5, 6, 7], max_new_tokens=8))
        >>> while not handle.done:
        ...     _ = session.step()
        >>> len(handle.result().new_tokens)
        8
    """

    def __init__(
        self, index: int, prompt: Prompts | str, max_time: float | None, cancel: Callable[[Handle], object]
    ) -> None:
        self.index = index
        # The checked request, or the error message if it was refused.
        self.prompt = prompt
        self.needs_row = isinstance(prompt, Prompts) and not bool(prompt.state.finished)
        self.grammar = prompt.grammars[0] if isinstance(prompt, Prompts) else None
        self.max_time = math.inf if max_time is None else max_time
        self.deadline = math.inf
        self.is_cancelled = False
        self.new_tokens: list[int] = []
        self.steps: list[RowStep] = []
        self.completion: Completion | None = None
        self._cancel = cancel
        # Blocks are `with self._lock`, as in `Session`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Maps the future that a task awaits to the number of new tokens that the task has seen; inf = it awaits the
        # end.
        self._futures: dict[asyncio.Future[None], float] = {}

    def __repr__(self) -> str:
        return shortened("Handle", index=self.index, num_new_tokens=len(self.new_tokens), completion=self.completion)

    @property
    def done(self) -> bool:
        """True once the request has ended."""
        return self.completion is not None

    def tokens(self) -> Iterator[int]:
        """Iterate over the new tokens as they come, from the first. Ends when the request ends."""
        place = 0
        while True:
            with self._lock:
                while len(self.new_tokens) == place and not self.done:
                    self._changed.wait()
                new = self.new_tokens[place:]
            if not new:
                return
            yield from new
            place += len(new)

    def result(self, timeout: float | None = None) -> Completion:
        """The completion, once the request has ended.

        Args:
            timeout: seconds to wait, >= 0; None = until the request ends.

        Raises:
            TimeoutError: the request has not ended in time; the request continues.
            TypeError, ValueError: a wrong timeout.
        """
        if timeout is not None:
            timeout = checks.check_number("timeout", timeout)
            if not timeout >= 0:
                raise ValueError(f"timeout: expected seconds >= 0, or None for no limit, got {timeout}")
        with self._lock:
            self._changed.wait_for(lambda: self.done, None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        if self.completion is None:
            raise TimeoutError(f"timeout: request {self.index} has not ended after {timeout} seconds")
        return self.completion

    async def __aiter__(self) -> AsyncIterator[int]:
        place = 0
        try:
            while True:
                await self._until(place)
                new = self.new_tokens[place:]
                if not new:
                    return
                for token in new:
                    yield token
                place += len(new)
        finally:
            if not self.done:
                self.cancel()

    def __await__(self) -> Generator[Any, None, Completion]:
        try:
            yield from self._until(math.inf).__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert self.completion is not None
        return self.completion

    async def _until(self, place: float) -> None:
        """Wait in a task until there are more new tokens than `place`, or the request has ended."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.done or len(self.new_tokens) > place:
                return
            self._futures[future] = place
        try:
            await future
        finally:
            with self._lock:
                self._futures.pop(future, None)

    def cancel(self) -> None:
        """End the request before the next step, or at once if the request still waits for a row. The completion has the
        tokens so far."""
        self._cancel(self)

    def add(self, tokens: Sequence[int], steps: list[RowStep]) -> None:
        with self._lock:
            self.new_tokens += tokens
            self.steps = steps
        self.wake()

    def free_inputs(self) -> None:
        # Free the memory of the inputs, because a handle may live much longer than its request.
        if isinstance(self.prompt, Prompts):
            self.prompt = replace(self.prompt, inputs=None)

    def end(self, completion: Completion) -> None:
        self.free_inputs()
        with self._lock:
            self.completion = completion
        self.wake()

    def wake(self) -> None:
        """Wake the threads and tasks that wait for tokens or for the end."""
        with self._lock:
            self._changed.notify_all()
            for future, place in list(self._futures.items()):
                if self.done or len(self.new_tokens) > place:
                    # Ignore the error of a closed event loop, because no task waits in it.
                    with suppress(RuntimeError):
                        future.get_loop().call_soon_threadsafe(_set, future)
                    del self._futures[future]


def _set(future: asyncio.Future[None]) -> None:
    # The future may have been cancelled, with its task, before the event loop calls this function.
    if not future.done():
        future.set_result(None)


def read_request(
    request: Request, target: LanguageModel, sampling: SamplingParams, logprobs: str | None, top_logprobs: int
) -> Prompts:
    """Check a request as `generate` would.

    Args:
        sampling: used if the request has none.
        logprobs, top_logprobs: as in `generate`.

    Raises:
        TypeError, ValueError: a wrong field, by name.
    """
    fields = dict(vars(request))
    max_time, inputs = fields.pop("max_time"), request.inputs
    if max_time is not None:
        max_time = checks.check_number("max_time", max_time)
        if not 0 <= max_time <= sys.float_info.max and max_time != math.inf:
            raise ValueError(f"max_time: expected seconds >= 0, or None for no limit, got {max_time}")
        if target.ranks is not None:
            raise ValueError("max_time: expected None, because the clocks of a sharded target's ranks differ")
    has_encoder = target.reads_inputs
    if (inputs is not None) != has_encoder and not target.reads_images:
        expected = "those of the target's encoder" if has_encoder else "None, because the target reads tokens alone"
        raise ValueError(f"inputs: expected {expected}, got {type(inputs)}")
    for name, value in inputs.items() if has_encoder and isinstance(inputs, Mapping) else ():
        if not isinstance(value, Tensor) or value.shape[:1] != (1,):
            raise ValueError(f"inputs: expected {name} with a batch of one, got {getattr(value, 'shape', type(value))}")
    row = as_prompt("input_ids", fields.pop("input_ids")).unsqueeze(0)
    return read_prompts(target, row, default_sampling=sampling, logprobs=logprobs, top_logprobs=top_logprobs, **fields)


def largest(requests: Collection[Any]) -> tuple[int, int]:
    """The length of the longest request, prompt included, and the number of new tokens of all requests together.
    Invalid requests are skipped."""
    longest = total = 0
    for request in requests:
        full_request = request if isinstance(request, Request) else Request(request)
        with suppress(TypeError, ValueError, OverflowError):
            length, new = len(full_request.input_ids), int(full_request.max_new_tokens)
            checks.check_int("max_new_tokens", new, 0, 2**31 - 1)
            longest, total = max(longest, length + new), total + new
    return longest, total
