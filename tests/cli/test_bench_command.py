"""`torch-specops bench`: the comparison with transformers, on tiny models."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_cli import TEXT, bench, run
from tiny_gemma4 import can_be_built, tiny_gemma4
from tiny_models import raised
from torch import Tensor
from transformers import LlamaForCausalLM

from torch_specops.cli import loading, models, options, plot, providers, results
from torch_specops.cli.comparison import Case, Comparison, Run, padded
from torch_specops.cli.prompts import read_questions
from torch_specops.decode import SpeculativeDecoder
from torch_specops.drafts import EarlyExit, Gemma4Assistant, LookupElse, PromptLookup
from torch_specops.sampling import SamplingParams

GENERATE = "transformers generate"
ASSISTED = ["transformers assisted, K = 3", "transformers assisted, own K"]
OURS = ["specops, no draft", "specops"]


@pytest.fixture
def loaded(target: str, draft: str) -> tuple[models.Models, list[Tensor]]:
    """A target with a draft, and two prompts."""
    found, tokenizer = models.load_models(Console(file=io.StringIO()), target, draft, torch.device("cpu"))
    return found, [models.encode(tokenizer, text)[0] for text in (TEXT, "push")]


def of_batch(document: dict[str, Any], batch_size: int) -> dict[str, dict[str, Any]]:
    return {row["provider"]: row for row in document["results"] if row["batch_size"] == batch_size}


def test_bench_prints_and_writes_what_it_measured(target: str, draft: str, tmp_path: Path) -> None:
    prompts = [part for text in (TEXT, "push", "a stack of items") for part in ("--prompt", text)]
    file = tmp_path / "out.json"
    own = ["--draft", draft, "--num-draft-tokens", "3", "--batch-sizes", "1,2", "--json", str(file)]
    result = bench(target, *own, *prompts)
    assert result.exit_code == 0, result.output
    # The last words of a line, behind columns of numbers.
    lines = re.findall(r"^(T = 0, batch \d|specops.*?|transformers.*?) {2,}.*?( =|st) *$", result.stdout, re.MULTILINE)
    one = [GENERATE, "transformers assisted K=3", "transformers assisted own K", *OURS]
    assert [name for name, _ in lines] == ["T = 0, batch 1", *one, "T = 0, batch 2", GENERATE, *OURS]
    assert {mark for name, mark in lines if not name.startswith("T")} == {" ="}
    assert "=: identical to plain greedy decoding" in result.stdout and " left" not in result.stdout
    document = json.loads(file.read_text())
    assert document["versions"]["torch"] == torch.__version__ and not document["interrupted"]
    assert document["totals"] == []
    assert document["arguments"]["num_draft_tokens"] == 3 and document["arguments"]["batch_sizes"] == [1, 2]
    for row in document["results"]:
        generate = of_batch(document, row["batch_size"])[GENERATE]
        (seconds,) = row["seconds"]
        assert row["new_tokens"] == 6 * row["batch_size"] and len(seconds) == 2
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / (sum(seconds) / 2))
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / generate["tokens_per_second"])
        assert row["outside_seconds_per_step"] > 0 and row["compile_seconds"] == 0
    first, second = of_batch(document, 1), of_batch(document, 2)
    fastest = max(first[name]["tokens_per_second"] for name in ASSISTED)
    for row in first.values():
        assert row["speedup_over_assisted"] == pytest.approx(row["tokens_per_second"] / fastest)
    assert {row["speedup_over_assisted"] for row in second.values()} == {None}
    # transformers counts the forward that reads the prompt, which is also its first step.
    assert first[GENERATE]["num_steps"] == first[OURS[0]]["num_steps"] == 6
    assert first[OURS[0]]["mean_acceptance_length"] == 1 and first[OURS[0]]["acceptance_rate"] is None
    # Greedy, with the same draft and K: the same tokens are accepted.
    for name in ("specops", ASSISTED[0]):
        assert first[name]["mean_acceptance_length"] == pytest.approx(6 / first[name]["num_steps"])
    assert abs(first["specops"]["num_steps"] - first[ASSISTED[0]]["num_steps"]) <= 1


def printed(show: Callable[..., None], legend: str, records: list[dict[str, Any]], *totals: Any) -> list[str]:
    """The lines of a table and its legend on a narrow terminal, which cuts nothing off."""
    console = options.new_console()
    console.file, console.width = io.StringIO(), 60
    show(console, records, *totals)
    results.print_legend(console, legend, records, *totals or [[]])
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 78
    return lines


def run_of(provider: str, category: str, *values: Any, **named: Any) -> Run:
    """One of 32 rows at temperature 0.7 that got 100,000 tokens."""
    case = Case([[torch.zeros(1)] * 32], SamplingParams(temperature=0.7), category)
    return Run(providers.Provider(provider, lambda *_: providers.Answer([]), ()), case, 10**5, *values, **named)


def test_the_tables_fit_into_80_columns(tmp_path: Path) -> None:
    """With everything that may be in them: long names, large numbers, compiled steps, CUDA."""
    counts = (10**4, 11765, [9], [9], 123.0)
    slow = run_of("transformers assisted, own K", "", [1.1], *counts, greedy="near ties")
    # Of three rounds the median counts.
    more = {"compile_seconds": 42.0, "peak_memory_bytes": 10**11, "greedy": "different"}
    fast = run_of("specops, no draft, compiled", "", [0.1, 1.0, 9.0], *counts, **more)
    lines = printed(results.print_providers, results.PROVIDERS_LEGEND, results.as_results([slow, fast]))
    assert [line.split() for line in lines[1:4]] == [
        ["T", "=", "0.7,", "batch", "32", "tok/s", "/asst", "len", "rate", "ms/st", "MB"],
        ["transformers", "assisted", "own", "K", "90909.1", "1.00", "8.50", "100%", "12.30", "-", "~"],
        ["specops,", "no", "draft,", "compiled", "100000.0", "1.10", "8.50", "100%", "12.30", "100000", "!"],
    ]
    assert "specops, no draft, compiled, T = 0.7, batch 32: 42.0 s compiling, not counted" in lines
    # By category, and as a picture.
    pytest.importorskip("matplotlib")
    fast_run = ([1.0], 10**4, 11765, [9] * 10, [9] * 10)
    slow_run = ([2.0], 10**4, 10**5, [100] * 4, [90, 80, 70, 60])
    runs = []
    for category in ("a very long category", "b"):
        for way in (GENERATE, "transformers assisted, K = 10", *OURS):
            own, greedy = (fast_run, "identical") if category != "b" or way == OURS[0] else (slow_run, "near ties")
            runs.append(run_of(way, category, *own, greedy=greedy))
    records, totals = results.as_results(runs), results.as_results(results.totals(runs))
    lines = printed(results.print_categories, results.CATEGORIES_LEGEND, records, totals)
    row = "a very long c.. 100000.0 t 100000.0 8.50 100000.0 1.00 8.50 100 100 100 100 ="
    assert " ".join(lines[3].split()) == row
    assert " ".join(lines[4].split()) == "b 100000.0 s 50000.0 1.00 50000.0 0.50 1.00 90 80 60 - ~"
    plot.plot_categories(records + totals, "target, draft", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_samples_and_does_not_compare(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def recorded(*arguments: Any, **options: Any) -> SpeculativeDecoder:
        made.append(options)
        return SpeculativeDecoder(*arguments, **options)

    numbers, generate = [], LlamaForCausalLM.generate

    def watched(model: LlamaForCausalLM, **options: Any) -> Any:
        if "assistant_early_exit" in options:
            numbers.append(model.generation_config.num_assistant_tokens)
        return generate(model, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", watched)
    monkeypatch.setattr(providers, "SpeculativeDecoder", recorded)
    own = ["--verify", "block", "--schedule", "heuristic", "--num-draft-tokens", "7", "--invariant"]
    result = bench(target, "--temperature", "0.8", "--batch-sizes", "1", "--draft", "lookup-else:early-exit:1", *own)
    assert result.exit_code == 0, result.output
    assert "sampled outputs are not compared" in result.stdout
    # Forwards of the target are also those of the draft, so they do not count steps.
    assert len(re.findall(r"^transformers assisted.* -( +-)+ *$", result.stdout, re.MULTILINE)) == 2
    options = {"num_draft_tokens": 7, "schedule": "heuristic", "compile": False, "invariant": True}
    assert made == [options, options | {"verify": "block"}]
    # As many as `LookupElse` asks of the early exit. Transformers' default is not 5.
    assert numbers[0] == 5 and len(set(numbers)) == 2
    early_exit = EarlyExit(1)
    asked = [models.num_assisted_tokens(draft, None) for draft in (LookupElse(early_exit), early_exit, PromptLookup())]
    assert asked == [2, 2, 10]


def test_every_provider_has_the_filters(loaded: tuple[models.Models, list[Tensor]]) -> None:
    """Sampling among one token is greedy decoding, with every rule."""
    batch, texts = padded(loaded[1], loaded[0].target), []
    for filters in ({}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        sampling = SamplingParams(temperature=0.8 if filters else 0.0, **filters)
        verify = "block" if "top_k" in filters else "exact"
        ways = providers.make_providers(loaded[0], 2, verify=verify)
        texts += [way.decode(*(part[:1] for part in batch), 6, sampling, 0).tokens for way in ways]
    assert len(texts) == 20 and texts == texts[:1] * 20


def test_bench_providers_decode_past_an_eos(target: str, tmp_path: Path) -> None:
    model, tokenizer = LlamaForCausalLM.from_pretrained(target), loading.load_tokenizer(target)
    prompt = tokenizer(TEXT, return_tensors="pt")
    third = int(model.generate(**prompt, do_sample=False, max_new_tokens=3, pad_token_id=0)[0, -1])
    model.generation_config.eos_token_id = third
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    draft, console = f"lookup-else:ngram:{tmp_path / 'text.txt'}", Console(file=io.StringIO())
    found, _ = models.load_models(console, str(tmp_path), draft, torch.device("cpu"))
    ways = providers.make_providers(found, 3)
    assert found.target.eos_token_ids == (third,) and [way.name for way in ways] == [GENERATE, *OURS]
    batch, greedy = padded([prompt["input_ids"][0]], found.target), SamplingParams(temperature=0.0)
    # Ours first, because transformers' provider takes the eos from the model's generation config.
    texts = [way.decode(*batch, 9, greedy, 0).tokens for way in reversed(ways)]
    assert len(texts[0][0]) == 9 and texts == texts[:1] * 3


@can_be_built
def test_bench_drafts_with_a_gemma4_assistant(target: str, tmp_path: Path) -> None:
    tokenizer, folders = loading.load_tokenizer(target), [str(tmp_path / name) for name in ("target", "assistant")]
    for model, folder in zip(tiny_gemma4(len(tokenizer)), folders, strict=True):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folders[0])
    console, cpu = Console(file=io.StringIO()), torch.device("cpu")
    found, _ = models.load_models(console, folders[0], f"lookup-else:{folders[1]}", cpu)
    assert isinstance(found.draft, LookupElse) and isinstance(found.draft.other, Gemma4Assistant)
    assert models.num_assisted_tokens(found.draft, None) == 4
    batch, greedy = padded([models.encode(tokenizer, TEXT)[0]], found.target), SamplingParams(temperature=0.0)
    for models_of in (found, replace(found, draft=found.draft.other)):
        ways = providers.make_providers(models_of, 4)
        assert [way.name for way in ways] == [GENERATE, "transformers assisted, K = 4", *OURS]
    texts = [way.decode(*batch, 6, greedy, 0).tokens for way in ways]
    assert texts == texts[:1] * 4


def test_bench_without_refused_assisted_generation(
    target: str, draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LlamaForCausalLM.generate

    def stateful(model: LlamaForCausalLM, **options: Any) -> Any:
        # The package would refuse the model itself.
        with monkeypatch.context() as patch:
            patch.setattr(LlamaForCausalLM, "_is_stateful", True)
            return generate(model, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", stateful)
    file = tmp_path / "out.json"
    result = bench(target, "--draft", draft, "--num-draft-tokens", "3", "--batch-sizes", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert [row["provider"] for row in document["results"]] == [GENERATE, *OURS]
    assert list(document["refused"]) == ASSISTED
    for name, reason in document["refused"].items():
        assert "stateful" in reason and f"{name} is left out: {reason}" in " ".join(result.stdout.split())


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
    assert "specops, batch 2: 1 tokens differ from plain greedy decoding. The worst: in row 1" in result.stdout


@pytest.mark.parametrize(
    ("early_end", "by_category"),
    [(KeyboardInterrupt(), True), (torch.OutOfMemoryError("out of memory"), False)],
    ids=str,
)
def test_bench_prints_tables_as_they_are_measured(
    early_end: BaseException, by_category: bool, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = Comparison.run

    def ended(self: Comparison) -> Iterator[tuple[Case, str]]:
        for case, label in run_all(self):
            if label.startswith("T = 0, batch 2") and ", round 2" in label:
                raise early_end
            yield case, label
            print(label)

    monkeypatch.setattr(Comparison, "run", ended)
    file = tmp_path / "out.json"
    prompts = ["--prompts", questions(tmp_path), "--temperature", "0"] if by_category else ["--prompt", TEXT]
    options = ["--batch-sizes", "1,2", "--max-new-tokens", "6", "--rounds", "2", "--json", str(file)]
    result = run("bench", "--target", target, *prompts, *options)
    document = json.loads(file.read_text())
    second = "T = 0, batch 2, plain" if by_category else "T = 0, batch 2"
    legend = "undrafted, asst" if by_category else "tok/s:"
    shown = re.findall(rf"^T = 0, batch \d(?= *$|  )|^{second}, warming up: tr|^{legend}", result.stdout, re.M)
    assert shown == ["T = 0, batch 1", f"{second}, warming up: tr", "T = 0, batch 2", legend]
    if isinstance(early_end, KeyboardInterrupt):
        assert result.exit_code == 130 and "interrupted: " in result.stdout
        assert document["interrupted"] and document["error"] is None
    else:
        assert (result.exit_code, result.stderr) == (2, "torch-specops: error: out of memory\n")
        assert document["error"] == "out of memory" and not document["interrupted"]
    rounds = {(row["batch_size"], len(seconds)) for row in document["results"] for seconds in row["seconds"]}
    assert rounds == {(1, 2), (2, 1)}


def test_providers_take_turns(loaded: tuple[models.Models, list[Tensor]]) -> None:
    found, prompts = loaded
    tokens, mask = padded(prompts, found.target)
    rows = [row[own.bool()].tolist() for row, own in zip(tokens, mask, strict=True)]
    assert rows == [each.tolist() for each in prompts] and mask[:, -1].all()
    greedy = SamplingParams(temperature=0.0)
    cases = [Case([prompts[:1], prompts[1:]], greedy, "one"), Case([prompts], greedy, "two")]
    comparison = Comparison(found.target, providers.make_providers(found, 2), cases, 4, 2)
    labels, numbers, cost = [], set(), 0.0
    for case, label in comparison.run():
        labels.append(label)
        cost += case.cost
        # Whenever it is interrupted, all providers of a case have results for the same batches.
        assert all(run.seconds for run in comparison.runs)
        numbers.add(tuple(run.case.category for run in comparison.runs))
    assert numbers == {(), ("one",) * 5, ("one",) * 10, ("one",) * 10 + ("two",) * 3}
    # The progress ends at the whole cost.
    assert cost == pytest.approx(comparison.cost())
    # No provider is always first.
    first = [label for label in labels if label.startswith("T = 0, batch 2, two, round")][::3]
    assert [label.split(": ")[1] for label in first] == ["specops, no draft", "specops"]


# Files of prompts. The model is the package's own: some of its text repeats.


def questions(folder: Path) -> str:
    lines = [
        {"question_id": 7, "category": "plain", "turns": ["She said that she said", "never asked"]},
        {"category": "other", "turns": ["It was not to be supposed that it was not"]},
        {"question_id": "x", "category": "plain", "turns": ["the lady and the"]},
        {"category": "plain", "turns": ["of the house of"]},
    ]
    file = folder / "prompts.jsonl"
    file.write_text("\ufeff" + "\n\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return str(file)


def case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["temperature"], row["batch_size"], row["category"]


@pytest.mark.slow
def test_bench_measures_each_category_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    own = ["--draft", "prompt-lookup:2", "--num-draft-tokens", "3", "--schedule", "constant"]
    own += ["--max-new-tokens", "12", "--batch-sizes", "1,2"]
    result = run("bench", "--target", loading.AUSTEN, "--prompts", questions(tmp_path), *own, "--json", str(file))
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert "4 prompts in 2 categories; 1 later turns are not asked" in result.stdout
    cases = [(t, size) for t in (0, 1) for size in (1, 2)]
    ways = {1: [GENERATE, ASSISTED[0], *OURS], 2: [GENERATE, *OURS]}
    rows = {(*case_of(row), row["provider"]): row for row in document["results"]}
    assert list(rows) == [(t, b, name, way) for t, b in cases for name in ("plain", "other") for way in ways[b]]
    for (_, size, name, _), row in rows.items():
        # The second batch of three prompts is filled up, and so is the only one of one prompt.
        num_batches = {("plain", 1): 3, ("plain", 2): 2}.get((name, size), 1)
        assert row["num_batches"] == len(row["seconds"]) == num_batches
        assert row["new_tokens"] == 12 * size * num_batches and {len(each) for each in row["seconds"]} == {1}
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / sum(each for (each,) in row["seconds"]))
    every = document["results"] + document["totals"]
    for row in every:
        undrafted = [way for way in every if case_of(way) == case_of(row) and way["provider"] in (GENERATE, OURS[0])]
        best = max(way["tokens_per_second"] for way in undrafted)
        assert len(undrafted) == 2 and row["speedup_over_undrafted"] == pytest.approx(row["tokens_per_second"] / best)
    for row in document["totals"]:
        parts = [rows[row["temperature"], row["batch_size"], name, row["provider"]] for name in ("plain", "other")]
        assert row["category"] == "total" and row["new_tokens"] == sum(part["new_tokens"] for part in parts)
        assert row["seconds"] == parts[0]["seconds"] + parts[1]["seconds"]
    # With transformers' settings its accepted lengths are ours, in every category.
    for name in ("plain", "other"):
        own, theirs = (rows[0, 1, name, way] for way in (OURS[1], ASSISTED[0]))
        assert own["mean_acceptance_length"] == theirs["mean_acceptance_length"] > 1
        assert own["num_steps"] == theirs["num_steps"]
        rates = own["acceptance_rate_per_position"]
        assert len(rates) == 3 and rates == sorted(rates, reverse=True) and 0 < rates[0] < 1
    tables = re.findall(
        r"^T = (\d), batch (\d)\ncategory.* 1 +2 *\nplain .*?(=?) *\nother .*?\3 *\ntotal .*?\3 *$", result.stdout, re.M
    )
    assert tables == [(str(t), str(size), "" if t else "=") for t, size in cases]
    assert "=: identical to plain greedy decoding\nsampled outputs are not compared\n" in result.stdout
    # What the schedule did: a line for each category.
    drafted = re.findall(r"^(\w+): \d\.\d drafts a row and step, \d+% of these without$", result.stdout, re.M)
    assert drafted == ["plain", "other", "total"] * len(cases)


def test_a_line_that_is_no_question_is_named(tmp_path: Path) -> None:
    file, right = tmp_path / "prompts.jsonl", '{"turns": ["a text"]}\n'

    def read(content: str | bytes | None) -> object:
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_questions(file)

    line, wrong_turns = rf"prompts: {file}, line (\d): expected ", "'turns' to be a list of texts, none of them empty"
    cases = [
        ("", f"prompts: expected a question in {str(file)!r}, got an empty file"),
        (right + "\nno JSON", line.replace(r"\d", "3") + "JSON, got 'no JSON'"),
        (right + "[1]", line.replace(r"\d", "2") + "an object such as"),
        ('{"category": "a", "text": "b"}', line + "the field 'turns', got 'category', 'text'"),
        ('{"turns": "a text"}', line + wrong_turns),
        ('{"turns": [" "]}', line + wrong_turns),
        ('{"turns": ["a"], "category": 3}', line + "'category' to be a name, got 3"),
        ('{"turns": ["a"], "category": "\\u001b[2J"}', line + r"'category' to be a name, got \"\\u001b\[2J\""),
        (right.encode("utf-16"), f"prompts: cannot read {str(file)!r} as UTF-8 text"),
        (None, f"prompts: cannot read {str(file)!r} as UTF-8 text"),
    ]
    assert raised(read, [(content, ValueError, message) for content, message in cases]) == []
    found = read_questions(Path(questions(tmp_path)))
    assert [question.place for question in found] == [f"prompts: {file}, line {number}" for number in (1, 3, 5, 7)]
    example = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
    # An installed package has no examples.
    assert not example.exists() or len({question.category for question in read_questions(example)}) == 6


def test_bench_shows_time_left_and_plots_speeds(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    save, saved = figure.savefig, []

    def kept(self: Any, *arguments: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(figure, "savefig", kept)
    files = tmp_path / "out.json", tmp_path / "plot.png"
    options = ["--max-new-tokens", "6", "--batch-sizes", "1,2", "--json", str(files[0]), "--plot", str(files[1])]
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}
    options += ["--draft", "early-exit:1"]
    result = run("bench", "--target", target, "--prompt", TEXT, *options, **terminal)
    assert result.exit_code == 0, result.output
    assert re.search(r"\d:\d\d:\d\d \d:\d\d:\d\d left, T = 0, batch 2, ", re.sub(r"\x1b\[[\d;]*m", "", result.stdout))
    assert files[1].read_bytes().startswith(b"\x89PNG")
    document = json.loads(files[0].read_text())
    # The acceptance at each place, below the speeds.
    acceptance, *panels = saved[0].axes
    assert saved[0].get_suptitle() == f"{target}, draft early-exit:1"
    assert {line.get_label(): line.get_ydata().tolist() for line in acceptance.lines} == {
        f"T = 0, batch {size}": of_batch(document, size)["specops"]["acceptance_rate_per_position"] for size in (1, 2)
    }
    assert acceptance.bbox.y1 < panels[-1].bbox.y0
    for panel, size in zip(panels, (1, 2), strict=True):
        speeds = {name: row["tokens_per_second"] for name, row in of_batch(document, size).items()}
        assert panel.get_title("left") == f"T = 0, batch {size}"
        assert [text.get_text() for text in panel.get_yticklabels()] == list(speeds)
        assert [bar.get_width() for bar in panel.patches] == list(speeds.values())
        assert [text.get_text() for text in panel.texts] == [f"{speed:.1f}" for speed in speeds.values()]
        # From zero, and the first provider is at the top.
        assert panel.get_xlim()[0] == 0 and panel.yaxis_inverted()


@pytest.mark.slow
def test_bench_measures_compiled_steps(target: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(target, "--batch-sizes", "1", "--num-draft-tokens", "2", "--compile", "--json", str(file))
    assert result.exit_code == 0, result.output
    for name in OURS:
        found = of_batch(json.loads(file.read_text()), 1)[f"{name}, compiled"]
        assert found["compile_seconds"] > 0 and found["greedy"] == "identical"
        assert found["outside_seconds_per_step"] is None
