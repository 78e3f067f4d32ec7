"""Suffix lookup in a long history: what a lookup costs, and what an epoch of rollouts gains from the epoch before.

    python benchmarks/bench_history.py lookup --threads 1 [--sizes 8192 100000] [--out FILE.json]
    python benchmarks/bench_history.py replay --threads 2 [--out FILE.json]

lookup    `propose` of `SuffixLookup` for 8 rows of 4,096 tokens and K = 10, with an index and by the scan that traced
          steps have (in at most --scanned tokens), whose drafts are checked to be equal. The memory is full of texts of
          500 random tokens, log-uniform in 50,000 or in 100. "known" rows end in the middle of a remembered text, and
          "new" rows do not. `remember_per_second` is the rate of `remember`, and `finish_median_ms` the time of
          `on_finished` with a text when the memory is full. `bytes_per_token` are held, and `peak_bytes_per_token` is
          their peak while the texts are remembered. Also `PromptLookup` on the same rows
replay    the byte-level target samples an answer to each of 200 prompts, pieces of held-out text, at T = 1 with
          verify="gumbel", then takes an optimizer step on its answers, and answers again, with the same row seeds or
          with others. The second epoch has no draft, `SuffixLookup(memory=0)`, or a lookup that remembers the first
          epoch. The ways take turns; seconds are medians of whole epochs, without remembering
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, options_of, settings_of, spread
from torch import Tensor

from torch_specops import SpeculativeDecoder
from torch_specops.cli.loading import AUSTEN, load_model, load_tokenizer
from torch_specops.drafts import PromptLookup, SuffixLookup, lookup
from torch_specops.hf import language_model

HELDOUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "austen_heldout.txt"
BATCH, WIDTH, NUM_DRAFTS, TEXT = 8, 4096, 10, 500
VOCABULARIES = (50_000, 100)
PROMPT_LENGTH = 64


def random_tokens(shape: tuple[int, ...], vocab_size: int, generator: torch.Generator) -> Tensor:
    return (vocab_size ** torch.rand(shape, generator=generator)).long() - 1


def times(call: Callable[[], object], rounds: int) -> list[float]:
    call()
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def bench_lookup(options: argparse.Namespace, report: Report) -> None:
    for vocab_size in VOCABULARIES:
        generator = torch.Generator().manual_seed(0)
        new = random_tokens((BATCH, WIDTH), vocab_size, generator)
        of_prompt = timed_proposals(PromptLookup(), new, options.rounds, is_scanned=True)
        report.add([{"draft": "PromptLookup", "vocab_size": vocab_size, "rows": "new"} | of_prompt])
        for size in options.sizes:
            texts = random_tokens((size // (TEXT + 1) + 1, TEXT), vocab_size, generator)
            draft = SuffixLookup(memory=size)
            started = time.perf_counter()
            draft.remember(list(texts))
            seconds = time.perf_counter() - started
            memory: dict[str, Any] = {"draft": "SuffixLookup", "vocab_size": vocab_size, "memory": size}
            memory |= {"remembered": draft.num_remembered, "remember_per_second": texts.numel() / seconds}
            memory |= measured_bytes(texts, size)
            chosen = texts[torch.randint(1, len(texts), (BATCH,), generator=generator)]
            known = torch.cat([new[:, : WIDTH - 200], chosen[:, 100:300]], 1)
            records = []
            for name, rows in (("known", known), ("new", new)):
                proposals = timed_proposals(draft, rows, options.rounds, is_scanned=size <= options.scanned)
                records.append(memory | {"rows": name} | proposals)
            finished = iter(random_tokens((options.rounds + 1, 1, TEXT), vocab_size, generator))
            seconds_of_texts = times(partial(finish, draft, finished), options.rounds)
            more = {"finish_max_ms": 1e3 * max(seconds_of_texts)} | spread(seconds_of_texts, "ms", "finish")
            report.add(record | more for record in records)
    line = "{draft} | {vocab_size} | {memory} | {rows} | {propose_median_ms:.3f} | {scan_median_ms:.2f} | "
    line += "{remember_per_second:.1e} | {bytes_per_token:.1f} | {peak_bytes_per_token:.1f} | {finish_median_ms:.2f}"
    heads = "draft | V | memory | rows | propose, ms | scan, ms | remembered per s | bytes | peak | finish, ms"
    print(table(heads, line, report.records, padded=True))


def timed_proposals(
    draft: PromptLookup | SuffixLookup, rows: Tensor, rounds: int, *, is_scanned: bool
) -> dict[str, Any]:
    propose = partial(draft.propose, rows, torch.full((BATCH,), WIDTH), NUM_DRAFTS)
    found = spread(times(propose, rounds), "ms", "propose")
    if not is_scanned:
        return found
    tokens, kept = propose().tokens, getattr(draft, "_memory", None)
    # The code of a traced step.
    with mock.patch.object(lookup, "is_eager_cpu", return_value=False):
        if isinstance(draft, SuffixLookup):
            draft._memory = memory_of(draft)
        if not torch.equal(tokens, propose().tokens):
            raise RuntimeError("the index and the scan propose different drafts")
        found |= spread(times(propose, 5), "ms", "scan")
    if isinstance(draft, SuffixLookup):
        draft._memory = kept
    return found


def finish(draft: SuffixLookup, texts: Iterator[Tensor]) -> None:
    draft.on_finished(next(texts), torch.tensor([TEXT]))


def memory_of(draft: SuffixLookup) -> Tensor:
    """The memory as a traced step has it."""
    newest = torch.from_numpy(draft._history.newest()).long()
    return torch.nn.functional.pad(newest, (draft.memory - len(newest), 0), value=-1)


def measured_bytes(texts: Tensor, size: int) -> dict[str, float]:
    """The bytes that a lookup holds, and the most while it remembers the texts, for each token of its memory."""
    tracemalloc.start()
    draft = SuffixLookup(memory=size)
    draft.remember(list(texts))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert draft.num_remembered > 0
    return {"bytes_per_token": held / size, "peak_bytes_per_token": peak / size}


def bench_replay(options: argparse.Namespace, report: Report) -> None:
    target = load_model(AUSTEN, torch.device("cpu")).model
    text = load_tokenizer(AUSTEN)(HELDOUT.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    length = min(len(text) // options.prompts, 256)
    prompts = text[: length * options.prompts].view(options.prompts, length)[:, :PROMPT_LENGTH]
    first, _ = epoch(target, prompts, None, "constant", 0, options)
    changed = changed_by_a_step(target, first, options.learning_rate)
    ways = [("no draft", "constant"), *product(("memory=0", "the first epoch"), ("constant", "auto"))]
    for seeds in ("the same", "others"):
        runs: dict[tuple[str, str], list[tuple[list[Tensor], dict[str, Any]]]] = {way: [] for way in ways}
        remembering = []
        with Progress(transient=True) as progress:
            for _ in progress.track(range(options.rounds), description=f"seeds: {seeds}"):
                for name, schedule in ways:
                    draft = None if name == "no draft" else SuffixLookup(memory=0 if name == "memory=0" else 10**6)
                    if name == "the first epoch" and draft is not None:
                        started = time.perf_counter()
                        draft.remember(first)
                        remembering.append(time.perf_counter() - started)
                    seed = 0 if seeds == "the same" else 1
                    runs[name, schedule].append(epoch(changed, prompts, draft, schedule, seed, options))
        plain = runs["no draft", "constant"][-1][0]
        for (name, schedule), found in runs.items():
            texts, counts = found[-1]
            seconds = [each["seconds"] for _, each in found]
            record = {"seeds": seeds, "draft": name, "schedule": schedule, **counts}
            record |= {"seconds": statistics.median(seconds), "rounds": seconds}
            record |= {"same_texts": share_of_equal(texts, plain), "texts_of_before": share_of_equal(plain, first)}
            record |= {"remember_seconds": statistics.median(remembering)} if name == "the first epoch" else {}
            report.add([record])
    line = "{seeds} | {draft} | {schedule} | {tokens_per_step:.2f} | {acceptance_rate:.2f} | {seconds:.2f} | "
    line += "{same_texts:.2f} | {texts_of_before:.2f}"
    heads = "seeds | draft | schedule | tokens per step | accepted | seconds | same texts | texts of the first epoch"
    print(table(heads, line, report.records, padded=True))


def share_of_equal(texts: list[Tensor], others: list[Tensor]) -> float:
    return statistics.mean(float(torch.equal(*pair)) for pair in zip(texts, others, strict=True))


def epoch(
    target: Any, prompts: Tensor, draft: SuffixLookup | None, schedule: str, seed: int, options: argparse.Namespace
) -> tuple[list[Tensor], dict[str, Any]]:
    """The texts of an epoch, with their prompts, and what it took."""
    how: dict[str, Any] = {"num_draft_tokens": 10, "schedule": schedule, "verify": "gumbel", "compile": False}
    decoder = SpeculativeDecoder(language_model(target), draft, **how)
    texts, tokens, steps, accepted, proposed, seconds = [], 0, 0, 0, 0, 0.0
    for index, batch in enumerate(prompts.split(options.batch)):
        started = time.perf_counter()
        options_of_call = {"max_new_tokens": options.new_tokens, "eos_token_id": ()}
        output = decoder.generate(batch, seed=1000 * seed + index, **options_of_call)
        seconds += time.perf_counter() - started
        texts += list(output.sequences)
        stats = output.stats
        tokens, steps = tokens + stats.num_tokens, steps + stats.num_row_steps
        accepted, proposed = accepted + stats.num_accepted, proposed + stats.num_proposed
    rate = accepted / proposed if proposed else None
    return texts, {"seconds": seconds, "tokens": tokens, "tokens_per_step": tokens / steps, "acceptance_rate": rate}


def changed_by_a_step(target: Any, texts: list[Tensor], learning_rate: float) -> Any:
    """A copy of the target after a policy-gradient step on its answers. The reward is the share of commas."""
    policy, rows = copy.deepcopy(target), torch.stack(texts)
    rewards = (rows[:, PROMPT_LENGTH:] == ord(",")).float().mean(1)
    advantages = (rewards - rewards.mean()) / rewards.std()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate)
    for part, weights in zip(rows.split(20), advantages.split(20), strict=True):
        logprobs = policy(part).logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(2, part[:, PROMPT_LENGTH:].unsqueeze(2)).squeeze(2)
        (-(chosen.mean(1) * weights).sum() / len(rows)).backward()
    optimizer.step()
    return policy.eval()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=None)
    parser.add_argument("kind", choices=["lookup", "replay"])
    parser.add_argument("--rounds", type=int, help="default: 200 for lookup, 3 for replay")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 10**5, 10**6, 10**7], help="10**8 needs 8 GB")
    parser.add_argument("--scanned", type=int, default=10**5, help="the largest memory that is also scanned")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or {"lookup": 200, "replay": 3}[options.kind]
    torch.set_num_threads(options.threads)
    report = Report(options.out, environment(torch.device("cpu")), arguments=settings_of(options))
    {"lookup": bench_lookup, "replay": bench_replay}[options.kind](options, report)
    return report.records


if __name__ == "__main__":
    main()
