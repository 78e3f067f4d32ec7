"""How long the first step takes in a process that compiles everything, and in one that loads what another compiled.

    python benchmarks/bench_start.py
    python benchmarks/bench_start.py --num-draft-tokens 4 --temperature 0 --rounds 3 --out out.json

Three fresh processes decode with the byte-level pair:

    cold         an empty compile cache; compiles everything and saves it (`torch.compiler.save_cache_artifacts`)
    artifacts    an empty compile cache, and that file loaded before the first step, as on another machine
    directory    the cache directory that the first process left, as on the same machine

`compile_seconds` is `stats.compile_seconds`: tracing, guards, and what is left of code generation and the C++ compiler.
On a CPU the file holds the generated code and not the compiled one, so the C++ compiler runs again. `load_seconds` is
the reading of the file. `cpu_seconds` is the processor time of the whole process and of the compilers that it started,
imports and models included; it depends less on the machine's load than the other times do.

The cache key includes the package's sources: measure in a clone that nobody edits.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, in_process_of_its_own, options_of

import torch_specops

STARTS = ("cold", "artifacts", "directory")


def first_step(artifacts: str, start: str, num_draft_tokens: int, temperature: float, device: str) -> dict[str, Any]:
    """One process: load what was compiled, or save it, or neither; and decode."""
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM

    started = time.perf_counter()
    if start == "artifacts":
        torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
    load_seconds = time.perf_counter() - started
    folder = Path(torch_specops.__file__).parent / "data" / "austen_bytes"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / role).eval().to(device) for role in ("target", "draft")
    )
    sampling = torch_specops.SamplingParams(temperature=temperature)
    decoder = torch_specops.SpeculativeDecoder(
        target, draft, num_draft_tokens=num_draft_tokens, sampling=sampling, compile=True
    )
    prompt = torch.tensor([list(b"It was not to be supposed that ")], device=device)
    output = decoder.generate(prompt, max_new_tokens=32, seed=0)
    if start == "cold":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(artifacts).write_bytes(saved[0])
    return {
        "start": start,
        "compile_seconds": output.stats.compile_seconds,
        "load_seconds": load_seconds,
        "graphs": counters["stats"]["unique_graphs"],
        "cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "cache_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "artifact_bytes": Path(artifacts).stat().st_size,
        "tokens": output.new_tokens(0),
    }


def in_fresh_process(cache: str, *arguments: Any) -> dict[str, Any]:
    before = os.times()
    result = in_process_of_its_own(cache, "bench_start.first_step", *arguments)
    after = os.times()
    children = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return result | {"cpu_seconds": children}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=1)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(arguments)
    records = []
    with Progress(transient=True) as progress:
        for _ in progress.track(range(options.rounds), description="starting"):
            with tempfile.TemporaryDirectory() as folder:
                for start in STARTS:
                    cache = f"{folder}/{'other' if start == 'artifacts' else 'cache'}"
                    cell = (f"{folder}/saved", start, options.num_draft_tokens, options.temperature, options.device)
                    records.append(in_fresh_process(cache, *cell))
    tokens = [record.pop("tokens") for record in records]
    described = environment(
        torch.device(options.device),
        # Of all processes, this one among them.
        load_average=os.getloadavg()[0],
        num_draft_tokens=options.num_draft_tokens,
        temperature=options.temperature,
        same_tokens=all(each == tokens[0] for each in tokens),
    )
    Report(options.out, described).add(records)
    columns = ("start", "compile_seconds", "load_seconds", "cpu_seconds", "graphs", "cache_hits", "artifact_bytes")
    line = "{start} | {compile_seconds:.1f} | {load_seconds:.2f} | {cpu_seconds:.1f} | {graphs} | {cache_hits} | "
    print(table(" | ".join(columns), line + "{artifact_bytes}", records, padded=True))
    print(f"same tokens: {described['same_tokens']}")
    return records


if __name__ == "__main__":
    main()
