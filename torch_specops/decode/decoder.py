"""The decoding loop as a caller sees it: prompts go in, and steps or sequences come out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks, schedules
from ..drafts import AnyDraft, LanguageModel
from ..drafts.adapter import as_language_model
from ..drafts.rows import read_beginnings
from ..sampling import SamplingParams
from ..schedules import Schedule
from .guard import Guard
from .inputs import (
    BatchRequest,
    EosTokenIds,
    Seed,
    as_draft_source,
    check_logprobs,
    check_pair,
    check_room,
    checked_sampling,
    keep_features,
    read_prompts,
    read_seeds,
    read_stopping,
)
from .loop import Loop
from .many import Completion, Request, RequestRows
from .output import GenerationOutput, GenerationStats, Progress, Step, Streamer, collect, streamer_calls
from .runner import on_device
from .state import first_state
from .verify import Verifier

__all__ = ["SpeculativeDecoder"]


class SpeculativeDecoder:
    """Speculative decoding of batches of prompts with one target and one draft (Leviathan et al. 2023, Algorithm 1).

    Every emitted token has exactly the target's law, whatever the draft; at temperature 0 the output is the target's
    greedy continuation. The state lives on the target's device, and within a step the host never waits for it.

    Compiled code is kept. Further prompts of the same batch size that fit `max_length` compile nothing. A new batch
    size, a new capacity (multiples of 64 without `max_length`), the first row that is sampled or filtered, and a new
    length of an encoder's input each compile their own pieces, once.

    Args:
        target: a transformers model, or a `LanguageModel`.
        draft: a smaller transformers model, a `LanguageModel`, or a `DraftSource`; None = one token per step from the
            target alone, in the same loop.
        num_draft_tokens: K >= 1, drafts per step. A `Schedule` object overrides it. If no row has room for K, an eager
            step drafts fewer, and a compiled step uses the smallest sufficient K that is already compiled.
        schedule: "constant"; "heuristic" (begin with K; 2 more after a step whose drafts were all accepted, otherwise 1
            fewer); "optimal" (Leviathan et al. 2023, theorem 3.8, with at most K: the acceptance rate is tracked, the
            cost of a draft is measured once, before the first step); or a `Schedule`.
        sampling: temperature 0 = greedy; None = temperature 1, whatever the target's generation config says
            (`SamplingParams.from_generation_config` takes that). `generate` can override it for one call.
        verify: "exact"; "block" (`verify_block`: the same law, and on average at least as many accepted drafts); or
            "sigmoid" (`verify_sigmoid`: lossy, and needs a draft with probabilities).
        lenience, argmax_lenience: in (0, 1], for sampled and for greedy rows. Below 1, "exact" is lossy as
            `verify_exact` describes.
        compile: True, False, or "auto". "auto" compiles on CUDA. On a CPU it compiles once enough steps (about 8,000)
            are done or certain to follow to pay for it, and never with a deterministic draft. `stats.compiled` says
            what was done and why.
        one_graph: compile the whole step as a single graph. It takes longer to compile: it holds K copies of the draft.
        max_length: capacity in tokens per sequence, prompt included; None = what each call needs, rounded up if steps
            are compiled.

    Raises:
        TypeError, ValueError: an argument of a wrong type or out of range, by name; a draft whose vocabulary or device
            differs from the target's.
        RuntimeError: from any method, while another thread uses this decoder or one with the same `LanguageModel` as
            its target. Decoders in several threads may share transformers models.

    Example:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
        >>> target = transformers.LlamaForCausalLM(config).eval()
        >>> decoder = torch_specops.SpeculativeDecoder(target, draft=torch_specops.drafts.PromptLookup())
        >>> output = decoder.generate(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([13])
    """

    def __init__(
        self,
        target: LanguageModel | nn.Module,
        draft: AnyDraft = None,
        *,
        num_draft_tokens: int = 5,
        schedule: str | Schedule = "constant",
        sampling: SamplingParams | None = None,
        verify: str = "exact",
        lenience: float = 1.0,
        argmax_lenience: float = 1.0,
        compile: bool | str = "auto",
        one_graph: bool = False,
        max_length: int | None = None,
    ) -> None:
        self.target = as_language_model("target", target)
        self.draft = as_draft_source(draft)
        if self.draft is not None:
            self.draft.bind(self.target)
        checks.check_int("num_draft_tokens", num_draft_tokens, 1)
        chosen = schedules.as_schedule(schedule, num_draft_tokens)
        if draft is None:
            chosen = schedules.Constant(0)
        self.sampling = checked_sampling(sampling) or SamplingParams()
        self.max_length = max_length
        if max_length is not None:
            checks.check_int("max_length", max_length, 2)
        verifier = Verifier(verify, lenience, argmax_lenience)
        if verify == "sigmoid" and (self.draft is None or self.draft.deterministic):
            raise ValueError("verify: 'sigmoid' compares two models' logits; expected a draft with probabilities")
        check_pair(self.target, self.draft)
        measures_cost = schedule == "optimal" and draft is not None
        self._loop = Loop(self.target, self.draft, verifier, one_graph, compile, chosen, measures_cost)
        self._runner = self._loop.runner
        self._guard = Guard(self.target, self.draft)
        self._progress = Progress([], [], [], GenerationStats(seeds=[]))

    @property
    def compiled(self) -> bool:
        """Whether steps are compiled. Once they are, they stay compiled."""
        return self._loop.compiled

    @property
    def schedule(self) -> Schedule:
        """The schedule in use; with "optimal" it is replaced once the cost of a draft is measured."""
        return self._loop.schedule

    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: Seed = None,
        eos_token_id: EosTokenIds = None,
        pad_token_id: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        logprobs: str | None = None,
        num_return_sequences: int = 1,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        streamer: Streamer | None = None,
    ) -> GenerationOutput:
        """Continue every prompt to its eos or limit.

        Args:
            input_ids: [B, P] int64, a tensor or an array of numpy, padded on either side; for an encoder-decoder model,
                the decoder's prompt.
            attention_mask: [B, P], 1 for tokens and 0 for padding; None = no padding, with a warning if some rows look
                padded.
            max_new_tokens: the most tokens to emit, one number or one per row, >= 0.
            sampling: for this call; None = the decoder's.
            seed: an int, from which a 64-bit hash makes a seed for each row; or the rows' own seeds, int64 [B] as a
                tensor, list or array. None draws an int. `stats.seeds` has the rows' seeds: passed as `seed`, they
                reproduce the output. With a constant schedule, a row with the same row seed gets the same tokens in any
                batch, up to the rounding of the models.
            eos_token_id: a token, several, or a list for each row; () = none. None = those of the target's
                generation config.
            pad_token_id: fills rows after their end; None = the target's, else its first eos, else 0.
            inputs: what the target's encoder reads, by name (`input_features` or `input_ids`, `attention_mask`).
            logprobs: "raw" = `output.logprobs` has the log-probability of every new token under the softmax of the
                target's logits as they come; "processed" = after processors, temperature and filters (0 for greedy
                rows); None = none are computed.
            num_return_sequences: how many sequences each prompt gets. They are adjacent rows, so arguments per row have
                B * num_return_sequences entries.
            stop_strings: a string or several, each of which ends a row with the token that completes it, as in
                transformers: the string may begin in the prompt, and the token stays. None = none.
            tokenizer: transformers' tokenizer of the text; needed for stop_strings alone.
            streamer: called with every `Step`; or an object with `put` and `end` for a batch of one (transformers).

        Returns:
            `GenerationOutput`. A row whose target gave no finite logit ends there, with an entry in `errors` and a
            warning; the other rows continue. If a KeyboardInterrupt comes while there is a streamer, the output holds
            the tokens generated so far.

        Raises:
            TypeError, ValueError: a wrong argument, by name; a prompt and max_new_tokens that exceed what a model can
                read.
        """
        request = BatchRequest(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
            logprobs=logprobs,
            num_return_sequences=num_return_sequences,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
        )
        return self.run(request, streamer)

    def run(self, request: BatchRequest, streamer: Streamer | None = None) -> GenerationOutput:
        """`generate` with its arguments in one object."""
        with self._guard.working():
            steps, stream = self._stream(request)
            put, end = streamer_calls(streamer, request.input_ids, len(self._progress.lengths))
            interrupted = False
            try:
                for step in steps:
                    put(step)
            except KeyboardInterrupt:
                if streamer is None:
                    raise
                interrupted = True
            end()
            self._guard.check_is_newest(stream)
            output = self.output(interrupted)
        for row, error in output.errors.items():
            warnings.warn(f"row {row}: {error}", RuntimeWarning, stacklevel=3)
        return output

    def stream(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: Seed = None,
        eos_token_id: EosTokenIds = None,
        pad_token_id: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        logprobs: str | None = None,
        num_return_sequences: int = 1,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
    ) -> Iterator[Step]:
        """Iterate over the steps of `generate`; `output` returns the sequences so far at any time.

        The arguments are those of `generate`. They are checked, and the prompts are read, before the first step.
        """
        request = BatchRequest(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
            logprobs=logprobs,
            num_return_sequences=num_return_sequences,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
        )
        return self._guarded(self._stream(request)[0])

    def generate_many(
        self,
        requests: Iterable[Request | Tensor | Sequence[int]],
        *,
        batch_size: int,
        max_length: int | None = None,
        logprobs: str | None = None,
    ) -> Iterator[Completion]:
        """Continue many prompts, `batch_size` at a time: a row whose sequence has ended takes the next request, and the
        other rows go on.

        With a constant schedule a request gets the tokens that `generate` gives it alone with the same seed, up to the
        rounding of the models, unless its draft remembers other sequences (`SuffixLookup`). The first request that is
        sampled, that uses some filter or processor, or that has more than 8 eos tokens compiles its own pieces, once;
        no other one compiles anything. `compile="auto"` decides when this is called.

        Args:
            requests: `Request`s, or prompts [P] for requests with the defaults. One is read when a row is free for it.
            batch_size: how many rows there are.
            max_length: the most tokens that a request may have, prompt included; every row gets room for them. None =
                the decoder's, or what the longest request of a list (or another collection) needs.
            logprobs: as in `generate`.

        Returns:
            An iterator of `Completion`s in the order in which they finish. The completion of a request that `generate`
            would refuse, that is longer than max_length, or whose target gave no finite logit has an `error`. `stats`
            counts over all requests.

        Raises:
            TypeError, ValueError: a wrong argument, by name; a target with an encoder; a draft that cannot read new
                prompts between two steps (`DraftSource.restart`).
            RuntimeError: while iterating, if another call has begun with this decoder.
        """
        longest = self.max_length if max_length is None else max_length
        rows = RequestRows(self._loop, self.sampling, requests, batch_size, longest, logprobs)
        with self._working():
            stream = self._guard.begin_stream()
            self._progress = rows.start()

        @contextmanager
        def step() -> Iterator[None]:
            with self._working():
                self._guard.check_is_newest(stream)
                yield

        return rows.completions(step)

    @property
    def stats(self) -> GenerationStats:
        """Counts and times of the newest call so far."""
        return self._progress.stats

    # Outside inference mode, because users train on what was generated.
    @torch.inference_mode(False)
    def output(self, interrupted: bool = False) -> GenerationOutput:
        """The sequences and statistics of the newest stream so far."""
        with self._guard.working():
            state, progress = self._runner.state, self._progress
            if progress.num_refills:
                raise RuntimeError("output: the newest call is generate_many, whose iterator has the results")
            return collect(state, progress, self._prompt_lengths, self._pad_token_id, interrupted)

    def _stream(self, request: BatchRequest) -> tuple[Iterator[Step], int]:
        """The steps, and the number of the stream."""
        with self._working():
            stream = self._guard.begin_stream()
            self._start(request)
        return self._steps(stream), stream

    def _guarded(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps, each under the lock. If another thread uses the decoder in between, the stream ends."""
        while True:
            with self._guard.working():
                step = next(steps, None)
            if step is None:
                return
            yield step

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Excludes other threads; inference mode, on the target's device."""
        with self._guard.working(), torch.inference_mode(), on_device(self.target.device):
            yield

    def _start(self, request: BatchRequest) -> None:
        """Check the request, make room in the models, and read the prompts."""
        prompts = read_prompts(self.target, request)
        stopping = read_stopping(request, prompts)
        batch, longest = prompts.tokens.shape
        seeds = read_seeds(request.seed, batch)
        sampling = (checked_sampling(request.sampling) or self.sampling).tensors(
            batch, prompt_lengths=prompts.lengths, eos=prompts.eos, vocab_size=self.target.vocab_size
        )
        check_logprobs(request.logprobs)
        self._loop.choose_compile(int((prompts.limits - prompts.lengths).max()))
        longest_end = int(prompts.limits.max())
        check_room(self.target, self.draft, longest_end, self.max_length)
        capacity = self._loop.capacity(self.max_length or longest_end)
        self._pad_token_id = prompts.pad_token_id

        started = time.perf_counter()
        values = first_state(prompts, sampling, seeds, capacity, request.logprobs)
        state = self._runner.start(values, prompts.inputs or {})
        self._prompt_lengths = state.lengths.clone()
        stats = GenerationStats(seeds=seeds.tolist(), compiled=self._loop.compile_reason)
        limits, lengths, finished = (each.tolist() for each in (values.limits, values.lengths, values.finished))
        self._progress = Progress(limits, lengths, finished, stats, stopping, request.logits)
        self._runner.keep_logits = None if request.logits is None else request.logits.push
        keeps_features = keep_features(self.target, self.draft)
        self.target.start(batch, capacity, prompts.inputs)
        is_even = bool((prompts.lengths == longest).all())
        reads_first = keeps_features or request.num_return_sequences > 1
        if not self.compiled and self._loop.cost_is_measured and is_even and not reads_first:
            # In eager mode, prompts of one length are read together with the first drafts, which saves a forward.
            self._runner.unread_length = longest
        else:
            # All but the newest token of the longest prompt, but at least one: the first forward allocates the cache.
            read_beginnings(self.target, state.tokens, max(longest - 1, 1))
        self._loop.start_draft(capacity, prompts.inputs)
        self._runner.synchronize()
        stats.prefill_seconds = time.perf_counter() - started

    @torch.inference_mode()
    def _steps(self, stream: int) -> Iterator[Step]:
        self._guard.check_is_newest(stream)
        if all(self._progress.finished):
            return
        for step in self._loop.steps(self._progress):
            if all(step.finished) and self.draft is not None:
                self.draft.end(self._runner.state.tokens, self._runner.state.lengths)
            yield step
            if all(step.finished):
                return
            self._guard.check_is_newest(stream)
