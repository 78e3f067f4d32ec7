"""The public interface of the decoding loop: the class `SpeculativeDecoder`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from .. import checks, schedules
from ..drafts import AnyDraft, DraftSource, LookupElse
from ..drafts.model import ModelDraft, as_draft_source
from ..models.base import LanguageModel
from ..models.conversion import as_language_model
from ..progress import progress_bar
from ..sampling import SamplingParams
from ..schedules import Schedule
from .batch import Batch, KeptLogits
from .compiled import CompiledSteps
from .guard import Guard, Stream
from .inputs import (
    AnyGrammar,
    AttentionMask,
    EosTokenIds,
    GenerateArguments,
    PromptIds,
    Sampling,
    Seed,
    StopStrings,
    check_room,
    checked_sampling,
    read_prompts,
)
from .keywords import refuse_unknown
from .models import check_pair
from .output import GenerationOutput, GenerationStats, Step, Streamer, shortened, streamer_calls
from .ranks import check_ranks
from .requests import Completion, Request, largest
from .rows import BatchRules, RowRule
from .session import Completions, Session
from .step import Verifier


class SpeculativeDecoder:
    """Speculative decoding of batches of prompts with one target and one draft (Leviathan et al. 2023, Algorithm 1).

    Every emitted token has exactly the target's distribution, whatever the draft. At temperature 0 the output is the
    target's greedy continuation. The state of a batch is on the target's device, and the host does not wait for the
    device within a step, except to ask grammars.

    Compiled code and captured graphs are kept: further prompts of the same batch size that fit `max_length` compile and
    capture nothing. Steps are compiled and captured once more for a new batch size, a new capacity, a change of
    autocast, or a new length of an encoder's input. This also happens for the first row that is sampled or filtered,
    and for the first sequence that outgrows the draft.

    Streams and sessions of one decoder, or of decoders that share a `LanguageModel`, may take turns. A call prefills
    its sequences again if another call has used its models in the meantime. Encoder inputs and images are not kept, so
    a call that had such inputs raises a RuntimeError instead.

    Args:
        target: a transformers model, or a `LanguageModel`.
        draft: a smaller transformers model, a `LanguageModel`, or a `DraftSource`; None = one token per step from the
            target alone, in the same loop. A draft with a shorter context than the target stops drafting where its
            context ends. A `DraftSource` serves one decoder at a time.
        num_draft_tokens: K >= 1, drafts per step; None = the draft's `default_draft_tokens`, or 5. A `Schedule` object
            overrides this number. If no row has room for K, an eager step drafts fewer, and a compiled step uses the
            smallest sufficient K that is already compiled.
        schedule: decides how many of the K drafts are drafted and verified in each step. "auto" (as many as pay, by
            measured times and acceptance; `schedules.Auto`); "constant" (K); "heuristic" (begin with K; 2 more after a
            step whose drafts were all accepted, otherwise 1 fewer; at most 20, or K if that is more; compiled steps
            round down, as `schedules.Heuristic` says); or a `Schedule`. None = "auto" for deterministic drafts,
            otherwise "constant", as with a sharded target (docs/tensor_parallel.md).
        sampling: temperature 0 = greedy; None = temperature 1, whatever the target's generation config says
            (`SamplingParams.from_generation_config` reads that config). A mapping has fields of `SamplingParams`.
            `generate` can override the sampling for one call.
        verify: "gumbel" (`verify_gumbel`: a row's tokens depend on its seed, not on the draft); "exact"
            (`verify_exact`: accepts more of the drafts that were sampled); "block" (`verify_block`: accepts at least as
            many as "exact" on average); "sigmoid" (`verify_sigmoid`: lossy, and needs a draft with probabilities); or a
            `Verifier`, which also has the settings of lossy verification. None = "gumbel" without a draft and for
            deterministic drafts, otherwise "exact".
        compile: True, False, or "auto". On CUDA True compiles the steps and captures them as CUDA graphs, and "auto"
            captures them without compiling (docs/gpu.md, "What to choose"). On a CPU "auto" compiles once about 8,000
            steps are done or certain to follow, enough to pay for compiling; with a deterministic draft it never
            compiles on a CPU. `stats.compiled` says what was done and why.
        one_graph: compile the whole step as a single graph. A single graph takes longer to compile, because it contains
            K copies of the draft.
        max_length: capacity in tokens per sequence, prompt included; None = as many as each call needs. If steps are
            compiled or captured, None = the next power of two, at least 256, but no more than the target was made for.
        invariant: True = the target's logits after a text are, to the last bit, a function of model, text, machine and
            number of threads, whatever is drafted and whatever else is read. With verify="gumbel" so are texts and
            log-probabilities, which `invariant_forward` repeats (docs/same_bits.md). Takes transformers models of some
            families in float32 or bfloat16 on a CPU; steps are not compiled. A `LanguageModel` must be invariant.

    Raises:
        TypeError, ValueError: an argument of a wrong type or out of range, by name; a draft whose vocabulary or device
            differs from the target's; one `LanguageModel` as target and draft; with `invariant`, a target in which
            something may depend on what is read with a token, or `torch.autocast` in a call.
        RuntimeError: from any method, while another thread uses this decoder or one that shares a `LanguageModel` with
            it (docs/serving.md, "Threads"); or when called from inside a step of such a decoder. With `invariant`, from
            the first call, if bits differ in a comparison of a few tokens; names the module. From a call that differs
            on the ranks of a sharded target; names the arguments.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
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
        num_draft_tokens: int | None = None,
        schedule: str | Schedule | None = None,
        sampling: Sampling = None,
        verify: str | Verifier | None = None,
        compile: bool | str = "auto",
        one_graph: bool = False,
        max_length: int | None = None,
        invariant: bool = False,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown("SpeculativeDecoder", unknown)
        self.target = as_language_model("target", target, invariant=invariant)
        if self.target.invariant and compile is True:
            raise ValueError("compile: expected 'auto' or False with an invariant target, got True")
        self.draft = source = as_draft_source(draft)
        self._guard = Guard(self.target, self.draft)
        if self.draft is not None:
            self._guard.bind(self.draft)
        if num_draft_tokens is None:
            num_draft_tokens = (None if source is None else source.default_draft_tokens) or 5
        num_draft_tokens = checks.check_int("num_draft_tokens", num_draft_tokens, 1)
        limit, deterministic = (None, False) if source is None else (source.max_draft_tokens, source.deterministic)
        is_sharded = self.target.ranks is not None
        if is_sharded and (schedule == "auto" or isinstance(schedule, schedules.Auto)):
            raise ValueError("schedule: 'auto' measures times, which differ on the ranks of a sharded target")
        chosen = schedules.as_schedule(schedule, num_draft_tokens, limit, deterministic and not is_sharded)
        if source is None:
            chosen = schedules.Constant(0)
        self.sampling = checked_sampling(sampling) or SamplingParams()
        self.max_length = None if max_length is None else checks.check_int("max_length", max_length, 2)
        if verify is None:
            verify = "gumbel" if source is None or source.deterministic else "exact"
        verifier = verify if isinstance(verify, Verifier) else Verifier(verify)
        if verifier.op == "sigmoid" and (source is None or source.deterministic or isinstance(source, LookupElse)):
            raise ValueError(
                "verify: 'sigmoid' compares two models' logits; expected a draft with probabilities in all rows"
            )
        check_pair(self.target, self.draft)
        self._schedule = chosen
        arguments = self.target, self.draft, verifier, chosen.buckets
        self._compiled_steps = CompiledSteps(*arguments, compile=compile, one_graph=one_graph)
        # The batch or session of the newest call.
        self._newest: Batch | Session | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the newest batch or session, because its locks, handles, rules and grammars need not be picklable.
        return vars(self) | {"_newest": None}

    def __repr__(self) -> str:
        parts = {"target": _kind(self.target), "draft": _kind(self.draft), "verify": self._compiled_steps.verify.op}
        chosen = {"schedule": type(self._schedule).__name__, "num_draft_tokens": max(self._schedule.buckets)}
        return shortened("SpeculativeDecoder", **parts, **chosen, compiled=self.compiled)

    @property
    def compiled(self) -> bool:
        """True if steps are compiled or captured. They stay so unless a model can no longer be compiled."""
        return self._compiled_steps.compiled

    @property
    def schedule(self) -> Schedule:
        """The schedule in use."""
        return self._schedule

    @property
    def stats(self) -> GenerationStats:
        """Counts and times of the newest call so far."""
        return GenerationStats(seeds=[]) if self._newest is None else self._newest.stats

    def generate(
        self,
        input_ids: PromptIds,
        *,
        streamer: Streamer | None = None,
        progress: bool = False,
        attention_mask: AttentionMask = None,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling = None,
        seed: Seed = None,
        eos_token_id: EosTokenIds = None,
        pad_token_id: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        logprobs: str | None = None,
        top_logprobs: int = 0,
        num_return_sequences: int = 1,
        stop_strings: StopStrings = None,
        tokenizer: Any = None,
        grammar: AnyGrammar = None,
        **unknown: NoReturn,
    ) -> GenerationOutput:
        """Continue every prompt to its eos or limit.

        Args:
            input_ids: the prompts. Either a list of lists of tokens or of tensors [P_b] int64, as `tokenizer(texts)`
                returns them, or a column of such lists (pandas, Arrow, an array of objects). Or a tensor or a NumPy
                array [B, P], padded on either side. For an encoder-decoder model, the decoder's prompts.
            streamer: called with every `Step`; or an object with `put` and `end` for a batch of one (transformers),
                whose `end` is called even after an error.
            progress: show a progress bar with the tokens per second (tqdm).
            attention_mask: [B, P], 1 for tokens and 0 for padding, or a list for a list of prompts; None = no padding,
                with a warning if some rows of a tensor look padded.
            max_new_tokens: the most tokens to emit, one number or [B], >= 0.
            sampling: for this call; None = the decoder's.
            seed: an int, from which a 64-bit hash makes a seed for each row; or a seed for each row, int64 [B] as a
                tensor, list or array. None draws an int. `stats.seeds` has the seeds of the rows; passed as `seed`,
                they reproduce the output. The same row seed gives the same tokens in any batch, up to the rounding of
                the models. With "gumbel" this holds for any draft and schedule, otherwise for the same draft and a
                constant schedule.
            eos_token_id: a token, several, or a list for each row; () = none. None = as in the target's
                generation config.
            pad_token_id: fills rows after their end; None = the target's, else its first eos, else 0.
            inputs: the inputs of the target's encoder, by name (`input_features` or `input_ids`, `attention_mask`); or
                the images of all prompts, as a processor gives them (`pixel_values`, `image_grid_thw`, ...).
            logprobs: "raw" = `output.logprobs` has the log-probability of every new token under the softmax of the
                target's unprocessed logits; "processed" = after processors, temperature and filters (0 for greedy
                rows); None = none are computed.
            top_logprobs: N >= 0; `output.top_logprobs` has the N most likely tokens at the position of every new token.
                Their log-probabilities are of the same kind as `logprobs`, or "raw" if `logprobs` is None.
            num_return_sequences: the number of sequences of each prompt. The sequences of a prompt are adjacent rows,
                so arguments with an entry per row need B * num_return_sequences entries.
            stop_strings: a string or several, or a list of them for each row. A row ends with the token that completes
                one of its strings, as in transformers: the string may begin in the prompt, and the token stays in the
                output. None = no strings.
            tokenizer: the target's tokenizer of transformers; only stop_strings need it.
            grammar: a `Grammar` that restricts the new tokens, or a list with a `Grammar` or None for each row. The
                target's distribution is the softmax of its processed logits over the tokens that the grammar allows;
                filters apply afterwards.

        Returns:
            `GenerationOutput`. A row whose target gave no finite logit ends there, with an entry in `errors` and a
            warning; the other rows continue. After a KeyboardInterrupt, `output()` returns the tokens so far.

        Raises:
            TypeError, ValueError: a wrong argument, by name; a prompt and max_new_tokens beyond the target's context. A
                draft with a shorter context only stops drafting.
        """
        refuse_unknown("SpeculativeDecoder.generate", unknown)
        arguments = GenerateArguments(
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            num_return_sequences=num_return_sequences,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
            grammar=grammar,
        )
        return self.run(input_ids, arguments, streamer, progress=progress)

    def run(
        self,
        input_ids: PromptIds,
        arguments: GenerateArguments,
        streamer: Streamer | None = None,
        row_rules: Sequence[RowRule] = (),
        batch_rules: BatchRules | None = None,
        logits: KeptLogits | None = None,
        progress: bool = False,
    ) -> GenerationOutput:
        """`generate` with additional rules that end rows, and with an object that receives the target's logits."""
        checks.check_bool("progress", progress)
        with self._guard.working():
            batch, stream = self._begin(input_ids, arguments, row_rules, batch_rules, logits)
            put, end = streamer_calls(streamer, input_ids, len(batch.rows))
            num_known = sum(row.length for row in batch.rows)
            try:
                with progress_bar(progress, None, " tokens") as bar:
                    for step in self._steps(batch, stream):
                        put(step)
                        if bar is not None:
                            bar.total = sum(row.length if row.finished else row.limit for row in batch.rows) - num_known
                            bar.update(sum(map(len, step.tokens)))
            finally:
                end()
            output = batch.output()
        for row, error in output.errors.items():
            warnings.warn(f"row {row}: {error}", RuntimeWarning, stacklevel=3)
        return output

    def stream(
        self,
        input_ids: PromptIds,
        *,
        attention_mask: AttentionMask = None,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling = None,
        seed: Seed = None,
        eos_token_id: EosTokenIds = None,
        pad_token_id: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        logprobs: str | None = None,
        top_logprobs: int = 0,
        num_return_sequences: int = 1,
        stop_strings: StopStrings = None,
        tokenizer: Any = None,
        grammar: AnyGrammar = None,
        **unknown: NoReturn,
    ) -> Iterator[Step]:
        """Iterate over the steps of `generate`; `output` returns the sequences so far at any time.

        The arguments are as in `generate`. All arguments are checked, and the prompts are read, before the first step.
        """
        refuse_unknown("SpeculativeDecoder.stream", unknown)
        arguments = GenerateArguments(
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            num_return_sequences=num_return_sequences,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
            grammar=grammar,
        )
        return self._steps(*self._begin(input_ids, arguments))

    def forget_call(self) -> None:
        """Free what belongs to the newest call alone: texts, rules, grammars. `output` and `stats` are then empty."""
        self._newest = None

    def output(self) -> GenerationOutput:
        """The sequences and statistics so far of the newest `stream`, or of a `generate` that was interrupted."""
        if not isinstance(self._newest, Batch):
            raise RuntimeError(
                "output: the newest call is not generate or stream, or ended before it had read its prompts; the "
                "handles of a session have its results"
            )
        with self._guard.working():
            return self._newest.output()

    def session(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        logprobs: str | None = None,
        top_logprobs: int = 0,
        **unknown: NoReturn,
    ) -> Session:
        """Serve requests that arrive over time, as in a server. One thread runs the steps; any thread may submit.

        Steps are compiled again for the first request that is sampled, that uses a given filter or processor, or that
        outgrows the draft. While a request in a row has very many biases, bad words or eos tokens, steps run eagerly
        (docs/serving.md). `compile="auto"` is decided in this call.

        Args:
            batch_size: the number of rows.
            max_length: the most tokens that a request may have, prompt included; every row gets room for them. None =
                the decoder's.
            logprobs, top_logprobs: as in `generate`, for all requests.

        Raises:
            TypeError, ValueError: a wrong argument, by name; a draft that cannot read new prompts between two steps
                (`DraftSource.restart`).
        """
        refuse_unknown("SpeculativeDecoder.session", unknown)
        max_length = self.max_length if max_length is None else max_length
        if max_length is None:
            raise ValueError("max_length: expected a number, because requests that are read later have no longest one")
        self._compiled_steps.choose_compile(0)
        arguments = (self.sampling, batch_size, max_length, logprobs, top_logprobs)
        self._newest = session = Session(self._compiled_steps, self._schedule, self._guard, *arguments)
        return session

    def generate_many(
        self,
        requests: Iterable[Request | Tensor | Sequence[int]],
        *,
        batch_size: int,
        max_length: int | None = None,
        logprobs: str | None = None,
        top_logprobs: int = 0,
        progress: bool = False,
        **unknown: NoReturn,
    ) -> Iterator[Completion]:
        """Continue many prompts, `batch_size` at a time, in a `session`: a row whose sequence has ended takes the next
        request.

        Args:
            requests: `Request`s, or prompts [P] for requests with the defaults. A request is taken from the iterable
                when a row is free. All rows wait while the iterable blocks, so use `session` for a queue that may be
                empty.
            batch_size, logprobs, top_logprobs: as in `session`.
            max_length: as in `session`; None = the decoder's, or the length of the longest request in a list (or
                another collection).
            progress: show a progress bar with the tokens per second (tqdm).

        Returns:
            An iterator of `Completion`s in the order in which they finish. A completion has an `error` if `generate`
            would refuse the request, if the request is longer than max_length, or if the target gave no finite logit.
            `stats` counts over all requests.

        Raises:
            TypeError, ValueError: a wrong argument, by name.
        """
        refuse_unknown("SpeculativeDecoder.generate_many", unknown)
        checks.check_bool("progress", progress)
        if isinstance(requests, (Request, str)) or not isinstance(requests, Iterable):
            raise TypeError(f"requests: expected an iterable of Request, got {type(requests)}")
        batch_size = checks.check_int("batch_size", batch_size, 1)
        longest, total = largest(requests) if isinstance(requests, Collection) else (0, 0)
        if max_length is None and self.max_length is None and isinstance(requests, Collection):
            max_length = max(longest, 2)
        self._compiled_steps.choose_compile(total / batch_size)
        session = self.session(batch_size, max_length=max_length, logprobs=logprobs, top_logprobs=top_logprobs)
        return Completions(session, requests, progress)

    def _begin(
        self, input_ids: PromptIds, arguments: GenerateArguments, row_rules: Sequence[RowRule] = (), *of_batch: Any
    ) -> tuple[Batch, Stream]:
        """Check the arguments of a call, take the models from other streams, and prefill the prompts."""
        with self._guard.working():
            self._guard.look_for_call()
            prompts = read_prompts(
                self.target, input_ids, default_sampling=self.sampling, row_rules=row_rules, **arguments
            )
            self._compiled_steps.check_grammars(prompts.grammars)
            state = prompts.state
            longest = int(state.limits.max())
            check_room(self.target, longest, self.max_length)
            self._compiled_steps.choose_compile(int((state.limits - state.lengths).max()))
            capacity = self._compiled_steps.capacity(longest, self.max_length)
            check_ranks(self._compiled_steps, {"": prompts})
            stream = self._guard.begin_stream()
            with self._guard.computing(stream):
                # Forget the old batch first, so that `output` does not return its sequences if the prefill is
                # interrupted.
                self._newest = None
                self._newest = batch = Batch(self._compiled_steps, self._schedule, prompts, capacity, *of_batch)
        return batch, stream

    def _steps(self, batch: Batch, stream: Stream) -> Iterator[Step]:
        return _Steps(self._guard, batch, stream)


class _Steps(Iterator[Step]):
    """Iterates over the steps of a batch. If the guard refuses a call of `next`, a later call continues the stream.
    This is not a generator, because a generator ends when it raises. Any other error and any interrupt end the stream,
    because they may leave a step incomplete."""

    def __init__(self, guard: Guard, batch: Batch, stream: Stream) -> None:
        self._guard = guard
        self._batch = batch
        self._stream = stream
        self._is_whole = True

    def __next__(self) -> Step:
        if all(self._batch.finished):
            raise StopIteration
        with self._guard.computing(self._stream):
            if not self._is_whole:
                raise RuntimeError(
                    "stream: an error or an interrupt has ended it within a step; output() has the tokens so far"
                )
            self._is_whole = False
            if self._guard.take_models(self._stream):
                self._batch.read_again()
            step = self._batch.step()
        self._is_whole = True
        return step


def _kind(part: LanguageModel | DraftSource | None) -> str | None:
    """The name of the class, for a model of transformers that of the model."""
    part = part.model if type(part) is ModelDraft else part
    part = getattr(part, "model", part) if isinstance(part, LanguageModel) else part
    return None if part is None else type(part).__name__
