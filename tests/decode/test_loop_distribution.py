"""The law of the tokens that the loop samples, and wrong loops that the same test (`tiny_laws`) rejects.

Two kinds of drafts change the acceptance but not the law, and are tested last. A draft whose cache lags proposes from
another q, but reports that same q. A draft that was sampled and is reported as one-hot is verified given its value, and
the emitted token has the law of the target for each value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from marks import slow
from report import Report
from tiny_laws import (
    FEWER_TRIALS,
    PROMPTS,
    TABLES,
    TARGET,
    TRIALS,
    TWINS,
    V,
    first_tokens,
    make_draft,
    model_laws,
    ngram,
    p_values,
    pair_laws,
    prompts,
    tiny_transformer,
)
from tiny_models import PairModel, perturbed
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode.planning import PlannedStep, Planner
from torch_specops.drafts import Draft, DraftSource, ModelDraft, PromptLookup
from torch_specops.hf import TransformersModel
from torch_specops.sampling import SamplingTensors
from torch_specops.schedules import Auto, NextStep, PastStep


@pytest.mark.parametrize(
    ("kind", "num_draft_tokens", "temperature", "verify", "filters"),
    [
        ("nothing", 1, 0.7, "exact", {}),
        slow("opposite", 1, 1.0, "exact", {}),
        ("opposite", 3, 0.7, "exact", {}),
        ("close", 2, 0.7, "exact", {}),
        ("prompt lookup", 3, 0.7, "exact", {}),
        slow("n-gram", 2, 1.0, "exact", {}),
        ("n-gram with counts", 2, 0.7, "exact", {}),
        slow("n-gram with two continuations", 3, 0.8, "exact", {}),
        ("over prompt lookup", 3, 0.7, "exact", {}),
        slow("over n-gram", 2, 1.2, "exact", {"top_k": 3}),
        slow("over n-gram", 4, 1.3, "exact", {}),
        slow("over a model", 3, 0.7, "exact", {}),
        ("over a model", 3, 1.2, "block", {"top_k": 5}),
        slow("over counts", 3, 1.3, "exact", {"top_p": 0.9}),
        ("other vocabulary", 2, 1.0, "exact", {}),
        ("nothing", 1, 1.2, "exact", {"top_k": 3, "top_p": 0.8}),
        ("close", 3, 1.2, "exact", {"top_k": 5, "top_p": 0.9, "min_p": 0.1}),
        slow("n-gram with counts", 2, 1.2, "exact", {"min_p": 0.3}),
        ("prompt lookup", 3, 1.2, "exact", {"top_k": 4, "top_p": 0.85}),
        slow("close", 2, 1.2, "block", {}),
        ("opposite", 3, 1.2, "block", {}),
        slow("close", 3, 1.2, "block", {"top_k": 5, "top_p": 0.9, "min_p": 0.1}),
        slow("prompt lookup", 2, 1.2, "block", {"top_k": 4}),
        slow("n-gram with counts", 3, 1.2, "block", {"top_p": 0.8}),
    ],
)
def test_sampled_text_has_the_law_of_the_target(
    kind: str, num_draft_tokens: int, temperature: float, verify: str, filters: dict[str, float], report: Report
) -> None:
    tokens = first_tokens(PairModel(TARGET), make_draft(kind), num_draft_tokens, temperature, verify=verify, **filters)
    name = f"loop, {kind} draft, K = {num_draft_tokens}, T = {temperature}, {verify}, {filters}"
    expect_laws(report, name, p_values(tokens, pair_laws(TARGET, temperature, **filters)))


@pytest.mark.parametrize(("name", "values"), [("temperature", (0.0, 0.5, 1.5)), ("top_k", (0, 2, 4))])
def test_mixed_batch_keeps_each_rows_law(name: str, values: tuple[float, ...], report: Report) -> None:
    mixed = torch.tensor(values)[torch.arange(TRIALS) // 2 % 3]
    tokens = first_tokens(PairModel(TARGET), make_draft("close"), 2, **{name: mixed})
    for value in values:
        chosen = tokens[mixed == value]
        if name == "temperature" and value == 0:
            assert (chosen[0::2] == chosen[0]).all() and (chosen[1::2] == chosen[1]).all()
        else:
            laws = pair_laws(TARGET, **({name: value} if value else {}))
            expect_laws(report, f"loop, mixed batch, {name} = {value}", p_values(chosen, laws))


@pytest.mark.parametrize("draft", ["itself", "perturbed", "prompt lookup"])
def test_sampled_text_has_the_law_of_a_transformer(draft: str, report: Report) -> None:
    model = tiny_transformer()
    source = {"itself": model, "perturbed": perturbed(model, 0.2)}.get(draft, PromptLookup(min_ngram=1))
    tokens = first_tokens(model, source, 2, 0.8, FEWER_TRIALS)
    expect_laws(report, f"loop, transformer, {draft}", p_values(tokens, model_laws(model, 0.8)))


class ByThePast(Auto):
    """Finds that drafts pay, at first in every other row one fewer, then for texts whose drafts were rejected."""

    def __init__(self) -> None:
        super().__init__(3)
        # However many tokens it reads, a step takes a second.
        for count, num_texts in ((0, 100), (0, TRIALS), *[(3, TRIALS)] * 5):
            counts = {"proposed": [count] * num_texts, "accepted": [count] * num_texts}
            texts = list(range(num_texts))
            step = NextStep(texts, texts, texts, TRIALS)
            self.learn(PastStep(step, **counts, num_draft_tokens=count, seconds=1.0))
        self.planned: list[list[int]] = []

    def plan(self, step: NextStep) -> list[int]:
        planned = super().plan(step)
        for index, (text, room) in enumerate(zip(step.texts, step.rooms, strict=True)):
            if self.planned:
                planned[index] = min(room, 1) if text in self.rejected else 0
            elif index % 2 == 1:
                planned[index] -= 1
        self.planned.append(planned)
        return planned

    def learn(self, step: PastStep) -> None:
        super().learn(step)
        counts = zip(step.planned.texts, step.proposed, step.accepted, strict=True)
        self.rejected = {text for text, proposed, accepted in counts if accepted == 0 < proposed}


@pytest.mark.parametrize("verify", ["exact", slow("block"), slow("gumbel")])
def test_schedule_by_the_past_keeps_the_law(verify: str, report: Report) -> None:
    """Each row has its own number of drafts."""
    schedule = ByThePast()
    tokens = first_tokens(PairModel(TARGET), make_draft("close"), 3, verify=verify, schedule=schedule)
    expect_laws(report, f"loop, auto, {verify}", p_values(tokens, pair_laws(TARGET)))
    assert [set(plan) for plan in schedule.planned[:2]] == [{1, 2}, {0, 1}]


# Wrong loops.


@pytest.mark.parametrize("verify", ["exact", "block"])
def test_a_schedule_that_leaves_out_unlikely_drafts_is_caught(
    verify: str, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(self: Planner, step: PlannedStep, proposal: Draft, num_proposed: Tensor) -> list[int]:
        assert proposal.logits is not None
        q = torch.softmax(proposal.logits, -1).gather(2, proposal.tokens.clamp(min=0).unsqueeze(2)).squeeze(2)
        return torch.minimum((q > 0.3).cumprod(1).sum(1), num_proposed).tolist()

    monkeypatch.setattr(Planner, "choose", choose)
    tokens = first_tokens(PairModel(TARGET), make_draft("close"), 2, trials=FEWER_TRIALS, verify=verify)
    expect_caught(report, f"loop, unlikely drafts left out, {verify}", p_values(tokens, pair_laws(TARGET)))


class Wrong(DraftSource):
    """A source around another one, which it asks by a function with a mistake."""

    def __init__(self, source: DraftSource, ask: Callable[..., Draft]) -> None:
        self.source = source
        self.deterministic = source.deterministic
        self.ask = ask

    def start(self, *arguments: Any) -> None:
        self.source.start(*arguments)

    def propose(self, *arguments: Any) -> Draft:
        return self.ask(self.source, *arguments)


def at_another_temperature(source: DraftSource, *arguments: Any) -> Draft:
    """Draws at temperature 1; verified at the target's temperature."""
    *text, sampling, seeds = arguments
    draft = source.propose(*text, SamplingTensors(torch.ones_like(sampling.temperature)), seeds)
    return Draft(draft.tokens, draft.logits)


def unfiltered(source: DraftSource, *arguments: Any) -> Draft:
    """Draws without filters; verified with them."""
    *text, sampling, seeds = arguments
    draft = source.propose(*text, SamplingTensors(sampling.temperature), seeds)
    return Draft(draft.tokens, draft.logits)


def another_lse(source: DraftSource, *arguments: Any) -> Draft:
    """Draws at the target's temperature, and reports the logsumexp at temperature 1."""
    draft = source.propose(*arguments)
    return Draft(draft.tokens, draft.logits, torch.logsumexp(draft.logits, -1))


def one_behind(source: DraftSource, *arguments: Any) -> Draft:
    """Reports the logits of the draft before."""
    draft = source.propose(*arguments)
    return Draft(draft.tokens, draft.logits.roll(1, 1))


def all_continuations(source: DraftSource, *arguments: Any) -> Draft:
    """Draws from the continuations that were kept, and reports the counts of all."""
    return Draft(source.propose(*arguments).tokens, ngram(probabilities=True).propose(*arguments).logits)


def in_another_order(source: DraftSource, *arguments: Any) -> Draft:
    """Tokens in the target's vocabulary, logits in the order of the draft's."""
    draft = source.propose(*arguments)
    order = torch.cat([TWINS[TWINS >= 0], torch.tensor([V - 1])])
    return Draft(draft.tokens, draft.logits[..., order], draft.lse)


@pytest.mark.parametrize(
    ("wrong", "kind", "temperature", "verify", "filters"),
    [
        *((wrong, "close", 0.6, "exact", {}) for wrong in (at_another_temperature, another_lse, one_behind)),
        (at_another_temperature, "n-gram with counts", 0.6, "exact", {}),
        (all_continuations, "n-gram with two continuations", 0.6, "exact", {}),
        (in_another_order, "other vocabulary", 0.6, "exact", {}),
        (unfiltered, "close", 1.2, "exact", {"top_k": 3}),
        (unfiltered, "close", 1.2, "block", {"top_p": 0.6}),
    ],
)
def test_a_draft_that_reports_another_law_is_caught(
    wrong: Callable[..., Draft], kind: str, temperature: float, verify: str, filters: dict[str, Any], report: Report
) -> None:
    source = make_draft(kind)
    assert source is not None
    draft = Wrong(source, wrong)
    tokens = first_tokens(PairModel(TARGET), draft, 2, temperature, FEWER_TRIALS, verify, **filters)
    laws = pair_laws(TARGET, temperature, **filters)
    expect_caught(report, f"loop, {wrong.__name__}, {kind} draft, {verify}, {filters}", p_values(tokens, laws))


class ForgetfulTarget(PairModel):
    """Forgets the last token that it reads in a step, which matters when all drafts are accepted."""

    def remember(self, tokens: Tensor, positions: Tensor) -> None:
        kept = slice(None) if tokens.shape[1] == len(PROMPTS[0]) - 1 else slice(-1)
        super().remember(tokens[:, kept], positions[:, kept])


class HoldingTarget(PairModel):
    """Does not roll back: the rejected draft stays where the newest token should be."""

    def remember(self, tokens: Tensor, positions: Tensor) -> None:
        kept = slice(None) if tokens.shape[1] == len(PROMPTS[0]) - 1 else slice(1, None)
        super().remember(tokens[:, kept], positions[:, kept])


@pytest.mark.parametrize("wrong", [ForgetfulTarget, HoldingTarget])
def test_a_target_whose_cache_is_behind_is_caught(wrong: type[PairModel], report: Report) -> None:
    tokens = first_tokens(wrong(TARGET), make_draft("close"), 1)
    expect_caught(report, f"loop, {wrong.__name__}", p_values(tokens, pair_laws(TARGET)))


# Drafts that lose acceptance, not the law.


class Lagging(ModelDraft):
    """Reads only the newest token first, so that the last draft stays unread after all drafts were accepted."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        model = self.model

        class NewestOnly:
            def forward(self, pending: Tensor, positions: Tensor, num_logits: int) -> Tensor:
                return model.forward(pending[:, -1:], positions[:, -1:], num_logits)

        self.model = NewestOnly()  # type: ignore[assignment]
        try:
            return super().propose(tokens, lengths, num_draft_tokens, *rest)
        finally:
            self.model = model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 3])
@pytest.mark.parametrize("kind", ["pairs", "transformer"])
def test_a_target_that_drafts_for_itself_accepts_everything(
    kind: str, num_draft_tokens: int, temperature: float
) -> None:
    """p = q up to rounding, so nearly every draft is accepted; with a draft cache that lags they are not."""
    input_ids, mask = prompts(100, "right")

    def acceptance_rate(source: type[ModelDraft]) -> float | None:
        target, model = (
            PairModel(TARGET) if kind == "pairs" else TransformersModel(tiny_transformer()) for _ in range(2)
        )
        sampling = SamplingParams(temperature=temperature)
        decoder = SpeculativeDecoder(target, source(model), num_draft_tokens=num_draft_tokens, sampling=sampling)
        output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=24, seed=3, eos_token_id=())
        return output.stats.acceptance_rate

    assert acceptance_rate(ModelDraft) > 0.9999
    assert acceptance_rate(Lagging) < 0.97


class Hidden(ModelDraft):
    """Samples its drafts, and reports them as one-hot."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        return Draft(super().propose(tokens, lengths, num_draft_tokens, *rest).tokens)


@pytest.mark.parametrize("source", [Lagging, Hidden])
def test_drafts_that_lose_acceptance_keep_the_law(source: type[ModelDraft], report: Report) -> None:
    tokens = first_tokens(PairModel(TARGET), source(PairModel(TABLES["close"])), 1)
    expect_laws(report, f"loop, {source.__name__}, K = 1", p_values(tokens, pair_laws(TARGET)))
