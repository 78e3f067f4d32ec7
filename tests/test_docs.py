"""The pages of the site: each Python block runs as it is pasted, prints what stands below it, and fits the page."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_specops

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "docs" / "api" / "ops.md"])
# A line of code as wide as the column of text at 1280 pixels.
COLUMNS = 84
# Why a block is not run here, as its title says it to readers, and how many there are.
NOT_RUN = {
    "needs a download": 5,
    "needs vLLM": 3,
    "needs TRL": 2,
    "needs lm_eval": 1,
    "needs torchrun": 1,
    "takes a minute": 1,
}
# What takes long and is tested elsewhere: Inductor's code in test_compile.py, every case in test_oracle_grid.py.
SHORTER = {
    "@torch.compile(fullgraph=True)": '@torch.compile(fullgraph=True, backend="aot_eager")',
    "vocab_sizes=[17, 1025]": 'vocab_sizes=[17, 1025], names=["k3", "filters_lse"]',
}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    title: str
    text: str
    printed: str | None  # what the text block directly below shows


def blocks_of(page: Path) -> list[Block]:
    source, found = page.read_text(), []
    fences = [*re.finditer(r"^```(\w*)[^\S\n]*(.*?)\n(.*?)^```$", source, re.MULTILINE | re.DOTALL), None]
    for fence, below in pairwise(fences):
        assert fence is not None
        title = re.fullmatch(r'(?:title="([^"]+)")?', fence[2])
        assert title is not None, f"{page.name}: {fence[2]}"
        is_output = below is not None and below[1] == "text" and not source[fence.end() : below.start()].strip()
        line, printed = source.count("\n", 0, fence.start()) + 1, below[3] if is_output and below else None
        found.append(Block(page.name, line, fence[1], title[1] or "", fence[3], printed))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    text = block.text
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    exec(compile(text, named(block), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert block.printed is None or printed.split() == block.printed.split(), printed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("block", [block for block in PYTHON if not block.title], ids=named)
def test_blocks_run_and_print_what_stands_below(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    run(block, capsys)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("block", [block for block in PYTHON if block.title == "takes a minute"], ids=named)
def test_slow_blocks_run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    run(block, capsys)


# Of lm_eval and what it needs.
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_gets_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of the page, with a small model and a task that need no download."""
    lm_eval = pytest.importorskip("lm_eval")
    folder = ROOT / "torch_specops" / "data" / "austen_bytes" / "target"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    questions = ["It was not to be ", "She had ", "Mr. Darcy "]
    Path("questions.jsonl").write_text("\n".join(json.dumps({"question": text, "answer": "x"}) for text in questions))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 30, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    decode, calls = torch_specops.hf.custom_generate, []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return decode(*arguments, **options)

    monkeypatch.setattr(torch_specops.hf, "custom_generate", counted)
    (block,) = (block for block in PYTHON if block.title == "needs lm_eval")
    code = block.text.replace("Qwen/Qwen3-0.6B", "model").replace('["gsm8k"]', "[task.copy()]")
    found: dict[str, Any] = {"task": task}
    exec(code, found)
    plain = lm_eval.simple_evaluate(found["lm"], tasks=[task.copy()])
    answers, expected = ([each["resps"] for each in run["samples"]["questions"]] for run in (found["results"], plain))
    assert calls and len(answers) == len(questions) and answers == expected


# Of TRL and what it needs.
@pytest.mark.filterwarnings("ignore")
def test_log_probabilities_in_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first block they are near the rollouts', and with the second they have the same bits until a step."""
    trl = pytest.importorskip("trl")
    compute_loss, found = trl.GRPOTrainer._compute_loss, []

    def compared(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        ids, mask = (
            torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1) for kind in ("ids", "mask")
        )
        is_new = inputs["completion_mask"].bool()
        logprobs = self._get_per_token_logps_and_entropies(model, ids, mask, is_new.shape[1])[0]
        assert not inputs["prompt_mask"].all(), "no padding on the left"
        found.append((logprobs - inputs["sampling_per_token_logps"])[is_new].abs().max().item())
        return compute_loss(self, model, inputs)

    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", compared)
    exec("\n".join(block.text for block in PYTHON if block.title == "needs TRL"), {})
    assert len(found) == 4 and 0 < max(found[:2]) < 1e-4 and found[2:] == [0, 0]


def test_few_blocks_are_not_run_and_those_compile() -> None:
    marked = [block for block in BLOCKS if block.title]
    assert Counter(block.title for block in marked) == NOT_RUN
    assert [named(block) for block in marked if block.language != "python"] == []
    for block in marked:
        compile(block.text, named(block), "exec")


def test_docs_code_fits_the_column() -> None:
    wide = [f"{named(block)}: {line}" for block in BLOCKS for line in block.text.splitlines() if len(line) > COLUMNS]
    assert wide == []
