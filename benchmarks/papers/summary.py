"""The numbers in the table of docs/evidence.md, which has a line for every table and figure of the papers. They are
written from the rows of the tables in `pages.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pages import CHEN, LEVIATHAN_TABLES, NOT_RUN, SPEECH, SUBJECTS, WAGNER, Found, Table, each, of, starting
from wagner_methods import BASELINE, EXACT, GAMMAS, METHODS, SIGMOID, UNIFORM

TEXT = ("austen", "topics")


def span(numbers: Iterable[str]) -> str:
    """ "low to high", or the number if all are the same."""
    ordered = sorted(numbers, key=float)
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def over(rows: Iterable[Mapping[str, Any]], form: str) -> str:
    """The format string with the span over all rows for each of its fields."""
    every = list(rows)
    return re.sub(r"\{.+?\}", lambda field: span(field[0].format_map(row) for row in every), form)


def spans(table: Table, form: str) -> Callable[[Found], str]:
    return lambda found: over(table.rows(found), form)


def wagner_table_1(found: Found) -> str:
    cells = {subject: of(found, "main", subject) for subject in SUBJECTS}
    same, texts = (sum(own[method]["identical"] for own in cells.values()) for method in (EXACT, BASELINE))
    rows = [row for row in WAGNER["table 1"].rows(found) if row["subject"] != "austen"]
    less = {method: [row for row in rows if row["method"] == method] for method in METHODS}
    step = {method: over(less[method], "{step_less:.0f} % less") for method in (EXACT, UNIFORM, SIGMOID)}

    def change(subjects: Iterable[str]) -> str:
        values = [cells[subject][SIGMOID]["quality"] - cells[subject][BASELINE]["quality"] for subject in subjects]
        return f"{min(values):+.3f} to {max(values):+.3f}"

    return (
        f"exact: {same} of {texts} texts are transformers' own; V = 50k, median step: exact {step[EXACT]}, with one "
        f"uniform number {step[UNIFORM]}, sigmoid {step[SIGMOID]}; sigmoid: WER {change(SPEECH)}, "
        f"ROUGE-1 {change(TEXT)}"
    )


def wagner_tables_2_7(found: Found) -> str:
    cells = {subject: of(found, "scales", subject) for subject in SUBJECTS}
    laws = [of(found, "laws", subject, "/top_k=0") for subject in SUBJECTS]

    def change(subjects: Iterable[str]) -> str:
        base = " and ".join(f"{cells[subject][BASELINE]['quality']:.2f}" for subject in subjects)
        scaled = (own for subject in subjects for name, own in cells[subject].items() if name != BASELINE)
        return f"{base} -> {over(scaled, '{quality:.2f}')}"

    # How much of the draft's distance from the target is left.
    scales = [f"sigmoid, +-{scale}" for scale in (10, 1000, 10000, 100000)]
    shares = (law[name]["distance"] / law["the draft alone"]["distance"] for law in laws for name in scales)
    left = span(f"{share:.2f}" for share in shares)
    return (
        f"WER {change(SPEECH)}; ROUGE-1 {change(TEXT)}; at every scale the law is {left} of the draft's distance away "
        "from the target's"
    )


def wagner_table_8(found: Found) -> str:
    parts = []
    for subject in ("librivox", "austen", "topics"):
        rows = [row for row in WAGNER["table 8"].rows(found) if row["subject"] == subject]
        verb = "equal" if all(row[EXACT]["accepted"] == row[BASELINE]["accepted"] for row in rows) else "not equal"
        rates = over(rows, f"{{{BASELINE}[rate]:.2f}}; sigmoid {{{SIGMOID}[rate]:.2f}}")
        parts.append(f"{subject}: baseline and exact {verb}, {rates}")
    return "; ".join(parts)


def wagner_figure_3(found: Found) -> str:
    texts, ends = ("librivox", "topics"), (GAMMAS[0], GAMMAS[-1])
    cells = [[of(found, "gamma", text, f"/{gamma}") for gamma in ends] for text in texts]
    growth = [{m: last[m]["step_ms_median"] / first[m]["step_ms_median"] for m in METHODS} for first, last in cells]
    return f"median step at gamma 20 over 1 (V = 50k): {over(growth, each('@ {@:.2f}', METHODS, ', '))}"


def leviathan_table_1(found: Found) -> str:
    rows = found["leviathan_theory"]["table 1"]
    met = sum(round(row[name], 2) == row[f"paper_{name}"] for row in rows for name in ("speed", "operations"))
    return f"{met} of {2 * len(rows)} numbers as printed"


def leviathan_table_2(found: Found) -> str:
    best: dict[str, Mapping[str, Any]] = {}
    for own in LEVIATHAN_TABLES["tables 2 and 4"].rows(found):
        text = "{subject}, T = {T:.0f}".format_map(own)
        best[text] = max(best.get(text, own), own, key=lambda row: row["speed"])
    form = "{speed:.2f} ({draft}, K = {num_draft_tokens})"
    return "best: " + "; ".join(f"{text}: {form.format_map(own)}" for text, own in best.items())


def leviathan_table_3(found: Found) -> str:
    rows = {(row["subject"], row["draft"]): row for row in LEVIATHAN_TABLES["table 3"].rows(found)}

    def both(draft: str, *subjects: str) -> str:
        form = "{cold[1.0][alpha]:.2f} and {warm[1.0][alpha]:.2f}"
        named = {"austen": " (bytes)", "prose": " (prose)", "code": " (code)"} if len(subjects) > 1 else {}
        return f"{draft} " + ", ".join(form.format_map(rows[each, draft]) + named.get(each, "") for each in subjects)

    tables = "; ".join(both(draft, "austen", "prose", "code") for draft in ("unigram", "bigram"))
    return f"T = 0 and 1: {tables}; {both('small model', 'austen')}"


def leviathan_table_5(found: Found) -> str:
    rows = {row["draft"]: row for row in LEVIATHAN_TABLES["table 5"].rows(found) if row["subject"] == "austen"}
    bigram, small = (
        each("{warm[@][alpha]:.2f}", ("1.0", "0.5", "0.3", "0.1"), ", ").format_map(rows[draft])
        for draft in ("bigram", "small model")
    )
    apart = rows["small model"]["apart"]
    return f"austen: bigram {bigram}; small model {small}, at a total variation of {apart} from p"


def leviathan_appendix_a_2(found: Found) -> str:
    rows = LEVIATHAN_TABLES["appendix A.2"].rows(found)
    return "austen, T = 1: " + ", ".join("{draft} {alpha:.2f} and {rejection:.4f}".format_map(row) for row in rows)


def curves(figure: str, parameter: str, form: str, *names: str, what: str = "") -> Callable[[Found], str]:
    """The values of every curve of a figure at alpha = 0.8."""

    def numbers(found: Found) -> str:
        own = found["leviathan_theory"][figure]
        at = own["alpha"].index(0.8)
        values = zip(*([f"{values[at]:{form}}" for values in own[name]] for name in names), strict=True)
        parameters, symbol = ", ".join(map(str, own[f"{parameter}s"])), {"cost": "c"}.get(parameter, parameter)
        return f"alpha = 0.8{what}: {', '.join(map(' and '.join, values))} for {symbol} {parameters}"

    return numbers


def chen_table_1(found: Found) -> str:
    rows = {(row["subject"], row["law"], row["measure"]): row for row in CHEN["table 1"].rows(found)}
    form = "{subject}, {law}: {value[plain]:.3f}, {value[speculative]:.3f} (difference {value[interval][0]:+.3f} to "
    form += "{value[interval][1]:+.3f}), {timed[speed]:.2f}x"
    shown = [("topics", "nucleus", "ROUGE-2"), ("topics", "greedy", "ROUGE-2"), ("code", "nucleus, T = 0.8", "passes")]
    return "; ".join(form.format_map(rows[key]) for key in [*shown, ("austen", "nucleus", "ROUGE-1")])


def chen_figure_1(found: Found) -> str:
    parts = []
    for (subject, law), own in starting(found, "chen", "figure 1/"):
        best = max(own, key=lambda number: own[number]["speed"])
        loop = own["7"]["loop_ms"] / own["0"]["loop_ms"]
        parts.append(
            f"{subject}, {law}: fastest at K = {best} ({own[best]['speed']:.2f}x), efficiency "
            f"{own['1']['efficiency']:.2f} to {own['7']['efficiency']:.2f} for K = 1 to 7, a loop of K = 7 takes "
            f"{loop:.1f} of K = 0"
        )
    return "; ".join(parts)


def or_not_run(write: Callable[[Found], str]) -> Callable[[Found], str]:
    """Says "not run" if a result is missing."""

    def number(found: Found) -> str:
        try:
            return write(found) or NOT_RUN
        except (KeyError, IndexError, TypeError) as missing:
            return f"{NOT_RUN} ({missing})"

    return number


FACTORS = ("walltime_factor", "operations_factor")
WIDTHS = "{of_theorem:.2f} of the theorem; {of_machine:.2f} of it with the measured widths of forwards"
FASTER = each("@ {@, less:.0f} % less", (EXACT, UNIFORM, SIGMOID), ", ")
WRITERS = {
    "wagner table 1": wagner_table_1,
    "wagner tables 2 and 7": wagner_tables_2_7,
    "wagner table 5": spans(WAGNER["table 5"], f"{FASTER}; the sampling function is {{share:.1f}} % of the time"),
    "wagner table 6": spans(WAGNER["table 6"], each("@ {@[step_ms_median]:.2f} ms", METHODS, ", ")),
    "wagner table 8": wagner_table_8,
    "wagner figure 3": wagner_figure_3,
    "leviathan table 1": leviathan_table_1,
    "leviathan table 2": leviathan_table_2,
    "leviathan table 3": leviathan_table_3,
    "leviathan table 4": spans(LEVIATHAN_TABLES["tables 2 and 4"], WIDTHS),
    "leviathan table 5": leviathan_table_5,
    "leviathan appendix A.2": leviathan_appendix_a_2,
    "leviathan figure 2": curves("figure 2", "gamma", ".2f", "expected_tokens_per_step"),
    "leviathan figure 3": curves("figure 3", "cost", "d", "optimal_num_draft_tokens"),
    "leviathan figure 4": curves("figure 4", "gamma", ".2f", *FACTORS, what=", speed and operations"),
    "chen table 1": chen_table_1,
    "chen figure 1": chen_figure_1,
}
NUMBERS = {name: or_not_run(write) for name, write in WRITERS.items()}
