"""The tables of docs/evidence_wagner.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tables_markdown import NOT_RUN, Found, less, markdown
from wagner_methods import BASELINE, METHODS

__all__ = ["GAMMAS", "SPEECH", "SUBJECTS", "TABLES", "cell"]

SPEECH = ("librivox", "espeak")
SUBJECTS = (*SPEECH, "austen", "topics")
GAMMAS = (1, 3, 5, 10, 15, 20)
SCALES = ("sigmoid 10", "sigmoid 1000", "sigmoid 10000", "sigmoid 100000")
OTHERS = tuple(METHODS)[1:]


def cell(found: Found, kind: str, subject: str, more: str = "") -> Any:
    """What a cell of one of the two scripts returned; None if it was not run."""
    return found["wagner_asr" if subject in SPEECH else "wagner_text"].get(f"{kind}/{subject}{more}")


def quality(subject: str, own: dict[str, Any]) -> str:
    if subject in SPEECH:
        return f"WER {own['quality']:.3f}"
    return f"ROUGE-1 {own['quality']:.3f} +- {own['quality_error']:.3f}, {own['nats']:.2f} nats"


def table_1(found: Found) -> str:
    rows = []
    for subject in SUBJECTS:
        own = cell(found, "main", subject)
        if own is None:
            rows.append([subject, NOT_RUN, "", "", "", ""])
            continue
        base = own[BASELINE]
        for method in METHODS:
            one = own[method]
            costs = [
                less(one[field], base[field]) if method != BASELINE else "" for field in ("seconds", "step_ms_median")
            ]
            rows.append([subject, method, quality(subject, one), *costs, f"{one['identical']} of {base['identical']}"])
    header = ("", "method", "quality", "time in the sampling function, % less", "median step, % less")
    return markdown((*header, "texts equal to transformers'"), rows)


def table_5(found: Found) -> str:
    rows = []
    for subject in SUBJECTS:
        own = cell(found, "main", subject)
        if own is None:
            rows.append([subject, *[NOT_RUN] * 5])
            continue
        base = own[BASELINE]
        rows.append(
            [
                f"{subject}, % less",
                *(less(own[method]["wall_seconds"], base["wall_seconds"]) for method in OTHERS),
                ", ".join(str(own[method]["steps"]) for method in (BASELINE, OTHERS[-1])),
                f"{100 * base['seconds'] / base['wall_seconds']:.1f}%",
            ]
        )
    return markdown(("", *OTHERS, "steps: transformers, sigmoid", "share of sampling in the baseline"), rows)


def table_6(found: Found) -> str:
    rows = []
    for subject in SUBJECTS:
        own = cell(found, "main", subject)
        times = [
            NOT_RUN
            if own is None
            else f"{one['step_ms']:.2f} +- {one['step_ms_deviation']:.2f}; {one['step_ms_median']:.2f}"
            for one in (own[method] if own else {} for method in METHODS)
        ]
        rows.append([f"{subject}: mean +- deviation; median", *times])
    return markdown(("ms", *METHODS), rows)


def calls(found: Found) -> str:
    rows = []
    for key, own in found["wagner_text"].items():
        if key.startswith("calls/"):
            for number in own[BASELINE]:
                rows.append(
                    [key.removeprefix("calls/"), number, *(f"{own[method][number]:.2f} ms" for method in METHODS)]
                )
    return markdown(("", "number of drafts", *METHODS), rows)


def table_8(found: Found) -> str:
    rows = []
    for subject in ("librivox", "austen", "topics"):
        for gamma in GAMMAS:
            own = cell(found, "gamma", subject, f"/{gamma}")
            values = [
                NOT_RUN if own is None else f"{one['accepted'] / one['drafted']:.2f}, {one['step_ms_median']:.2f} ms"
                for one in (own[method] if own else {} for method in METHODS)
            ]
            rows.append([subject, str(gamma), *values])
    return markdown(("", "gamma", *METHODS), rows)


def tables_2_7(found: Found) -> str:
    rows: list[list[str]] = []
    for subject in SUBJECTS:
        own = cell(found, "scales", subject)
        kind = "WER" if subject in SPEECH else "ROUGE-1"
        if own is None:
            rows.append([subject, kind, *[NOT_RUN] * 6])
            continue
        alone = cell(found, "alone" if subject in SPEECH else "draft alone", subject, "/draft" * (subject in SPEECH))
        names = (BASELINE, *SCALES)
        rows.append(
            [
                subject,
                kind,
                *(f"{own[name]['quality']:.3f}" for name in names),
                f"{alone['quality']:.3f}" if alone else "",
            ]
        )
        if subject not in SPEECH:
            nats = [f"{own[name]['nats']:.2f}" for name in names]
            rows.append(["", "nats per token under the target", *nats, f"{alone['nats']:.2f}" if alone else ""])
        base = own[BASELINE]
        times = []
        for name in SCALES:
            whole, step = (less(own[name][field], base[field]) for field in ("seconds", "step_ms_median"))
            times.append(f"{whole} ({step})")
        rows.append(["", "time, % less (median step)", "", *times, ""])
        rows.append(["", "accepted", *(f"{own[name]['accepted'] / own[name]['drafted']:.3f}" for name in names), ""])
    return markdown(("", "", "transformers", "+-10", "+-1e3", "+-1e4", "+-1e5", "the draft alone"), rows)


def laws(found: Found) -> str:
    by_subject = {subject: cell(found, "laws", subject, "/top_k=0") or {} for subject in SUBJECTS}
    names = list(dict.fromkeys(name for own in by_subject.values() for name in own))
    rows = []
    for name in names:
        values = [
            f"{own[name]['distance']:.4f}; {own[name]['accepted']:.3f}; {own[name]['tail']:.4f}"
            if name in own
            else NOT_RUN
            for own in by_subject.values()
        ]
        rows.append([name, *values])
    return markdown(("distance from the target's law; accepted; rare", *SUBJECTS), rows)


def pairs(found: Found) -> str:
    described = {
        "librivox": ("Whisper base, tiny.en in the target's vocabulary", "5 clips that people read, 3 seeds"),
        "espeak": ("the same", "6 sentences that espeak-ng speaks"),
        "austen": ("the byte-level pair of the package", "16 continuations of 100 bytes"),
        "topics": (
            "SmolLM2-135M-Instruct, its first 28 of 30 layers",
            '4 topics of Python\'s help and "Summary:", 24 tokens',
        ),
    }
    rows = []
    for subject, (models, text) in described.items():
        own = cell(found, "laws", subject, "/top_k=0")
        rows.append([f"{subject}: {models}", text, NOT_RUN if own is None else f"{own['softmax']['accepted']:.2f}"])
    return markdown(("target, draft", "text", "alpha of the pair (T = 1)"), rows)


def memory(found: Found) -> str:
    rows = []
    for key, own in found["wagner_memory"].items():
        if key.startswith("figures 4, 5/"):
            for method in METHODS:
                rows.append(
                    [key.removeprefix("figures 4, 5/"), method, *(f"{peak / 1e6:.2f}" for peak in own[method].values())]
                )
    numbers = next((list(own[BASELINE]) for own in found["wagner_memory"].values()), [])
    return markdown(("", "MB at gamma =", *numbers), rows)


def table_3(found: Found) -> str:
    rows = []
    for key, own in found["wagner_memory"].items():
        if key.startswith("table 3/"):
            values = (
                f"{one['gb_per_s']:.2f} ({one['bytes'] / 1e6:.1f} MB, {one['ms']:.2f} ms)" for one in own.values()
            )
            rows.append([key.removeprefix("table 3/"), *values])
    return markdown(("GB/s", *METHODS, "`copy_`"), rows)


TABLES: dict[str, Callable[[Found], str]] = {
    "pairs": pairs,
    "table 1": table_1,
    "table 3": table_3,
    "table 5": table_5,
    "table 6": table_6,
    "calls": calls,
    "table 8": table_8,
    "tables 2 and 7": tables_2_7,
    "laws": laws,
    "figures 4 and 5": memory,
}
