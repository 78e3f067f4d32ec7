"""Everything that is to be measured on a GPU, in steps, so that a few short calls do it.

    python benchmarks/bench_gpu.py [--minutes 9] [--only NAME...] [--out-dir benchmarks/results] [--tag 2026-12-01-h200]

The tests that need a GPU come first, and nothing is timed unless they pass. Each step is a process of its own and
writes TAG-NAME.json when it is done (the tests: TAG-tests.txt); a step whose file is there is not run again, so the
same command with the same tag goes on where it stopped. Delete a file to measure it anew. A call ends after --minutes;
a step that is cut off is run again by the next call.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
BATCHES = "1 8 32 64 128 256"
VERIFY = "bench_verify.py --kind sampled --dtype bfloat16 --vocab 128256 --no-compiled"
# By name: a script and its arguments, without --out.
STEPS = {
    "verify-batch": f"{VERIFY} --batch {BATCHES} --acceptance 0.3 0.6 0.9 1.0",
    "verify-vocab": "bench_verify.py --kind sampled --no-compiled --batch 1 64 --dtype bfloat16 float32"
    " --vocab 32000 51865 128256 151936 256000 --acceptance 0.6",
    "verify-odd": "bench_verify.py --kind sampled --no-compiled --batch 1 64 --dtype bfloat16 float32"
    " --vocab 50256 50257 51864 51865 --acceptance 1.0",
    "verify-k": f"{VERIFY} --batch 1 64 --num-draft-tokens 1 3 5 8 15 20 --acceptance 0.6",
    "verify-kinds": "bench_verify.py --kind one-hot greedy top-k top-p --no-compiled --batch 1 8 64 --dtype bfloat16"
    " --vocab 128256",
    "verify-warm": f"{VERIFY} --batch 1 8 64 --cache cold warm",
    "verify-compiled": "bench_verify.py --kind sampled --batch 1 64 --dtype bfloat16 --vocab 128256",
    "verify-counters": f"{VERIFY} --batch 1 64 --acceptance 0.6 1.0 --ncu",
    "tiles": "bench_tiles.py --batch 1 64",
    "peers": "bench_peers.py --dtype bfloat16 --batch 1 8 64 256 --vocab 128256 --rounds 30",
    "peers-vocab": "bench_peers.py --no-compiled --dtype bfloat16 float32 --batch 1 64 --vocab 32000 256000"
    " --rounds 30",
    "wagner-kernels": "paper_wagner_kernels.py",
}
TESTS = "tests"


def device_slug() -> str:
    """As in "NVIDIA H200" -> "h200"."""
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def output_of(name: str, folder: Path, tag: str) -> Path:
    return folder / f"{tag}-{name}.{'txt' if name == TESTS else 'json'}"


def command_of(name: str, out: Path) -> list[str]:
    if name == TESTS:
        return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", str(HERE.parent / "tests")]
    script, *arguments = STEPS[name].split()
    command = [sys.executable, str(HERE / script), *arguments]
    # Its cells are written one by one: the file under its own name would count as done after the first.
    return [*command, "--out", str(out.with_suffix(".unfinished"))]


def run_step(name: str, out: Path, seconds: float) -> bool:
    """True when the step is done; raises RuntimeError if it failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    try:
        done = subprocess.run(
            command_of(name, out),
            timeout=seconds,
            text=True,
            stdout=subprocess.PIPE if name == TESTS else None,
            # The package need not be installed.
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])},
        )
    except subprocess.TimeoutExpired:
        return False
    if name == TESTS:
        print(done.stdout, flush=True)
        unfinished.write_text(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed with exit code {done.returncode}")
    unfinished.replace(out)
    return True


def main(arguments: list[str] | None = None) -> int:
    """The number of steps that are left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="how long this call may take")
    parser.add_argument("--only", nargs="+", choices=[TESTS, *STEPS], metavar="NAME", default=[TESTS, *STEPS])
    parser.add_argument("--out-dir", type=Path, default=HERE / "results")
    parser.add_argument("--tag", help="begins the files' names; default: the date and the device")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    end = time.monotonic() + 60 * options.minutes
    tag = options.tag or f"{date.today()}-{device_slug()}"
    outputs = {name: output_of(name, options.out_dir, tag) for name in options.only}
    for name, out in outputs.items():
        if out.exists():
            print(f"{name}: there, {out.name}", flush=True)
            continue
        left = end - time.monotonic()
        started = time.monotonic()
        if left <= 0 or not run_step(name, out, left):
            print(f"{name}: out of time; the same command goes on here", flush=True)
            break
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    missing = [name for name, out in outputs.items() if not out.exists()]
    print(f"left: {', '.join(missing) or 'nothing'}", flush=True)
    return len(missing)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
