"""What one process has compiled, another loads: `torch.compiler.save_cache_artifacts`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import torch_specops

artifacts, role = Path(sys.argv[1]), sys.argv[2]
if role == "another-version":
    torch.compiler.config.cache_key_tag += "-another"
if role != "first":
    torch.compiler.load_cache_artifacts(artifacts.read_bytes())


# The op that compiles fastest: caches do not care which it is.
@torch.compile(fullgraph=True)
def step(logits, uniforms):
    return torch_specops.sample(logits, uniforms)


generator = torch.Generator().manual_seed(0)
output, _ = step(torch.randn(2, 50, generator=generator), torch.rand(2, generator=generator))
if role == "first":
    artifacts.write_bytes(torch.compiler.save_cache_artifacts()[0])
cache = counters["aot_autograd"]
print(json.dumps([output.tolist(), cache["autograd_cache_hit"], cache["autograd_cache_miss"]]))
"""


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    found = {}
    for role in ("first", "second", "another-version"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "artifacts"), role],
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / role)},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        found[role] = json.loads(done.stdout.splitlines()[-1])
    # The tokens, then hits and misses of the cache.
    assert [found[role][1:] for role in found] == [[0, 1], [1, 0], [0, 1]]
    assert found["first"][0] == found["second"][0] == found["another-version"][0]
