"""The EAGLE-3 head of the byte-level target beside its draft model: accepted length and speed, greedy and sampled.

    python benchmarks/bench_eagle3.py --threads 2 [--compile] [--out FILE.json]

The prompts are pieces of held-out text, decoded one at a time, or `--batch` together. Drafts take turns in every round;
an accepted length is the mean over all steps of all prompts, a time the median of the rounds.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, options_of

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT, HEADS, load_model, load_tokenizer
from torch_specops.drafts import Eagle3

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 64
TEMPERATURES = (0.0, 1.0)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--head", default=HEADS[AUSTEN])
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/austen_heldout.txt")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--compile", action="store_true", help="compiled steps in place of eager ones")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    target, model = load_model(AUSTEN, device), load_model(AUSTEN_DRAFT, device).model
    text = load_tokenizer(AUSTEN)(options.text.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    prompts = text[: len(text) // options.prompts * options.prompts].view(options.prompts, -1)[:, :PROMPT]

    settings: list[tuple[str, int]] = [("no draft", 0)]
    settings += [(name, count) for count in options.num_draft_tokens for name in ("draft model", "EAGLE-3 head")]
    decoders = {}
    for name, count in settings:
        drafts = {"draft model": model, "EAGLE-3 head": Eagle3.from_pretrained(options.head, target)}
        decoders[name, count] = SpeculativeDecoder(
            target.model, drafts.get(name), num_draft_tokens=max(count, 1), compile=options.compile, max_length=256
        )
    runs: dict[Any, list[list[Any]]] = {(*key, t): [] for key in decoders for t in TEMPERATURES}
    with Progress(transient=True) as progress:
        # The first round compiles, and warms up.
        for _ in progress.track(range(options.rounds + 1), description="rounds"):
            for key, decoder in decoders.items():
                for temperature in TEMPERATURES:
                    sampling = SamplingParams(temperature=temperature)
                    found = [
                        decoder.generate(batch, max_new_tokens=options.new_tokens, sampling=sampling, seed=index)
                        for index, batch in enumerate(prompts.split(options.batch))
                    ]
                    runs[(*key, temperature)].append([output.stats for output in found])
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    report = Report(options.out, environment(device), arguments={name: str(value) for name, value in chosen.items()})
    for (name, count, temperature), rounds in runs.items():
        stats = rounds[-1]
        seconds = statistics.median(sum(each.seconds for each in own) for own in rounds[1:])
        # Steps of the rows, each of which emits one token and what it accepted.
        num_tokens = sum(each.num_tokens for each in stats)
        steps = num_tokens - sum(each.num_accepted for each in stats)
        proposed = sum(each.num_proposed for each in stats)
        record = {
            "draft": name,
            "num_draft_tokens": count,
            "temperature": temperature,
            "acceptance_rate": sum(each.num_accepted for each in stats) / proposed if proposed else None,
            "mean_acceptance_length": num_tokens / steps,
            "tokens_per_second": num_tokens / seconds,
        }
        report.add([record])
    columns = "{temperature} | {draft} | {num_draft_tokens} | {mean_acceptance_length:.2f} | {tokens_per_second:.0f}"
    rows = sorted(report.records, key=lambda record: record["temperature"])
    print(table("temperature | draft | K | tokens per step | tokens/s", columns, rows))
    return report.records


if __name__ == "__main__":
    main()
