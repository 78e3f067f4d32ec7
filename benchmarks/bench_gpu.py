"""Runs every measurement for a GPU, in three calls of at most nine minutes.

    python benchmarks/bench_gpu.py --call 1 [--out-dir DIR] [--commit HASH] [--earlier DIR.tar.gz]
    python benchmarks/bench_gpu.py --plan          what is run, and for how long at most
    python benchmarks/bench_gpu.py --rehearse      every step at a tiny size, without a GPU

A step (`gpu_steps.py`) is a process with its own time limit. It writes its output to NAME.log and its results to
NAME.json as they are measured; NAME.step.json says how it ended. A step that fails, hangs or is killed is recorded, and
the next one starts. A step starts only if its whole limit fits into the time that is left. Steps that belong to no call
fill the time that a call has left. After each step all files are packed into DIR.tar.gz, at most 16 MiB.

The same command continues where it stopped: a recorded step is not run again unless its NAME.step.json is deleted. On
another machine, --earlier unpacks the archive of the last call first.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_steps import CALLS, IF_TIME_IS_LEFT, NOT_REHEARSED, STEPS, Step, plan
from timing import COMMIT, STAND_IN, Report, commit, copy_rate, environment, process_of, write_json, write_whole

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MAX_PACKED = 16 * 2**20
TAIL_LINES = 30
# The middle of a longer log is left out of the archive.
MAX_LOG = 2**19
REHEARSED_SECONDS = 200


class Runner:
    """Runs steps one after another.

    Args:
        folder: gets all files.
        rehearsed: run at tiny sizes, on the stand-in for CUDA.
        archive: gets all files, packed; default: beside the folder.
    """

    def __init__(self, folder: Path, rehearsed: bool = False, archive: Path | None = None) -> None:
        self.folder = folder
        self.rehearsed = rehearsed
        self.packed = archive or folder.with_name(folder.name + ".tar.gz")
        folder.mkdir(parents=True, exist_ok=True)

    def record_of(self, step: Step) -> dict[str, Any] | None:
        path = self.folder / f"{step.name}.step.json"
        return json.loads(path.read_text()) if path.exists() else None

    def command(self, step: Step) -> list[str]:
        script, *arguments = shlex.split(step.command) + shlex.split(step.tiny or "") * self.rehearsed
        if script == "pytest":
            return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(ROOT / "tests")]
        return [*process_of(HERE / script, self.rehearsed), *arguments, "--out", str(self.folder / f"{step.name}.json")]

    def run(self, step: Step) -> dict[str, Any]:
        command, limit = self.command(step), REHEARSED_SECONDS if self.rehearsed else step.seconds
        log = self.folder / f"{step.name}.log"
        started = time.monotonic()
        with log.open("wb") as output:
            # In a session of its own, so that the processes it started can be ended with it.
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self.variables(), start_new_session=True
            )
            try:
                code = process.wait(limit)
                outcome = "done" if code == 0 else "failed" if code > 0 else f"killed by signal {-code}"
            except subprocess.TimeoutExpired:
                code, outcome = None, "out of time"
            finally:
                _end_group(process)
        tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        described = self.folder / "device.json"
        record = {
            "step": step.name,
            "outcome": outcome,
            "exit_code": code,
            "seconds": round(time.monotonic() - started, 1),
            "limit_seconds": limit,
            "command": shlex.join(command),
            "tail": tail,
            "environment": json.loads(described.read_text())["environment"] if described.exists() else None,
        }
        write_json(self.folder / f"{step.name}.step.json", record)
        self.pack()
        return record

    def variables(self) -> dict[str, str]:
        """The environment of a step: the package is found where it is not installed, and nothing is downloaded."""
        own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        paths, programs = [str(ROOT)], [os.environ.get("PATH", "")]
        if self.rehearsed:
            stand_ins = ROOT / "tests" / "peer_stand_ins"
            own |= {STAND_IN: "1", "OMP_NUM_THREADS": "1"}
            paths.append(str(stand_ins / "installed"))
            programs.insert(0, str(ROOT / "tests" / "gpu_tools"))
            if not (HERE / "peers" / "external" / "manifest.json").exists():
                own["TORCH_SPECOPS_PEERS"] = str(stand_ins / "copies")
        own["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        own["PATH"] = os.pathsep.join(programs)
        return {**os.environ, **own}

    def pack(self) -> None:
        """Pack all files into one archive, leaving out the largest ones if it gets too large."""
        files = sorted(
            (path for path in self.folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )
        left_out: list[str] = []
        while len(packed := _archive(self.folder, files, left_out)) > MAX_PACKED:
            left_out.append(str(files.pop().relative_to(self.folder)))
        write_whole(self.packed, packed)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _archive(folder: Path, files: list[Path], left_out: list[str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(f"{folder.name}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))

        for path in files:
            content = path.read_bytes()
            if path.suffix == ".log" and len(content) > MAX_LOG:
                content = content[: MAX_LOG // 2] + b"\n[...]\n" + content[-MAX_LOG // 2 :]
            add(str(path.relative_to(folder)), content)
        if left_out:
            add("left_out.txt", "\n".join(left_out).encode())
    return packed.getvalue()


def run_calls(runner: Runner, calls: list[int], minutes: float) -> list[str]:
    """Run the steps of these calls; return the names of those that are still not recorded."""
    end = time.monotonic() + 60 * minutes
    for step in (step for call in (*calls, IF_TIME_IS_LEFT) for step in STEPS if step.call == call):
        record = runner.record_of(step)
        if record is not None:
            print(f"{step.name}: {record['outcome']}, recorded", flush=True)
            continue
        left = end - time.monotonic()
        if step.seconds > left:
            print(f"{step.name}: not begun, may take {step.seconds} s of {left:.0f}", flush=True)
            continue
        print(f"{step.name}: begun, at most {step.seconds} s", flush=True)
        _print_outcome(runner.run(step))
    return [step.name for step in STEPS if step.call in calls and runner.record_of(step) is None]


def rehearse(runner: Runner) -> int:
    """Run every step at a tiny size; return how many failed or left out something that can be rehearsed."""
    steps: dict[str, Any] = {}
    for step in (step for step in STEPS if step.tiny is not None):
        record = runner.run(step)
        _print_outcome(record)
        steps[step.name] = {name: record[name] for name in ("outcome", "seconds")}
        steps[step.name]["left_out"] = left_out = _left_out(runner.folder / f"{step.name}.json")
        for reason in left_out:
            print(f"    left out: {reason}", flush=True)
    for name, reason in NOT_REHEARSED.items():
        print(f"not executed: {name}: {reason}")
    write_json(runner.folder / "rehearsal.json", {"steps": steps, "not_executed": NOT_REHEARSED})
    return sum(step["outcome"] != "done" or bool(step["left_out"]) for step in steps.values())


def _left_out(results: Path) -> list[str]:
    """What a script skipped, except what the stand-in cannot run, and peers for a CPU."""
    if not results.exists():
        return []
    written = json.loads(results.read_text())
    reasons = written.get("skipped", {}).items()
    skipped = [f"{name}: {reason}" for name, reason in reasons if not reason.startswith("needs a CPU")]
    refused = [record for record in written.get("records", []) if "refused" in record]
    return skipped + [record["refused"] for record in refused if record.get("provider") != "flex"]


def _print_outcome(record: dict[str, Any]) -> None:
    print(f"{record['step']}: {record['outcome']}, {record['seconds']} s", flush=True)
    if record["outcome"] != "done":
        print("\n".join(f"    {line}" for line in record["tail"]), flush=True)


def describe(out: Path | None) -> None:
    """The step "device": the environment of all others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(out, environment(device, copy_gb_per_s=copy_rate(device) * 1e-9))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        names = ("total_memory", "multi_processor_count", "L2_cache_size", "major", "minor")
        report.add([{name: getattr(properties, name) for name in names}])
    print(json.dumps(report.written, indent=1))


def main(arguments: list[str] | None = None) -> int:
    """The number of steps that are left, in a rehearsal of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", type=int, nargs="+", choices=CALLS, default=list(CALLS), help="default: all")
    parser.add_argument("--minutes", type=float, default=9, help="how long this command may take")
    parser.add_argument("--out-dir", type=Path, help="default: benchmarks/results/gpu; a rehearsal's is temporary")
    parser.add_argument("--archive", type=Path, help="default: DIR.tar.gz")
    parser.add_argument("--earlier", type=Path, help="an archive of earlier calls, unpacked if --out-dir is not there")
    parser.add_argument("--commit", help="of the code, where there is no clone to ask")
    parser.add_argument("--plan", action="store_true", help="print what would be run")
    parser.add_argument("--rehearse", action="store_true", help="run every step at a tiny size on a CPU")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.describe:
        describe(options.out)
        return 0
    if options.plan:
        print(plan(options.minutes))
        return 0
    # Ending this command also ends the step that it runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.rehearse:
        return rehearse(Runner(options.out_dir or Path(tempfile.mkdtemp()) / "rehearsal", rehearsed=True))
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    if known := options.commit or commit():
        os.environ[COMMIT] = known
    folder = options.out_dir or HERE / "results" / "gpu"
    if options.earlier is not None and not folder.exists():
        folder.mkdir(parents=True)
        with tarfile.open(options.earlier) as archive:
            for member in archive.getmembers():
                member.name = str(Path(*Path(member.name).parts[1:]))
                archive.extract(member, folder, filter="data")
    left = run_calls(Runner(folder, archive=options.archive), options.call, options.minutes)
    print(f"not recorded: {', '.join(left) or 'nothing'}", flush=True)
    return len(left)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
