"""Inductor's code for CUDA, compiled down to machine code without a GPU (`inductor_for_cuda.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers" / "inductor_for_cuda.py"
GROUPS = (
    ("verify_exact", "product", "dynamic batch"),
    ("verify_block", "verify_sigmoid", "verify_gumbel", "sample"),
    ("filters", "one-hot", "uniforms", "processors", "attention", "call"),
)


@pytest.mark.slow
@pytest.mark.parametrize("cases", GROUPS, ids=" ".join)
def test_inductor_compiles_every_kernel(cases: tuple[str, ...]) -> None:
    """It types arguments otherwise than a launch does (a float is float64, a size of a dynamic shape 64 bits wide), and
    copies every input of a kernel whose stores it cannot find."""
    done = subprocess.run(
        [sys.executable, SCRIPT, *cases], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    records = {record["case"]: record for record in map(json.loads, done.stdout.splitlines())}
    assert set(records) == set(cases)
    for name, record in records.items():
        assert record["calls"] == (name in ("attention", "call"))
        # Nothing else is compiled with attention.
        assert (record["kernels"] >= 1) == (name != "attention")
        assert record["knows_what_kernels_write"], name
        # The product is a tensor of its own, which says that a copy would be seen. Processors write into one copy.
        copies = record["copies_of_logits"]
        assert copies == 1 if name == "processors" else (copies > 0) == (name in ("product", "call")), name
