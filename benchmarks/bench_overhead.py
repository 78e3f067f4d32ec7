"""What a call of each op costs beside its work, measured with a vocabulary so small that there is hardly any work.

    python benchmarks/bench_overhead.py [--rounds 400] [--no-compiled] [--out out.json]

B = 1, K = 4 and V = 16 by default. Microseconds; all calls take turns:

    function    torch_specops.verify_exact and so on: the check of its arguments, and the op
    op          torch.ops.specops.verify_exact and so on
    compiled    torch.compile(fullgraph=True) of the function: guards, the graph's call, the generated code

Two lines below are for comparison: a `triton_op` with an empty body shows what the dispatcher costs, and `torch.add` of
one entry what any aten call costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from markdown_table import table
from timing import Report, environment, options_of, spread, synchronize, take_turns
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


def calls_of(arguments: dict[str, tuple[Tensor, ...]], compiled: bool) -> dict[tuple[str, str], Call]:
    """(op, column) -> call."""
    one = torch.ones(1, device=arguments["verify_exact"][0].device)
    calls: dict[tuple[str, str], Call] = {}
    functions = {name: (getattr(torch_specops, name), values) for name, values in arguments.items()}
    for name, (function, values) in functions.items():
        calls[name, "function"] = partial(function, *values)
        calls[name, "op"] = partial(getattr(torch.ops.specops, name), *values)
    calls["an empty triton_op", "op"] = partial(torch.ops.specops_benchmark.empty, *arguments["verify_exact"])
    calls["torch.add", "op"] = partial(torch.ops.aten.add.Tensor, one, one)
    if compiled:
        for name, (function, values) in (functions | {"torch.add": (torch.add, (one, one))}).items():
            calls[name, "compiled"] = partial(torch.compile(function, fullgraph=True, dynamic=False), *values)
    return calls


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=200)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10, help="calls between two looks at the clock")
    parser.add_argument("--no-compiled", action="store_true", help="eager calls alone")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    sizes = {"batch": options.batch, "num_draft_tokens": options.num_draft_tokens, "vocab": options.vocab}

    def seconds_of(call: Call, _: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(options.repeats):
            call()
        synchronize(device)
        return (time.perf_counter() - started) / options.repeats

    with torch.inference_mode():
        calls = calls_of(arguments_of(*sizes.values(), options.device), not options.no_compiled)
        runs = {key: partial(seconds_of, call) for key, call in calls.items()}
        seconds = take_turns(runs, options.rounds)
    # The load is that of all processes, this one among them.
    counts = {"rounds": options.rounds, "repeats": options.repeats, "load_average": os.getloadavg()[0]}
    report = Report(options.out, environment(device, **sizes, **counts))
    report.add({"op": op, "column": column} | spread(own, "us") for (op, column), own in seconds.items())
    rows: dict[str, dict[str, Any]] = {}
    for record in report.records:
        rows.setdefault(record["op"], {"name": record["op"]})[record["column"]] = record["median_us"]
    columns = "{name} | {function:.1f} | {op:.1f} | {compiled:.1f}"
    print(table("microseconds per call | function | op | compiled", columns, rows.values(), padded=True))
    return report.records


if __name__ == "__main__":
    main()
