"""How long the decoding loop takes to compile, by models, by K and by form: pieces (the default) or one graph.

    python benchmarks/bench_compile.py
    python benchmarks/bench_compile.py --num-draft-tokens 1 5 10 --form pieces --out out.json
    python benchmarks/bench_compile.py --models 8 32 --num-draft-tokens 1 --form pieces
    python benchmarks/bench_compile.py --models smollm2-135m-instruct --form pieces --once-from inf

Each measurement is a fresh process with an empty compile cache: models are loaded, a prompt is read, and the time to
compile everything that a step runs is taken (`stats.compile_seconds`), beside the processor time of the process and of
the compilers that it calls. The same process then decodes eagerly and compiled, so that the gain of compiling stands
beside its price. Models: the byte-level pair that comes with the package, SmolLM2 with prompt lookup, or a random Llama
of so many layers (3.4 million weights each) without a draft, whatever K is. `--once-from` says how many weights make
the layers of a model compile once for all of them: 0 = always, inf = never.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, options_of

import torch_specops
from torch_specops.drafts import PromptLookup
from torch_specops.hf import regions

PAIR = "austen-bytes"
GREEDY = torch_specops.SamplingParams(temperature=0.0)
FORMS = {"pieces": False, "one graph": True}


def load(models: str, device: str) -> tuple[Any, Any]:
    """Target and draft."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT, load_model

    if models == PAIR:
        return load_model(AUSTEN, device), load_model(AUSTEN_DRAFT, device)
    if not models.isdecimal():
        return load_model(models, device), PromptLookup()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=int(models), **sizes)).eval().to(device), None


def processor_seconds() -> float:
    """Of this process and of the compilers that it has called."""
    return sum(os.times()[:4])


def measure(
    models: str, num_draft_tokens: int, form: str, device: str, threads: int, once_from: float
) -> dict[str, Any]:
    """One cell; runs in a process of its own."""
    torch.set_num_threads(threads)
    regions.MIN_WEIGHTS = once_from
    target, draft = load(models, device)
    prompt = torch.tensor([list(b"It was not to be supposed that ")], device=device)
    record: dict[str, Any] = {"models": models, "num_draft_tokens": num_draft_tokens, "form": form}
    record["once_from"] = once_from
    for name, compile in (("eager", False), ("compiled", True)):
        decoder = torch_specops.SpeculativeDecoder(
            target, draft, num_draft_tokens=num_draft_tokens, compile=compile, one_graph=FORMS[form] and compile
        )
        started = processor_seconds()
        runs = [decoder.generate(prompt, max_new_tokens=96, sampling=GREEDY, seed=0)]
        first = processor_seconds() - started
        started = processor_seconds()
        runs += [decoder.generate(prompt, max_new_tokens=96, sampling=GREEDY, seed=0) for _ in range(3)]
        record[f"{name}_tokens_per_second"] = sorted(run.stats.tokens_per_second for run in runs[1:])[1]
        record[f"{name}_tokens"] = runs[0].new_tokens(0)
        if compile:
            record["compile_seconds"] = runs[0].stats.compile_seconds
            record["compile_processor_seconds"] = first - (processor_seconds() - started) / 3
            record["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    record["same_tokens"] = record.pop("eager_tokens") == record.pop("compiled_tokens")
    return record


def in_fresh_process(*arguments: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(measure, *arguments).result()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__)
    parser.add_argument("--models", nargs="+", default=[PAIR])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 5, 10])
    parser.add_argument("--form", choices=list(FORMS), nargs="+", default=list(FORMS))
    parser.add_argument("--once-from", type=float, default=regions.MIN_WEIGHTS)
    options = parser.parse_args(arguments)
    report = Report(options.out, environment(torch.device(options.device), threads=options.threads))
    cells = [(models, k, form) for models in options.models for form in options.form for k in options.num_draft_tokens]
    with Progress(transient=True) as progress:
        for cell in progress.track(cells, description="compiling"):
            report.add([in_fresh_process(*cell, options.device, options.threads, options.once_from)])
    line = "{models} | {form} | {num_draft_tokens} | {once_from:.0e} | {compile_seconds:.1f}"
    line += " | {compile_processor_seconds:.1f} | {graphs} | {eager_tokens_per_second:.0f}"
    line += " | {compiled_tokens_per_second:.0f} | {same_tokens}"
    header = "models | form | K | once from | compile s | processor s | graphs"
    header += " | eager tokens/s | compiled tokens/s | same tokens"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
