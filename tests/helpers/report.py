"""The numbers that the suite reports at its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from oracle import Case, Comparison


@dataclass
class Report:
    """What the tests measured: rows compared with the oracle, and p-values of the laws."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    wrong_p_values: dict[str, float] = field(default_factory=dict)

    def add(self, case: Case, comparison: Comparison) -> None:
        kind = "built to tie" if case.name.startswith("tie_") else "drawn at random"
        counts = self.rows.setdefault(f"{case.op}, {kind}", Counter())
        counts.update(rows=comparison.rows, rounding=comparison.rounding, cases=1)
