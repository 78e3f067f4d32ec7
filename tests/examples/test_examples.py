"""The examples run, on their tiny defaults and on a model from a directory, and show what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_eagle3 import new_head, save_head
from tiny_models import VOCAB, perturbed, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

import torch_specops
from torch_specops.cli.loading import smollm2_is_converted
from torch_specops.testing import sample_inputs

EXAMPLES = Path(__file__).parents[2] / "examples"

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of a target and a draft, with a tokenizer whose words are numbers, and of an EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("models")
    vocab = {str(token): token for token in range(VOCAB)}
    words = Tokenizer(WordLevel(vocab, unk_token="7"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")
    target = tiny("llama").float()
    for name, model in (("target", target), ("draft", perturbed(target))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save_head(new_head(), folder / "head")
    return {name: str(folder / name) for name in ("target", "draft", "head")}


def test_every_example_is_tested() -> None:
    source = "".join((Path(__file__).parent / name).read_text() for name in ("test_examples.py", "test_server.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in source, path.name


# `make` converts its weights once, so that no test does.
NEEDS_SMOLLM2 = pytest.mark.skipif(not smollm2_is_converted(), reason="SmolLM2 is not converted: run make demo")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("quickstart.py", marks=[NEEDS_SMOLLM2, pytest.mark.slow]),
        pytest.param("structured_output.py", marks=[NEEDS_SMOLLM2, pytest.mark.slow]),
        "rollouts.py",
        "eagle3.py",
    ],
)
def test_the_first_scripts_print_what_is_committed(run: Run, name: str) -> None:
    """`python examples/NAME.py > examples/outputs/NAME.txt` writes it anew."""
    assert run(name) == (EXAMPLES / "outputs" / name).with_suffix(".txt").read_text()


PAIR = "--target {target} --draft {draft}"
SAME = "identical to transformers: True"
OWN = (r"^[2-5]\.\d\d tokens per step$", "identical to decoding without drafts: True", "still in training mode: True")


@pytest.mark.parametrize(
    ("name", "arguments", "patterns"),
    [
        ("verify_one_step.py", f"{PAIR} --prompt '3 17 5' --temperature 0", [r"^emitted:( \d+)+$"]),
        ("hf_generate.py", "", [SAME]),
        ("hf_generate.py", f"{PAIR} --prompts '3 17 5 3 17' '9 4' --max-new-tokens 12", [SAME]),
        ("own_model.py", "", OWN),
        ("images.py", "", [SAME, r"^[1-4]\.\d\d tokens per step$"]),
        ("hybrid.py", "", [SAME, r"^[1-5]\.\d\d tokens per step$", r"^[1-9]\d* drafts were rejected$"]),
        ("eagle3.py", "--target {target} --head {head} --prompts '3 17 5 3 17' '9 4'", ["the same text: True"]),
        ("processors.py", f"{PAIR} --prompt '3 17 5 3 17' --words 9 '4 5' --new-tokens 20", [SAME]),
    ],
)
def test_a_script_says_so(run: Run, models: dict[str, str], name: str, arguments: str, patterns: list[str]) -> None:
    """On its tiny defaults, or on a model from a directory."""
    output = run(name, *shlex.split(arguments.format(**models)))
    assert [each for each in patterns if not re.search(each, output, re.MULTILINE)] == [], output


def test_verify_one_step(run: Run, models: dict[str, str]) -> None:
    drafts, emitted, summary = run("verify_one_step.py", "--temperature", "1").splitlines()
    drafts, emitted = drafts.split()[1:], emitted.split()[1:]
    num_accepted = int(summary.split()[0])
    assert len(drafts) == 4 and len(emitted) == num_accepted + 1
    assert emitted[:num_accepted] == drafts[:num_accepted]
    assert summary.endswith(f"{num_accepted + 1} tokens for one target forward")
    with pytest.raises(SystemExit):
        run("verify_one_step.py", "--target", models["target"])


def test_processors(run: Run) -> None:
    output = run("processors.py")
    texts = dict(re.findall(r"^(.*): '(.*)'$", output, re.MULTILINE))
    assert len(texts) == len(set(texts.values())) == 4 and "great" in texts["as it is"]
    assert "great" not in texts["banned words"] and "identical to transformers: True" in output


def test_structured_output(run: Run) -> None:
    """A model that knows no JSON writes some."""
    folder = Path(torch_specops.__file__).parent / "data" / "austen_bytes" / "target"
    output = run("structured_output.py", "--target", str(folder), "--new-tokens", "200")
    found = dict(re.findall(r"^(.*?): (Person|not)", output, re.MULTILINE))
    assert found == {"xgrammar": "Person", "llguidance": "Person", "no grammar": "not"}


def test_quantised_draft(run: Run) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    output = run("quantised_draft.py", "--max-new-tokens", "16")
    assert re.search(r"int8 copy: \d+% of its drafts accepted, [2-5]\.\d\d tokens per step", output), output
    assert "int4 copy: " in run("quantised_draft.py", "--weights", "int4", "--max-new-tokens", "4")


def test_check_lossless(run: Run) -> None:
    wrong, right = run("check_lossless.py", "--trials", "5000").split("q after top-k:")
    assert "The loop does not have the target's law, first at position 0: total variation 0." in wrong
    assert "No bias seen in 5,000 trials." in right
    assert len(re.findall("breaks$", wrong, re.MULTILINE)) >= 2 and "breaks" not in right


@pytest.mark.slow
def test_check_engine(run: Run) -> None:
    *right, wrong = run("check_engine.py", "--trials", "1000").split("transformers")[:3]
    assert all("No bias seen in 3 settings." in text for text in right)
    assert "Not the target's law: temperature 0.7, top-p 0.9; top-k 3 (2 of 3 settings)." in wrong


@pytest.mark.slow
def test_compiled_loop_is_one_graph(run: Run, monkeypatch: pytest.MonkeyPatch, models: dict[str, str]) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function=None, **options: compile(function, **(options | {"backend": backend}))
    )
    output = run("compiled_loop.py")
    assert len(graphs) == 1
    first, second, summary = output.splitlines()
    num_steps, *emitted = (int(number) for number in re.findall(r"\d+", summary))
    assert first.startswith("[5, 6, 7, 5, 6, ") and len(eval(first)) == 5 + emitted[0]
    assert second.startswith("[9, 4, ") and len(eval(second)) == 2 + emitted[1]
    # Fewer steps than tokens, and rows that do not wait for each other.
    assert num_steps < min(emitted) and emitted[0] != emitted[1]

    arguments = f"{PAIR} --width 24".format(**models).split()
    assert "one compiled graph" in run("compiled_loop.py", *arguments)
    assert len(graphs) == 2


def in_a_process(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_compiled_loop_as_it_is() -> None:
    """With Inductor."""
    assert "one compiled graph" in in_a_process(str(EXAMPLES / "compiled_loop.py"), "--width", "24")


@pytest.mark.slow
def test_tensor_parallel() -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = in_a_process(*torchrun, str(EXAMPLES / "tensor_parallel.py"), "--width", "24")
    assert "columns of each rank: [125, 125]" in output
    assert "the same on every rank: True" in output and "the same as on one rank: True" in output
    texts = [eval(line) for line in output.splitlines() if line.startswith("[")]
    assert [text[:2] for text in texts] == [[5, 6], [9, 4]] and max(map(len, texts)) > 20


def test_kernel_repository(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as the `kernels` package loads it, the copies of the ops return what the ops return."""
    # The copies add a tag, with which other tests would find no compiled code.
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", torch.compiler.config.cache_key_tag)
    name = run("kernel_repository.py", str(tmp_path)).split()[0].removeprefix("torch.ops.")
    variant = tmp_path / "build" / "torch-cpu"
    assert json.loads((variant / "metadata.json").read_text())["id"] == name
    # Neither the package nor its ops.
    lines = {line for path in variant.rglob("*.py") for line in path.read_text().splitlines()}
    assert [line for line in lines if re.search(r"^ *(from|import) torch_specops|[\".]specops\b", line)] == []
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None and spec.loader is not None
    copies = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, copies)
    spec.loader.exec_module(copies)
    for op in torch_specops.ops.__all__:
        args = next(iter(sample_inputs(op))).args
        expected = getattr(torch_specops, op)(**args)
        # With a gradient, the public function calls the op.
        first = next(iter(args))
        for given in (args, args | {first: args[first].clone().requires_grad_()}):
            torch.testing.assert_close(getattr(copies, op)(**given), expected, rtol=0, atol=0, equal_nan=True)
        assert hasattr(getattr(torch.ops, name), op)


def test_rollouts(run: Run, models: dict[str, str], tmp_path: Path) -> None:
    """What the sampler says of its tokens is what a training forward says, also where an answer ends early."""
    policy = shutil.copytree(models["target"], tmp_path / "policy")
    (policy / "generation_config.json").write_text('{"eos_token_id": 2}')
    arguments = f"{PAIR} --prompt '1 17 5' --samples 3".format(target=policy, draft=models["draft"])
    output = run("rollouts.py", *shlex.split(arguments))
    assert "\n72 tokens" in output and "alone: True" in output and "of the training forward: True" in output


def test_many_requests(run: Run, models: dict[str, str]) -> None:
    for arguments in ("", f"{PAIR} --batch-size 3"):
        output = run("many_requests.py", *arguments.format(**models).split())
        assert "6 requests, 132 tokens" in output and "the same as each request alone: True" in output
        # Answers come as they finish.
        order = [int(line[0]) for line in output.splitlines() if "(length)" in line]
        assert sorted(order) == list(range(6)) != order
