"""The reports of `check_lossless` and `check_engine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

# The confidence of the bound on the total variation, and the probability that a bias of detectable size is detected.
CONFIDENCE = 0.99


@dataclass(frozen=True)
class LawTest:
    """One chi-square test: of the tokens at a position given the tokens before, or of all tokens jointly.

    Attributes:
        position: 0 for the first generated token; None for the joint law.
        total_variation: half the sum of |count - expected count|, divided by the number of tokens or sequences counted.
        expected_total_variation: its mean if the law holds.
        total_variation_bound: the total variation of the loop's law from the target's is below this with 99 %
            confidence, by McDiarmid's inequality, without approximation.
        statistic, dof, p_value: results of Pearson's test, after rare outcomes were pooled. If the loop emitted a token
            that the target excludes, the statistic is infinite and the p-value 0.
        detectable_effect: w; a law r with sum (r - p)**2 / p >= w**2 is rejected with 99 % probability or more.
        detectable_total_variation: w / 2 and at most 1: a bias of at least this size is detected (docs/testing.md).
        pooled: probability of the outcomes that are too rare for a separate cell; a bias among them is not detected.
        impossible: the number of emitted tokens that the target excludes.
        emitted: share of the trials in which the loop emitted this position; None for the joint law.
        overlap: mean of sum min(p, q), the acceptance rate of a draft that reads the whole sequence; None without a
            draft.
    """

    position: int | None
    total_variation: float
    expected_total_variation: float
    total_variation_bound: float
    statistic: float
    dof: int
    p_value: float
    detectable_effect: float
    detectable_total_variation: float
    pooled: float
    impossible: int
    emitted: float | None = None
    overlap: float | None = None

    @property
    def name(self) -> str:
        return "jointly" if self.position is None else f"position {self.position}"


class Report(ABC):
    """The result of a check. It is true if no test rejects the target's law, and `str` gives a table."""

    significance: float

    @property
    @abstractmethod
    def broken(self) -> Sequence[object]: ...

    @property
    def lossless(self) -> bool:
        """True if no bias was detected."""
        return not self.broken

    def __bool__(self) -> bool:
        return self.lossless

    def assert_lossless(self) -> None:
        """Raise AssertionError, with the positions and the numbers, if a bias was detected."""
        if not self.lossless:
            raise AssertionError(str(self))

    def _page(self, verdict: str, tests: list[tuple[str, LawTest, bool]], remarks: Sequence[str] = ()) -> str:
        """The verdict, a table with a line for each test (its name, and whether it breaks), and the remarks."""
        first = max(len(name) for name, _, _ in tests)
        titles = "emitted  overlap      TV  by chance  at most  chi-square    dof   p-value  visible"
        table = [f"{'':{first}}  {titles}"]
        for name, test, breaks in tests:
            emitted = "" if test.emitted is None else f"{test.emitted:.1%}"
            overlap = "" if test.overlap is None else f"{test.overlap:.3f}"
            line = f"{name:{first}}  {emitted:>7}  {overlap:>7}  {test.total_variation:.4f}  "
            line += f"{test.expected_total_variation:9.4f}  {test.total_variation_bound:7.4f}  {test.statistic:10.1f}  "
            line += f"{test.dof:5}  {test.p_value:8.3g}  {test.detectable_total_variation:7.4f}"
            table.append(line + "  breaks" * breaks)
        legend = [
            "TV: total variation of the counts from the target's law, and what chance alone makes of it on average.",
            f"at most: with {CONFIDENCE:.0%} confidence, the TV of the loop's own law is not above this.",
            f"visible: a TV this large is seen with {CONFIDENCE:.0%} probability; a smaller one may be there.",
            f"A loop without any bias is rejected with a probability of {self.significance:g} or less.",
        ]
        name, coarsest, _ = max(tests, key=lambda row: row[1].pooled)
        if coarsest.pooled > 0:
            legend.append(f"Outcomes too rare to be told apart: up to {coarsest.pooled:.2%} ({name}).")
        if impossible := sum(test.impossible for _, test, _ in tests if test.position is not None):
            legend.append(f"{impossible} tokens came that the target excludes.")
        return "\n".join([verdict, "", *table, "", *legend, *remarks])


@dataclass(frozen=True)
class LosslessReport(Report):
    """The result of `check_lossless`. It is true if no test rejects the target's law, and `str` gives a table. A true
    report does not exclude a bias below the tests' `detectable_total_variation`. It excludes a bias above their
    `total_variation_bound` with 99 % confidence.

    Attributes:
        tests: a test for each position, then the joint test.
        trials: how many sequences were generated.
        significance: probability that any of the tests rejects a lossless loop (Bonferroni).
        mistakes: name of a well-known mistake -> the total variation at position 0 that it would cause with this target
            and draft; empty without a draft.
        beta: drafts accepted / drafts reached, as `step_fn` counted them; None if it did not.
        suspicion: a likely cause if the tokens at position 0 break the law; empty if none is known.
    """

    tests: tuple[LawTest, ...]
    trials: int
    significance: float
    mistakes: dict[str, float]
    beta: float | None = None
    suspicion: str = ""

    @property
    def threshold(self) -> float:
        """The p-value below which one test rejects."""
        return self.significance / len(self.tests)

    @property
    def broken(self) -> list[LawTest]:
        """The tests that reject."""
        return [test for test in self.tests if test.p_value < self.threshold]

    @property
    def first_break(self) -> int | None:
        """The first position whose law, given the tokens before it, is rejected; None if there is none."""
        return next((test.position for test in self.broken), None)

    def __str__(self) -> str:
        if self.lossless:
            visible = max(test.detectable_total_variation for test in self.tests)
            verdict = (
                f"No bias seen in {self.trials:,} trials. A total variation (TV) of {visible:.4f} at any position "
            )
            verdict += f"or jointly would have been seen with {CONFIDENCE:.0%} probability."
        else:
            test = self.broken[0]
            where = "at no single position, but jointly" if test.position is None else f"first at {test.name}"
            verdict = f"The loop does not have the target's law, {where}: total variation {test.total_variation:.4f} "
            verdict += f"where chance alone gives {test.expected_total_variation:.4f}, p-value {test.p_value:.3g}."
        remarks = [f"Suspicion: {self.suspicion}"] if self.suspicion else []
        for name, bias in self.mistakes.items():
            is_visible = bias >= self.tests[0].detectable_total_variation
            advice = "which is visible" if is_visible else "too little to be seen: take another pair or more trials"
            remarks.append(f"For scale: {name} makes a TV of {bias:.4f} at position 0, {advice}.")
        if self.beta is not None:
            line = f"Drafts accepted: {self.beta:.3f} of those reached"
            if overlaps := [test.overlap for test in self.tests if test.overlap is not None]:
                line += f"; one that reads all of the text gets the overlap, {min(overlaps):.3f} to {max(overlaps):.3f}"
            remarks.append(line + ".")
        return self._page(verdict, [(test.name, test, test in self.broken) for test in self.tests], remarks)


@dataclass(frozen=True)
class EngineReport(Report):
    """The result of `check_engine`. It is true if no test rejects the target's law and no sequence changed; `str` gives
    a table.

    Attributes:
        reports: name of a setting -> its `LosslessReport`.
        significance: probability that any test of any setting rejects a lossless engine (Bonferroni).
        num_changed: name of a setting -> how many of its sequences `same_text_as` changed; None = it was not given.
    """

    reports: dict[str, LosslessReport]
    significance: float
    num_changed: dict[str, int] | None = None

    @property
    def broken(self) -> list[str]:
        """The settings whose law is rejected, or that have changed sequences."""
        changed = self.num_changed or {}
        return [name for name, report in self.reports.items() if not report or changed.get(name, 0) > 0]

    def __str__(self) -> str:
        verdict = f"No bias seen in {len(self.reports)} settings."
        if self.broken:
            biased = [name for name in self.broken if not self.reports[name]]
            changed = [name for name in self.broken if (self.num_changed or {}).get(name, 0) > 0]
            verdict = "\n".join(
                f"{kind}: {'; '.join(names)} ({len(names)} of {len(self.reports)} settings)."
                for kind, names in (("Not the target's law", biased), ("Not the same text", changed))
                if names
            )
        tests = [
            (f"{name}, {test.name}", test, test in report.broken)
            for name, report in self.reports.items()
            for test in report.tests
        ]
        trials = max(report.trials for report in self.reports.values())
        remarks = [f"Texts of each setting: {trials:,}."]
        if self.num_changed is not None:
            counts = (f"{count:,} of {name}" for name, count in self.num_changed.items() if count > 0)
            remarks.append(f"Texts that change with the way they are made: {', '.join(counts) or 'none'}.")
        return self._page(verdict, tests, remarks)
