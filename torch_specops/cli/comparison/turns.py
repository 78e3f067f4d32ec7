"""Warms up, compares and times the providers, in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...sampling import SamplingParams
from ..greedy import GreedyCheck, GreedyDifference, check_greedy
from .providers import Answer, Provider, make_providers
from .work import Case, Measurement, Models, Run, Workload


class Comparison:
    """Providers that take turns on each batch: an observed run of each, then timed runs. `measurements` has the results
    so far, also after an interrupt."""

    def __init__(self, models: Models, work: Workload, rounds: int, compile: bool | str = "auto") -> None:
        for name, number in {"rounds": rounds, "max_new_tokens": work.max_new_tokens}.items():
            if number < 1:
                raise ValueError(f"{name}: expected a number >= 1, got {number}")
        prompts = [prompt for case in work.cases for batch in case.batches for prompt in batch]
        longest = max(map(len, prompts)) + work.max_new_tokens
        if models.target.max_length is not None and longest > models.target.max_length:
            # transformers would go on beyond the model's positions.
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within the {models.target.max_length} that the target "
                f"reads, got {longest}"
            )
        self.models = models
        self.work = work
        self.rounds = rounds
        self.measurements: list[Measurement] = []
        self._device = models.target.device
        self._providers = make_providers(models, work, compile)

    @property
    def num_runs(self) -> int:
        """How many times `run` yields."""
        return sum(
            len(case.batches) * (len(self._taking(case)) * (self.rounds + 1) + (case.temperature == 0))
            for case in self.work.cases
        )

    @torch.inference_mode()
    def run(self) -> Iterator[str]:
        """Measure; yields a label before each run."""
        warm: set[tuple[float, int]] = set()
        num_rounds = 0
        for case in self.work.cases:
            kind = case.category, case.temperature, case.batch_size
            active = [(each, Measurement(each.name, each.compiled, *kind)) for each in self._taking(case)]
            self.measurements += [measured for _, measured in active]
            place = ", ".join(filter(None, [f"T = {case.temperature:g}, batch {case.batch_size}", case.category]))
            for prompts in case.batches:
                batch = self._padded(prompts)
                answers, turns = [], []
                for provider, measured in active:
                    yield f"{place}, warming up: {provider.name}"
                    # With the seed of the first round, so that lengths and times belong to the same texts.
                    settings = case.sampling, self.work.seed + num_rounds
                    answer, run = self._observe(provider, batch, *settings, is_first=kind[1:] not in warm)
                    answers.append(answer)
                    measured.runs.append(run)
                    turns.append((provider, run))
                warm.add(kind[1:])
                if case.temperature == 0:
                    yield f"{place}, comparing greedy outputs"
                    self._compare(prompts, [run for _, run in turns], answers)
                for index in range(self.rounds):
                    # The order changes, because the first provider finds other caches than the later ones.
                    first = num_rounds % len(turns)
                    for provider, run in turns[first:] + turns[:first]:
                        yield f"{place}, round {index + 1} of {self.rounds}: {provider.name}"
                        seconds, answer = self._timed(provider, batch, case.sampling, self.work.seed + num_rounds)
                        compiling = 0.0 if answer.stats is None else answer.stats.compile_seconds
                        run.seconds.append(seconds - compiling)
                        run.compile_seconds += compiling
                    num_rounds += 1

    def _taking(self, case: Case) -> list[Provider]:
        return [provider for provider in self._providers if case.batch_size == 1 or not provider.single]

    def _padded(self, prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Tokens [B, P] and mask [B, P], padded on the left."""
        pad = self.models.target.pad_token_id or 0
        input_ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad, padding_side="left")
        ones = [torch.ones_like(prompt) for prompt in prompts]
        attention_mask = pad_sequence(ones, batch_first=True, padding_side="left")
        return input_ids.to(self._device), attention_mask.to(self._device)

    def _observe(
        self, provider: Provider, batch: tuple[Tensor, Tensor], sampling: SamplingParams, seed: int, is_first: bool
    ) -> tuple[Answer, Run]:
        """Run once to count steps and the time in forwards; the first time, after a run that compiles and allocates."""
        rows = batch[0].shape[0]
        run = Run(rows * self.work.max_new_tokens)
        if is_first:
            on_cuda = self._device.type == "cuda"
            before = torch.cuda.memory_allocated(self._device) if on_cuda else 0
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
            first = provider.decode(*batch, sampling, seed)
            if on_cuda:
                run.peak_memory_bytes = torch.cuda.max_memory_allocated(self._device) - before
            if first.stats is not None:
                run.compile_seconds = first.stats.compile_seconds
        # A forward with hooks would be compiled again.
        watched = () if provider.compiled else provider.modules
        with _forwards_watched(watched, self._device) as (calls, in_forwards):
            seconds, answer = self._timed(provider, batch, sampling, seed)
        if answer.stats is not None:
            run.compile_seconds += answer.stats.compile_seconds
            run.num_steps, run.num_row_steps = answer.stats.num_steps, answer.stats.num_row_steps
            run.proposed_at, run.accepted_at = answer.stats.proposed_at, answer.stats.accepted_at
        elif not provider.drafts_with_target:
            run.num_steps = calls[provider.modules[0]]
            run.num_row_steps = rows * run.num_steps
        if not provider.compiled and run.num_steps is not None:
            run.outside_seconds = seconds - sum(in_forwards)
        counts = [len(tokens) for tokens in answer.tokens]
        if set(counts) != {self.work.max_new_tokens}:
            raise RuntimeError(f"{provider.name}: expected {self.work.max_new_tokens} tokens per row, got {counts}")
        return answer, run

    def _timed(
        self, provider: Provider, batch: tuple[Tensor, Tensor], sampling: SamplingParams, seed: int
    ) -> tuple[float, Answer]:
        _synchronize(self._device)
        started = time.perf_counter()
        answer = provider.decode(*batch, sampling, seed)
        _synchronize(self._device)
        return time.perf_counter() - started, answer

    def _compare(self, prompts: Sequence[Tensor], runs: Sequence[Run], answers: Sequence[Answer]) -> None:
        """Where two providers differ in a row, plain greedy decoding is compared with every output of that row."""
        single = self.models.target.model.dtype in (torch.float32, torch.float64)
        checks: dict[tuple[int, tuple[int, ...]], GreedyCheck] = {}
        for row, prompt in enumerate(prompts):
            outputs = {tuple(answer.tokens[row]) for answer in answers}
            if len(outputs) > 1:
                for tokens in outputs:
                    checks[row, tokens] = check_greedy(self.models.target, prompt.unsqueeze(0), tokens, row)
        for run, answer in zip(runs, answers, strict=True):
            keys = [(row, tuple(tokens)) for row, tokens in enumerate(answer.tokens)]
            run.differences = [each for key in keys if key in checks for each in checks[key].differences]
            run.greedy = _verdict(run.differences, single)


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
    """Counts the forwards of each model, and times each of them, while active."""
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
