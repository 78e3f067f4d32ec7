"""The scripts for a GPU as far as a CPU can run them: steps and resuming, variants of tiles, the paper's metric."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_specops

FOLDER = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="an installed package has no benchmarks")

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by name, and set the number of threads."""
    threads, path = torch.get_num_threads(), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path[:] = path
    torch.set_num_threads(threads)


@pytest.fixture
def driver() -> ModuleType:
    return importlib.import_module("bench_gpu")


class Runs:
    """Stands in for `subprocess.run`: writes what a step would, and takes its time by a clock of its own."""

    def __init__(self, driver: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.names: list[str] = []
        self.now, self.seconds, self.returncode = 0.0, seconds, 0
        monkeypatch.setattr(driver.subprocess, "run", self)
        monkeypatch.setattr(driver.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")

    def __call__(self, command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        if timeout < self.seconds:
            self.now += timeout
            raise subprocess.TimeoutExpired(command, timeout)
        self.now += self.seconds
        self.names.append(Path(command[1]).name if "--out" in command else "tests")
        if "--out" in command:
            Path(command[command.index("--out") + 1]).write_text("{}")
        return subprocess.CompletedProcess(command, self.returncode, stdout="3 passed")


def test_steps_go_on_where_they_stopped(driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = Runs(driver, monkeypatch, seconds=200)
    call = ["--out-dir", str(tmp_path), "--tag", "today-h200", "--only", "tests", "verify-k", "tiles", "peers"]
    # Two steps and a half fit into 500 seconds; the third is cut off.
    assert driver.main([*call, "--minutes", str(500 / 60)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["today-h200-tests.txt", "today-h200-verify-k.json"]
    assert (tmp_path / "today-h200-tests.txt").read_text() == "3 passed"
    assert driver.main(call) == 0
    assert runs.names == ["tests", "bench_verify.py", "bench_tiles.py", "bench_peers.py"]
    assert driver.main(call) == 0
    assert len(runs.names) == 4


def test_nothing_is_timed_where_the_tests_fail(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = Runs(driver, monkeypatch, seconds=1)
    runs.returncode = 1
    with pytest.raises(RuntimeError, match="tests failed with exit code 1"):
        driver.main(["--out-dir", str(tmp_path)])
    assert runs.names == ["tests"]
    (written,) = tmp_path.iterdir()
    assert written.name.endswith("-h200-tests.unfinished")


def test_without_a_gpu_nothing_starts(driver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        driver.main([])
    assert "needs a CUDA device" in capsys.readouterr().err


def test_every_step_is_a_script_with_options_that_it_knows(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parsed by the script's own parser, which stops at the first option that it does not know."""
    for name, step in driver.STEPS.items():
        script, *arguments = step.split()
        assert driver.command_of(name, tmp_path / "out.json")[1] == str(FOLDER / script)
        module = importlib.import_module(Path(script).stem)
        for stop in ("make_inputs", "Cells"):
            if hasattr(module, stop):
                monkeypatch.setattr(module, stop, parsed)
        needs_gpu = script == "bench_tiles.py"
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=needs_gpu: has_gpu)
        monkeypatch.setattr(module, "copy_rate", lambda device: 1.0)
        device = [] if needs_gpu else ["--device", "cpu"]
        with pytest.raises(Parsed):
            module.main([*arguments, *device])


class Parsed(Exception):
    pass


def parsed(*arguments: Any, **options: Any) -> None:
    raise Parsed


def test_tiles_and_warps_that_a_thread_can_hold() -> None:
    tiles = importlib.import_module("bench_tiles")
    found = tiles.variants([1024, 16384], [2, 4, 16])
    assert list(found) == ["table", "1024, 2 warps", "1024, 4 warps", "16384, 4 warps", "16384, 16 warps"]
    assert found["table"] == (None, None) and found["1024, 2 warps"] == (1024, 2)
    launch = pytest.importorskip("torch_specops.kernels.launch")
    with tiles.with_warps(2):
        assert launch.num_warps(4096) == launch.stats_warps(4096) == 2
    assert launch.num_warps(4096) == 8 and launch.stats_warps(4096) == 4


def test_variants_of_tiles_are_checked_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    tiles, problems = (importlib.import_module(name) for name in ("bench_tiles", "problems"))

    def launcher(tile: int | None, wrong: int | None = None) -> Any:
        def verify(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, n = torch_specops.verify_exact(**problems.op_arguments("sampled", inputs))
            return (tokens.roll(1, 0), n) if tile == wrong else (tokens, n)

        return verify

    problem = problems.Problem("sampled", 3, 2, 200, "bfloat16")
    chosen = tiles.variants([1024, 2048], [4])
    monkeypatch.setattr(tiles, "launcher", lambda tile: launcher(tile, wrong=-1))
    records = tiles.run_problem(problem, chosen, CPU, rounds=2, roof=1e9)
    assert [record["variant"] for record in records] == list(chosen)
    assert records[0]["percent_of_copy"] == pytest.approx(problem.bytes() / records[0]["median_us"] * 1e6 / 1e9 * 100)
    monkeypatch.setattr(tiles, "launcher", lambda tile: launcher(tile, wrong=2048))
    with pytest.raises(RuntimeError, match="2048, 4 warps is wrong in rows"):
        tiles.run_problem(problem, chosen, CPU, rounds=2, roof=1e9)


def test_the_papers_metric_on_a_cpu(tmp_path: Path) -> None:
    kernels = importlib.import_module("paper_wagner_kernels")
    out, picture = tmp_path / "out.json", tmp_path / "new" / "out.png"
    size = ["--device", "cpu", "--models", "Qwen", "--vocab", "300", "--gammas", "2", "5", "--calls", "1"]
    found = kernels.main([*size, "--out", str(out), "--plot", str(picture)])
    methods = found["figure 3/Qwen"]
    assert list(methods) == ["transformers", "exact", "exact, one uniform number", "sigmoid"]
    for own in methods.values():
        assert set(own) == {"2", "5"}
        assert all(one["device_ms"] > 0 and one["call_ms"] > 0 and one["launches"] is None for one in own.values())
    # The same seeds: "exact" accepts what transformers' function does.
    assert [one["accepted"] for one in methods["exact"].values()] == [
        one["accepted"] for one in methods["transformers"].values()
    ]
    rows = {method: size for _, method, size, _ in kernels.bandwidths(found, {"Qwen": 300})}
    assert rows["exact"] == 11 * 300 * 4 and rows["sigmoid"] == 2 * 300 * 4
    assert all(peak > 0 for own in found["figures 4, 5/Qwen"].values() for peak in own.values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Measured once.
    before = out.read_text()
    kernels.main([*size, "--out", str(out)])
    assert out.read_text() == before
    assert {"device", "versions", "commit"} <= set(json.loads(before)["environments"][0])


@pytest.fixture(scope="module")
def page() -> str:
    path = FOLDER.parent / "docs" / "performance.md"
    return path.read_text()


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def test_the_page_has_the_registers_of_the_results(page: str) -> None:
    builds: dict[str, list[dict[str, Any]]] = {}
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        result = json.loads((FOLDER / "results" / f"2026-11-22-kernel-resources-{target}.json").read_text())
        assert f"with Triton\n{result['triton']} " in page
        count = len(result["builds"])
        assert (
            f"Of all {count} builds for sm_90" if target == "sm_90" else f"a kernel, {count}, for each other"
        ) in page
        builds[target] = result["builds"]

    def span(values: list[int]) -> str:
        return f"{min(values)} to {max(values)}"

    kernels = dict.fromkeys(build["kernel"] for build in builds["sm_90"])
    every = [build for target in builds for build in builds[target]]
    spilled = sum(build["spill_bytes"] > 0 for build in every)
    assert f"In {spilled} of these {len(every)} builds" in page
    for kernel in kernels:
        own = {target: [b for b in every if b["kernel"] == kernel] for target, every in builds.items()}
        nvidia = own["sm_90"]
        cells = [kernel, str(len(nvidia)), *(span([b["registers"] for b in group]) for group in own.values())]
        cells.append(str(max(b["spill_bytes"] for group in own.values() for b in group)))
        cells += [span([b[name] for b in nvidia]) for name in ("wide_loads", "narrow_loads")]
        assert table_row(cells) in page
    assert len(kernels) == 14


def test_the_page_has_the_bytes_of_the_model(page: str) -> None:
    problem = importlib.import_module("problems").Problem
    for batch in (1, 8, 64, 256):
        cells = [problem("sampled", batch, 5, 128_256, "bfloat16", rate) for rate in (0.3, 0.6, 0.9, 1.0)]
        needed = [f"{cell.needed_bytes() / 1e6:.1f}" for cell in cells]
        every = [f"{cells[0].bytes(with_lse) / 1e6:.1f}" for with_lse in (False, True)]
        assert table_row([str(batch), *needed, *every]) in page


def test_the_page_has_the_memory_of_the_launcher(page: str) -> None:
    """What `verify_exact` allocates: partials, masses, state, output tokens and counts."""
    launch = pytest.importorskip("torch_specops.kernels.launch")
    for batch, share in ((64, "0.11 %"), (1, "0.49 %")):
        logits = torch.empty(batch, 6, 128_256, dtype=torch.bfloat16, device="meta")
        tiles = launch.num_tiles(logits, launch.tile_size(128_256, batch * 11))
        sizes = [batch * 11 * tiles * 8, batch * tiles * 8, batch * 16, batch * 6 * 8, batch * 8]
        rounded = sum(-(-size // 512) * 512 for size in sizes)
        assert f"{sum(sizes):,}" in page
        assert share == f"{100 * rounded / (batch * 11 * 128_256 * 2):.2f} %" and share in page
    assert f"{rounded:,}" in page


def test_the_page_has_the_instructions_of_the_kernel(page: str) -> None:
    triton = pytest.importorskip("triton")
    script = importlib.import_module("instructions")
    # Two of the four rows, as each takes seconds to compile.
    for build, schedulers in ((script.chosen_builds()[i], 132 * 4 * 32 * 1.98e-3) for i in (0, 2)):
        found = script.measure(build, "sm_90")
        low, high, size = found["shortest"], found["longest"], found["bytes"]
        rates = [f"{schedulers * size / n:.1f}" for n in (high, low)]
        cells = [build.config, f"{low} to {high}", str(size), f"{low / size:.1f} to {high / size:.1f}"]
        row = table_row([*cells, " to ".join(dict.fromkeys(rates))])
        # Another Triton makes other code; the page says of which it speaks.
        assert row in page or not triton.__version__.startswith("3.7.1")


def test_paths_through_machine_code() -> None:
    script = importlib.import_module("instructions")
    sass = """
        /*0000*/                   S2R R0, SR_TID.X ;      /* 0x0 */
        /*0010*/              @P0  BRA 0x50 ;              /* 0x0 */
        /*0020*/              @P1  LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0030*/                   MUFU.EX2 R1, R4 ;
        /*0040*/                   EXIT ;
        /*0050*/                   LDG.E.128 R4, desc[UR6][R2.64] ;
        /*0060*/              @!P2 BRA 0x80 ;
        /*0070*/              @P3  LDG.E.U16 R4, desc[UR6][R2.64] ;
        /*0080*/                   MUFU.EX2 R1, R4 ;
        /*0090*/              @P4  BRA 0xb0 ;
        /*00a0*/                   CALL.REL.NOINC 0x200 ;
        /*00b0*/              @P5  EXIT ;
        /*00c0*/                   STG.E desc[UR6][R2.64], R1 ;
        /*00d0*/                   EXIT ;
        /*00e0*/                   BRA 0xe0;
    """
    # One row's load without the narrow ones behind it: the first 5, or 7 and 9 behind the jump.
    assert script.common_paths(script.instructions(sass), wide_loads=1, entries=1) == [5, 7, 9]
    assert script.common_paths(script.instructions(sass), wide_loads=2, entries=1) == []


def test_nothing_on_the_page_is_called_measured(page: str) -> None:
    """Every goal has a step that decides it, and no figure in the column of measurements without a result file."""
    steps = importlib.import_module("bench_gpu").STEPS
    goals = page.split("## Goals")[1].split("## Bytes")[0]
    rows = [line.strip("|").split(" | ") for line in goals.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 8
    measured = list((FOLDER / "results").glob("*-h200-*.json"))
    for _, _, result, step in rows:
        assert step.strip().strip("`") in steps
        assert measured or result == "not measured"
