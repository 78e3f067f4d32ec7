"""Beam search: transformers' own beside ours, without a draft and with one, in one run.

    python benchmarks/bench_beam.py
    python benchmarks/bench_beam.py --num-beams 4 --num-draft-tokens 1 2 4 --threads 1 --out out.json

The models are the byte-level pair of the package, and the prompts are spread over text that neither was trained on. The
searches take turns: a round is every search over every prompt, and a number is the median over the rounds. Every answer
is compared with that of transformers, token by token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, options_of, synchronize
from torch import Tensor, nn

import torch_specops
from torch_specops.beam import beam_search

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

    def round(self, batches: list[Tensor], timed: bool) -> None:
        started = time.perf_counter()
        results = [self.run(batch) for batch in batches]
        synchronize(batches[0].device)
        if timed:
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
    pairs = zip(search.answers, reference.answers, strict=True)
    tokens = sum(answer.numel() for answer in search.answers)
    median = statistics.median(search.seconds)
    found: dict[str, Any] = {
        "search": search.name,
        "num_beams": search.num_beams,
        "num_draft_tokens": search.num_draft_tokens,
        "draft_beams": search.draft_beams,
        "seconds": search.seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / median,
        "speedup": statistics.median(reference.seconds) / median,
        "same_tokens": sum(int((answer == other).sum()) for answer, other in pairs),
    }
    if search.stats[0] is not None:
        totals = {
            name: sum(getattr(stats, name) for stats in search.stats)
            for name in ("num_steps", "num_row_steps", "num_tokens", "num_proposed", "num_accepted")
        }
        found |= {"rounds": totals["num_steps"], "levels_per_round": totals["num_tokens"] / totals["num_row_steps"]}
        if totals["num_proposed"]:
            found["acceptance_rate"] = totals["num_accepted"] / totals["num_proposed"]
    return found


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    parser = options_of(__doc__, rounds=7)
    parser.add_argument("--num-beams", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-bytes", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(PAIR / role).eval().to(options.device) for role in ("target", "draft")
    )
    batches = prompts(options)
    every = [searches(target, draft, options, num_beams) for num_beams in options.num_beams]
    with Progress(transient=True) as progress:
        # The first round warms up.
        for number in progress.track(range(options.rounds + 1), description="searching"):
            for search in (search for group in every for search in group):
                search.round(batches, timed=number > 0)
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    report = Report(options.out, environment(torch.device(options.device)), arguments=chosen)
    report.add(record(search, group[0]) for group in every for search in group)
    line = "{search} | {num_beams} | {num_draft_tokens:d} | {draft_beams:d} | {tokens_per_second:.0f} | {speedup:.2f}"
    line += " | {levels_per_round:.2f} | {acceptance_rate:.0%} | {same_tokens} of {tokens}"
    header = "search | w | K | u | tokens/s | speedup | levels/round | accepted | same tokens"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
