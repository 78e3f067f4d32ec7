"""README and docstrings: examples run and print what they say, commands exist, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import itertools
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import torch_specops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


class Block(NamedTuple):
    language: str
    text: str


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
COMMANDS = [line for block in BLOCKS if block.language == "bash" for line in block.text.splitlines() if line]


def run(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


# Compiling for a CPU takes half a minute, and what Inductor makes of the ops is compared in test_compile.py.
COMPILED, TRACED = "@torch.compile(fullgraph=True)", '@torch.compile(fullgraph=True, backend="aot_eager")'


@pytest.mark.parametrize("place", [i for i, block in enumerate(BLOCKS) if block.language == "python"])
def test_python_blocks_run_and_print_what_they_say(place: int, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[place].text.replace(COMPILED, TRACED))
    printed = BLOCKS[place + 1]
    assert printed.language == "text"
    assert run(sys.executable, str(script)).split() == printed.text.split()


def check_command(command: str) -> None:
    """Raise AssertionError for a command that the Makefile, the package or its command line does not know."""
    program, *arguments = shlex.split(command)
    if program == "make":
        target, *settings = arguments
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        assert {setting.split("=")[0] for setting in settings} <= {"ARGS", "PYTHON", "VENV"}
        for setting in settings:
            if target == "demo" and setting.startswith("ARGS="):
                check_command(f"torch-specops demo {setting.removeprefix('ARGS=')}")
    elif program == "torch-specops":
        pytest.importorskip("typer")
        call = "import sys; from torch_specops.cli import main; sys.argv[0] = 'torch-specops'; main()"
        command = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
        shown = run(sys.executable, "-c", call, *command, "--help")
        options = [argument for argument in arguments[len(command) :] if argument.startswith("-")]
        assert [option for option in options if option.split("=")[0] not in shown] == []
    elif program == "pip":
        assert arguments[0] == "install"
        assert [name for name in arguments[1:] if not re.fullmatch(r"-e|\.(\[\w+(,\w+)*\])?", name)] == []
        section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
        known = set(re.findall(r"^(\w+) =", section, re.MULTILINE))
        assert {extra for name in arguments for extra in re.findall(r"\w+", name.partition("[")[2])} <= known
    else:
        raise AssertionError(f"a command this test does not know: {command}")


def test_commands_exist() -> None:
    for command in COMMANDS:
        check_command(command)


def test_a_command_that_does_not_exist_is_caught() -> None:
    for command in (
        *("make nothing", "make test ARG=-x", "make demo ARGS=--no-such-option", "torch-specops nothing"),
        *("pip install '.[nothing]'", "pip install torch_specops", "curl example.org"),
    ):
        with pytest.raises(AssertionError):
            check_command(command)


DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_named_files_exist(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []
    places = [ROOT / name for name in ("torch_specops", "tests", "benchmarks", "benchmarks/papers", "")] + [
        document.parent
    ]
    named = set(re.findall(r"`([a-z_0-9/]+\.py)(?:::\w+)?`", text))
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
    tests = set(re.findall(r"`(test_\w+\.py)::(\w+)`", text))
    assert [name for file, name in sorted(tests) if f"def {name}(" not in (ROOT / "tests" / file).read_text()] == []


def test_the_changelog_opens_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?([\w.]+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] in ("Unreleased", torch_specops.__version__)


# Kernels need Triton at import, and a command is no library.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(torch_specops.__path__, "torch_specops.")
    if not module.name.startswith(("torch_specops.kernels", "torch_specops.cli"))
]


def test_docstring_examples() -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in MODULES:
        for example in doctest.DocTestFinder().find(importlib.import_module(name)):
            runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def test_public_names_have_an_example() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    names = [name for name in torch_specops.__all__ if name != "ops"]
    assert [name for name in names if not finder.find(getattr(torch_specops, name))[0].examples] == []
