"""Mean accepted length of `verify_block` beside that of `verify_exact`, on the same drafts of two models.

    python benchmarks/accepted_length.py
    python benchmarks/accepted_length.py --prompts 2000 --temperature 1.0 0.7 --num-draft-tokens 2 4 6 8 --out out.json
    python benchmarks/accepted_length.py --target DIR --draft DIR --text FILE.txt --device cuda

Prompts are pieces of a held-out text, spread evenly over it. After each one the draft model draws as many tokens as the
largest K, the target scores them in one forward, and both verifiers get these logits and the same uniform numbers, with
`--repeats` different draws of them. A smaller K takes the first K of the same drafts. The decoding loop is not used.

Standard errors are over prompts, each the mean of its repeats; the gain is the mean of their differences.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment, options_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import torch_specops

AUSTEN = Path(str(files("torch_specops") / "data" / "austen_bytes"))
HELDOUT = Path(__file__).parents[1] / "tests" / "data" / "austen_heldout.txt"
VERIFIERS = {"exact": torch_specops.verify_exact, "block": torch_specops.verify_block}


def prompts(tokens: Tensor, count: int, length: int, num_drafts: int) -> Tensor:
    """[count, length] pieces of a text, starting at even distances."""
    room = len(tokens) - length - num_drafts
    if room < count - 1:
        raise ValueError(f"prompts: expected a text of {count + length + num_drafts} tokens or more, got {len(tokens)}")
    starts = torch.linspace(0, room, count).long()
    return tokens[starts.unsqueeze(-1) + torch.arange(length)]


def draw(
    draft: PreTrainedModel, context: Tensor, temperature: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts [B, K], the logits [B, K, V] they were drawn from, and their logsumexp [B, K]."""
    output = draft(input_ids=context, use_cache=True)
    drawn = []
    for i in range(uniforms.shape[1]):
        logits = output.logits[:, -1]
        tokens, lse = torch_specops.sample(logits, uniforms[:, i], temperature)
        drawn.append((tokens, logits, lse))
        if i + 1 < uniforms.shape[1]:
            output = draft(input_ids=tokens.unsqueeze(1), past_key_values=output.past_key_values, use_cache=True)
    tokens, logits, lse = (torch.stack(parts, 1) for parts in zip(*drawn, strict=True))
    return tokens, logits, lse


def accepted(
    target_logits: Tensor,
    drafts: tuple[Tensor, Tensor, Tensor],
    temperature: Tensor,
    seeds: Tensor,
    num_drafts: list[int],
    repeats: int,
) -> dict[int, Tensor]:
    """For each K [2, B]: the mean number of accepted drafts of each verifier."""
    tokens, draft_logits, lse = drafts
    totals = {k: torch.zeros(2, len(tokens), dtype=torch.float64) for k in num_drafts}
    for repeat in range(repeats):
        positions = torch.full_like(seeds, 1 + repeat)
        accept = torch_specops.uniforms(seeds, positions, tokens.shape[1], "accept")
        sample = torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0]
        for k in num_drafts:
            args = (target_logits[:, : k + 1], tokens[:, :k], draft_logits[:, :k], accept[:, :k], sample, temperature)
            lengths = [verify(*args, lse[:, :k])[1].cpu() for verify in VERIFIERS.values()]
            totals[k] += torch.stack(lengths)
    return {k: total / repeats for k, total in totals.items()}


def measure(
    target: PreTrainedModel, draft: PreTrainedModel, contexts: Tensor, options: argparse.Namespace
) -> Iterator[tuple[float, dict[int, Tensor]]]:
    """(temperature, result of `accepted`) for every temperature and batch of prompts."""
    device = torch.device(options.device)
    largest = max(options.num_draft_tokens)
    for t in options.temperature:
        for first in range(0, len(contexts), options.batch):
            context = contexts[first : first + options.batch].to(device)
            seeds = options.seed + torch.arange(first, first + len(context), device=device)
            temperature = torch.full((len(context),), t, device=device)
            propose = torch_specops.uniforms(seeds, torch.zeros_like(seeds), largest, "propose")
            drafts = draw(draft, context, temperature, propose)
            scored = target(input_ids=torch.cat([context, drafts[0]], 1), use_cache=False)
            logits = scored.logits[:, -largest - 1 :]
            yield t, accepted(logits, drafts, temperature, seeds, options.num_draft_tokens, options.repeats)


def record(temperature: float, num_drafts: int, lengths: Tensor) -> dict[str, Any]:
    """The means over prompts of `lengths` [2, prompts], and their standard errors."""
    exact, block = lengths
    result: dict[str, Any] = {"temperature": temperature, "num_draft_tokens": num_drafts}
    for name, values in (("exact", exact), ("block", block), ("gain", block - exact)):
        result |= {name: float(values.mean()), f"{name}_error": float(values.std() / len(values) ** 0.5)}
    # A step also emits its next token.
    return result | {"tokens_per_step_ratio": (1 + result["block"]) / (1 + result["exact"])}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__)
    parser.add_argument("--target", default=str(AUSTEN / "target"), help="directory or hub id; default: the byte model")
    parser.add_argument("--draft", default=str(AUSTEN / "draft"), help="the same, with the same tokens")
    parser.add_argument("--text", type=Path, default=HELDOUT, help="a text that neither model was trained on")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--repeats", type=int, default=16, help="draws of the uniform numbers for each block")
    parser.add_argument("--batch", type=int, default=50, help="prompts at a time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    least = (options.prompts, options.context, options.repeats, options.batch, *options.num_draft_tokens)
    if min(least) < 1 or options.prompts < 2 or min(options.temperature) <= 0:
        parser.error("expected prompts >= 2, temperatures above 0, and every other number >= 1")
    torch.set_num_threads(options.threads)

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name).eval().to(options.device) for name in (options.target, options.draft)
    )
    tokens = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
    contexts = prompts(tokens, options.prompts, options.context, max(options.num_draft_tokens))
    batches = -(-len(contexts) // options.batch) * len(options.temperature)
    lengths: dict[tuple[float, int], list[Tensor]] = {}
    with Progress(transient=True) as progress, torch.inference_mode():
        cells = progress.track(measure(target, draft, contexts, options), total=batches, description="verifying")
        for t, by_k in cells:
            for k, values in by_k.items():
                lengths.setdefault((t, k), []).append(values)
    inputs = {name: getattr(options, name) for name in ("prompts", "context", "repeats", "seed")}
    inputs |= {name: Path(getattr(options, name)).name for name in ("target", "draft", "text")}
    report = Report(options.out, environment(torch.device(options.device)), inputs=inputs)
    report.add(record(t, k, torch.cat(parts, 1)) for (t, k), parts in lengths.items())
    forms = " | ".join(f"{{{name}:.4f}} ± {{{name}_error:.4f}}" for name in ("exact", "block", "gain"))
    line = "{temperature:g} | {num_draft_tokens} | " + forms + " | {tokens_per_step_ratio:.4f}"
    header = "T | K | verify_exact | verify_block | gain | ratio of tokens per step"
    print(table(header, line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
