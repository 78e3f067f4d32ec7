"""The numbers that the suite reports at its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_specops.testing import Case, Comparison


@dataclass
class Report:
    """What a test measured: of each comparison with the oracle the kind of case, the rows, and how many of them differ
    by rounding; p-values of the laws."""

    rows: list[tuple[str, int, int]] = field(default_factory=list)
    p_values: dict[str, float] = field(default_factory=dict)
    wrong_p_values: dict[str, float] = field(default_factory=dict)

    def add(self, case: Case, comparison: Comparison) -> None:
        kind = "built to tie" if case.name.startswith("tie_") else "drawn at random"
        self.rows.append((f"{case.op}, {kind}", comparison.rows, comparison.rounding))
