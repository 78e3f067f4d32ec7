"""The methods of `wagner_text.py`, and the same texts decoded by each in turn.

All of them run transformers' own assisted generation; `assisted.py` replaces its sampling function and measures the
time inside it, the metric of Wagner et al. 2024, section 4.1. "transformers" is its own function, measured in the same
way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from assisted import AssistedStats, assisted_generation, call_sampler
from torch import Tensor
from torch._dynamo.utils import counters

BASELINE, EXACT, UNIFORM, SIGMOID = "transformers", "exact", "exact, one uniform number", "sigmoid"


def sigmoid(scale: float) -> dict[str, Any]:
    return {"method": "sigmoid", "alpha": -scale, "beta": scale, "compile": True}


# The paper's scales are 1e3 for speech and 1e4 for text.
METHODS: dict[str, dict[str, Any]] = {
    BASELINE: {"method": "transformers"},
    EXACT: {"method": "exact", "compile": True},
    UNIFORM: {"method": "exact", "next_token": "uniform", "compile": True},
    SIGMOID: sigmoid(1e3),
}
METHODS_FOR_TEXT = METHODS | {SIGMOID: sigmoid(1e4)}
SCALES = {BASELINE: METHODS[BASELINE]} | {f"sigmoid {scale:g}": sigmoid(scale) for scale in (1e1, 1e3, 1e4, 1e5)}
GAMMAS = (1, 3, 5, 10, 15, 20)

Decode = Callable[[int, int], list[int]]


def without_compile(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: options[key] for key in options if key != "compile"} for name, options in methods.items()}


def measure(
    methods: Mapping[str, Mapping[str, Any]],
    decode: Decode,
    num_texts: int,
    seeds: Sequence[int],
    vocab_size: int,
    device: str,
) -> dict[str, dict[str, Any]]:
    """Decode every text with every seed by every method, the methods in turns.

    Args:
        methods: by name, the arguments of `assisted_generation`.
        decode: called as `decode(text, seed)`; returns the new tokens.
        vocab_size, device: of the rows that the ops are compiled for before anything is measured.

    Returns:
        By method: "seconds" inside the sampling function, "steps", "step_ms", "step_ms_deviation", "step_ms_median",
        "wall_seconds" of the calls of `decode`, "accepted", "drafted", "new_tokens", "identical" (texts with the tokens
        of the first method) and "outputs", in the order text by text, seed by seed.
    """
    runs: dict[str, list[tuple[list[int], AssistedStats, float]]] = {name: [] for name in methods}
    for options in methods.values():
        warm_up(options, vocab_size, device)
    decode(0, seeds[0])
    order = list(methods)
    for text in range(num_texts):
        for seed in seeds:
            for name in order:
                runs[name].append(without_compiling(methods[name], decode, text, seed))
            order = order[1:] + order[:1]
    found: dict[str, dict[str, Any]] = {}
    for name, own in runs.items():
        outputs, stats, wall = (list(part) for part in zip(*own, strict=True))
        seconds = [each for call in stats for each in call.step_seconds]
        first = next(iter(found.values()))["outputs"] if found else outputs
        found[name] = {
            "seconds": sum(seconds),
            "steps": sum(each.calls for each in stats),
            "step_ms": statistics.fmean(seconds) * 1e3,
            "step_ms_deviation": statistics.pstdev(seconds) * 1e3,
            "step_ms_median": statistics.median(seconds) * 1e3,
            "wall_seconds": sum(wall),
            "accepted": sum(each.num_accepted for each in stats),
            "drafted": sum(each.num_draft_tokens for each in stats),
            "new_tokens": sum(map(len, outputs)),
            "identical": sum(a == b for a, b in zip(outputs, first, strict=True)),
            "outputs": outputs,
        }
    return found


def without_compiling(
    options: Mapping[str, Any], decode: Decode, text: int, seed: int
) -> tuple[list[int], AssistedStats, float]:
    """One text and its wall-clock time. It is decoded again if something was compiled in the meantime."""
    while True:
        compiled = counters["stats"]["unique_graphs"]
        with assisted_generation(**options) as stats:
            started = time.perf_counter()
            tokens = decode(text, seed)
            seconds = time.perf_counter() - started
        if counters["stats"]["unique_graphs"] == compiled:
            return tokens, stats, seconds


@torch.no_grad()
def warm_up(options: Mapping[str, Any], vocab_size: int, device: str) -> None:
    with assisted_generation(**options):
        for number in (5, 1, 2):
            target, draft = (torch.randn(1, rows, vocab_size, device=device) for rows in (number + 1, number))
            ids = torch.zeros(1, number + 4, dtype=torch.long, device=device)
            call_sampler(ids, draft, number, target)


@torch.no_grad()
def calls(
    methods: Mapping[str, Mapping[str, Any]], vocab_size: int, numbers: Sequence[int], rounds: int, device: str
) -> dict[str, dict[str, float]]:
    """Median ms of one call on random logits, by method and number of drafts, in turns and without a model; and of
    `torch.multinomial` alone, which the first two methods call."""
    generator = torch.Generator().manual_seed(0)
    # Token ids with the drafts at their end, and the logits of draft and target.
    inputs: dict[int, list[Tensor]] = {}
    for number in numbers:
        target = torch.randn(1, number + 1, vocab_size, generator=generator) * 3
        draft = target[:, :number] + torch.randn(1, number, vocab_size, generator=generator)
        ids = torch.cat([torch.zeros(1, 3, dtype=torch.long), draft.argmax(-1)], 1)
        inputs[number] = [each.to(device) for each in (ids, draft, target)]
    law = inputs[numbers[0]][2][:, 0].softmax(-1)
    times: dict[str, dict[str, list[float]]] = {name: {str(number): [] for number in numbers} for name in methods}
    alone = []
    for options in methods.values():
        warm_up(options, vocab_size, device)
    for _ in range(rounds):
        started = time.perf_counter()
        torch.multinomial(law, 1)
        alone.append(time.perf_counter() - started)
        for number, (ids, draft, target) in inputs.items():
            for name, options in methods.items():
                with assisted_generation(**options) as stats:
                    call_sampler(ids, draft, number, target)
                times[name][str(number)] += stats.step_seconds
    found = {
        name: {number: round(statistics.median(own) * 1e3, 4) for number, own in by_number.items()}
        for name, by_number in times.items()
    }
    return found | {"torch.multinomial": {"1": round(statistics.median(alone) * 1e3, 4)}}
