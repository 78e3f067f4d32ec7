"""The benchmark at a tiny size: it checks, times and reports; and its check finds a wrong provider."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[1] / "benchmarks" / "bench_verify.py"

pytestmark = pytest.mark.skipif(not PATH.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by name."""
    sys.path.insert(0, str(PATH.parent))
    yield
    sys.path.remove(str(PATH.parent))


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return importlib.import_module("bench_verify")


def test_runs_and_reports(bench: ModuleType, tmp_path: Path) -> None:
    out, picture = tmp_path / "nested" / "out.json", tmp_path / "out.png"
    size = ["--batch", "2", "--vocab", "300", "--num-draft-tokens", "2", "--dtype", "float32", "--rounds", "2"]
    written_to = ["--out", str(out), "--plot", str(picture)]
    bench.main([*size, "--device", "cpu", "--kind", "greedy", "--acceptance", "0.6", "--cache", "warm", *written_to])
    written = json.loads(out.read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["copy_gb_per_s"] > 0
    by_provider = {record["provider"]: record for record in written["records"]}
    assert set(by_provider) == {"specops eager", "specops compiled", "softmax eager", "softmax compiled"}
    for record in by_provider.values():
        assert record["bytes"] == 2 * 300 * 3 * 4
        assert record["needed_bytes"] == (1 + 3) * 300 * 4 and record["acceptance_rate"] == 0.5
        assert record["needed_percent_of_copy"] == pytest.approx(record["percent_of_copy"] * 4 / 6)
        assert record["cache"] == "warm" and record["peak_bytes"] > 0 and record["launches"] is None
        assert record["gb_per_s"] == pytest.approx(record["bytes"] / record["median_ms"] * 1e-6)
        assert record["speedup"] == pytest.approx(by_provider["softmax eager"]["median_ms"] / record["median_ms"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "with_lse", "entries"),
    [
        ("sampled", False, 11 * 2),
        ("sampled", True, 7 * 2),
        ("top-k", False, 11 * 2),
        ("one-hot", False, 6 * 2),
        ("greedy", False, 6 * 2),
    ],
)
def test_bytes_model(bench: ModuleType, kind: str, with_lse: bool, entries: int) -> None:
    assert bench.Problem(kind, 3, 5, 1000, "bfloat16").bytes(with_lse) == 3 * 1000 * entries


@pytest.mark.parametrize("kind", ["sampled", "one-hot", "greedy", "top-k", "top-p", "min-p"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_are_rejected_where_they_say(bench: ModuleType, kind: str, dtype: str) -> None:
    """Every even sequence at its last draft, no odd one, in the inputs that are timed and in those without chance."""
    inputs = bench.make_inputs(bench.Problem(kind, 4, 3, 500, dtype), torch.device("cpu"), seed=1)
    for values in (inputs, bench.determined(inputs)):
        assert bench.specops_provider(kind)(values)[1].tolist() == [2, 3, 2, 3]
        lse = bench.specops_provider(kind, with_lse=kind == "sampled")(values)
        assert torch.equal(lse[0], bench.specops_provider(kind)(values)[0])
    # Chance has no part: softmax with its own multinomial always says the same.
    results = [bench.softmax_provider(kind)(bench.determined(inputs)) for _ in range(5)]
    assert all(torch.equal(result[0], results[0][0]) for result in results)


def test_a_token_that_is_to_be_accepted_is_kept_by_the_filters_of_both_sides(bench: ModuleType) -> None:
    """The target's best of 20,000 tokens is now and then none of the draft's best 50."""
    for seed in range(3):
        inputs = bench.make_inputs(bench.Problem("top-k", 16, 5, 20_000, "bfloat16"), torch.device("cpu"), seed)
        accepted = torch.arange(5) < inputs["num_accepted"].unsqueeze(-1)
        for name in ("target_logits", "draft_logits"):
            best = inputs[name][:, :5].topk(50).indices
            assert (best == inputs["draft_tokens"].unsqueeze(-1)).any(-1)[accepted].all()


@pytest.mark.parametrize("kind", ["sampled", "one-hot", "greedy"])
@pytest.mark.parametrize("acceptance", [0.3, 0.9, 1.0])
def test_drafts_are_accepted_at_the_rate_asked_for(bench: ModuleType, kind: str, acceptance: float) -> None:
    problem = bench.Problem(kind, 40, 6, 50, "float32", acceptance)
    inputs = bench.make_inputs(problem, torch.device("cpu"), seed=3)
    for values in (inputs, bench.determined(inputs)):
        assert torch.equal(bench.specops_provider(kind)(values)[1], inputs["num_accepted"])
        if kind == "sampled":
            # A provider that draws its own numbers accepts as many.
            values = values | {"accept_uniforms": torch.rand(40, 6)}
            assert torch.equal(bench.specops_provider(kind)(values)[1], inputs["num_accepted"])
    # n >= i with probability acceptance ** i, to the 40 sequences' half.
    for i in range(1, 7):
        assert abs((inputs["num_accepted"] >= i).double().mean() - acceptance**i) <= 0.5 / 40 + 1e-9
    assert problem.acceptance_rate == pytest.approx(float(inputs["num_accepted"].double().mean()) / 6)
    # In any order but that of the quantiles, which would put the short ones together.
    assert acceptance == 1 or inputs["num_accepted"].tolist() != problem.num_accepted


@pytest.mark.parametrize("kind", ["sampled", "one-hot"])
def test_rows_behind_a_rejection_are_not_needed(bench: ModuleType, kind: str) -> None:
    problem = bench.Problem(kind, 4, 3, 10, "bfloat16", 0.6)
    assert problem.num_accepted == [3, 1, 0, 0]
    target_rows = (3 + 1) + (1 + 1) + 1 + 1
    draft_rows = 3 + (1 + 1) + 1 + 1
    with_drafts = kind == "sampled"
    assert problem.needed_bytes() == 20 * (target_rows + draft_rows * with_drafts)
    assert problem.needed_bytes(with_lse=True) == 20 * (target_rows + 3 * with_drafts)
    everything = bench.Problem(kind, 4, 3, 10, "bfloat16", 1.0)
    assert everything.needed_bytes() == everything.bytes()


def test_the_residual_is_the_only_way_to_the_right_token(bench: ModuleType) -> None:
    """A sampler that draws from p after a rejection passes where p is one-hot."""
    problem = bench.Problem("sampled", 4, 3, 30, "bfloat16", 0.5)
    inputs = bench.make_inputs(problem, torch.device("cpu"), seed=0)
    for residual in (False, True):
        values = bench.determined(inputs, residual)
        tokens, n = bench.softmax_provider("sampled")(values)
        bench.check_answer("softmax", problem, values, (tokens, n))
        p = values["target_logits"][torch.arange(4), n].argmax(-1, keepdim=True)
        wrong = tokens.scatter(1, n.unsqueeze(-1), p)
        if not residual:
            bench.check_answer("wrong", problem, values, (wrong, n))
    with pytest.raises(RuntimeError, match="wrong is wrong in rows"):
        bench.check_answer("wrong", problem, values, (wrong, n))


def test_large_batches_are_checked_on_rows_spread_over_them() -> None:
    checked_rows = importlib.import_module("problems").checked_rows
    assert checked_rows(3) == [0, 1, 2]
    assert checked_rows(256) == [0, 85, 170, 255]


def test_bytes_from_the_counters_of_every_kernel() -> None:
    ncu = importlib.import_module("ncu")
    head = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    rows = [
        '"0","7","stats_kernel","dram__bytes_read.sum","byte","1,536,000"',
        '"0","7","stats_kernel","dram__bytes_write.sum","byte","64"',
        '"0","7","stats_kernel","lts__t_bytes.sum","byte","1,600,000"',
        '"1","7","draw_kernel","dram__bytes_read.sum","byte","1,000"',
    ]
    lines = ["==PROF== Connected to process 7", "a line of the program", head, *rows]
    assert ncu.summed(lines) == {"dram_read": 1_537_000, "dram_write": 64, "l2": 1_600_000}
    with pytest.raises(RuntimeError, match="expected a CSV table"):
        ncu.summed(lines[:2])


@pytest.mark.parametrize("kind", ["sampled", "one-hot", "greedy", "top-k", "top-p", "min-p"])
@pytest.mark.parametrize("provider", ["specops", "softmax"])
@pytest.mark.parametrize("defect", ["next token", "num_accepted"])
def test_check_finds_a_wrong_provider(bench: ModuleType, kind: str, provider: str, defect: str) -> None:
    problem = bench.Problem(kind, 2, 2, 40, "float32")
    inputs = bench.make_inputs(problem, torch.device("cpu"), seed=2)
    right = {"specops eager": bench.specops_provider(kind), "softmax eager": bench.softmax_provider(kind)}
    bench.check(problem, right, inputs)

    def wrong(values: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, n = (result.clone() for result in right[f"{provider} eager"](values))
        if defect == "num_accepted":
            n[0] = 0
        else:
            tokens[1, -1] = (tokens[1, -1] + 1) % 40
        return tokens, n

    with pytest.raises(
        RuntimeError, match=rf"{provider} eager is wrong in rows \[{0 if defect == 'num_accepted' else 1}\]"
    ):
        bench.check(problem, right | {f"{provider} eager": wrong}, inputs)


@pytest.mark.parametrize(
    "arguments", [["--batch", "0"], ["--num-draft-tokens", "0"], ["--rounds", "1"], ["--vocab", "2"]]
)
def test_bad_options(bench: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "expected batch >= 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--acceptance", "0.5", "1.5"])
    assert "expected numbers in (0, 1], got [0.5, 1.5]" in capsys.readouterr().err


def test_overhead_of_every_op(tmp_path: Path) -> None:
    importlib.import_module("bench_overhead").main(
        ["--rounds", "3", "--repeats", "1", "--no-compiled", "--out", str(tmp_path / "out.json")]
    )
    records = json.loads((tmp_path / "out.json").read_text())["records"]
    medians = {(record["op"], record["column"]): record["median_us"] for record in records}
    ops = {"verify_exact", "verify_block", "verify_sigmoid", "sample", "filter_logits"}
    floors = {"an empty triton_op", "torch.add"}
    assert set(medians) == {(op, column) for op in ops for column in ("function", "op")} | {(op, "op") for op in floors}
    assert min(medians.values()) > 0


def test_quantised_weights(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    bench = importlib.import_module("bench_quantised")
    size = ["--random", "--layers", "1", "--rounds", "2", "--kinds", "float32", "int8", "--no-compiled"]
    result = bench.main([*size, "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    cells = {(record["kind"], record["form"], record["M"]) for record in result["records"]}
    assert cells == {(kind, "eager", width) for kind in ("float32", "int8") for width in (1, 5)}
    # Layers of int8 are a quarter, but the head is untied from the embedding, which stays as it is.
    embedding = 49152 * 576 * 4
    layer = result["copies"]["float32"]["weight_bytes"] - embedding
    assert result["copies"]["int8"]["weight_bytes"] == pytest.approx(embedding + embedding / 4 + layer / 4, rel=0.01)
    # Two drafts that are always accepted, each a tenth of the target's forward.
    assert bench.gain(1.0, 2, 1.0, 10.0, 10.0) == pytest.approx(2.5)
