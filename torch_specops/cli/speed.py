"""Measures whether decoding is faster with a draft. Runs with the draft and without it take turns. Short trials choose
the number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..decode import SpeculativeDecoder
from ..drafts import LanguageModel
from .greedy import GreedyDifference, greedy_differences

if TYPE_CHECKING:
    from ..hf import TransformersModel

# The number of timed runs with the draft, which is also the number of timed runs without it.
ROUNDS = 3
# Each trial of a number of threads lasts at least this long.
TRIAL_SECONDS = 0.1
# Each pair of runs gives a speed ratio. If some ratios are above 1 and some below, and the largest is this many times
# the smallest, the machine is too busy to compare speeds.
AGREEMENT = 1.25

Key = TypeVar("Key")


def take_turns(runs: Mapping[Key, Callable[[int], float]], rounds: int, warm_up: int = 3) -> dict[Key, list[float]]:
    """Time every run in every round. Returns the seconds of each run. Runs are called in turn, so that a change in the
    machine's load affects all of them. Every second round has the reverse order, because the first call of a round
    finds the CPU's caches in another state.

    Args:
        runs: called with the number of the round, which is negative in a warm-up.
        warm_up: the number of rounds before the rounds that count, but at most a quarter of `rounds`.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for i in range(-min(warm_up, rounds // 4), rounds):
        for key, run in list(runs.items())[:: -1 if i % 2 else 1]:
            elapsed = run(i)
            if i >= 0:
                seconds[key].append(elapsed)
    return seconds


@torch.inference_mode()
def use_fast_threads(target: LanguageModel, num_draft_tokens: int) -> None:
    """Keep torch's number of CPU threads if it is clearly faster than 1 thread in short trials, otherwise set it to 1.

    Threads wait for each other after every operation. If another program runs on one of their cores, several threads
    may take ten times as long as one.
    """
    present, width = torch.get_num_threads(), num_draft_tokens + 2
    if present == 1:
        return
    tokens = torch.zeros(1, width, dtype=torch.int64, device=target.device)
    positions = torch.arange(width, device=target.device).unsqueeze(0)

    def trial(num_threads: int, index: int) -> float:
        torch.set_num_threads(num_threads)
        started, reads = time.perf_counter(), 0
        while (seconds := time.perf_counter() - started) < TRIAL_SECONDS:
            # Read as many tokens as a step with drafts, then one token, like a step without drafts.
            target.start(1, width)
            target.forward(tokens[:, :-1], positions[:, :-1])
            target.forward(tokens[:, -1:], positions[:, -1:])
            reads += 1
        return seconds / reads

    # Do not time the first forward, because it may load the weights from the disk.
    trial(1, -1)
    runs = {count: partial(trial, count) for count in (1, present)}
    seconds = take_turns(runs, 1)
    if seconds[present][0] < 2 * seconds[1][0]:
        seconds = take_turns(runs, ROUNDS)
    torch.set_num_threads(present if 1.1 * median(seconds[present]) < median(seconds[1]) else 1)


@dataclass(frozen=True)
class Speeds:
    """Seconds per token with the draft and without it. The i-th run with the draft and the i-th run without it ran one
    after the other."""

    with_draft: Sequence[float]
    without_draft: Sequence[float]

    @property
    def _ratios(self) -> list[float]:
        return [plain / drafted for drafted, plain in zip(self.with_draft, self.without_draft, strict=True)]

    @property
    def is_slower(self) -> bool:
        """Whether the draft made every run slower."""
        return max(self._ratios) < 1

    def verdict(self) -> str:
        """A sentence about the speed. Decoding with the draft is called faster or slower only if all pairs of runs
        agree."""
        least, most = min(self._ratios), max(self._ratios)
        fastest = f"{min(self.without_draft) / min(self.with_draft):.2f} times as fast"
        shown = f"{least:.2f} to {most:.2f} in {len(self._ratios)} pairs of runs"
        if least > 1:
            return f"{fastest} with the draft ({shown})"
        if self.is_slower:
            return f"slower with the draft, {fastest} ({shown})"
        if most < AGREEMENT * least:
            return f"about as fast with the draft as without it ({shown})"
        return f"this machine is too busy to tell whether the draft helps ({shown})"


def compare_speeds(
    target: TransformersModel, decoder: SpeculativeDecoder, input_ids: Tensor, tokens: Sequence[int]
) -> tuple[Speeds | None, list[GreedyDifference]]:
    """Decode the decoder's greedy output again, with the draft and without it in turns. A turn without the draft runs
    the next part of `greedy_differences`. The prefill is not timed.

    Args:
        decoder: it must have run before, so that the costs of a first call are not timed.
        tokens: the output of the decoder. If it is so short that one step may emit it, the speeds are None.
    """
    # Import here, because `hf` imports transformers, for which `--help` must not wait.
    from ..hf import language_model

    # Use an adapter with a separate cache, so that runs of the decoder do not change it.
    checked = greedy_differences(language_model(target.model), input_ids, tokens)
    differences = list(islice(checked, 1))
    part = (len(tokens) - 1) // ROUNDS

    def with_draft(index: int) -> float:
        steps = decoder.stream(input_ids, max_new_tokens=len(tokens))
        next(steps)
        started = time.perf_counter()
        num_tokens = sum(len(step.tokens[0]) for step in steps)
        return (time.perf_counter() - started - decoder.stats.compile_seconds) / num_tokens

    def without_draft(index: int) -> float:
        started = time.perf_counter()
        differences.extend(islice(checked, part))
        return (time.perf_counter() - started) / part

    speeds = None
    if part > 0 and len(tokens) > 1 + max(decoder.schedule.buckets):
        speeds = Speeds(*take_turns({"with": with_draft, "without": without_draft}, ROUNDS).values())
    differences.extend(checked)
    return speeds, [difference for difference in differences if difference is not None]
