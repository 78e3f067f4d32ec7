"""The scripts for a GPU as far as a CPU can run them: steps and resuming, tools, tiles, the paper's metric."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script

pytestmark = needs_benchmarks

TOOLS = Path(__file__).parent / "gpu_tools"
CPU = torch.device("cpu")


@pytest.fixture
def driver() -> ModuleType:
    return script("bench_gpu")


SCRIPTS = {
    "good.py": "import sys, json; json.dump({'records': [{}]}, open(sys.argv[-1], 'w')); print('fine')",
    "bad.py": "print('first'); raise SystemExit('the reason')",
    "hanging.py": """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
json.dump({'records': [{}], 'child': child.pid}, open(sys.argv[-1], 'w'))
print('begun', flush=True)
time.sleep(60)
""",
    "killed.py": "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "environment.py": "import os; print(os.environ['HF_HUB_OFFLINE'], os.environ['PYTHONPATH'])",
}


@pytest.fixture
def steps(driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """A plan of scripts that end in every way."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)

    def step(name: str, call: int, seconds: int = 20) -> Any:
        return driver.Step(name, call, seconds, f"{name}.py", "")

    plan = [step("hanging", 1, 1), step("bad", 1), step("killed", 1), step("good", 1), step("environment", 2)]
    monkeypatch.setattr(driver, "STEPS", plan)
    monkeypatch.setattr(driver, "HERE", folder)
    return plan


def packed(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}


def test_a_step_that_fails_hangs_or_is_killed_stops_no_other(
    driver: ModuleType, steps: list[Any], tmp_path: Path
) -> None:
    runner = driver.Runner(tmp_path / "out")
    (tmp_path / "out" / "device.json").write_text('{"environment": {"device": "a GPU"}}')
    assert driver.run_calls(runner, [1], minutes=5) == []
    records = {step.name: runner.record_of(step) for step in steps if step.call == 1}
    assert {name: (record["outcome"], record["exit_code"]) for name, record in records.items()} == {
        "hanging": ("out of time", None),
        "bad": ("failed", 1),
        "killed": ("killed by signal 9", -9),
        "good": ("done", 0),
    }
    assert records["bad"]["tail"] == ["first", "the reason"] and records["killed"]["tail"] == ["last words"]
    assert 1 <= records["hanging"]["seconds"] < 10 and records["hanging"]["limit_seconds"] == 1
    assert all(record["environment"] == {"device": "a GPU"} for record in records.values())
    # What was measured before the end is kept, and nothing that a step started outlives it.
    measured = json.loads((tmp_path / "out" / "hanging.json").read_text())
    assert measured["records"] == [{}]
    assert not is_running(measured["child"])
    # Everything is in one archive.
    names = {f"{name}.{end}" for name in records for end in ("log", "step.json")}
    assert set(packed(tmp_path / "out.tar.gz")) == {
        f"out/{name}" for name in names | {"device.json", "good.json", "hanging.json"}
    }
    assert packed(tmp_path / "out.tar.gz")["out/hanging.log"] == b"begun\n"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_same_command_goes_on_where_it_stopped(
    driver: ModuleType, steps: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begun: list[str] = []
    run = driver.Runner.run
    monkeypatch.setattr(driver.Runner, "run", lambda runner, step: begun.append(step.name) or run(runner, step))
    del steps[0]
    call = ["--out-dir", str(tmp_path / "out"), "--commit", "f00"]
    assert driver.main([*call, "--call", "1"]) == 0
    assert begun == ["bad", "killed", "good"]
    # On another machine, with the archive of this one.
    elsewhere = ["--out-dir", str(tmp_path / "elsewhere"), "--earlier", str(tmp_path / "out.tar.gz")]
    elsewhere += ["--archive", str(tmp_path / "all.tar.gz")]
    assert driver.main(elsewhere) == 0
    assert begun == ["bad", "killed", "good", "environment"]
    offline, paths = (tmp_path / "elsewhere" / "environment.log").read_text().split()
    assert offline == "1" and str(BENCHMARKS.parent) in paths.split(":")
    assert "elsewhere/good.step.json" in packed(tmp_path / "all.tar.gz")
    (tmp_path / "elsewhere" / "good.step.json").unlink()
    assert driver.main(elsewhere) == 0
    assert begun[4:] == ["good"]


def test_a_step_begins_if_its_limit_fits_into_the_time_left(
    driver: ModuleType, steps: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, other = steps[3], driver.Step("other", driver.IF_TIME_IS_LEFT, 5, "good.py", "")
    steps[:] = [driver.Step("long", 1, 700, "good.py", ""), good, other]
    assert driver.run_calls(driver.Runner(tmp_path / "out"), [1], minutes=1) == ["long"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "long: not begun, may take 700 s of 60"
    # What belongs to no call comes last.
    assert [line.split(":")[0] for line in said if ": done" in line] == ["good", "other"]


def test_the_archive_keeps_to_its_limit(driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = driver.Runner(tmp_path / "out")
    monkeypatch.setattr(driver, "MAX_PACKED", 100_000)
    (runner.folder / "small.json").write_text("{}")
    (runner.folder / "large.json").write_bytes(os.urandom(90_000))
    (runner.folder / "larger.json").write_bytes(os.urandom(95_000))
    (runner.folder / "long.log").write_text("first\n" + "line\n" * 200_000 + "last\n")
    runner.pack()
    assert runner.packed.stat().st_size <= 100_000
    found = packed(runner.packed)
    assert set(found) == {"out/small.json", "out/large.json", "out/left_out.txt"}
    assert set(found["out/left_out.txt"].decode().split()) == {"larger.json", "long.log"}
    (runner.folder / "larger.json").unlink()
    runner.pack()
    log = packed(runner.packed)["out/long.log"]
    assert log.startswith(b"first") and log.endswith(b"last\n") and len(log) < driver.MAX_LOG + 100


def test_the_plan_fits_into_its_calls(driver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--plan"]) == 0
    said = capsys.readouterr().out
    for call in driver.CALLS:
        limits = [step.seconds for step in driver.STEPS if step.call == call]
        assert 400 < sum(limits) <= 9 * 60
        assert f"call {call}: {sum(limits)} of 540 s" in said
    names = [step.name for step in driver.STEPS]
    assert len(set(names)) == len(names) and all(f"  {name} " in said for name in names)
    # What is compiled first is not compiled within the time of the peers.
    assert names.index("peers-build") < names.index("peers") and names[0] == "device"
    # Steps that are not run in a rehearsal run the lines of another step.
    rehearsed = {step.command.split()[0] for step in driver.STEPS if step.tiny is not None}
    assert {step.command.split()[0] for step in driver.STEPS} == rehearsed


class Parsed(Exception):
    pass


def test_every_step_is_a_script_with_options_that_it_knows(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Parsed by the script's own parser, at its size and at that of a rehearsal."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(*arguments: Any) -> None:
        parse(*arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for rehearsed in (False, True):
        runner = driver.Runner(tmp_path / "out", rehearsed)
        for step in driver.STEPS:
            command = runner.command(step)
            if "pytest" in command:
                continue
            at = command.index(str(BENCHMARKS / step.command.split()[0]))
            with pytest.raises(Parsed):
                script(Path(command[at]).stem).main(command[at + 1 :])


def test_a_rehearsal_says_what_was_left_out(
    driver: ModuleType, steps: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, bad = steps[3], steps[1]
    (driver.HERE / "refused.py").write_text(
        "import sys, json; records = [{'refused': 'no counters'}, {'refused': 'a reason', 'provider': 'flex'}];"
        "json.dump({'records': records, 'skipped': {'a peer': 'not there'}}, open(sys.argv[-1], 'w'))"
    )
    steps[:] = [good, bad, driver.Step("refused", 1, 9, "refused.py", ""), driver.Step("same", 1, 9, "good.py", None)]
    runner = driver.Runner(tmp_path / "out", rehearsed=True)
    runner.command = lambda step: [
        *(sys.executable, str(driver.HERE / step.command)),
        *("--out", str(runner.folder / f"{step.name}.json")),
    ]
    assert driver.rehearse(runner) == 2
    written = json.loads((runner.folder / "rehearsal.json").read_text())
    outcomes = {name: step["outcome"] for name, step in written["steps"].items()}
    assert outcomes == {"good": "done", "bad": "failed", "refused": "done"}
    assert written["steps"]["refused"]["left_out"] == ["a peer: not there", "no counters"]
    said = capsys.readouterr().out
    assert "left out: no counters" in said and set(written["not_executed"]) == set(driver.NOT_REHEARSED)
    assert all(f"not executed: {name}" in said for name in driver.NOT_REHEARSED)


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_counters_and_their_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ncu, problems = script("ncu"), script("problems")
    problem = problems.Problem("sampled", 1, 2, 40, "bfloat16", 0.6)
    monkeypatch.setattr(ncu, "process_of", lambda script: [sys.executable, "-c", "pass"])
    monkeypatch.setenv("PATH", f"{TOOLS}:{os.environ['PATH']}")
    assert ncu.bytes_by_counter(problem, True) == {"dram_read": 1_537_000, "dram_write": 64, "l2": 1_600_000}
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool(tmp_path, "ncu", "echo '==ERROR== no permission'; exit 1")
    with pytest.raises(RuntimeError, match="ncu failed with 1: ==ERROR== no permission"):
        ncu.bytes_by_counter(problem, True)
    tool(tmp_path, "ncu", "sleep 9")
    monkeypatch.setattr(ncu, "LIMIT_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match=r"took more than 0\.1 seconds"):
        ncu.bytes_by_counter(problem, True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="not on PATH"):
        ncu.bytes_by_counter(problem, True)


def test_findings_of_the_sanitizer_and_its_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sanitize = script("sanitize")
    monkeypatch.setattr(sanitize, "process_of", lambda script: [sys.executable, "-c", "pass"])
    monkeypatch.setenv("PATH", f"{TOOLS}:{os.environ['PATH']}")
    for name in ("memcheck", "racecheck"):
        assert sanitize.sanitized(name, 10, [])["errors"] == 0
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool(tmp_path, "compute-sanitizer", "echo '========= ERROR SUMMARY: 3 errors'")
    assert sanitize.sanitized("memcheck", 10, [])["errors"] == 3
    refused = {
        "echo 'Device not supported'; exit 1": "no summary",
        "echo '========= ERROR SUMMARY: 0 errors'; exit 1": "no summary",
        "echo begun; exec sleep 9": "more than 0.5 seconds",
    }
    for text, reason in refused.items():
        tool(tmp_path, "compute-sanitizer", text)
        found = sanitize.sanitized("memcheck", 0.5, [])
        assert reason in found["refused"] and "errors" not in found
    assert found["output"] == ["begun"]
    monkeypatch.setenv("PATH", "")
    assert "not on PATH" in sanitize.sanitized("memcheck", 10, [])["refused"]


def test_attention_on_a_cpu(tmp_path: Path) -> None:
    """Every way gives the attention of float32, FlexAttention, which the stand-in for CUDA cannot run, too."""
    size = ["--batch", "2", "--slots", "128", "--queries", "3", "--layers", "1", "--rounds", "2"]
    with warnings.catch_warnings():
        # FlexAttention says that it is not compiled.
        warnings.simplefilter("ignore")
        records = script("bench_attention").main([*size, "--device", "cpu"])
    assert [record["provider"] for record in records] == ["grouped sdpa", "sdpa", "flex", "flex, block mask"]
    assert all(record["max_error"] < 2e-2 for record in records[:3])


def test_the_papers_metric_on_a_cpu(tmp_path: Path) -> None:
    kernels, out = script("paper_wagner_kernels"), tmp_path / "out.json"
    size = ["--device", "cpu", "--models", "Qwen", "--vocab", "300", "--gammas", "2", "5", "--calls", "1"]
    found = kernels.main([*size, "--out", str(out)])
    methods = found["figure 3/Qwen"]
    assert list(methods) == ["transformers", "exact", "exact, one uniform number", "sigmoid"]
    for own in methods.values():
        assert set(own) == {"2", "5"}
        for one in own.values():
            assert one["device_ms"] > 0 and one["call_ms"] > 0 and one["launches"] is None
            assert one["gb_per_s"] == pytest.approx(one["bytes"] / one["device_ms"] / 1e6)
    # The same seeds: "exact" accepts what transformers' function does.
    assert [own["accepted"] for own in methods["exact"].values()] == [
        own["accepted"] for own in methods["transformers"].values()
    ]
    assert methods["exact"]["5"]["bytes"] == 11 * 300 * 4 and methods["sigmoid"]["5"]["bytes"] == 2 * 300 * 4
    assert all(peak > 0 for own in found["figures 4, 5/Qwen"].values() for peak in own.values())
    # Measured once.
    before = out.read_text()
    kernels.main([*size, "--out", str(out)])
    assert out.read_text() == before

    def call() -> None:
        for _ in range(3):
            torch.zeros(100_000).add_(1)
        first = torch.zeros(200_000)
        torch.ones(100_000)
        del first

    # The peak counts what was held at a time.
    assert 1_200_000 <= script("timing").peak_bytes(call) < 1_210_000
