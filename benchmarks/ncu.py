"""Bytes that `verify_exact` moved, by the hardware counters that Nsight Compute reads.

    python benchmarks/ncu.py '{"kind": "sampled", "batch": 1, ...}'        # the call that ncu watches

`bytes_by_counter` starts that under `ncu`, in a process of its own. Clocks are left alone, and caches are not flushed
between the kernels of the call: the second reads from L2 what the first left there, as it does outside of ncu. Before
the call another buffer of twice the L2 is written, so the logits come from memory.
"""

from __future__ import annotations

import csv
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict

import torch
from problems import Problem, make_inputs, op_arguments
from timing import ROTATE, cache_bytes

import torch_specops

# By the name that is reported: DRAM is what misses the L2, L2 is all that the multiprocessors asked for.
METRICS = {
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "l2": "lts__t_bytes.sum",
}


def ncu_missing(device: torch.device) -> str | None:
    """Why nothing can be counted."""
    if device.type != "cuda":
        return f"ncu counts on CUDA alone, the device is {device}"
    return None if shutil.which("ncu") else "ncu (Nsight Compute) is not on PATH"


@functools.cache
def bytes_by_counter(problem: Problem, with_lse: bool) -> dict[str, float]:
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS.values()), "--csv", "--print-units", "base"]
    described = json.dumps(asdict(problem) | {"with_lse": with_lse})
    done = subprocess.run([*command, sys.executable, __file__, described], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ncu failed with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
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


def main(described: str) -> None:
    settings = json.loads(described)
    with_lse = settings.pop("with_lse")
    problem, device = Problem(**settings), torch.device("cuda")
    arguments = op_arguments(problem.kind, make_inputs(problem, device, seed=0), with_lse)
    torch_specops.verify_exact(**arguments)
    torch.zeros(ROTATE * cache_bytes(device), dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        torch_specops.verify_exact(**arguments)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
