"""Chen et al. 2023 (arXiv 2302.01318), table 1 and figure 1, on models that are at hand.

    python benchmarks/papers/chen.py [--only quality]

Table 1: the same loop without drafts ("plain") and with K = 4 ("speculative"); quality of both with the confidence
interval of their difference, and time per token at batch 1, in turns.

    topics    XSum's place: SmolLM2-135M-Instruct sums up topics of Python's help (as `wagner_text.py`), by ROUGE-2
    code      HumanEval's place: SmolLM2-135M-Instruct completes short functions (`chen_code.py`), share that passes
    austen    the byte-level pair of the package continues Austen: many texts, and so a narrow interval; ROUGE-1, and
              the mean -log p of the bytes under the law that they should have (nats)

SmolLM2 has no smaller model beside it, so its drafts are looked up in the prompt; austen has a draft model. Laws as in
the paper: greedy; top_p = 0.8 (its XSum); top_p = 0.95 at temperature 0.8 (its HumanEval). Quality is measured on
batches, which changes nothing but the speed.

Figure 1: time for 128 tokens, efficiency = (accepted + 1) / (K + 1), and time per loop, by K.

About 6 minutes on one core; a stopped run goes on where it was. Needs torch_specops[hf,evidence].
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from chen_code import PROBLEMS, Problem, parses, passes, prompt
from evidence import Cell, reproduce
from rouge_score.rouge_scorer import RougeScorer
from subjects import PAIR, draft_source, missing, target
from torch import Tensor
from wagner_text import passages, texts, token_nats

import torch_specops
from torch_specops.cli.loading import SMOLLM2, Tokenizer, load_tokenizer

# Temperature, top_p.
LAWS: dict[str, tuple[float, float]] = {"greedy": (0.0, 1.0), "nucleus": (1.0, 0.8), "nucleus, T = 0.8": (0.8, 0.95)}
METHODS = ("plain", "speculative")
NUM_DRAFT_TOKENS = 4
DRAFTS = {"topics": "prompt lookup", "code": "prompt lookup", "austen": "small model"}
ROWS = [("topics", "greedy"), ("topics", "nucleus"), ("code", "greedy"), ("code", "nucleus, T = 0.8")]
ROWS += [("austen", law) for law in LAWS]
MEASURES = {"topics": ("rouge2", "rouge1"), "code": ("passes", "parses"), "austen": ("rouge1", "nats")}
CURVES = [("austen", "greedy"), ("austen", "nucleus"), ("code", "nucleus, T = 0.8")]
PROMPT_BYTES, REFERENCE_BYTES = 128, 96


@cache
def tokenizer_of(subject: str) -> Tokenizer:
    return load_tokenizer(PAIR / "target" if subject == "austen" else SMOLLM2)


def tasks(subject: str, number: int) -> list[tuple[str, Any]]:
    """Prompts, each with its reference or its problem."""
    if subject == "topics":
        return list(texts("topics", number))
    if subject == "code":
        return [(prompt(problem), problem) for problem in PROBLEMS[:number]]
    return list(passages(number, PROMPT_BYTES, REFERENCE_BYTES, PROMPT_BYTES + REFERENCE_BYTES + 100))


def encoded(subject: str, prompts: Sequence[str], device: str) -> tuple[Tensor, Tensor]:
    """[N, longest] tokens with padding behind them, and the mask."""
    tokenizer = tokenizer_of(subject)
    rows = [torch.tensor(tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"]) for each in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return tokens.to(device), mask.to(device)


def decoder(subject: str, law: str, num_draft_tokens: int, device: str) -> torch_specops.SpeculativeDecoder:
    """A decoder; without drafts if num_draft_tokens is 0."""
    temperature, top_p = LAWS[law]
    return torch_specops.SpeculativeDecoder(
        # `subjects` has SmolLM2 under this name, too.
        target("austen" if subject == "austen" else "code", device).model,
        draft_source(subject, DRAFTS[subject], temperature, device) if num_draft_tokens else None,
        num_draft_tokens=max(num_draft_tokens, 1),
        schedule="constant",
        sampling=torch_specops.SamplingParams(temperature=temperature, top_p=top_p),
        compile=False,
    )


def written(
    subject: str, law: str, method: str, num_prompts: int, num_seeds: int, num_tokens: int, batch: int, device: str
) -> list[tuple[list[int], list[int]]]:
    """Every prompt and its continuation, seed by seed."""
    tokens, mask = encoded(subject, [text for text, _ in tasks(subject, num_prompts)], device)
    own = decoder(subject, law, NUM_DRAFT_TOKENS if method == "speculative" else 0, device)
    found = []
    for seed in range(num_seeds):
        for first in range(0, num_prompts, batch):
            rows = slice(first, first + batch)
            # A method has numbers of its own: what is compared are laws.
            seeds = 10_000 * (2 * seed + METHODS.index(method)) + first + torch.arange(len(tokens[rows]))
            how = {"max_new_tokens": num_tokens, "eos_token_id": () if subject == "austen" else None}
            output = own.generate(tokens[rows], attention_mask=mask[rows], seed=seeds, **how)
            for index in range(len(output.sequences)):
                prompt_length = int(output.prompt_lengths[index])
                found.append((output.sequences[index, :prompt_length].tolist(), output.new_tokens(index)))
    return found


def scores(subject: str, law: str, references: Sequence[Any], found: Sequence[Any], device: str) -> dict[str, Any]:
    """Each measure of every text, in the order of `found`."""
    decoded = [tokenizer_of(subject).decode(new, skip_special_tokens=True) for _, new in found]
    repeated = [*references] * (len(found) // len(references))
    if subject == "code":
        if not passes(Problem("double(x)", "", ("double(2) == 4",)), "\n    return x * 2"):
            raise RuntimeError("code: a right completion does not pass here")
        return {
            name: [float(judge(problem, text)) for problem, text in zip(repeated, decoded, strict=True)]
            for name, judge in (("passes", passes), ("parses", parses))
        }
    names = [name for name in MEASURES[subject] if name.startswith("rouge")]
    scorer = RougeScorer(names, use_stemmer=True)
    rouge = [scorer.score(reference, text) for reference, text in zip(repeated, decoded, strict=True)]
    result = {name: [each[name].fmeasure for each in rouge] for name in names}
    if "nats" in MEASURES[subject]:
        result["nats"] = nats(subject, law, found, device)
    return result


def nats(subject: str, law: str, found: Sequence[tuple[list[int], list[int]]], device: str) -> list[float]:
    """Mean -log p of the new tokens of every text under the target's law at the temperature ("greedy": 1), without the
    filter, under which a token at the edge could have probability 0."""
    temperature = LAWS[law][0] or 1.0
    model = target("austen" if subject == "austen" else "code", device).model
    prompts = [torch.tensor([start], device=device) for start, _ in found]
    rows = [token_nats(model, start, new, temperature) for start, (_, new) in zip(prompts, found, strict=True)]
    return [row.mean().item() for row in rows]


def interval(differences: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """95 percent bootstrap interval of the mean, over prompts."""
    values = torch.tensor(differences, dtype=torch.float64)
    picks = torch.randint(len(values), (resamples, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = torch.quantile(values[picks].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def quality(subject: str, law: str, num_prompts: int, num_seeds: int, device: str, **shape: int) -> dict[str, Any]:
    references = [reference for _, reference in tasks(subject, num_prompts)]
    texts_of, scored = {}, {}
    for method in METHODS:
        found = written(subject, law, method, num_prompts, num_seeds, device=device, **shape)
        texts_of[method] = [new for _, new in found]
        scored[method] = scores(subject, law, references, found, device)
    result: dict[str, Any] = {
        "texts": num_prompts * num_seeds,
        "equal": sum(a == b for a, b in zip(*texts_of.values(), strict=True)),
    }
    for name in MEASURES[subject]:
        # A prompt's mean over seeds; prompts are independent.
        shape = (num_seeds, num_prompts)
        by_prompt = {method: torch.tensor(scored[method][name]).view(shape).mean(0) for method in METHODS}
        differences = (by_prompt["speculative"] - by_prompt["plain"]).tolist()
        result[name] = {method: by_prompt[method].mean().item() for method in METHODS}
        result[name] |= {"difference": statistics.fmean(differences), "interval": interval(differences)}
    return result


def loops(subject: str, law: str, numbers: Sequence[int], rounds: int, **shape: Any) -> dict[str, Any]:
    """Batch 1, every K of `numbers` in turns on each prompt, by K (0 = without drafts).

    The first step reads the prompt, and is left out of the times of tokens and loops.
    """
    num_prompts, num_tokens, device = shape["num_prompts"], shape["num_tokens"], shape["device"]
    rows = [encoded(subject, [text], device)[0] for text, _ in tasks(subject, num_prompts)]
    decoders = {number: decoder(subject, law, number, device) for number in numbers}
    token_seconds, loop_seconds, emitted = ({number: [] for number in numbers} for _ in range(3))
    for number in numbers:
        decoders[number].generate(rows[0], max_new_tokens=8, seed=0, eos_token_id=())
    order = list(numbers)
    for turn in range(rounds):
        for index, row in enumerate(rows):
            for number in order:
                steps: list[Any] = []
                how = {"max_new_tokens": num_tokens, "seed": [1000 * turn + index], "eos_token_id": ()}
                decoders[number].generate(row, streamer=steps.append, **how)
                later = steps[1:]
                seconds = [step.seconds for step in later]
                token_seconds[number].append(sum(seconds) / sum(len(step.tokens[0]) for step in later))
                loop_seconds[number] += seconds
                emitted[number] += [step.num_accepted[0] + 1 for step in steps]
            order = order[1:] + order[:1]
    return {
        str(number): {
            "token_ms": statistics.median(token_seconds[number]) * 1e3,
            **dict(zip(("speed_low", "speed", "speed_high"), quartiles(token_seconds, number), strict=True)),
            "seconds_of_128": 128 * statistics.fmean(token_seconds[number]),
            "seconds_of_128_deviation": 128 * statistics.stdev(token_seconds[number]),
            "loop_ms": statistics.median(loop_seconds[number]) * 1e3,
            "efficiency": statistics.fmean(emitted[number]) / (number + 1),
        }
        for number in numbers
    }


def quartiles(token_seconds: Mapping[int, Sequence[float]], number: int) -> list[float]:
    """Quartiles of the speed over the first number of drafts, text by text."""
    plain = next(iter(token_seconds.values()))
    ratios = torch.tensor([a / b for a, b in zip(plain, token_seconds[number], strict=True)], dtype=torch.float64)
    return ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()


def cells_of(chosen: Any) -> list[Cell]:
    names = ("num_prompts", "num_seeds", "num_tokens", "batch")
    # A greedy text is the same for every seed, so it has one seed.
    written_sizes = {"topics": (8, 2, 24, 8), "code": (16, 2, 32, 8), "austen": (192, 1, REFERENCE_BYTES, 64)}
    timed_sizes = {"topics": (4, 24, 1), "code": (4, 24, 1), "austen": (4, 128, 2)}
    cells = []
    for kind, rows in {"quality": ROWS, "speed": ROWS, "figure 1": CURVES}.items():
        for subject, law in rows:
            settings: dict[str, Any] = {"subject": subject, "law": law, "device": chosen.device}
            if kind == "quality":
                settings |= dict(zip(names, written_sizes[subject], strict=True))
                settings |= {"num_seeds": 1} if law == "greedy" else {}
            else:
                settings |= dict(zip(("num_prompts", "num_tokens", "rounds"), timed_sizes[subject], strict=True))
                settings |= {"numbers": [0, NUM_DRAFT_TOKENS] if kind == "speed" else list(range(8))}
            measure = quality if kind == "quality" else loops
            cells.append(Cell(f"{kind}/{subject}/{law}", measure, settings, missing(subject)))
    return cells


main = partial(reproduce, "chen", __doc__, cells_of, packages=["rouge-score"])

if __name__ == "__main__":
    main()
