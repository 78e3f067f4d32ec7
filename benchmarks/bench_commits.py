"""Calls of `generate` beside those of another checkout of the package, and beside transformers.

    git worktree add ../before HEAD~1
    python benchmarks/bench_commits.py --before ../before --threads 2 --out FILE.json
    python benchmarks/bench_commits.py --before ../before --target smollm2-135m-instruct --draft none --compiled no

Greedy and sampled calls of every batch size and number of drafts, prompts of one length, no eos. Each checkout has a
process of its own, and they take turns call by call. Times are of whole calls, reading the prompts included; of sampled
ones they are divided by the number of steps, because checkouts may sample other texts. The greedy texts of both
checkouts and of transformers must be the same.

A process keeps the place of its weights in memory, and that alone makes it up to a tenth faster or slower than another
with the same code. All processes are therefore started anew several times, and "again" is this checkout once more: a
ratio says something where it is outside the quartiles of again / now.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from timing import Report, environment, options_of, settings_of

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune must be in want of"
# A process that imports the package from the folder it is told, and then answers each line with a time.
WORKER = "--worker"


def main() -> None:
    parser = options_of(__doc__, rounds=8)
    parser.add_argument("--before", type=Path, help="the other checkout; required")
    parser.add_argument("--target", default="austen-bytes", help="as torch-specops bench takes it")
    parser.add_argument("--draft", default="austen-bytes-draft", help="as there, prompt-lookup or none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--processes", type=int, default=6, help="how often all processes are started anew, at least 2")
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument(WORKER, action="store_true", help="answer the questions of another process")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.worker:
        answer(args)
        return
    if args.before is None:
        parser.error("--before is required")
    report = Report(args.out, environment(torch.device(args.device)), options=settings_of(args) | {"before": None})
    here = Path(__file__).parents[1]
    folders = {"before": args.before, "now": here, "again": here}
    counts = [0, *(args.num_draft_tokens if args.draft != "none" else [])]
    for compiled in args.compiled:
        records: dict[str, dict[str, Any]] = {}
        for _ in range(args.processes):
            workers = {name: Worker(folder, args.threads) for name, folder in folders.items()}
            for batch, count, temperature in product(args.batch, counts, [0.0, 1.0]):
                call = {"compiled": compiled == "yes", "batch": batch}
                call |= {"num_draft_tokens": count, "temperature": temperature}
                seconds = times(call, workers, args.rounds)
                record = records.setdefault(json.dumps(call), call | {"seconds": {name: [] for name in seconds}})
                for name, own in seconds.items():
                    record["seconds"][name].append(own)
            for worker in workers.values():
                worker.end()
        for record in records.values():
            for name in ("before", "again"):
                record[f"{name}_over_now"] = statistics.quantiles(
                    map(ratio, record["seconds"][name], record["seconds"]["now"]), n=4, method="inclusive"
                )
        report.add(list(records.values()))
    rows = [
        record | {name: 1e3 * statistics.median(chain(*own)) for name, own in record["seconds"].items()}
        for record in report.records
    ]
    line = "{compiled} | {batch} | {num_draft_tokens} | {temperature} | {before:.1f} | {now:.1f} | {transformers:.1f}"
    for name in ("before", "again"):
        line += " | {NAME[1]:.3f} ({NAME[0]:.3f} to {NAME[2]:.3f})".replace("NAME", f"{name}_over_now")
    header = "compiled | B | K | T | before, ms | now, ms | transformers, ms | before / now | again / now"
    print(table(header, line, rows, padded=True))


def times(call: dict[str, Any], workers: dict[str, Worker], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round of a call: of every worker, and of transformers where it has such a call."""
    calls = {name: (worker, call) for name, worker in workers.items()}
    if not call["compiled"] and call["batch"] == 1 and call["temperature"] == 0:
        calls["transformers"] = workers["now"], call | {"transformers": True}
    # Two calls of each warm up.
    texts = {worker.ask(own)["text"] for _ in range(2) for worker, own in calls.values()}
    if call["temperature"] == 0 and len(texts) != 1:
        raise SystemExit(f"{call}: the texts differ")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        # Whoever comes first may find another clock rate.
        for name in sorted(calls, reverse=turn % 2 > 0):
            worker, own = calls[name]
            seconds[name].append(worker.ask(own)["seconds"])
    return seconds


def ratio(others: list[float], now: list[float]) -> float:
    """The median over pairs of turns, in which each came first once."""
    pairs = [slice(turn, turn + 2) for turn in range(0, len(now), 2)]
    return statistics.median(sum(others[pair]) / sum(now[pair]) for pair in pairs)


class Worker:
    """A process with one checkout."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], WORKER]
        paths = os.pathsep.join([str(folder.resolve()), str(Path(__file__).parent)])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, **pipes, env=variables, text=True)
        assert str(folder.resolve()) in self.ask({})["package"]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def answer(args: Any) -> None:
    """Read calls from the standard input, and write the time and the text of each."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr
    import torch_specops
    from torch_specops import SamplingParams, SpeculativeDecoder
    from torch_specops.cli.loading import load_model, load_tokenizer
    from torch_specops.cli.models import PROMPT_LOOKUP
    from torch_specops.drafts import PromptLookup

    target = load_model(args.target, torch.device(args.device)).model
    is_model = args.draft not in ("none", PROMPT_LOOKUP)
    draft = load_model(args.draft, torch.device(args.device)).model if is_model else None
    ids = torch.as_tensor(load_tokenizer(args.target)(PROMPT)["input_ids"]).view(1, -1).to(args.device)
    for model in (target, draft):
        if model is not None:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
    decoders: dict[str, SpeculativeDecoder] = {}
    num_steps = 1

    def with_transformers(prompts: torch.Tensor, count: int) -> Any:
        options = {"attention_mask": torch.ones_like(prompts), "do_sample": False}
        if count > 0:
            if draft is None:
                return target.generate(prompts, max_new_tokens=args.max_new_tokens, prompt_lookup_num_tokens=count)
            constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            draft.generation_config.update(num_assistant_tokens=count, **constant)
            options["assistant_model"] = draft
        return target.generate(prompts, max_new_tokens=args.max_new_tokens, **options)

    def generate(call: dict[str, Any]) -> Any:
        prompts, count = ids.repeat(call["batch"], 1), call["num_draft_tokens"]
        if call.get("transformers"):
            return with_transformers(prompts, count)
        key = json.dumps([call["compiled"], count, call["batch"]])
        if key not in decoders:
            source, most = (PromptLookup() if draft is None else draft, count) if count > 0 else (None, 1)
            decoders[key] = SpeculativeDecoder(
                target, source, num_draft_tokens=most, schedule="constant", compile=call["compiled"]
            )
        options = {"max_new_tokens": args.max_new_tokens, "seed": 1, "eos_token_id": ()}
        sampling = SamplingParams(temperature=call["temperature"])
        output = decoders[key].generate(prompts, sampling=sampling, **options)
        if call["temperature"] > 0:
            nonlocal num_steps
            num_steps = output.stats.num_steps
        return output.sequences

    for line in sys.stdin:
        call, found = json.loads(line), {"package": torch_specops.__file__}
        if call:
            num_steps, started = 1, time.perf_counter()
            text = generate(call).tolist()
            found = {"seconds": (time.perf_counter() - started) / num_steps, "text": str(text)}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
