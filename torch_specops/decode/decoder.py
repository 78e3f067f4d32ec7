"""The decoding loop: the host's part. It reads prompts, replays the step, and looks at a step's record."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .. import checks, schedules
from ..drafts import DraftSource, LanguageModel
from ..sampling import SamplingParams
from ..schedules import Schedule
from .choices import as_draft_source, as_language_model, as_sampling, as_schedule, as_verify, resolve_compile
from .output import GenerationOutput, GenerationStats, Step
from .pair import check_pair, check_room
from .prompts import EosTokenIds, align_prompts, eos_tensor, per_row, row_seeds
from .records import RecordReader, Streamer, step_of, streamer_calls
from .runner import StepRunner
from .state import DecodeState

__all__ = ["SpeculativeDecoder"]

# Where steps are compiled, slots are rounded up to this, so that prompts of similar length share a graph.
CAPACITY_MULTIPLE = 64


class SpeculativeDecoder:
    """Speculative decoding of batches of prompts with one target and one draft (Leviathan et al. 2023, Algorithm 1).

    Every emitted token has exactly the target's law, whatever the draft; at temperature 0 the output is the target's
    greedy continuation. The state lives on the target's device, and the host waits for nothing inside a step.

    What was compiled is kept: further prompts of the same batch size that fit `max_length` compile nothing. Another
    batch size, another capacity (multiples of 64 without `max_length`), the first row that is sampled or filtered, or
    another length of an encoder's input compile their own pieces, once.

    Args:
        target: a transformers model, or a `LanguageModel`.
        draft: a smaller transformers model, a `LanguageModel`, or a `DraftSource`; None = one token per step from the
            target alone, through the same loop.
        num_draft_tokens: K, drafts per step, >= 1. What a `Schedule` object says takes its place.
        schedule: "constant"; "heuristic" (begin with K, +2 after a step whose drafts were all accepted, otherwise -1);
            "optimal" (Leviathan et al. 2023, theorem 3.8, K at most num_draft_tokens: the acceptance rate is tracked,
            the cost of a draft is measured once, before the first step); or a `Schedule`.
        sampling: temperature 0 = greedy; None = temperature 1. A call may bring its own.
        verify: "exact"; "block" (`verify_block`: the same law, accepting at least as many drafts on average); or
            "sigmoid", which is lossy (`verify_sigmoid`) and needs a draft with probabilities.
        lenience, argmax_lenience: in (0, 1], for sampled and for greedy rows; below 1 "exact" is lossy, as
            `verify_exact` says.
        compile: True, False, or "auto": True on CUDA; on a CPU, for drafts with probabilities or none, as soon as
            the steps done and those certain to come pay for it (about 8,000). `stats.compiled` says what was done and
            why.
        one_graph: compile the whole step as a single graph; it takes longer to compile (K copies of the draft).
        max_length: capacity in tokens per sequence, prompt included; None = what each call needs, rounded up where
            steps are compiled.

    Raises:
        TypeError, ValueError: an argument of a wrong type or out of range, by name; vocabularies or devices of
            target and draft that differ.

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
        draft: DraftSource | LanguageModel | nn.Module | None = None,
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
        self.schedule = schedules.Constant(0) if draft is None else as_schedule(schedule, num_draft_tokens)
        self._cost_is_measured = schedule != "optimal" or draft is None
        self.sampling = as_sampling(sampling, SamplingParams())
        self.max_length = max_length
        if max_length is not None:
            checks.check_int("max_length", max_length, 2)
        law = as_verify(verify, self.draft, lenience, argmax_lenience)
        check_pair(self.target, self.draft)
        self._runner = StepRunner(self.target, self.draft, law, one_graph)
        self._compile = compile
        self._num_eager_steps = 0
        self._choose_compile(0)
        self._num_streams = 0

    @property
    def compiled(self) -> bool:
        """Whether steps are compiled. Once they are, they stay so: what was compiled is kept."""
        return self._runner.compiled

    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: int | Tensor | None = None,
        eos_token_id: EosTokenIds = None,
        pad_token_id: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        streamer: Streamer | None = None,
    ) -> GenerationOutput:
        """Continue every prompt to its eos or limit.

        Args:
            input_ids: [B, P] int64, padded on either side; for an encoder-decoder model, the decoder's prompt.
            attention_mask: [B, P], 1 for tokens and 0 for padding; None = no padding.
            max_new_tokens: the most tokens to emit, one number or one per row, >= 0.
            sampling: for this call; None = the decoder's.
            seed: an int (row b uses seed + b), or int64 [B]; None draws one, `stats.seeds` says which. With a constant
                schedule the same seed gives a row the same tokens whatever batch it stands in, up to the rounding of
                the models.
            eos_token_id: a token, several, or a list for each row; () = none. None = those of the target's
                generation config.
            pad_token_id: what fills rows after their end; None = the target's, else its first eos, else 0.
            inputs: what the target's encoder reads, by name (`input_features` or `input_ids`, `attention_mask`).
            streamer: called with every `Step`; or an object with `put` and `end` for a batch of one (transformers).

        Returns:
            `GenerationOutput`. A row whose target gave no finite logit ends there, with an entry in `errors` and a
            warning; the others go on. After a KeyboardInterrupt with a streamer, what was generated until then.

        Raises:
            TypeError, ValueError: by name; a prompt and max_new_tokens that exceed what a model can read.
        """
        steps = self.stream(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
        )
        put, end = streamer_calls(streamer, input_ids)
        interrupted = False
        try:
            for step in steps:
                put(step)
        except KeyboardInterrupt:
            if streamer is None:
                raise
            interrupted = True
        end()
        output = self.output(interrupted)
        for row, error in output.errors.items():
            warnings.warn(f"row {row}: {error}", RuntimeWarning, stacklevel=2)
        return output

    def stream(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int | Sequence[int] = 128,
        sampling: SamplingParams | None = None,
        seed: int | Tensor | None = None,
        eos_token_id: EosTokenIds = None,
        pad_token_id: int | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Iterator[Step]:
        """The steps of `generate` as they are done; `output` gives the sequences at any time.

        The arguments are checked and the prompts are read at the call, before the first step.
        """
        self._num_streams += 1
        with torch.inference_mode(), self._runner.on_device():
            self._start(input_ids, attention_mask, max_new_tokens, sampling, seed, eos_token_id, pad_token_id, inputs)
        return self._steps(self._num_streams)

    @torch.inference_mode()
    def output(self, interrupted: bool = False) -> GenerationOutput:
        """The sequences as they stand, and what the steps so far add up to."""
        state = self._runner.state
        # What the steps told: on CUDA the state may be one step ahead.
        lengths = torch.tensor(self._lengths, device=state.tokens.device)
        width = int(lengths.max())
        inside = torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
        sequences = torch.where(inside, state.tokens[:, :width], self._pad_token_id)
        errors = {
            row: f"target: no finite logit after {self._lengths[row]} tokens"
            for row in state.failed.nonzero().flatten().tolist()
            if self._finished[row]
        }
        return GenerationOutput(sequences, self._prompt_lengths.clone(), lengths, self._stats, errors, interrupted)

    def _start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_new_tokens: int | Sequence[int],
        sampling: SamplingParams | None,
        seed: int | Tensor | None,
        eos_token_id: EosTokenIds,
        pad_token_id: int | None,
        inputs: Mapping[str, Tensor] | None,
    ) -> None:
        device = self.target.device
        prompts, lengths = align_prompts(input_ids, attention_mask, self.target.vocab_size)
        batch = prompts.shape[0]
        limits = lengths.cpu() + per_row("max_new_tokens", max_new_tokens, batch, 0)
        if eos_token_id is None:
            eos_token_id = getattr(self.target, "eos_token_ids", ())
        eos = eos_tensor(eos_token_id, batch)
        seeds = row_seeds(seed, batch)
        rules = as_sampling(sampling, self.sampling).tensors(batch)
        self._choose_compile(int((limits - lengths.cpu()).max()))
        capacity = self._capacity(int(limits.max()))
        if pad_token_id is None:
            pad_token_id = getattr(self.target, "pad_token_id", None)
        else:
            checks.check_int("pad_token_id", pad_token_id, 0)
        self._pad_token_id = pad_token_id if pad_token_id is not None else max(int(eos[0, 0]), 0)

        started = time.perf_counter()
        tokens = torch.zeros(batch, capacity, dtype=torch.int64)
        tokens[:, : prompts.shape[1]] = prompts
        state = self._runner.start(
            DecodeState(
                tokens=tokens,
                lengths=lengths.cpu(),
                limits=limits,
                eos=eos,
                finished=limits <= lengths.cpu(),
                failed=torch.zeros(batch, dtype=torch.bool),
                seeds=seeds,
                sampling=rules,
                is_sampled=bool((rules.temperature > 0).any()),
            ),
            inputs or {},
        )
        self._prompt_lengths = state.lengths.clone()
        self._lengths = lengths.tolist()
        self._finished = (limits <= lengths.cpu()).tolist()
        self.target.start(batch, capacity, inputs)
        if not self.compiled and self._cost_is_measured and bool((lengths == lengths[0]).all()):
            # Eagerly, prompts of one length are read together with the first drafts: a forward less.
            self._runner.unread_length = prompts.shape[1]
        else:
            # All but the newest token of the longest prompt, and at least one: the first forward allocates the cache.
            width = max(prompts.shape[1] - 1, 1)
            positions = torch.arange(width, device=device).expand(batch, -1)
            self.target.forward(state.tokens[:, :width], positions, 1)
        if self.draft is not None:
            self.draft.compile(self._runner.draft_shape)
            self.draft.start(state.tokens, state.lengths, capacity, inputs)
        self._runner.keep_valid_graphs()
        self._stats = GenerationStats(seeds=seeds.tolist(), compiled=self.compile_reason)
        self.schedule.reset()
        self._runner.synchronize()
        self._stats.prefill_seconds = time.perf_counter() - started

    def _choose_compile(self, num_new_tokens: int) -> None:
        if self.compiled:
            return
        certain = num_new_tokens / (max(self.schedule.buckets) + 1)
        steps = self._num_eager_steps + certain
        self._runner.compiled, self.compile_reason = resolve_compile(self._compile, self.target, self.draft, steps)

    def _capacity(self, longest: int) -> int:
        """Slots for the longest sequence and the drafts of a step beyond it."""
        if self.max_length is not None and longest > self.max_length:
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within max_length = {self.max_length}, got {longest}"
            )
        check_room(self.target, self.draft, longest)
        slots = (self.max_length or longest) + max(self.schedule.buckets) + 1
        if not self.compiled:
            return slots
        return -(-slots // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE

    @torch.inference_mode()
    def _steps(self, stream: int) -> Iterator[Step]:
        self._check_is_newest(stream)
        state = self._runner.state
        reader = RecordReader(state.tokens.device)
        if bool(state.finished.all()):
            return
        if not self._cost_is_measured:
            self.schedule = schedules.Optimal(self._measured_cost_ratio(), buckets=self.schedule.buckets)
            self._cost_is_measured = True
        num_draft_tokens = self.schedule.first()
        self._prepare(num_draft_tokens)
        before = time.perf_counter()
        while True:
            reader.push(self._runner.run(num_draft_tokens, self.schedule))
            record = reader.pop()
            if record is None:
                continue
            step = step_of(record, time.perf_counter() - before)
            self._stats.add(step)
            self._finished = step.finished
            self._lengths = [n + len(tokens) for n, tokens in zip(self._lengths, step.tokens, strict=True)]
            self._num_eager_steps += not self.compiled
            active = [bool(row) for row in record[:, -2]]
            num_draft_tokens = self._next(step, active)
            self._prepare(num_draft_tokens)
            yield step
            if all(step.finished):
                return
            self._check_is_newest(stream)
            # What a caller did with the step is no time of the loop.
            before = time.perf_counter()

    def _prepare(self, num_draft_tokens: int) -> None:
        self._stats.compile_seconds += self._runner.prepare(num_draft_tokens)

    def _check_is_newest(self, stream: int) -> None:
        if stream != self._num_streams:
            raise RuntimeError("stream: this decoder has begun another stream, and has one state")

    def _next(self, step: Step, active: list[bool]) -> int:
        proposed = [count for count, row in zip(step.num_proposed, active, strict=True) if row]
        accepted = [count for count, row in zip(step.num_accepted, active, strict=True) if row]
        return self.schedule.next(proposed, accepted)

    def _measured_cost_ratio(self) -> float:
        """What one more draft costs, in steps without drafts: its own forward, and one more token for the target."""
        most = self.schedule.buckets[-1]
        seconds = []
        for num_draft_tokens in (0, most):
            self._prepare(num_draft_tokens)
            # Rows that have ended have padding alone, and it is the price of drafts that is asked for.
            seconds.append(self._runner.seconds_of(num_draft_tokens))
        plain, drafting = seconds
        return max(drafting - plain, 0.0) / (most * plain)
