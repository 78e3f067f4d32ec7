"""Drafts that are looked up, side by side: accepted length and speed for prompts of several kinds.

    python benchmarks/bench_lookup.py --target smollm2-135m-instruct --threads 2

The prompts are those of `torch-specops bench` and four more. Greedy, one prompt at a time; the drafts take turns.
"suffix lookup, memory" has the outputs of all prompts before; a round begins with an empty memory.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from markdown_table import table
from rich.console import Console
from rich.progress import Progress
from timing import Report, environment, options_of

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.cli.bench import PROMPTS
from torch_specops.cli.models import PROMPT_LOOKUP, encode, load_models
from torch_specops.drafts import DraftSource, PromptLookup, SuffixLookup

MORE_PROMPTS = [
    "Rewrite this sentence in the passive voice, then repeat the original: The committee approved the new budget on "
    "Monday after a long debate about school funding.",
    "Summarize: The library opens at nine. On Mondays it opens at noon. It closes at eight, but on Saturdays at four, "
    "and on Sundays it stays closed. Books can be kept for four weeks, films for one week.",
    "Rename the variable x to total and show the whole function again:\n\ndef mean(values):\n    x = 0\n"
    "    for value in values:\n        x = x + value\n    return x / len(values)\n",
    "Write a Python class for a queue with the methods enqueue, dequeue and is_empty.",
]
MEMORY = "suffix lookup, memory"


def drafts() -> dict[str, DraftSource | None]:
    lookups = {"prompt lookup": PromptLookup(), "suffix lookup": SuffixLookup(memory=0), MEMORY: SuffixLookup()}
    return {"no draft": None, **lookups}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--num-draft-tokens", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS) + len(MORE_PROMPTS), help="the first so many")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    models, tokenizer = load_models(Console(stderr=True), options.target, PROMPT_LOOKUP, torch.device(options.device))
    prompts = [encode(tokenizer, text) for text in (PROMPTS + MORE_PROMPTS)[: options.prompts]]
    decoders = {
        name: SpeculativeDecoder(
            models.target,
            draft,
            num_draft_tokens=options.num_draft_tokens,
            sampling=SamplingParams(temperature=0.0),
            compile=False,
        )
        for name, draft in drafts().items()
    }
    runs: dict[tuple[str, int], list[Any]] = {(name, i): [] for name in decoders for i in range(len(prompts))}
    with Progress(transient=True) as progress:
        for _ in progress.track(range(options.rounds), description="rounds"):
            decoders[MEMORY].draft.forget()
            for i, prompt in enumerate(prompts):
                outputs = {
                    name: decoder.generate(prompt, max_new_tokens=options.new_tokens, eos_token_id=())
                    for name, decoder in decoders.items()
                }
                for name, output in outputs.items():
                    runs[name, i].append(output.stats)
                if len({tuple(output.new_tokens(0)) for output in outputs.values()}) > 1:
                    raise RuntimeError(f"prompt {i}: the greedy outputs differ")
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    report = Report(options.out, environment(torch.device(options.device)), arguments=chosen)
    for (name, i), found in runs.items():
        stats = found[-1]
        seconds = statistics.median(each.seconds for each in found)
        report.add(
            [
                {
                    "draft": name,
                    "prompt": i,
                    "accepted_length": stats.mean_acceptance_length,
                    "drafts_per_step": stats.num_proposed / stats.num_steps,
                    "seconds": seconds,
                    "tokens_per_second": stats.num_tokens / seconds,
                }
            ]
        )
    rows = []
    for name in decoders:
        own = [record for record in report.records if record["draft"] == name]
        total = sum(record["seconds"] for record in own)
        lengths = [record["accepted_length"] for record in own]
        mean = statistics.harmonic_mean(lengths)
        rows.append({"draft": name, "mean": mean, "seconds": total, "each": " ".join(f"{n:.2f}" for n in lengths)})
    print(table("draft | tokens per step | seconds | by prompt", "{draft} | {mean:.3f} | {seconds:.1f} | {each}", rows))
    return report.records


if __name__ == "__main__":
    main()
