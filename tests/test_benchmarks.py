"""The benchmarks at a tiny size: they check, time and report, and their check finds a wrong provider."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmark_scripts import needs_benchmarks, script

pytestmark = needs_benchmarks

CPU = torch.device("cpu")
KINDS = ("sampled", "one-hot", "greedy", "top-k", "top-p", "min-p")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_runs_and_reports(compiled: bool, tmp_path: Path) -> None:
    out = tmp_path / "nested" / "out.json"
    size = ["--batch", "2", "--vocab", "300", "--num-draft-tokens", "2", "--dtype", "float32", "--rounds", "2"]
    options = ["--device", "cpu", "--kind", "greedy", "--acceptance", "0.6", "--cache", "warm", "--out", str(out)]
    script("bench_verify").main([*size, *options, *["--no-compiled"] * (not compiled)])
    written = json.loads(out.read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["copy_gb_per_s"] > 0
    by_provider = {record["provider"]: record for record in written["records"]}
    forms = ("eager", "compiled") if compiled else ("eager",)
    assert set(by_provider) == {f"{name} {form}" for name in ("specops", "softmax") for form in forms}
    for record in by_provider.values():
        assert record["bytes"] == 2 * 300 * 3 * 4
        assert record["needed_bytes"] == (1 + 3) * 300 * 4 and record["acceptance_rate"] == 0.5
        assert record["needed_percent_of_copy"] == pytest.approx(record["percent_of_copy"] * 4 / 6)
        assert record["cache"] == "warm" and record["peak_bytes"] > 0 and record["launches"] is None
        assert record["gb_per_s"] == pytest.approx(record["bytes"] / record["median_ms"] * 1e-6)
        assert record["speedup"] == pytest.approx(by_provider["softmax eager"]["median_ms"] / record["median_ms"])


def test_rows_behind_a_rejection_are_not_needed() -> None:
    problem = script("problems").Problem
    for kind in ("sampled", "one-hot"):
        some = problem(kind, 4, 3, 10, "bfloat16", 0.6)
        assert some.num_accepted == [3, 1, 0, 0]
        target_rows = (3 + 1) + (1 + 1) + 1 + 1
        draft_rows = 3 + (1 + 1) + 1 + 1
        with_drafts = kind == "sampled"
        assert some.needed_bytes() == 20 * (target_rows + draft_rows * with_drafts)
        assert some.needed_bytes(with_lse=True) == 20 * (target_rows + 3 * with_drafts)
        everything = problem(kind, 4, 3, 10, "bfloat16", 1.0)
        assert everything.needed_bytes() == everything.bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_rejected_where_they_say(kind: str) -> None:
    """Every even sequence at its last draft, no odd one, in the inputs that are timed and in those without chance."""
    bench = script("bench_verify")
    inputs = bench.make_inputs(bench.Problem(kind, 4, 3, 500, "bfloat16"), CPU, seed=1)
    for values in (inputs, bench.determined(inputs)):
        assert bench.specops_provider(kind)(values)[1].tolist() == [2, 3, 2, 3]
        lse = bench.specops_provider(kind, with_lse=kind == "sampled")(values)
        assert torch.equal(lse[0], bench.specops_provider(kind)(values)[0])
    # Chance has no part: softmax with its own multinomial always says the same.
    results = [bench.softmax_provider(kind)(bench.determined(inputs)) for _ in range(5)]
    assert all(torch.equal(result[0], results[0][0]) for result in results)


def test_a_token_that_is_to_be_accepted_is_kept_by_the_filters_of_both_sides() -> None:
    """The target's best of 20,000 tokens is sometimes not among the draft's best 50."""
    problems = script("problems")
    inputs = problems.make_inputs(problems.Problem("top-k", 16, 5, 20_000, "bfloat16"), CPU, 0)
    accepted = torch.arange(5) < inputs["num_accepted"].unsqueeze(-1)
    for name in ("target_logits", "draft_logits"):
        best = inputs[name][:, :5].topk(50).indices
        assert (best == inputs["draft_tokens"].unsqueeze(-1)).any(-1)[accepted].all()


@pytest.mark.parametrize("kind", ["sampled", "one-hot", "greedy"])
def test_drafts_are_accepted_at_the_rate_asked_for(kind: str) -> None:
    bench = script("bench_verify")
    for acceptance in (0.3, 0.9, 1.0):
        problem = bench.Problem(kind, 40, 6, 50, "float32", acceptance)
        inputs = bench.make_inputs(problem, CPU, seed=3)
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


def test_the_residual_is_the_only_way_to_the_right_token() -> None:
    """A sampler that draws from p after a rejection passes where p is one-hot."""
    bench = script("bench_verify")
    problem = bench.Problem("sampled", 4, 3, 30, "bfloat16", 0.5)
    inputs = bench.make_inputs(problem, CPU, seed=0)
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
    # Large batches are checked on rows spread over them.
    checked_rows = script("problems").checked_rows
    assert checked_rows(3) == [0, 1, 2] and checked_rows(256) == [0, 85, 170, 255]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("provider", ["specops", "softmax"])
def test_check_finds_a_wrong_provider(kind: str, provider: str) -> None:
    bench = script("bench_verify")
    problem = bench.Problem(kind, 2, 2, 40, "float32")
    inputs = bench.make_inputs(problem, CPU, seed=2)
    right = {"specops eager": bench.specops_provider(kind), "softmax eager": bench.softmax_provider(kind)}
    bench.check(problem, right, inputs)
    for row, defect in enumerate(("num_accepted", "next token")):

        def wrong(values: dict[str, torch.Tensor], defect: str = defect) -> tuple[torch.Tensor, torch.Tensor]:
            tokens, n = (result.clone() for result in right[f"{provider} eager"](values))
            if defect == "num_accepted":
                n[0] = 0
            else:
                tokens[1, -1] = (tokens[1, -1] + 1) % 40
            return tokens, n

        with pytest.raises(RuntimeError, match=rf"{provider} eager is wrong in rows \[{row}\]"):
            bench.check(problem, right | {f"{provider} eager": wrong}, inputs)


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    for name, arguments, message in (
        ("bench_verify", ["--batch", "0"], "expected batch >= 1"),
        ("bench_verify", ["--rounds", "1"], "expected batch >= 1"),
        ("bench_verify", ["--acceptance", "0.5", "1.5"], "expected numbers in (0, 1], got [0.5, 1.5]"),
        ("bench_peers", ["--vocab", "2"], "expected batch >= 1"),
        ("accepted_length", ["--prompts", "1"], "expected prompts >= 2"),
        ("accepted_length", ["--temperature", "0"], "expected prompts >= 2"),
    ):
        with pytest.raises(SystemExit):
            script(name).main(arguments)
        assert message in capsys.readouterr().err


def test_quantised_weights(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    bench, pair = script("bench_quantised"), script("bench_beam").PAIR
    size = ["--model", str(pair / "target"), "--layers", "2", "--rounds", "2", "--text-tokens", "8", "--no-compiled"]
    result = bench.main([*size, "--kinds", "float32", "int8", "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    cells = {(record["kind"], record["form"], record["M"]) for record in result["records"]}
    assert cells == {(kind, "eager", width) for kind in ("float32", "int8") for width in (1, 5)}
    copies = result["copies"]
    assert copies["float32"]["acceptance"] == pytest.approx(1) and 0.9 < copies["int8"]["acceptance"] < 1
    assert copies["int8"]["weight_bytes"] < copies["float32"]["weight_bytes"] / 3
    assert copies["float32"]["gain"] > 0
    # Agreement is that behind the prompt: these two differ on its first two tokens alone.
    p, q = torch.zeros(2, 1, 5, 4)
    q[:, :2, 0] = 9
    models = [lambda logits=logits, **_: SimpleNamespace(logits=logits) for logits in (p, q)]
    assert bench.agreement(*models, torch.zeros(1, 5, dtype=torch.int64), 3) == {"acceptance": 1.0, "same_argmax": 1.0}
    # Two drafts that are always accepted, each a tenth of the target's forward.
    assert bench.gain(1.0, 2, 1.0, 10.0, 10.0) == pytest.approx(2.5)


def test_beam_search(tmp_path: Path) -> None:
    size = ["--num-beams", "2", "--num-draft-tokens", "2", "--max-new-tokens", "8", "--prompts", "1", "--rounds", "1"]
    found = script("bench_beam").main([*size, "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["records"] == found
    records = {(record["search"], record["draft_beams"]): record for record in found}
    assert set(records) == {("transformers", None), ("ours", None), ("ours", 2), ("ours", 4)}
    assert all(record["same_tokens"] == 8 and record["tokens"] == 8 for record in found)
    assert records["transformers", None]["speedup"] == 1.0
    assert records["ours", 4]["levels_per_round"] > 1.0


def test_accepted_lengths(tmp_path: Path) -> None:
    bench = script("accepted_length")
    size = ["--prompts", "5", "--context", "24", "--repeats", "6", "--batch", "3", "--num-draft-tokens", "1", "3"]
    records = bench.main([*size, "--temperature", "1.0", "0.5", "--out", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["records"] == records and written["inputs"]["text"] == "austen_heldout.txt"
    assert [(r["temperature"], r["num_draft_tokens"]) for r in records] == [(1.0, 1), (1.0, 3), (0.5, 1), (0.5, 3)]
    for cell in records:
        assert 0 < cell["exact"] <= cell["num_draft_tokens"]
        assert cell["block"] - cell["exact"] == pytest.approx(cell["gain"])
        # For one draft the two are the same, number by number.
        assert cell["num_draft_tokens"] > 1 or cell["gain"] == cell["gain_error"] == 0
    # A target that is the draft accepts everything: the rows of both belong to the same positions.
    same = ["--draft", str(bench.AUSTEN / "target"), "--prompts", "4", "--context", "16", "--repeats", "3"]
    for cell in bench.main([*same, "--num-draft-tokens", "2", "4", "--temperature", "0.8"]):
        assert cell["exact"] == cell["block"] == cell["num_draft_tokens"]
    with pytest.raises(ValueError, match="prompts: expected a text of 25 tokens or more, got 20"):
        bench.prompts(torch.arange(20), 10, 12, 3)


def test_overhead() -> None:
    size = ["--rounds", "1", "--new-tokens", "6", "--num-draft-tokens", "2"]
    records = script("bench_overhead").main(size)
    loops = [(record["loop"].split(",")[0], record["batch"]) for record in records]
    assert loops == [
        *[("transformers generate", 1), ("transformers assisted", 1), ("specops", 1), ("specops", 1)],
        *[("transformers generate", 8), ("specops", 8), ("specops", 8)],
    ]
    for record in records:
        # The first step of a run does not count.
        assert 0 < record["steps"] <= 5 and record["forwards_us"] > record["elsewhere_us"] > 0
        assert (record["ops_us"] > 0) == record["loop"].startswith("specops")
    assert records[0]["steps"] == records[2]["steps"] == 5
