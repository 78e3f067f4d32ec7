"""Models that change between two calls, or while a session is open: when the loop looks, and what it then does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tiny_loops import DRAFTS, GREEDY, new_tokens, streamed
from tiny_models import PairModel, TracedPairs, encoder_inputs, perturbed, random_table, shared_tiny, tiny
from tiny_requests import alone, many, texts, texts_alone
from torch import Tensor, nn

import torch_specops
from torch_specops import Request, SpeculativeDecoder, compilation
from torch_specops.beam import beam_search
from torch_specops.drafts import Draft, DraftSource, HierarchicalDraft, LanguageModel, NGram, SuffixLookup, TokenMap
from torch_specops.hf import language_model

OLD, NEW = random_table(8, seed=5), random_table(8, seed=6)
SHORT = torch.tensor([[1, 2], [3, 4]])


class Table(TracedPairs):
    """A table that its owner may exchange: the loop gets the new one when it looks."""

    compile_key: Any = None
    is_observed = False

    def __init__(self, table: Tensor) -> None:
        super().__init__(table)
        self.new, self.version, self.num_looks, self.num_starts = table, 0, 0, 0
        # What was read of texts does not fit the new table.
        self.is_other_kind = False

    def look(self) -> None:
        assert not torch.is_inference_mode_enabled()
        self.num_looks += 1
        if self.new is not self.table:
            self.table, self.vocab_size = self.new, self.new.shape[-1]
            self.version += 1
            if self.is_other_kind:
                raise RuntimeError("model: it is of another kind")

    def start(self, *arguments: Any) -> None:
        self.num_starts += 1
        super().start(*arguments)


# Every way in, given a decoder: the new tokens of both prompts.
CALLS: dict[str, Callable[[SpeculativeDecoder], list[list[int]]]] = {
    "generate": lambda decoder: new_tokens(decoder.generate(SHORT, max_new_tokens=9)),
    "stream": lambda decoder: streamed(list(decoder.stream(SHORT, max_new_tokens=9)), 2),
    "generate_many": lambda decoder: many(decoder, [Request(prompt, 9) for prompt in SHORT], 2),
    "session": lambda decoder: in_session(decoder),
}


def in_session(decoder: SpeculativeDecoder) -> list[list[int]]:
    with decoder.session(2, max_length=16) as session:
        handles = [session.submit(Request(prompt, 9)) for prompt in SHORT]
        while not session.is_idle:
            session.step()
    return [handle.result(0).new_tokens.tolist() for handle in handles]


def greedy(table: Tensor, prompt: Any, count: int) -> list[int]:
    return alone(SpeculativeDecoder(PairModel(table), sampling=GREEDY), Request(prompt, count)).new_tokens(0)


@cache
def texts_of(table: Tensor) -> list[list[int]]:
    """What `CALLS` give."""
    return [greedy(table, prompt, 9) for prompt in SHORT]


@pytest.mark.parametrize("call", CALLS)
def test_a_change_between_two_calls_counts(call: str) -> None:
    """Of models anywhere in a draft too."""
    target, outer, inner = (Table(OLD) for _ in range(3))
    draft = HierarchicalDraft(TokenMap(outer, torch.arange(8)), inner)
    decoder = SpeculativeDecoder(target, draft, sampling=GREEDY)
    models = (target, outer, inner)
    for table in (OLD, NEW):
        for model in models:
            model.new, model.num_looks = table, 0
        assert CALLS[call](decoder) == texts_of(table)
        assert all(0 < model.num_looks <= 2 for model in models)
        # All drafts are right, so that the draft's models have the new table too.
        assert decoder.stats.acceptance_rate == 1.0


def test_a_change_counts_for_rows_that_go_on_once_others_begin() -> None:
    """The loop does not look while nothing waits."""
    target = Table(OLD)
    decoder = SpeculativeDecoder(target, sampling=GREEDY)
    with decoder.session(2, max_length=32) as session:
        first = session.submit(Request([1, 2], 12))
        for _ in range(3):
            session.step()
        looks, target.new = target.num_looks, NEW
        session.step()
        begun = list(first.new_tokens)
        assert begun == greedy(OLD, [1, 2], 4) and target.num_looks == looks
        second, waiting = (session.submit(Request([3, 4], 5)) for _ in range(2))
        session.step()
        assert target.num_looks == looks + 1
        # No row is free for the third one.
        session.step()
        assert target.num_looks == looks + 1
        while not session.is_idle:
            session.step()
    assert first.result().new_tokens.tolist() == begun + greedy(NEW, [1, 2, *begun], 8)
    assert second.result().new_tokens.tolist() == waiting.result().new_tokens.tolist() == greedy(NEW, [3, 4], 5)
    assert target.num_starts == 1


def test_a_session_without_texts_takes_any_change() -> None:
    target, model = Table(OLD), Table(OLD)
    session = SpeculativeDecoder(target, model, sampling=GREEDY).session(2, max_length=32, logprobs="raw")
    larger = random_table(11, seed=7)
    for table, is_other_kind in ((OLD, False), (NEW, True), (larger, True), (NEW, True)):
        for each in (target, model):
            each.new, each.is_other_kind = table, is_other_kind
        handles = [session.submit(Request([1, 2], 7)) for _ in range(3)]
        while not session.is_idle:
            session.step()
        assert texts([handle.result() for handle in handles]) == [greedy(table, [1, 2], 7)] * 3
    assert target.num_starts == 4 and session.stats.num_tokens == 4 * 3 * 7
    # This one was submitted when the vocabulary was larger.
    target.new = model.new = larger
    session.submit(Request([1], 1))
    session.step()
    late = session.submit(Request([10], 7))
    target.new = model.new = NEW
    session.step()
    assert "input_ids: expected tokens in [0, 8), got 10" in str(late.result(0).error)
    session.close()


@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_change_that_texts_do_not_survive_is_said(part: str) -> None:
    models = {"target": Table(OLD), "draft": Table(OLD)}
    decoder = SpeculativeDecoder(models["target"], models["draft"], sampling=GREEDY)
    for table, message in ((NEW, "it is of another kind"), (random_table(7, seed=5), "expected")):
        session = decoder.session(2, max_length=32)
        first = session.submit(Request([1, 2], 20))
        session.step()
        models[part].new, models[part].is_other_kind = table, table is NEW
        second = session.submit(Request([1, 2], 7))
        with pytest.raises((RuntimeError, ValueError), match=f"{part}: .*{message}|draft: expected the vocabulary"):
            session.step()
        for handle in (first, second):
            assert handle.result(0).finish_reason == "error" and message in str(handle.result().error)
        for each in models.values():
            each.new, each.is_other_kind = OLD, False
        assert CALLS["generate"](decoder) == texts_of(OLD)


@pytest.mark.parametrize("call", CALLS)
def test_models_that_do_not_fit_any_more_are_said(call: str) -> None:
    """Each call checks what the constructor has checked."""

    def unreadable() -> None:
        raise ValueError("model: it has no head")

    target, model, table = PairModel(OLD), PairModel(OLD), Table(OLD)
    plain = SpeculativeDecoder(target, model, sampling=GREEDY)
    nested = SpeculativeDecoder(target, HierarchicalDraft(PairModel(OLD), model), sampling=GREEDY)
    mapped = SpeculativeDecoder(target, TokenMap(model, torch.arange(8)), sampling=GREEDY)
    looked = SpeculativeDecoder(table, sampling=GREEDY), SpeculativeDecoder(target, table, sampling=GREEDY)
    model.vocab_size = 7
    for decoder, message in (
        (plain, r"draft: expected the vocabulary of the target \(8 tokens\), got 7 tokens"),
        (nested, r"draft: expected the vocabulary of the target \(8 tokens\), got 7 tokens"),
        (mapped, r"draft: draft_of_target: expected tokens in \[0, 7\) or -1, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            CALLS[call](decoder)
    model.vocab_size, model.device = 8, torch.device("meta")
    with pytest.raises(ValueError, match="draft: expected a draft on cpu, as the target is, got meta"):
        CALLS[call](plain)
    table.look = unreadable  # type: ignore[method-assign]
    for decoder, name in zip(looked, ("target", "draft"), strict=True):
        with pytest.raises(ValueError, match=f"^{name}: it has no head"):
            CALLS[call](decoder)
    # What the draft can read counts too.
    model.device, model.max_length = target.device, 3
    assert CALLS[call](plain) == texts_of(OLD)
    assert plain.stats.num_proposed <= 2 * 2


class Proposes(DraftSource):
    """The same tokens for every row."""

    def __init__(self, *proposed: int) -> None:
        self.proposed = torch.tensor(proposed)

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return Draft(self.proposed[:num_draft_tokens].expand(len(lengths), -1))


@pytest.mark.parametrize("call", CALLS)
def test_a_draft_outside_of_the_vocabulary_is_said(call: str) -> None:
    expected = texts_of(OLD)
    padding = SpeculativeDecoder(PairModel(OLD), Proposes(1, -1, -5), sampling=GREEDY)
    assert CALLS[call](padding) == expected
    message = r"draft: expected tokens in \[0, 8\), or below 0 for padding, from Proposes.propose, got 9"
    for draft in (Proposes(1, 9, 8), HierarchicalDraft(PairModel(OLD), Proposes(1, 9, 8))):
        with pytest.raises(ValueError, match=message):
            CALLS[call](SpeculativeDecoder(PairModel(OLD), draft, sampling=GREEDY, schedule="constant"))
    table = NGram.from_tokens(torch.arange(9), vocab_size=9)
    with pytest.raises(ValueError, match=r"draft: expected the vocabulary of the target \(8 tokens\), got 9"):
        SpeculativeDecoder(PairModel(OLD), table)


# The modes in which steps are computed.


class Observed(LanguageModel):
    """A model, the observers of which come and go."""

    is_observed = False
    modes: Sequence[tuple[bool, bool]] = ()

    def forward(self, *arguments: Any) -> Tensor:
        self.modes = [*self.modes, (torch.is_inference_mode_enabled(), torch.is_grad_enabled())]
        return super().forward(*arguments)


def observed(model: nn.Module) -> Any:
    adapter: Any = language_model(model)
    adapter.__class__ = type("Adapter", (Observed, type(adapter)), {})
    return adapter


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("draft", ["prompt lookup", "suffix lookup", "perturbed", "eagle 3", "hierarchical"])
def test_the_mode_may_change_between_two_steps(draft: str, first: bool) -> None:
    check_modes(draft, first, "llama")


@pytest.mark.parametrize("draft", ["prompt lookup", "perturbed"])
def test_the_mode_may_change_beside_an_encoder(draft: str) -> None:
    check_modes(draft, True, "t5")


def check_modes(draft: str, first: bool, family: str) -> None:
    target = observed(shared_tiny(family))
    source = SuffixLookup() if draft == "suffix lookup" else DRAFTS[draft](family)
    decoder = SpeculativeDecoder(target, source, num_draft_tokens=3, sampling=GREEDY)
    given = [
        Request([1, 17, 5, 17, 5], 6 + row, eos_token_id=(), inputs=encoder_inputs(family, slice(row % 2, row % 2 + 1)))
        for row in range(5)
    ]
    expected = texts_alone(decoder, given)
    target.is_observed = first
    with decoder.session(2, max_length=40) as session:
        handles = []
        for request in given:
            target.modes = []
            handles.append(session.submit(request))
            while session.num_free < 1 and not session.is_idle:
                session.step()
                # `start` and what comes with it runs in no mode of its own.
                assert target.modes[-1] == (not target.is_observed, False)
            target.is_observed = not target.is_observed
        while not session.is_idle:
            session.step()
    assert texts([handle.result() for handle in handles]) == expected


def test_a_mode_is_that_of_every_model() -> None:
    """An observed draft keeps the target out of inference mode too, also if it stands inside another draft; and so does
    beam search."""
    model = shared_tiny("llama")
    target, small = observed(model), observed(perturbed(model))
    for draft in (small, HierarchicalDraft(shared_tiny("llama", seed=3), small)):
        decoder = SpeculativeDecoder(target, draft, sampling=GREEDY)
        for is_observed in (True, False):
            small.is_observed, target.modes = is_observed, []
            decoder.generate(SHORT, max_new_tokens=4)
            assert set(target.modes) == {(not is_observed, False)}
    for is_observed in (True, False):
        small.is_observed, target.modes = is_observed, []
        beam_search(target, SHORT, num_beams=2, draft=small, max_new_tokens=4)
        assert set(target.modes) == {(not is_observed, False)}


# Compiled steps.


def test_compiled_code_belongs_to_a_key_and_is_kept(without_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's key decides which pieces run, those of the draft too; another version prepares them anew."""
    compiled: list[object] = []
    compile_piece = compilation.compile_piece
    monkeypatch.setattr(compilation, "compile_piece", lambda *call: compiled.append(call) or compile_piece(*call))
    target, small = Table(OLD), Table(OLD)
    decoder = SpeculativeDecoder(target, small, sampling=GREEDY, num_draft_tokens=2, compile=True, max_length=20)
    counts = []
    for table, keys in ((OLD, "ab"), (OLD, "ab"), (NEW, "ab"), (OLD, "bb"), (NEW, "bc"), (OLD, "ab")):
        compiled.clear()
        for model, key in zip((target, small), keys, strict=True):
            model.new, model.compile_key = table, key
        # The others have no shapes of their own.
        for name in ("generate", "session"):
            assert CALLS[name](decoder) == texts_of(table)
        counts.append(len(compiled))
    assert counts[0] == counts[3] == counts[4] > 3 and counts[1] == counts[2] == counts[5] == 0


def test_steps_of_a_session_are_prepared_anew(without_inductor: None) -> None:
    target = Table(OLD)
    decoder = SpeculativeDecoder(target, sampling=GREEDY, compile=True)
    with decoder.session(2, max_length=32) as session:
        seconds = []
        for table in (OLD, OLD, NEW, NEW):
            target.new = table
            first = session.submit(Request([1, 2], 7))
            while not first.done:
                session.step()
            assert first.result().new_tokens.tolist() == greedy(table, [1, 2], 7)
            seconds.append(session.stats.compile_seconds)
    assert 0 < seconds[0] == seconds[1] < seconds[2] == seconds[3]


def test_what_cannot_be_compiled_any_more_is_not(without_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "STEPS_THAT_PAY", 0)
    target: Any = Table(OLD)
    decoder = SpeculativeDecoder(target, sampling=GREEDY)
    expected, target.not_compiled = CALLS["generate"](decoder), "it looks at its data"
    assert decoder.compiled and CALLS["generate"](decoder) == expected
    assert not decoder.compiled and decoder.stats.compiled == "eager: it looks at its data"
    target.not_compiled = None
    decoder = SpeculativeDecoder(target, sampling=GREEDY, compile=True)
    target.not_compiled = "it looks at its data"
    with pytest.raises(ValueError, match="compile: expected False or 'auto', got True: it looks at its data"):
        CALLS["generate"](decoder)


# Copies of decoders.


@pytest.mark.parametrize("call", CALLS)
def test_a_decoder_is_copied_after_any_call(call: str) -> None:
    decoder = SpeculativeDecoder(tiny("llama"), tiny("llama", seed=3), sampling=GREEDY)
    expected = CALLS[call](decoder)
    open_session = decoder.session(2, max_length=16)
    open_session.submit(Request([1, 2], 9))
    open_session.step()
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert copied.stats == torch_specops.decode.GenerationStats(seeds=[])
        assert CALLS[call](copied) == expected and copied.stats.num_tokens == 18
    open_session.step()
    open_session.close()
