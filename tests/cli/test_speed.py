"""What the demo says of speed, on a clock that only the target's forwards advance: this machine may be busy."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
from tiny_cli import demo, row, run
from typer.testing import Result

from torch_specops import cli
from torch_specops.cli import loading
from torch_specops.cli.speed import Speeds, take_turns, use_fast_threads
from torch_specops.hf import TransformersModel

# Seconds of a forward: from the seconds that have passed and the number of tokens.
Cost = Callable[[float, int], float]


@pytest.fixture
def set_cost(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cost], None]:
    """Starts a clock at 0 on which a forward takes its cost. torch seems to have two threads."""
    forward = TransformersModel.forward
    num_threads = 2

    def set_num_threads(count: int) -> None:
        nonlocal num_threads
        num_threads = count

    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)

    def set_cost(cost: Cost) -> None:
        now = 0.0

        def timed(self: TransformersModel, tokens: torch.Tensor, *arguments: object) -> torch.Tensor:
            nonlocal now
            now += cost(now, tokens.shape[1])
            return forward(self, tokens, *arguments)

        monkeypatch.setattr(TransformersModel, "forward", timed)
        monkeypatch.setattr(time, "perf_counter", lambda: now)

    return set_cost


def test_speed_verdict_needs_all_pairs() -> None:
    for with_draft, without_draft, verdict in (
        ([1.0, 2.0, 1.0], [2.0, 3.0, 2.5], "2.00 times as fast with the draft (1.50 to 2.50 in 3 pairs of runs)"),
        ([2.0, 4.0], [1.0, 3.0], "slower with the draft, 0.50 times as fast (0.50 to 0.75 in 2 pairs of runs)"),
        ([1.0, 1.0], [0.9, 1.1], "about as fast with the draft as without it (0.90 to 1.10 in 2 pairs of runs)"),
        # Of all pairs but one.
        ([10.0, 1.0, 1.0], [2.0, 2.0, 2.0], "this machine is too busy to tell whether the draft helps (0.20 to 2.00"),
        ([2.0, 2.0, 2.0], [9.0, 1.0, 1.0], "this machine is too busy to tell whether the draft helps (0.50 to 4.50"),
    ):
        speeds = Speeds(with_draft, without_draft)
        assert speeds.verdict().startswith(verdict)
        assert speeds.is_slower == verdict.startswith("slower")


def test_turns_change_their_order() -> None:
    calls: list[str] = []
    runs = {name: lambda i, name=name: calls.append(f"{name}{i}") or float(i) for name in "AB"}
    assert take_turns(runs, 4) == {"A": [0, 1, 2, 3], "B": [0, 1, 2, 3]}
    assert calls == ["B-1", "A-1", "A0", "B0", "B1", "A1", "A2", "B2", "B3", "A3"]


def demo_on_the_clock(*arguments: str) -> tuple[Result, float]:
    """A draft whose forwards are no target's; and how many times as fast it is said to be."""
    pair = "--target", "austen-bytes", "--draft", "eagle3:austen-bytes"
    result = run("demo", *pair, "--max-new-tokens", "16", *arguments)
    return result, float(re.search(r"([\d.]+) times as fast", result.output)[1])


def test_a_slow_start_does_not_decide(set_cost: Callable[[Cost], None]) -> None:
    """The weights may come from the disk at first, and other programs may end."""
    set_cost(lambda now, width: 10 if now < 100 else 1)
    result, ratio = demo_on_the_clock("--threads", "2")
    assert ratio > 1.5
    assert f"speed: {ratio:.2f} times as fast with the draft ({ratio:.2f} to {ratio:.2f} in 3 pairs" in result.stdout
    assert row(result, "tokens/s without the draft") == "1.0" and row(result, "CPU threads") == "2"


def test_speed_avoids_threads_that_wait(target: str, set_cost: Callable[[Cost], None]) -> None:
    def waiting(now: float, width: int) -> float:
        return 20.0 if width > 1 and torch.get_num_threads() == 2 else 1.0

    def helping(now: float, width: int) -> float:
        return 1 / torch.get_num_threads()

    model = loading.load_model(target)
    for cost, num_threads in ((waiting, 1), (lambda now, width: 1.0, 1), (helping, 2)):
        torch.set_num_threads(2)
        set_cost(cost)
        use_fast_threads(model, num_draft_tokens=4)
        assert torch.get_num_threads() == num_threads
    # Another program begins after the trial.
    set_cost(lambda now, width: helping(now, width) if now < 20 else waiting(now, width))
    result, ratio = demo_on_the_clock()
    assert ratio > 1.5 and row(result, "CPU threads") == "1 (2 were not clearly faster)"
    assert torch.get_num_threads() == 2


def test_slower_is_said_after_a_second_comparison(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slower, faster = Speeds([2.0] * 3, [1.0] * 3), Speeds([1.0] * 3, [2.0] * 3)
    for found, said in (([slower, faster], "2.00 times as fast with"), ([slower, slower], "slower with")):
        comparisons = iter([(speeds, []) for speeds in found])
        monkeypatch.setattr(cli.demo, "compare_speeds", lambda *arguments, each=comparisons: next(each))
        assert f"\nspeed: {said} the draft" in demo(target).stdout
    monkeypatch.setattr(cli.demo, "compare_speeds", lambda *arguments: (slower, []))
    assert "; other programs may hold up its threads: try --threads 1\n" in demo(target, "--threads", "2").stdout


def test_ctrl_c_ends_the_comparison(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.demo, "compare_speeds", interrupted)
    result = demo(target)
    assert result.exit_code == 130 and float(row(result, "tokens/s").split(",")[0]) > 0
    assert result.stdout.splitlines()[-1].startswith("interrupted: ") and "check:" not in result.stdout
