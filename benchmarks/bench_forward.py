"""Time a forward of a target over N new tokens of each row on CUDA, beside one over a single token: c(N).

    python benchmarks/bench_forward.py [--target 7B] [--tokens 1 2 5 9 17 33] [--batch 1 4 8] [--out FILE.json]

A step that verifies N - 1 drafts of a row runs such a forward, so c(N) is what more drafts cost the target, also those
of a tree. The model has random weights (`bench_loop.py`). A forward reads the tokens after a text of --length tokens,
and gives the logits of all of them. It is one CUDA graph without Inductor, as `compile="auto"` captures it, and is
timed one replay at a time. `c` is its time over that of the first number of --tokens, in the same batch.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from bench_loop import SHAPES, forwards_alone, random_model
from timing import (
    Lead,
    Report,
    call_seconds,
    capture,
    copy_rate,
    environment,
    options_of,
    settings_of,
    spread,
    take_turns,
)
from transformers import LlamaForCausalLM


def measure(model: LlamaForCausalLM, batch: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    lead, capacity = Lead(model.device), options.length + max(options.tokens)
    # Kept in a variable, because a graph does not keep the tensors that it reads.
    forwards = {count: forwards_alone([model], batch, count - 1, options.length, capacity) for count in options.tokens}
    runs = {}
    for count, forward in forwards.items():
        replay = capture([forward]).replay
        runs[count] = lambda _, replay=replay: call_seconds(replay, model.device, lead)
    seconds = take_turns(runs, options.rounds)
    first = statistics.median(seconds[options.tokens[0]])
    return [
        {"batch": batch, "tokens": count, **spread(own, "ms"), "c": statistics.median(own) / first}
        for count, own in seconds.items()
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=20)
    parser.add_argument("--target", choices=SHAPES, default="7B")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 5, 9, 17, 33], help="N")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a text")
    parser.add_argument("--max-length", type=int, default=2048, help="positions of the model")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    # `forwards_alone` compiles what it reads with.
    torch.compiler.set_stance("force_eager")
    described = environment(device, copy_gb_per_s=copy_rate(device) * 1e-9, rounds=options.rounds)
    model = random_model(options.target, options, device)
    weights = sum(parameter.nbytes for parameter in model.parameters()) * 1e-9
    report = Report(options.out, described, settings=settings_of(options), weights_gb=weights)
    with torch.inference_mode():
        for batch in options.batch:
            records = measure(model, batch, options)
            report.add(records)
            print(*records, sep="\n", flush=True)
    return report.records


if __name__ == "__main__":
    main()
