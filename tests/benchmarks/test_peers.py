"""Other implementations, with stand-ins for what is not installed: layouts, and a check that finds a wrong peer."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script
from torch import Tensor

pytestmark = needs_benchmarks

CPU = torch.device("cpu")
bench, peers = (script(name) for name in ("bench_verify", "peers")) if BENCHMARKS.exists() else (None, None)


@pytest.fixture
def problem() -> Any:
    return bench.Problem("sampled", 5, 3, 64, "bfloat16", acceptance=0.7)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "helpers" / "peer_stand_ins"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("flashinfer", "vllm")]:
        del sys.modules[name]


def test_what_is_not_installed_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, package, None)
    found, skipped = peers.find()
    assert list(found) == ["transformers"]
    assert list(skipped) == ["FlashInfer", "vLLM", "FlashInfer, its softmax", "vLLM, no copy"]
    assert all(reason.startswith("not installed: ") for reason in skipped.values())


@pytest.mark.parametrize("name", ["transformers", "FlashInfer", "FlashInfer, its softmax", "vLLM", "vLLM, no copy"])
def test_answers_in_their_own_layouts_are_right(name: str, problem: Any, stand_ins: None) -> None:
    assert 0 < sum(problem.num_accepted) < 15
    bench.check(problem, {name: peers.find()[0][name]}, bench.make_inputs(problem, CPU, seed=0))


@pytest.mark.parametrize("defect", ["draws from p", "verifies the next draft", "one draft too few", "accepts with p"])
def test_check_finds_a_wrong_peer(defect: str, problem: Any, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = importlib.import_module("flashinfer.sampling")
    own_law = flashinfer.verify

    def wrong(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if defect == "verifies the next draft":
            return own_law(p, q, tokens.roll(-1, 1))
        if defect == "accepts with p":
            # Where p and q are one-hot that is right.
            chance = p[:, :-1].gather(2, tokens.long().unsqueeze(-1)).squeeze(-1)
            tokens = torch.where(torch.rand_like(chance) < chance, tokens, -1)
        output, n = own_law(p, q, tokens)
        if defect == "draws from p":
            drawn = torch.multinomial(p[torch.arange(len(n)), n], 1)
            return output.scatter(1, n.unsqueeze(-1), drawn), n
        return torch.cat([output[:, 1:], torch.full_like(output[:, :1], -1)], 1), n - 1

    monkeypatch.setattr(flashinfer, "verify", wrong)
    with pytest.raises(RuntimeError, match="FlashInfer is wrong in rows"):
        bench.check(problem, {"FlashInfer": peers.find()[0]["FlashInfer"]}, bench.make_inputs(problem, CPU, seed=0))


def test_a_wrong_peer_is_left_out(problem: Any) -> None:
    right = peers.transformers()
    wrong = peers.Peer(right.prepare, lambda returned, inputs: (right.answer(returned, inputs)[0].roll(1, 0), inputs))
    skipped: dict[str, str] = {}
    others = {"transformers": right, "theirs": wrong}
    records = bench.run_problem(problem, CPU, 2, 1e9, others=others, skipped=skipped)
    assert {record["provider"] for record in records} == {
        *("specops eager", "specops, lse eager", "softmax eager", "transformers")
    }
    assert list(skipped) == ["theirs"] and skipped["theirs"].startswith("not timed: ")
