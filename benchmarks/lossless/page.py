"""The table of docs/lossless.md, from the records of run.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from markdown_table import table  # noqa: E402

PAGE = ROOT / "docs" / "lossless.md"
RESULT = ROOT / "benchmarks" / "results" / "2026-11-27-cpu-lossless.json"
HEADER = "law | row | what | setting | greedy | texts | tokens a pass | test | TV | by chance | p-value | visible"
LINE = (
    "{law} | `{row}` | {what} | {setting} | {greedy} | {trials:,} | {per_pass:.2f} | {test} | {tv:.3f} "
    "| {by_chance:.3f} | {p_value:.2g} | {visible:.3f}"
)
MARKS = "<!-- table: lossless -->\n", "<!-- end -->"


def lines_of(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each setting: of its tests the one with the smallest p-value."""
    greedy, version = record["greedy"], record["version"]
    for setting, each in record["settings"].items():
        test = min(each["tests"], key=lambda test: test["p_value"])
        yield {
            "row": record["row"],
            "what": f"{record['package']} {version}: {record['way']}" if version else record["way"],
            "setting": setting,
            "trials": record["trials"],
            "per_pass": record["tokens_per_pass"],
            "test": test["name"],
            "tv": test["total_variation"],
            "by_chance": test["expected_total_variation"],
            "p_value": test["p_value"],
            "visible": max(test["detectable_total_variation"] for test in each["tests"]),
            "law": "rejected" if each["rejected"] else "no bias seen",
            "greedy": "" if greedy is None else f"{greedy['equal']} of {greedy['texts']}",
        }


def table_of(records: Sequence[Mapping[str, Any]], padded: bool = False) -> str:
    return table(HEADER, LINE, [line for record in records for line in lines_of(record)], padded=padded)


def rewritten(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these records."""
    before, after = MARKS
    written, count = re.subn(
        f"{before}.*?{after}", lambda _: f"{before}{table_of(records)}\n{after}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"page: expected {before.strip()} .. {after.strip()} once, got it {count} times")
    return written
