"""What the tables of docs/evidence*.md show: for each, its header, a format string for each cell, and its records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from evidence import RESULTS
from leviathan_measured import DRAFTS, TEMPERATURES, predictions
from markdown_table import table
from wagner_methods import BASELINE, GAMMAS, METHODS

# benchmarks/README.md says which of them are at an earlier commit.
SCRIPTS = ("leviathan_theory", "leviathan_measured", "leviathan_oracle")
SCRIPTS += ("wagner_text", "wagner_asr", "wagner_memory", "chen")
NOT_RUN = "not run"
# By script, then by key: what a cell returned. "seconds" has, by script, what each of its cells took.
Found: TypeAlias = "dict[str, dict[str, Any]]"
Rows: TypeAlias = "Iterator[Mapping[str, Any]]"


def load() -> Found:
    """The results of every script; none of a script that was not run."""
    found: Found = {"seconds": {}}
    for script in SCRIPTS:
        path = RESULTS / f"{script}.json"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.exists() else {}
        found[script] = {key: cell["result"] for key, cell in cells.items()}
        found["seconds"][script] = [cell["seconds"] for cell in cells.values()]
    return found


@dataclass(frozen=True)
class Table:
    """A table: its header, a format string for each cell of a line, and the records of the lines."""

    header: str
    line: str
    rows: Callable[[Found], Iterable[Mapping[str, Any]]]

    def __call__(self, found: Found) -> str:
        return table(self.header, self.line, self.rows(found), NOT_RUN)


def starting(found: Found, script: str, prefix: str) -> Iterator[tuple[list[str], Any]]:
    """Every cell of a script whose key begins so: the parts of the rest of the key, and the result."""
    for key, own in found[script].items():
        if key.startswith(prefix):
            yield key.removeprefix(prefix).split("/"), own


def each(form: str, names: Iterable[str], between: str = " | ") -> str:
    """The same cell for every name, which stands for "@"."""
    return between.join(form.replace("@", name) for name in names)


# Chen et al.

MEASURES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "nats": "nats per byte", "passes": "passes", "parses": "parses"}


def chen_quality(found: Found) -> Rows:
    for (subject, law), own in starting(found, "chen", "quality/"):
        plain, timed = found["chen"].get(f"speed/{subject}/{law}", {"": None, "K": None}).values()
        one = {"subject": subject, "law": law, "own": own, "plain": plain, "timed": timed}
        yield from (one | {"measure": MEASURES[name], "value": own[name]} for name in MEASURES if name in own)


def chen_speed(found: Found) -> Rows:
    for (subject, law), own in starting(found, "chen", "figure 1/"):
        yield from (one | {"subject": subject, "law": law, "K": number} for number, one in own.items())


CHEN = {
    "table 1": Table(
        "task | law | measure | plain | speculative | difference (95 %) | equal texts | ms per token"
        " | speed-up: median and quartiles over texts",
        "{subject} | {law} | {measure} | {value[plain]:.3f} | {value[speculative]:.3f}"
        " | {value[difference]:+.3f} ({value[interval][0]:+.3f} to {value[interval][1]:+.3f})"
        " | {own[equal]} of {own[texts]} | {plain[token_ms]:.1f}, {timed[token_ms]:.1f}"
        " | {timed[speed]:.2f} ({timed[speed_low]:.2f} to {timed[speed_high]:.2f})",
        chen_quality,
    ),
    "figure 1": Table(
        "task | law | K | s for 128 tokens | speed-up | (accepted + 1) / (K + 1) | ms per loop",
        "{subject} | {law} | {K} | {seconds_of_128:.2f} ± {seconds_of_128_deviation:.2f}"
        " | {speed:.2f} ({speed_low:.2f} to {speed_high:.2f}) | {efficiency:.2f} | {loop_ms:.1f}",
        chen_speed,
    ),
}

# Leviathan et al.


def by_draft(found: Found) -> Rows:
    """alpha of each draft of each text at temperatures 0 ("cold") and 1 ("warm")."""
    for subject, draft in ((subject, draft) for subject, drafts in DRAFTS.items() for draft in drafts):
        cold, warm = (found["leviathan_measured"].get(f"alpha/{subject}/{draft}/T={t}") for t in TEMPERATURES)
        one = {"subject": subject, "draft": draft, "cold": cold, "warm": warm}
        if warm is not None:
            apart = [warm[lenience]["total_variation"] for lenience in ("0.5", "0.3", "0.1")]
            one["apart"] = "not computed" if apart[0] is None else ", ".join(f"{each:.2f}" for each in apart)
        yield one


def speeds(found: Found) -> Rows:
    """Every provider that was timed: what was measured, and what theorem 3.8 predicts."""
    measured = found["leviathan_measured"]
    for (subject, temperature), own in starting(found, "leviathan_measured", "speed/"):
        for provider in own["providers"]:
            if f"alpha/{subject}/{provider['draft']}/{temperature}" in measured:
                t = float(temperature.removeprefix("T="))
                expected = predictions(measured, subject, t, provider)
                shares = {f"of_{name}": provider["speed"] / expected[name] for name in ("theorem", "machine")}
                yield provider | shares | {"subject": subject, "T": t, "expected": expected}


def rejections(found: Found) -> Rows:
    for (draft,), own in starting(found, "leviathan_measured", "rejection/austen/"):
        yield own | {"draft": draft}


LENIENT = each("{@:.2f}", (f"which[{lenience}][alpha]" for lenience in ("1.0", "0.5", "0.3", "0.1")))
LEVIATHAN_TABLES = {
    "table 1": Table(
        "alpha | gamma | operations | paper | speed | paper",
        "{alpha} | {gamma} | {operations:.3f} | {paper_operations:.2f} | {speed:.3f} | {paper_speed:.2f}",
        lambda found: found["leviathan_theory"].get("table 1", []),
    ),
    "table 3": Table(
        "target, text | draft | T = 0 | T = 1 | T = 1, drawn",
        "{subject} | {draft} | {cold[1.0][alpha]:.3f} ± {cold[1.0][standard_error]:.3f}"
        " | {warm[1.0][alpha]:.3f} ± {warm[1.0][standard_error]:.3f}"
        " | {warm[1.0][drawn]:.3f} ± {warm[1.0][drawn_error]:.3f}",
        by_draft,
    ),
    "tables 2 and 4": Table(
        "target, text | draft | T | K | alpha | c | width | tokens per step (eq. 1) | theorem 3.8 | with widths"
        " | measured",
        "{subject} | {draft} | {T:.0f} | {num_draft_tokens} | {expected[alpha]:.2f} | {cost_ratio:.3f}"
        " | {width_ratio:.2f} | {mean_acceptance_length:.2f} ({expected[expected_tokens]:.2f})"
        " | {expected[theorem]:.2f} | {expected[machine]:.2f}"
        " | **{speed:.2f}** ({speed_range[0]:.2f} to {speed_range[1]:.2f})",
        speeds,
    ),
    "table 5": Table(
        "target, text | draft | l = 1 | 0.5 | 0.3 | 0.1 | total variation from p at 0.5, 0.3, 0.1",
        "{subject} | {draft} | " + LENIENT.replace("which", "warm") + " | {apart}",
        by_draft,
    ),
    "table 5, greedy": Table(
        "target, text | draft | l = 1 | 0.5 | 0.3 | 0.1",
        "{subject} | {draft} | " + LENIENT.replace("which", "cold"),
        by_draft,
    ),
    "appendix A.2": Table(
        "draft | min(1, p / q) | one round of rejection sampling", "{draft} | {alpha:.3f} | {rejection:.4f}", rejections
    ),
}

# Wagner et al.

SPEECH = ("librivox", "espeak")
SUBJECTS = (*SPEECH, "austen", "topics")
OTHERS = tuple(METHODS)[1:]
SCALES = ("sigmoid 10", "sigmoid 1000", "sigmoid 10000", "sigmoid 100000")


def of(found: Found, kind: str, subject: str, more: str = "") -> Any:
    """A cell of one of the two scripts; an empty one if it was not run."""
    return found["wagner_asr" if subject in SPEECH else "wagner_text"].get(f"{kind}/{subject}{more}", {})


def less(own: Mapping[str, Any], baseline: Mapping[str, Any], field: str) -> float:
    """By how many percent less than the baseline."""
    return 100 * (1 - own[field] / baseline[field])


def wagner_quality(found: Found) -> Rows:
    for subject in SUBJECTS:
        own = of(found, "main", subject)
        for method in METHODS:
            one = {"subject": subject, "method": method, "own": own.get(method), "base": own.get(BASELINE)}
            if own:
                form = "ROUGE-1 {quality:.3f} +- {quality_error:.3f}, {nats:.2f} nats"
                one["quality"] = ("WER {quality:.3f}" if subject in SPEECH else form).format_map(own[method])
                one["step_less"] = less(own[method], own[BASELINE], "step_ms_median")
                one["seconds"] = f"{less(own[method], own[BASELINE], 'seconds'):.1f}" * (method != BASELINE)
                one["step"] = f"{one['step_less']:.1f}" * (method != BASELINE)
            yield one


def wagner_wall(found: Found) -> Rows:
    for subject in SUBJECTS:
        own = of(found, "main", subject)
        one = {"subject": subject} | own
        if own:
            one |= {f"{method}, less": less(own[method], own[BASELINE], "wall_seconds") for method in METHODS}
            one["share"] = 100 * own[BASELINE]["seconds"] / own[BASELINE]["wall_seconds"]
        yield one


def wagner_gammas(found: Found) -> Rows:
    for subject, gamma in ((subject, gamma) for subject in ("librivox", "austen", "topics") for gamma in GAMMAS):
        cells = of(found, "gamma", subject, f"/{gamma}").items()
        rates = {method: own | {"rate": own["accepted"] / own["drafted"]} for method, own in cells}
        yield {"subject": subject, "gamma": gamma} | rates


def wagner_scales(found: Found) -> Rows:
    """Quality, nats, time and acceptance of a subject, a line each; a column per scale."""
    names = (BASELINE, *SCALES)
    for subject in SUBJECTS:
        own = of(found, "scales", subject)
        kind, more = ("alone", "/draft") if subject in SPEECH else ("draft alone", "")
        alone = of(found, kind, subject, more)

        measure = "WER" if subject in SPEECH else "ROUGE-1"
        if not own:
            yield {"subject": subject, "what": measure}
            continue
        cells = {}
        for name in names:
            times = {field: less(own[name], own[BASELINE], field) for field in ("seconds", "step_ms_median")}
            cells[name] = own[name] | times | {"rate": own[name]["accepted"] / own[name]["drafted"]}

        def line(what: str, form: str, alone: Mapping[str, Any], subject: str = "", cells: Any = cells) -> Any:
            values = {name: form.format_map(cells[name]) for name in names}
            return {"subject": subject, "what": what, **values, "alone": form.format_map(alone) if alone else ""}

        yield line(measure, "{quality:.3f}", alone, subject)
        if subject not in SPEECH:
            yield line("nats per token under the target", "{nats:.2f}", alone)
        yield line("time, % less (median step)", "{seconds:.1f} ({step_ms_median:.1f})", {}) | {BASELINE: ""}
        yield line("accepted", "{rate:.3f}", {})


def wagner_laws(found: Found) -> Rows:
    by_subject = {subject: of(found, "laws", subject, "/top_k=0") for subject in SUBJECTS}
    for name in dict.fromkeys(name for own in by_subject.values() for name in own):
        yield {"name": name} | {subject: own.get(name) for subject, own in by_subject.items()}


def wagner_pairs(found: Found) -> Rows:
    early = "SmolLM2-135M-Instruct, its first 28 of 30 layers"
    described = {
        "librivox": ("Whisper base, tiny.en in the target's vocabulary", "5 clips that people read, 3 seeds"),
        "espeak": ("the same", "6 sentences that espeak-ng speaks"),
        "austen": ("the byte-level pair of the package", "16 continuations of 100 bytes"),
        "topics": (early, '4 topics of Python\'s help and "Summary:", 24 tokens'),
    }
    for subject, (models, text) in described.items():
        yield {"subject": subject, "models": models, "text": text} | of(found, "laws", subject, "/top_k=0")


def wagner_calls(found: Found) -> Rows:
    for (name,), own in starting(found, "wagner_text", "calls/"):
        for number in own[BASELINE]:
            yield {"name": name, "number": number} | {method: own[method][number] for method in METHODS}


WAGNER = {
    "pairs": Table(
        "target, draft | text | alpha of the pair (T = 1)",
        "{subject}: {models} | {text} | {softmax[accepted]:.2f}",
        wagner_pairs,
    ),
    "table 1": Table(
        " | method | quality | time in the sampling function, % less | median step, % less"
        " | texts equal to transformers'",
        "{subject} | {method} | {quality} | {seconds} | {step} | {own[identical]} of {base[identical]}",
        wagner_quality,
    ),
    "table 5": Table(
        f" | {each('@', OTHERS)} | steps: transformers, sigmoid | share of sampling in the baseline",
        "{subject}, % less | "
        + each("{@, less:.1f}", OTHERS)
        + " | {transformers[steps]}, {sigmoid[steps]} | {share:.1f}%",
        wagner_wall,
    ),
    "table 6": Table(
        f"ms | {each('@', METHODS)}",
        "{subject}: mean +- deviation; median | "
        + each("{@[step_ms]:.2f} +- {@[step_ms_deviation]:.2f}; {@[step_ms_median]:.2f}", METHODS),
        wagner_wall,
    ),
    "calls": Table(
        f" | number of drafts | {each('@', METHODS)}",
        "{name} | {number} | " + each("{@:.2f} ms", METHODS),
        wagner_calls,
    ),
    "table 8": Table(
        f" | gamma | {each('@', METHODS)}",
        "{subject} | {gamma} | " + each("{@[rate]:.2f}, {@[step_ms_median]:.2f} ms", METHODS),
        wagner_gammas,
    ),
    "tables 2 and 7": Table(
        " |  | transformers | +-10 | +-1e3 | +-1e4 | +-1e5 | the draft alone",
        "{subject} | {what} | " + each("{@}", (BASELINE, *SCALES)) + " | {alone}",
        wagner_scales,
    ),
    "laws": Table(
        f"distance from the target's law; accepted; rare | {each('@', SUBJECTS)}",
        "{name} | " + each("{@[distance]:.4f}; {@[accepted]:.3f}; {@[tail]:.4f}", SUBJECTS),
        wagner_laws,
    ),
}


def times(found: Found) -> Rows:
    for script, seconds in found["seconds"].items():
        yield {"script": f"`{script}`", "cells": len(seconds), "minutes": sum(seconds) / 60}
    yield {"script": "all", "cells": "", "minutes": sum(map(sum, found["seconds"].values())) / 60}


TIMES = Table("script | cells | minutes", "{script} | {cells} | {minutes:.0f}", times)
