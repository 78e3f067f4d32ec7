"""Runs every measurement for a GPU, in seven calls of at most nine minutes.

    python benchmarks/bench_gpu.py --call 1 [--out-dir DIR] [--commit HASH]
    python benchmarks/bench_gpu.py --plan          what is run, and for how long at most
    python benchmarks/bench_gpu.py --rehearse      every step at a tiny size, without a GPU

`torch_specops` has to be installed, or PYTHONPATH has to name the checkout, as `make bench-gpu` does.

A step is a process with its own time limit. It writes its output to NAME.log and its results to NAME.json as they are
measured; NAME.step.json says how it ended. A step that fails, hangs or is killed is recorded, and the next one starts.
A step starts only if its whole limit fits into the time that is left.

The same command continues where it stopped: a recorded step is not run again unless its NAME.step.json is deleted. On
another machine, begin with a copy of DIR.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import COMMIT, STAND_IN, Report, commit, copy_rate, environment, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TAIL_LINES = 30
REHEARSED_SECONDS = 200
INTERRUPTED_SECONDS = 5
CALLS = (1, 2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: of its files.
        call: the call that it belongs to.
        seconds: it is killed after this time.
        command: a script of this folder and its arguments; "pytest" and its arguments; or a tool of compute-sanitizer,
            under which the arguments of pytest are run.
        tiny: arguments that a rehearsal adds; the last value of an option counts. None = not rehearsed, because
            another step runs the same lines.
    """

    name: str
    call: int
    seconds: int
    command: str
    tiny: str | None


VERIFY = "bench_verify.py --device cuda --dtype bfloat16 --compiled"
COMPILED = "bench_verify.py --device cuda --dtype bfloat16 --kind sampled"
GRID = f"{VERIFY} --kind sampled --vocab 128256"
PEERS = f"{GRID} --peers --compiled softmax"
KINDS = "one-hot greedy gumbel sigmoid"
FILTERS = "top-k top-p min-p --scale 3 8 --vocab 128256 --batch 1 64"
VOCABULARIES = "--kind sampled --vocab 256000 32000 50256 50257 51864 51865 151936"
SAMPLED = "--device cuda --dtype bfloat16 --vocab 32000 128256 --rounds 40"
CACHES = "--device cuda --batch 1 8 16 --slots 2048"
TINY = "--batch 1 --vocab 40 --num-draft-tokens 1 --rounds 2"
TINY_LOOP = (
    "--target tiny --draft tiny --vocab 40 --batch 1 --num-draft-tokens 1 --prompt 4 --new-tokens 8 --max-length 32"
    " --rounds 2"
)
TINY_PROMPT = "--target tiny --dtype float32 --vocab 40 --prompts 40 --max-length 64 --rounds 2"
TINY_FORWARD = "--target tiny --dtype float32 --vocab 40 --batch 1 --tokens 1 2 --length 8 --max-length 64 --rounds 2"
BYTES = (
    "--target bytes --draft lookup --dtype float32 --vocab 256 --batch 1 --num-draft-tokens 10 --prompt 353"
    " --new-tokens 96 --max-length 512"
)
STEPS = (
    Step("device", 1, 25, "bench_gpu.py --describe", ""),
    Step("smoke", 1, 75, "pytest -m 'gpu and smoke' -q -n 4", "--collect-only -n 0"),
    # FlashInfer's kernels and the softmax formulation are compiled in it.
    Step("peers", 1, 360, f"{PEERS} --batch 1 8 64 256 --acceptance 0.6 1.0 --rounds 20", f"{TINY} --acceptance 1"),
    Step("acceptance", 1, 60, f"{GRID} --batch 1 8 64 256 --acceptance 0.3 0.9 --rounds 40", None),
    Step("tests", 2, 240, "pytest -m gpu -q -n 12 --dist worksteal", "--collect-only -n 0"),
    Step("loop", 2, 85, "bench_loop.py --no-inductor", TINY_LOOP),
    Step("profile", 2, 60, f"bench_loop.py {BYTES} --profile", f"{TINY_LOOP} --draft lookup"),
    # Of the ops alone: the tests of graphs and of the loop capture, and nothing can be captured without the cache.
    Step("memcheck", 2, 90, "memcheck -m 'gpu and smoke' -k gpu_ops -q", None),
    Step("racecheck", 2, 60, "racecheck -m 'gpu and smoke' -k gpu_ops -q", None),
    # In the interpreter the other two filters take minutes.
    Step(
        "filters", 3, 100, f"{VERIFY} --kind {FILTERS} --acceptance 0.6 --rounds 20", f"{TINY} --kind min-p --scale 1"
    ),
    Step("vocabularies", 3, 60, f"{VERIFY} {VOCABULARIES} --batch 1 64 --acceptance 1.0 --rounds 30", None),
    Step(
        "kinds", 3, 60, f"{VERIFY} --kind {KINDS} --vocab 128256 --batch 1 64", f"{TINY} --kind one-hot gumbel sigmoid"
    ),
    Step("drafts", 3, 60, f"{GRID} --batch 1 64 --num-draft-tokens 1 3 8 15 --acceptance 0.6", None),
    Step("warm", 4, 45, f"{GRID} --batch 1 8 --cache warm --acceptance 0.6", f"{TINY} --kind greedy"),
    Step("compiled", 3, 80, f"{COMPILED} --vocab 128256 --batch 1 64 --acceptance 0.6 --rounds 20", None),
    Step("sample", 4, 30, f"bench_sample.py {SAMPLED}", "--batch 1 --vocab 40 --rounds 2"),
    Step("attention", 3, 150, f"bench_attention.py {CACHES}", "--batch 1 --slots 64 --layers 1 --rounds 2 --no-flex"),
    Step("loop-compiled", 4, 420, "bench_loop.py --batch 1", None),
    Step("loop-compiled-batches", 5, 530, "bench_loop.py --batch 8 16 --rounds 10", None),
    Step("prompt", 6, 150, "bench_prompt.py", TINY_PROMPT),
    Step("generate", 6, 385, "bench_generate.py", f"{TINY_LOOP} --max-length 64"),
    Step("tiles", 7, 300, "bench_tiles.py", f"{TINY} --acceptance 1 --tile 1024 2048"),
    Step("forward", 7, 150, "bench_forward.py", TINY_FORWARD),
)

# What the stand-in for CUDA cannot execute, by name.
NOT_REHEARSED = {
    "GPU tests": "rehearsed by TORCH_SPECOPS_CUDA_STAND_IN=1 pytest -m gpu; here they are only collected",
    "machine code": "Triton's, ptxas' and the GPU's own: kernels run in Triton's interpreter",
    "Inductor on CUDA": "torch.compile returns the function as it is",
    "FlexAttention": "its masks are vmapped",
    "kernels of FlashInfer and vLLM": "functions of the same signatures stand in",
    "compute-sanitizer": "runs on a GPU alone",
    "profiles": "one kernel stands for everything",
    "time": "no figure of a rehearsal means anything",
}


class Runner:
    """Runs steps one after another. The folder gets all files. Rehearsed = at tiny sizes, on the stand-in for CUDA."""

    def __init__(self, folder: Path, rehearsed: bool = False) -> None:
        self.folder = folder
        self.rehearsed = rehearsed
        folder.mkdir(parents=True, exist_ok=True)

    def record_of(self, step: Step) -> dict[str, Any] | None:
        path = self.folder / f"{step.name}.step.json"
        return json.loads(path.read_text()) if path.exists() else None

    def command(self, step: Step) -> list[str]:
        script, *arguments = shlex.split(step.command) + shlex.split(step.tiny or "") * self.rehearsed
        if script.endswith(".py"):
            stand_in = [str(ROOT / "tests" / "helpers" / "cuda_stand_in")] * self.rehearsed
            out = ["--out", str(self.folder / f"{step.name}.json")]
            return [sys.executable, *stand_in, str(HERE / script), *arguments, *out]
        tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(ROOT / "tests")]
        # The allocator's cache is off, so that a read behind a tensor's end is a read outside of its memory.
        tool = f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool {script} --error-exitcode 1"
        return tests if script == "pytest" else [*tool.split(), "--target-processes", "all", *tests]

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
                # Interrupted first, so that pytest says what failed until then.
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(INTERRUPTED_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        described = self.folder / "device.json"
        record = {
            "step": step.name,
            "outcome": outcome,
            "exit_code": code,
            "seconds": round(time.monotonic() - started, 1),
            "limit_seconds": limit,
            "command": shlex.join(command),
            "tail": log.read_text(errors="replace").splitlines()[-TAIL_LINES:],
            "environment": json.loads(described.read_text())["environment"] if described.exists() else None,
        }
        write_json(self.folder / f"{step.name}.step.json", record)
        print(f"{step.name}: {outcome}, {record['seconds']} s", flush=True)
        if outcome != "done":
            print("\n".join(f"    {line}" for line in record["tail"]), flush=True)
        return record

    def variables(self) -> dict[str, str]:
        """The environment of a step: the package is found where it is not installed, and nothing is downloaded."""
        own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        paths = [str(ROOT)]
        if self.rehearsed:
            own |= {STAND_IN: "1", "OMP_NUM_THREADS": "1"}
            paths.append(str(ROOT / "tests" / "helpers" / "peer_stand_ins"))
        own["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, **own}


def run_calls(runner: Runner, calls: list[int], minutes: float) -> list[str]:
    """Run the steps of these calls; return the names of those that are still not recorded."""
    end = time.monotonic() + 60 * minutes
    for step in (step for call in calls for step in STEPS if step.call == call):
        record = runner.record_of(step)
        left = end - time.monotonic()
        if record is not None:
            print(f"{step.name}: {record['outcome']}, recorded", flush=True)
        elif step.seconds > left:
            print(f"{step.name}: not begun, may take {step.seconds} s of {left:.0f}", flush=True)
        else:
            print(f"{step.name}: begun, at most {step.seconds} s", flush=True)
            runner.run(step)
    return [step.name for step in STEPS if step.call in calls and runner.record_of(step) is None]


def rehearse(runner: Runner) -> int:
    """Run every step at a tiny size; return how many failed or skipped something."""
    failed = 0
    for step in (step for step in STEPS if step.tiny is not None):
        outcome = runner.run(step)["outcome"]
        results = runner.folder / f"{step.name}.json"
        skipped = json.loads(results.read_text()).get("skipped", {}) if results.exists() else {}
        for name, reason in skipped.items():
            print(f"    left out: {name}: {reason}", flush=True)
        failed += outcome != "done" or bool(skipped)
    for name, reason in NOT_REHEARSED.items():
        print(f"not executed: {name}: {reason}")
    return failed


def plan(minutes: float) -> str:
    """The steps of each call with their limits, and the sum of the limits."""
    lines = []
    for call in CALLS:
        steps = [step for step in STEPS if step.call == call]
        total = sum(step.seconds for step in steps)
        lines.append(f"call {call}: {total} of {60 * minutes:.0f} s")
        lines += [f"  {step.seconds:4d} s  {step.name:14}  {step.command}" for step in steps]
    return "\n".join(lines)


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
    left = run_calls(Runner(options.out_dir or HERE / "results" / "gpu"), options.call, options.minutes)
    print(f"not recorded: {', '.join(left) or 'nothing'}", flush=True)
    return len(left)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
