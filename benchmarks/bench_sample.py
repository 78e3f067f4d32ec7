"""Time `sample` and `uniforms` beside softmax and `torch.multinomial`, and argmax.

    python benchmarks/bench_sample.py [--device cuda] [--batch 1 64] [--vocab 128256] [--dtype bfloat16] [--out F.json]

Times are medians in us of rounds in which the calls took turns. `sample` is given a temperature for each row, as in the
loop, and also returns the logsumexp. `uniforms` makes five numbers of one stream per sequence. On CUDA a "replay" is
the replay of a graph of one call. "race" is what multinomial does, without its checks, which wait for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from bench_verify import race
from timing import Lead, Report, call_seconds, capture, environment, options_of, spread, take_turns
from torch import Tensor

import torch_specops


def calls_of(logits: Tensor) -> dict[str, Callable[[], object]]:
    batch, device = logits.shape[0], logits.device
    ones, seeds = torch.ones(batch, device=device), torch.arange(batch, device=device)
    numbers, zeros = torch.rand(batch, device=device), torch.zeros(batch, device=device)
    return {
        "multinomial": lambda: torch.multinomial(logits.softmax(-1), num_samples=1),
        "race": lambda: race(logits.softmax(-1), {}),
        "sample": lambda: torch_specops.sample(logits, numbers, ones),
        "sample, greedy": lambda: torch_specops.sample(logits, numbers, zeros),
        "argmax": lambda: logits.argmax(-1),
        "uniforms": lambda: torch_specops.uniforms(seeds, seeds, 5, "accept"),
    }


def measure(logits: Tensor, rounds: int) -> dict[str, Any]:
    device = logits.device
    calls = calls_of(logits)
    runs = {name: lambda _, call=call: call_seconds(call, device) for name, call in calls.items()}
    if device.type == "cuda":
        lead = Lead(device)
        for name in calls.keys() - {"multinomial"}:
            graph = capture([calls[name]])
            runs[f"{name} replay"] = lambda _, graph=graph: call_seconds(graph.replay, device, lead)
    record: dict[str, Any] = {"batch": logits.shape[0], "vocab": logits.shape[1]}
    for name, seconds in take_turns(runs, rounds).items():
        record |= spread(seconds, "us", name)
    return record


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=200)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[256, 32_000, 50_257, 151_936])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    report = Report(options.out, environment(device, rounds=options.rounds, dtype=options.dtype))
    g = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for batch, vocab_size in itertools.product(options.batch, options.vocab):
            logits = (3 * torch.randn(batch, vocab_size, generator=g)).to(device, getattr(torch, options.dtype))
            report.add([measure(logits, options.rounds)])
            print({name: value for name, value in report.records[-1].items() if "quartiles" not in name}, flush=True)
    return report.records


if __name__ == "__main__":
    main()
