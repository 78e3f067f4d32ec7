"""The driver of the measurements on a GPU, as far as a CPU can run it: steps, their ends and resuming."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script

pytestmark = needs_benchmarks


@pytest.fixture
def driver() -> Iterator[ModuleType]:
    before = signal.getsignal(signal.SIGTERM)
    yield script("bench_gpu")
    # Its `main` has a handler of its own.
    signal.signal(signal.SIGTERM, before)


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


@pytest.mark.slow
def test_a_failing_step_stops_no_other(driver: ModuleType, steps: list[Any], tmp_path: Path) -> None:
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
    child = Path(f"/proc/{measured['child']}/stat")
    assert not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    # Behind it stands where it was interrupted.
    assert (tmp_path / "out" / "hanging.log").read_text().startswith("begun\n")


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
    assert driver.main(call) == 0
    assert begun == ["bad", "killed", "good", "environment"]
    offline, paths = (tmp_path / "out" / "environment.log").read_text().split()
    assert offline == "1" and str(BENCHMARKS.parent) in paths.split(":")


def test_steps_begin_if_time_is_left(
    driver: ModuleType, steps: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    steps[:] = [driver.Step("long", 1, 700, "good.py", ""), steps[3]]
    assert driver.run_calls(driver.Runner(tmp_path / "out"), [1], minutes=1) == ["long"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "long: not begun, may take 700 s of 60"
    assert [line.split(":")[0] for line in said if ": done" in line] == ["good"]


def test_the_plan_fits_into_its_calls(driver: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["--plan"]) == 0
    said = capsys.readouterr().out
    for call in driver.CALLS:
        limits = [step.seconds for step in driver.STEPS if step.call == call]
        assert 400 < sum(limits) <= 9 * 60
        assert f"call {call}: {sum(limits)} of 540 s" in said
    names = [step.name for step in driver.STEPS]
    assert len(set(names)) == len(names) and all(f"  {name} " in said for name in names)
    assert names[0] == "device"
    # Steps that are not run in a rehearsal run the lines of another step.
    rehearsed = {step.command.split()[0] for step in driver.STEPS if step.tiny is not None}
    assert {step.command.split()[0] for step in driver.STEPS} - {"memcheck", "racecheck"} == rehearsed


def test_every_step_has_known_options(driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parsed by the script's own parser, at its size and at that of a rehearsal."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(*arguments: Any) -> None:
        parse(*arguments)
        raise InterruptedError("parsed")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for rehearsed in (False, True):
        runner = driver.Runner(tmp_path / "out", rehearsed)
        for step in driver.STEPS:
            command = runner.command(step)
            if "pytest" in command:
                tool = step.command.split()[0]
                assert tool == "pytest" or command[2:5] == ["compute-sanitizer", "--tool", tool]
                continue
            at = command.index(str(BENCHMARKS / step.command.split()[0]))
            with pytest.raises(InterruptedError, match="parsed"):
                script(Path(command[at]).stem).main(command[at + 1 :])


def test_a_rehearsal_fails_if_something_is_left_out(driver: ModuleType, steps: list[Any], tmp_path: Path) -> None:
    (driver.HERE / "skipping.py").write_text(
        "import sys, json; json.dump({'records': [], 'skipped': {'a peer': 'not there'}}, open(sys.argv[-1], 'w'))"
    )
    skipping, no = driver.Step("skipping", 1, 9, "skipping.py", ""), driver.Step("no", 1, 9, "", None)
    steps[:] = [steps[3], steps[1], skipping, no]
    runner = driver.Runner(tmp_path / "out", rehearsed=True)
    runner.command = lambda step: [
        *(sys.executable, str(driver.HERE / step.command)),
        *("--out", str(runner.folder / f"{step.name}.json")),
    ]
    assert driver.rehearse(runner) == 2
    outcomes = {step.name: runner.record_of(step)["outcome"] for step in steps[:3]}
    assert outcomes == {"good": "done", "bad": "failed", "skipping": "done"}


def test_the_slowest_kernels_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = script("timing")
    calls: list[None] = []

    def profiled(call: Callable[[], object], device: torch.device) -> list[Any]:
        before = len(calls)
        call()
        us = {"first": 1.0, "often": 2.0, "slow": 9.0}
        once = [
            SimpleNamespace(name=name, self_device_time_total=us[name]) for name in ("first", "often", "slow", "often")
        ]
        return once * (len(calls) - before)

    monkeypatch.setattr(timing, "_profiled", profiled)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "SLOWEST", 2)
    call, device = lambda: calls.append(None), torch.device("cuda")
    kernels = [{"name": "slow", "launches": 1, "us": 9}, {"name": "often", "launches": 2, "us": 4}]
    assert timing.slowest_kernels(call, device) == {"launches": 4, "device_us": 14, "kernels": kernels}
    assert timing.device_work(call, device) == {"launches": 4, "device_ms": pytest.approx(0.014), "kernels": kernels}


def test_the_peak_is_what_was_held_at_a_time() -> None:
    def call() -> None:
        for _ in range(3):
            torch.zeros(100_000).add_(1)
        first = torch.zeros(200_000)
        torch.ones(100_000)
        del first

    assert 1_200_000 <= script("timing").peak_bytes(call) < 1_210_000
