"""The tables of docs/evidence_chen.md."""

from __future__ import annotations

from collections.abc import Callable

from tables_markdown import NOT_RUN, Found, markdown

__all__ = ["TABLES"]

MEASURES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "nats": "nats per byte", "passes": "passes", "parses": "parses"}


def table_1(found: Found) -> str:
    rows = []
    for key, own in found["chen"].items():
        if not key.startswith("quality/"):
            continue
        _, subject, law = key.split("/")
        timed = found["chen"].get(f"speed/{subject}/{law}")
        time, speed = NOT_RUN, NOT_RUN
        if timed is not None:
            plain, speculative = timed.values()
            time = f"{plain['token_ms']:.1f}, {speculative['token_ms']:.1f}"
            speed = f"{speculative['speed']:.2f} ({speculative['speed_low']:.2f} to {speculative['speed_high']:.2f})"
        for name in (name for name in MEASURES if name in own):
            one = own[name]
            low, high = one["interval"]
            rows.append(
                [
                    *(subject, law, MEASURES[name], f"{one['plain']:.3f}", f"{one['speculative']:.3f}"),
                    f"{one['difference']:+.3f} ({low:+.3f} to {high:+.3f})",
                    f"{own['equal']} of {own['texts']}",
                    *(time, speed),
                ]
            )
    header = ("task", "law", "measure", "plain", "speculative", "difference (95 %)", "equal texts")
    return markdown((*header, "ms per token", "speed-up: median and quartiles over texts"), rows)


def figure_1(found: Found) -> str:
    rows = []
    for key, own in found["chen"].items():
        if key.startswith("figure 1/"):
            _, subject, law = key.split("/")
            for number, one in own.items():
                rows.append(
                    [
                        *(subject, law, number),
                        f"{one['seconds_of_128']:.2f} ± {one['seconds_of_128_deviation']:.2f}",
                        f"{one['speed']:.2f} ({one['speed_low']:.2f} to {one['speed_high']:.2f})",
                        f"{one['efficiency']:.2f}",
                        f"{one['loop_ms']:.1f}",
                    ]
                )
    header = ("task", "law", "K", "s for 128 tokens", "speed-up", "(accepted + 1) / (K + 1)", "ms per loop")
    return markdown(header, rows)


TABLES: dict[str, Callable[[Found], str]] = {"table 1": table_1, "figure 1": figure_1}
