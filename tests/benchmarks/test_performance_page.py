"""docs/performance.md says what the result files, the bytes model and the launcher say; docs/gpu.md repeats it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script

pytestmark = needs_benchmarks

RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "performance.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_the_page_for_users_has_no_other_figures(page: str) -> None:
    answers = [line for line in (PAGE.parent / "gpu.md").read_text().splitlines() if line.startswith(("| ", "- "))]
    figures = set(re.findall(r"\d[\d,.]*\d", " ".join(answers)))
    assert len(figures) > 20 and sorted(figures - set(re.findall(r"\d[\d,.]*\d", page))) == []


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


def record_of(name: str, **where: Any) -> dict[str, Any]:
    (result,) = RESULTS.glob(f"*-h100-{name}.json")
    (found,) = (each for each in json.loads(result.read_text())["records"] if where.items() <= each.items())
    return found


def measured_cell(name: str, provider: str = "specops eager", mode: str = "replay", **where: Any) -> dict[str, Any]:
    return record_of(name, provider=provider, mode=mode, **where)


def microseconds(name: str, provider: str = "specops eager", mode: str = "replay", **where: Any) -> float:
    """The median of a cell; in the mode "kernels" the sum of a call's kernels."""
    if mode == "kernels":
        return 1e3 * float(measured_cell(name, provider, "call", **where)["device_ms"])
    return 1e3 * float(measured_cell(name, provider, mode, **where)["median_ms"])


GRID = [{"batch": batch, "acceptance": rate} for batch in (1, 8, 64, 256) for rate in (0.6, 1.0)]
NO_COPY = "vLLM, no copy"


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        ("specops", "specops eager"),
        ("specops with `draft_lse`", "specops, lse eager"),
        (NO_COPY, NO_COPY),
        ("vLLM", "vLLM"),
        ("FlashInfer", "FlashInfer"),
        ("softmax formulation", "softmax eager"),
        ("transformers, its kernels", "transformers"),
    ],
)
def test_the_page_has_the_times_of_the_peers(page: str, name: str, provider: str) -> None:
    mode = "kernels" if provider == "transformers" else "replay"
    times = [microseconds("peers", provider, mode, **cell) for cell in GRID]
    cells = [f"{time:.0f}" if time >= 100 else f"{time:.1f}" for time in times]
    assert table_row([name, *cells])[:-2] in page


def test_the_page_has_the_measurements_of_the_goals(page: str) -> None:
    """Every goal has a step that decides it; what is said to be measured is what the result files have."""
    steps = [step.name for step in script("bench_gpu").STEPS]
    goals = page.split("## Goals")[1].split("## Beside")[0]
    rows = [line.strip("| ").split(" | ") for line in goals.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 9
    for *_, step in rows:
        assert step.strip("`") in steps and (RESULTS / f"2026-11-26-h100-{step.strip('`')}.json").exists()
    measured = [row[2] for row in rows]

    ours = [microseconds("peers", **cell) for cell in GRID]
    low, high = (microseconds("acceptance", batch=1, acceptance=0.9), ours[0])
    small, large = (microseconds("vocabularies", batch=1, vocab=vocab) for vocab in (32_000, 256_000))
    assert measured[0] == f"{small:.1f} us for 32k, {low:.1f} to {high:.1f} for 128k"
    assert measured[1] == f"{large:.1f} us"

    def shares(name: str, batch: int) -> list[str]:
        files = {1.0: "peers", 0.6: "peers", 0.3: "acceptance"}
        cells = (measured_cell(file, batch=batch, acceptance=rate) for rate, file in files.items())
        return [f"{cell[name]:.0f}" for cell in cells]

    accepted, some, _ = shares("needed_percent_of_copy", 64)
    assert measured[2] == f"{accepted} % with all accepted ({ours[5]:.1f} us), {some} % at 0.6 ({ours[4]:.1f} us)"
    whole = ["{}, {} and {} %".format(*shares("percent_of_copy", batch)) for batch in (64, 256)]
    assert measured[3] == f"{whole[0]}; at B = 256 {whole[1]}"

    def more(batch: int) -> float:
        """By how many percent an odd vocabulary takes longer per byte, at most."""
        times = {v: microseconds("vocabularies", batch=batch, vocab=v) / v for v in (50_256, 50_257, 51_864, 51_865)}
        return 100 * max(times[odd] / times[odd - 1] - 1 for odd in (50_257, 51_865))

    assert measured[4].endswith(f": at most {more(64):.1f} % more at B = 64, {more(1):.1f} % at B = 1")

    def ratios(provider: str, mode: str = "replay", own: str = "specops eager") -> list[float]:
        return [microseconds("peers", provider, mode, **c) / microseconds("peers", own, mode, **c) for c in GRID]

    best = [f"{ratio:.2f}" for ratio in ratios(NO_COPY)]
    assert f'"{NO_COPY}": {", ".join(best[::2])}x at 0.6, {", ".join(best[1::2])}x with all accepted' in measured[5]
    copied, flashinfer = ratios("vLLM"), ratios("FlashInfer")
    assert f"vLLM {min(copied):.2f} to {max(copied):.2f}x" in measured[5]
    assert f"FlashInfer {min(flashinfer):.1f} to {max(flashinfer):.1f}x" in measured[5]
    assert sum(ratio >= 1.5 for ratio in ratios(NO_COPY)) == 2
    assert sum(ratio >= 1.5 for ratio in ratios(NO_COPY, own="specops, lse eager")) == 7
    slow = ratios("transformers", "kernels")
    assert measured[6] == f"{slow[0]:.1f} and {slow[1]:.1f}x at B = 1, {min(slow[2:]):.0f}x and more from B = 8 on"
    top_k, min_p, top_p = (
        microseconds("filters", kind=kind, batch=64) - ours[4] for kind in ("top-k", "min-p", "top-p")
    )
    assert measured[7] == f"each alone: k = 50 {top_k:.0f} us, min-p {min_p:.0f}, top-p = 0.9 {top_p:.0f}; 2 launches"


def test_the_page_has_the_times_of_other_dtypes_and_ops(page: str) -> None:
    def cells(name: str, provider: str, *batches: int, **where: Any) -> list[str]:
        times = [microseconds(name, provider, batch=batch, acceptance=0.6, **where) for batch in batches]
        return [f"{time:.0f}" if time >= 100 else f"{time:.1f}" for time in times]

    for name, ours, step, batches, where in (
        ("`verify_exact`, float32", "eager", "dtypes", (1, 64), {"dtype": "float32"}),
        ("`verify_exact`, float16", "eager", "dtypes", (1, 64), {"dtype": "float16"}),
        ("`verify_block`, bfloat16", "eager", "block", (1, 8, 64), {}),
        ("`verify_exact`, bfloat16, compiled", "compiled", "compiled", (1, 64), {}),
    ):
        times = cells(step, f"specops {ours}", *batches, **where)
        softmax = ", ".join(cells(step, f"softmax {ours}", 1, 64, **where))
        last = f"compiled: {softmax}" if ours == "compiled" else softmax
        middle = times[1:-1] or [""]
        assert table_row([name, times[0], *middle, times[-1], last]).replace("|  |", "| |") in page
    turns = ("one-hot-1-before", "one-hot-2-now", "one-hot-3-before", "one-hot-4-now")
    before, now, before_again, now_again = (microseconds(step, kind="one-hot", batch=64) for step in turns)
    assert f"took {now:.1f} and {now_again:.1f} us, and {before:.1f} and {before_again:.1f} with" in page


def test_the_page_has_the_times_of_sample_and_attend(page: str) -> None:
    def row(name: str, step: str, key: str, places: list[dict[str, Any]], **where: Any) -> str:
        times = [record_of(step, **where, **place)[key] for place in places]
        return table_row([name, *(f"{time:.0f}" if time >= 100 else f"{time:.1f}" for time in times)])

    sizes = [{"batch": batch, "vocab": vocab} for vocab in (32_000, 128_256) for batch in (1, 64)]
    calls = {"`sample`": "sample", "softmax and race": "race", "`sample`, greedy": "sample, greedy", "argmax": "argmax"}
    for name, call in calls.items():
        assert row(name, "sample", f"{call} replay_median_us", sizes) in page
    caches = [{"batch": batch, "queries": queries} for batch in (1, 8) for queries in (1, 6)]
    providers = {
        "`attend`": "spans",
        "compiled FlexAttention": "flex",
        "the package's under a mask": "grouped sdpa",
        'transformers\' "sdpa" under a mask': "sdpa",
    }
    for name, provider in providers.items():
        last = row("", "attention-16", "median_us", [{"batch": 16}], provider=provider).removeprefix("|  ")
        assert row(name, "attention", "median_us", caches, provider=provider).removesuffix("|\n") + last in page
