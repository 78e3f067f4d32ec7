"""How long the decoding loop takes to compile, by K and by form: pieces (the default) or one graph.

    python benchmarks/bench_compile.py
    python benchmarks/bench_compile.py --num-draft-tokens 1 5 10 --form pieces --out out.json

Each measurement is a fresh process with an empty compile cache: the byte-level pair that comes with the package is
loaded, a prompt is read, and the time to compile everything that a step runs is taken (`stats.compile_seconds`). The
same process then decodes eagerly and compiled, so that the gain of compiling stands beside its price.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, options_of

import torch_specops

FORMS = {"pieces": False, "one graph": True}


def measure(num_draft_tokens: int, form: str, device: str, threads: int) -> dict[str, Any]:
    """One cell; runs in a process of its own."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    folder = Path(torch_specops.__file__).parent / "data" / "austen_bytes"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / role).eval().to(device) for role in ("target", "draft")
    )
    prompt = torch.tensor([list(b"It was not to be supposed that ")], device=device)
    record: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "form": form}
    for name, compile in (("eager", False), ("compiled", True)):
        decoder = torch_specops.SpeculativeDecoder(
            target, draft, num_draft_tokens=num_draft_tokens, compile=compile, one_graph=FORMS[form] and compile
        )
        runs = [decoder.generate(prompt, max_new_tokens=96, seed=0) for _ in range(4)]
        record[f"{name}_tokens_per_second"] = sorted(run.stats.tokens_per_second for run in runs[1:])[1]
        record[f"{name}_tokens"] = runs[0].new_tokens(0)
        if compile:
            record["compile_seconds"] = runs[0].stats.compile_seconds
            record["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    record["same_tokens"] = record.pop("eager_tokens") == record.pop("compiled_tokens")
    return record


def in_fresh_process(num_draft_tokens: int, form: str, device: str, threads: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(measure, num_draft_tokens, form, device, threads).result()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__)
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--form", choices=list(FORMS), nargs="+", default=list(FORMS))
    options = parser.parse_args(arguments)
    report = Report(options.out, environment(torch.device(options.device), threads=options.threads))
    cells = [(k, form) for form in options.form for k in options.num_draft_tokens]
    with Progress(transient=True) as progress:
        for num_draft_tokens, form in progress.track(cells, description="compiling"):
            report.add([in_fresh_process(num_draft_tokens, form, options.device, options.threads)])
    line = "{form} | {num_draft_tokens} | {compile_seconds:.1f} | {graphs} | {eager_tokens_per_second:.0f}"
    line += " | {compiled_tokens_per_second:.0f} | {same_tokens}"
    header = "form | K | compile s | graphs | eager tokens/s | compiled tokens/s | same tokens"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
