"""The law of text in a grammar: at each position the softmax of the logits over the allowed tokens, filters after that.

The grammar is a table: what may come next depends on the place and on the token before. The law of three tokens is
enumerated. Each wrong loop makes a mistake that somebody could make, and the same test rejects it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_laws import LENGTH, PROMPTS, TABLES, TARGET, V, filtered, first_tokens, joint_law, make_draft, p_values
from tiny_models import PairModel
from tiny_requests import many
from torch import Tensor

from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.decode import batch, step
from torch_specops.drafts import DraftSource, LookupElse, ModelDraft
from torch_specops.grammars import allowed_logits
from torch_specops.testing import EngineReport, check_engine

TRIALS = 2_000
# [place, token before, token]; before the first token stands 0.
_place, _before, _token = torch.meshgrid(torch.arange(LENGTH + 1), torch.arange(V), torch.arange(V), indexing="ij")
ALLOWED = (5 * _place + 3 * _before + _token) % 7 < 4
WORDS = (ALLOWED.long() << torch.arange(V)).sum(2).tolist()


class Table:
    """The grammar of `ALLOWED`."""

    def __init__(self) -> None:
        self.text = [0]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        bitmask[row, 0] = WORDS[len(self.text) - 1][self.text[-1]]

    def accept(self, token: int) -> bool:
        is_right = WORDS[len(self.text) - 1][self.text[-1]] >> token & 1 == 1
        self.text += [token] * is_right
        return is_right

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]


def laws(temperature: float, has_grammar: Callable[[int], bool] = lambda row: True, **filters: Any) -> list[Tensor]:
    """[V, V, V] for each prompt."""

    def law_after(prompt: list[int], row: int) -> Callable[[list[int]], Tensor]:
        def next_law(new: list[int]) -> Tensor:
            one, two = [*prompt, *new][-2:]
            logits = TARGET[one, two].double() / temperature
            if has_grammar(row):
                logits = logits.masked_fill(~ALLOWED[len(new), new[-1] if new else 0], -math.inf)
            return torch.softmax(filtered(logits, **filters), -1)

        return next_law

    return [joint_law(law_after(prompt, row)) for row, prompt in enumerate(PROMPTS)]


def tokens_of(draft: DraftSource | None, temperature: float, **others: Any) -> Tensor:
    return first_tokens(PairModel(TARGET), draft, 2, temperature, TRIALS, **({"grammar": lambda row: Table()} | others))


@pytest.mark.parametrize(
    ("kind", "temperature", "verify", "filters"),
    [
        ("nothing", 0.7, "exact", {}),
        ("opposite", 1.0, "exact", {"top_k": 2}),
        ("close", 0.7, "exact", {}),
        ("prompt lookup", 0.7, "exact", {"min_p": 0.2}),
        ("n-gram with two continuations", 0.8, "exact", {}),
        ("opposite", 1.2, "block", {}),
        ("n-gram", 1.2, "block", {"top_p": 0.7}),
    ],
)
def test_text_has_the_law_of_the_allowed_tokens(
    kind: str, temperature: float, verify: str, filters: dict[str, float], report: Report
) -> None:
    tokens = tokens_of(make_draft(kind), temperature, verify=verify, **filters)
    name = f"grammar, {kind} draft, T = {temperature}, {verify}, {filters}"
    expect_laws(report, name, p_values(tokens, laws(temperature, **filters)))


class EveryOtherRow(LookupElse):
    """Looks up every other row."""

    def _look_up(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int) -> Tensor:
        found = super()._look_up(tokens, lengths, num_draft_tokens)
        found[1::2] = -1
        return found


def sampled_drafts() -> tuple[DraftSource, ...]:
    """Of all rows, and of every other row."""
    model = PairModel(TABLES["close"])
    return ModelDraft(model), EveryOtherRow(model, min_match=1, num_other_tokens=2)


def test_looked_up_rows_beside_sampled_ones_keep_their_law(report: Report) -> None:
    _, draft = sampled_drafts()
    expect_laws(report, "grammar, lookup in every other row", p_values(tokens_of(draft, 0.6), laws(0.6)))


def test_rows_without_a_grammar_keep_their_law(report: Report) -> None:
    tokens = tokens_of(make_draft("close"), 1.0, grammar=lambda row: Table() if row % 2 else None)
    expect_laws(report, "grammar, every other row", p_values(tokens, laws(1.0, lambda row: row % 2 == 1)))


# Wrong loops: changes of the arguments of `masks_of`, and of its bitmask.


def use_masks(wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    right = batch.masks_of

    def masks_of(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        tokens, bitmask = right(*arguments, **options)
        return tokens, wrong(bitmask)

    monkeypatch.setattr(batch, "masks_of", masks_of)


def of_the_position_before(bitmask: Tensor) -> Tensor:
    return bitmask[:, [max(place - 1, 0) for place in range(bitmask.shape[1])]]


def of_the_first_position(bitmask: Tensor) -> Tensor:
    return bitmask[:, :1].expand_as(bitmask)


def at_the_last_position(bitmask: Tensor) -> Tensor:
    return torch.cat([torch.full_like(bitmask[:, :-1], -1), bitmask[:, -1:]], 1)


def at_the_first_position(bitmask: Tensor) -> Tensor:
    return torch.cat([bitmask[:, :1], torch.full_like(bitmask[:, 1:], -1)], 1)


class Lenient(Table):
    """Advances by any token, so that a loop that goes wrong goes on."""

    def accept(self, token: int) -> bool:
        self.text += [token]
        return True


@pytest.mark.parametrize(
    "wrong", [of_the_position_before, of_the_first_position, at_the_last_position, at_the_first_position]
)
def test_masks_of_wrong_positions_are_caught(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    use_masks(wrong, monkeypatch)
    tokens = tokens_of(make_draft("close"), 1.0, grammar=lambda row: Lenient())
    expect_caught(report, f"grammar, {wrong.__name__}", p_values(tokens, laws(1.0)))


def test_a_sampled_draft_that_is_left_out_is_caught(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    """In the place of a forbidden draft stands padding: the next token comes from p, not from the residual."""
    right = batch.masks_of

    def masks_of(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return right(*arguments, **options | {"deterministic": [True] * len(options["deterministic"])})

    monkeypatch.setattr(batch, "masks_of", masks_of)
    for draft in sampled_drafts():
        tokens = tokens_of(draft, 0.6)
        name = f"grammar, sampled drafts left out, {type(draft).__name__}"
        expect_caught(report, name, p_values(tokens, laws(0.6)))


def test_filters_before_the_mask_are_caught(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    def filtered_first(logits: Tensor, bitmask: Tensor) -> Tensor:
        return allowed_logits(filtered(logits, top_k=4), bitmask)

    monkeypatch.setattr(step, "allowed_logits", filtered_first)
    tokens = tokens_of(make_draft("prompt lookup"), 1.2, top_k=4)
    expect_caught(report, "grammar, filters first", p_values(tokens, laws(1.2, top_k=4)))


def engine_report(new_grammar: Callable[[], Table], trials: int) -> EngineReport:
    """Of requests of two settings that share a session's rows; the target's logits are those with the mask."""
    decoder = SpeculativeDecoder(PairModel(TARGET), make_draft("close"), num_draft_tokens=2)

    def generate(prompts: list[list[int]], params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
        requests = [
            Request(prompt, 2, each, [seed], (), grammar=new_grammar())
            for prompt, each, seed in zip(prompts, params, seeds, strict=True)
        ]
        return many(decoder, requests, 50)

    def target(texts: Tensor) -> Tensor:
        place = texts.shape[1] - len(PROMPTS[1])
        allowed = ALLOWED[place, texts[:, -1] if place else 0]
        return TARGET[texts[:, -2], texts[:, -1]].masked_fill(~allowed, -math.inf)

    settings = {"cold": SamplingParams(temperature=0.7), "top-k": SamplingParams(top_k=3)}
    sizes: dict[str, Any] = {"vocab_size": V, "num_tokens": 2, "trials": trials, "batch_size": trials}
    return check_engine(generate, target, settings, prompts=PROMPTS[1:], **sizes)


def test_check_engine_with_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_report(Table, 600).assert_lossless()
    use_masks(of_the_position_before, monkeypatch)
    assert "cold" in engine_report(Lenient, 200).broken
