"""Runs the providers (ways to decode) in turns: warms them up, compares their outputs and times them.

Before anything is timed, greedy outputs are compared token for token. Where they differ, plain greedy decoding shows
how far apart the logits are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..sampling import SamplingParams
from .greedy import GreedyDifference, check_greedy, verdict
from .providers import Answer, Provider

if TYPE_CHECKING:
    from ..hf import TransformersModel

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Prompts of one category, in batches of one size, at one temperature."""

    batches: Sequence[Sequence[Tensor]]  # each has batch_size prompts [P] int64
    sampling: SamplingParams
    category: str = ""

    @property
    def batch_size(self) -> int:
        return len(self.batches[0])

    @property
    def temperature(self) -> float:
        return float(self.sampling.temperature)  # type: ignore[arg-type]

    @property
    def cost(self) -> float:
        """An estimate of the time of a batch, relative to a batch of one prompt: a batch of 8 takes 4 times as long."""
        return self.batch_size ** (2 / 3)

    def takers(self, providers: Sequence[Provider]) -> list[Provider]:
        return [provider for provider in providers if self.batch_size == 1 or not provider.single]


@dataclass
class Run:
    """The runs of one provider on one batch of a case."""

    provider: Provider
    case: Case
    # The number of new tokens of all rows together.
    new_tokens: int
    # Seconds of each round, including reading the prompts, without compiling.
    seconds: list[float] = field(default_factory=list)
    # The number of forwards of the target after the prefill; for transformers, the prefill counts too.
    num_steps: int | None = None
    # `num_steps` summed over rows; a row counts only the steps in which it took part.
    num_row_steps: int | None = None
    # The number of drafts at each position of a step; empty = no drafts, or transformers, which does not report it.
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    # Seconds outside the models' forwards; None for compiled steps, whose forwards cannot be timed.
    outside_seconds: float | None = None
    compile_seconds: float = 0.0
    # On CUDA: the peak memory of the untimed runs, without tensors that existed before, such as the models.
    peak_memory_bytes: int | None = None
    # "identical", "near ties", "rounding" or "different", as `results.MARKS` explains; None = sampled.
    greedy: str | None = None
    differences: list[GreedyDifference] = field(default_factory=list)
    # The new tokens of each row in the run of `Comparison._observe`.
    tokens: list[list[int]] = field(default_factory=list)


@dataclass
class Comparison:
    """Runs the providers in turns on each batch: first an observed run of each provider, then the timed runs."""

    target: TransformersModel
    providers: Sequence[Provider]
    cases: Sequence[Case]
    max_new_tokens: int
    rounds: int
    seed: int = 0
    # The results so far. After an interrupt they include only batches on which all providers were timed.
    runs: list[Run] = field(default_factory=list)
    warm: set[str] = field(default_factory=set)

    def cost(self) -> float:
        total = 0.0
        for case in self.cases:
            num_runs = len(case.takers(self.providers)) * (1 + self.rounds) + (case.temperature == 0)
            total += case.cost * len(case.batches) * num_runs
        return total

    @torch.inference_mode()
    def run(self) -> Iterator[tuple[Case, str]]:
        """Run the comparison. Yields the case and a label before each run."""
        seed = self.seed
        for case in self.cases:
            place = ", ".join(filter(None, [f"T = {case.temperature:g}, batch {case.batch_size}", case.category]))
            for prompts in case.batches:
                batch = padded(prompts, self.target)
                runs: list[Run] = []
                for provider in case.takers(self.providers):
                    yield case, f"{place}, warming up: {provider.name}"
                    runs.append(Run(provider, case, case.batch_size * self.max_new_tokens))
                    # Use the seed of the first timed round, so that step counts and times belong to the same outputs.
                    self._observe(runs[-1], batch, seed)
                if case.temperature == 0:
                    yield case, f"{place}, comparing greedy outputs"
                    self._compare(prompts, runs)
                for index in range(self.rounds):
                    # Rotate the order, because the first provider finds the CPU's caches in another state than the
                    # rest.
                    first = (seed - self.seed) % len(runs)
                    for run in runs[first:] + runs[:first]:
                        yield case, f"{place}, round {index + 1} of {self.rounds}: {run.provider.name}"
                        seconds, _ = self._timed(run, batch, seed)
                        run.seconds.append(seconds)
                    seed += 1
                    if index == 0:
                        self.runs += runs

    def _observe(self, run: Run, batch: Batch, seed: int) -> None:
        """Run a provider once to count its steps and to time its forwards. A provider that has not run yet is warmed up
        first."""
        provider, device = run.provider, self.target.device
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        if before is not None:
            torch.cuda.reset_peak_memory_stats(device)
        if provider.name not in self.warm:
            self._timed(run, batch, seed)
            self.warm.add(provider.name)
        # Set no hooks on compiled providers, because torch would compile their forwards again.
        watched = () if provider.compiled else provider.modules
        with _forwards_timed(watched, device) as forwards:
            seconds, answer = self._timed(run, batch, seed)
        if before is not None:
            run.peak_memory_bytes = torch.cuda.max_memory_allocated(device) - before
        if answer.stats is not None:
            run.num_steps, run.num_row_steps = answer.stats.num_steps, answer.stats.num_row_steps
            run.proposed_at, run.accepted_at = answer.stats.proposed_at, answer.stats.accepted_at
        elif not provider.drafts_with_target:
            run.num_steps = len(forwards[provider.modules[0]])
            run.num_row_steps = run.case.batch_size * run.num_steps
        if not provider.compiled and run.num_steps is not None:
            run.outside_seconds = seconds - sum(map(sum, forwards.values()))
        run.tokens = answer.tokens
        counts = [len(tokens) for tokens in run.tokens]
        if set(counts) != {self.max_new_tokens}:
            raise RuntimeError(f"{provider.name}: expected {self.max_new_tokens} tokens per row, got {counts}")

    def _timed(self, run: Run, batch: Batch, seed: int) -> tuple[float, Answer]:
        """Time a run. Returns the seconds without compiling, and the answer. The time of compiling is added to
        `run`."""
        _synchronize(self.target.device)
        started = time.perf_counter()
        answer = run.provider.decode(*batch, self.max_new_tokens, run.case.sampling, seed)
        _synchronize(self.target.device)
        seconds = time.perf_counter() - started
        compiling = 0.0 if answer.stats is None else answer.stats.compile_seconds
        run.compile_seconds += compiling
        return seconds - compiling, answer

    def _compare(self, prompts: Sequence[Tensor], runs: Sequence[Run]) -> None:
        """If providers give different outputs for a row, compare each of its outputs with plain greedy decoding."""
        is_16_bit = self.target.model.dtype in (torch.bfloat16, torch.float16)
        for row, prompt in enumerate(prompts):
            outputs = {tuple(run.tokens[row]) for run in runs}
            if len(outputs) > 1:
                checks = {tokens: check_greedy(self.target, prompt.unsqueeze(0), tokens, row) for tokens in outputs}
                for run in runs:
                    run.differences += checks[tuple(run.tokens[row])]
        for run in runs:
            run.greedy = verdict(run.differences, is_16_bit)


def padded(prompts: Sequence[Tensor], target: TransformersModel) -> Batch:
    """Pad prompts on the left. Returns tokens [B, P] and mask [B, P]."""
    pad = target.pad_token_id or 0
    input_ids = pad_sequence(list(prompts), batch_first=True, padding_value=pad, padding_side="left")
    ones = [torch.ones_like(prompt) for prompt in prompts]
    attention_mask = pad_sequence(ones, batch_first=True, padding_side="left")
    return input_ids.to(target.device), attention_mask.to(target.device)


@contextmanager
def _forwards_timed(models: Sequence[nn.Module], device: torch.device) -> Iterator[dict[nn.Module, list[float]]]:
    """Record the seconds of each forward of each model inside the `with` block."""
    seconds: dict[nn.Module, list[float]] = defaultdict(list)
    started = 0.0

    def before(model: nn.Module, inputs: object) -> None:
        nonlocal started
        _synchronize(device)
        started = time.perf_counter()

    def after(model: nn.Module, inputs: object, output: object) -> None:
        _synchronize(device)
        seconds[model].append(time.perf_counter() - started)

    hooks = [model.register_forward_pre_hook(before) for model in models]
    hooks += [model.register_forward_hook(after) for model in models]
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
