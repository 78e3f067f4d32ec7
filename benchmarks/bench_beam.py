"""Beam search: transformers' own beside ours, without a draft and with one, in one run.

    python benchmarks/bench_beam.py
    python benchmarks/bench_beam.py --num-beams 4 --num-draft-tokens 1 2 4 --threads 1 --out out.json

The pair is the byte-level one that comes with the package, the prompts are spread over text that neither model has
read. The searches take turns: a round is every search over every prompt, and a number is the median over the rounds.
Every answer is compared with that of transformers, token by token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import torch_specops
from torch_specops.beam import beam_search
from torch_specops.cli.env import device_name, versions

PAIR = Path(torch_specops.__file__).parent / "data" / "austen_bytes"
TEXT = Path(__file__).parents[1] / "tests" / "data" / "austen_heldout.txt"


@dataclass
class Search:
    """One way to search, what it answered, and how long each round took."""

    name: str
    num_beams: int
    run: Callable[[Tensor], tuple[Tensor, Any]]
    num_draft_tokens: int | None = None
    draft_beams: int | None = None
    answers: list[Tensor] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def round(self, batches: list[Tensor]) -> None:
        started = time.perf_counter()
        results = [self.run(batch) for batch in batches]
        if batches[0].device.type == "cuda":
            torch.cuda.synchronize(batches[0].device)
        self.seconds.append(time.perf_counter() - started)
        self.answers, self.stats = [answer for answer, _ in results], [stats for _, stats in results]


def searches(target: nn.Module, draft: nn.Module, options: argparse.Namespace, num_beams: int) -> list[Search]:
    """Transformers first; the others are compared with it."""

    def theirs(prompts: Tensor) -> tuple[Tensor, None]:
        output = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            num_beams=num_beams,
            do_sample=False,
            max_new_tokens=options.max_new_tokens,
            pad_token_id=0,
        )
        return output[:, prompts.shape[1] :], None

    def ours(num_draft_tokens: int, draft_beams: int | None) -> Callable[[Tensor], tuple[Tensor, Any]]:
        def run(prompts: Tensor) -> tuple[Tensor, Any]:
            output = beam_search(
                target,
                prompts,
                num_beams=num_beams,
                draft=draft if num_draft_tokens else None,
                num_draft_tokens=num_draft_tokens,
                draft_beams=draft_beams,
                max_new_tokens=options.max_new_tokens,
                pad_token_id=0,
            )
            return output.sequences[:, prompts.shape[1] :], output.stats

        return run

    found = [Search("transformers", num_beams, theirs), Search("ours", num_beams, ours(0, None))]
    for num_draft_tokens in options.num_draft_tokens:
        for draft_beams in (num_beams, 2 * num_beams):
            run = ours(num_draft_tokens, draft_beams)
            found.append(Search("ours", num_beams, run, num_draft_tokens, draft_beams))
    return found


def prompts(options: argparse.Namespace) -> list[Tensor]:
    """Batches [B, bytes], from evenly spaced places of the held-out text."""
    text = torch.tensor(list(TEXT.read_bytes()), device=options.device)
    starts = torch.linspace(0, len(text) - options.prompt_bytes, options.prompts + 1, dtype=torch.int64)[:-1]
    rows = torch.stack([text[start : start + options.prompt_bytes] for start in starts.tolist()])
    return list(rows.split(options.batch))


def record(search: Search, reference: Search) -> dict[str, Any]:
    seconds, quartiles = statistics.median(search.seconds), [min(search.seconds), max(search.seconds)]
    if len(search.seconds) > 1:
        lower, _, upper = statistics.quantiles(search.seconds, n=4, method="inclusive")
        quartiles = [lower, upper]
    pairs = zip(search.answers, reference.answers, strict=True)
    tokens = sum(answer.numel() for answer in search.answers)
    found: dict[str, Any] = {
        "search": search.name,
        "num_beams": search.num_beams,
        "num_draft_tokens": search.num_draft_tokens,
        "draft_beams": search.draft_beams,
        "median_seconds": seconds,
        "quartiles": quartiles,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "speedup": statistics.median(reference.seconds) / seconds,
        "same_tokens": sum(int((answer == other).sum()) for answer, other in pairs),
    }
    if search.stats[0] is not None:
        num_row_steps = sum(stats.num_row_steps for stats in search.stats)
        num_proposed = sum(stats.num_proposed for stats in search.stats)
        found["rounds"] = sum(stats.num_steps for stats in search.stats)
        found["levels_per_round"] = sum(stats.num_tokens for stats in search.stats) / num_row_steps
        if num_proposed:
            found["acceptance_rate"] = sum(stats.num_accepted for stats in search.stats) / num_proposed
    return found


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-beams", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-bytes", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, help="write the records as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(PAIR / role).eval().to(options.device) for role in ("target", "draft")
    )
    batches = prompts(options)
    console = Console()
    every = [searches(target, draft, options, num_beams) for num_beams in options.num_beams]
    with Progress(console=console, transient=True) as progress:
        for _ in progress.track(range(options.rounds + 1), description="searching"):
            for group in every:
                for search in group:
                    search.round(batches)
    records = []
    for group in every:
        for search in group:
            # The first round warms up.
            search.seconds = search.seconds[1:]
        records += [record(search, group[0]) for search in group]

    table = Table("search", "w", "K", "u", "tokens/s", "speedup", "levels/round", "accepted", "same tokens")
    for row in records:
        table.add_row(
            row["search"],
            str(row["num_beams"]),
            str(row["num_draft_tokens"] or ""),
            str(row["draft_beams"] or ""),
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['levels_per_round']:.2f}" if "levels_per_round" in row else "",
            f"{row['acceptance_rate']:.0%}" if "acceptance_rate" in row else "",
            f"{row['same_tokens']} of {row['tokens']}",
        )
    console.print(table)
    if options.out is not None:
        environment = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(torch.device(options.device)),
            **versions(),
        }
        chosen = {name: value for name, value in vars(options).items() if name != "out"}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"environment": environment, "arguments": chosen, "records": records}, indent=1) + "\n"
        )
    return records


if __name__ == "__main__":
    main()
