"""docs/lossless.md has the table of its result file, and the script behind it catches a wrong sampler."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from benchmark_scripts import BENCHMARKS, needs_benchmarks, script

pytestmark = needs_benchmarks


def test_the_page_has_the_table_of_the_results() -> None:
    page = script("page")
    records = json.loads(page.RESULT.read_text())["records"]
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rewritten(text, records) == text
    for record in records:
        assert f"transformers {record['transformers']} and torch {record['torch'].split('+')[0]}" in text
        assert not record["commit"].endswith("-dirty")
    # A changed record changes the page.
    records[0]["settings"]["T = 1"]["tests"][0]["p_value"] = 0.0
    assert page.rewritten(text, records) != text


def test_lossless_page_catches_a_wrong_sampler(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    # Finds the folder; benchmarks/papers/ has a run.py too.
    script("page")
    found = importlib.util.spec_from_file_location("lossless_run", BENCHMARKS / "lossless" / "run.py")
    run = importlib.util.module_from_spec(found)
    found.loader.exec_module(run)
    for name, rejected in (("specops-draft-exact", False), ("control-no-q", True)):
        run.main(["--row", name, "--trials", "400", "--out", str(out)])
        records = {record["row"]: record for record in json.loads(out.read_text())["records"]}
        assert {each["rejected"] for each in records[name]["settings"].values()} == {rejected}
    assert list(records) == ["control-no-q", "specops-draft-exact"]
    assert records["specops-draft-exact"]["greedy"] == {"equal": 20, "texts": 20}
