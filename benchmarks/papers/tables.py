"""Writes the tables and numbers of docs/evidence*.md from the JSON files that the other scripts left.

    python benchmarks/papers/tables.py            # writes the pages
    python benchmarks/papers/tables.py --check    # writes nothing; exit status 1 if a page is not what the JSON says

In a page, a table stands between `<!-- table: NAME -->` and `<!-- end -->` on lines of their own, and a number in
running text between `<!-- number: NAME -->` and `<!-- end -->`. What is between them is replaced. `pages.py` describes
the tables, `summary.py` the numbers. A cell that was not measured says "not run".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping

from evidence import ROOT
from pages import CHEN, LEVIATHAN_TABLES, TIMES, WAGNER, Found, load
from summary import NUMBERS

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
    """The pages that are not what the results say and were not written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would change")
    options = parser.parse_args(arguments)
    found, changed = load(), []
    for name, tables in PAGES.items():
        path = ROOT / "docs" / name
        page = path.read_text(encoding="utf-8")
        new = rewritten(page, tables, found)
        if new != page:
            changed.append(name)
            if not options.check:
                path.write_text(new, encoding="utf-8")
        print(f"docs/{name}: {len(tables)} tables and numbers, {'changed' if new != page else 'as they were'}")
    return changed if options.check else []


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
