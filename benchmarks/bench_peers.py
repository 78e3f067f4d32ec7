"""Time `verify_exact` beside other implementations of the verification step: one process, the same inputs.

    python benchmarks/bench_peers.py [--device cuda] [--batch 1 8 64 256] [--vocab 128256] [--out FILE.json]

`peers/` has an adapter for each; those that are not installed are skipped with the reason. Every answer is checked
before it is timed: on two kinds of inputs that leave nothing to chance, and for peers that take the uniform numbers
also on inputs where these decide. What a peer needs before its kernels (a softmax, a float32 copy) is inside its time,
and is named and counted.

Columns
    call         a Python call with its launches, between two events (on a CPU: by the clock)
    graph        replay of a CUDA graph of as many calls as there are inputs, over their number
    replay       one replay of a graph of one call, as a step of decoding has it
    GPU          sum of the times of one call's work on the device, from torch's profiler (on a CPU: time inside
                 torch's functions)
    launches     kernels, copies and fills of a call, from the profiler
    peak         the most bytes that a call allocates and holds at a time
    beside       bytes that are read and written by what the peer needs, each array once
    x            the GPU column over that of "specops"

Inputs are cold: rotated through twice the last cache. Temperature is 1, and there are no filters.

With --build nothing is timed: peers that compile CUDA sources when they are called compile them in parallel and are
checked on a small problem. The seconds are written.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from bench_verify import problems_of, sizes_of
from markdown_table import table
from peers import Peer, all_peers
from problems import Problem, copies, make_inputs
from rich.progress import Progress
from timing import (
    Report,
    copy_rate,
    device_work,
    environment,
    peak_bytes,
    process_of,
    spread,
    take_turns,
    timers,
)

# The others are compared with this one.
OURS = "specops"


def run_problem(
    problem: Problem, peers: Sequence[Peer], device: torch.device, rounds: int, roof: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A record per peer and mode; and why a peer has none, by its name."""
    torch._dynamo.reset()
    first = make_inputs(problem, device, seed=0)
    skipped = {peer.name: reason for peer in peers if (reason := peer.unavailable(device))}
    for peer in peers:
        if peer.name not in skipped:
            try:
                peer.check(problem, first)
            except Exception as error:
                if peer.name.startswith(OURS):
                    raise
                skipped[peer.name] = f"not timed: {type(error).__name__}: {error}"
    found = [peer for peer in peers if peer.name not in skipped]

    sets = copies(first, device)
    runs: dict[tuple[str, str], Callable[[int], float]] = {}
    work, peaks = {}, {}
    for peer in list(found):
        try:
            calls = [peer.prepare(inputs) for inputs in sets]
            work[peer.name] = device_work(calls[0], device)
            peaks[peer.name] = peak_bytes(calls[0], device)
            modes = timers(calls, device, graphs=peer.not_captured is None)
        except Exception as error:
            if peer.name.startswith(OURS):
                raise
            skipped[peer.name] = f"not timed: {type(error).__name__}: {error}"
            found.remove(peer)
            continue
        runs |= {(peer.name, mode): run for mode, run in modes.items()}
    seconds = take_turns(runs, rounds)

    records = []
    for peer in found:
        launches, device_seconds = work[peer.name]
        medians = {mode: statistics.median(seconds[peer.name, mode]) for name, mode in seconds if name == peer.name}
        graph, replay = medians.get("graph"), medians.get("replay")
        ours = work[OURS][1]
        needed = problem.needed_bytes(with_lse=peer.name.startswith("specops, lse"))
        records.append(
            asdict(problem)
            | {
                "acceptance_rate": problem.acceptance_rate,
                "peer": peer.name,
                "needs": peer.needs,
                "needs_bytes": peer.needs_bytes(problem),
                **spread(seconds[peer.name, "call"], "ms", "call"),
                "graph_ms": None if graph is None else graph * 1e3,
                "replay_ms": None if replay is None else replay * 1e3,
                "calls_per_graph": None if graph is None else len(sets),
                "not_captured": peer.not_captured if device.type == "cuda" else "no CUDA graph on a CPU",
                "device_ms": device_seconds * 1e3,
                "launches": launches,
                "peak_bytes": peaks[peer.name],
                "logits_bytes": problem.bytes(),
                "needed_percent_of_copy": 100 * needed / (graph or medians["call"]) / roof,
                "device_time_over_ours": device_seconds / ours if ours else None,
            }
        )
    return records, skipped


def show(described: dict[str, Any], records: Sequence[dict[str, Any]], skipped: dict[str, str]) -> None:
    print(", ".join(f"{name} {value}" for name, value in described.items() if value is not None))
    header = "V | B | K | dtype | accepted | peer | call ms | graph ms | replay ms | GPU ms | launches"
    header += " | peak MB | beside MB | x"
    line = "{vocab} | {batch} | {num_draft_tokens} | {dtype} | {acceptance_rate:.2f} | {peer} | {call_median_ms:.4f}"
    line += " | {graph_ms:.4f} | {replay_ms:.4f} | {device_ms:.4f} | {launches:d} | {peak:.3f} | {beside:.2f}"
    rows = [record | {"peak": record["peak_bytes"] / 1e6, "beside": record["needs_bytes"] / 1e6} for record in records]
    print(table(header, line + " | {device_time_over_ours:.4f}", rows, padded=True))
    for title, reasons in (
        ("not here", skipped),
        ("no graph", {record["peer"]: record["not_captured"] for record in records if record["not_captured"]}),
        ("needs, inside its time", {record["peer"]: record["needs"] for record in records if record["needs"]}),
    ):
        for name, reason in reasons.items():
            print(f"{title}: {name}: {reason}")


def build(peers: Iterable[Peer], device: torch.device, report: Report) -> None:
    """Check each peer in a process of its own, which compiles its sources."""

    def compiled(peer: Peer) -> dict[str, Any]:
        command = [*process_of(__file__), "--check", peer.name, "--device", str(device)]
        started = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines = done.stdout.splitlines()
        seconds = time.monotonic() - started
        return {"peer": peer.name, "seconds": seconds, "exit_code": done.returncode, "output": lines[-8:]}

    with ThreadPoolExecutor() as pool:
        for record in pool.map(compiled, [peer for peer in peers if peer.is_built]):
            report.add([record])
            print(record, flush=True)


def check(name: str, device: torch.device) -> None:
    (peer,) = (peer for peer in all_peers() if peer.name == name)
    if reason := peer.unavailable(device):
        print(f"not here: {reason}")
        return
    problem = Problem("sampled", 1, 2, 64, "float32", 0.6)
    with torch.inference_mode():
        peer.check(problem, make_inputs(problem, device, seed=0))
    print("right")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = sizes_of(__doc__, ["bfloat16"], [0.6])
    parser.add_argument("--only", nargs="+", metavar="PEER", help="peers whose name begins so, besides ours")
    parser.add_argument("--no-compiled", action="store_true", help="leave out what torch.compile makes")
    parser.add_argument("--build", action="store_true", help="compile what is compiled where it is used, time nothing")
    parser.add_argument("--check", metavar="PEER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    problems = problems_of(parser, options, ["sampled"])
    device = torch.device(options.device)
    if options.check is not None:
        check(options.check, device)
        return {}
    wanted = tuple(options.only or [""])
    peers = [peer for peer in all_peers() if peer.name == OURS or peer.name.startswith(wanted)]
    if options.no_compiled:
        peers = [peer for peer in peers if "compiled" not in peer.name]
    roof = copy_rate(device)
    described = environment(device, copy_gb_per_s=roof * 1e-9, rounds=options.rounds)
    skipped: dict[str, str] = {}
    report = Report(options.out, described, skipped=skipped)
    if options.build:
        build(peers, device, report)
        return report.written
    with Progress(transient=True) as progress, torch.inference_mode():
        task = progress.add_task("", total=len(problems))
        for problem in problems:
            progress.update(task, description=f"B={problem.batch} V={problem.vocab} {problem.dtype}")
            found, reasons = run_problem(problem, peers, device, options.rounds, roof)
            skipped |= reasons
            report.add(found)
            progress.advance(task)

    show(described, report.records, skipped)
    return report.written


if __name__ == "__main__":
    main()
