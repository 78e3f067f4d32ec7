"""Time `verify_exact` beside other implementations of the verification step: one process, the same inputs.

    python benchmarks/bench_peers.py [--device cuda] [--batch 1 8 64 256] [--vocab 128256] [--out FILE.json]

`peers/` has an adapter for each; those that are not there are skipped with the reason. Every answer is checked before
it is timed: on inputs that leave nothing to chance, two ways, and where a peer takes the uniforms, also where they
decide. What a peer needs before its kernels (a softmax, a float32 copy) is inside its time, and is named and counted.

Columns
    call         a Python call with its launches, between two events (on a CPU: by the clock)
    graph        replay of a CUDA graph of as many calls as there are inputs, over their number
    replay       one replay of a graph of one call, as a step of decoding has it
    GPU          time of the work on the device, added up, of one call, from torch's profiler (on a CPU: time inside
                 torch's functions)
    launches     kernels, copies and fills of a call, from the profiler
    peak         bytes that a call allocates and holds at a time
    beside       bytes that what it needs reads and writes, each array once
    x            the GPU column over that of "specops"

Inputs are cold: rotated through twice the last cache. Temperature is 1, and there are no filters.

With --build nothing is timed: peers that compile CUDA sources where they are used do so, side by side, and are checked
on a small problem; what it took is written.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peers import Peer, all_peers
from problems import Problem, make_inputs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from timing import (
    Report,
    copy_rate,
    device_work,
    environment,
    number_of_sets,
    peak_bytes,
    process_of,
    take_turns,
    timers,
    wide_console,
)

# What the others are compared with.
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

    count = number_of_sets(sum(value.nbytes for value in first.values()), device)
    sets = [first] + [{name: value.clone() for name, value in first.items()} for _ in range(count - 1)]
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
        needed = problem.needed_bytes(with_lse=peer.name == "specops, lse")
        records.append(
            asdict(problem)
            | {
                "acceptance_rate": problem.acceptance_rate,
                "peer": peer.name,
                "needs": peer.needs,
                "needs_bytes": peer.needs_bytes(problem),
                "call_ms": medians["call"] * 1e3,
                "call_quartiles_ms": [q * 1e3 for q in statistics.quantiles(seconds[peer.name, "call"], n=4)[::2]],
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


def show(
    console: Console, described: dict[str, Any], records: Iterable[dict[str, Any]], skipped: dict[str, str]
) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in described.items() if value is not None))
    table = Table(
        "V", "B", "K", "dtype", "accepted", "peer", "call ms", "graph ms", "replay ms", "GPU ms", "launches", "peak MB",
        "beside MB", "x",
    )  # fmt: skip
    last = None
    for r in records:
        problem = tuple(r[name] for name in ("vocab", "batch", "num_draft_tokens", "dtype"))
        problem += (f"{r['acceptance_rate']:.2f}",)
        if last not in (None, problem):
            table.add_section()
        last = problem
        graph, replay, over = (
            "" if r[name] is None else f"{r[name]:.4f}" for name in ("graph_ms", "replay_ms", "device_time_over_ours")
        )
        table.add_row(
            *map(str, problem), r["peer"], f"{r['call_ms']:.4f}", graph, replay, f"{r['device_ms']:.4f}",
            "" if r["launches"] is None else str(r["launches"]), f"{r['peak_bytes'] * 1e-6:.3f}",
            f"{r['needs_bytes'] * 1e-6:.2f}", over,
        )  # fmt: skip
    console.print(table)
    for title, reasons in (
        ("not here", skipped),
        ("no graph", {r["peer"]: r["not_captured"] for r in records if r["not_captured"]}),
        ("needs, inside its time", {r["peer"]: r["needs"] for r in records if r["needs"]}),
    ):
        for name, reason in reasons.items():
            console.print(f"{title}: {name}: {reason}", highlight=False, soft_wrap=True)


def plot(records: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    """Time on the device against the batch, a line per peer, a panel per vocabulary, K, dtype and acceptance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for r in records:
        title = f"V={r['vocab']} K={r['num_draft_tokens']} {r['dtype']}"
        title += "" if r["acceptance"] is None else f", {r['acceptance']:g} accepted"
        panels.setdefault(title, {}).setdefault(r["peer"], []).append((r["batch"], r["device_ms"]))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 4 * len(panels), 4), squeeze=False, layout="constrained"
    )
    for (title, lines), axis in zip(panels.items(), axes[0], strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), "o-", markersize=3, label=name)
        axis.set(title=title, xlabel="B", ylabel="ms of device time a call", xscale="log", yscale="log")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"one verification, {device}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def build(peers: Iterable[Peer], device: torch.device, report: Report) -> None:
    """Each in a process of its own, which compiles what there is to compile when it checks a small problem."""

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[5], help="K, at least 1")
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6], help="as bench_verify.py has it")
    parser.add_argument("--only", nargs="+", metavar="PEER", help="peers whose name begins so, besides ours")
    parser.add_argument("--no-compiled", action="store_true", help="leave out what torch.compile makes")
    parser.add_argument("--build", action="store_true", help="compile what is compiled where it is used, time nothing")
    parser.add_argument("--check", metavar="PEER", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=100, help="timed calls of each peer")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    parser.add_argument("--plot", type=Path, help="write a plot to this PNG file (needs matplotlib)")
    options = parser.parse_args(arguments)
    if min(options.num_draft_tokens) < 1 or min(options.batch) < 1 or min(options.vocab) < 3 or options.rounds < 2:
        parser.error("expected batch >= 1, num-draft-tokens >= 1, vocab >= 3 and rounds >= 2")
    if not all(0 < rate <= 1 for rate in options.acceptance):
        parser.error(f"--acceptance: expected numbers in (0, 1], got {options.acceptance}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    console, device = wide_console(), torch.device(options.device)
    if options.check is not None:
        check(options.check, device)
        return {}
    wanted = tuple(options.only or [""])
    peers = [peer for peer in all_peers() if peer.name == OURS or peer.name.startswith(wanted)]
    if options.no_compiled:
        peers = [peer for peer in peers if "compiled" not in peer.name]
    problems = [
        Problem("sampled", batch, num_draft_tokens, vocab, dtype, acceptance)
        for vocab in options.vocab
        for num_draft_tokens in options.num_draft_tokens
        for dtype in options.dtype
        for acceptance in options.acceptance
        for batch in options.batch
    ]
    roof = copy_rate(device)
    described = environment(device, copy_gb_per_s=roof * 1e-9, rounds=options.rounds)
    skipped: dict[str, str] = {}
    report = Report(options.out, described, skipped=skipped)
    if options.build:
        build(peers, device, report)
        return report.written
    with Progress(console=console, transient=True) as progress, torch.inference_mode():
        task = progress.add_task("", total=len(problems))
        for problem in problems:
            progress.update(task, description=f"B={problem.batch} V={problem.vocab} {problem.dtype}")
            found, reasons = run_problem(problem, peers, device, options.rounds, roof)
            skipped |= reasons
            report.add(found)
            progress.advance(task)

    records = report.records
    show(console, described, records, skipped)
    if options.plot is not None:
        plot(records, described["device"], options.plot)
    return report.written


if __name__ == "__main__":
    main()
