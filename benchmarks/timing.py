"""How the benchmarks measure time, launches, memory and the rate of a copy; their options, and the file they write."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from torch_specops.cli.env import device_name, versions
from torch_specops.cli.speed import take_turns as take_turns

# Without it, torch's profiler prints a line whenever it starts or stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

Call = Callable[[], object]

# Inputs are rotated through more memory than the last cache holds, so that logits come from memory.
CPU_CACHE_BYTES = 64 * 2**20
ROTATE = 2
MAX_SETS = {"cpu": 64, "cuda": 512}
# Graphs of a single call: each has its own set of inputs.
MAX_SINGLE = 8
# How many times the cache is read before a replay. On an H200 that takes 50 us; queueing what is timed takes about 15.
LEAD = 4
# How many calls a profile averages, and how many kernels of it are kept.
PROFILED, SLOWEST = 5, 15
# Names the commit if there is no clone.
COMMIT = "TORCH_SPECOPS_COMMIT"
# Set if processes run on the stand-in for CUDA (tests/helpers/cuda_stand_in).
STAND_IN = "TORCH_SPECOPS_CUDA_STAND_IN"


def cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CPU_CACHE_BYTES


def number_of_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many copies of the inputs it takes to leave the last cache cold."""
    return min(MAX_SETS[device.type], max(2, math.ceil(ROTATE * cache_bytes(device) / bytes_per_set)))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Lead:
    """Work that keeps the device busy while the host queues what is timed, so that the time between the two events has
    no wait for a launch. It reads memory that nothing else uses, which leaves the last cache cold."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(LEAD * cache_bytes(device) // 4, device=device)

    def __call__(self) -> None:
        self._memory.sum()


def call_seconds(call: Call, device: torch.device, lead: Call | None = None) -> float:
    """The time of one call: by the clock on a CPU, between two events on CUDA. The latter includes the device's waits
    for launches, unless `lead` keeps it busy before."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if lead is not None:
        lead()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def timer_of_host(call: Call, device: torch.device) -> Callable[[int], float]:
    """round -> seconds of a call that waits for its result, by the clock, on an idle device."""

    def seconds(_: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return seconds


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the calls, one after the other. A call before the capture compiles what they need."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Outputs are kept until the capture ends. Otherwise the next call would get the memory of a freed one.
        outputs = [call() for call in calls]
    del outputs
    return graph


def timers(
    calls: Sequence[Call], device: torch.device, graphs: bool = True, cold: bool = True
) -> dict[str, Callable[[int], float]]:
    """mode -> round -> seconds per call; one call per set of inputs.

    "call" is a Python call with its launches. On CUDA also "graph", the replay of one CUDA graph of all calls over
    their number, so that the end of one call overlaps the start of the next; and "replay", one replay of a graph of one
    call, which is what a step of decoding pays. Inputs that are to stay in the cache (`cold` false) have no "replay".
    """
    found: dict[str, Callable[[int], float]] = {"call": lambda i: call_seconds(calls[i % len(calls)], device)}
    if device.type == "cuda" and graphs:
        lead = Lead(device) if cold else None
        graph = capture(calls)
        found["graph"] = lambda i: call_seconds(graph.replay, device, lead) / len(calls)
        if cold:
            single = [capture([call]) for call in calls[:MAX_SINGLE]]
            found["replay"] = lambda i: call_seconds(single[i % len(single)].replay, device, lead)
    return found


def spread(seconds: Sequence[float], unit: str, name: str = "") -> dict[str, Any]:
    """Median and quartiles of some times in ms or us: `{"NAME_median_ms": ..., "NAME_quartiles_ms": [..., ...]}`."""
    values = [value * {"ms": 1e3, "us": 1e6}[unit] for value in seconds]
    start, quartiles = f"{name}_" if name else "", statistics.quantiles(values, n=4)[::2]
    return {f"{start}median_{unit}": statistics.median(values), f"{start}quartiles_{unit}": quartiles}


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of copying 256 MiB; on CUDA 1 GiB, of a small device less."""
    size = 2**28
    if device.type == "cuda":
        size = min(2**30, torch.cuda.get_device_properties(device).total_memory // 64)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[2:])


def device_work(call: Call, device: torch.device) -> dict[str, Any]:
    """Of one call on CUDA: its launches (kernels, copies, fills), the sum of their ms, and its slowest kernels. On a
    CPU, the ms inside torch's own functions."""
    call()
    synchronize(device)
    if device.type == "cuda":
        found = slowest_kernels(call, device)
        return {"launches": found["launches"], "device_ms": found["device_us"] * 1e-3, "kernels": found["kernels"]}
    seconds = sum(event.self_cpu_time_total for event in _profiled(call, device)) * 1e-6
    return {"launches": None, "device_ms": seconds * 1e3, "kernels": None}


def slowest_kernels(call: Call, device: torch.device) -> dict[str, Any]:
    """Of a call on CUDA: its launches, the sum of their us, and the kernels that took most of them."""
    work = _profiled(lambda: [call() for _ in range(PROFILED)], device)
    names: dict[str, list[float]] = {}
    for event in work:
        names.setdefault(event.name, []).append(event.self_device_time_total)
    slowest = sorted(names.items(), key=lambda each: -sum(each[1]))[:SLOWEST]
    return {
        "launches": len(work) / PROFILED,
        "device_us": sum(map(sum, names.values())) / PROFILED,
        "kernels": [{"name": name, "launches": len(us) / PROFILED, "us": sum(us) / PROFILED} for name, us in slowest],
    }


def _profiled(call: Call, device: torch.device) -> list[Any]:
    """The events of a call; on CUDA those of the device."""
    on_gpu = device.type == "cuda"
    # acc_events: without it torch 2.11 warns.
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as found:
        call()
        synchronize(device)
    if not on_gpu:
        return list(found.events())
    # A record_function also shows up as a span on the device, which is not work.
    return [e for e in found.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]


def peak_bytes(call: Call, device: torch.device | str = "cpu") -> int:
    """The peak of the bytes that `call` allocated and held at a time."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        call()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


def options_of(description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """A parser with the options that most scripts have: device, threads, out, and rounds unless there is no default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often each call is timed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads; default: torch's")
    parser.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    return parser


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a result depends on."""
    return {name: value for name, value in vars(options).items() if name != "out"}


class Report:
    """A JSON file of an environment and records. It is rewritten with every record, so a killed run leaves what it
    measured.

    Args:
        path: None = nothing is written.
        described: where and with what it was measured (`environment`).
        more: further entries.
    """

    def __init__(self, path: Path | None, described: dict[str, Any], **more: Any) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.written: dict[str, Any] = {"environment": described, **more, "records": self.records}
        self.add([])

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        self.records.extend(records)
        if self.path is not None:
            write_json(self.path, self.written)


def write_json(path: Path, value: Any) -> None:
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Renamed when complete, so that an interrupted run leaves the previous file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


def environment(device: torch.device, **more: Any) -> dict[str, Any]:
    """Where and with what a result was measured; `more` is added."""
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "driver": first_word_of(driver) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        **versions(),
        "commit": commit(),
        **more,
    }


def first_word_of(command: list[str]) -> str | None:
    """The first word that a command prints; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def commit() -> str | None:
    """The commit, with "-dirty" behind it if there are uncommitted changes. None if there is no clone and the
    environment does not name it."""
    described = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return os.environ.get(COMMIT) or first_word_of(["git", "-C", str(Path(__file__).parent), *described])
