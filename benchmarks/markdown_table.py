"""Markdown tables from records, for a terminal or for a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def cell(form: str, record: Mapping[str, Any], missing: str = "") -> str:
    """`form.format(**record)`, or `missing` if a field is not there or is None."""
    try:
        return form.format_map(record)
    except (KeyError, TypeError):
        return missing


def table(header: str, line: str, records: Iterable[Mapping[str, Any]], missing: str = "", padded: bool = False) -> str:
    """A Markdown table with a line for each record.

    Args:
        header: names of the columns, with " | " between them.
        line: a format string for each column, with " | " between them: "{name} | {seconds:.2f}".
        missing: what a cell shows if a field of it is not in the record or is None.
        padded: align the columns, for a terminal.
    """
    forms = line.split(" | ")
    lines = [header.split(" | "), *([cell(form, record, missing) for form in forms] for record in records)]
    if padded:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines = [[entry.ljust(width) for entry, width in zip(entries, widths, strict=True)] for entries in lines]
    first, *others = (f"| {' | '.join(entries)} |" for entries in lines)
    return "\n".join([first, "|" + "---|" * len(forms), *others])
