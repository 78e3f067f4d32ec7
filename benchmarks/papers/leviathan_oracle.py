"""Leviathan et al. 2023 (arXiv 2211.17192), section 3.5 and section 6: what an oracle for gamma would gain, measured on
traces of acceptances; and a draft model that is itself accelerated by a cheaper draft.

    python benchmarks/papers/leviathan_oracle.py

A trace says of every position of a text that the target wrote whether the draft would have been accepted there. It is
exact: given that token y was emitted, a draft was accepted with probability min(1, q(y) / p(y)), whatever the steps
were, so that one coin per position gives a trace with the law of the decoding loop's. A cell checks that against the
loop. On a trace every choice of K can be tried at any cost ratio, and the best one in hindsight is a shortest path.

About 3 minutes on one core; a stopped run continues where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from evidence import Cell, figure, reproduce
from subjects import (
    continuations,
    draft_law,
    draft_source,
    missing,
    prompts,
    sizes,
    small_model,
    table,
    target,
    target_logits,
)
from torch import Tensor

import torch_specops
from torch_specops import analysis
from torch_specops.drafts import ModelDraft
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.hf import TransformersModel
from torch_specops.schedules import Constant, Heuristic, Optimal, Schedule

COSTS = (0.01, 0.02, 0.05, 0.1, 0.2)
MOST = 40
TRACES = {"austen": ("bigram", "small model", "early exit 6"), "code": ("prompt lookup", "early exit 25")}
WRITTEN = {"austen": (16, 64, 640), "code": (8, 64, 64)}


def trace(
    subject: str, draft: str, temperature: float, prompt_length: int, written: list[list[int]], device: str, **_: int
) -> list[str]:
    """Per sequence one character per position: 1 if the draft was accepted, 0 if it was not or if there was none."""
    text = torch.tensor(written, device=device)
    tokens = text[:, prompt_length:].flatten()
    q_logits, q_tokens = draft_law(subject, draft, text, prompt_length, temperature)
    if q_logits is None:
        # One-hot: the residual leaves the draft out, so it was emitted if and only if it was accepted.
        assert q_tokens is not None
        accepted = q_tokens == tokens
    else:
        p_logits = target_logits(subject, text, prompt_length)
        # With p and q in each other's place: min(1, q(y) / p(y)).
        chance = [
            analysis.token_acceptance_probability(q_logits[rows], tokens[rows], p_logits[rows], temperature)
            for rows in torch.arange(len(tokens)).split(64)
        ]
        generator = torch.Generator(device=device).manual_seed(0)
        accepted = torch.rand(len(tokens), generator=generator, dtype=torch.float64) < torch.cat(chance).cpu()
    return ["".join(map(str, row)) for row in accepted.long().view(len(text), -1).tolist()]


def runs(row: str) -> list[int]:
    """For every position, how many drafts from there on are accepted in a row. The last position is never drafted: it
    is the next token of the last step."""
    lengths = [0] * len(row)
    for position in range(len(row) - 2, -1, -1):
        lengths[position] = lengths[position + 1] + 1 if row[position] == "1" else 0
    return lengths


def decoded(rows: Sequence[str], schedule: Schedule, cost: float) -> float:
    """Speed over decoding without drafts: tokens / (1 + c K per step)."""
    spent = 0.0
    for row in rows:
        accepted = runs(row)
        schedule.reset()
        position, count = 0, schedule.first()
        while position < len(row):
            proposed = min(count, len(row) - position - 1)
            kept = min(proposed, accepted[position])
            spent += 1 + cost * proposed
            position += kept + 1
            count = schedule.next([proposed], [kept])
    return sum(map(len, rows)) / spent


def in_hindsight(rows: Sequence[str], cost: float) -> float:
    """The speed with the best choice of K in every step, which is a shortest path through the text."""
    spent = 0.0
    for row in rows:
        cheapest = [0.0] * (len(row) + 1)
        for position, most in reversed(list(enumerate(runs(row)))):
            cheapest[position] = min(1 + cost * count + cheapest[position + count + 1] for count in range(most + 1))
        spent += cheapest[0]
    return sum(map(len, rows)) / spent


def percentiles(found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """By temperature and K, the time of 128 tokens over that without drafts: its mean, deviation, P90 and P99 over the
    texts that the small model's traces are cut into, at the cost ratio 1/8 of Chen et al. 2023."""
    for temperature in (0.0, 1.0):
        rows = found[f"trace/austen/small model/T={temperature}"]
        texts = [row[start : start + 128] for row in rows for start in range(0, len(row) - 127, 128)]
        for count in range(8):
            times = torch.tensor([1 / decoded([text], Constant(count), 1 / 8) for text in texts], dtype=torch.float64)
            p90, p99 = times.quantile(torch.tensor([0.9, 0.99], dtype=torch.float64)).tolist()
            values = {"mean": times.mean().item(), "deviation": times.std().item(), "p90": p90, "p99": p99}
            yield {"T": f"{temperature:.0f}", "K": count, "texts": len(texts)} | values


def policies(rows: Sequence[str], costs: Sequence[float], **_: Any) -> dict[str, Any]:
    bits = torch.tensor([[float(bit) for bit in row] for row in rows], dtype=torch.float64)
    alpha = bits.mean().item()
    # How much more often an acceptance follows an acceptance than a rejection; 0 if they were independent.
    follows = bits[:, 1:][bits[:, :-1] == 1].mean() - bits[:, 1:][bits[:, :-1] == 0].mean()
    result: dict[str, Any] = {"alpha": alpha, "follows": follows.item(), "costs": []}
    for cost in costs:
        constants = [decoded(rows, Constant(count), cost) for count in range(MOST + 1)]
        best = analysis.optimal_num_draft_tokens(alpha, cost)
        result["costs"].append(
            {
                "cost_ratio": cost,
                "constant": max(constants),
                "constant_k": constants.index(max(constants)),
                "constant_5": constants[5],
                "heuristic": decoded(rows, Heuristic(), cost),
                "optimal": decoded(rows, Optimal(cost), cost),
                "oracle": in_hindsight(rows, cost),
                "formula_constant": analysis.walltime_factor(alpha, cost, best).item(),
                "formula_k": best.item(),
                "formula_oracle": analysis.oracle_walltime_factor(alpha, cost).item(),
            }
        )
    return result


def against_the_loop(
    rows: Sequence[str], draft: str, temperature: float, num_draft_tokens: int, device: str, **size: int
) -> dict[str, float]:
    """Mean acceptance length: on the trace, and in the loop from the same prompts with other random numbers."""
    source = draft_source("austen", draft, temperature, device)
    sampling, model = torch_specops.SamplingParams(temperature=temperature), target("austen", device).model
    decoder = torch_specops.SpeculativeDecoder(model, source, num_draft_tokens=num_draft_tokens, sampling=sampling)
    input_ids = prompts("austen", size["num_prompts"], size["prompt_length"]).to(device)
    seeds = 7 + torch.arange(len(input_ids))
    stats = decoder.generate(input_ids, max_new_tokens=size["num_tokens"], seed=seeds, eos_token_id=()).stats
    return {"trace": decoded(rows, Constant(num_draft_tokens), 0.0), "loop": stats.mean_acceptance_length}


class Counted(TransformersModel):
    """Counts its forwards."""

    forwards = 0

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        self.forwards += 1
        return super().forward(tokens, positions, num_logits)


def hierarchical(
    temperature: float, num_draft_tokens: int, num_prompts: int, prompt_length: int, num_tokens: int, device: str
) -> list[dict[str, Any]]:
    """The byte-level pair, in turns: its small model drafts alone, and is itself accelerated by cheaper drafts."""
    counted = table("austen", 3, device, sampled=False)
    makers: dict[str, Callable[[Counted], ModelDraft]] = {
        "alone": ModelDraft,
        "with prompt lookup": lambda model: HierarchicalDraft(model, num_forwards=num_draft_tokens),
        "with a trigram table": lambda model: HierarchicalDraft(model, counted, num_forwards=num_draft_tokens),
        "with a trigram table, at most 2 forwards": lambda model: HierarchicalDraft(model, counted, num_forwards=2),
    }
    models = {name: Counted(small_model(device).model) for name in makers}
    sampling = torch_specops.SamplingParams(temperature=temperature)
    how: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "sampling": sampling}
    big = target("austen", device).model
    decoders = {name: torch_specops.SpeculativeDecoder(big, make(models[name]), **how) for name, make in makers.items()}
    rows = prompts("austen", num_prompts, prompt_length).to(device).split(1)
    results: dict[str, dict[str, Any]] = {name: {"draft": name, "seconds": []} for name in makers}
    for turn in range(4):
        names = list(makers)
        for name in names[turn:] + names[:turn]:
            models[name].forwards, stats = 0, []
            started = time.perf_counter()
            for index, row in enumerate(rows):
                output = decoders[name].generate(row, max_new_tokens=num_tokens, seed=[index], eos_token_id=())
                stats.append(output.stats)
            results[name]["seconds"].append(time.perf_counter() - started)
            steps = sum(each.num_steps for each in stats)
            drafts = sum(each.num_proposed for each in stats)
            results[name] |= {
                "mean_acceptance_length": num_prompts * num_tokens / steps,
                "drafts_per_step": drafts / steps,
                # The prompts are read by a forward each.
                "draft_forwards_per_step": (models[name].forwards - num_prompts) / steps,
                "acceptance_rate": sum(each.num_accepted for each in stats) / drafts,
            }
    return list(results.values())


def cells_of(chosen: Any) -> list[Cell]:
    def add(key: str, measure: Callable[..., Any], settings: dict[str, Any], **reads: str) -> None:
        lacking = missing(settings.get("subject", "austen"))
        own = measure if measure is policies else partial(measure, device=chosen.device)
        cells.append(Cell(key, own, settings, lacking, reads))

    cells: list[Cell] = []
    for subject, drafts in TRACES.items():
        for temperature in (0.0, 1.0):
            common = {"subject": subject, "temperature": temperature} | sizes(WRITTEN[subject])
            text = f"text/{subject}/T={temperature}"
            add(text, continuations, common)
            for draft in drafts:
                name, settings = f"{subject}/{draft}/T={temperature}", common | {"draft": draft}
                add(f"trace/{name}", trace, settings, written=text)
                add(f"policies/{name}", policies, settings | {"costs": COSTS}, rows=f"trace/{name}")
    for temperature in (0.0, 1.0):
        settings = {"draft": "small model", "temperature": temperature, "num_draft_tokens": 5}
        rows = f"trace/austen/small model/T={temperature}"
        add(f"check/T={temperature}", against_the_loop, settings | sizes(WRITTEN["austen"]), rows=rows)
        settings = {"temperature": temperature, "num_draft_tokens": 6} | sizes((4, 64, 96))
        add(f"hierarchical/T={temperature}", hierarchical, settings)
    return cells


def draw(found: dict[str, Any]) -> None:
    shown = [("austen", "small model", 1.0), ("austen", "bigram", 1.0), ("code", "prompt lookup", 0.0)]
    names = {"oracle": "oracle in hindsight", "constant": "best constant"}
    names |= {"optimal": "optimal schedule", "heuristic": "heuristic"}
    with figure("leviathan_oracle", len(shown), (9, 3.2)) as axes:
        for axis, (subject, draft, temperature) in zip(axes, shown, strict=True):
            rows = found[f"policies/{subject}/{draft}/T={temperature}"]["costs"]
            costs = [row["cost_ratio"] for row in rows]
            for index, (name, label) in enumerate(names.items()):
                axis.plot(costs, [row[name] for row in rows], "o-", markersize=3, color=f"C{index}", label=label)
            for index, name in enumerate(("formula_oracle", "formula_constant")):
                axis.plot(costs, [row[name] for row in rows], "--", linewidth=1, color=f"C{index}")
            axis.set(xscale="log", xlabel="cost ratio c")
            axis.set_title(f"{subject}, {draft}, T = {temperature:.0f}", fontsize="medium")
        axes[0].set_ylabel("speed; dashed: formulas")
        axes[0].legend(fontsize="x-small")


main = partial(reproduce, "leviathan_oracle", __doc__, cells_of, draw=draw)

if __name__ == "__main__":
    main()
