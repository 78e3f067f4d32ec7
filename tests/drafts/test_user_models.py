"""Models and drafts of a user: the methods that they have to have, and the error if they do wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_loops import GREEDY, Pauses, decode, expected_rows, new_tokens
from tiny_models import PairModel, raised, random_table, shared_tiny
from torch import Tensor, nn

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.drafts import Draft, DraftSource, HierarchicalDraft, LanguageModel, NGram, PromptLookup, TokenMap

TABLE = random_table(8, seed=5)
PROMPTS = torch.tensor([[1, 2, 3], [4, 5, 6]])
EXPECTED = torch_specops.generate(PairModel(TABLE), PROMPTS, max_new_tokens=10, sampling=GREEDY).sequences


class Repeats(DraftSource):
    """The newest token again and again."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return Draft(tokens.gather(1, (lengths - 1).unsqueeze(1)).expand(-1, num_draft_tokens))


class RepeatsOnce(Repeats):
    """One draft, however many are asked for."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return super().propose(tokens, lengths, 1)


@pytest.mark.parametrize("kind", [Repeats, RepeatsOnce])
def test_a_class_with_propose_is_a_draft(kind: type[DraftSource]) -> None:
    # Also of a draft.
    for draft in (kind(), HierarchicalDraft(shared_tiny("llama", seed=3), kind())):
        output = decode(draft, 3)
        assert new_tokens(output) == expected_rows() and output.stats.num_accepted > 0


class Unhashable(PairModel):
    __hash__ = None  # type: ignore[assignment]


class Learns(Repeats):
    """Has all that a `DraftSource` may have, and learns some of it from the target."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def bind(self, target: Any) -> None:
        self.vocab_size, self.device, self.max_length = target.vocab_size, target.device, 13

    def start(self, *arguments: Any) -> None:
        self.calls.append("start")

    def catch_up(self, *arguments: Any) -> None:
        self.calls.append("catch up")


def test_what_a_draft_has_is_used() -> None:
    """With a target that cannot be hashed."""
    draft = Learns()
    decoder = SpeculativeDecoder(Unhashable(TABLE), draft, sampling=GREEDY, schedule=Pauses())
    assert torch.equal(decoder.generate(PROMPTS, max_new_tokens=10).sequences, EXPECTED)
    assert draft.calls[:2] == ["start", "catch up"]
    draft.vocab_size = 7
    draft.bind = lambda target: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"draft: .* vocabulary of the target \(8 tokens\), got 7"):
        SpeculativeDecoder(PairModel(TABLE), draft)


def test_a_class_that_does_not_derive_is_refused() -> None:
    class Structural:
        propose = Repeats.propose

    class StructuralModel:
        vocab_size, device, max_length = 8, torch.device("cpu"), None
        start, forward = PairModel.start, PairModel.forward

    class StructuralModule(StructuralModel, nn.Module):
        pass

    message = "expected a model, a DraftSource or None, got .*Structural'>; a class with propose must derive from Draft"
    with pytest.raises(TypeError, match="draft: " + message):
        SpeculativeDecoder(PairModel(TABLE), Structural())
    with pytest.raises(TypeError, match="inner: " + message):
        HierarchicalDraft(PairModel(TABLE), Structural())
    for target in (StructuralModel(), StructuralModule()):
        advice = r"expected a transformers model or a LanguageModel, got .*must derive from torch_specops\.drafts\.Lang"
        with pytest.raises(TypeError, match=f"^target: {advice}"):
            SpeculativeDecoder(target)
    with pytest.raises(TypeError, match=r"draft: .* a model of your own from LanguageModel"):
        SpeculativeDecoder(PairModel(TABLE), StructuralModel())


def test_the_page_lists_what_a_model_may_have() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page.split("<!-- A test compares its members with the class. -->")[1].split("\n\n")[0]
    listed = [name for row in table.splitlines()[3:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    members = {name for kind in LanguageModel.__mro__[:2] for name in {**vars(kind), **kind.__annotations__}}
    required = {"vocab_size", "device", *LanguageModel.__abstractmethods__}
    assert sorted(listed) == sorted(name for name in members - required if not name.startswith("_"))


def test_only_a_propose_of_ones_own_is_checked() -> None:
    class Asks(PromptLookup):
        def bind(self, target: Any) -> None:
            pass

    class Proposes(PromptLookup):
        def propose(self, *arguments: Any) -> Draft:
            return super().propose(*arguments)

    assert [kind.is_checked for kind in (PromptLookup, Asks, Proposes, Repeats)] == [False, False, True, True]


def writes(tokens: Tensor, lengths: Tensor) -> Draft:
    tokens[:, 1] = 0
    return Draft(tokens[:, :2])


def with_logits(*parts: Tensor) -> Any:
    return lambda tokens, lengths: Draft(tokens[:, :2], *parts)


def moves(tokens: Tensor, lengths: Tensor) -> Draft:
    lengths += 1
    return Draft(tokens[:, :2])


def test_a_draft_that_does_wrong_is_named() -> None:
    def propose(function: Any, is_inner: bool) -> None:
        class Wrong(DraftSource):
            def propose(self, tokens: Tensor, lengths: Tensor, *rest: Any) -> Any:
                return function(tokens, lengths)

        draft = HierarchicalDraft(PairModel(TABLE), Wrong(), num_inner_tokens=2) if is_inner else Wrong()
        options = {"num_draft_tokens": 2, "schedule": "constant", "max_new_tokens": 6}
        torch_specops.generate(PairModel(TABLE), PROMPTS, draft=draft, **options)

    cases = [
        (lambda tokens, lengths: tokens[:, :2], TypeError, "draft: expected a Draft from Wrong.propose, got .*Tensor"),
        (
            lambda tokens, lengths: Draft([[1, 2]]),
            TypeError,
            r"draft: expected int64 or int32 tokens \[B, K\] .* got .*list",
        ),
        (
            lambda tokens, lengths: Draft(tokens[:, :2].float()),
            TypeError,
            "draft: expected int64 or .* got torch.float32",
        ),
        (lambda tokens, lengths: Draft(tokens[:1, :2]), ValueError, r"draft: .* \[2, 2\] or fewer .* got shape \[1, 2"),
        (lambda tokens, lengths: Draft(tokens[:, :3]), ValueError, r"draft: .* \[2, 2\] or fewer .* got shape \[2, 3"),
        (
            with_logits(None, None, [3, 4]),
            ValueError,
            r"draft: expected matches \[2\] from .* got <class 'list'>",
        ),
        (with_logits(torch.zeros(2, 2, 7)), ValueError, r"draft: expected logits \[2, 2, 8\] .* got shape \[2, 2, 7\]"),
        (with_logits(torch.zeros(2, 2, 8), torch.zeros(2)), ValueError, r"draft: expected lse \[2, 2\] .* shape \[2\]"),
        (writes, ValueError, "draft: Wrong.propose wrote into tokens; it may only read them"),
        (moves, ValueError, "draft: Wrong.propose wrote into lengths"),
    ]
    for is_inner in (False, True):
        assert raised(lambda function, is_inner=is_inner: propose(function, is_inner), cases) == []


def test_drafts_may_be_int32() -> None:
    class Narrow(DraftSource):
        def propose(self, tokens: Tensor, lengths: Tensor, count: int, *rest: Any) -> Draft:
            return Draft(torch.full((len(lengths), count), 3, dtype=torch.int32))

    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 0, "sampling": SamplingParams(repetition_penalty=1.2)}
    plain = torch_specops.generate(PairModel(TABLE), PROMPTS, **options).sequences
    for draft in (Narrow(), HierarchicalDraft(PairModel(TABLE), Narrow())):
        found = torch_specops.generate(PairModel(TABLE), PROMPTS, draft=draft, verify="gumbel", **options)
        assert torch.equal(found.sequences, plain)


class PairModule(nn.Module, LanguageModel):
    """A `PairModel` that is a module, and that in training mode answers at random."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.inner = PairModel(table)
        self.frozen, self.dropout = nn.Dropout(1.0).eval(), nn.Dropout(1.0)
        self.vocab_size, self.device = self.inner.vocab_size, self.inner.device
        self.fails = False

    def start(self, *arguments: Any) -> None:
        self.inner.start(*arguments)

    def forward(self, *arguments: Any) -> Tensor:
        assert not self.fails
        return self.dropout(self.inner.forward(*arguments))

    def modes(self) -> list[bool]:
        return [module.training for module in self.modules()]


def test_user_module_decodes_in_evaluation_mode() -> None:
    target, draft = PairModule(TABLE), PairModule(TABLE)
    before = target.modes()
    assert before == [True, False, True]
    decoder = SpeculativeDecoder(target, TokenMap(draft, torch.arange(8)), num_draft_tokens=3, sampling=GREEDY)
    during: list[list[bool]] = []
    output = decoder.generate(PROMPTS, max_new_tokens=10, streamer=lambda step: during.append(target.modes()))
    assert torch.equal(output.sequences, EXPECTED) and output.stats.acceptance_rate == 1.0
    assert during[0] == [False] * 3 and target.modes() == draft.modes() == before
    # A stream is a call per step.
    for _ in decoder.stream(PROMPTS, max_new_tokens=4):
        assert target.modes() == draft.modes() == before
    target.fails = True
    with pytest.raises(AssertionError):
        decoder.generate(PROMPTS, max_new_tokens=10)
    assert target.modes() == draft.modes() == before


class RepeatsModule(nn.Module, DraftSource):
    def propose(self, *arguments: Any) -> Draft:
        assert not self.training
        return Repeats().propose(*arguments)


def test_a_draft_may_be_a_module() -> None:
    """It has a method `compile`, which is torch's own."""
    module = RepeatsModule()
    for draft in (module, HierarchicalDraft(PairModel(TABLE), module)):
        output = torch_specops.generate(PairModel(TABLE), PROMPTS, draft=draft, max_new_tokens=10, sampling=GREEDY)
        assert torch.equal(output.sequences, EXPECTED) and module.training


class IgnoresNumLogits(PairModel):
    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        return super().forward(tokens, positions)


def test_a_model_that_returns_other_logits_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"target: expected logits \[2, 1, 'V'\] .* num_logits = 1, got shape \[2, 3, 8"
    ):
        torch_specops.generate(IgnoresNumLogits(TABLE), PROMPTS, max_new_tokens=4)


class Proposes(DraftSource):
    """The same tokens for every row."""

    def __init__(self, *proposed: int) -> None:
        self.proposed = torch.tensor(proposed)

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return Draft(self.proposed[:num_draft_tokens].expand(len(lengths), -1))


def test_drafts_outside_of_the_vocabulary() -> None:
    padding = SpeculativeDecoder(PairModel(TABLE), Proposes(1, -1, -5), sampling=GREEDY)
    assert torch.equal(padding.generate(PROMPTS, max_new_tokens=10).sequences, EXPECTED)
    message = r"draft: expected tokens in \[0, 8\), or below 0 for padding, from Proposes.propose, got 9"
    for draft in (Proposes(1, 9, 8), HierarchicalDraft(PairModel(TABLE), Proposes(1, 9, 8))):
        decoder = SpeculativeDecoder(PairModel(TABLE), draft, sampling=GREEDY, schedule="constant")
        with pytest.raises(ValueError, match=message):
            decoder.generate(PROMPTS, max_new_tokens=10)
        # A session and `generate_many` have the same rows.
        session = decoder.session(2, max_length=16)
        session.submit(Request([1, 2, 3], 9))
        with pytest.raises(ValueError, match=message):
            session.step()
    table = NGram.from_tokens(torch.arange(9), vocab_size=9)
    with pytest.raises(ValueError, match=r"draft: expected the vocabulary of the target \(8 tokens\), got 9"):
        SpeculativeDecoder(PairModel(TABLE), table)
