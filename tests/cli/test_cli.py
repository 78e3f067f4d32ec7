"""The command line: what it prints, what it refuses and how, on tiny models."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from marks import slow
from rich.console import Console
from tiny_cli import TEXT, bench, demo, row, run, save_model
from tiny_dflash import BLOCK, save_drafter
from tiny_dflash import new_head as new_drafter
from tiny_eagle3 import new_head, save_head
from tiny_mtp import add_mtp_layer
from tiny_tokenizers import austen
from transformers import LlamaForCausalLM
from typer.testing import CliRunner, Result

import torch_specops
from torch_specops import cli
from torch_specops.cli import loading, models, options
from torch_specops.cli.greedy import GreedyDifference
from torch_specops.decode import SpeculativeDecoder, Step, TextPieces
from torch_specops.decode.view import printable
from torch_specops_command import app, main


def text_of(result: Result) -> str:
    """What the demo printed between its header and its numbers."""
    assert result.exit_code in (0, 130), result.output
    return result.stdout.split("\n\n", 1)[1].split("\n tokens ")[0]


# Text on a terminal.


def test_text_counts_as_accepted_when_all_its_tokens_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a character at the end is shown too."""
    monkeypatch.setattr(cli.demo, "STYLES", {kind: kind for kind in cli.demo.STYLES})
    tokens = list("🙂a🙂".encode())[:-1]
    for num_accepted, styles in ((8, "accepted accepted accepted"), (4, "accepted own own"), (3, "own own own")):
        console = mock.Mock(color_system=None)
        step = Step([tokens], [num_accepted], [8], [120], [True], 0.0)
        cli.demo._print_steps(console, iter([step]), TextPieces(austen()))
        texts = [call.args[0] for call in console.print.call_args_list[:-1]]
        assert [text.plain for text in texts] == ["🙂", "a", "\ufffd"]
        assert [text.style for text in texts] == styles.split()
    console = mock.Mock()
    cli.demo._print_steps(console, iter([step]), TextPieces(austen()))
    texts = [call.args[0] for call in console.print.call_args_list[:-1]]
    assert [(text.plain, text.style) for text in texts][:2] == [("x", "rejected"), ("🙂", "own")]


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = "a\x1b[2J\x1b]0;title\x07\r\x9b31m\x7f\tb\nc"
    replaced = "a\ufffd[2J\ufffd]0;title\ufffd\ufffd\ufffd31m\ufffd\tb\nc"
    assert printable(text) == replaced
    console = options.new_console()
    console.file = io.StringIO()
    step = Step([list(text.encode())], [0], [0], [-1], [True], 0.0)
    assert not cli.demo._print_steps(console, iter([step]), TextPieces(austen()))
    shown = console.file.getvalue()
    # rich expands tabs.
    assert {character for character in shown if not character.isprintable()} == {"\n"}
    assert "".join(replaced.split()) in "".join(shown.split())


def test_nothing_spins_where_pictures_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on a terminal, and not on that of a notebook's cell."""
    for is_terminal, parent, is_shown in ((True, None, True), (True, "1", False), (False, None, False)):
        monkeypatch.delenv("JPY_PARENT_PID", raising=False)
        if parent is not None:
            monkeypatch.setenv("JPY_PARENT_PID", parent)
        console = Console(file=io.StringIO(), force_terminal=is_terminal)
        with models.spinner(console, "loading"):
            pass
        assert ("loading" in console.file.getvalue()) == is_shown


# The demo.


def test_demo_prints_text_numbers_and_the_check(target: str) -> None:
    result = demo(target)
    num_tokens, num_steps = int(row(result, "tokens")), int(row(result, "steps"))
    assert f"target: {target}\ndraft:  prompt-lookup, 10 tokens per step\n" in result.stdout
    assert row(result, "mean acceptance length").startswith(f"{num_tokens / num_steps:.2f} ")
    assert "tokens/s without the draft" in result.stdout
    assert f"check: identical to plain greedy decoding ({num_tokens} tokens)" in result.stdout
    # The text is the decoded output of the same model.
    model, tokenizer = loading.load_model(target), loading.load_tokenizer(target)
    prompt = tokenizer(TEXT, return_tensors="pt")
    output = model.model.generate(**prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    expected = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "".join(printable(expected).split()) in "".join(result.stdout.split())


def test_the_last_line_says_what_to_try_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each suggestion can be followed, as long as it is a demo."""
    monkeypatch.setattr(sys, "argv", [".venv/bin/torch-specops"])
    command, lines = "demo --target austen-bytes", []
    while command.startswith("demo"):
        result = run(*command.split(), "--max-new-tokens", "8", PATH="")
        assert result.exit_code == 0, result.output
        lines.append(result.stdout.splitlines()[-1])
        command = lines[-1].split("torch-specops ")[1]
    pair = "--target austen-bytes --draft austen-bytes-draft"
    assert lines == [
        f"next:  a small model as the draft: .venv/bin/torch-specops demo {pair}",
        f"next:  sampled text: .venv/bin/torch-specops demo --temperature 0.7 {pair}",
        f"next:  the speed beside transformers: .venv/bin/torch-specops bench {pair}",
    ]
    # The folder is on the path; or another program was called.
    for program, found in ((".venv/bin/torch-specops", "/bin/torch-specops"), ("cli/__main__.py", None)):
        monkeypatch.setattr(sys, "argv", [program])
        monkeypatch.setattr(cli.demo, "which", lambda name, found=found: found)
        following = cli.demo._next(loading.SMOLLM2, models.PROMPT_LOOKUP, "cpu", 0.0)
        assert following == "sampled text: torch-specops demo --temperature 0.7"
    following = cli.demo._next("my model", models.PROMPT_LOOKUP, "cuda", 0.7)
    assert following.endswith(": torch-specops bench --target 'my model' --device cuda")


# The drafts themselves are tested in tests/drafts.
@pytest.mark.parametrize("kind", ["eagle3", slow("dflash"), "int8", slow("mtp")])
def test_demo_with_other_drafts(target: str, tmp_path: Path, kind: str) -> None:
    """The tests of `bench` have the others."""
    if kind == "int8":
        pytest.importorskip("torchao")
    vocab_size = loading.load_model(target).vocab_size
    name = f"{kind}:{tmp_path / 'head'}" if kind in ("eagle3", "dflash") else kind
    if kind == "eagle3":
        save_head(new_head(vocab_size=vocab_size, draft_vocab_size=vocab_size), tmp_path / "head")
    if kind == "dflash":
        save_drafter(new_drafter(vocab_size=vocab_size), tmp_path / "head", vocab_size=vocab_size)
    if kind == "mtp":
        target = str(shutil.copytree(target, tmp_path / "target"))
        add_mtp_layer(Path(target))
    result = demo(target, "--draft", name, "--threads", str(torch.get_num_threads()))
    assert "check: identical" in result.stdout, result.output
    assert row(result, "acceptance rate").endswith("draft tokens)")
    assert kind != "dflash" or f"{BLOCK - 1} tokens per step" in result.stdout
    assert kind != "int8" or float(row(result, "acceptance rate").split("%")[0]) > 50
    assert kind != "mtp" or "draft:  mtp, 1 tokens per step" in result.stdout


def test_demo_options_reach_the_decoder(target: str, draft: str) -> None:
    own = ["--draft", target, "--num-draft-tokens", "3", "--no-check"]
    sampled = [*own, "--temperature", "1.5", "--seed", "3"]
    greedy = demo(target, *own)
    assert row(greedy, "acceptance rate").startswith("100.0% ")
    assert "check:" not in greedy.stdout
    text = text_of(demo(target, *sampled))
    # One token left is the greedy one.
    for filters in (["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"]):
        assert text_of(demo(target, *sampled, *filters)) == text_of(greedy) != text
    stranger = ["--draft", draft, "--num-draft-tokens", "6", "--temperature", "2", "--max-new-tokens", "40"]
    assert text_of(demo(target, *stranger, "--verify", "block")) != text_of(demo(target, *stranger))
    assert text_of(demo(target, *sampled[:-1], "4")) != text
    other = demo(target, *sampled, "--top-p", "0.9")
    assert "sampled from the target's distribution, temperature 1.5, top-p 0.9" in other.stdout
    # With a constant number of one draft, 20 tokens would take 10 steps.
    heuristic = demo(target, "--draft", target, "--num-draft-tokens", "1", "--schedule", "heuristic", "--no-compile")
    assert int(row(heuristic, "steps")) < 7
    assert row(demo(target, "--max-new-tokens", "0"), "steps") == "0"


def test_a_chat_template_is_used(target: str) -> None:
    tokenizer = loading.load_tokenizer(target)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]"
    assert tokenizer.decode(models.encode(tokenizer, "push")[0]) == "[user] push[answer]"


def test_colours_follow_acceptance(target: str) -> None:
    own = ["--draft", target, "--num-draft-tokens", "3", "--prompt", TEXT, "--no-check"]
    colours = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}
    result = CliRunner().invoke(app, ["demo", "--target", target, *own], env=colours)
    assert result.exit_code == 0, result.output
    names = "\x1b[1;32maccepted drafts\x1b[0m, \x1b[9;31mrejected drafts\x1b[0m, \x1b[33mthe target's own tokens\x1b[0m"
    assert names in result.stdout
    # Of four tokens, the target draws one; with the first, which is the target's too, and its own words above.
    assert result.stdout.count("\x1b[1;32m") > 1.5 * result.stdout.count("\x1b[33m") > 3


@pytest.mark.parametrize("num_steps", [0, 3])
def test_ctrl_c_keeps_what_was_generated(target: str, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    whole = demo(target, "--no-check")
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
    assert result.stdout.splitlines()[-1].startswith("interrupted: ") and not re.search("check:|next:", result.stdout)
    text = text_of(result).rstrip()
    assert text_of(whole).startswith(text) and bool(text) == (num_steps > 0)


def test_a_row_without_finite_logits_is_reported(target: str, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    loading.load_tokenizer(target).save_pretrained(tmp_path)
    result = demo(str(tmp_path))
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("error: target: no finite logit")


def test_a_failed_check_exits_with_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, tie = (GreedyDifference(4, 70, 71, 0.5, 1e-4), GreedyDifference(6, 72, 73, 1e-5, 1e-4))
    for found, exit_code, said in (
        ([wrong, tie], 1, "check: DIFFERENT from plain greedy decoding at 2 of 20 tokens; the worst: token 4 is"),
        ([tie], 0, "check: identical to plain greedy decoding but for near ties at 1 of 20 tokens: token 6"),
    ):
        monkeypatch.setattr(cli.demo, "compare_speeds", lambda *arguments, found=found: (None, found))
        result = demo(target)
        assert result.exit_code == exit_code and said in result.stdout
        assert ("next:" in result.stdout) == (exit_code == 0)


# What is refused, and help.

BAD = {
    "demo": [
        (["--target", "/no/such/model"], "target: cannot load '/no/such/model': there is no such folder"),
        (["--target", "nosuch"], "target: 'nosuch' is no folder and not in the cache of the hub, and the hub cannot"),
        (["--draft", "no/such"], "draft: 'no/such' is no folder and not in the cache of the hub, and the hub cannot"),
        (["--draft", "eagle3:no/such"], "draft: 'no/such' is no folder and not in the cache of the hub, and"),
        (["--draft", "dflash:no/such"], "draft: 'no/such' is no folder and not in the cache of the hub, and"),
        (["--max-new-tokens", "9999"], "max_new_tokens: expected prompt and new tokens within the 256 that the target"),
        (["--temperature", "nan"], "temperature: expected 0 (greedy) or finite numbers >= 1e-30, got nan"),
        (["--draft", "early-exit:9"], "draft: 'early-exit:9': num_layers: expected 1 to 2, got 9"),
        (["--draft", "promt-lookup"], "draft: there is no 'promt-lookup'; did you mean 'prompt-lookup'?"),
        (["--draft", "lookup-else:"], "draft: expected another draft after 'lookup-else:', got ''"),
        (["--draft", "lookup-else:lookup-else:int8"], "draft: expected another draft after 'lookup-else:', got 'look"),
        (
            ["--draft", "ngrams:text"],
            "draft: 'ngrams:text' is no folder and no hub id; other values are prompt-lookup,",
        ),
        (["--target", "smollm2-135m"], "target: there is no 'smollm2-135m'; did you mean 'smollm2-135m-instruct'?"),
        (["--draft", "early-exit:all"], "draft: expected a number of layers after 'early-exit:', got 'all'"),
        (["--draft", "eagle3:/no/such/head"], "draft: there is no folder '/no/such/head', and it is no hub id"),
        (["--draft", "dflash:"], "draft: expected a folder or a hub id after 'dflash:'"),
        (["--draft", "peagle:austen-bytes"], "config: expected architectures ['LlamaForCausalLMEagle3'] with"),
        (["--draft", "ngram:/no/such/text"], "draft: cannot read '/no/such/text' as UTF-8 text"),
        (["--prompt", ""], "prompt: expected a text, got an empty one"),
        (["--threads", "0"], "threads: expected a number >= 1, got 0"),
        (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
        (["--device", "cuda:99"], "device: torch finds"),
    ],
    "bench": [
        (["--batch-sizes", "1,many"], "batch_sizes: expected numbers separated by commas, got '1,many'"),
        (["--batch-sizes", "0"], "batch_sizes: expected a number >= 1, got 0"),
        (["--rounds", "0"], "rounds: expected a number >= 1, got 0"),
        (["--max-new-tokens", "0"], "max_new_tokens: expected a number >= 1, got 0"),
        (["--json", "/no/such/folder/out.json"], "json: there is no folder '/no/such/folder'"),
        (["--temperature", "0,warm"], "temperature: expected numbers separated by commas, got '0,warm'"),
        (["--plot", "out.txt"], "plot: expected a file that ends in .png, .svg, .pdf, got 'out.txt'"),
        (["--draft", "prompt-lookup:0"], "draft: expected the longest match after 'prompt-lookup:', got '0'"),
        (["--prompts", "file"], "prompts: expected --prompts or --prompt, got both"),
        (
            ["--prompt", "long " * 99],
            "prompt: expected a prompt and new tokens within the 256 that the target reads, got",
        ),
    ],
}


def refused(result: Result, message: str) -> bool:
    """With one line that begins so, and exit code 2."""
    begins = result.stderr.startswith(f"torch-specops: error: {message}")
    return begins and result.stderr.count("\n") == 1 and result.exit_code == 2


class ConnectError(Exception):
    """What clients of the web call it."""


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """A hub that cannot be reached."""
    with mock.patch("huggingface_hub.get_hf_file_metadata", side_effect=ConnectError("unknown host")) as request:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield request


def test_unknown_hub_id_is_refused_at_once(no_hub: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--some--model").mkdir()
    for name in ("some/model", str(tmp_path), "./model", "~/model"):
        loading.check_hub("target", name)
    assert not no_hub.called
    no_hub.side_effect = TimeoutError("slow")
    loading.check_hub("target", "other/model")
    assert no_hub.called
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"target: 'other/model' is no folder .*, and HF_HUB_OFFLINE is set"):
        loading.check_hub("target", "other/model")
    assert no_hub.call_count == 1


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("command", list(BAD))
def test_bad_input_is_one_line_and_exit_code_2(command: str, target: str) -> None:
    results = [((demo if command == "demo" else bench)(target, *given), message) for given, message in BAD[command]]
    assert [(message, result.output) for result, message in results if not refused(result, message)] == []
    for arguments in (["--max-new-tokens", "many"], ["--schedule", "lunar"], ["--no-such-option"]):
        assert run(command, *arguments).exit_code == 2


def test_missing_packages_and_other_tokens_are_one_line(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = demo(target, "--draft", save_model(tmp_path / "other", seed=0, vocab_size=270))
    assert refused(other, "draft: expected a model with the target's tokens (280 logits, 280 tokens), got other")
    monkeypatch.setattr("torch_specops.cli.bench.find_spec", lambda name: None)
    missing = "plot: matplotlib is missing; run: pip install 'torch_specops[bench]'"
    assert refused(bench(target, "--plot", "out.png"), missing)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr(models, "import_transformers", lambda: None)
    monkeypatch.setattr(loading, "import_transformers", lambda: None)
    assert refused(demo(target, "--draft", "int8"), "a quantised copy needs torchao; run: pip install torchao\n")


def test_help_explains_every_option() -> None:
    for command in ("demo", "bench"):
        # Some releases of typer would call such an option by its metavar.
        parameters = typer.main.get_command(cli.app).commands[command].params
        assert not [each.name for each in parameters if each.metavar == each.name.upper()]
        result = run(command, "--help", COLUMNS="80")
        assert result.exit_code == 0
        assert f"torch-specops {command} --target ./model --draft ./small-model" in result.stdout
        assert "[default: Here is" not in result.stdout
        # No word of the help is cut off at 80 columns.
        assert "…" not in result.stdout and len(max(result.stdout.splitlines(), key=len)) <= 80
        # Explanations begin in the left half of the line, and each example has a line of its own.
        lines = [line for line in result.stdout.splitlines() if line.startswith("  --")]
        assert lines and all(re.match(r" {2}\S.{,26}  \S", line) or len(line) < 30 for line in lines)
        assert f"\n    torch-specops {command}\n" in result.stdout
    assert run("--version").stdout == f"torch-specops {torch_specops.__version__}\n"
    commands = run("--help", COLUMNS="80").stdout
    assert (
        all(f"  {command}  " in commands for command in ("demo", "bench", "env"))
        and "\n  env    Print versions and devices, for a bug report.\n" in commands
    )


def test_env_says_which_versions_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("env")
    assert row(result, "torch").removesuffix(" (not tested)") == torch.__version__
    assert row(result, "tested").startswith("torch 2.11 to 2.")
    (oldest, _), (_, newest) = cli.env.TESTED["triton"], cli.env.TESTED["transformers"]
    for name, version, mark in (
        ("triton", f"{oldest}.0", ""),
        ("triton", "3.5.1", " (not tested)"),
        ("triton", "not installed", ""),
        ("transformers", f"{newest}.4", ""),
        # As text 5.2 would lie between 5.17 and 5.24.
        ("transformers", "5.2.0", " (not tested)"),
        ("transformers", "6.0.0.dev0", " (not tested)"),
        ("torchao", "99.0", ""),
    ):
        monkeypatch.setattr(cli.env, "versions", lambda name=name, version=version: {name: version})
        assert row(run("env"), name) == version + mark


def in_a_process(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", ["--help", slow("bench")])
def test_a_process_prints_only_its_output(command: str, target: str, draft: str) -> None:
    """Other packages log when they are first imported. Help does not wait for torch. Without typer, an error is one
    line."""
    options = ["--target", target, "--draft", draft, "--prompt", TEXT, "--max-new-tokens", "4"]
    options += ["--rounds", "1", "--batch-sizes", "1"]
    done = in_a_process(
        """
import sys
sys.modules['typer'] = None
try:
    import torch_specops_command
except SystemExit as end:
    assert end.code == 2
    print(file=sys.stderr)
del sys.modules['typer']
from torch_specops_command import main
try:
    main()
finally:
    assert ('torch' in sys.modules) == (sys.argv[1] == 'bench')
""",
        *([command, *options] if command == "bench" else [command]),
    )
    missing = "torch-specops: error: typer is missing; run: pip install 'torch_specops[hf]'\n\n"
    assert (done.returncode, done.stderr) == (0, missing)
    assert f"target {target}" in done.stdout.splitlines()[0] if command == "bench" else "Usage:" in done.stdout


@pytest.mark.parametrize("command", ["--help", "env"])
def test_a_closed_pipe_is_no_difference(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `torch-specops ... | head -1`: exit code 1 would mean that texts differ."""
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "argv", ["torch-specops", command])
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 141
    # What typer could not write is written again.
    with suppress(BrokenPipeError):
        output.close()
