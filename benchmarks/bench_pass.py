"""A compiled verification of bfloat16 logits that are cast to float32 and divided, with `torch_specops.inductor` and
without it.

    python benchmarks/bench_pass.py
    python benchmarks/bench_pass.py --op verify_block --batch 8 --vocab 32000 --rounds 50 --out out.json

Columns are medians of rounds in which the calls took turns, and the most bytes that a call held at a time of those it
allocated:

    compiled    op(target_logits.float() / 2, draft_logits.float() / 2)
    absorbed    the same function, compiled inside `absorb()`

"ratio" is the time of the second over that of the first, with its quartiles over the rounds. Both return the same
tokens, or the script stops.
"""

from __future__ import annotations

import itertools
import statistics
from contextlib import nullcontext
from typing import Any

import torch
from markdown_table import table
from timing import Report, call_seconds, environment, options_of, peak_bytes, take_turns
from torch import Tensor

import torch_specops
from torch_specops.compilation import compile_piece
from torch_specops.inductor import absorb

TEMPERATURE = 2.0
FILTERS = {"no": {}, "top-k, top-p": {"top_k": 50, "top_p": 0.9}}


def inputs_of(batch: int, num_drafts: int, vocab_size: int, filters: str, device: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    target_logits = 3 * torch.randn(batch, num_drafts + 1, vocab_size, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=g)
    inputs = {
        "target_logits": target_logits.bfloat16(),
        "draft_tokens": (draft_logits / TEMPERATURE)
        .softmax(-1)
        .flatten(0, 1)
        .multinomial(1, generator=g)
        .view(batch, -1),
        "draft_logits": draft_logits.bfloat16(),
        "accept_uniforms": torch.rand(batch, num_drafts, generator=g),
        "sample_uniforms": torch.rand(batch, generator=g),
        **{name: torch.full((batch,), value) for name, value in FILTERS[filters].items()},
    }
    return {name: value.to(device) for name, value in inputs.items()}


def measure(op: str, batch: int, num_drafts: int, vocab_size: int, filters: str, options: Any) -> dict[str, Any]:
    def verify(target_logits: Tensor, draft_logits: Tensor, **rest: Tensor) -> tuple[Tensor, Tensor]:
        scaled = target_logits.float() / TEMPERATURE, draft_logits.float() / TEMPERATURE
        return getattr(torch_specops, op)(target_logits=scaled[0], draft_logits=scaled[1], **rest)

    given = inputs_of(batch, num_drafts, vocab_size, filters, options.device)
    calls, answers = {}, {}
    for name, setting in (("compiled", nullcontext()), ("absorbed", absorb())):
        compiled = compile_piece(verify)
        with setting:
            answers[name] = compiled(**given)
        calls[name] = lambda compiled=compiled: compiled(**given)
    if not all(torch.equal(*parts) for parts in zip(*answers.values(), strict=True)):
        raise RuntimeError(f"{op}, B = {batch}, V = {vocab_size}: the pass changed the tokens")
    device = torch.device(options.device)
    runs = {name: lambda i, call=call: call_seconds(call, device) for name, call in calls.items()}
    seconds = take_turns(runs, options.rounds)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    return {
        "op": op,
        "batch": batch,
        "num_draft_tokens": num_drafts,
        "vocab": vocab_size,
        "filters": filters,
        "median_ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "peak_bytes": {name: peak_bytes(call, device) for name, call in calls.items()},
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=20)
    parser.add_argument("--op", nargs="+", choices=("verify_exact", "verify_block"), default=["verify_exact"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 152_064])
    parser.add_argument("--filters", nargs="+", choices=list(FILTERS), default=list(FILTERS))
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    described = environment(torch.device(options.device), rounds=options.rounds, temperature=TEMPERATURE)
    report = Report(options.out, described)
    for op, batch, vocab_size, filters in itertools.product(options.op, options.batch, options.vocab, options.filters):
        report.add([measure(op, batch, options.num_draft_tokens, vocab_size, filters, options)])
    line = "{op} | {batch} | {vocab} | {filters} | {median_ms[compiled]:.1f} | {median_ms[absorbed]:.1f}"
    line += " | {ratio:.2f} ({ratio_quartiles[0]:.2f} to {ratio_quartiles[1]:.2f}) | {peak_bytes[compiled]}"
    header = "op | B | V | filters | compiled ms | absorbed ms | ratio | compiled bytes | absorbed bytes"
    print(table(header, line + " | {peak_bytes[absorbed]}", report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
