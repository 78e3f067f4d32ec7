"""Who is lossless: `check_engine` on what pip installs, and the table of docs/lossless.md.

    python benchmarks/lossless/run.py --out benchmarks/results/2026-11-27-cpu-lossless.json --page
    python benchmarks/lossless/run.py --row transformers-mtp [--trials 20000] [--seed 1]
    python benchmarks/lossless/run.py --list

Each row decodes texts with tiny random models, whose law is known by enumeration. A row whose package is missing is left
out, with its name; benchmarks/lossless/requirements.txt has the packages. Rows that the file of --out has already are
replaced if they are run, and kept if not, so one file can hold rows of several environments. --page writes its table to
docs/lossless.md.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import controls
import peer_economize
import peer_openvino
import peer_transformers
import this_package
import torch
from engines import PROMPTS, VOCAB, Engine, Row, greedy_text
from rich.console import Console
from rich.progress import Progress

from torch_specops import SamplingParams
from torch_specops.testing import LosslessReport, check_engine

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from markdown_table import table  # noqa: E402
from timing import environment, options_of, write_json  # noqa: E402

PAGE = ROOT / "docs" / "lossless.md"
RESULT = ROOT / "benchmarks" / "results" / "2026-11-27-cpu-lossless.json"
ROWS: dict[str, Row] = {
    name: row
    for module in (controls, this_package, peer_transformers, peer_economize, peer_openvino)
    for name, row in module.ROWS.items()
}
# Tokens that are tested, and tokens that an engine makes, so that the end of a text cuts no drafts of those tested.
NUM_TOKENS, NUM_NEW = 4, 6
GREEDY_TEXTS, GREEDY_TOKENS = 32, 32
HEADER = "row | what | setting | texts | tokens per pass | test | TV | by chance | p-value | visible | law | greedy texts"
LINE = "`{row}` | {what} | {setting} | {trials:,} | {per_pass:.2f} | {test} | {tv:.4f} | {by_chance:.4f} | "
LINE += "{p_value:.2g} | {visible:.3f} | {law} | {greedy}"


def measure(name: str, row: Row, trials: int, seed: int, progress: Progress) -> dict[str, Any]:
    """The record of a row.

    Raises:
        ImportError: its package is missing.
    """
    engine, start = row.make(), time.perf_counter()
    task = progress.add_task(name, total=trials)
    report = check_engine(
        partial(new_tokens, engine),
        target=lambda text: engine.target(text, use_cache=False).logits,
        settings=row.settings,
        prompts=PROMPTS,
        vocab_size=VOCAB,
        num_tokens=NUM_TOKENS,
        trials=trials,
        batch_size=min(500, trials),
        seed=seed,
        progress=lambda done, requests: progress.update(task, completed=trials * done // requests),
    )
    record = {
        "row": name,
        "package": row.package,
        "versions": {each: version(each) for each in dict.fromkeys((row.package, "torch", "transformers")) if each},
        "way": row.way,
        "trials": trials,
        "seed": seed,
        "tokens_per_pass": engine.tokens / engine.steps if engine.steps else None,
        "significance": report.significance,
        "settings": {name: as_record(each) for name, each in report.reports.items()},
        "greedy": greedy_of(engine) if row.greedy else None,
    }
    progress.remove_task(task)
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def new_tokens(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[list[int]]:
    return [text[:NUM_TOKENS] for text in engine(prompts, params, seeds, NUM_NEW)]


def as_record(report: LosslessReport) -> dict[str, Any]:
    names = ("name", "total_variation", "expected_total_variation", "p_value", "detectable_total_variation")
    names = (*names, "emitted", "impossible")
    tests = [{name: getattr(test, name) for name in names} for test in report.tests]
    return {"threshold": report.threshold, "rejected": not report.lossless, "tests": tests}


def greedy_of(engine: Engine) -> dict[str, int]:
    """How many greedy texts equal the target's own."""
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randrange(3, 12))] for _ in range(GREEDY_TEXTS)]
    texts = engine(prompts, [SamplingParams(temperature=0.0)] * len(prompts), range(len(prompts)), GREEDY_TOKENS)
    own = (greedy_text(engine.target, prompt, GREEDY_TOKENS) for prompt in prompts)
    return {"equal": sum(text == each for text, each in zip(texts, own, strict=True)), "texts": len(prompts)}


def lines_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of a record's lines: for each setting the test with the smallest p-value."""
    package, greedy = record["package"], record["greedy"]
    named = f"{package} {record['versions'][package]}: " if package else ""
    lines = []
    for setting, each in record["settings"].items():
        worst = min(each["tests"], key=lambda test: test["p_value"])
        cells = {
            "row": record["row"],
            "what": named + record["way"],
            "setting": setting,
            "trials": record["trials"],
            "per_pass": record["tokens_per_pass"],
            "test": worst["name"],
            "tv": worst["total_variation"],
            "by_chance": worst["expected_total_variation"],
            "p_value": worst["p_value"],
            "visible": max(test["detectable_total_variation"] for test in each["tests"]),
            "law": "rejected" if each["rejected"] else "no bias seen",
            "greedy": "" if greedy is None else f"{greedy['equal']} of {greedy['texts']}",
        }
        lines.append(cells)
    return lines


def page_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/lossless.md, in the order of `ROWS`."""
    order = list(ROWS)
    known = sorted((record for record in records), key=lambda record: order.index(record["row"]))
    return table(HEADER, LINE, [line for record in known for line in lines_of(record)])


def rewritten(page: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these records."""
    mark = "<!-- table: lossless -->\n{}\n<!-- end -->"
    pattern = mark.format("(?:.*)").replace("(?:.*)", ".*?")
    return re.sub(pattern, lambda _: mark.format(page_table(records)), page, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of the file, or of the rows that were run."""
    parser = options_of(__doc__)
    parser.add_argument("--row", nargs="+", choices=list(ROWS), metavar="NAME", default=list(ROWS))
    parser.add_argument("--trials", type=int, help="texts for each setting; default: the row's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="the rows' names")
    parser.add_argument("--page", action="store_true", help="write the table of the file to docs/lossless.md")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    if options.list:
        print("\n".join(f"{name:26}{row.package:18}{row.way}" for name, row in ROWS.items()))
        return []
    torch.set_num_threads(options.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    written: dict[str, Any] = {"environment": environment(torch.device("cpu")), "records": []}
    if options.out is not None and options.out.exists():
        written["records"] = json.loads(options.out.read_text())["records"]
    with Progress(console=console) as progress:
        for name in progress.track(options.row, description="rows"):
            try:
                record = measure(name, ROWS[name], options.trials or ROWS[name].trials, options.seed, progress)
            except ImportError as error:
                console.print(f"{name}: left out, {error}")
                continue
            written["records"] = [each for each in written["records"] if each["row"] != name] + [record]
            for line in lines_of(record):
                console.print(" | ".join(part.format_map(line) for part in LINE.split(" | ")), highlight=False)
            if options.out is not None:
                write_json(options.out, written)
    if options.page:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), written["records"]), encoding="utf-8")
    return written["records"]


if __name__ == "__main__":
    main()
