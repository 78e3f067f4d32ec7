"""Leviathan et al. 2023 (arXiv 2211.17192), tables 2 to 5, on models that are at hand.

    python benchmarks/papers/leviathan_measured.py [--only alpha/austen]

Tables 3 and 5: alpha on text that the target wrote itself, as the paper has it (section 4.2), once by the formula,
E sum min(p / l, q), and once by drawing drafts and verifying them with the op. Tables 2 and 4: the speed of the
decoding loop over the same loop without drafts, in turns, beside theorem 3.8 with the measured alpha and c. Appendix
A.2: how often one round of rejection sampling would accept, on the same text.

A stopped run continues where it was. About 6 minutes on one core. `subjects.py` has the models that are measured in the
place of the paper's T5 and LaMDA.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from evidence import Cell, reproduce
from subjects import continuations, draft_law, draft_source, missing, prompts, read, sizes, target
from timing import synchronize
from torch import Tensor
from wagner_laws import lenient_law, total_variation

import torch_specops
from torch_specops import analysis
from torch_specops.drafts import DraftSource
from torch_specops.hf import TransformersModel

LENIENCES = (1.0, 0.5, 0.3, 0.1)
TEMPERATURES = (0.0, 1.0)
SMOLLM2_DRAFTS = ("unigram", "bigram", "prompt lookup", "early exit 10", "early exit 20", "early exit 25")
DRAFTS = {
    "austen": ("unigram", "bigram", "trigram", "prompt lookup", "small model", "early exit 2", "early exit 6"),
    "prose": SMOLLM2_DRAFTS,
    "code": SMOLLM2_DRAFTS,
}
# Draft, K. The baseline without drafts runs beside them.
PROVIDERS = {
    "austen": [*(["small model", count] for count in (1, 3, 5, 7)), ["bigram", 3], ["early exit 6", 3]],
    "code": [["prompt lookup", 3], ["prompt lookup", 10], ["bigram", 3], ["early exit 25", 3]],
}
WRITTEN = {"austen": (16, 64, 640), "prose": (8, 64, 64), "code": (8, 64, 64)}
TIMED = {"austen": (4, 64, 96), "code": (1, 64, 48)}
# Rows of [V] float64 that are looked at together.
CHUNK = 16


def alpha(
    subject: str,
    draft: str,
    temperature: float,
    leniences: Sequence[float],
    drawn: Sequence[float],
    prompt_length: int,
    written: list[list[int]],
    device: str,
    **_: int,
) -> dict[str, Any]:
    """Acceptance at every position behind the prompts, for each lenience.

    Returns:
        by lenience: alpha; its standard error over sequences (positions of one are not independent); for the leniences
        in `drawn`, alpha as `verify_exact` accepts drafts that were drawn; and the mean total variation between the
        emitted law and p. `drafted`: the share of positions that the draft has a token for.
    """
    text = torch.tensor(written, device=device)
    p_logits = logits_of_the_target(subject, temperature, prompt_length, text)
    q_logits, q_tokens = draft_law(subject, draft, text, prompt_length, temperature)
    generator = torch.Generator(device=device).manual_seed(0)
    temperatures = torch.full((len(p_logits),), temperature, device=device)
    expected: dict[float, list[Tensor]] = {each: [] for each in leniences}
    accepted: dict[float, list[Tensor]] = {each: [] for each in drawn}
    distance: dict[float, list[Tensor]] = {each: [] for each in leniences}
    for rows in torch.arange(len(p_logits)).split(CHUNK):
        p, t = p_logits[rows], temperatures[rows]
        q = None if q_logits is None else q_logits[rows]
        own_tokens = None if q_tokens is None else q_tokens[rows]
        laws = () if q is None or temperature == 0 else tuple(x.double().div(temperature).softmax(-1) for x in (p, q))
        for each in leniences:
            lenient = {"lenience" if temperature > 0 else "argmax_lenience": each}
            if q is None:
                rate = analysis.token_acceptance_probability(p, own_tokens, None, temperature, **lenient)
            else:
                rate = analysis.acceptance_probability(p, q, temperature, **lenient)
            expected[each].append(rate)
            if laws:
                distance[each].append(total_variation(lenient_law(*laws, each)[0], laws[0]))
        for each in drawn:
            draws = torch.rand(3, len(rows), generator=generator, device=device)
            lenient = {"lenience" if temperature > 0 else "argmax_lenience": each}
            tokens, lse = (own_tokens, None) if q is None else torch_specops.sample(q, draws[0], t)
            drafts = [None if x is None else x.unsqueeze(1) for x in (tokens, q, draws[1], lse)]
            twice = p.unsqueeze(1).expand(-1, 2, -1)
            kept = torch_specops.verify_exact(twice, *drafts[:3], draws[2], t, drafts[3], **lenient)[1]
            accepted[each].append(kept.double())
    result: dict[str, Any] = {"positions": len(p_logits), "drafted": 1.0}
    if q_tokens is not None:
        result["drafted"] = (q_tokens >= 0).double().mean().item()
    for each in leniences:
        by_sequence = torch.cat(expected[each]).view(len(written), -1).mean(1)
        result[str(each)] = {
            "alpha": rounded(by_sequence.mean()),
            "standard_error": rounded(by_sequence.std() / math.sqrt(len(written))),
            "total_variation": rounded(torch.cat(distance[each]).mean()) if distance[each] else None,
        }
    for each in drawn:
        kept = torch.cat(accepted[each])
        error = rounded(kept.std() / math.sqrt(len(kept)))
        result[str(each)] |= {"drawn": rounded(kept.mean()), "drawn_error": error}
    return result


def rejection(
    subject: str, draft: str, temperature: float, prompt_length: int, written: list[list[int]], device: str, **_: int
) -> dict[str, float]:
    """Appendix A.2, at T > 0: the mean probability that a draft is accepted by min(1, p / q) ("alpha"), and by one
    round of rejection sampling, which is 1 / M with M = max p / q ("rejection")."""
    text = torch.tensor(written, device=device)
    p_logits = logits_of_the_target(subject, temperature, prompt_length, text)
    q_logits, _ = draft_law(subject, draft, text, prompt_length, temperature)
    assert q_logits is not None
    p, q = (logits.double().div(temperature).softmax(-1) for logits in (p_logits, q_logits))
    smallest = torch.where(p > 0, q / p, torch.inf).amin(-1)
    return {"alpha": rounded(torch.minimum(p, q).sum(-1).mean()), "rejection": rounded(smallest.mean())}


# Several cells in a row look at the same text.
latest: dict[tuple[str, float], Tensor] = {}


def logits_of_the_target(subject: str, temperature: float, prompt_length: int, written: Tensor) -> Tensor:
    if (subject, temperature) not in latest:
        latest.clear()
        model = target(subject, str(written.device)).model
        latest[subject, temperature] = read(model, written, prompt_length)
    return latest[subject, temperature]


def rounded(value: Tensor) -> float:
    return round(value.item(), 5)


def speed(
    subject: str,
    temperature: float,
    providers: Sequence[tuple[str, int]],
    rounds: int,
    num_prompts: int,
    prompt_length: int,
    num_tokens: int,
    device: str,
) -> dict[str, Any]:
    """Seconds for all prompts, one after another: without drafts and with each provider, in turns."""
    model = target(subject, device)
    rows = prompts(subject, num_prompts, prompt_length).to(device).split(1)
    sampling = torch_specops.SamplingParams(temperature=temperature)
    settings: list[dict[str, Any]] = [{}]
    for draft, count in providers:
        settings.append({"draft": draft_source(subject, draft, temperature, device), "num_draft_tokens": count})
    decoders = [
        torch_specops.SpeculativeDecoder(model.model, schedule="constant", sampling=sampling, **each)
        for each in settings
    ]

    def run(decoder: torch_specops.SpeculativeDecoder) -> tuple[float, list[Any]]:
        steps: list[Any] = []
        started = time.perf_counter()
        for index, row in enumerate(rows):
            decoder.generate(row, max_new_tokens=num_tokens, seed=[index], eos_token_id=(), streamer=steps.append)
        return time.perf_counter() - started, steps

    steps = [run(decoder)[1] for decoder in decoders]
    seconds: list[list[float]] = [[] for _ in decoders]
    for index in range(rounds):
        # A decoder that always came first would always find the same caches.
        order = list(range(len(decoders)))
        for which in order[index % len(order) :] + order[: index % len(order)]:
            seconds[which].append(run(decoders[which])[0])

    widest = max(count for _, count in providers) + 1
    clock = Clock(model, rows[0], num_tokens // 2 + prompt_length, temperature, widest)
    medians = list(map(statistics.median, seconds))
    plain_step = medians[0] / len(steps[0])
    result: dict[str, Any] = {
        "seconds": seconds[0],
        "tokens_per_second": num_prompts * num_tokens / medians[0],
        # What a step takes beside the target's forward, in forwards of one token.
        "outside": max(plain_step / clock.seconds([clock.forward(1)])[0] - 1, 0.0),
        "providers": [],
    }
    for i, (draft, count) in enumerate(providers, 1):
        source = decoders[i].draft
        assert source is not None
        ratios = [plain / each for plain, each in zip(seconds[0], seconds[i], strict=True)]
        accepted, proposed = (
            torch.tensor([getattr(step, name)[0] for step in steps[i]]) for name in ("num_accepted", "num_proposed")
        )
        result["providers"].append(
            {
                "draft": draft,
                "num_draft_tokens": count,
                "seconds": seconds[i],
                "speed": medians[0] / medians[i],
                "speed_range": [min(ratios), max(ratios)],
                "mean_acceptance_length": num_prompts * num_tokens / len(steps[i]),
                "mean_drafts": proposed.double().mean().item(),
                "alpha_of_the_loop": analysis.alpha_from_counts(accepted, proposed).item(),
                # Definition 3.7: one draft, in forwards of the target over one token.
                "cost_ratio": clock.ratio(clock.draft(source, count)) / count,
                # Theorem 3.8 takes this for 1.
                "width_ratio": clock.ratio(clock.forward(count + 1)),
            }
        )
    return result


class Clock:
    """Times single calls at one length of the text, in turns with forwards of the target over one token."""

    @torch.inference_mode()
    def __init__(self, model: TransformersModel, row: Tensor, length: int, temperature: float, widest: int) -> None:
        self._model = model
        self._tokens = row.repeat(1, -(-length // row.shape[1]) + 1)
        self._lengths = torch.tensor([length], device=row.device)
        self._sampling = torch_specops.SamplingParams(temperature=temperature).tensors(1, row.device)
        self._length = length
        self._model.start(1, length + widest)
        self._read(0, length)

    @torch.inference_mode()
    def _read(self, first: int, width: int) -> Tensor:
        positions = torch.arange(first, first + width, device=self._tokens.device).unsqueeze(0)
        return self._model.forward(self._tokens[:, positions[0]], positions, width)

    def forward(self, width: int) -> Callable[[], Any]:
        return lambda: self._read(self._length, width)

    @torch.inference_mode()
    def draft(self, source: DraftSource, num_draft_tokens: int) -> Callable[[], Any]:
        source.start(self._tokens, self._lengths, self._length + num_draft_tokens + 2)
        seeds = torch.zeros_like(self._lengths)
        propose = torch.inference_mode()(source.propose)
        return lambda: propose(self._tokens, self._lengths, num_draft_tokens, self._sampling, seeds)

    def ratio(self, call: Callable[[], Any]) -> float:
        """Median time of `call` over that of a forward over one token."""
        own, forward = self.seconds([call, self.forward(1)])
        return own / forward

    def seconds(self, calls: Sequence[Callable[[], Any]], repetitions: int = 21) -> list[float]:
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(repetitions):
            for own, call in zip(times, calls, strict=True):
                started = time.perf_counter()
                call()
                synchronize(self._tokens.device)
                own.append(time.perf_counter() - started)
        return [statistics.median(own) for own in times]


def predictions(found: dict[str, Any], subject: str, temperature: float, provider: dict[str, Any]) -> dict[str, float]:
    """Theorem 3.8 with the alpha of table 3 and the measured c ("theorem"), and the same with the costs that it leaves
    out ("machine"): a forward over K + 1 tokens takes `width_ratio` forwards, and a step takes `outside` more."""
    measured = found[f"alpha/{subject}/{provider['draft']}/T={temperature}"]["1.0"]["alpha"]
    count, cost = provider["num_draft_tokens"], provider["cost_ratio"]
    outside = found[f"speed/{subject}/T={temperature}"]["outside"]
    tokens = analysis.expected_tokens_per_step(measured, count).item()
    machine = tokens * (1 + outside) / (count * cost + provider["width_ratio"] + outside)
    theorem = analysis.walltime_factor(measured, cost, count).item()
    return {"alpha": measured, "expected_tokens": tokens, "theorem": theorem, "machine": machine}


def cells_of(chosen: Any) -> list[Cell]:
    def add(key: str, measure: Callable[..., Any], settings: dict[str, Any], **reads: str) -> None:
        lacking = missing(settings["subject"])
        cells.append(Cell(key, partial(measure, device=chosen.device), settings, lacking, reads))

    cells: list[Cell] = []
    for subject, drafts in DRAFTS.items():
        for temperature in TEMPERATURES:
            common = {"subject": subject, "temperature": temperature} | sizes(WRITTEN[subject])
            text = f"text/{subject}/T={temperature}"
            add(text, continuations, common)
            # Drawing takes tens of passes over the vocabulary and gives what the formula gives.
            how = {"leniences": LENIENCES, "drawn": LENIENCES if subject == "austen" else LENIENCES[:1]}
            for draft in drafts:
                settings = common | {"draft": draft} | how
                add(f"alpha/{subject}/{draft}/T={temperature}", alpha, settings, written=text)
    common = {"subject": "austen", "temperature": 1.0} | sizes(WRITTEN["austen"])
    for draft in DRAFTS["austen"]:
        if draft != "prompt lookup":
            add(f"rejection/austen/{draft}", rejection, common | {"draft": draft}, written="text/austen/T=1.0")
    for subject, providers in PROVIDERS.items():
        for temperature in TEMPERATURES:
            settings = {"subject": subject, "temperature": temperature, "providers": providers, "rounds": 3}
            add(f"speed/{subject}/T={temperature}", speed, settings | sizes(TIMED[subject]))
    return cells


main = partial(reproduce, "leviathan_measured", __doc__, cells_of)

if __name__ == "__main__":
    main()
