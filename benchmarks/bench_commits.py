"""Calls of `generate` beside those of another checkout of the package, and beside transformers.

    git worktree add ../before HEAD~1
    python benchmarks/bench_commits.py --before ../before --threads 2 --out FILE.json
    python benchmarks/bench_commits.py --before ../before --target smollm2-135m-instruct --draft none --compiled no

Greedy and sampled calls of every batch size and number of drafts, prompts of one length, no eos. Each checkout has a
process of its own, and they take turns call by call. Times are of whole calls, reading the prompts included. The greedy
texts of both checkouts and of transformers must be the same.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from markdown_table import grid
from rich.console import Console
from timing import Report, environment, options_of

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune must be in want of"
# A process that imports the package from the folder it is told, and then answers each line with a time.
WORKER = "--worker"


def main() -> None:
    parser = options_of(__doc__, rounds=7)
    parser.add_argument("--before", type=Path, help="the other checkout; required")
    parser.add_argument("--target", default="austen-bytes", help="as torch-specops bench takes it")
    parser.add_argument("--draft", default="austen-bytes-draft", help="as there, or none")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--compiled", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument(WORKER, action="store_true", help="answer the questions of another process")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.worker:
        answer(args)
        return
    if args.before is None:
        parser.error("--before is required")
    console = Console(highlight=False)
    options = {name: value for name, value in vars(args).items() if name not in ("before", "out", "worker")}
    report = Report(args.out, environment(torch.device(args.device)), options=options)
    folders = {"before": args.before, "now": Path(__file__).parents[1]}
    counts = [0, *(args.num_draft_tokens if args.draft != "none" else [])]
    rows = []
    for compiled in args.compiled:
        workers = {name: Worker(folder, args.threads) for name, folder in folders.items()}
        for batch, count, temperature in product(args.batch, counts, [0.0, 1.0]):
            call = {
                "compiled": compiled == "yes",
                "batch": batch,
                "num_draft_tokens": count,
                "temperature": temperature,
            }
            makers: dict[str, Callable[[], float]] = {name: worker.prepare(call) for name, worker in workers.items()}
            if compiled == "no" and batch == 1 and temperature == 0:
                makers["transformers"] = workers["now"].prepare(call | {"transformers": True})
            seconds: dict[str, list[float]] = {name: [] for name in makers}
            for turn in range(args.rounds):
                # Whoever comes first may find another clock rate.
                for name in sorted(makers, reverse=turn % 2 > 0):
                    seconds[name].append(makers[name]())
            texts = {worker.texts[json.dumps(call)] for worker in workers.values()} if temperature == 0 else {""}
            if len(texts) != 1:
                raise SystemExit(f"{call}: the texts differ")
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            ratio = statistics.median(b / n for b, n in zip(seconds["before"], seconds["now"], strict=True))
            report.add([call | {"seconds": seconds, "before_over_now": ratio}])
            rows.append([f"{value}" for value in call.values()] + [f"{1e3 * medians[name]:.1f}" for name in folders])
            rows[-1] += [f"{ratio:.3f}", f"{medians['transformers'] / medians['now']:.2f}" if len(medians) > 2 else ""]
            console.print(call, {name: round(1e3 * value, 1) for name, value in medians.items()}, f"{ratio:.3f}")
        for worker in workers.values():
            worker.end()
    names = ["compiled", "B", "K", "T", "before, ms", "now, ms", "before / now", "transformers / now"]
    console.print(grid(names, rows, padded=True), soft_wrap=True)


class Worker:
    """A process with one checkout."""

    def __init__(self, folder: Path, threads: int) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], WORKER]
        paths = [str(folder.resolve()), str(Path(__file__).parent)]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=variables, text=True
        )
        self.texts: dict[str, str] = {}
        assert str(folder.resolve()) in self._ask({})["package"]

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def prepare(self, call: dict[str, Any]) -> Callable[[], float]:
        """Two calls that warm up; returns the function that times one more."""
        for _ in range(2):
            found = self._ask(call)["text"]
        if not call.get("transformers"):
            self.texts[json.dumps(call)] = found
        elif found != self.texts[json.dumps({key: value for key, value in call.items() if key != "transformers"})]:
            raise SystemExit(f"{call}: transformers gives another text")
        return lambda: float(self._ask(call)["seconds"])

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

    target = load_model(args.target, torch.device(args.device)).model
    draft = None if args.draft == "none" else load_model(args.draft, torch.device(args.device)).model
    ids = torch.as_tensor(load_tokenizer(args.target)(PROMPT)["input_ids"]).view(1, -1).to(args.device)
    for model in (target, draft):
        if model is not None:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
    decoders: dict[str, SpeculativeDecoder] = {}

    def generate(call: dict[str, Any]) -> Sequence[Sequence[int]]:
        prompts, count = ids.repeat(call["batch"], 1), call["num_draft_tokens"]
        if call.get("transformers"):
            mask, options = torch.ones_like(prompts), {}
            if count > 0:
                assert draft is not None
                draft.generation_config.update(
                    num_assistant_tokens=count,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )
                options = {"assistant_model": draft}
            found = target.generate(
                prompts, attention_mask=mask, max_new_tokens=args.max_new_tokens, do_sample=False, **options
            )
            return found.tolist()
        key = json.dumps([call["compiled"], count, call["batch"]])
        if key not in decoders:
            source, most = (draft, count) if count > 0 else (None, 1)
            decoders[key] = SpeculativeDecoder(target, source, num_draft_tokens=most, compile=call["compiled"])
        sampling = SamplingParams(temperature=call["temperature"])
        output = decoders[key].generate(
            prompts, max_new_tokens=args.max_new_tokens, sampling=sampling, seed=1, eos_token_id=()
        )
        return output.sequences.tolist()

    for line in sys.stdin:
        call = json.loads(line)
        if not call:
            print(json.dumps({"package": torch_specops.__file__}), file=answers, flush=True)
            continue
        started = time.perf_counter()
        text = generate(call)
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "text": str(text)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
