"""The benchmark at a tiny size: it checks, times and reports; and its check finds a wrong provider."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

PATH = Path(__file__).parents[1] / "benchmarks" / "bench_verify.py"

pytestmark = pytest.mark.skipif(not PATH.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_verify", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_verify"] = module
    spec.loader.exec_module(module)
    return module


def test_runs_and_reports(bench: ModuleType, tmp_path: Path) -> None:
    out, picture = tmp_path / "nested" / "out.json", tmp_path / "out.png"
    size = ["--batch", "2", "--vocab", "300", "--num-draft-tokens", "2", "--dtype", "float32", "--rounds", "2"]
    bench.main([*size, "--device", "cpu", "--kind", "greedy", "--out", str(out), "--plot", str(picture)])
    written = json.loads(out.read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["copy_gb_per_s"] > 0
    by_provider = {record["provider"]: record for record in written["records"]}
    assert set(by_provider) == {"specops eager", "specops compiled", "softmax eager", "softmax compiled"}
    for record in by_provider.values():
        assert record["bytes"] == 2 * 300 * 3 * 4
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


@pytest.mark.parametrize("kind", ["sampled", "one-hot", "greedy", "top-k", "top-p"])
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


@pytest.mark.parametrize("kind", ["sampled", "one-hot", "greedy", "top-k", "top-p"])
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
    "arguments", [["--batch", "0"], ["--num-draft-tokens", "0"], ["--rounds", "1"], ["--vocab", "1"]]
)
def test_bad_options(bench: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "expected batch >= 1" in capsys.readouterr().err


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PATH.with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_overhead_of_every_op(tmp_path: Path) -> None:
    load("bench_overhead").main(
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
    bench = load("bench_quantised")
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
