"""Bytes that `verify_exact` moves, from hardware counters by Nsight Compute, beside those of the bytes model.

    python benchmarks/ncu.py [--batch 1 64] [--acceptance 0.6 1.0] [--vocab 128256] [--out FILE.json]

Each problem is a process of its own under `ncu`, which profiles one call. Clocks are not locked, and caches are not
flushed between the kernels of the call: the second one reads from L2 what the first left there, as without ncu. Before
the call a buffer of twice the L2 is written, so that the logits come from memory. If ncu is not installed or may not
read the counters, the reason is written.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from problems import Problem, make_inputs, op_arguments
from timing import ROTATE, Report, cache_bytes, copy_rate, environment, process_of

import torch_specops

# DRAM traffic is what misses the L2; L2 traffic is everything that the multiprocessors asked for.
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",
}
# For one problem. Importing, compiling and a few replays of three kernels take far less.
LIMIT_SECONDS = 60


def bytes_by_counter(problem: Problem, with_lse: bool) -> dict[str, float]:
    """Raises RuntimeError if ncu is not there, fails, hangs, or counts nothing."""
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (Nsight Compute) is not on PATH")
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS.values()), "--csv", "--print-units", "base"]
    described = json.dumps(asdict(problem) | {"with_lse": with_lse})
    command += [*process_of(__file__), "--watched", described]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"ncu took more than {LIMIT_SECONDS} seconds") from None
    if done.returncode != 0:
        raise RuntimeError(f"ncu failed with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return summed(done.stdout.splitlines())


def summed(lines: Iterable[str]) -> dict[str, float]:
    """The metrics added up over all kernels of ncu's CSV, which follows lines of its own and of the program."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 2:
        raise RuntimeError("ncu: expected a CSV table with a row for each kernel and metric, got none")
    name, value = rows[0].index("Metric Name"), rows[0].index("Metric Value")
    return {
        key: sum(float(row[value].replace(",", "")) for row in rows[1:] if row[name] == metric)
        for key, metric in METRICS.items()
    }


def watched(described: str, device: torch.device) -> None:
    """The process that runs under ncu."""
    settings = json.loads(described)
    with_lse = settings.pop("with_lse")
    problem = Problem(**settings)
    arguments = op_arguments(problem.kind, make_inputs(problem, device, seed=0), with_lse)
    torch_specops.verify_exact(**arguments)
    torch.zeros(ROTATE * cache_bytes(device), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        torch_specops.verify_exact(**arguments)
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    parser.add_argument("--watched", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    if options.watched is not None:
        watched(options.watched, device)
        return []
    report = Report(options.out, environment(device, copy_gb_per_s=copy_rate(device) * 1e-9))
    for batch in options.batch:
        for acceptance in options.acceptance:
            problem = Problem("sampled", batch, options.num_draft_tokens, options.vocab, "bfloat16", acceptance)
            record = asdict(problem) | {"with_lse": True, "bytes": problem.bytes(with_lse=True)}
            try:
                record["ncu_bytes"] = bytes_by_counter(problem, with_lse=True)
            except RuntimeError as error:
                record["refused"] = str(error)
            report.add([record | {"needed_bytes": problem.needed_bytes(with_lse=True)}])
            print(report.records[-1], flush=True)
    return report.records


if __name__ == "__main__":
    main()
