"""The benchmarks at a tiny size: they check, time and report, and their check finds a wrong provider."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmark_scripts import needs_benchmarks, script
from tiny_eagle3 import new_head, save_head

import torch_specops

pytestmark = needs_benchmarks

CPU = torch.device("cpu")
KINDS = ("sampled", "one-hot", "greedy", "sigmoid", "top-k", "top-p", "min-p")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_runs_and_reports(compiled: bool, tmp_path: Path) -> None:
    out = tmp_path / "nested" / "out.json"
    size = ["--batch", "2", "--vocab", "300", "--num-draft-tokens", "2", "--dtype", "float32", "--rounds", "2"]
    options = ["--device", "cpu", "--kind", "greedy", "--acceptance", "0.6", "--cache", "warm", "--out", str(out)]
    script("bench_verify").main([*size, *options, *["--compiled"] * (not compiled)])
    written = json.loads(out.read_text())
    assert written["environment"]["torch"] == torch.__version__
    by_provider = {record["provider"]: record for record in written["records"]}
    forms = ("eager", "compiled") if compiled else ("eager",)
    assert set(by_provider) == {f"{name} {form}" for name in ("specops", "softmax") for form in forms}
    for record in by_provider.values():
        assert record["bytes"] == 2 * 300 * 3 * 4
        assert record["needed_bytes"] == (1 + 3) * 300 * 4 and record["acceptance_rate"] == 0.5
        assert record["needed_percent_of_copy"] == pytest.approx(record["percent_of_copy"] * 4 / 6)
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
def test_inputs_are_accepted_as_often_as_they_say(kind: str) -> None:
    """Those that are timed and those without chance. Without a rate odd sequences accept all, even ones all but one."""
    bench = script("bench_verify")
    for acceptance in (None, 0.3, 1.0):
        problem = bench.Problem(kind, 40, 6, 50, "float32", acceptance)
        inputs = bench.make_inputs(problem, CPU, seed=3)
        accepted = inputs["num_accepted"]
        for values in (inputs, bench.determined(inputs)):
            assert torch.equal(bench.specops_provider(kind, with_lse=kind == "sampled")(values)[1], accepted)
            if kind == "sampled":
                # A timed call draws its own numbers, and as many are accepted whatever they are.
                first, second = (bench.specops_provider(kind)(values | {"seeds": values["seeds"] + i}) for i in (0, 1))
                assert torch.equal(second[1], accepted)
                assert values is not inputs or not torch.equal(first[0], second[0])
        if acceptance is None:
            assert accepted.tolist() == [5, 6] * 20
            continue
        # n >= i with probability acceptance ** i, to the 40 sequences' half, and not with the short ones together.
        for i in range(1, 7):
            assert abs((accepted >= i).double().mean() - acceptance**i) <= 0.5 / 40 + 1e-9
        assert acceptance == 1 or accepted.tolist() != problem.num_accepted
    # Large batches are checked on rows spread over them.
    assert script("problems").checked_rows(256) == [0, 85, 170, 255]


def test_what_is_compiled_is_chosen() -> None:
    found = script("bench_verify").providers("sampled", CPU, ["softmax"], "verify_exact")
    assert set(found) == {"specops eager", "specops, lse eager", "softmax eager", "softmax compiled"}


@pytest.mark.parametrize("kind", ["top-p", "min-p"])
def test_filters_keep_tokens_to_be_accepted(kind: str) -> None:
    """The target's best token is not always one that the draft keeps."""
    problems = script("problems")
    inputs = problems.make_inputs(problems.Problem(kind, 256, 5, 2000, "float32"), CPU, 0)
    accepted = torch.arange(5) < inputs["num_accepted"].unsqueeze(-1)
    name, value = problems.FILTERS[kind]
    for rows in (inputs["target_logits"][:, :5], inputs["draft_logits"]):
        kept = torch_specops.filter_logits(rows.flatten(0, 1), **{name: torch.full((1280,), value)})
        assert kept.view_as(rows).gather(2, inputs["draft_tokens"].unsqueeze(-1)).isfinite().all(-1)[accepted].all()


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


@pytest.mark.slow
def test_lookup() -> None:
    """The memory helps from the second prompt on."""
    records = script("bench_drafts").main(
        ["lookup", "--target", "austen-bytes", "--prompts", "2", "--rounds", "1", "--new-tokens", "24"]
    )
    lengths = {record["draft"]: record["by_prompt"] for record in records}
    assert lengths["no draft"] == [1, 1]
    assert lengths["suffix lookup"][0] == lengths["suffix lookup, memory"][0] > 1
    assert lengths["suffix lookup, memory"][1] != lengths["suffix lookup"][1] > 1


@pytest.mark.slow
def test_many() -> None:
    """Also on a machine without a GPU, transformers' continuous batching gives the same texts."""
    records = script("bench_many").main(["--requests", "5", "--rows", "2", "--longest", "16", "--rounds", "1"])
    assert [record["name"] for record in records] == [
        *("generate_many", "static batches", "no draft", "generate_batch", "assisted")
    ]
    for record in records:
        assert record["same_texts"] == 5 and record["tokens_per_second"] > 0
    assert records[0]["tokens_per_row_and_step"] > records[2]["tokens_per_row_and_step"] == 1


@pytest.mark.slow
def test_serving_runs_and_reports(tmp_path: Path) -> None:
    """Both ways get texts of the same lengths, so HTTP is compared on the same work."""
    pytest.importorskip("aiohttp")
    out = tmp_path / "out.json"
    size = ["--requests", "4", "--rows", "2", "--longest", "16", "--rounds", "1", "--clients", "1", "3"]
    records = script("bench_serving").main([*size, "--out", str(out)])
    assert json.loads(out.read_text())["records"] == records
    assert [(each["clients"], each["way"]) for each in records] == [
        (clients, way) for clients in (1, 3) for way in ("http", "session")
    ]
    for record in records:
        assert record["same_lengths"] and record["new_tokens"] > 20 and record["first_token_median_ms"] > 0


@pytest.mark.slow
def test_schedule() -> None:
    """A draft that is always wrong gets few drafts, and no text changes."""
    options = ["bytes", "--rounds", "1", "--new-tokens", "24", "--constants", "3"]
    records = {(each["line"], each["way"]): each for each in script("bench_schedule").main(options)}
    assert {way for _, way in records} == {"no draft", "K = 3", "auto"} and len(records) == 12
    for line in ("alone, wrong draft", "eight, wrong draft"):
        assert records[line, "K = 3"]["drafts_per_step"] > 2.5 > 0.5 > records[line, "auto"]["drafts_per_step"]


def test_hybrid() -> None:
    """Each way's logits are checked before it is timed."""
    options = ["--models", "qwen3_5_text", "jamba", "--batch", "2", "--hidden", "32", "--layers", "4", "--rounds", "2"]
    records = script("bench_hybrid").main(options)
    assert {each["model"] for each in records} == {"qwen3_5_text", "jamba"}
    assert {each["way"] for each in records} == {"transformers", "at once", "one by one"}
    assert all(each["forwards_of_transformers"] > 0 for each in records)


def test_history() -> None:
    """The drafts of the scan are checked to be those of the index."""
    records = script("bench_history").main(["lookup", "--sizes", "900", "9000", "--scanned", "9000", "--rounds", "2"])
    assert [each.get("memory") for each in records] == [None, 900, 900, 9000, 9000] * 2
    assert all(each["propose_median_ms"] > 0 < each["scan_median_ms"] for each in records)
    assert all(8 < each["bytes_per_token"] < 24 for each in records if each.get("memory") == 9000)


@pytest.mark.slow
def test_replay_of_an_epoch() -> None:
    """The text of a seed is the same with every draft, and its second epoch takes fewer steps."""
    options = ["replay", "--prompts", "40", "--batch", "4", "--new-tokens", "24", "--rounds", "1"]
    records = {(each["seeds"], each["draft"], each["schedule"]): each for each in script("bench_history").main(options)}
    assert all(each["same_texts"] == 1 for each in records.values()) and len(records) == 10
    assert records["the same", "the first epoch", "constant"]["tokens_per_step"] > 2
    assert records["the same", "no draft", "constant"]["tokens_per_step"] == 1


@pytest.mark.slow
def test_invariant() -> None:
    """Its comparison finds the bits of plain forwards."""
    bench = script("bench_invariant")
    sizes = ["--tokens", "1", "--smollm2-tokens", "0", "--prompts", "8", "--new-tokens", "8", "--models", "bytes"]
    times = ["--batch", "2", "--num-draft-tokens", "0", "2", "--contexts", "20", "--rounds", "2"]
    threads = str(torch.get_num_threads())
    records = bench.main([*sizes, *times, "--new-tokens-timed", "8", "--threads", threads])
    assert sum("other_bits" in each for each in records) == 2 * (len(bench.FAMILIES) + 10)
    assert {each["what"] for each in records if "ratio" in each} == {"bytes: a forward", "bytes: a call"}
    rows = torch.randint(3, bench.VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))
    assert bench.compare_logits(bench.family_model("llama", torch.float32), rows, invariant=False)[1] > 100


@pytest.mark.slow
def test_grammar() -> None:
    """With the schema the texts are transformers'; with a grammar of any text, those of none."""
    options = ["--target", "austen-bytes", "--prompts", "1", "--rounds", "1", "--new-tokens", "24"]
    records = {(each["draft"], each["grammar"]): each for each in script("bench_grammar").main(options)}
    for draft in ("no draft", "prompt lookup", "suffix lookup"):
        assert records[draft, "xgrammar"]["same_text_as_transformers"]
        assert records[draft, "any text"]["tokens_per_step"] == records[draft, "none"]["tokens_per_step"]
        assert records[draft, "any text"]["mask_us"] > 0 == records[draft, "none"]["mask_us"]
    assert records["no draft", "llguidance"]["tokens_per_step"] > 1 == records["no draft", "none"]["tokens_per_step"]


@pytest.mark.slow
def test_trained_drafts_are_compared(tmp_path: Path) -> None:
    save_head(new_head(vocab_size=256, draft_vocab_size=256, target_hidden_size=128), tmp_path / "head")
    options = ["--prompts", "4", "--batch", "2", "--new-tokens", "24", "--rounds", "1", "--num-draft-tokens", "3"]
    records = script("bench_drafts").main(["trained", "--eagle3", str(tmp_path / "head"), *options])
    found = {(each["draft"], each["temperature"]): each["mean_acceptance_length"] for each in records}
    assert len(found) == 10 and found["no draft", 0.0] == found["no draft", 1.0] == 1.0
    assert min(found[draft, temperature] for draft in ("draft model", "MTP layer") for temperature in (0.0, 1.0)) > 2


@pytest.mark.slow
def test_lookup_else_is_compared_with_its_sources() -> None:
    records = script("bench_drafts").main(["else", "--batch", "2", "--new-tokens", "24", "--rounds", "1"])
    found = {(each["draft"], each["temperature"]): each["mean_acceptance_length"] for each in records}
    assert len(found) == 12 and found["lookup else draft model", 0.0] > found["lookup", 0.0]


def test_laws_of_verification_are_compared() -> None:
    options = ["--prompts", "1", "--new-tokens", "12", "--rounds", "1", "--num-draft-tokens", "3"]
    records = script("bench_drafts").main(["verify", *options])
    found = {(each["verify"], each["temperature"]): each for each in records if each["draft"] != "no draft"}
    assert len(found) == 6 and all(each["mean_acceptance_length"] > 1 for each in found.values())
    for temperature in (0.7, 1.0):
        assert 0.5 < found["gumbel", temperature]["alpha"] < found["exact", temperature]["alpha"] < 1
