"""Drafts side by side: accepted length and speed.

    python benchmarks/bench_drafts.py lookup --threads 2 [--target smollm2-135m-instruct] [--out FILE.json]
    python benchmarks/bench_drafts.py trained --threads 2 [--batch 8] [--compile] [--out FILE.json]
    python benchmarks/bench_drafts.py verify --threads 2 [--target smollm2-135m-instruct] [--out FILE.json]
    python benchmarks/bench_drafts.py else --threads 2 [--target smollm2-135m-instruct] [--batch 8] [--out FILE.json]
    python benchmarks/bench_drafts.py else --threads 2 --schedule auto [--batch 8] [--out FILE.json]

lookup    drafts that are looked up in the text, greedy. The prompts are those of `torch-specops bench` and four more.
          "suffix lookup, memory" has the outputs of all prompts before; a round begins with an empty memory
trained   the drafts of the byte-level target: its MTP layer, EAGLE-3 head and draft model, and prompt lookup beside
          them, at temperatures 0 and 1. The prompts are pieces of held-out text
verify    a model draft verified by "exact", "block" and "gumbel", at temperatures 0.7 and 1, with top-p 0.9: of the
          byte-level target its draft model, of another target an int8 copy. `alpha` is the mean acceptance rate that
          exact verification and the coupling have by their formulas, over the new tokens of the texts
else      a lookup (K = 10), other drafts (K = 4), and `LookupElse` of both, at temperatures 0 and 1: of the byte-level
          target the draft model and the EAGLE-3 head, of another target an int8 copy. The prompts are code to edit, a
          story to begin, and a passage to write again; a batch has one of them several times. `--schedule auto`
          verifies by "gumbel", so that all drafts make the same texts

The drafts take turns. The first round compiles and warms up; times are medians of the others. Tokens per step are those
of a row, over all steps; `by_prompt` and `seconds_by_prompt` are those of every call.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markdown_table import table
from rich.console import Console
from rich.progress import Progress
from timing import Report, environment, options_of, settings_of
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder, analysis, filter_logits
from torch_specops.cli.bench import PROMPTS
from torch_specops.cli.loading import AUSTEN, AUSTEN_DRAFT, HEADS, load_model, load_tokenizer
from torch_specops.cli.models import PROMPT_LOOKUP, encode, load_models
from torch_specops.decode import GenerationStats
from torch_specops.drafts import MTP, Eagle3, LookupElse, PromptLookup, SuffixLookup, quantised_copy
from torch_specops.hf import TransformersModel

HELDOUT = Path(__file__).resolve().parents[1] / "tests" / "data" / "austen_heldout.txt"
MORE_PROMPTS = [
    "Rewrite this sentence in the passive voice, then repeat the original: The committee approved the new budget on "
    "Monday after a long debate about school funding.",
    "Summarize: The library opens at nine. On Mondays it opens at noon. It closes at eight, but on Saturdays at four, "
    "and on Sundays it stays closed. Books can be kept for four weeks, films for one week.",
    "Rename the variable x to total and show the whole function again:\n\ndef mean(values):\n    x = 0\n"
    "    for value in values:\n        x = x + value\n    return x / len(values)\n",
    "Write a Python class for a queue with the methods enqueue, dequeue and is_empty.",
]
# Bytes of a prompt that is cut from a text.
PROMPT_LENGTH = 64


class Subject(NamedTuple):
    """What is compared: drafts of one target, each made anew for a decoder, on prompts [B, P]."""

    target: TransformersModel
    drafts: dict[str, Callable[[], Any]]
    prompts: list[Tensor]
    temperatures: tuple[float, ...]
    num_draft_tokens: list[int] | dict[str, int]
    modes: tuple[str | None, ...] = (None,)
    top_p: float = 1.0


def lookup(options: argparse.Namespace, device: torch.device) -> Subject:
    models, tokenizer = load_models(Console(stderr=True), options.target, PROMPT_LOOKUP, device)
    prompts = [encode(tokenizer, text).to(device) for text in (PROMPTS + MORE_PROMPTS)[: options.prompts]]
    drafts = {"prompt lookup": PromptLookup, "suffix lookup": lambda: SuffixLookup(memory=0)}
    return Subject(models.target, drafts | {"suffix lookup, memory": SuffixLookup}, prompts, (0.0,), [10])


def trained(options: argparse.Namespace, device: torch.device) -> Subject:
    target, model = load_model(AUSTEN, device), load_model(AUSTEN_DRAFT, device).model
    text = load_tokenizer(AUSTEN)(HELDOUT.read_text(), return_tensors="pt", verbose=False)["input_ids"][0]
    pieces = text.to(device)[: len(text) // options.prompts * options.prompts].view(options.prompts, -1)
    drafts = {
        "MTP layer": lambda: MTP.from_pretrained(target, options.mtp),
        "EAGLE-3 head": lambda: Eagle3.from_pretrained(options.eagle3 or HEADS[AUSTEN], target),
        "draft model": lambda: model,
        "prompt lookup": PromptLookup,
    }
    return Subject(target, drafts, list(pieces[:, :PROMPT_LENGTH].split(options.batch)), (0.0, 1.0), [2, 4, 6])


def verify(options: argparse.Namespace, device: torch.device) -> Subject:
    if options.target == AUSTEN:
        model = load_model(AUSTEN_DRAFT, device).model
        own = trained(options, device)._replace(drafts={"draft model": lambda: model})
    else:
        own = lookup(options, device)
        copy = quantised_copy(own.target.model)
        own = own._replace(drafts={"int8 copy": lambda: copy})
    return own._replace(temperatures=(0.7, 1.0), num_draft_tokens=[4], modes=("exact", "block", "gumbel"), top_p=0.9)


def lookup_else(options: argparse.Namespace, device: torch.device) -> Subject:
    models, tokenizer = load_models(Console(stderr=True), options.target, PROMPT_LOOKUP, device)
    passage = HELDOUT.read_text()[:400]
    texts = [PROMPTS[0], PROMPTS[-1], f"Write this passage again:\n\n{passage}\n\nHere it is again:\n\n{passage[:60]}"]
    prompts = [encode(tokenizer, text).to(device).expand(options.batch, -1) for text in texts]
    if options.target == AUSTEN:
        model, longest = load_model(AUSTEN_DRAFT, device).model, 8
        others = {
            "draft model": lambda: model,
            "EAGLE-3 head": lambda: Eagle3.from_pretrained(HEADS[AUSTEN], models.target),
        }
    else:
        copy, longest = quantised_copy(models.target.model), 4
        others = {"int8 copy": lambda: copy}
    drafts: dict[str, Callable[[], Any]] = {"lookup": lambda: PromptLookup(longest, longest), **others}
    for name, other in others.items():
        drafts[f"lookup else {name}"] = lambda other=other: LookupElse(other(), min_match=longest, num_other_tokens=4)
    counts = {name: 4 if name in others else 10 for name in drafts}
    modes = ("gumbel" if options.schedule == "auto" else None,)
    return Subject(models.target, drafts, prompts, (0.0, 1.0), counts, modes)


@torch.no_grad()
def acceptance_rates(
    target: Any, draft: Any, texts: list[tuple[Tensor, int]], temperature: float, top_p: float
) -> dict[str, float]:
    """By formula, the mean over the tokens of texts [1, L] behind their prompts."""
    rates: dict[str, list[Tensor]] = {"exact": [], "gumbel": []}
    for text, start in texts:
        rows = []
        for model in (target, draft):
            logits = model(text).logits[0, start - 1 : -1].float()
            rows.append(filter_logits(logits, temperature, top_p=top_p))
        rates["exact"].append(analysis.acceptance_probability(*rows, temperature))
        rates["gumbel"].append(analysis.coupled_acceptance_probability(*rows, temperature))
    return {name: float(torch.cat(found).mean()) for name, found in rates.items()}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("kind", choices=["lookup", "trained", "verify", "else"])
    parser.add_argument("--target", help="default: smollm2-135m-instruct for lookup, austen-bytes for verify and else")
    parser.add_argument("--eagle3", help="a folder, of trained; default: the head in the package")
    parser.add_argument("--mtp", help="a folder, of trained; default: the target's")
    parser.add_argument("--prompts", type=int, default=16, help="at most 12 for lookup")
    parser.add_argument("--batch", type=int, default=1, help="prompts of trained and else that are decoded together")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", help="default: 10 for lookup, 2 4 6 for trained")
    parser.add_argument("--schedule", choices=["constant", "auto"], default="constant")
    parser.add_argument("--compile", action="store_true", help="compiled steps in place of eager ones")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    options.target = options.target or (AUSTEN if options.kind in ("verify", "else") else "smollm2-135m-instruct")
    kinds = {"lookup": lookup, "trained": trained, "verify": verify, "else": lookup_else}
    subject = kinds[options.kind](options, device)
    max_length = max(prompt.shape[1] for prompt in subject.prompts) + options.new_tokens
    counts = options.num_draft_tokens or subject.num_draft_tokens
    decoders = {}
    pairs = (
        counts.items() if isinstance(counts, dict) else [(name, count) for count in counts for name in subject.drafts]
    )
    ways = [(name, count, mode) for name, count in pairs for mode in subject.modes]
    for name, count, mode in [("no draft", 0, None), *ways]:
        draft = subject.drafts[name]() if count else None
        how = {"num_draft_tokens": max(count, 1), "schedule": options.schedule}
        how |= {"compile": options.compile, "max_length": max_length}
        decoders[name, count, mode] = SpeculativeDecoder(subject.target.model, draft, verify=mode, **how)
    # Of every round, the statistics for each batch of prompts.
    runs: dict[tuple[str, int, str | None, float], list[list[GenerationStats]]] = {}
    sampled: dict[float, list[tuple[Tensor, int]]] = {temperature: [] for temperature in subject.temperatures}
    with Progress(transient=True) as progress:
        for number_of_round in progress.track(range(options.rounds + 1), description="rounds"):
            for temperature in subject.temperatures:
                sampling = SamplingParams(temperature=temperature, top_p=subject.top_p)
                for key, decoder in decoders.items():
                    if isinstance(decoder.draft, SuffixLookup):
                        decoder.draft.forget()
                    runs.setdefault((*key, temperature), []).append([])
                for number, prompt in enumerate(subject.prompts):
                    how = {"max_new_tokens": options.new_tokens, "seed": number, "eos_token_id": ()}
                    texts = set()
                    for key, decoder in decoders.items():
                        output = decoder.generate(prompt, sampling=sampling, **how)
                        runs[(*key, temperature)][-1].append(output.stats)
                        texts.add(tuple(output.sequences.flatten().tolist()))
                        if number_of_round == 0 and key[2] == "exact":
                            sampled[temperature] += [(row[None], prompt.shape[1]) for row in output.sequences]
                    if options.kind in ("lookup", "else") and temperature == 0 and len(texts) > 1:
                        raise RuntimeError(f"prompts {number}: the greedy outputs differ")
    report = Report(options.out, environment(device), arguments=settings_of(options))
    fields = ("num_tokens", "num_accepted", "num_proposed", "num_row_steps")
    if options.kind == "verify":
        ((_, model),) = ((name, build()) for name, build in subject.drafts.items())
        rates = {t: acceptance_rates(subject.target.model, model, sampled[t], t, subject.top_p) for t in sampled}
    for (name, count, mode, temperature), rounds in runs.items():
        num_tokens, accepted, proposed, steps = (sum(getattr(each, field) for each in rounds[-1]) for field in fields)
        seconds = statistics.median(sum(each.seconds for each in own) for own in rounds[1:])
        record = {"draft": name, "num_draft_tokens": count, "temperature": temperature}
        if options.kind == "verify":
            record |= {"verify": rounds[-1][0].verify, "alpha": rates[temperature].get(mode or "")}
        record |= {"acceptance_rate": accepted / proposed if proposed else None, "drafts_per_step": proposed / steps}
        record |= {"mean_acceptance_length": num_tokens / steps}
        record |= {"by_prompt": [each.mean_acceptance_length for each in rounds[-1]]}
        calls = zip(*rounds[1:], strict=True)
        record |= {"seconds_by_prompt": [statistics.median(each.seconds for each in call) for call in calls]}
        report.add([record | {"seconds": seconds, "tokens_per_second": num_tokens / seconds}])
    line = "{temperature} | {draft} | {num_draft_tokens} | {mean_acceptance_length:.2f} | {tokens_per_second:.0f}"
    heads = "temperature | draft | K | tokens per step | tokens/s"
    if options.kind == "verify":
        heads, line = f"{heads} | verify | alpha", line + " | {verify} | {alpha}"
    print(table(heads, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
