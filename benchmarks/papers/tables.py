"""Writes the tables of docs/evidence*.md from the JSON that the other scripts left.

    python benchmarks/papers/tables.py [--check]

In those pages a table stands between `<!-- table: NAME -->` and `<!-- end -->`; what is between them is written anew. A
cell that was not measured says "not run". With --check nothing is written, and the exit status is 1 if a table is not
what the JSON says.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from tables_chen import TABLES as CHEN
from tables_leviathan import TABLES as LEVIATHAN
from tables_markdown import Found, load
from tables_summary import TABLES as SUMMARY
from tables_wagner import TABLES as WAGNER

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {
    "evidence.md": SUMMARY,
    "evidence_wagner.md": WAGNER,
    "evidence_leviathan.md": LEVIATHAN,
    "evidence_chen.md": CHEN,
}
TABLE = re.compile(r"<!-- table: (.+?) -->\n.*?<!-- end -->", re.DOTALL)


def rewritten(page: str, tables: dict[str, Callable[[Found], str]], found: Found) -> str:
    """The page with its tables as the JSON has them.

    Raises:
        ValueError: a table that nobody knows, or one of this page's that is not in it.
    """
    names = TABLE.findall(page)
    if sorted(names) != sorted(tables):
        raise ValueError(f"tables: expected each of {sorted(tables)} once, got {sorted(names)}")

    def write(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]](found)}\n<!-- end -->"

    return TABLE.sub(write, page)


def main(arguments: list[str] | None = None) -> list[str]:
    """The pages that were not what the JSON says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would change")
    check = parser.parse_args(arguments).check
    found, changed = load(), []
    for name, tables in PAGES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        new = rewritten(page, tables, found)
        if new != page:
            changed.append(name)
            if not check:
                (DOCS / name).write_text(new, encoding="utf-8")
        print(f"docs/{name}: {len(tables)} tables, {'changed' if new != page else 'as they were'}")
    return changed if check else []


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
