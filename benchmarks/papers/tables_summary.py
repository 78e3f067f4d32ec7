"""The table of docs/evidence.md: every table and figure of the papers, the paper's numbers and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tables_leviathan import speeds
from tables_markdown import NOT_RUN, Found, markdown, span
from tables_wagner import GAMMAS, SPEECH, SUBJECTS
from wagner_methods import BASELINE, EXACT, METHODS, SIGMOID, UNIFORM

__all__ = ["ROWS", "TABLES"]


class NotRun(Exception):
    """A cell that a number needs is not in the JSON."""


@dataclass(frozen=True)
class Row:
    """One table or figure.

    Args:
        paper, name: which.
        theirs: the paper's numbers.
        ours: writes ours; may raise NotRun.
        why: the reason for the difference.
        scripts: where it is measured; the JSON has the same name.
        state: what was not run, and why; "" if nothing.
    """

    paper: str
    name: str
    theirs: str
    ours: Callable[[Found], str]
    why: str
    scripts: tuple[str, ...]
    state: str = ""


def need(found: Found, script: str, key: str) -> Any:
    if key not in found[script]:
        raise NotRun(f"{script}: {key}")
    return found[script][key]


def of_subjects(found: Found, kind: str, more: str = "") -> dict[str, Any]:
    return {
        subject: need(found, "wagner_asr" if subject in SPEECH else "wagner_text", f"{kind}/{subject}{more}")
        for subject in SUBJECTS
    }


def percent_less(cells: Mapping[str, Any], method: str, field: str) -> str:
    """The range over subjects."""
    values = (100 * (1 - own[method][field] / own[BASELINE][field]) for own in cells.values())
    return f"{span(values, 0)} % less"


def change(cells: Mapping[str, Any], method: str, subjects: tuple[str, ...]) -> str:
    values = [cells[subject][method]["quality"] - cells[subject][BASELINE]["quality"] for subject in subjects]
    return " to ".join(f"{each:+.3f}" for each in (min(values), max(values)))


def wagner_1(found: Found) -> str:
    cells = of_subjects(found, "main")
    same = sum(own[EXACT]["identical"] for own in cells.values())
    texts = sum(own[BASELINE]["identical"] for own in cells.values())
    large = {subject: own for subject, own in cells.items() if subject != "austen"}
    parts = [
        f"exact: {same} of {texts} texts are transformers' own; V = 50k, median step: exact "
        f"{percent_less(large, EXACT, 'step_ms_median')}, with one uniform number "
        f"{percent_less(large, UNIFORM, 'step_ms_median')}, sigmoid {percent_less(large, SIGMOID, 'step_ms_median')}",
        f"sigmoid: WER {change(cells, SIGMOID, SPEECH)}, ROUGE-1 {change(cells, SIGMOID, ('austen', 'topics'))}",
    ]
    return "; ".join(parts)


def wagner_2_7(found: Found) -> str:
    cells = of_subjects(found, "scales")
    names = [name for name in cells["austen"] if name != BASELINE]
    wer = [cells[subject][name]["quality"] for subject in SPEECH for name in names]
    rouge = [cells[subject][name]["quality"] for subject in ("austen", "topics") for name in names]
    laws = of_subjects(found, "laws", "/top_k=0")
    # How much of the draft's distance from the target is left.
    left = [
        own[f"sigmoid, +-{scale}"]["distance"] / own["the draft alone"]["distance"]
        for own in laws.values()
        for scale in (10, 1000, 10000, 100000)
    ]
    base = " and ".join(f"{cells[subject][BASELINE]['quality']:.2f}" for subject in SPEECH)
    text = " and ".join(f"{cells[subject][BASELINE]['quality']:.2f}" for subject in ("austen", "topics"))
    return (
        f"WER {base} -> {span(wer)}; ROUGE-1 {text} -> {span(rouge)}; at every scale the law is "
        f"{span(left)} of the draft's distance away from the target's"
    )


def wagner_3(found: Found) -> str:
    cells = [own for key, own in found["wagner_memory"].items() if key.startswith("table 3/")]
    if not cells:
        raise NotRun("wagner_memory: table 3")
    return ", ".join(f"{name} {span(own[name]['gb_per_s'] for own in cells)}" for name in (*METHODS, "copy_")) + " GB/s"


def wagner_5(found: Found) -> str:
    cells = of_subjects(found, "main")
    parts = [f"{method} {percent_less(cells, method, 'wall_seconds')}" for method in (EXACT, UNIFORM, SIGMOID)]
    share = span((100 * own[BASELINE]["seconds"] / own[BASELINE]["wall_seconds"] for own in cells.values()), 1)
    return f"{', '.join(parts)}; the sampling function is {share} % of the time"


def wagner_6(found: Found) -> str:
    cells = of_subjects(found, "main")
    return ", ".join(
        f"{method} {span(own[method]['step_ms_median'] for own in cells.values())} ms" for method in METHODS
    )


def gammas(found: Found, subject: str) -> list[Any]:
    script = "wagner_asr" if subject in SPEECH else "wagner_text"
    return [need(found, script, f"gamma/{subject}/{gamma}") for gamma in GAMMAS]


def wagner_8(found: Found) -> str:
    parts = []
    for subject in ("librivox", "austen", "topics"):
        cells = gammas(found, subject)
        equal = all(own[EXACT]["accepted"] == own[BASELINE]["accepted"] for own in cells)
        rates = [
            span(own[method]["accepted"] / own[method]["drafted"] for own in cells) for method in (BASELINE, SIGMOID)
        ]
        verb = "equal" if equal else "not equal"
        parts.append(f"{subject}: baseline and exact {verb}, {rates[0]}; sigmoid {rates[1]}")
    return "; ".join(parts)


def wagner_figure_3(found: Found) -> str:
    parts = []
    for method in METHODS:
        growth = []
        for subject in ("librivox", "topics"):
            cells = gammas(found, subject)
            growth.append(cells[-1][method]["step_ms_median"] / cells[0][method]["step_ms_median"])
        parts.append(f"{method} {span(growth)}")
    return f"median step at gamma 20 over 1 (V = 50k): {', '.join(parts)}"


def memory_of(names: tuple[str, ...]) -> Callable[[Found], str]:
    def ours(found: Found) -> str:
        parts = []
        for name in names:
            own = need(found, "wagner_memory", f"figures 4, 5/{name}")
            peaks = ", ".join(f"{span((peak / 1e6 for peak in own[method].values()), 1)}" for method in METHODS)
            parts.append(f"{name} {peaks}")
        return f"peak of a call for {', '.join(METHODS)}, gamma 1 to 20, MB: {'; '.join(parts)}"

    return ours


def leviathan_1(found: Found) -> str:
    rows = need(found, "leviathan_theory", "table 1")
    met = sum(round(row[name], 2) == row[f"paper_{name}"] for row in rows for name in ("speed", "operations"))
    return f"{met} of {2 * len(rows)} numbers as printed"


def leviathan_2(found: Found) -> str:
    best: dict[tuple[str, float], tuple[float, str]] = {}
    for subject, temperature, own, _ in speeds(found):
        label = f"{own['draft']}, K = {own['num_draft_tokens']}"
        best[subject, temperature] = max(best.get((subject, temperature), (0.0, "")), (own["speed"], label))
    if not best:
        raise NotRun("leviathan_measured: speed")
    return "best: " + "; ".join(
        f"{subject}, T = {temperature:.0f}: {speed:.2f} ({label})"
        for (subject, temperature), (speed, label) in best.items()
    )


def leviathan_3(found: Found) -> str:
    def of(subject: str, draft: str) -> str:
        return " and ".join(
            f"{need(found, 'leviathan_measured', f'alpha/{subject}/{draft}/T={t}')['1.0']['alpha']:.2f}"
            for t in (0.0, 1.0)
        )

    parts = [f"{draft} {of('austen', draft)} (bytes), {of('prose', draft)} (prose), {of('code', draft)} (code)"
             for draft in ("unigram", "bigram")]  # fmt: skip
    return f"T = 0 and 1: {'; '.join(parts)}; small model {of('austen', 'small model')}"


def leviathan_4(found: Found) -> str:
    both = [
        (own["speed"] / expected["theorem"], own["speed"] / expected["machine"]) for *_, own, expected in speeds(found)
    ]
    if not both:
        raise NotRun("leviathan_measured: speed")
    theorem, machine = zip(*both, strict=True)
    return f"{span(theorem)} of the theorem; {span(machine)} of it with the measured widths of forwards"


def leviathan_5(found: Found) -> str:
    def of(draft: str) -> str:
        own = need(found, "leviathan_measured", f"alpha/austen/{draft}/T=1.0")
        return ", ".join(f"{own[lenience]['alpha']:.2f}" for lenience in ("1.0", "0.5", "0.3", "0.1"))

    own = need(found, "leviathan_measured", "alpha/austen/small model/T=1.0")
    apart = ", ".join(f"{own[lenience]['total_variation']:.2f}" for lenience in ("0.5", "0.3", "0.1"))
    return f"austen: bigram {of('bigram')}; small model {of('small model')}, at a total variation of {apart} from p"


def curve(figure: str, name: str, which: int, alpha: float) -> Callable[[Found], float]:
    def value(found: Found) -> float:
        own = need(found, "leviathan_theory", figure)
        return own[name][which][own["alpha"].index(alpha)]

    return value


def leviathan_figure_2(found: Found) -> str:
    own = need(found, "leviathan_theory", "figure 2")
    values = (
        f"{curve('figure 2', 'expected_tokens_per_step', which, 0.8)(found):.2f}" for which in range(len(own["gammas"]))
    )
    return f"alpha = 0.8: {', '.join(values)} for gamma {', '.join(map(str, own['gammas']))}"


def leviathan_figure_3(found: Found) -> str:
    own = need(found, "leviathan_theory", "figure 3")
    values = (
        str(curve("figure 3", "optimal_num_draft_tokens", which, 0.8)(found)) for which in range(len(own["costs"]))
    )
    return f"alpha = 0.8: {', '.join(values)} for c {', '.join(map(str, own['costs']))}"


def leviathan_figure_4(found: Found) -> str:
    own = need(found, "leviathan_theory", "figure 4")
    pairs = (
        " and ".join(
            f"{curve('figure 4', name, which, 0.8)(found):.2f}" for name in ("walltime_factor", "operations_factor")
        )
        for which in range(len(own["gammas"]))
    )
    return f"alpha = 0.8, speed and operations: {', '.join(pairs)} for gamma {', '.join(map(str, own['gammas']))}"


def chen_1(found: Found) -> str:
    parts = []
    for subject, law, measure in (
        ("topics", "nucleus", "rouge2"),
        ("topics", "greedy", "rouge2"),
        ("code", "nucleus, T = 0.8", "passes"),
        ("austen", "nucleus", "rouge1"),
    ):
        own, timed = (need(found, "chen", f"{kind}/{subject}/{law}") for kind in ("quality", "speed"))
        speed = list(timed.values())[-1]["speed"]
        one = own[measure]
        low, high = one["interval"]
        values = f"{one['plain']:.3f}, {one['speculative']:.3f}"
        parts.append(f"{subject}, {law}: {values} (difference {low:+.3f} to {high:+.3f}), {speed:.2f}x")
    return "; ".join(parts)


def chen_figure_1(found: Found) -> str:
    parts = []
    for key, own in found["chen"].items():
        if not key.startswith("figure 1/"):
            continue
        _, subject, law = key.split("/")
        best = max(own, key=lambda number: own[number]["speed"])
        efficiency = [own[number]["efficiency"] for number in list(own)[1:]]
        loop = own["7"]["loop_ms"] / own["0"]["loop_ms"]
        parts.append(
            f"{subject}, {law}: fastest at K = {best} ({own[best]['speed']:.2f}x), efficiency {efficiency[0]:.2f} to "
            f"{efficiency[-1]:.2f} for K = 1 to 7, a loop of K = 7 takes {loop:.1f} of K = 0"
        )
    if not parts:
        raise NotRun("chen: figure 1")
    return "; ".join(parts)


NO_GPU = "The paper's own measurement needs a GPU, and was not run."
WAGNER, LEVIATHAN, CHEN = (
    "[Wagner](evidence_wagner.md)",
    "[Leviathan](evidence_leviathan.md)",
    "[Chen](evidence_chen.md)",
)
TEXT_AND_SPEECH = ("wagner_text", "wagner_asr")
ROWS = (
    Row(WAGNER, "table 1: quality and sampling time",
        "exact 5.7 to 12.5 % less, quality equal; sigmoid 71.9 to 93.6 % less, WER up, ROUGE-1 down by 0.02 to 0.06",
        wagner_1,
        "One CPU thread, not a GPU. `exact` has to draw transformers' own numbers, one for each token of the "
        "vocabulary, and that is most of the time; with one uniform number it gains.",
        TEXT_AND_SPEECH),
    Row(WAGNER, "tables 2 and 7: alpha and beta",
        "WER 0.24 -> 0.26 to 0.42, at +-1e5 29 to 31; ROUGE-1 0.17 to 0.20 -> 0.01 to 0.17",
        wagner_2_7,
        "Logits are float32, so nothing breaks down at +-1e5. The emitted law is the draft's at every scale; the text "
        "is as good as the draft's.",
        TEXT_AND_SPEECH),
    Row(WAGNER, "table 3: realised bandwidth",
        "baseline 9.3 to 53.7, exact 11.2 to 38.5, sigmoid 16.1 to 63.0 GB/s",
        wagner_3,
        "Bytes that have to be read over the time of a call, on a CPU: exponentials bind here, not memory, and sigmoid "
        "has fewer bytes to read, so its rate is the lowest.",
        ("wagner_memory",), NO_GPU),
    Row(WAGNER, "table 5: wall-clock time",
        "small gains for both (as the text says; its table was not read)",
        wagner_5,
        "A CPU's forward hides the sampling function; what sigmoid saves are steps, because it hardly rejects.",
        TEXT_AND_SPEECH),
    Row(WAGNER, "table 6: time per step",
        "exact and sigmoid below the baseline throughout (read from the text alone; table 4: exact 5.0 to "
        "12.6 %, sigmoid 62.0 to 82.5 % less)",
        wagner_6,
        "As table 1. At V = 256 (austen) a call costs what its dispatch costs.",
        TEXT_AND_SPEECH),
    Row(WAGNER, "table 8: acceptance by gamma",
        "baseline and exact equal; sigmoid often higher (as the text says; its table was not read)",
        wagner_8,
        "The same picture; few steps per cell, so the rates scatter.",
        TEXT_AND_SPEECH),
    Row(WAGNER, "figure 3: time per step by gamma",
        "stable from gamma 1 to 20, both below the baseline",
        wagner_figure_3,
        "On a CPU time grows with the rows that are read: K + 1 and K of them for the exact methods, one of each for "
        "sigmoid, which alone is stable.",
        TEXT_AND_SPEECH, NO_GPU),
    Row(WAGNER, "figure 4: peak memory, text",
        "within 200 MB of the baseline",
        memory_of(("Llama 2", "Qwen", "Gemma")),
        "The sampling function alone, float32, V as the paper's models. Ours holds no row per draft. Beside the "
        "weights of these models that is nothing, which is why the paper sees no difference.",
        ("wagner_memory",), NO_GPU),
    Row(WAGNER, "figure 5: peak memory, speech",
        "within 10 MB of the baseline",
        memory_of(("Whisper",)),
        "As figure 4.",
        ("wagner_memory",), NO_GPU),
    Row(LEVIATHAN, "table 1: formulas",
        "six rows of two numbers", leviathan_1, "None.", ("leviathan_theory",)),
    Row(LEVIATHAN, "table 2: speed-up",
        "1.4 to 3.4", leviathan_2,
        "Small targets on a CPU: the draft costs half a forward (a 1.6 M target) and K + 1 tokens cost more than one, "
        "which theorem 3.8 does not know. Prompt lookup pays on greedy code.",
        ("leviathan_measured",)),
    Row(LEVIATHAN, "table 3: alpha",
        "unigram 0.03 to 0.13, bigram 0.05 to 0.23; small GPT-like model 0.88 and 0.89, T5 0.53 to 0.82",
        leviathan_3,
        "Bytes are easier for n-grams than tokens are; on tokens they are near the paper's.",
        ("leviathan_measured",)),
    Row(LEVIATHAN, "table 4: measured over theorem 3.8",
        "0.68 to 1.29", leviathan_4,
        "The theorem takes a forward over K + 1 tokens for as cheap as one over one token; on this CPU it is not.",
        ("leviathan_theory", "leviathan_measured")),
    Row(LEVIATHAN, "table 5: lenience 1, 0.5, 0.3, 0.1",
        "bigram 0.19, 0.23, 0.25, 0.32; T5-small 0.62, 0.71, 0.76, 0.84",
        leviathan_5,
        "A better draft starts higher, and has less to gain. The paper does not give the price, the distance from p.",
        ("leviathan_measured",)),
    Row(LEVIATHAN, "figure 2: expected tokens per step",
        "curves of equation 1", leviathan_figure_2, "None: a formula; `tests/test_analysis.py` simulates it.",
        ("leviathan_theory",)),
    Row(LEVIATHAN, "figure 3: optimal gamma",
        "curves", leviathan_figure_3, "None: theorem 3.8 maximised. The paper names no c; ours are our choice.",
        ("leviathan_theory",)),
    Row(LEVIATHAN, "figure 4: speed and operations",
        "curves of theorems 3.8 and 3.11", leviathan_figure_4, "None: formulas.", ("leviathan_theory",)),
    Row(CHEN, "table 1: quality and speed, K = 4",
        "XSum ROUGE-2 0.112, 0.114, 1.92x (nucleus), 0.157, 0.156, 2.01x (greedy); HumanEval 45.1 %, 47.0 %, 2.46x",
        chen_1,
        "Parity, as there. 135 M parameters, not 70 B, on a CPU; no small model of its vocabulary, so drafts are "
        "looked up in the prompt and few are accepted.",
        ("chen",)),
    Row(CHEN, "figure 1: time, efficiency and loop time by K",
        "XSum fastest at K = 3 (nucleus); efficiency falls, the loop's time rises about linearly",
        chen_figure_1,
        "The same shapes for a draft model (austen). Looked-up drafts cost nothing and are few, so for code the loop "
        "hardly gets longer.",
        ("chen",)),
)  # fmt: skip


def summary(found: Found) -> str:
    rows = []
    for index, row in enumerate(ROWS, 1):
        try:
            ours = row.ours(found)
        except NotRun as missing:
            ours = f"{NOT_RUN} ({missing})"
        scripts = ", ".join(f"`{script}`" for script in row.scripts)
        why = f"{row.why} {row.state}".strip()
        rows.append([str(index), f"{row.paper}, {row.name}", row.theirs, ours, why, scripts])
    return markdown(("", "", "paper", "ours", "why they differ", "script, JSON"), rows)


def times(found: Found) -> str:
    rows = [
        [f"`{script}`", str(len(seconds)), f"{sum(seconds) / 60:.0f}"] for script, seconds in found["seconds"].items()
    ]
    total = sum(map(sum, found["seconds"].values()))
    return markdown(("script", "cells", "minutes"), [*rows, ["all", "", f"{total / 60:.0f}"]])


TABLES: dict[str, Callable[[Found], str]] = {"all": summary, "times": times}
