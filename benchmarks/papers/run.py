"""Measures what is missing of the papers' tables, then writes the tables and numbers of docs/evidence*.md.

    python benchmarks/papers/run.py
    python benchmarks/papers/run.py --only [NAME...]     # some of the scripts, or none; then the pages

Each script is a process of its own and measures only the cells that its JSON file does not have. To measure everything,
delete the JSON files of these scripts in benchmarks/results/evidence. The pages are written even if a script fails.

In a page, a table stands between `<!-- table: NAME -->` and `<!-- end -->` on lines of their own, and a number in
running text between `<!-- number: NAME -->` and `<!-- end -->`. What is between them is replaced. `pages.py` describes
the tables, `summary.py` the numbers. A cell that was not measured says "not run".
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from evidence import ROOT
from pages import CHEN, LEVIATHAN_TABLES, TIMES, WAGNER, Found, load
from summary import NUMBERS

SCRIPTS = ("leviathan_theory", "leviathan_measured", "wagner_text", "chen")
PAGES: dict[str, Mapping[str, Callable[[Found], str]]] = {
    "evidence.md": {**NUMBERS, "times": TIMES},
    "evidence_wagner.md": WAGNER,
    "evidence_leviathan.md": LEVIATHAN_TABLES,
    "evidence_chen.md": CHEN,
}
MARK = re.compile(r"<!-- (table|number): (.+?) -->(\n?).*?<!-- end -->", re.DOTALL)


def rewritten(page: str, tables: Mapping[str, Callable[[Found], str]], found: Found) -> str:
    """The page with its tables and numbers as the results have them.

    Raises:
        ValueError: the page has a table that is not known, or lacks one that it should have.
    """
    names = [name for _, name, _ in MARK.findall(page)]
    if sorted(names) != sorted(tables):
        raise ValueError(f"tables: expected each of {sorted(tables)} once, got {sorted(names)}")

    def write(match: re.Match[str]) -> str:
        kind, name, end = match.groups()
        return f"<!-- {kind}: {name} -->{end}{tables[name](found)}{end}<!-- end -->"

    return MARK.sub(write, page)


def main(arguments: list[str] | None = None) -> list[str]:
    """The scripts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME")
    failed = []
    for script in parser.parse_args(arguments).only:
        if subprocess.run([sys.executable, str(Path(__file__).with_name(f"{script}.py"))]).returncode != 0:
            failed.append(script)
    found = load()
    for name, tables in PAGES.items():
        path = ROOT / "docs" / name
        page = path.read_text(encoding="utf-8")
        new = rewritten(page, tables, found)
        path.write_text(new, encoding="utf-8")
        print(f"docs/{name}: {len(tables)} tables and numbers, {'changed' if new != page else 'as they were'}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
