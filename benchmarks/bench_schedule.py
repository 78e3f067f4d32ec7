"""The default schedule, "auto", beside no draft and beside constant numbers of drafts.

    python benchmarks/bench_schedule.py lookup --threads 1 [--dtype bfloat16] [--temperature 1] [--out FILE.json]
    python benchmarks/bench_schedule.py bytes --threads 1 [--temperature 1] [--out FILE.json]

lookup    SmolLM2-135M with prompt lookup: the prompts of `torch-specops bench`, alone and as a batch of eight; those of
          examples/prompts.jsonl, alone; and all of them as requests, eight at a time
bytes     the byte-level target with its draft model and with one that is always wrong, alone and in a batch of eight

The ways take turns, and each keeps a decoder. The first round warms up. A line has a speed of the seconds of whole
calls without a draft / the seconds, the median over the other rounds; and one by count, where steps of one number of
tokens take the least time that any of them took, and prompts take none. "bound" is by count what drafts of the same K
would give if the target read only those that are right, and if proposing took no time: no schedule does better. By
verify="gumbel" a text is the same in every way; this is checked in float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markdown_table import table
from rich.console import Console
from rich.progress import Progress
from timing import Report, environment, options_of, settings_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.cli.bench import PROMPTS
from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT, SMOLLM2
from torch_specops.cli.models import PROMPT_LOOKUP, encode, load_models
from torch_specops.cli.prompts import read_questions
from torch_specops.schedules import Auto, Constant, NextStep, PastStep, Schedule

QUESTIONS = Path(__file__).resolve().parents[1] / "examples" / "prompts.jsonl"
OPENINGS = [
    "It was not to be ",
    "Elizabeth was surprised ",
    "The house was ",
    "Mr. Darcy said, ",
    "In the evening they ",
]
OPENINGS += ["She could not help ", "My dear sister, ", "The weather had been "]
NO_DRAFT, AUTO = "no draft", "auto"


class Watched(Schedule):
    """A schedule, and what it did: the steps of the newest call."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.buckets = schedule, schedule.buckets
        self.own_seconds = 0.0
        self.steps: list[PastStep] = []

    def plan(self, step: NextStep) -> Sequence[int]:
        started = time.perf_counter()
        counts = self.schedule.plan(step)
        self.own_seconds += time.perf_counter() - started
        return counts

    def learn(self, step: PastStep) -> None:
        started = time.perf_counter()
        self.schedule.learn(step)
        self.own_seconds += time.perf_counter() - started
        self.steps.append(step)

    def begin(self) -> Watched:
        self.reset()
        return self

    def reset(self) -> None:
        self.schedule.reset()


def tokens_read(step: PastStep) -> int:
    return len(step.planned.texts) + sum(step.proposed)


def by_count(lists: Sequence[Sequence[PastStep]]) -> list[tuple[float, float]]:
    """The seconds of several lists of steps on a machine that does nothing else: a step takes the least time of all
    that read as many tokens, in between on a line, and the least of all that drafted as many. Then those seconds if the
    target had read the drafts alone that it accepted, and proposing took no time."""
    least: dict[int, dict[int, float]] = {}
    drafting: dict[int, float] = {0: 0.0}
    for step in chain(*lists):
        known, read, count = least.setdefault(step.planned.num_rows, {}), tokens_read(step), step.num_draft_tokens
        if step.seconds is not None:
            known[read] = min(step.seconds, known.get(read, step.seconds))
        if count > 0:
            drafting[count] = min(step.draft_seconds, drafting.get(count, step.draft_seconds))
    sums = []
    for steps in lists:
        total, bound = sum(drafting[step.num_draft_tokens] for step in steps), 0.0
        for step in steps:
            known = zip(*sorted(least[step.planned.num_rows].items()), strict=True)
            counts = tokens_read(step), len(step.planned.texts) + sum(step.accepted)
            read, accepted = np.interp(counts, *known).tolist()
            total, bound = total + read, bound + accepted
        sums.append((total, bound))
    return sums


def lines_of(options: argparse.Namespace, tokenizer: Any) -> dict[str, list[list[Tensor]]]:
    """By name, batches of prompts [P]; a line of several batches has them one after the other."""
    if options.kind == "bytes":
        texts = [encode(tokenizer, text)[0] for text in OPENINGS]
        return {"alone": [[text] for text in texts[:2]], "eight": [texts]}
    prompts = [encode(tokenizer, text)[0] for text in PROMPTS]
    lines = {"code to copy": [prompts[:1]], "a story": [prompts[-1:]], "eight prompts": [prompts]}
    for question in read_questions(QUESTIONS):
        lines.setdefault(question.category, []).append([encode(tokenizer, question.text)[0]])
    return {name: batches for name, batches in lines.items() if name in (options.lines or lines)}


def decode(
    decoder: SpeculativeDecoder, batches: Sequence[Sequence[Tensor]], options: argparse.Namespace, seed: int
) -> list[list[int]]:
    """The new tokens of all prompts; with `rows`, as requests."""
    sampling, texts = SamplingParams(temperature=options.temperature), []
    for batch in batches:
        sizes = torch.tensor([len(prompt) for prompt in batch])
        ids = pad_sequence(list(batch), batch_first=True, padding_side="left")
        mask = torch.arange(ids.shape[1]) >= ids.shape[1] - sizes.unsqueeze(1)
        how = {"max_new_tokens": options.new_tokens, "seed": seed, "eos_token_id": (), "pad_token_id": 0}
        output = decoder.generate(ids, attention_mask=mask.long(), sampling=sampling, **how)
        texts += [output.new_tokens(row) for row in range(len(batch))]
    return texts


def refill(
    decoder: SpeculativeDecoder, prompts: Sequence[Tensor], options: argparse.Namespace, seed: int
) -> list[list[int]]:
    sampling = SamplingParams(temperature=options.temperature)
    how = {"max_new_tokens": options.new_tokens, "sampling": sampling, "eos_token_id": ()}
    requests = [Request(prompt, seed=torch.tensor([seed + number]), **how) for number, prompt in enumerate(prompts)]
    done = {each.index: each.new_tokens.tolist() for each in decoder.generate_many(requests, batch_size=8)}
    return [done[number] for number in range(len(prompts))]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("kind", choices=["lookup", "bytes"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--constants", type=int, nargs="+", help="numbers of drafts; default: 2 5 10, or 2 4 6")
    parser.add_argument("--lines", nargs="+", help="names of those of lookup, and 'requests'; default: all")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    is_bytes, dtype = options.kind == "bytes", getattr(torch, options.dtype)
    names = (AUSTEN, AUSTEN_DRAFT) if is_bytes else (SMOLLM2, PROMPT_LOOKUP)
    models, tokenizer = load_models(Console(stderr=True), *names, torch.device("cpu"), dtype)
    counts = options.constants or ([2, 4, 6] if is_bytes else [2, 5, 10])
    drafts = {"": models.draft}
    if is_bytes:
        wrong = copy.deepcopy(models.draft)
        with torch.no_grad():
            for parameter in wrong.parameters():
                parameter.mul_(-1)
        drafts = {", draft model": models.draft, ", wrong draft": wrong}
    lines = lines_of(options, tokenizer)
    verify = "gumbel"
    decoders: dict[str, dict[str, SpeculativeDecoder]] = {}
    for kind, draft in drafts.items():
        ways: dict[str, Schedule] = {NO_DRAFT: Constant(0), **{f"K = {count}": Constant(count) for count in counts}}
        ways[AUTO] = Auto(max(counts))
        decoders[kind] = {
            name: SpeculativeDecoder(
                models.target.model, draft, schedule=Watched(schedule), verify=verify, compile=False
            )
            for name, schedule in ways.items()
        }
    everything = [prompt for batches in lines.values() for batch in batches if len(batch) == 1 for prompt in batch]
    runs: dict[tuple[str, str], list[float]] = {}
    stats: dict[tuple[str, str], Any] = {}
    steps: dict[tuple[str, str], list[PastStep]] = {}
    planning: dict[tuple[str, str], float] = {}
    tasks = [(kind, name) for kind in decoders for name in [*lines, *([] if is_bytes else ["requests"])]]
    if options.lines:
        tasks = [task for task in tasks if task[1] in options.lines]
    with Progress(transient=True) as progress:
        for number in progress.track(range(options.rounds + 1), description="rounds"):
            for kind, name in tasks:
                texts = {}
                ways = list(decoders[kind].items())
                for way, decoder in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    decoder.schedule.steps, decoder.schedule.own_seconds = [], 0.0
                    started = time.perf_counter()
                    if name == "requests":
                        texts[way] = refill(decoder, everything, options, number)
                    else:
                        texts[way] = decode(decoder, lines[name], options, number)
                    runs.setdefault((name + kind, way), []).append(time.perf_counter() - started)
                    stats[name + kind, way] = decoder.stats
                    steps[name + kind, way] = decoder.schedule.steps
                    planning[name + kind, way] = decoder.schedule.own_seconds / len(decoder.schedule.steps)
                if options.dtype == "float32" and any(found != texts[NO_DRAFT] for found in texts.values()):
                    raise RuntimeError(f"{name}: a draft has changed a text")
    report = Report(options.out, environment(torch.device("cpu")), arguments=settings_of(options))
    for kind, name in tasks:
        line = name + kind
        found = {way: own[1:] for (label, way), own in runs.items() if label == line}
        counted = dict(zip(found, by_count([steps[line, way] for way in found]), strict=True))
        for way, seconds in found.items():
            speed = statistics.median(a / b for a, b in zip(found[NO_DRAFT], seconds, strict=True))
            own = stats[line, way]
            record = {"line": line, "way": way, "seconds": seconds, "speedup": speed}
            # Of the last round.
            plain, (total, bound) = counted[NO_DRAFT][0], counted[way]
            record |= {"speedup_by_count": plain / total, "bound_by_count": plain / bound}
            record |= {"num_steps": len(steps[line, way]), "planning_us": 1e6 * planning[line, way]}
            record |= {"tokens_read": sum(map(tokens_read, steps[line, way]))}
            # Of its last call.
            record |= {"drafts_per_step": own.num_proposed / own.num_row_steps}
            report.add([record | {"mean_acceptance_length": own.mean_acceptance_length}])
    head = "line | way | speed | by count | bound | steps | tokens read | us to plan"
    speeds = "{line} | {way} | {speedup:.2f} | {speedup_by_count:.3f} | {bound_by_count:.3f}"
    counts = "{num_steps} | {tokens_read} | {planning_us:.0f}"
    print(table(head, f"{speeds} | {counts}", report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
