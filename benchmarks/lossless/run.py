"""Who is lossless: `check_engine` on what pip installs, and the table of docs/lossless.md.

    python benchmarks/lossless/run.py --out benchmarks/results/2026-11-27-cpu-lossless.json --page
    python benchmarks/lossless/run.py --row transformers-mtp [--trials 20000] [--seed 1]
    python benchmarks/lossless/run.py --row --out FILE.json --page      # runs nothing
    python benchmarks/lossless/run.py --list

Each row decodes texts with tiny random models, whose law is known by enumeration. A row whose package is missing is
left out, by name; benchmarks/lossless/requirements.txt has the packages. If the file of --out exists, its other rows
are kept. --page writes the table of the rows to docs/lossless.md.
"""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import controls
import peer_economize
import peer_openvino
import peer_transformers
import this_package
import torch
import transformers
from engines import PROMPTS, VOCAB, Engine, Law, Row
from page import PAGE, rewritten, table_of
from rich.console import Console
from rich.progress import Progress
from timing import commit, environment, options_of, write_json

import torch_specops
from torch_specops import SamplingParams
from torch_specops.testing import LosslessReport, check_engine

ROWS: dict[str, Row] = {
    name: row
    for module in (controls, this_package, peer_transformers, peer_economize, peer_openvino)
    for name, row in module.ROWS.items()
}
# Tokens that are tested, and that an engine makes: the end of a text cuts no drafts of those that are tested.
NUM_TOKENS, NUM_NEW = 4, 6
GREEDY_TEXTS, GREEDY_TOKENS = 20, 24
FIELDS = "name", "total_variation", "expected_total_variation", "p_value", "detectable_total_variation", "impossible"


def measure(name: str, trials: int | None, seed: int, progress: Progress) -> dict[str, Any]:
    """The record of a row.

    Raises:
        ImportError: its package is missing.
    """
    row, start = ROWS[name], time.process_time()
    engine, trials = row.make(), trials or row.trials
    task = progress.add_task(name, total=trials * len(row.settings))
    report = check_engine(
        partial(new_tokens, engine),
        target=engine.law,
        settings=row.settings,
        prompts=PROMPTS,
        vocab_size=VOCAB,
        num_tokens=NUM_TOKENS,
        trials=trials,
        batch_size=500,
        seed=seed,
        progress=lambda done, _: progress.update(task, completed=done),
    )
    record = {
        "row": name,
        "way": row.way,
        "package": row.package,
        "version": installed(row.package),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "commit": commit(),
        "trials": trials,
        "seed": seed,
        "tokens_per_pass": engine.tokens / engine.steps if engine.steps else None,
        "settings": {setting: tests_of(each) for setting, each in report.reports.items()},
        "greedy": greedy_of(engine) if row.greedy else None,
        "seconds": round(time.process_time() - start, 1),
    }
    progress.remove_task(task)
    return record


def installed(package: str) -> str:
    """A package's version; this package need not be installed."""
    return torch_specops.__version__ if package == "torch-specops" else version(package) if package else ""


def new_tokens(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int]
) -> list[list[int]]:
    return [text[:NUM_TOKENS] for text in engine(prompts, params, seeds, NUM_NEW)]


def tests_of(report: LosslessReport) -> dict[str, Any]:
    tests = [{field: getattr(test, field) for field in FIELDS} for test in report.tests]
    return {"rejected": not report.lossless, "threshold": report.threshold, "tests": tests}


def greedy_of(engine: Engine) -> dict[str, int]:
    """How many greedy texts equal the target's own."""
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randrange(3, 12))] for _ in range(GREEDY_TEXTS)]
    texts = engine(prompts, [SamplingParams(temperature=0.0)] * len(prompts), range(len(prompts)), GREEDY_TOKENS)
    equal = sum(text == own_text(engine.law, prompt) for text, prompt in zip(texts, prompts, strict=True))
    return {"equal": equal, "texts": len(prompts)}


@torch.no_grad()
def own_text(law: Law, prompt: Sequence[int]) -> list[int]:
    """The target's own greedy text, from forwards of the whole text."""
    text = torch.tensor([list(prompt)])
    for _ in range(GREEDY_TOKENS):
        text = torch.cat([text, law(text).argmax(-1, keepdim=True)], 1)
    return text[0, len(prompt) :].tolist()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of the file of --out, or of the rows that were run."""
    parser = options_of(__doc__)
    parser.add_argument("--row", nargs="*", choices=list(ROWS), metavar="NAME", default=list(ROWS))
    parser.add_argument("--trials", type=int, help="texts for each setting; default: the row's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    parser.add_argument("--page", action="store_true", help="write the table to docs/lossless.md")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:28}{row.package:16}{row.way}" for name, row in ROWS.items()))
        return []
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    console, records = Console(stderr=True), {}
    if options.out is not None and options.out.exists():
        records = {record["row"]: record for record in json.loads(options.out.read_text())["records"]}
    with Progress(console=console) as progress:
        for name in progress.track(options.row, description="rows"):
            try:
                records[name] = measure(name, options.trials, options.seed, progress)
            except ImportError as error:
                console.print(f"{name} is left out: {error}", style="yellow")
                continue
            verdicts = (each["rejected"] for each in records[name]["settings"].values())
            console.print(name, *("rejected" if rejected else "no bias seen" for rejected in verdicts))
            if options.out is not None:
                ordered = [records[each] for each in ROWS if each in records]
                write_json(options.out, {"environment": environment(torch.device("cpu")), "records": ordered})
    found = [records[each] for each in ROWS if each in records]
    print(table_of(found, padded=True))
    if options.page:
        PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
