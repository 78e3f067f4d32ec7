"""`sample` beside softmax and `torch.multinomial`, and the time of `uniforms`: eager calls.

    python benchmarks/bench_sample.py
    python benchmarks/bench_sample.py --batch 1 --vocab 256 151936 --out out.json

Times are medians in us of rounds in which the calls took turns. `sample` is given a temperature of 1 for each row, as
in the decoding loop, and also returns the logsumexp. `uniforms` makes five numbers of one stream per sequence.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from markdown_table import table
from timing import Report, call_seconds, environment, options_of, spread, take_turns

import torch_specops


def measure(batch: int, vocab_size: int, device: torch.device, rounds: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(batch, vocab_size, generator=g)).to(device)
    numbers, temperature = torch.rand(batch, generator=g).to(device), torch.ones(batch, device=device)
    seeds = torch.arange(batch, device=device)
    calls = {
        "multinomial": lambda: torch.multinomial(logits.softmax(-1), num_samples=1),
        "sample": lambda: torch_specops.sample(logits, numbers, temperature),
        "uniforms": lambda: torch_specops.uniforms(seeds, seeds, 5, "accept"),
    }
    runs = {name: lambda i, call=call: call_seconds(call, device) for name, call in calls.items()}
    record: dict[str, Any] = {"batch": batch, "vocab": vocab_size}
    for name, seconds in take_turns(runs, rounds).items():
        record |= spread(seconds, "us", name)
    return record | {"speedup": record["multinomial_median_us"] / record["sample_median_us"]}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=200)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[256, 32_000, 50_257, 151_936])
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    report = Report(options.out, environment(device, rounds=options.rounds))
    with torch.inference_mode():
        for batch, vocab_size in itertools.product(options.batch, options.vocab):
            report.add([measure(batch, vocab_size, device, options.rounds)])
    line = "{batch} | {vocab} | {multinomial_median_us:.0f} | {sample_median_us:.0f} | {speedup:.2f}"
    header = "B | V | softmax, multinomial us | sample us | speedup | uniforms us"
    print(table(header, line + " | {uniforms_median_us:.0f}", report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
