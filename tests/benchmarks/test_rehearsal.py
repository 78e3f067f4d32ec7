"""`make rehearse-gpu`: every test and every measurement for a GPU runs on the CPU, at tiny sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
GPU_TESTS = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", str(ROOT / "tests")]
MEASUREMENTS = [sys.executable, str(ROOT / "benchmarks" / "bench_gpu.py"), "--rehearse", "--out-dir"]


def run(command: list[str], **variables: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TORCH_SPECOPS"))}
    done = subprocess.run(
        command, cwd=ROOT, env=own | {"OMP_NUM_THREADS": "1"} | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_gpu_tests_pass_on_the_stand_in() -> None:
    run(GPU_TESTS, TORCH_SPECOPS_CUDA_STAND_IN="1")


@pytest.mark.slow
def test_bench_gpu_passes_on_the_stand_in(tmp_path: Path) -> None:
    run([*MEASUREMENTS, str(tmp_path / "rehearsal")])
