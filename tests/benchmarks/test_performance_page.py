"""docs/performance.md says what the result files, the bytes model and the launcher say; docs/gpu.md repeats it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script

import torch_specops
from torch_specops.ops.uniforms import verification_uniforms

pytestmark = needs_benchmarks

RESULTS = BENCHMARKS / "results"
PAGE = BENCHMARKS.parent / "docs" / "performance.md"


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_the_page_for_users_has_no_other_figures(page: str) -> None:
    text, _ = (PAGE.parent / "gpu.md").read_text().split("## Which kernels")
    answers = [line for line in text.splitlines() if line.startswith(("| ", "- "))]
    figures = set(re.findall(r"\d[\d,.]*\d", " ".join(answers)))
    assert len(figures) > 20 and sorted(figures - set(re.findall(r"\d[\d,.]*\d", page))) == []


def test_gpu_page_says_which_kernels_ran() -> None:
    _, text = (PAGE.parent / "gpu.md").read_text().split("## Which kernels")
    rows = re.findall(r"^\| [^|:]*: ([^|]*) \|", text, re.MULTILINE)
    sources = Path(torch_specops.__file__).parent.glob("ops/cuda/**/*.py")
    kernels = [name for path in sources for name in re.findall(r"^def (\w+)_kernel\(", path.read_text(), re.MULTILINE)]
    assert Counter(name for row in rows for name in row.split(", ")) == Counter(kernels)


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


def result_of(name: str) -> Any:
    (path,) = RESULTS.glob(f"*-h100-{name}.json")
    return json.loads(path.read_text())


def record_of(name: str, **where: Any) -> dict[str, Any]:
    (found,) = (each for each in result_of(name)["records"] if where.items() <= each.items())
    return found


def measured_cell(name: str, provider: str = "specops eager", mode: str = "replay", **where: Any) -> dict[str, Any]:
    return record_of(name, provider=provider, mode=mode, **where)


def microseconds(name: str, provider: str = "specops eager", mode: str = "replay", **where: Any) -> float:
    """The median of a cell; in the mode "kernels" the sum of a call's kernels."""
    if mode == "kernels":
        return 1e3 * float(measured_cell(name, provider, "call", **where)["device_ms"])
    return 1e3 * float(measured_cell(name, provider, mode, **where)["median_ms"])


def us(time: float) -> str:
    return f"{time:.0f}" if time >= 100 else f"{time:.1f}"


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
        ("softmax formulation, eager", "softmax eager"),
        ("transformers, its kernels", "transformers"),
    ],
)
def test_the_page_has_the_times_of_the_peers(page: str, name: str, provider: str) -> None:
    mode = "kernels" if provider == "transformers" else "replay"
    cells = [us(microseconds("peers", provider, mode, **cell)) for cell in GRID]
    assert table_row([name, *cells])[:-2] in page


def test_performance_page_has_the_compiled_softmax(page: str) -> None:
    alone, batch = (measured_cell("compiled", "softmax compiled", batch=size, acceptance=0.6) for size in (1, 64))
    cells = [us(1e3 * alone["median_ms"]), "", "", "", us(1e3 * batch["median_ms"]), "", "", ""]
    row = table_row(["softmax formulation, compiled", *cells, f"{batch['peak_bytes'] / 1e6:.0f}"])
    assert row.replace("|  ", "| ") in page


def test_the_page_has_the_measurements_of_the_goals(page: str) -> None:
    """Every goal has a step that decides it; what is said to be measured is what the result files have."""
    steps = [step.name for step in script("bench_gpu").STEPS]
    goals = page.split("## Goals")[1].split("## Beside")[0]
    rows = [line.strip("| ").split(" | ") for line in goals.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 9
    for *_, decided_by in rows:
        for step in decided_by.replace("`", "").split(", "):
            assert step in steps and (RESULTS / f"2026-11-26-h100-{step}.json").exists()
    measured = [row[2] for row in rows]

    ours = [microseconds("peers", **cell) for cell in GRID]
    low, high = (microseconds("acceptance", batch=1, acceptance=0.9), ours[0])
    small, large = (microseconds("vocabularies", batch=1, vocab=vocab) for vocab in (32_000, 256_000))
    assert measured[0] == f"{small:.1f} us for 32k, {low:.1f} to {high:.1f} for 128k"
    assert measured[1] == f"{large:.1f} us"

    def shares(name: str, batch: int, provider: str = "specops eager") -> list[str]:
        files = {1.0: "peers", 0.6: "peers", 0.3: "acceptance"}
        cells = (measured_cell(file, provider, batch=batch, acceptance=rate) for rate, file in files.items())
        return [f"{cell[name]:.0f}" for cell in cells]

    accepted, some, _ = shares("needed_percent_of_copy", 64)
    with_lse = "with `draft_lse` {} and {} %".format(*shares("needed_percent_of_copy", 64, "specops, lse eager")[:2])
    without = f"{accepted} % with all accepted ({ours[5]:.1f} us), {some} % at 0.6 ({ours[4]:.1f} us)"
    assert measured[2] == f"{without}; {with_lse}"
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
    assert "without our random numbers met in two of eight cells, with `draft_lse` in seven" in rows[5][1]
    assert "with them in one and four, an estimate" in rows[5][1]
    slow = ratios("transformers", "kernels")
    assert measured[6] == f"{slow[0]:.1f} and {slow[1]:.1f}x at B = 1, {min(slow[2:]):.0f}x and more from B = 8 on"
    top_k, min_p, top_p = (
        microseconds("filters", kind=kind, batch=64) - ours[4] for kind in ("top-k", "min-p", "top-p")
    )
    assert measured[7] == f"each alone: k = 50 {top_k:.0f} us, min-p {min_p:.0f}, top-p = 0.9 {top_p:.0f}; 2 launches"
    filters = [
        measured_cell("filters", kind=kind, batch=size) for kind in ("top-k", "min-p", "top-p") for size in (1, 64)
    ]
    used = [100 * each["peak_bytes"] / each["bytes"] for each in filters]
    most = max(each["peak_bytes"] for each in filters) / 1e6
    assert f"with a filter {min(used):.0f} to {max(used):.0f} %, at B = 64 up to {most:.0f} MB" in measured[8]
    assert f"takes {min(used):.0f} to {max(used):.0f} % of the memory" in (PAGE.parent / "design.md").read_text()


def test_performance_page_has_costs_of_random_numbers(page: str) -> None:
    """By the launches of a step, at an estimated time of each."""
    launch_us = 2
    assert f"At {launch_us} us a launch, an estimate" in page

    def launches(batch: int) -> int:
        seeds = torch.arange(batch)
        return 1 + sum(not part.is_contiguous() for part in verification_uniforms(seeds, seeds, 5))

    assert [launches(batch) for batch in (1, 8, 64, 256)] == [1, 3, 3, 3]

    def met(own: str) -> int:
        times = [(microseconds("peers", **cell, provider=own), cell) for cell in GRID]
        charged = [(time + launch_us * launches(int(cell["batch"])), cell) for time, cell in times]
        return sum(microseconds("peers", NO_COPY, **cell) >= 1.5 * time for time, cell in charged)

    assert (met("specops eager"), met("specops, lse eager")) == (1, 4)
    assert "as the best peer in one cell of eight, and with `draft_lse` in four" in page


def test_the_page_has_every_eager_call(page: str) -> None:
    filters = ("top-k", "top-p", "min-p")
    calls: list[dict[str, Any]] = []
    for path in RESULTS.glob("*-h100-*.json"):
        calls += (each for each in json.loads(path.read_text()).get("records", ()) if each.get("mode") == "call")

    def span(found: list[dict[str, Any]], key: str = "median_ms") -> str:
        times = [1e3 * each[key] for each in found]
        return f"{min(times):.0f} to {max(times):.0f}"

    ours = [each for each in calls if each["provider"] in ("specops eager", "specops, lse eager")]
    plain = [each for each in ours if each["batch"] in (1, 8) and each["kind"] not in filters]
    prose = " ".join(page.split())
    assert f"take {span(plain)} us at B = 1 and 8" in prose and f"their kernels {span(plain, 'device_ms')};" in prose
    filtered = [each for each in ours if each["batch"] == 1 and each["kind"] in filters]
    assert f"with a filter {span(filtered)} at B = 1" in prose

    def of_peers(provider: str) -> str:
        cells = (measured_cell("peers", provider, "call", **cell) for cell in GRID if cell["batch"] in (1, 8))
        return span(list(cells))

    assert f"ours took {of_peers('specops eager')} us, and with `draft_lse` {of_peers('specops, lse eager')}." in prose
    assert f"vLLM's took {of_peers('vLLM')}, and {of_peers(NO_COPY)} without the copy" in prose


def test_performance_page_has_forwards_beside_reading_weights(page: str) -> None:
    def least_ms(name: str) -> float:
        """One forward of the target and five of the draft, each without its embedding, of which few rows are read."""
        result = result_of(name)
        embeddings = [result["settings"]["vocab"] * hidden_size * 2e-9 for hidden_size in (4096, 2048)]
        target, draft = (whole - part for whole, part in zip(result["weights_gb"], embeddings, strict=True))
        read = target + result["settings"]["num_draft_tokens"] * draft
        return float(1e3 * read / result["environment"]["copy_gb_per_s"])

    def share(name: str, batch: int) -> str:
        return f"{100 * least_ms(name) / record_of(name, batch=batch)['forwards_median_ms']:.0f}"

    compiled = record_of("loop-compiled", batch=1)["forwards_median_ms"]
    assert f"take {compiled:.1f} ms compiled" in page
    least, part = least_ms("loop-compiled"), share("loop-compiled", 1)
    assert f"Reading their weights takes {least:.1f} ms at the copy rate, which is {part} %" in page
    captured = (share("loop", 1), share("loop", 8), share("loop-16", 16))
    assert "without Inductor it is {}, {} and {} % at B = 1, 8 and 16".format(*captured) in page


def test_the_page_has_the_search_of_top_p(page: str) -> None:
    build = {"chunk": 2048, "searched": 1024, "warps": 8, "dtype": "bfloat16", "filter": "top_p.9", "batch": 64}
    records = [each for each in result_of("search")["records"] if build.items() <= each.items()]

    def search_us(scale: int) -> float:
        first, *others = (each["replay_us"] for each in records if each["logits_scale"] == scale)
        assert all(abs(other - first) < 0.5 for other in others)
        return float(first)

    assert f"1250 to {search_us(3):.0f} at B = 64" in page
    # Measured in the same run.
    copy_rate = result_of("gumbel")["environment"]["copy_gb_per_s"]
    read_us = script("problems").Problem("top-p", 64, 5, 128_256, "bfloat16").bytes() / copy_rate * 1e-3
    assert f"takes {search_us(8):.0f} us at B = 64, the time of {search_us(8) / read_us:.1f} reads" in page


def test_performance_page_has_other_dtypes_and_ops(page: str) -> None:
    def cells(name: str, provider: str, *batches: int, **where: Any) -> list[str]:
        return [us(microseconds(name, provider, batch=batch, acceptance=0.6, **where)) for batch in batches]

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
    newer = " and ".join(cells("compiled", "specops eager", 1, 64))
    assert f"The kernels of e93f517 took as long: {newer} us" in page
    turns = ("one-hot-1-before", "one-hot-2-now", "one-hot-3-before", "one-hot-4-now")
    before, now, before_again, now_again = (microseconds(step, kind="one-hot", batch=64) for step in turns)
    assert f"took {now:.1f} and {now_again:.1f} us, and {before:.1f} and {before_again:.1f} with" in page


def test_performance_page_has_sample_and_attend(page: str) -> None:
    def row(name: str, step: str, key: str, places: list[dict[str, Any]], **where: Any) -> str:
        return table_row([name, *(us(record_of(step, **where, **place)[key]) for place in places)])

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
