"""The reports of `check_lossless` and `check_engine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

# The confidence of the upper bound of the total variation, and the probability with which a bias of detectable size is
# detected.
CONFIDENCE = 0.99


@dataclass(frozen=True)
class LawTest:
    """The result of one chi-square test, of the tokens at a position given the tokens before them, or of all tokens
    jointly.

    Attributes:
        position: the tested position, 0 for the first generated token; None for the joint test.
        total_variation: half the sum of |count - expected count|, divided by the number of tokens or sequences counted.
        expected_total_variation: the mean of `total_variation` for a lossless loop.
        total_variation_bound: with 99 % confidence, the total variation between the loop's and the target's
            distribution is at most this. The bound follows from McDiarmid's inequality and is no approximation.
        statistic, dof, p_value: the results of Pearson's test after rare outcomes were pooled. If the loop emitted a
            token that has probability 0 under the target, the statistic is infinite and the p-value is 0.
        detectable_effect: the effect size w. If the loop has a distribution r with sum (r - p)**2 / p >= w**2, the test
            rejects it with a probability of at least 99 %.
        detectable_total_variation: w / 2, at most 1. A bias with at least this total variation is detected with a
            probability of at least 99 % (docs/testing.md).
        pooled: the total probability of outcomes that are too rare for a separate cell. A bias among these outcomes is
            not detected.
        impossible: the number of emitted tokens that have probability 0 under the target.
        emitted: the share of trials in which the loop emitted a token at this position; None for the joint test.
        overlap: the mean of sum min(p, q), which is the acceptance rate of a draft that reads the whole sequence; None
            if no draft was given.
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
    """The result of a check. Its truth value is True if no test rejects, and `str` returns a table."""

    significance: float

    @property
    @abstractmethod
    def broken(self) -> Sequence[object]: ...

    @property
    def lossless(self) -> bool:
        """True if no test detects a bias."""
        return not self.broken

    def __bool__(self) -> bool:
        return self.lossless

    def assert_lossless(self) -> None:
        """Raise AssertionError with the table of results if a bias is detected."""
        if not self.lossless:
            raise AssertionError(str(self))

    def _page(self, verdict: str, tests: list[tuple[str, LawTest, bool]], remarks: Sequence[str]) -> str:
        """The text of the report: the verdict, a table with a line for each test, and the remarks. `tests` holds for
        each test its name, its result, and True if it rejects."""
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


@dataclass(frozen=True, repr=False)
class LosslessReport(Report):
    """The result of `check_lossless`. Its truth value is True if no test rejects, and `str` returns a table. Even then
    there may be a bias below the `detectable_total_variation` of the tests. A bias above their `total_variation_bound`
    is excluded with 99 % confidence.

    Attributes:
        tests: the results of a test for each position, then of the joint test.
        trials: the number of sequences that were generated.
        significance: an upper bound of the probability that any test rejects a lossless loop (Bonferroni).
        mistakes: name of a well-known mistake -> the total variation at position 0 that it would cause with this target
            and draft; empty without a draft.
        beta: accepted drafts / reached drafts, as returned by `step_fn`; None if it returned no counts.
        suspicion: a sentence about the likely cause, if the test of position 0 rejects; empty if no cause is known.
    """

    tests: tuple[LawTest, ...]
    trials: int
    significance: float
    mistakes: dict[str, float]
    beta: float | None = None
    suspicion: str = ""

    @property
    def threshold(self) -> float:
        """A test rejects if its p-value is below this threshold."""
        return self.significance / len(self.tests)

    @property
    def broken(self) -> list[LawTest]:
        """The tests that reject."""
        return [test for test in self.tests if test.p_value < self.threshold]

    @property
    def first_break(self) -> int | None:
        """The first position whose test rejects; None if there is none."""
        return next((test.position for test in self.broken), None)

    def __repr__(self) -> str:
        most = max(test.total_variation_bound for test in self.tests)
        numbers = f"trials={self.trials}, first_break={self.first_break}, total_variation<={most:.3g}"
        return f"LosslessReport(lossless={self.lossless}, {numbers}; print() shows the table)"

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
    """The result of `check_engine`. Its truth value is True if no test rejects and `same_text_as` changed no sequence;
    `str` returns a table.

    Attributes:
        reports: the name of a setting -> its `LosslessReport`.
        significance: an upper bound of the probability that any test of any setting rejects a lossless engine
            (Bonferroni).
        num_changed: the name of a setting -> the number of its sequences for which `same_text_as` returned other
            tokens; None if `same_text_as` was not given.
    """

    reports: dict[str, LosslessReport]
    significance: float
    num_changed: dict[str, int] | None = None

    @property
    def broken(self) -> list[str]:
        """The names of settings for which a test rejects, or `same_text_as` returned other tokens."""
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
