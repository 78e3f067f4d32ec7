"""The pages of the site: each Python block runs as it is pasted, prints what stands below it, and fits the page."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
# A line of code as wide as the column of text at 1280 pixels.
COLUMNS = 84
# Why a block is not run here, as its title says it to readers, and how many there are.
NOT_RUN = {"needs a download": 4, "needs vLLM": 3, "needs TRL": 1, "needs lm_eval": 1, "takes a minute": 1}
# Compiling for a CPU takes half a minute, and what Inductor makes of the ops is compared in test_compile.py.
COMPILED, TRACED = "@torch.compile(fullgraph=True)", '@torch.compile(fullgraph=True, backend="aot_eager")'


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
        line = source.count("\n", 0, fence.start()) + 1
        found.append(Block(page.name, line, fence[1], title[1] or "", fence[3], below[3] if is_output and below else None))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


def run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    code = compile(block.text.replace(COMPILED, TRACED), named(block), "exec")
    exec(code, {"__name__": "__main__"})
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
@pytest.mark.parametrize("block", [block for block in PYTHON if block.title == "takes a minute"], ids=named)
def test_slow_blocks_run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    run(block, capsys)


def test_few_blocks_are_not_run_and_those_compile() -> None:
    marked = [block for block in BLOCKS if block.title]
    assert Counter(block.title for block in marked) == NOT_RUN
    assert [named(block) for block in marked if block.language != "python"] == []
    for block in marked:
        compile(block.text, named(block), "exec")


def test_no_line_of_code_is_wider_than_its_column() -> None:
    wide = [f"{named(block)}: {line}" for block in BLOCKS for line in block.text.splitlines() if len(line) > COLUMNS]
    assert wide == []
