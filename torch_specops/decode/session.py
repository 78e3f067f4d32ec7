"""Requests that arrive over time: a row whose request has ended takes the next one while other rows continue."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from .. import checks
from ..models.base import readable_length
from ..progress import progress_bar
from ..sampling import SamplingParams
from ..schedules import Schedule
from .batch import Batch
from .compiled import CompiledSteps
from .guard import Guard
from .inputs import Prompts, check_room, check_tokens, checked_logprobs, read_prompts
from .output import GenerationStats, TopLogprobs
from .ranks import check_ranks
from .requests import Completion, Handle, Request, read_request
from .state import ROOM


class Session:
    """Requests that arrive over time share the rows of one batch; `SpeculativeDecoder.session` makes a `Session`.

    With the same seed, a request gets the tokens that `generate` would give it alone, up to the rounding of the models.
    This always holds with `verify="gumbel"`. With other ops it holds if the schedule is constant and the draft does not
    learn from other sequences, as `SuffixLookup` does. An error of a model ends all requests and closes the session. An
    error of one request is reported in its completion. Leaving a `with` block closes the session.

    Examples:
        >>> import threading, transformers, torch_specops
        >>> from torch_specops import Request, SamplingParams
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> decoder = torch_specops.SpeculativeDecoder(transformers.GPT2LMHeadModel(config).eval())
        >>> with decoder.session(batch_size=4, max_length=32) as session:
        ...     threading.Thread(target=session.run).start()
        ...     handle = session.submit(Request([5, 6, 7], 8, SamplingParams(temperature=0.0)))
        ...     tokens = list(handle.tokens())
        >>> handle.result().finish_reason, handle.result().new_tokens.tolist() == tokens
        ('length', True)
    """

    def __init__(
        self,
        steps: CompiledSteps,
        schedule: Schedule,
        guard: Guard,
        sampling: SamplingParams,
        batch_size: int,
        max_length: int,
        logprobs: str | None,
        top_logprobs: int,
    ) -> None:
        batch_size = checks.check_int("batch_size", batch_size, 1)
        top_logprobs = checked_logprobs(logprobs, top_logprobs, steps.target.vocab_size)
        if steps.draft is not None and not steps.draft.can_restart:
            raise ValueError("draft: a session needs the method restart (DraftSource) of a draft that has start")
        self._steps = steps
        self._schedule = schedule
        self._guard = guard
        self._sampling = sampling
        self._max_length = checks.check_int("max_length", max_length, 2)
        self._logprobs = logprobs
        self._top_logprobs = top_logprobs
        self._rows: list[Handle | None] = [None] * batch_size
        # Any thread may use the fields below while it holds `_lock`. Only the thread that holds `_stepping` runs steps.
        # Blocks are `with self._lock`: an interrupt in the Python code of `with self._changed` could leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stepping = threading.RLock()
        self._waiting: deque[Handle] = deque()
        self._ended: list[Completion] = []
        self._num_submitted = 0
        self._is_closed = False
        self._has_failed = False
        self._batch: Batch | None = None
        with guard.working():
            guard.look()
            self._stream = guard.begin_stream()
            self._begin_rows()

    @property
    def stats(self) -> GenerationStats:
        """Counts and times over all requests so far."""
        return GenerationStats(seeds=[]) if self._batch is None else self._batch.stats

    @property
    def num_free(self) -> int:
        """How many more requests could get a row now."""
        with self._lock:
            return self._rows.count(None) - len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """True if no request waits or is in a row."""
        with self._lock:
            return not self._waiting and self._rows.count(None) == len(self._rows)

    def submit(self, request: Request | Tensor | Sequence[int]) -> Handle:
        """Queue a request, or a prompt [P] with the default settings. Returns at once; may be called from any thread.

        Raises:
            RuntimeError: the session is closed.
        """
        full_request = request if isinstance(request, Request) else Request(request)
        target = self._steps.target
        prompt: Prompts | str
        try:
            prompt = read_request(full_request, target, self._sampling, self._logprobs, self._top_logprobs)
            check_room(target, int(prompt.state.limits), self._max_length)
            self._steps.check_grammars(prompt.grammars)
        except (TypeError, ValueError, NotImplementedError) as error:
            prompt = str(error)
        # The user's tokenizer or grammar may raise any exception.
        except Exception as error:
            prompt = f"{type(error).__name__}: {error}"
        with self._lock:
            if self._is_closed:
                raise RuntimeError("submit: the session is closed")
            in_use = [id(handle.grammar) for handle in [*self._rows, *self._waiting] if handle is not None]
            if full_request.grammar is not None and id(full_request.grammar) in in_use:
                prompt = "grammar: it is the state of one text, and another request has it"
            handle = Handle(self._num_submitted, prompt, full_request.max_time, self._cancel)
            self._num_submitted += 1
            self._waiting.append(handle)
            self._changed.notify_all()
        return handle

    def step(self) -> list[Completion]:
        """Admit waiting requests to free rows, and run a step if any row has a request. Never waits for requests.

        Returns:
            The completions of the requests that have ended since the last call.

        Raises:
            RuntimeError: another thread is using the decoder, its target or its draft; nothing has changed.
            Exception: an error of a model, which ends all requests and closes the session.
        """
        with self._stepping:
            if not self.is_idle:
                with self._guard.working():
                    try:
                        self._is_unread |= self._guard.take_models(self._stream)
                        self._end_cancelled()
                        if self._waiting and None in self._rows:
                            self._look()
                        with self._guard.computing(self._stream):
                            self._read_again()
                            self._admit()
                            self._advance()
                    except BaseException as error:
                        self._fail(error)
                        raise
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def run(self) -> None:
        """Run steps in this thread until the session is closed, and wait while there are no requests. Any exception
        ends all requests and closes the session."""
        try:
            while True:
                with self._lock:
                    self._changed.wait_for(lambda: self._is_closed or not self.is_idle)
                    if self._is_closed:
                        return
                self.step()
        except BaseException as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """End all requests, with the finish reason "cancelled"; may be called from any thread."""
        with self._lock:
            # Close first, so that `submit` refuses requests while this call waits for the running step.
            self._is_closed = True
            self._changed.notify_all()
        with self._stepping:
            self._close("cancelled")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _cancel(self, handle: Handle) -> None:
        with self._lock:
            handle.is_cancelled = True
            if handle in self._waiting:
                self._end(handle, "cancelled")
                self._waiting.remove(handle)

    def _fail(self, error: BaseException) -> None:
        # The state may be in the middle of a step, so `_end` must not read log-probabilities from it.
        self._has_failed = True
        self._close("error", f"{type(error).__name__}: {error}")

    def _close(self, reason: str, error: str | None = None) -> None:
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
            for handle in [*self._rows, *self._waiting]:
                if handle is not None:
                    self._end(handle, reason, error)
            self._waiting.clear()

    def _begin_rows(self) -> None:
        """Start a batch of free rows. If the target has an encoder, the batch starts with the inputs of the first
        request instead."""
        self._is_begun = self._is_unread = False
        if not self._steps.target.reads_inputs:
            with self._guard.computing(self._stream):
                self._batch = self._free_rows(None)

    def _free_rows(self, inputs: Mapping[str, Tensor] | None) -> Batch:
        """A batch in which all rows are free. A free row has a finished sequence of one token."""
        steps, batch = self._steps, len(self._rows)
        tokens = torch.zeros(batch, 1, dtype=torch.int64, device="cpu")
        prompts = read_prompts(
            steps.target,
            tokens,
            attention_mask=tokens + 1,
            max_new_tokens=0,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            inputs=inputs,
            logprobs=self._logprobs,
            top_logprobs=self._top_logprobs,
        )
        prompts = replace(prompts, state=replace(prompts.state, eos=tokens.new_full((batch, ROOM["eos"]), -1)))
        longest = min(self._max_length, readable_length(steps.target) or self._max_length)
        made = Batch(steps, self._schedule, prompts, steps.capacity(longest, longest))
        made.stats.seeds = []
        if self._batch is not None:
            made.stats = self._batch.stats
        self._is_begun = True
        return made

    def _end_cancelled(self) -> None:
        for row, handle in enumerate(self._rows):
            if handle is not None and handle.is_cancelled:
                self._end_row(row, "cancelled")

    def _look(self) -> None:
        """Adapt to models that have changed. If all rows are free and the models have changed or were used by another
        call, the batch starts again.

        Raises:
            RuntimeError: an unfinished sequence does not fit a changed model.
        """
        texts_go_on, misfit = self._rows.count(None) < len(self._rows), self._guard.look()
        if self._batch is not None:
            self._batch.check_vocabulary()
        if texts_go_on and misfit is not None:
            raise misfit
        has_changed = (self._batch or self._steps).follow_models()
        if not texts_go_on and (has_changed or misfit is not None or self._is_unread):
            self._begin_rows()

    def _read_again(self) -> None:
        """Prefill the unfinished sequences again if another call has used the models."""
        if self._is_unread and self._batch is not None and any(handle is not None for handle in self._rows):
            self._batch.read_again()
            self._is_unread = False

    def _admit(self) -> None:
        """Admit waiting requests to free rows, and end those that need no row. Takes at most as many requests as there
        are rows."""
        admitted: dict[int, Prompts] = {}
        with_images: dict[int, Prompts] = {}
        free = [row for row, handle in enumerate(self._rows) if handle is None]
        for _ in self._rows:
            with self._lock:
                if not self._waiting or (self._waiting[0].needs_row and not free):
                    break
                handle = self._waiting[0]
                if handle.is_cancelled:
                    self._end(handle, "cancelled")
                elif isinstance(handle.prompt, str):
                    self._end(handle, "error")
                elif not handle.needs_row:
                    self._end(handle, "length")
                else:
                    row = free.pop(0)
                    self._rows[row] = handle
                # Remove the request last. After an interrupt before this line, the request is both in `_rows` and in
                # `_waiting`, and `_close` ends it.
                self._waiting.popleft()
            if handle.done or isinstance(handle.prompt, str):
                continue
            handle.deadline = time.monotonic() + float(handle.max_time)
            try:
                # The vocabulary may have shrunk since `submit` checked the request.
                check_tokens(handle.prompt.state.tokens, self._steps.target.vocab_size)
                self._replace_inputs(row, handle.prompt.inputs)
            except (TypeError, ValueError, RuntimeError) as error:
                self._end(handle, "error", str(error))
                continue
            has_images = handle.prompt.inputs is not None and self._steps.target.reads_images
            handle.free_inputs()
            (with_images if has_images else admitted)[row] = handle.prompt
        if self._steps.target.ranks is not None:
            names = [None if handle is None else f"request {handle.index}" for handle in self._rows]
            new = {f"{names[row]}: ": prompt for row, prompt in (admitted | with_images).items()}
            check_ranks(self._steps, new, requests=names)
        if admitted:
            assert self._batch is not None
            self._batch.fill(admitted)
        for row, prompt in with_images.items():
            assert self._batch is not None
            try:
                self._batch.fill({row: prompt})
            except ValueError as error:
                # The target has refused the images, which is an error of this request alone.
                self._end_row(row, "error", str(error))

    def _replace_inputs(self, row: int, inputs: Mapping[str, Tensor] | None) -> None:
        if self._steps.target.reads_images:
            inputs = inputs or {}
        if inputs is None:
            return
        if self._batch is None or not self._is_begun:
            # Start all rows with the inputs of the first request, because a model with an encoder needs inputs to
            # start.
            copies = {name: value.expand(len(self._rows), *value.shape[1:]) for name, value in inputs.items()}
            self._batch = self._free_rows(copies)
        else:
            self._batch.replace_inputs(row, inputs)

    def _advance(self) -> None:
        """Run a step, and complete the requests that it finishes."""
        if self._batch is None or all(handle is None for handle in self._rows):
            return
        step, now = self._batch.step(), time.monotonic()
        for row, handle in enumerate(self._rows):
            if handle is None:
                continue
            own = self._batch.rows[row]
            handle.add(step.tokens[row], own.steps)
            if step.finished[row]:
                self._end(handle, own.reason or "error", own.error)
            elif now >= handle.deadline:
                self._end_row(row, "time")

    def _end_row(self, row: int, reason: str, error: str | None = None) -> None:
        handle = self._rows[row]
        assert handle is not None and self._batch is not None
        self._batch.end(row, reason)
        self._end(handle, reason, error)

    # Leave inference mode: users may train on the output, and autograd refuses inference tensors.
    @torch.inference_mode(False)
    def _end(self, handle: Handle, reason: str, error: str | None = None) -> None:
        """Complete a request and free its row, unless it is already complete."""
        with self._lock:
            if handle.done:
                # An interrupt may have prevented `end` from waking the waiting threads and tasks.
                handle.wake()
                return
            row = self._rows.index(handle) if handle in self._rows else None
            new = torch.tensor(handle.new_tokens, dtype=torch.int64, device="cpu")
            logprobs = new.new_full(new.shape, math.nan, dtype=torch.float32)
            top_shape = len(new), self._top_logprobs
            top = TopLogprobs(new.new_full(top_shape, -1), new.new_full(top_shape, math.nan, dtype=torch.float32))
            seed, tokens = None, new.clone()
            if isinstance(handle.prompt, Prompts):
                seed, tokens = int(handle.prompt.state.seeds), torch.cat([handle.prompt.state.tokens[0], new])
            # Without new tokens the request may have been refused before its row was filled, which still has the values
            # of the request before.
            if handle.new_tokens and row is not None and self._batch is not None and not self._has_failed:
                self._batch.copy_logprobs(row, logprobs, top)
            completion = Completion(
                handle.index,
                tokens,
                new,
                logprobs if self._logprobs else None,
                seed,
                reason,
                handle.prompt if isinstance(handle.prompt, str) else error,
                top if self._top_logprobs else None,
                handle.steps,
            )
            # Wake waiting threads first, so that an interrupt in the lines below does not leave them waiting.
            handle.end(completion)
            self._ended.append(completion)
            if row is not None:
                self._rows[row] = None


class Completions(Iterator[Completion]):
    """Iterates over the completions of requests. Takes requests one by one as rows become free, and closes the session
    at the end. If the guard refuses a step, `next` raises, and the following call continues."""

    def __init__(self, session: Session, requests: Iterable[Request | Tensor | Sequence[int]], progress: bool) -> None:
        self._ended = _completions_of(session, requests, progress)

    def __next__(self) -> Completion:
        ended = next(self._ended)
        if isinstance(ended, RuntimeError):
            raise ended
        return ended


def _completions_of(
    session: Session, requests: Iterable[Request | Tensor | Sequence[int]], progress: bool
) -> Iterator[Completion | RuntimeError]:
    remaining, total = iter(requests), len(requests) if isinstance(requests, Collection) else None
    with session, progress_bar(progress, total, " requests") as bar:
        while True:
            for request in islice(remaining, max(session.num_free, 0)):
                session.submit(request)
            # The session is idle and `requests` is exhausted, so all requests are complete.
            if session.is_idle:
                return
            try:
                completions = session.step()
            except RuntimeError as error:
                # If the session is idle now, the error came from within the step and has ended all requests.
                if session.is_idle:
                    raise
                # The guard has refused the step, so the session goes on. Yield the error, because a generator that
                # raises cannot continue.
                yield error
                continue
            for completion in completions:
                if bar is not None:
                    bar.set_postfix_str(f"{session.stats.tokens_per_second:.1f} tokens/s", refresh=False)
                    bar.update()
                yield completion
