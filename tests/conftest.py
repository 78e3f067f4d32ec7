"""Settings of every test, and the numbers that the suite reports at its end."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

# Before a kernel is defined, which happens on the first import of the package's kernels.
if "TORCH_SPECOPS_CUDA_STAND_IN" in os.environ:
    import cuda_stand_in

    cuda_stand_in.install()

from torch_specops.testing import Case, Comparison

# The tensors of the tests are small: more threads cost more than they bring, and workers share the cores.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


@dataclass
class Report:
    """What the tests measured: rows compared with the oracle, and p-values of the laws."""

    rows: dict[str, Counter[str]] = field(default_factory=dict)
    p_values: dict[str, float] = field(default_factory=dict)
    wrong_p_values: dict[str, float] = field(default_factory=dict)

    def add(self, case: Case, comparison: Comparison) -> None:
        kind = "built to tie" if case.name.startswith("tie_") else "drawn at random"
        counts = self.rows.setdefault(f"{case.op}, {kind}", Counter())
        counts.update(
            rows=comparison.rows, rounding=comparison.rounding, disagreements=comparison.disagreements, cases=1
        )

    def merge(self, other: dict[str, dict[str, Any]]) -> None:
        """Add what another process measured: the fields of its report."""
        for kind, counts in other["rows"].items():
            self.rows.setdefault(kind, Counter()).update(counts)
        self.p_values.update(other["p_values"])
        self.wrong_p_values.update(other["wrong_p_values"])


REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    return request.config.stash[REPORT]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        report = session.config.stash[REPORT]
        # A worker's output may hold plain types only.
        rows = {kind: dict(counts) for kind, counts in report.rows.items()}
        session.config.workeroutput["report"] = vars(report) | {"rows": rows}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    # A worker that crashed has no output.
    if "report" in getattr(node, "workeroutput", {}):
        node.config.stash[REPORT].merge(node.workeroutput["report"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if report.rows:
        terminalreporter.section("rows compared with the float64 oracle")
        for name, counts in sorted(report.rows.items()):
            share = counts["rounding"] / max(counts["rows"], 1)
            terminalreporter.write_line(
                f"{name}: {counts['cases']} comparisons, {counts['rows']} rows, {counts['rounding']} left open by "
                f"float32 rounding ({share:.2%}), of which {counts['disagreements']} differ from the oracle"
            )
    if report.p_values:
        terminalreporter.section("laws")
        worst = min(report.p_values, key=report.p_values.__getitem__)
        terminalreporter.write_line(
            f"{len(report.p_values)} chi-square tests, worst p-value {report.p_values[worst]:.3g} ({worst})"
        )
    if report.wrong_p_values:
        best = max(report.wrong_p_values, key=report.wrong_p_values.__getitem__)
        terminalreporter.write_line(
            f"{len(report.wrong_p_values)} wrong samplers, best p-value {report.wrong_p_values[best]:.3g} ({best})"
        )
