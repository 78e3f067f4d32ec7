"""A draft model with drafts of its own: it keeps its law, takes fewer forwards, and wrong ones are caught.

That the loop keeps the target's law with it is tested in test_loop_distribution.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_laws import PROMPTS as LAW_PROMPTS
from tiny_laws import TARGET, TRIALS, V, drafts_of, first_tokens, make_draft, p_values, pair_laws
from tiny_loops import Pauses, decode, expected_rows, new_tokens, steps_of, streamed
from tiny_models import PROMPTS, PairModel, perturbed, raised, random_table, shared_tiny
from torch import Tensor

from torch_specops import verify_exact
from torch_specops.drafts import Draft, Eagle3, NGram, PromptLookup
from torch_specops.drafts import hierarchical as hierarchical_module
from torch_specops.drafts.hierarchical import HierarchicalDraft

SMALL = TARGET + random_table(V, seed=12, scale=1.0)


def over_lookup(draft_class: type[HierarchicalDraft], **options: int) -> HierarchicalDraft:
    return draft_class(PairModel(SMALL), PromptLookup(min_ngram=1), **({"num_inner_tokens": 2} | options))


@pytest.mark.parametrize(
    ("inner", "temperature"),
    [("prompt lookup", 0.7), ("n-gram", 1.3), ("opposite", 1.0), ("close", 0.7), ("n-gram with counts", 1.3)],
)
def test_drafts_have_the_law_of_the_draft_model(inner: str, temperature: float, report: Report) -> None:
    """With a forward for every draft none is missing. (Fewer leave padding, and what is then there is a selection.)"""
    draft = HierarchicalDraft(PairModel(SMALL), make_draft(inner), num_inner_tokens=2, num_forwards=3)
    found = drafts_of(draft, 3, temperature)
    assert (found.tokens >= 0).all()
    expect_laws(report, f"drafts over {inner}", p_values(found.tokens, pair_laws(SMALL, temperature)))
    # The logits are those of the draft model behind the drafts before.
    ends = torch.tensor([prompt[-2:] for prompt in LAW_PROMPTS]).repeat(TRIALS // 2, 1)
    texts = torch.cat([ends, found.tokens], 1)
    assert found.logits is not None
    assert torch.equal(found.logits, SMALL[texts[:, :-2], texts[:, 1:-1]])


class Believing(HierarchicalDraft):
    """Takes what the inner source says, and shows the model's law."""

    def propose(self, *arguments: Any) -> Draft:
        drafts = super().propose(*arguments)
        said = self.inner.propose(*arguments).tokens
        return Draft(torch.where((drafts.tokens >= 0) & (said >= 0), said, drafts.tokens), drafts.logits)


class Picky(HierarchicalDraft):
    """Drops a draft for being what it is: padding that depends on the token at its own position."""

    def propose(self, *arguments: Any) -> Draft:
        drafts = super().propose(*arguments)
        return Draft(torch.where(drafts.tokens == 0, -1, drafts.tokens), drafts.logits)


class Repeating(HierarchicalDraft):
    """One pair of random numbers for all positions of a step."""

    def _numbers(self, *arguments: Any) -> list[Tensor]:
        numbers = super()._numbers(*arguments)
        return [numbers[index % 2] for index in range(len(numbers))]


class Sharing(HierarchicalDraft):
    """An inner source with the seeds of the outer one."""

    def _inner_seeds(self, seeds: Tensor, lengths: Tensor) -> Tensor:
        return seeds.unsqueeze(1).expand(-1, self.num_forwards)


class OfTheInner(HierarchicalDraft):
    """Shows the law of the inner model for the first draft."""

    def propose(self, *arguments: Any) -> Draft:
        drafts, inner = super().propose(*arguments), self.inner.propose(*arguments).logits
        assert drafts.logits is not None and inner is not None
        return Draft(drafts.tokens, torch.cat([inner[:, :1], drafts.logits[:, 1:]], 1))


def over_model(draft_class: type[HierarchicalDraft]) -> HierarchicalDraft:
    return draft_class(PairModel(SMALL), PairModel(-TARGET), num_inner_tokens=2)


def test_wrong_drafts_of_the_draft_model_are_caught(report: Report) -> None:
    wrong = {"inner and outer draft share numbers": over_model(Sharing), "numbers used again": over_lookup(Repeating)}
    for name, draft in wrong.items():
        expect_caught(report, f"drafts, {name}", p_values(drafts_of(draft, 3).tokens, pair_laws(SMALL)))


@pytest.mark.slow
def test_wrong_drafts_are_caught_in_the_emitted_text(report: Report) -> None:
    wrong = [*map(over_model, (Sharing, OfTheInner)), *map(over_lookup, (Believing, Picky))]
    for draft in wrong:
        tokens = first_tokens(PairModel(TARGET), draft, 3)
        expect_caught(report, f"loop, {type(draft).__name__} draft", p_values(tokens, pair_laws(TARGET)))


def test_hierarchical_greedy_steps() -> None:
    """The same drafts, so the same number accepted in every step of every row."""
    small = perturbed(shared_tiny("llama"), 0.03)
    expected, _ = steps_of(small, 4)
    found, _ = steps_of(HierarchicalDraft(small, num_inner_tokens=2, num_forwards=4), 4)
    assert [step.num_accepted for step in found] == [step.num_accepted for step in expected]
    assert streamed(found) == expected_rows()


def test_no_cache_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target as its own draft and as its inner draft: every forward makes as many drafts as it can, in every step.
    With steps without drafts in between, too."""
    model = shared_tiny("llama")
    for schedule in ("constant", Pauses()):
        draft = HierarchicalDraft(model, model, num_inner_tokens=2, num_forwards=2)

        def all_accepted(rows: Tensor, inner: Tensor, *rest: Any, **filters: Any) -> Any:
            found = verify_exact(rows, inner, *rest, **filters)
            assert found[1].tolist() == [inner.shape[1]] * len(PROMPTS)
            return found

        monkeypatch.setattr(hierarchical_module, "verify_exact", all_accepted)
        output = decode(draft, 6, schedule=schedule)
        assert new_tokens(output) == expected_rows() and output.stats.acceptance_rate == 1.0


def test_right_inner_drafts_save_forwards() -> None:
    """The draft model is certain of the next token: one more, round and round."""
    table = torch.full((V + 1, V, V), -torch.inf)
    tokens = torch.arange(V)
    table[:, tokens, (tokens + 1) % V] = 0.0
    text = torch.arange(2 * V) % V
    forwards = {}
    for name, read in (("right", text), ("wrong", text.flip(0))):
        model = PairModel(table)
        inner = NGram.from_tokens(read, vocab_size=V)
        found = drafts_of(HierarchicalDraft(model, inner, num_inner_tokens=3, num_forwards=8), 8, trials=4)
        last = torch.tensor([prompt[-1] for prompt in LAW_PROMPTS]).repeat(2).unsqueeze(1)
        assert torch.equal(found.tokens, (last + 1 + torch.arange(8)) % V)
        # The prompt was read, too.
        forwards[name] = len(model.readings) - 1
    assert forwards == {"right": 2, "wrong": 8}


def test_padding_behind_the_last_forward() -> None:
    source = over_lookup(HierarchicalDraft, num_inner_tokens=1, num_forwards=2)
    present = drafts_of(source, 6, trials=500).tokens >= 0
    # From the first padding on there is nothing else, and two forwards make two drafts at least, four at most.
    assert torch.equal(present.long().cumprod(1).bool(), present)
    assert set(present.sum(1).tolist()) == {2, 3, 4}


@pytest.mark.parametrize("inner", ["n-gram", "close"])
def test_hierarchical_drafts_ignore_their_number(inner: str) -> None:
    """A row's tokens are then the same in any batch: K is what some row has room for."""
    most, *fewer = (
        drafts_of(HierarchicalDraft(PairModel(SMALL), make_draft(inner), num_forwards=6), count, trials=500).tokens
        for count in (6, 3, 2, 1)
    )
    for tokens in fewer:
        assert torch.equal(tokens, most[:, : tokens.shape[1]])


class OfFeatures(Eagle3):
    def __init__(self) -> None:
        self.feature_layers = (1,)


def test_bad_arguments() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"inner": "prompt lookup"}, TypeError, "inner: expected a model, a DraftSource"),
        ({"inner": PromptLookup}, TypeError, "inner: expected an object, got the class PromptLookup"),
        ({"inner": OfFeatures()}, ValueError, "inner: expected a source that reads tokens alone, got OfFeatures"),
        ({"inner": PairModel(random_table(V - 1, 0))}, ValueError, "inner: expected the model's 6 tokens, got 5"),
        ({"inner": NGram.from_tokens(torch.arange(V), vocab_size=V + 1)}, ValueError, "inner: expected the model's 6"),
        (
            {"inner": PairModel(SMALL.to("meta"))},
            ValueError,
            "inner: expected a source on cpu, as the model is, got meta",
        ),
        ({"num_inner_tokens": 0}, ValueError, "num_inner_tokens: "),
        ({"num_forwards": 0}, ValueError, "num_forwards: "),
    ]
    assert raised(lambda options: HierarchicalDraft(PairModel(SMALL), **options), cases) == []
