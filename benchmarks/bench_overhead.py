"""What a call costs beside its work: an op on so small a vocabulary that little else is left.

    python benchmarks/bench_overhead.py
    python benchmarks/bench_overhead.py --rounds 400 --no-compiled --out out.json

B = 1, K = 4 and V = 16 by default. Microseconds, medians of rounds in which all calls took turns:

    function       torch_specops.verify_exact and the like: their check of arguments, and the op
    op             torch.ops.specops.verify_exact and the like
    compiled       torch.compile(fullgraph=True) of the function: guards, the graph's call, the generated code

Two floors stand below: a `triton_op` with an empty body is the way through the dispatcher, and `torch.add` of one entry
is any aten call. What an op costs above the first is its body: checks of metadata and tens of aten calls. In a
compiled step none of them is left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import environment
from torch import Tensor

import torch_specops

Call = Callable[[], Any]


def arguments_of(batch: int, num_drafts: int, vocab_size: int, device: str) -> dict[str, tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(0)
    target_logits = 3 * torch.randn(batch, num_drafts + 1, vocab_size, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=g)
    verification = (
        target_logits,
        draft_logits.argmax(-1),
        draft_logits,
        torch.rand(batch, num_drafts, generator=g),
        torch.rand(batch, generator=g),
    )
    rows = (target_logits[:, 0].contiguous(), torch.rand(batch, generator=g))
    arguments = dict.fromkeys(("verify_exact", "verify_block", "verify_sigmoid"), verification)
    arguments |= {"sample": rows, "filter_logits": rows[:1]}
    return {name: tuple(value.to(device) for value in values) for name, values in arguments.items()}


@torch.library.triton_op("specops_benchmark::empty", mutates_args={})
def empty(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(b), torch.empty_like(e)


def calls_of(arguments: dict[str, tuple[Tensor, ...]], compiled: bool) -> dict[str, dict[str, Call]]:
    """op -> column -> call."""
    calls: dict[str, dict[str, Call]] = {}
    for name, values in arguments.items():
        function, op = getattr(torch_specops, name), getattr(torch.ops.specops, name)
        calls[name] = {
            "function": lambda function=function, values=values: function(*values),
            "op": lambda op=op, values=values: op(*values),
        }
        if compiled:
            graph = torch.compile(function, fullgraph=True, dynamic=False)
            calls[name]["compiled"] = lambda graph=graph, values=values: graph(*values)
    of_five = arguments["verify_exact"]
    calls["an empty triton_op"] = {"op": lambda: torch.ops.specops_benchmark.empty(*of_five)}
    one = torch.ones(1, device=of_five[0].device)
    calls["torch.add"] = {"op": lambda: torch.ops.aten.add.Tensor(one, one)}
    if compiled:
        add = torch.compile(torch.add, fullgraph=True, dynamic=False)
        calls["torch.add"]["compiled"] = lambda: add(one, one)
    return calls


def seconds_of(call: Call, repeats: int, synchronize: Call) -> float:
    synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize()
    return (time.perf_counter() - started) / repeats


@torch.inference_mode()
def measure(calls: dict[str, dict[str, Call]], rounds: int, repeats: int, device: str) -> list[dict[str, Any]]:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    cells = [(name, column, call) for name, columns in calls.items() for column, call in columns.items()]
    seconds: dict[tuple[str, str], list[float]] = {(name, column): [] for name, column, _ in cells}
    for _, _, call in cells:
        seconds_of(call, 3, synchronize)
    for _ in range(rounds):
        for name, column, call in cells:
            seconds[name, column].append(seconds_of(call, repeats, synchronize))
    records = []
    for (name, column), values in seconds.items():
        quartiles = statistics.quantiles(values, n=4)
        record: dict[str, Any] = {"op": name, "column": column}
        record |= {key: 1e6 * value for key, value in zip(("q1_us", "median_us", "q3_us"), quartiles, strict=True)}
        records.append(record)
    return records


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=10, help="calls of one kind between two looks at the clock")
    parser.add_argument("--no-compiled", action="store_true", help="eager calls alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the records as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sizes = (options.batch, options.num_draft_tokens, options.vocab)
    calls = calls_of(arguments_of(*sizes, options.device), not options.no_compiled)
    records = measure(calls, options.rounds, options.repeats, options.device)

    medians = {(record["op"], record["column"]): record["median_us"] for record in records}
    columns = ["function", "op", "compiled"]
    table = Table("microseconds per call", *columns)
    for name in calls:
        row = (medians.get((name, column)) for column in columns)
        table.add_row(name, *("" if value is None else f"{value:.1f}" for value in row))
    Console().print(table)
    if options.out is not None:
        described = environment(
            torch.device(options.device),
            # Of all processes, this one among them.
            load_average=os.getloadavg()[0],
            batch=options.batch,
            num_draft_tokens=options.num_draft_tokens,
            vocab=options.vocab,
            rounds=options.rounds,
            repeats=options.repeats,
        )
        options.out.write_text(json.dumps({"environment": described, "records": records}, indent=1) + "\n")
    return records


if __name__ == "__main__":
    main()
