"""Wagner et al. 2024, figures 4 and 5 and table 3: the parts that can be measured on a CPU.

    python benchmarks/papers/wagner_memory.py [--only PREFIX]

Figures 4 and 5 are the peak of a GPU's memory over a whole decode. Here: the most bytes that one call of the sampling
function holds at a time beside its inputs, from the allocations that torch's profiler reports. That is the part of the
peak in which the methods can differ.

Table 3 is bytes moved per second of kernel time, from a GPU's counters. Here: the bytes that a method has to read at
least (every row once: K + 1 of the target and K of the draft; "sigmoid" one row of each, and two logits per draft) over
the median time of a call, beside the rate of `copy_` on as many bytes, in turns.

The vocabularies are those of the paper's models; logits are random, float32 (transformers' scores), on one sequence.
A cell is measured once (`evidence.py`); needs torch_specops[hf,evidence].
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from assisted import assisted_generation
from evidence import Cell, figure, reproduce
from timing import peak_bytes
from transformers.generation import utils as generation
from wagner_methods import GAMMAS, METHODS, SIGMOID, calls, random_call, warm_up

VOCABULARIES = {"Llama 2": 32000, "Whisper": 51865, "Qwen": 151936, "Gemma": 256000}
BANDWIDTH_GAMMA = 5
ITEM = 4
# A call that rejects takes another path than one that accepts everything. The largest peak counts.
SEEDS = range(4)


@torch.no_grad()
def memory(vocab_size: int, numbers: Sequence[int], device: str) -> dict[str, dict[str, int]]:
    """Peak bytes by method and number of drafts."""
    found: dict[str, dict[str, int]] = {}
    for name, chosen in METHODS.items():
        warm_up(chosen, vocab_size, device)
        found[name] = {}
        for number in numbers:
            ids, draft, target = random_call(number, vocab_size, torch.Generator().manual_seed(number), device)
            peaks = []
            for seed in SEEDS:
                torch.manual_seed(seed)
                with assisted_generation(**chosen):
                    arguments = (ids, draft, number, target, False)
                    generation._speculative_sampling(*arguments)
                    torch.manual_seed(seed)
                    call = partial(generation._speculative_sampling, *arguments)
                    peaks.append(peak_bytes(call, device))
            found[name][str(number)] = max(peaks)
    return found


def bandwidth(vocab_size: int, number: int, turns: int, rounds: int, device: str) -> dict[str, Any]:
    """By method: median ms of a call, the bytes it has to read, and GB/s; and those of `copy_`."""
    source = torch.randn(2 * number + 1, vocab_size, device=device)
    copy = torch.empty_like(source)
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    copied = []
    for _ in range(turns):
        for name, own in calls(METHODS, vocab_size, [number], rounds, device).items():
            if name in times:
                times[name].append(own[str(number)])
        for _ in range(rounds):
            started = time.perf_counter()
            copy.copy_(source)
            copied.append(time.perf_counter() - started)
    # Every row once; for "sigmoid" one of each side. A copy reads and writes.
    rows = {name: 2 if name == SIGMOID else 2 * number + 1 for name in METHODS} | {"copy_": 2 * (2 * number + 1)}
    found = {}
    for name, own in (times | {"copy_": [1e3 * seconds for seconds in copied]}).items():
        size, ms = rows[name] * vocab_size * ITEM, statistics.median(own)
        found[name] = {"ms": ms, "bytes": size, "gb_per_s": size / ms / 1e6}
    return found


def cells_of(chosen: Any) -> list[Cell]:
    if torch.device(chosen.device).type != "cpu":
        raise ValueError(f"--device: this script counts allocations of a CPU, got {chosen.device}")
    sizes = {name: {"vocab_size": size, "device": chosen.device} for name, size in VOCABULARIES.items()}
    more = {"number": BANDWIDTH_GAMMA, "turns": 4, "rounds": 5}
    cells = [Cell(f"figures 4, 5/{name}", memory, size | {"numbers": GAMMAS}) for name, size in sizes.items()]
    return cells + [Cell(f"table 3/{name}", bandwidth, size | more) for name, size in sizes.items()]


def draw(found: Mapping[str, Any]) -> None:
    with figure("wagner_memory", len(VOCABULARIES), (11, 3)) as axes:
        for (name, vocab_size), axis in zip(VOCABULARIES.items(), axes, strict=True):
            for method in METHODS:
                own = found[f"figures 4, 5/{name}"][method]
                axis.plot(GAMMAS, [own[str(number)] / 1e6 for number in GAMMAS], "o-", markersize=3, label=method)
            axis.set(title=f"{name}, V = {vocab_size}", xlabel="drafts per step", ylim=(0, None))
        axes[0].set_ylabel("peak of a call beside its inputs, MB")
        axes[0].legend(frameon=False, fontsize=8)


main = partial(reproduce, "wagner_memory", __doc__, cells_of, draw=draw)

if __name__ == "__main__":
    main()
