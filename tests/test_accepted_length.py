"""The benchmark of accepted lengths at a tiny size: what it measures, and what it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[1] / "benchmarks" / "accepted_length.py"

pytestmark = pytest.mark.skipif(not PATH.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accepted_length", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accepted_length"] = module
    spec.loader.exec_module(module)
    return module


def test_runs_and_reports(bench: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "nested" / "out.json"
    size = ["--prompts", "5", "--context", "24", "--repeats", "6", "--batch", "3", "--num-draft-tokens", "1", "3"]
    records = bench.main([*size, "--temperature", "1.0", "0.5", "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["records"] == records
    assert written["environment"]["torch"] == torch.__version__ and written["environment"]["device"]
    assert written["inputs"]["prompts"] == 5 and written["inputs"]["text"] == "austen_heldout.txt"
    assert [(r["temperature"], r["num_draft_tokens"]) for r in records] == [(1.0, 1), (1.0, 3), (0.5, 1), (0.5, 3)]
    for cell in records:
        assert 0 < cell["exact"] <= cell["num_draft_tokens"]
        assert cell["block"] - cell["exact"] == pytest.approx(cell["gain"])
        assert cell["tokens_per_step_ratio"] == pytest.approx((1 + cell["block"]) / (1 + cell["exact"]))
        # For one draft the two are the same, number by number.
        if cell["num_draft_tokens"] == 1:
            assert cell["gain"] == cell["gain_error"] == 0


def test_drafts_are_scored_where_they_stand(bench: ModuleType) -> None:
    """A target that is the draft accepts everything: the rows of both belong to the same positions."""
    same = ["--draft", str(bench.AUSTEN / "target"), "--prompts", "4", "--context", "16", "--repeats", "3"]
    for cell in bench.main([*same, "--num-draft-tokens", "2", "4", "--temperature", "0.8"]):
        assert cell["exact"] == cell["block"] == cell["num_draft_tokens"]


@pytest.mark.parametrize("arguments", [["--prompts", "1"], ["--num-draft-tokens", "0"], ["--temperature", "0"]])
def test_bad_options(bench: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "expected prompts >= 2" in capsys.readouterr().err


def test_a_text_too_short(bench: ModuleType) -> None:
    with pytest.raises(ValueError, match="prompts: expected a text of 25 tokens or more, got 20"):
        bench.prompts(torch.arange(20), 10, 12, 3)
