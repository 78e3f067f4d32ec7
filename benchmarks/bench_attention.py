"""Time attention over the loop's static cache: to the spans of slots that are seen, under a mask, and FlexAttention.

    python benchmarks/bench_attention.py [--device cuda] [--batch 1 8] [--slots 2048] [--queries 1 6] [--out FILE.json]

Grouped queries (32 heads over 8), 128 wide, bfloat16. Every row of the batch has text in up to three quarters of the
slots, and its last tokens are the queries. "spans" is the op `attend`, which reads those slots alone;
"percent_of_copy" counts all slots for everyone. "grouped sdpa" is `torch_specops.hf.attention` under a boolean mask;
"sdpa" is transformers', under the same, which repeats keys for every head. "flex" is compiled FlexAttention, whose
decoding kernel splits the slots; its block mask is made once per step for all layers and timed as "flex, block mask".
Every output is compared with attention in float32 before it is timed. A number is the replay of a CUDA graph of
`--layers` calls, each on a cache of its own, divided by their number. On a CPU it is a call, and there is no flex.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import Report, copy_rate, environment, options_of, spread, take_turns, timers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from torch_specops.hf.attention import grouped_attention
from torch_specops.ops.attention import attend

HEADS, KEY_HEADS, WIDTH = 32, 8, 128
# For bfloat16 outputs of order one, compared with float32.
TOLERANCE = 2e-2
# [B, heads, n, D] queries and [B, key heads, W, D] keys and values -> [B, n, heads, D].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager_providers(positions: Tensor, mask: Tensor) -> dict[str, Attend]:
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = HEADS // KEY_HEADS, True
    spans = torch.stack([torch.zeros_like(positions), positions], -1)
    return {
        "spans": lambda q, k, v: attend(q, k, v, spans, WIDTH**-0.5),
        "grouped sdpa": lambda q, k, v: grouped_attention(module, q, k, v, mask)[0],
        "sdpa": lambda q, k, v: sdpa_attention_forward(module, q, k, v, mask)[0],
    }


def flex_provider(starts: Tensor, num_queries: int, slots: int) -> tuple[Attend, Callable[[], Any]]:
    """FlexAttention, and what makes its block mask."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k <= starts[b] + q

    def block_mask() -> Any:
        return create_block_mask(visible, len(starts), None, num_queries, slots, device=str(starts.device))

    block, flex = block_mask(), torch.compile(flex_attention, dynamic=False)
    return (
        lambda q, k, v: flex(q, k, v, block_mask=block, enable_gqa=True).transpose(1, 2),
        torch.compile(block_mask, dynamic=False),
    )


def in_float32(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys, values = (x.float().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    scores = q.float() @ keys.transpose(-1, -2) / math.sqrt(WIDTH)
    return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ values).transpose(1, 2)


def measure(batch: int, slots: int, num_queries: int, options: argparse.Namespace, roof: float) -> list[dict[str, Any]]:
    device = torch.device(options.device)
    g = torch.Generator(device=device).manual_seed(0)

    def random(heads: int, count: int) -> Tensor:
        return torch.randn(batch, heads, count, WIDTH, generator=g, device=device).bfloat16()

    caches = [(random(KEY_HEADS, slots), random(KEY_HEADS, slots)) for _ in range(options.layers)]
    layers = [(random(HEADS, num_queries), *cache) for cache in caches]
    # Rows differ in length, as in a batch of prompts.
    starts = 3 * slots // 4 - num_queries - torch.arange(batch, device=device)
    positions = starts.unsqueeze(1) + torch.arange(num_queries, device=device)
    mask = (torch.arange(slots, device=device) <= positions.unsqueeze(-1)).unsqueeze(1)
    expected = in_float32(*layers[0], mask)

    runs: dict[str, Callable[[int], float]] = {}
    errors: dict[str, float] = {}
    providers = eager_providers(positions, mask)
    if device.type == "cuda" and not options.no_flex:
        providers["flex"], block_mask = flex_provider(starts, num_queries, slots)
        runs["flex, block mask"] = timers([block_mask], device, graphs=False)["call"]
    for name, provider in providers.items():
        errors[name] = float((provider(*layers[0]).float() - expected).abs().max())
        if not errors[name] <= TOLERANCE:
            raise RuntimeError(f"{name}: expected outputs within {TOLERANCE} of float32, got {errors[name]}")
        mode = "graph" if device.type == "cuda" else "call"
        runs[name] = timers([partial(provider, *layer) for layer in layers], device)[mode]
    read = 2 * batch * slots * KEY_HEADS * WIDTH * 2
    return [
        {
            "batch": batch,
            "slots": slots,
            "queries": num_queries,
            "provider": name,
            **spread(own, "us"),
            "cache_bytes": read,
            "percent_of_copy": 100 * read / statistics.median(own) / roof,
            "max_error": errors.get(name),
        }
        for name, own in take_turns(runs, options.rounds).items()
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=50)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--slots", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--layers", type=int, default=8, help="calls of a graph, each on a cache of its own")
    parser.add_argument("--no-flex", action="store_true", help="leave out FlexAttention, which is compiled")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    roof = copy_rate(device)
    report = Report(options.out, environment(device, copy_gb_per_s=roof * 1e-9, rounds=options.rounds))
    with torch.inference_mode():
        for batch, slots, num_queries in itertools.product(options.batch, options.slots, options.queries):
            torch._dynamo.reset()
            report.add(measure(batch, slots, num_queries, options, roof))
            for record in report.records[-5:]:
                print(record, flush=True)
    return report.records


if __name__ == "__main__":
    main()
