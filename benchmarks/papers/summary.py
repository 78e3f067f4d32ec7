"""The numbers in the table of docs/evidence.md, which has a line for every table and figure of the papers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from leviathan_oracle import percentiles
from pages import NOT_RUN, SPEECH, SUBJECTS, Found, less, speeds, starting
from wagner_methods import BASELINE, EXACT, GAMMAS, METHODS, SIGMOID, UNIFORM

TEXT = ("austen", "topics")


def span(values: Iterable[float], digits: int = 2) -> str:
    """ "low to high", or the number if all are the same."""
    numbers = sorted(values)
    low, high = f"{numbers[0]:.{digits}f}", f"{numbers[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def of_subjects(found: Found, kind: str, more: str = "", subjects: Iterable[str] = SUBJECTS) -> dict[str, Any]:
    scripts = {subject: "wagner_asr" if subject in SPEECH else "wagner_text" for subject in subjects}
    return {subject: found[script][f"{kind}/{subject}{more}"] for subject, script in scripts.items()}


def percent_less(cells: Mapping[str, Any], method: str, field: str) -> str:
    """Less than the baseline, over the subjects."""
    return f"{span((less(own[method], own[BASELINE], field) for own in cells.values()), 0)} % less"


def wagner_table_1(found: Found) -> str:
    cells = of_subjects(found, "main")
    same, texts = (sum(own[method]["identical"] for own in cells.values()) for method in (EXACT, BASELINE))
    large = {subject: own for subject, own in cells.items() if subject != "austen"}
    step = {method: percent_less(large, method, "step_ms_median") for method in METHODS}

    def change(subjects: Iterable[str]) -> str:
        values = [cells[subject][SIGMOID]["quality"] - cells[subject][BASELINE]["quality"] for subject in subjects]
        return f"{min(values):+.3f} to {max(values):+.3f}"

    return (
        f"exact: {same} of {texts} texts are transformers' own; V = 50k, median step: exact {step[EXACT]}, with one "
        f"uniform number {step[UNIFORM]}, sigmoid {step[SIGMOID]}; sigmoid: WER {change(SPEECH)}, "
        f"ROUGE-1 {change(TEXT)}"
    )


def wagner_tables_2_7(found: Found) -> str:
    cells, laws = of_subjects(found, "scales"), of_subjects(found, "laws", "/top_k=0")

    def change(subjects: Iterable[str]) -> str:
        base = " and ".join(f"{cells[subject][BASELINE]['quality']:.2f}" for subject in subjects)
        scaled = (own["quality"] for subject in subjects for name, own in cells[subject].items() if name != BASELINE)
        return f"{base} -> {span(scaled)}"

    # How much of the draft's distance from the target is left.
    left = span(
        own[f"sigmoid, +-{scale}"]["distance"] / own["the draft alone"]["distance"]
        for own in laws.values()
        for scale in (10, 1000, 10000, 100000)
    )
    return (
        f"WER {change(SPEECH)}; ROUGE-1 {change(TEXT)}; at every scale the law is {left} of the draft's distance away "
        "from the target's"
    )


def wagner_table_3(found: Found) -> str:
    cells = [own for _, own in starting(found, "wagner_memory", "table 3/")]
    return ", ".join(f"{name} {span(own[name]['gb_per_s'] for own in cells)}" for name in (*METHODS, "copy_")) + " GB/s"


def wagner_table_5(found: Found) -> str:
    cells = of_subjects(found, "main")
    parts = [f"{method} {percent_less(cells, method, 'wall_seconds')}" for method in (EXACT, UNIFORM, SIGMOID)]
    share = span((100 * own[BASELINE]["seconds"] / own[BASELINE]["wall_seconds"] for own in cells.values()), 1)
    return f"{', '.join(parts)}; the sampling function is {share} % of the time"


def wagner_table_6(found: Found) -> str:
    cells = of_subjects(found, "main").values()
    return ", ".join(f"{method} {span(own[method]['step_ms_median'] for own in cells)} ms" for method in METHODS)


def gammas(found: Found, subject: str) -> list[Any]:
    return [of_subjects(found, "gamma", f"/{gamma}", [subject])[subject] for gamma in GAMMAS]


def wagner_table_8(found: Found) -> str:
    parts = []
    for subject in ("librivox", "austen", "topics"):
        cells = gammas(found, subject)
        verb = "equal" if all(own[EXACT]["accepted"] == own[BASELINE]["accepted"] for own in cells) else "not equal"
        base, sigmoid = (
            span(own[method]["accepted"] / own[method]["drafted"] for own in cells) for method in (BASELINE, SIGMOID)
        )
        parts.append(f"{subject}: baseline and exact {verb}, {base}; sigmoid {sigmoid}")
    return "; ".join(parts)


def wagner_figure_3(found: Found) -> str:
    parts = []
    for method in METHODS:
        both = (gammas(found, subject) for subject in ("librivox", "topics"))
        growth = span(cells[-1][method]["step_ms_median"] / cells[0][method]["step_ms_median"] for cells in both)
        parts.append(f"{method} {growth}")
    return f"median step at gamma 20 over 1 (V = 50k): {', '.join(parts)}"


def peaks_of(*names: str) -> Callable[[Found], str]:
    def numbers(found: Found) -> str:
        parts = []
        for name in names:
            own = found["wagner_memory"][f"figures 4, 5/{name}"]
            peaks = ", ".join(span((peak / 1e6 for peak in own[method].values()), 1) for method in METHODS)
            parts.append(f"{name} {peaks}")
        return f"peak of a call for {', '.join(METHODS)}, gamma 1 to 20, MB: {'; '.join(parts)}"

    return numbers


def leviathan_table_1(found: Found) -> str:
    rows = found["leviathan_theory"]["table 1"]
    met = sum(round(row[name], 2) == row[f"paper_{name}"] for row in rows for name in ("speed", "operations"))
    return f"{met} of {2 * len(rows)} numbers as printed"


def leviathan_table_2(found: Found) -> str:
    best: dict[str, Mapping[str, Any]] = {}
    for own in speeds(found):
        text = f"{own['subject']}, T = {own['T']:.0f}"
        best[text] = max(best.get(text, own), own, key=lambda each: each["speed"])
    parts = (
        f"{text}: {own['speed']:.2f} ({own['draft']}, K = {own['num_draft_tokens']})" for text, own in best.items()
    )
    return "best: " + "; ".join(parts)


def alphas(found: Found, subject: str, draft: str, temperature: float) -> Any:
    return found["leviathan_measured"][f"alpha/{subject}/{draft}/T={temperature}"]


def leviathan_table_3(found: Found) -> str:
    def both(subject: str, draft: str) -> str:
        return " and ".join(f"{alphas(found, subject, draft, t)['1.0']['alpha']:.2f}" for t in (0.0, 1.0))

    texts = {"austen": "bytes", "prose": "prose", "code": "code"}
    parts = [
        f"{draft} " + ", ".join(f"{both(subject, draft)} ({text})" for subject, text in texts.items())
        for draft in ("unigram", "bigram")
    ]
    return f"T = 0 and 1: {'; '.join(parts)}; small model {both('austen', 'small model')}"


def leviathan_table_4(found: Found) -> str:
    theorem, machine = (
        span(own["speed"] / own["expected"][name] for own in speeds(found)) for name in ("theorem", "machine")
    )
    return f"{theorem} of the theorem; {machine} of it with the measured widths of forwards"


def leviathan_table_5(found: Found) -> str:
    def at_leniences(draft: str, field: str, leniences: Iterable[str]) -> str:
        return ", ".join(f"{alphas(found, 'austen', draft, 1.0)[lenience][field]:.2f}" for lenience in leniences)

    leniences = ("1.0", "0.5", "0.3", "0.1")
    bigram, small = (at_leniences(draft, "alpha", leniences) for draft in ("bigram", "small model"))
    apart = at_leniences("small model", "total_variation", leniences[1:])
    return f"austen: bigram {bigram}; small model {small}, at a total variation of {apart} from p"


def leviathan_appendix_a_2(found: Found) -> str:
    parts = [
        f"{key} {own['alpha']:.2f} and {own['rejection']:.4f}"
        for key, own in starting(found, "leviathan_measured", "rejection/austen/")
    ]
    return f"austen, T = 1: {', '.join(parts)}" if parts else ""


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
    parts = []
    for text, measure in (
        ("topics/nucleus", "rouge2"),
        ("topics/greedy", "rouge2"),
        ("code/nucleus, T = 0.8", "passes"),
        ("austen/nucleus", "rouge1"),
    ):
        one, timed = found["chen"][f"quality/{text}"][measure], found["chen"][f"speed/{text}"]
        low, high = one["interval"]
        parts.append(
            f"{text.replace('/', ', ')}: {one['plain']:.3f}, {one['speculative']:.3f} (difference {low:+.3f} to "
            f"{high:+.3f}), {list(timed.values())[-1]['speed']:.2f}x"
        )
    return "; ".join(parts)


def chen_figure_1(found: Found) -> str:
    parts = []
    for text, own in starting(found, "chen", "figure 1/"):
        best = max(own, key=lambda number: own[number]["speed"])
        efficiency = [own[number]["efficiency"] for number in list(own)[1:]]
        loop = own["7"]["loop_ms"] / own["0"]["loop_ms"]
        parts.append(
            f"{text.replace('/', ', ')}: fastest at K = {best} ({own[best]['speed']:.2f}x), efficiency "
            f"{efficiency[0]:.2f} to {efficiency[-1]:.2f} for K = 1 to 7, a loop of K = 7 takes {loop:.1f} of K = 0"
        )
    return "; ".join(parts)


def chen_percentiles(found: Found) -> str:
    parts = []
    for temperature in ("0", "1"):
        own = [each for each in percentiles(found["leviathan_oracle"]) if each["T"] == temperature]
        best = {name: min(own, key=lambda each: each[name]) for name in ("mean", "p90", "p99")}
        named = ", ".join(
            f"{name.replace('p', 'P')} {each[name]:.2f} at K = {each['K']}" for name, each in best.items()
        )
        parts.append(f"T = {temperature}: {named}; deviation {own[1]['deviation']:.3f} to {own[-1]['deviation']:.3f}")
    return f"best times of 128 tokens over none drafted, {'; '.join(parts)} for K = 1 to {own[-1]['K']}"


def or_not_run(write: Callable[[Found], str]) -> Callable[[Found], str]:
    """Says "not run" if a result is missing."""

    def number(found: Found) -> str:
        try:
            return write(found) or NOT_RUN
        except (KeyError, IndexError) as missing:
            return f"{NOT_RUN} ({missing})"

    return number


NUMBERS = {
    name: or_not_run(write)
    for name, write in {
        "wagner table 1": wagner_table_1,
        "wagner tables 2 and 7": wagner_tables_2_7,
        "wagner table 3": wagner_table_3,
        "wagner table 5": wagner_table_5,
        "wagner table 6": wagner_table_6,
        "wagner table 8": wagner_table_8,
        "wagner figure 3": wagner_figure_3,
        "wagner figure 4": peaks_of("Llama 2", "Qwen", "Gemma"),
        "wagner figure 5": peaks_of("Whisper"),
        "leviathan table 1": leviathan_table_1,
        "leviathan table 2": leviathan_table_2,
        "leviathan table 3": leviathan_table_3,
        "leviathan table 4": leviathan_table_4,
        "leviathan table 5": leviathan_table_5,
        "leviathan appendix A.2": leviathan_appendix_a_2,
        "leviathan figure 2": curves("figure 2", "gamma", ".2f", "expected_tokens_per_step"),
        "leviathan figure 3": curves("figure 3", "cost", "d", "optimal_num_draft_tokens"),
        "leviathan figure 4": curves(
            "figure 4", "gamma", ".2f", "walltime_factor", "operations_factor", what=", speed and operations"
        ),
        "chen table 1": chen_table_1,
        "chen figure 1": chen_figure_1,
        "chen percentiles": chen_percentiles,
    }.items()
}
