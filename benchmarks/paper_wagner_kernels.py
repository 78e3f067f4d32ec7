"""Wagner et al. 2024 by the paper's own metric: GPU time inside the sampling function, from torch's profiler.

    python benchmarks/paper_wagner_kernels.py [--device cuda] [--models Qwen Gemma] [--gammas 1 5 20] [--out FILE.json]

Figure 3: the time of what a step's call of the sampling function runs on the device, added up (section 4.1), for 1 to
20 drafts, on one sequence with the vocabularies of the paper's models; logits are random, float32, as transformers
hands them over. Time in which the device waits for the host is not in that number, so the time between two events
around the call stands beside it. On a CPU: time inside torch's own functions, and by the clock.

Table 3: bytes per second of that time. The bytes are those that a method has to read at least
(`papers/wagner_memory.py`), not sectors counted by hardware, as the paper's are; beside it the rate of a copy in the
same run.

Figures 4, 5: the peak of what a call holds on the device beside its inputs. (The paper has a whole decode's; this is
the part in which the methods can differ.)

Methods: transformers' function, and the ops in its place (`papers/assisted.py`), eager. With --compiled the ops run
under torch.compile, which a CPU needs to be fast. The authors' kernels, where they are found (`peers/README.md`). A
cell is measured once (`papers/evidence.py`): a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from peers.paper import PaperExact, PaperSigmoid
from timing import call_seconds, copy_rate, device_work
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent / "papers"))
from assisted import assisted_generation
from evidence import Cell, reproduce
from transformers.generation import utils as generation
from wagner_memory import ITEM, VOCABULARIES, memory, rows_read
from wagner_methods import EAGER, GAMMAS, METHODS, SIGMOID, random_call, warm_up

# Calls that a number is the mean of: they accept other numbers of drafts.
CALLS = 10


def sampling_time(
    vocab_size: int, numbers: Sequence[int], calls: int, device: str, compiled: bool, paper: bool
) -> dict[str, dict[str, dict[str, Any]]]:
    """By method and number of drafts, of one call: "device_ms", "launches", "call_ms", "accepted" (all of them means),
    "bytes" that it has to read, and "gb_per_s" of the time on the device."""
    methods: dict[str, tuple[Any, Callable[[], Any]]] = {}
    for name, chosen in (METHODS if compiled else EAGER).items():
        warm_up(chosen, vocab_size, device)
        methods[name] = (lambda chosen=chosen: assisted_generation(**chosen), lambda: generation._speculative_sampling)
    if paper:
        for peer in (PaperExact(), PaperSigmoid()):
            if reason := peer.unavailable(torch.device(device)):
                raise RuntimeError(f"{peer.name}: {reason}")
            methods[peer.name] = (nullcontext, lambda peer=peer: peer.sampling_function)
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in methods}
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        # The first call is not counted.
        inputs = [random_call(number, vocab_size, generator, device) for _ in range(calls + 1)]
        for name, (context, function) in methods.items():
            # One of the functions overwrites what it is given.
            own = [(ids, draft, target.clone()) for ids, draft, target in inputs]
            one = _mean_call(context, function, own, number, torch.device(device))
            size = rows_read(SIGMOID if name.endswith(SIGMOID) else name, number) * vocab_size * ITEM
            found[name][str(number)] = one | {"bytes": size, "gb_per_s": size / one["device_ms"] / 1e6}
    return found


@torch.no_grad()
def _mean_call(
    context: Callable[[], Any],
    function: Callable[[], Callable[..., Any]],
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]],
    number: int,
    place: torch.device,
) -> dict[str, Any]:
    calls = len(inputs) - 1
    accepted: list[int] = []

    def call(sampling: Callable[..., Any], one: tuple[Tensor, Tensor, Tensor]) -> None:
        ids, draft, target = one
        accepted.append(int(sampling(ids, draft, number, target, False)[1]))

    with context():
        sampling = function()
        torch.manual_seed(0)
        call(sampling, inputs[0])
        accepted.clear()
        launches, seconds = device_work(lambda: [call(sampling, one) for one in inputs[1:]], place, warm_up=False)
        profiled = list(accepted)
        # Again without the profiler, which delays what it watches.
        by_clock = [call_seconds(lambda one=one: call(sampling, one), place) for one in inputs[1:]]
    return {
        "device_ms": seconds * 1e3 / calls,
        "launches": None if launches is None else launches / calls,
        "call_ms": statistics.median(by_clock) * 1e3,
        "accepted": statistics.fmean(profiled),
    }


def peak_memory(vocab_size: int, numbers: Sequence[int], device: str, compiled: bool) -> dict[str, dict[str, int]]:
    return memory(vocab_size, numbers, device, METHODS if compiled else EAGER)


def rate_of_copy(device: str) -> float:
    return copy_rate(torch.device(device)) * 1e-9


def cells_of(chosen: argparse.Namespace) -> list[Cell]:
    reason = PaperExact().unavailable(torch.device(chosen.device))
    if reason:
        print(f"not here: {PaperExact.name}: {reason}")
    common = {"device": chosen.device, "compiled": chosen.compiled}
    cells = [Cell("copy, GB/s", rate_of_copy, {"device": chosen.device})]
    for name in chosen.models:
        settings = common | {"vocab_size": chosen.vocab or VOCABULARIES[name]}
        timed = {"numbers": chosen.gammas, "calls": chosen.calls, "paper": reason is None}
        cells.append(Cell(f"figure 3/{name}", sampling_time, settings | timed))
        peaks = {"numbers": [number for number in GAMMAS if number in chosen.gammas]}
        cells.append(Cell(f"figures 4, 5/{name}", peak_memory, settings | peaks))
    return cells


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--gammas", type=int, nargs="+", default=list(range(1, 21)), help="drafts per step")
    parser.add_argument("--vocab", type=int, help="a vocabulary for all models, to try the script")
    parser.add_argument("--calls", type=int, default=CALLS, help="calls that a number is the mean of")
    parser.add_argument("--compiled", action="store_true", help="the ops under torch.compile")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    found = reproduce("wagner_kernels", __doc__, cells_of, arguments=arguments, add=add_options)
    rows = [
        one | {"model": key.removeprefix("figure 3/"), "method": method, "drafts": number}
        for key, methods in found.items()
        if key.startswith("figure 3/")
        for method, own in methods.items()
        for number, one in own.items()
    ]
    line = "{model} | {method} | {drafts} | {device_ms:.4f} | {gb_per_s:.2f} | {launches:.1f} | {call_ms:.4f}"
    header = "model | method | drafts | device ms | GB/s | launches | call ms | accepted"
    print(table(header, line + " | {accepted:.1f}", rows, padded=True))
    return found


if __name__ == "__main__":
    main()
