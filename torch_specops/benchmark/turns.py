"""The providers of a benchmark, and how they take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..decode import GenerationStats, GreedyCheck, SpeculativeDecoder, check_greedy
from ..drafts import DraftSource
from .observe import ForwardTimer, peak_memory, reset_peak_memory, synchronize
from .work import Difference, Measurement, Pair, Workload

__all__ = ["ASSISTED", "GENERATE", "Benchmark"]

GENERATE = "transformers generate"
ASSISTED = "transformers assisted"
PLAIN = "specops, no draft"
SPECULATIVE = "specops"


@dataclass(frozen=True)
class _Answer:
    tokens: list[list[int]]
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class _Provider:
    name: str
    # (input_ids [B, P], attention_mask [B, P], seed), padded on the left
    decode: Callable[[Tensor, Tensor, int], _Answer]
    # The target first.
    modules: tuple[nn.Module, ...]
    compiled: bool = False
    batches: bool = True
    # Why it cannot run at all.
    note: str = ""

    def refusal(self, batch_size: int) -> str:
        return self.note or ("" if self.batches or batch_size == 1 else "transformers refuses batches here")


class Benchmark:
    """Providers that take turns, round by round.

    Args:
        pair: target and draft.
        work: prompts and settings.
        batch_sizes: each is measured with all providers.
        rounds: timed runs per provider, after a warm-up and a run that is observed.
        compile: whether this package's steps run compiled; None = as it would choose itself, True = eager and compiled.

    Attributes:
        measurements: what there is so far, also after an interrupt.
    """

    def __init__(
        self, pair: Pair, work: Workload, batch_sizes: Sequence[int], rounds: int, compile: bool | None = None
    ) -> None:
        self.pair = pair
        self.work = work
        for name, values in (("batch_sizes", batch_sizes), ("rounds", [rounds])):
            if not values or min(values) < 1:
                raise ValueError(f"{name}: expected numbers >= 1, got {', '.join(map(str, values)) or 'none'}")
        if work.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected a number >= 1, got {work.max_new_tokens}")
        longest = max(len(prompt) for prompt in self._prompts(max(batch_sizes))) + work.max_new_tokens
        if pair.target.max_length is not None and longest > pair.target.max_length:
            # transformers would go on, with positions that the model does not know.
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within the {pair.target.max_length} that the target "
                f"reads, got {longest}"
            )
        self.batch_sizes = list(batch_sizes)
        self.rounds = rounds
        self.measurements: list[Measurement] = []
        self._device = pair.target.device
        self._providers = self._transformers()
        for choice in ("auto",) if compile is None else (False, True) if compile else (False,):
            self._providers += [self._own(PLAIN, None, choice), self._own(SPECULATIVE, pair.make_draft(), choice)]

    @property
    def num_runs(self) -> int:
        """How many times `run` yields."""
        total = 0
        for batch_size in self.batch_sizes:
            active = sum(not provider.refusal(batch_size) for provider in self._providers)
            total += active * (self.rounds + 1) + (self.work.temperature == 0)
        return total

    @torch.inference_mode()
    def run(self) -> Iterator[str]:
        """Measure; yields what comes next, before each run."""
        for batch_size in self.batch_sizes:
            batch = self._batch(batch_size)
            rows = [
                Measurement(
                    provider.name,
                    batch_size,
                    provider.compiled,
                    batch_size * self.work.max_new_tokens,
                    note=provider.refusal(batch_size),
                )
                for provider in self._providers
            ]
            self.measurements += rows
            active = [(provider, row) for provider, row in zip(self._providers, rows, strict=True) if not row.note]
            answers = []
            for provider, row in active:
                yield f"batch {batch_size}, warming up: {provider.name}"
                answers.append(self._warm_up(provider, row, batch))
            if self.work.temperature == 0:
                yield f"batch {batch_size}, comparing greedy outputs"
                self._compare([row for _, row in active], answers)
            for index in range(self.rounds):
                # A provider that always came first would always find the same caches.
                turn = index % len(active)
                for provider, row in active[turn:] + active[:turn]:
                    yield f"batch {batch_size}, round {index + 1} of {self.rounds}: {provider.name}"
                    seconds, _ = self._timed(provider, batch, self.work.seed + index)
                    row.seconds.append(seconds)

    def _batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        prompts = self._prompts(batch_size)
        width = max(len(prompt) for prompt in prompts)
        pad = self.pair.target.pad_token_id or 0
        input_ids = torch.full((batch_size, width), pad, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = prompt
            attention_mask[row, width - len(prompt) :] = 1
        return input_ids.to(self._device), attention_mask.to(self._device)

    def _prompts(self, batch_size: int) -> list[Tensor]:
        return [self.work.prompts[row % len(self.work.prompts)] for row in range(batch_size)]

    def _transformers(self) -> list[_Provider]:
        pair, num_draft_tokens = self.pair, self.work.num_draft_tokens
        target = pair.target.model
        generate = _Provider(GENERATE, self._generate_call({}, None, {}), (target,))
        if pair.assistance is None:
            return [generate, _Provider(ASSISTED, _nothing, (), note="transformers has no such draft")]
        fields = pair.assistance(num_draft_tokens)
        modules = (target,) if pair.assistant is None else (target, pair.assistant)
        same_number = {
            "num_assistant_tokens": num_draft_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        settings = {f"K = {num_draft_tokens}": same_number}
        if "prompt_lookup_num_tokens" not in fields:
            settings["its defaults"] = {}
        return [
            generate,
            *(
                _Provider(
                    f"{ASSISTED}, {name}", self._generate_call(fields, pair.assistant, each), modules, batches=False
                )
                for name, each in settings.items()
            ),
        ]

    def _own(self, name: str, draft: DraftSource | None, compile: bool | str) -> _Provider:
        # From the model, not its adapter: each decoder needs a cache of its own.
        decoder = SpeculativeDecoder(
            self.pair.target.model,
            draft,
            num_draft_tokens=self.work.num_draft_tokens,
            schedule=self.work.schedule,
            sampling=self.work.sampling,
            verify="exact" if draft is None else self.work.verify,
            compile=compile,
        )

        def decode(input_ids: Tensor, attention_mask: Tensor, seed: int) -> _Answer:
            output = decoder.generate(
                input_ids,
                attention_mask=attention_mask,
                max_new_tokens=self.work.max_new_tokens,
                seed=seed,
                eos_token_id=(),
            )
            if output.errors:
                raise RuntimeError("; ".join(f"row {row}: {error}" for row, error in output.errors.items()))
            return _Answer([output.new_tokens(row) for row in range(input_ids.shape[0])], output.stats)

        drafting = getattr(getattr(draft, "model", None), "model", None)
        modules = (self.pair.target.model, *([drafting] if isinstance(drafting, nn.Module) else []))
        return _Provider(name + ", compiled" * decoder.compiled, decode, modules, decoder.compiled)

    def _generate_call(
        self, fields: dict[str, Any], assistant: nn.Module | None, assistant_fields: dict[str, Any]
    ) -> Callable[[Tensor, Tensor, int], _Answer]:
        """`model.generate` with these fields and nothing from the model's own generation config, which may hold an eos,
        a top-k, penalties."""
        work, target = self.work, self.pair.target.model
        fields = fields | {"max_new_tokens": work.max_new_tokens, "do_sample": work.temperature > 0}
        if work.temperature > 0:
            fields |= {"temperature": work.temperature, "top_k": work.top_k, "top_p": work.top_p}
            fields |= {"min_p": work.min_p} if work.min_p > 0 else {}

        def decode(input_ids: Tensor, attention_mask: Tensor, seed: int) -> _Answer:
            torch.manual_seed(seed)
            helper = {} if assistant is None else {"assistant_model": assistant}
            # Without an assistant the fields of one belong to the target: it drafts for itself.
            drafting = target if assistant is None else assistant
            with _generation_config(target, {}), _generation_config(drafting, assistant_fields):
                output = target.generate(input_ids=input_ids, attention_mask=attention_mask, **helper, **fields)
            return _Answer(output[:, input_ids.shape[1] :].tolist())

        return decode

    def _warm_up(self, provider: _Provider, row: Measurement, batch: tuple[Tensor, Tensor]) -> _Answer:
        """Run once to compile and allocate, and once more to look at the time."""
        before = reset_peak_memory(self._device)
        first = provider.decode(*batch, self.work.seed)
        row.peak_memory_bytes = peak_memory(self._device, before)
        if first.stats is not None:
            row.compile_seconds = first.stats.compile_seconds
        timer = ForwardTimer(self._device)
        # A compiled function would see another forward, and compile anew.
        with timer.watching(() if provider.compiled else provider.modules):
            seconds, answer = self._timed(provider, batch, self.work.seed)
        if answer.stats is not None:
            row.num_steps = answer.stats.num_steps
            row.mean_acceptance_length = answer.stats.mean_acceptance_length
            row.acceptance_rate = answer.stats.acceptance_rate
        elif not self._drafts_for_itself(provider):
            row.num_steps = timer.calls(provider.modules[0])
            row.mean_acceptance_length = self.work.max_new_tokens / row.num_steps
        if not provider.compiled and row.num_steps is not None:
            row.outside_seconds_per_step = (seconds - timer.seconds) / row.num_steps
        if any(len(tokens) != self.work.max_new_tokens for tokens in answer.tokens):
            counts = [len(tokens) for tokens in answer.tokens]
            raise RuntimeError(f"{provider.name}: expected {self.work.max_new_tokens} tokens per row, got {counts}")
        return answer

    def _drafts_for_itself(self, provider: _Provider) -> bool:
        """Early exit in transformers: the target's forwards are those of the draft, too."""
        fields = {} if self.pair.assistance is None else self.pair.assistance(1)
        return provider.name.startswith(ASSISTED) and "assistant_early_exit" in fields

    def _timed(self, provider: _Provider, batch: tuple[Tensor, Tensor], seed: int) -> tuple[float, _Answer]:
        synchronize(self._device)
        started = time.perf_counter()
        answer = provider.decode(*batch, seed)
        synchronize(self._device)
        return time.perf_counter() - started, answer

    def _compare(self, measurements: Sequence[Measurement], answers: Sequence[_Answer]) -> None:
        """Where two providers differ, ask plain greedy decoding about every output of that row."""
        single = self.pair.target.model.dtype in (torch.float32, torch.float64)
        checks: dict[tuple[int, tuple[int, ...]], GreedyCheck] = {}
        for row, prompt in enumerate(self._prompts(measurements[0].batch_size)):
            outputs = {tuple(answer.tokens[row]) for answer in answers}
            if len(outputs) > 1:
                for tokens in outputs:
                    checks[row, tokens] = check_greedy(self.pair.target, prompt.unsqueeze(0), tokens)
        for measurement, answer in zip(measurements, answers, strict=True):
            found = {row: checks.get((row, tuple(tokens))) for row, tokens in enumerate(answer.tokens)}
            measurement.differences = [
                Difference(row, each.index, each.token, each.expected_token, each.logit_gap, each.rounding_bound)
                for row, check in found.items()
                if check is not None
                for each in check.differences
            ]
            measurement.greedy = _verdict(measurement.differences, single)


def _verdict(differences: Sequence[Difference], single: bool) -> str:
    if not differences:
        return "identical"
    if not single:
        return "rounding"
    small = all(difference.logit_gap <= difference.rounding_bound for difference in differences)
    return "near ties" if small else "different"


def _nothing(input_ids: Tensor, attention_mask: Tensor, seed: int) -> _Answer:
    raise NotImplementedError


@contextmanager
def _generation_config(model: Any, fields: dict[str, Any]) -> Iterator[None]:
    """While active, a fresh generation config with these fields; `generate` fills what it is not told from there."""
    kept = model.generation_config
    pad = 0 if kept.pad_token_id is None else kept.pad_token_id
    model.generation_config = type(kept)(pad_token_id=pad, **fields)
    try:
        yield
    finally:
        model.generation_config = kept
