"""Time the kernels of `verify_exact` on CUDA for every tile size: what the constants of `ops/cuda/launch.py` rest on.

    python benchmarks/bench_tiles.py [--batch 1 8 64 256] [--tile 1024 2048 4096] [--acceptance 0.6 1.0] [--out F.json]

`tile_size` chooses the tile by FEW_PROGRAMS, and `tiles_per_program` by RESIDENT_PROGRAMS how many tiles a program of
the later kernels processes. Every pair of a tile and a number of --resident-programs is timed; a record also names the
numbers of --few-programs that choose its tile. Modes are those of `bench_verify.py`; a record of the mode "graph" has
the time of each kernel. The first pair is checked against the float64 reference, and the others against the first. Then
all take turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain, product
from typing import Any
from unittest import mock

import torch
from markdown_table import table
from problems import Inputs, Problem, Result, check_answer, copies, determined, make_inputs, op_arguments
from timing import Report, copy_rate, device_work, environment, options_of, settings_of, spread, take_turns, timers

Pair = tuple[int, int]


def verifier(tile: int) -> Callable[[Inputs], Result]:
    from torch_specops.ops.arguments import VerifyArguments
    from torch_specops.ops.cuda.exact import verify_exact

    return lambda inputs: verify_exact(VerifyArguments(**op_arguments("sampled", inputs)), tile=tile)


def chosen_by(problem: Problem, tile: int, few_programs: list[int]) -> list[int]:
    """The numbers with which `tile_size` chooses this tile."""
    from torch_specops.ops.cuda import launch

    rows = problem.batch * (2 * problem.num_draft_tokens + 1)
    found = []
    for number in few_programs:
        with mock.patch.object(launch, "FEW_PROGRAMS", number):
            found += [number] * (launch.tile_size(problem.vocab, rows) == tile)
    return found


def run_problem(
    problem: Problem, pairs: list[Pair], device: torch.device, roof: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    from torch_specops.ops.cuda import launch

    first = make_inputs(problem, device, seed=0)
    sets, cases = copies(first, device), [determined(first), determined(first, residual=True)]
    right: list[Result] = []
    runs: dict[tuple[Pair, str], Callable[[int], float]] = {}
    work = {}
    for pair in pairs:
        tile, resident = pair
        verify = verifier(tile)
        # The number counts when a launch is made or captured, and not when it is replayed.
        with mock.patch.object(launch, "RESIDENT_PROGRAMS", resident):
            answers = [verify(case) for case in cases]
            if not right:
                for case, answer in zip(cases, answers, strict=True):
                    check_answer("the first tile", problem, case, answer)
                right = answers
            if not all(map(torch.equal, chain(*answers), chain(*right))):
                raise RuntimeError(f"{problem}: tile {tile}, {resident} programs: not the result of the first tile")
            calls = [partial(verify, inputs) for inputs in sets]
            work[pair] = device_work(calls[0], device)
            modes = timers(calls, device)
        del modes["call"]
        runs |= {(pair, mode): run for mode, run in modes.items()}
    records = []
    for ((tile, resident), mode), seconds in take_turns(runs, options.rounds).items():
        record = {"tile": tile, "few_programs": chosen_by(problem, tile, options.few_programs)}
        record |= {"resident_programs": resident, "mode": mode, **spread(seconds, "us")}
        record |= {"needed_percent_of_copy": 100 * problem.needed_bytes() / statistics.median(seconds) / roof}
        records.append(asdict(problem) | record | (work[tile, resident] if mode == "graph" else {}))
    return records


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=20)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--num-draft-tokens", type=int, default=5, help="K, at least 1")
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--tile", type=int, nargs="+", default=[1024, 2048, 4096], help="powers of two")
    parser.add_argument("--few-programs", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--resident-programs", type=int, nargs="+", default=[512])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    pairs = list(product(options.tile, options.resident_programs))
    with torch.inference_mode():
        roof = copy_rate(device)
        described = environment(device, copy_gb_per_s=roof * 1e-9, rounds=options.rounds)
        report = Report(options.out, described, settings=settings_of(options))
        for vocab, dtype, batch, acceptance in product(options.vocab, options.dtype, options.batch, options.acceptance):
            problem = Problem("sampled", batch, options.num_draft_tokens, vocab, dtype, acceptance)
            report.add(run_problem(problem, pairs, device, roof, options))
    header = "V | B | K | dtype | accepted | tile | programs | mode | us | quartiles | needed % of copy | kernels, us"
    line = "{vocab} | {batch} | {num_draft_tokens} | {dtype} | {acceptance:g} | {tile} | {resident_programs} | {mode}"
    line += " | {median_us:.2f} | {quartiles_us[0]:.2f}-{quartiles_us[1]:.2f} | {needed_percent_of_copy:.0f} | {each}"
    rows = [
        record | {"each": ", ".join(f"{each['name']} {each['us']:.1f}" for each in record.get("kernels", ()))}
        for record in report.records
    ]
    print(table(header, line, rows, padded=True))
    return report.records


if __name__ == "__main__":
    main()
