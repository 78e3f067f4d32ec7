"""The scripts that reproduce the papers: cells are measured once, formulas meet the printed numbers, the choices of K
on a trace are what a search through all of them finds, and the pages have the JSON's numbers."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torch_specops.schedules import Constant, Heuristic

PAPERS = Path(__file__).parents[1] / "benchmarks" / "papers"
RESULTS = PAPERS.parent / "results" / "evidence"

pytestmark = pytest.mark.skipif(not PAPERS.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by name, and set the number of threads."""
    threads = torch.get_num_threads()
    sys.path.insert(0, str(PAPERS))
    yield
    sys.path.remove(str(PAPERS))
    torch.set_num_threads(threads)


@pytest.fixture
def evidence() -> ModuleType:
    return importlib.import_module("evidence")


class Counting:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __call__(self, x: float, fail: bool = False) -> dict[str, Any]:
        if fail:
            raise KeyboardInterrupt
        self.calls.append(x)
        return {"twice": 2 * x, "pair": (x, None)}


def test_a_finished_cell_is_not_measured_again(evidence: ModuleType, tmp_path: Path) -> None:
    path, measure = tmp_path / "new" / "found.json", Counting()
    cells = [evidence.Cell(f"row/{x}", measure, {"x": x, "fail": False}) for x in (1, 2.5)]
    stopped = evidence.Cell("row/3", measure, {"x": 3, "fail": True})
    with pytest.raises(KeyboardInterrupt):
        evidence.Cells(path, [*cells, stopped]).run()
    assert measure.calls == [1, 2.5]
    # What was finished before the interrupt is there, and is what JSON makes of it.
    found = evidence.Cells(path, cells).run()
    assert measure.calls == [1, 2.5]
    assert found == {"row/1": {"twice": 2, "pair": [1, None]}, "row/2.5": {"twice": 5.0, "pair": [2.5, None]}}
    written = json.loads(path.read_text())
    environment = written["environments"][written["cells"]["row/1"]["environment"]]
    assert environment["versions"]["torch"] == torch.__version__
    assert {"device", "threads", "commit"} <= set(environment)
    assert {"settings", "result", "seconds", "date"} <= set(written["cells"]["row/1"])


def test_other_settings_are_another_measurement(evidence: ModuleType, tmp_path: Path) -> None:
    path, measure = tmp_path / "found.json", Counting()
    evidence.Cells(path, [evidence.Cell("a", measure, {"x": 1}), evidence.Cell("b", measure, {"x": 2})]).run()
    cells = [evidence.Cell("a", measure, {"x": 7}), evidence.Cell("c", measure, {"x": 3})]
    assert evidence.Cells(path, cells).results == {}
    assert set(evidence.Cells(path, cells).run(only="c")) == {"c"}
    assert evidence.Cells(path, cells).run()["a"] == {"twice": 14, "pair": [7, None]}
    assert measure.calls == [1, 2, 3, 7]
    # No more than the cells of the script, and no environment that none of them names.
    written = json.loads(path.read_text())
    assert set(written["cells"]) == {"a", "c"} and len(written["environments"]) == 1


def test_large_runs_and_other_devices_have_files_of_their_own(evidence: ModuleType, tmp_path: Path) -> None:
    def path(*arguments: str) -> Path:
        return evidence.results_path("name", evidence.options(None, [*arguments, "--threads", "1"]))

    paths = [path(), path("--large"), path("--device", "cuda"), path("--large", "--device", "cuda")]
    assert [each.name for each in paths] == ["name.json", "name-large.json", "name-cuda.json", "name-large-cuda.json"]
    assert path("--large", "--out", str(tmp_path / "x.json")) == tmp_path / "x.json"


def test_the_formulas_meet_the_printed_numbers(tmp_path: Path) -> None:
    theory = importlib.import_module("leviathan_theory")
    found = theory.main(["--out", str(tmp_path / "theory.json")])
    for row in found["table 1"]:
        assert round(row["speed"], 2) == row["paper_speed"]
        assert round(row["operations"], 2) == row["paper_operations"]
    for row in found["table 4, expected"]:
        low, high = row["within_rounding"]
        assert low - 0.05 <= row["paper_expected"] <= high + 0.05
        assert low <= row["expected"] <= high
    assert all(round(row["factor"], 1) == row["paper_factor"] for row in found["appendix A.5, greedy"])
    # The sampled factors of appendix A.5 are above what theorem 3.8 gives for any gamma.
    assert all(row["factor_at_alpha_rounded_up"] < row["paper_factor"] - 0.05 for row in found["appendix A.5, sampled"])


ROWS = ["1101110", "0000", "1", "11111", "0110100111"]


def all_ways(row: str, position: int = 0) -> Iterator[list[int]]:
    """Every choice of K for every step, as the loop would take it: a rejection ends the step behind its token."""
    if position >= len(row):
        yield []
        return
    for count in range(len(row) - position):
        kept = next(
            (i for i, bit in enumerate(row[position : position + count]) if bit == "0"),
            count,
        )
        for rest in all_ways(row, position + kept + 1):
            yield [count, *rest]


@pytest.mark.parametrize("cost", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("row", ROWS)
def test_the_oracle_is_the_best_of_all_choices(row: str, cost: float) -> None:
    oracle = importlib.import_module("leviathan_oracle")
    ways = list(itertools.islice(all_ways(row), 200_000))
    spent = [sum(1 + cost * count for count in way) for way in ways]
    assert oracle.in_hindsight([row], cost) == pytest.approx(len(row) / min(spent))
    # Constants are among the ways, and no better.
    for count in (0, 2, 5):
        speed = oracle.decoded([row], Constant(count), cost)
        assert any(speed == pytest.approx(len(row) / each) for each in spent)
        assert speed <= oracle.in_hindsight([row], cost) + 1e-12


def test_a_schedule_on_a_trace_takes_these_steps() -> None:
    oracle = importlib.import_module("leviathan_oracle")
    # K = 2: 11 and a token; 1 and a rejection; a rejection; the same with room for one draft; a token without drafts.
    assert oracle.decoded(["11010000"], Constant(2), 0.5) == 8 / (2 + 2 + 2 + 1.5 + 1)
    # The heuristic begins with 5 in every sequence: 5 and a token; then 7, but there is room for 2.
    assert oracle.decoded(["111111111"] * 2, Heuristic(), 0.1) == pytest.approx(9 / (1.5 + 1.2))


def test_what_is_missing_is_said_and_what_was_measured_is_kept(
    evidence: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, measure = tmp_path / "found.json", Counting()
    evidence.Cells(path, [evidence.Cell("old", measure, {"x": 1})]).run()
    cells = [
        evidence.Cell("old", measure, {"x": 1}, "no model"),
        evidence.Cell("new", measure, {"x": 2}, "no model"),
        evidence.Cell("own", measure, {"x": 3}),
    ]
    assert set(evidence.Cells(path, cells).run()) == {"old", "own"}
    assert measure.calls == [1, 3]
    assert "not run, no model: new" in capsys.readouterr().err


class Stopped(Exception):
    pass


@pytest.mark.parametrize("script", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_nothing_that_was_measured_is_pending(
    script: str, evidence: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings of every cell are those of the committed file: `make evidence` has nothing to do."""
    if missing := importlib.import_module("run").missing(script):
        pytest.skip(f"not installed: {', '.join(missing)}")

    def stop(self: Any, *_: Any) -> None:
        assert [cell.key for cell in self._cells if cell.key not in self._records] == []
        raise Stopped

    monkeypatch.setattr(evidence.Cells, "run", stop)
    with pytest.raises(Stopped):
        importlib.import_module(script).main([])


def test_the_pages_have_the_numbers_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`python benchmarks/papers/tables.py` writes what is missing here."""
    tables = importlib.import_module("tables")
    assert tables.main(["--check"]) == []
    assert capsys.readouterr().out.count("as they were") == len(tables.PAGES)


def test_another_number_or_none_changes_the_pages() -> None:
    tables = importlib.import_module("tables")
    found = importlib.import_module("tables_markdown").load()
    pages = {name: (tables.DOCS / name).read_text(encoding="utf-8") for name in tables.PAGES}
    found["leviathan_theory"]["table 1"][0]["speed"] += 0.01
    found["leviathan_theory"]["figure 2"]["expected_tokens_per_step"][0][80] += 0.01
    found["chen"]["quality/austen/nucleus"]["rouge1"]["plain"] += 0.01
    for method in ("transformers", "exact"):
        found["wagner_text"]["main/topics"][method]["step_ms_median"] *= 7
    for name, page in pages.items():
        assert tables.rewritten(page, tables.PAGES[name], found) != page, name
    # Nothing measured, or a part of it.
    empty: dict[str, dict[str, Any]] = {script: {} for script in found}
    assert "seconds" in found and found["seconds"].keys() == found.keys() - {"seconds"}
    for name, page in pages.items():
        assert "not run" in tables.rewritten(page, tables.PAGES[name], empty) or name == "evidence_chen.md"
    with pytest.raises(ValueError, match="tables: expected"):
        tables.rewritten(pages["evidence_chen.md"], tables.PAGES["evidence_wagner.md"], found)


def test_every_table_and_figure_has_a_row() -> None:
    rows = importlib.import_module("tables_summary").ROWS
    listed: dict[str, set[str]] = {"Wagner": set(), "Leviathan": set(), "Chen": set()}
    for row in rows:
        listed[row.paper.strip("[").partition("]")[0]].add(row.name.partition(":")[0])
    assert listed["Wagner"] == {
        *("table 1", "tables 2 and 7", "table 3", "table 5", "table 6", "table 8", "figure 3", "figure 4", "figure 5"),
    }
    assert listed["Chen"] == {"table 1", "figure 1"}
    assert listed["Leviathan"] == {*(f"table {i}" for i in range(1, 6)), *(f"figure {i}" for i in range(2, 5))}
    for row in rows:
        assert row.theirs and row.why and all((PAPERS / f"{script}.py").exists() for script in row.scripts)


def test_links_and_pictures_of_the_pages_exist() -> None:
    docs = PAPERS.parents[1] / "docs"
    for page in docs.glob("evidence*.md"):
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        assert links and [link for link in links if not (docs / link).exists()] == []


RIGHT = "\n    return a + b\n\n\ndef more"


@pytest.mark.parametrize(
    ("completion", "parses", "passes"),
    [
        (RIGHT, True, True),
        ("\n    total = a\n\n    total += b\n    return total", True, True),
        ("\n    return a - b", True, False),
        ("\n    return (a + b", False, False),
        ("\n\n# nothing", False, False),
        ("\n    while True: pass", True, False),
        ("\n    import os\n    return a + b", True, False),
        ("\n    return a.__class__(a + b)", True, False),
        ("\n    return open('x')", True, False),
        ("\n    return [0] * 10**11", True, False),
    ],
)
def test_a_completion_passes_if_its_assertions_hold(completion: str, parses: bool, passes: bool) -> None:
    code = importlib.import_module("chen_code")
    problem = code.PROBLEMS[0]
    assert problem.signature == "add(a, b)"
    assert code.parses(problem, completion) is parses
    assert code.passes(problem, completion, seconds=1) is passes


def test_the_interval_is_that_of_the_mean() -> None:
    pytest.importorskip("rouge_score")
    chen = importlib.import_module("chen")
    values = torch.randn(400, generator=torch.Generator().manual_seed(1)).tolist()
    low, high = chen.interval(values)
    mean = sum(values) / 400
    # 1.96 standard errors to either side.
    assert low == pytest.approx(mean - 1.96 / 20, abs=0.02) and high == pytest.approx(mean + 1.96 / 20, abs=0.02)
    assert chen.interval([0.0] * 5) == (0.0, 0.0)


def test_the_peak_is_of_what_was_held_at_a_time() -> None:
    memory = importlib.import_module("wagner_memory")

    def call() -> None:
        for _ in range(3):
            torch.zeros(100_000).add_(1)
        first = torch.zeros(200_000)
        torch.ones(100_000)
        del first

    peak = memory.peak_bytes(call)
    assert 1_200_000 <= peak < 1_210_000


def test_a_script_whose_packages_are_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = importlib.import_module("run")
    assert {f"{name}.py" for name in run.NEEDS} <= {path.name for path in PAPERS.iterdir()}
    monkeypatch.setitem(run.NEEDS, "chen", ("no_such_package",))
    assert run.main(["--only", "chen"]) == 0
    assert "chen: not run, not installed: no_such_package" in capsys.readouterr().out
