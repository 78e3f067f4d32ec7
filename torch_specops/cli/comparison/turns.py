"""Providers warmed up, compared and timed in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..greedy import GreedyCheck, GreedyDifference, check_greedy
from .providers import Answer, Provider, make_providers
from .work import Measurement, Models, Workload


class Comparison:
    """Providers that take turns: timed runs, after a warm-up and a run that is observed. `measurements` is what was
    measured so far, also after an interrupt."""

    def __init__(
        self, models: Models, work: Workload, batch_sizes: Sequence[int], rounds: int, compile: bool | str = "auto"
    ) -> None:
        numbers = {"batch_sizes": min(batch_sizes), "rounds": rounds, "max_new_tokens": work.max_new_tokens}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {number}")
        longest = max(len(prompt) for prompt in work.rows(max(batch_sizes))) + work.max_new_tokens
        if models.target.max_length is not None and longest > models.target.max_length:
            # transformers would go on, at positions that the model does not know.
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within the {models.target.max_length} that the target "
                f"reads, got {longest}"
            )
        self.models = models
        self.work = work
        self.batch_sizes = list(batch_sizes)
        self.rounds = rounds
        self.measurements: list[Measurement] = []
        self._device = models.target.device
        self._providers = make_providers(models, work, compile)

    @property
    def num_runs(self) -> int:
        """How many times `run` yields."""
        runs = sum(len(self._taking(size)) * (self.rounds + 1) for size in self.batch_sizes)
        return runs + len(self.batch_sizes) * self.work.greedy

    @torch.inference_mode()
    def run(self) -> Iterator[str]:
        """Measure; yields what comes next, before each run."""
        for size in self.batch_sizes:
            batch = self._batch(size)
            new_tokens = size * self.work.max_new_tokens
            active = [
                (provider, Measurement(provider.name, size, provider.compiled, new_tokens))
                for provider in self._taking(size)
            ]
            self.measurements += [row for _, row in active]
            answers = []
            for provider, row in active:
                yield f"batch {size}, warming up: {provider.name}"
                answers.append(self._warm_up(provider, row, batch))
            if self.work.greedy:
                yield f"batch {size}, comparing greedy outputs"
                self._compare([row for _, row in active], answers)
            for index in range(self.rounds):
                # A provider that always came first would always find the same caches.
                turn = index % len(active)
                for provider, row in active[turn:] + active[:turn]:
                    yield f"batch {size}, round {index + 1} of {self.rounds}: {provider.name}"
                    seconds, _ = self._timed(provider, batch, self.work.seed + index)
                    row.seconds.append(seconds)

    def _taking(self, batch_size: int) -> list[Provider]:
        return [provider for provider in self._providers if batch_size == 1 or not provider.single]

    def _batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, P] and mask [B, P], padded on the left."""
        prompts = self.work.rows(batch_size)
        pad = self.models.target.pad_token_id or 0
        input_ids = pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side="left")
        ones = [torch.ones_like(prompt) for prompt in prompts]
        attention_mask = pad_sequence(ones, batch_first=True, padding_side="left")
        return input_ids.to(self._device), attention_mask.to(self._device)

    def _warm_up(self, provider: Provider, row: Measurement, batch: tuple[Tensor, Tensor]) -> Answer:
        """Run once to compile and allocate, and once more to see where the time goes."""
        on_cuda = self._device.type == "cuda"
        before = torch.cuda.memory_allocated(self._device) if on_cuda else 0
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        first = provider.decode(*batch, self.work.seed)
        if on_cuda:
            row.peak_memory_bytes = torch.cuda.max_memory_allocated(self._device) - before
        if first.stats is not None:
            row.compile_seconds = first.stats.compile_seconds
        # A forward with hooks would be compiled again.
        watched = () if provider.compiled else provider.modules
        with _forwards_watched(watched, self._device) as (calls, in_forwards):
            seconds, answer = self._timed(provider, batch, self.work.seed)
        if answer.stats is not None:
            row.num_steps = answer.stats.num_steps
            row.mean_acceptance_length = answer.stats.mean_acceptance_length
            row.acceptance_rate = answer.stats.acceptance_rate
        elif not provider.drafts_with_target:
            row.num_steps = calls[provider.modules[0]]
            row.mean_acceptance_length = self.work.max_new_tokens / row.num_steps
        if not provider.compiled and row.num_steps is not None:
            row.outside_seconds_per_step = (seconds - sum(in_forwards)) / row.num_steps
        counts = [len(tokens) for tokens in answer.tokens]
        if set(counts) != {self.work.max_new_tokens}:
            raise RuntimeError(f"{provider.name}: expected {self.work.max_new_tokens} tokens per row, got {counts}")
        return answer

    def _timed(self, provider: Provider, batch: tuple[Tensor, Tensor], seed: int) -> tuple[float, Answer]:
        _synchronize(self._device)
        started = time.perf_counter()
        answer = provider.decode(*batch, seed)
        _synchronize(self._device)
        return time.perf_counter() - started, answer

    def _compare(self, measurements: Sequence[Measurement], answers: Sequence[Answer]) -> None:
        """Where two providers differ in a row, plain greedy decoding is compared with every output of that row."""
        single = self.models.target.model.dtype in (torch.float32, torch.float64)
        checks: dict[tuple[int, tuple[int, ...]], GreedyCheck] = {}
        for row, prompt in enumerate(self.work.rows(measurements[0].batch_size)):
            outputs = {tuple(answer.tokens[row]) for answer in answers}
            if len(outputs) > 1:
                for tokens in outputs:
                    checks[row, tokens] = check_greedy(self.models.target, prompt.unsqueeze(0), tokens, row)
        for measurement, answer in zip(measurements, answers, strict=True):
            keys = [(row, tuple(tokens)) for row, tokens in enumerate(answer.tokens)]
            measurement.differences = [each for key in keys if key in checks for each in checks[key].differences]
            measurement.greedy = _verdict(measurement.differences, single)


def _verdict(differences: Sequence[GreedyDifference], single: bool) -> str:
    if not differences:
        return "identical"
    if not single:
        return "rounding"
    return "near ties" if all(difference.is_rounding for difference in differences) else "different"


@contextmanager
def _forwards_watched(
    models: Sequence[nn.Module], device: torch.device
) -> Iterator[tuple[Counter[nn.Module], list[float]]]:
    """Yields how many forwards each model ran inside, and the seconds of each forward."""
    calls: Counter[nn.Module] = Counter()
    seconds: list[float] = []
    started = 0.0

    def before(model: nn.Module, inputs: object) -> None:
        nonlocal started
        _synchronize(device)
        started = time.perf_counter()

    def after(model: nn.Module, inputs: object, output: object) -> None:
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
        calls[model] += 1

    hooks = [model.register_forward_pre_hook(before) for model in models]
    hooks += [model.register_forward_hook(after) for model in models]
    try:
        yield calls, seconds
    finally:
        for hook in hooks:
            hook.remove()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
