"""The Triton kernels, run by Triton's interpreter on CPU tensors and poisoned memory, against the float64 oracle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpret_kernels.py")
# (op, tile, vocabulary sizes): smaller than a tile, not a multiple of one, and of several tiles; odd sizes put rows
# off the 16-byte boundary.
RUNS = [
    ("verify_exact", 32, (1, 67)),
    ("verify_block", 32, (1, 67)),
    ("verify_sigmoid", 32, (1, 67)),
    ("sample", 32, (1, 2, 37, 64, 131)),
    ("sample", 256, (37, 600)),
]


@pytest.mark.slow
@pytest.mark.parametrize("op, tile, vocab_sizes", RUNS, ids=lambda value: str(value).replace(" ", ""))
def test_kernels_agree_with_the_oracle(
    op: str, tile: int, vocab_sizes: tuple[int, ...], record_property: pytest.RecordProperty
) -> None:
    command = [sys.executable, str(SCRIPT), op, str(tile), *map(str, vocab_sizes)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout.splitlines()[-1])
    for key in ("cases", "rows", "rounding", "disagreements"):
        record_property(f"{op} kernels, {key}", report[key])
    assert report["wrong"] == []
    assert report["cases"] >= 30 * len(vocab_sizes)
    assert report["disagreements"] <= report["rounding"]
