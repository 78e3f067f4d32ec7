"""The tables of docs/evidence_leviathan.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from leviathan_measured import DRAFTS, LENIENCES, PROVIDERS, TEMPERATURES, predictions
from leviathan_oracle import TRACES
from tables_markdown import NOT_RUN, Found, markdown

__all__ = ["TABLES", "speeds"]


def table_1(found: Found) -> str:
    rows = [
        [
            str(row["alpha"]),
            str(row["gamma"]),
            f"{row['operations']:.3f}",
            f"{row['paper_operations']:.2f}",
            f"{row['speed']:.3f}",
            f"{row['paper_speed']:.2f}",
        ]
        for row in found["leviathan_theory"].get("table 1", [])
    ]
    return markdown(("alpha", "gamma", "operations", "paper", "speed", "paper"), rows)


def alphas(found: Found, subject: str, draft: str, temperature: float) -> Any:
    return found["leviathan_measured"].get(f"alpha/{subject}/{draft}/T={temperature}")


def table_3(found: Found) -> str:
    rows = []
    for subject, drafts in DRAFTS.items():
        for draft in drafts:
            cells = [alphas(found, subject, draft, temperature) for temperature in TEMPERATURES]
            values = [
                NOT_RUN if own is None else f"{own['1.0']['alpha']:.3f} ± {own['1.0']['standard_error']:.3f}"
                for own in cells
            ]
            last = cells[-1]
            drawn = NOT_RUN if last is None else f"{last['1.0']['drawn']:.3f} ± {last['1.0']['drawn_error']:.3f}"
            rows.append([subject, draft, *values, drawn])
    return markdown(("target, text", "draft", "T = 0", "T = 1", "T = 1, drawn"), rows)


def speeds(found: Found) -> Iterator[tuple[str, float, dict[str, Any], dict[str, float]]]:
    """Subject, temperature, what was measured and what was predicted, for every provider that was timed."""
    measured = found["leviathan_measured"]
    for subject in PROVIDERS:
        for temperature in TEMPERATURES:
            for provider in measured.get(f"speed/{subject}/T={temperature}", {"providers": []})["providers"]:
                if alphas(found, subject, provider["draft"], temperature) is not None:
                    yield subject, temperature, provider, predictions(measured, subject, temperature, provider)


def tables_2_4(found: Found) -> str:
    rows = []
    for subject, temperature, own, expected in speeds(found):
        low, high = own["speed_range"]
        rows.append(
            [
                *(subject, own["draft"], f"{temperature:.0f}", str(own["num_draft_tokens"])),
                f"{expected['alpha']:.2f}",
                f"{own['cost_ratio']:.3f}",
                f"{own['width_ratio']:.2f}",
                f"{own['mean_acceptance_length']:.2f} ({expected['expected_tokens']:.2f})",
                f"{expected['theorem']:.2f}",
                f"{expected['machine']:.2f}",
                f"**{own['speed']:.2f}** ({low:.2f} to {high:.2f})",
            ]
        )
    header = ("target, text", "draft", "T", "K", "alpha", "c", "width", "tokens per step (eq. 1)")
    return markdown((*header, "theorem 3.8", "with widths", "measured"), rows)


def lenient(found: Found, temperature: float) -> list[list[str]]:
    rows = []
    for subject, drafts in DRAFTS.items():
        for draft in drafts:
            own = alphas(found, subject, draft, temperature)
            if own is None:
                rows.append([subject, draft, *[NOT_RUN] * (len(LENIENCES) + (temperature > 0))])
                continue
            values = [f"{own[str(each)]['alpha']:.2f}" for each in LENIENCES]
            if temperature > 0:
                distances = [own[str(each)]["total_variation"] for each in LENIENCES[1:]]
                shown = (f"{each:.2f}" for each in distances)
                values.append("not computed" if distances[0] is None else ", ".join(shown))
            rows.append([subject, draft, *values])
    return rows


def table_5(found: Found) -> str:
    header = ("target, text", "draft", "l = 1", "0.5", "0.3", "0.1", "total variation from p at 0.5, 0.3, 0.1")
    return markdown(header, lenient(found, 1.0))


def table_5_greedy(found: Found) -> str:
    return markdown(("target, text", "draft", "l = 1", "0.5", "0.3", "0.1"), lenient(found, 0.0))


def oracle(found: Found) -> str:
    rows = []
    for subject, drafts in TRACES.items():
        for draft in drafts:
            for temperature in TEMPERATURES:
                own = found["leviathan_oracle"].get(f"policies/{subject}/{draft}/T={temperature}")
                if own is None:
                    rows.append([subject, draft, f"{temperature:.0f}", *[NOT_RUN] * 9])
                    continue
                for each in own["costs"]:
                    if each["cost_ratio"] not in (0.01, 0.05, 0.2):
                        continue
                    rows.append(
                        [
                            *(subject, draft, f"{temperature:.0f}"),
                            f"{own['alpha']:.2f}, {own['follows']:+.2f}",
                            str(each["cost_ratio"]),
                            f"{each['constant']:.2f} (K = {each['constant_k']})",
                            f"{each['formula_constant']:.2f} (K = {each['formula_k']})",
                            f"{each['heuristic']:.2f}",
                            f"{each['optimal']:.2f}",
                            f"{each['oracle']:.2f}",
                            f"{each['formula_oracle']:.2f}",
                            f"{100 * (each['oracle'] / each['constant'] - 1):.0f}%",
                        ]
                    )
    header = ("target, text", "draft", "T", "alpha, follows", "c", "best constant", "formula", "heuristic", "optimal")
    return markdown((*header, "oracle", "formula", "gain of the oracle"), rows)


def trace_check(found: Found) -> str:
    rows = []
    for temperature in TEMPERATURES:
        own = found["leviathan_oracle"].get(f"check/T={temperature}")
        values = [NOT_RUN] * 2 if own is None else [f"{own['trace']:.3f}", f"{own['loop']:.3f}"]
        rows.append([f"{temperature:.0f}", *values])
    return markdown(("T", "on the trace", "in the loop"), rows)


def hierarchical(found: Found) -> str:
    rows = []
    for temperature in TEMPERATURES:
        own = found["leviathan_oracle"].get(f"hierarchical/T={temperature}", [])
        for each in own:
            ratios = sorted(a / b for a, b in zip(own[0]["seconds"], each["seconds"], strict=True))
            middle = sum(ratios[len(ratios) // 2 - 1 : len(ratios) // 2 + 1]) / 2
            rows.append(
                [
                    *(f"{temperature:.0f}", each["draft"]),
                    f"{each['mean_acceptance_length']:.2f}",
                    f"{each['drafts_per_step']:.2f}",
                    f"{each['draft_forwards_per_step']:.2f}",
                    f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
                ]
            )
    header = ("T", "small model", "tokens per step", "drafts per step", "its forwards per step")
    return markdown((*header, "speed of the loop over the small model alone"), rows)


TABLES: dict[str, Callable[[Found], str]] = {
    "table 1": table_1,
    "table 3": table_3,
    "tables 2 and 4": tables_2_4,
    "table 5": table_5,
    "table 5, greedy": table_5_greedy,
    "section 3.5": oracle,
    "section 3.5, check": trace_check,
    "section 6": hierarchical,
}
