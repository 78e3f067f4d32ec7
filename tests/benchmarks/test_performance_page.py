"""docs/performance.md says what the result files, the bytes model and the launcher say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script

pytestmark = needs_benchmarks

RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def page() -> str:
    return (BENCHMARKS.parent / "docs" / "performance.md").read_text()


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def test_the_page_has_the_registers_of_the_results(page: str) -> None:
    every: list[dict[str, Any]] = []
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        result = json.loads((RESULTS / f"2026-11-23-kernel-resources-{target}.json").read_text())
        assert f"Triton {result['triton']}" in page
        every += result["builds"]

    def span(values: list[int]) -> str:
        return f"{min(values)} to {max(values)}"

    assert f"In {sum(build['spill_bytes'] > 0 for build in every)} of these {len(every)} builds" in page
    kernels = list(dict.fromkeys(build["kernel"] for build in every))
    for kernel in kernels:
        own = {
            target: [b for b in every if (b["kernel"], b["target"]) == (kernel, target)]
            for target in ("sm_80", "sm_90", "sm_100", "gfx942")
        }
        nvidia = own["sm_90"]
        cells = [kernel, str(len(nvidia)), *(span([b["registers"] for b in group]) for group in own.values())]
        cells.append(str(max(b["spill_bytes"] for group in own.values() for b in group)))
        cells += [span([b[name] for b in nvidia]) for name in ("wide_loads", "narrow_loads")]
        assert table_row(cells) in page
    assert len(kernels) == 14


def test_the_page_has_the_bytes_of_the_model(page: str) -> None:
    problem = script("problems").Problem
    for batch in (1, 8, 64, 256):
        cells = [problem("sampled", batch, 5, 128_256, "bfloat16", rate) for rate in (0.3, 0.6, 0.9, 1.0)]
        needed = [f"{cell.needed_bytes() / 1e6:.1f}" for cell in cells]
        read = [f"{cell.read_bytes() / 1e6:.1f}" for cell in cells]
        with_lse = [f"{cell.read_bytes(with_lse=True) / 1e6:.1f}" for cell in (cells[1], cells[3])]
        assert table_row([str(batch), *needed, *read, *with_lse]) in page
        share = cells[1].read_bytes() / cells[1].bytes()
        assert share <= 0.65 if batch >= 64 else share == 1


def test_the_page_has_the_memory_of_the_launcher(page: str) -> None:
    """What `verify_exact` allocates: partials, masses, states of row pairs, counts of programs, output tokens and
    numbers accepted."""
    launch = pytest.importorskip("torch_specops.ops.cuda.launch")
    for batch, share in ((64, "0.11 %"), (1, "0.51 %")):
        logits = torch.empty(batch, 6, 128_256, dtype=torch.bfloat16, device="meta")
        tiles = launch.num_tiles(logits, launch.tile_size(128_256, batch * 11))
        sizes = [batch * 11 * tiles * 8, batch * tiles * 8, batch * 16, batch * 4, batch * 6 * 8, batch * 8]
        rounded = sum(-(-size // 512) * 512 for size in sizes)
        assert f"{sum(sizes):,}" in page
        assert share == f"{100 * rounded / (batch * 11 * 128_256 * 2):.2f} %" and share in page


def test_nothing_on_the_page_is_called_measured(page: str) -> None:
    """Every goal has a step that decides it, and no figure in the column of measurements without a result file."""
    steps = [step.name for step in script("bench_gpu").STEPS]
    goals = page.split("## Goals")[1].split("## Bytes")[0]
    rows = [line.strip("|").split(" | ") for line in goals.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 9
    measured = list((RESULTS).glob("*-h200-*.json"))
    for _, _, result, step in rows:
        assert step.strip().strip("`") in steps
        assert measured or result == "not measured"
