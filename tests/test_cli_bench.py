"""`torch-specops bench`: the comparison with transformers, on tiny models."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_cli import TEXT, bench, save_model
from transformers import LlamaForCausalLM
from typer.testing import Result

from torch_specops.cli import loading, models, results
from torch_specops.cli.comparison import Comparison, Measurement, Workload, providers, turns
from torch_specops.cli.greedy import GreedyDifference
from torch_specops.decode import SpeculativeDecoder
from torch_specops.sampling import SamplingParams


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="session")
def measured(target: str, draft: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    """One run of `bench` with a draft model, and its JSON."""
    file = tmp_path_factory.mktemp("bench") / "out.json"
    prompts = [part for text in (TEXT, "push", "a stack of items") for part in ("--prompt", text)]
    options = ["--draft", draft, "--num-draft-tokens", "3", "--batch-sizes", "1,2", "--json", str(file)]
    result = bench(target, *options, *prompts)
    assert result.exit_code == 0, result.output
    return result, json.loads(file.read_text())


def of_batch(document: dict[str, Any], batch_size: int) -> dict[str, dict[str, Any]]:
    return {row["provider"]: row for row in document["results"] if row["batch_size"] == batch_size}


OURS = ["specops, no draft", "specops"]
ASSISTED = ["transformers assisted, K = 3", "transformers assisted, own K"]


def test_bench_prints_and_writes_what_it_measured(measured: tuple[Result, dict[str, Any]]) -> None:
    result, document = measured
    # The last words of a line, behind columns of numbers.
    lines = re.findall(r"^(batch \d|specops.*?|transformers.*?) {2,}.*?( =|st)$", result.stdout, re.MULTILINE)
    one = ["transformers generate", "transformers assisted K=3", "transformers assisted own K", *OURS]
    two = ["transformers generate", *OURS]
    assert [name for name, _ in lines] == ["batch 1", *one, "batch 2", *two]
    assert {mark for name, mark in lines if not name.startswith("batch")} == {" ="}
    assert "=: identical to plain greedy decoding" in result.stdout
    assert document["versions"]["torch"] == torch.__version__ and not document["interrupted"]
    assert document["arguments"]["num_draft_tokens"] == 3 and document["arguments"]["batch_sizes"] == [1, 2]
    for row in document["results"]:
        generate = of_batch(document, row["batch_size"])["transformers generate"]
        assert row["new_tokens"] == 6 * row["batch_size"] and len(row["seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / (sum(row["seconds"]) / 2))
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / generate["tokens_per_second"])
        assert row["outside_seconds_per_step"] > 0 and row["compile_seconds"] == 0
    fastest = max(of_batch(document, 1)[name]["tokens_per_second"] for name in ASSISTED)
    for row in of_batch(document, 1).values():
        assert row["speedup_over_assisted"] == pytest.approx(row["tokens_per_second"] / fastest)
    assert {row["speedup_over_assisted"] for row in of_batch(document, 2).values()} == {None}


def test_the_tables_fit_into_80_columns() -> None:
    """With everything that may be in them: long names, large numbers, compiled steps, CUDA."""
    provider = Measurement("transformers assisted, own K", 32, True, 10**5, [1.1], 9, 8.5, 1.0, 0.0123)
    other = Measurement("specops, no draft, compiled", 32, True, 10**5, [1.0], 9, 8.5, 1.0, 0.0123, 42.0, 10**11)
    provider.greedy, other.greedy = "near ties", "different"
    file = io.StringIO()
    results.print_tables(Console(file=file, width=80), results.as_results([provider, other]))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 78
    table = [line.split() for line in lines[1:4]]
    assert table[0] == ["batch", "32", "tok/s", "/asst", "len", "rate", "ms/st", "MB"]
    assert table[1][4:] == ["90909.1", "1.00", "8.50", "100%", "12.30", "-", "~"]
    assert table[2][4:] == ["100000.0", "1.10", "8.50", "100%", "12.30", "100000", "!"]
    assert "specops, no draft, compiled, batch 32: 42.0 s compiling, not counted" in lines


def test_bench_counts_steps(measured: tuple[Result, dict[str, Any]]) -> None:
    one = of_batch(measured[1], 1)
    # transformers counts the forward that reads the prompt, which is also its first step.
    assert one["transformers generate"]["num_steps"] == one["specops, no draft"]["num_steps"] == 6
    assert one["specops, no draft"]["mean_acceptance_length"] == 1
    assert one["specops, no draft"]["acceptance_rate"] is None
    # Greedy, with the same draft and K: the same tokens are accepted.
    for name in ("specops", ASSISTED[0]):
        assert one[name]["mean_acceptance_length"] == pytest.approx(6 / one[name]["num_steps"])
    assert abs(one["specops"]["num_steps"] - one[ASSISTED[0]]["num_steps"]) <= 1


def test_bench_samples_and_does_not_compare(target: str) -> None:
    result = bench(target, "--temperature", "0.8", "--batch-sizes", "1", "--draft", "early-exit:1")
    assert result.exit_code == 0, result.output
    assert "sampled outputs are not compared" in result.stdout
    # Forwards of the target are also those of the draft, so they do not count steps.
    assert len(re.findall(r"^transformers assisted.* -( +-)+$", result.stdout, re.MULTILINE)) == 2


def test_every_provider_has_the_filters(target: str, draft: str) -> None:
    """Sampling among one token is greedy decoding, with every rule."""
    loaded, tokenizer = models.load_models(Console(file=io.StringIO()), target, draft, torch.device("cpu"))
    prompts = [models.encode(tokenizer, TEXT)[0]]
    texts = []
    for filters in ({}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        sampling = SamplingParams(temperature=0.8 if filters else 0.0, **filters)
        work = Workload(prompts, 6, 2, sampling, verify="block" if "top_k" in filters else "exact")
        comparison = Comparison(loaded, work, [1], 1)
        texts += [provider.decode(*comparison._batch(1), 0).tokens for provider in comparison._providers]
    assert len(texts) == 20 and texts == texts[:1] * 20


def test_bench_decodes_past_an_eos_without_what_transformers_lacks(target: str, tmp_path: Path) -> None:
    model, tokenizer = LlamaForCausalLM.from_pretrained(target), loading.load_tokenizer(target)
    prompt = tokenizer(TEXT, return_tensors="pt")
    third = int(model.generate(**prompt, do_sample=False, max_new_tokens=3, pad_token_id=0)[0, -1])
    model.generation_config.eos_token_id = third
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    stopped = loading.load_model(tmp_path).model.generate(**prompt, do_sample=False, max_new_tokens=9, pad_token_id=0)
    assert stopped.shape[1] == prompt["input_ids"].shape[1] + 3
    (tmp_path / "text.txt").write_text(TEXT)
    result = bench(str(tmp_path), "--batch-sizes", "1", "--draft", f"ngram:{tmp_path / 'text.txt'}")
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"  =$", result.stdout, re.MULTILINE)) == 3
    assert "transformers assisted" not in result.stdout and "/asst" not in result.stdout.split("tok/s:")[0]


def test_bench_sees_a_wrong_token(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SpeculativeDecoder):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            output = super().generate(*arguments, **options)
            if self.draft is not None:
                output.sequences[-1, -1] = (output.sequences[-1, -1] + 1) % 280
            return output

    monkeypatch.setattr(providers, "SpeculativeDecoder", Wrong)
    result = bench(target, "--batch-sizes", "2")
    assert result.exit_code == 1, result.output
    assert re.findall(r"  ([=~!])$", result.stdout, re.MULTILINE) == ["=", "=", "!"]
    assert "specops, batch 2: 1 tokens are not those of plain greedy decoding. The worst: in row 1" in result.stdout


def test_what_counts_as_different() -> None:
    tie, wrong = (GreedyDifference(4, 1, 2, gap, 1e-4) for gap in (9e-5, 2e-4))
    verdicts = [turns._verdict(found, True) for found in ([], [tie], [tie, wrong])]
    assert [*verdicts, turns._verdict([tie, wrong], False)] == ["identical", "near ties", "different", "rounding"]


def test_ctrl_c_shows_the_rounds_done_so_far(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = Comparison.run

    def interrupted(self: Comparison) -> Iterator[str]:
        for label in run_all(self):
            if label.startswith("batch 1, round 2"):
                raise KeyboardInterrupt
            yield label

    monkeypatch.setattr(Comparison, "run", interrupted)
    file = tmp_path / "out.json"
    result = bench(target, "--json", str(file))
    assert result.exit_code == 130
    assert "interrupted: " in result.stdout
    document = json.loads(file.read_text())
    assert document["interrupted"]
    assert {len(row["seconds"]) for row in document["results"]} == {1}


def test_progress_counts_every_run_and_no_provider_is_always_first(target: str, draft: str) -> None:
    loaded, tokenizer = models.load_models(Console(file=io.StringIO()), target, draft, torch.device("cpu"))
    prompts = [models.encode(tokenizer, text)[0] for text in (TEXT, "push")]
    comparison = Comparison(loaded, Workload(prompts, 4, 2), [1, 2], 2)
    tokens, mask = comparison._batch(2)
    assert [row[own.bool()].tolist() for row, own in zip(tokens, mask, strict=True)] == [
        each.tolist() for each in prompts
    ]
    assert mask[:, -1].all()
    labels = list(comparison.run())
    assert len(labels) == comparison.num_runs == 5 * 3 + 1 + 3 * 3 + 1
    first = [label for label in labels if label.startswith("batch 2, round")][::3]
    assert [label.split(": ")[1] for label in first] == ["transformers generate", "specops, no draft"]


@pytest.mark.slow
def test_bench_measures_compiled_steps(target: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(target, "--batch-sizes", "1", "--num-draft-tokens", "2", "--compile", "--json", str(file))
    assert result.exit_code == 0, result.output
    for name in OURS:
        found = of_batch(json.loads(file.read_text()), 1)[f"{name}, compiled"]
        assert found["compile_seconds"] > 0 and found["greedy"] == "identical"
        assert found["outside_seconds_per_step"] is None
