"""Time the launches of `verify_exact` for every tile size and number of warps: what the table in `launch.py` rests on.

    python benchmarks/bench_tiles.py [--batch 1 64] [--vocab 128256] [--tile 1024 4096 16384] [--warps 4 8] [--out FILE]

CUDA only. The first variant is checked against the float64 reference, the others against it; then all take turns. A
number is the median over the replays of a CUDA graph on cold inputs: of many calls ("graph") and of one ("replay").
"table" is what the launcher chooses by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
from bench_verify import problems_of, sizes_of
from markdown_table import table
from problems import Inputs, Problem, Result, check_answer, copies, determined, make_inputs, op_arguments
from rich.progress import Progress
from timing import Report, copy_rate, environment, spread, take_turns, timers

TABLE = "table"
# A thread holds the 8 entries of a wide load at least, and has no registers for more than 128.
MIN_ENTRIES, MAX_ENTRIES = 8, 128


def launcher(tile: int | None) -> Callable[[Inputs], Result]:
    from torch_specops.arguments import VerifyArguments
    from torch_specops.kernels.verify import verify_exact

    return lambda inputs: verify_exact(VerifyArguments(**op_arguments("sampled", inputs)), tile=tile)


def with_warps(warps: int | None) -> AbstractContextManager[object]:
    """Launches inside take so many warps, whatever the table says."""
    if warps is None:
        return nullcontext()
    from torch_specops.kernels import launch

    def chosen(tile: int) -> int:
        return warps

    return mock.patch.multiple(launch, num_warps=chosen, stats_warps=chosen)


def variants(tiles: list[int], warps: list[int]) -> dict[str, tuple[int | None, int | None]]:
    found: dict[str, tuple[int | None, int | None]] = {TABLE: (None, None)}
    for tile in tiles:
        for number in warps:
            if MIN_ENTRIES <= tile // (32 * number) <= MAX_ENTRIES:
                found[f"{tile}, {number} warps"] = (tile, number)
    return found


def check_same(name: str, problem: Problem, answer: Result, expected: Result) -> None:
    wrong = (answer[0] != expected[0]).any(-1) | (answer[1] != expected[1])
    if wrong.any():
        raise RuntimeError(f"{problem}: {name} is wrong in rows {wrong.nonzero().flatten().tolist()}")


def run_problem(
    problem: Problem, chosen: dict[str, tuple[int | None, int | None]], device: torch.device, rounds: int, roof: float
) -> list[dict[str, Any]]:
    first = make_inputs(problem, device, seed=0)
    sets = copies(first, device)
    certain = (determined(first), determined(first, residual=True))
    right: list[Result] = []
    runs = {}
    for name, (tile, warps) in chosen.items():
        verify = launcher(tile)
        with with_warps(warps):
            answers = [verify(case) for case in certain]
            if not right:
                # The reference takes its time: once is enough where nothing is left to chance.
                for case, answer in zip(certain, answers, strict=True):
                    check_answer(name, problem, case, answer)
                check_answer(name, problem, first, verify(first))
                right = answers
            for answer, expected in zip(answers, right, strict=True):
                check_same(name, problem, answer, expected)
            # Warps are chosen when a graph is captured, not when it is replayed.
            modes = timers([partial(verify, inputs) for inputs in sets], device)
        runs |= {(name, mode): run for mode, run in modes.items() if mode != "call" or len(modes) == 1}
    seconds = take_turns(runs, rounds)
    return [
        asdict(problem)
        | {
            "variant": name,
            "mode": mode,
            **spread(own, "us"),
            "percent_of_copy": 100 * problem.bytes() / statistics.median(own) / roof,
        }
        for (name, mode), own in seconds.items()
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = sizes_of(__doc__, ["bfloat16", "float32"], [None])
    parser.set_defaults(batch=[1, 8, 64, 256], vocab=[128256])
    parser.add_argument("--tile", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--warps", type=int, nargs="+", default=[2, 4, 8, 16])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    device = torch.device("cuda")
    chosen = variants(options.tile, options.warps)
    problems = problems_of(parser, options, ["sampled"])
    with Progress(transient=True) as progress, torch.inference_mode():
        roof = copy_rate(device)
        report = Report(options.out, environment(device, copy_gb_per_s=roof * 1e-9, rounds=options.rounds))
        for problem in progress.track(problems):
            report.add(run_problem(problem, chosen, device, options.rounds, roof))

    line = "{vocab} | {batch} | {num_draft_tokens} | {dtype} | {variant} | {mode} | {median_us:.2f}"
    line += " | {quartiles_us[0]:.2f}-{quartiles_us[1]:.2f} | {percent_of_copy:.0f}"
    header = "V | B | K | dtype | variant | mode | us | quartiles | % of copy"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
