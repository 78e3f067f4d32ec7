"""Models of a table that change between two calls, or while a session is open: when `look` is called, and what follows.

Changes of transformers models are in tests/hf/test_changed_models.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tiny_loops import GREEDY
from tiny_models import PairModel, TracedPairs, random_table
from tiny_requests import CALLS, TWO_PROMPTS, alone, texts
from torch import Tensor

from torch_specops import Request, SpeculativeDecoder, compilation
from torch_specops.drafts import HierarchicalDraft, TokenMap

OLD, NEW = random_table(8, seed=5), random_table(8, seed=6)


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


def greedy(table: Tensor, prompt: Any, count: int) -> list[int]:
    return alone(SpeculativeDecoder(PairModel(table), sampling=GREEDY), Request(prompt, count)).new_tokens(0)


@cache
def texts_of(table: Tensor) -> list[list[int]]:
    """What `CALLS` give."""
    return [greedy(table, prompt, 9) for prompt in TWO_PROMPTS]


@pytest.mark.parametrize("call", CALLS)
def test_look_before_each_call(call: str) -> None:
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


def test_look_when_a_request_begins() -> None:
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


def test_idle_session_takes_any_change() -> None:
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
def test_change_that_ends_the_running_texts(part: str) -> None:
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
def test_changed_models_that_do_not_fit(call: str) -> None:
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


# Compiled steps.


def test_compile_key_says_which_steps_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's key decides which pieces run, those of the draft too; another version prepares them anew."""
    compiled: list[object] = []
    monkeypatch.setattr(compilation, "compile_piece", lambda piece: compiled.append(piece) or piece)
    target, small = Table(OLD), Table(OLD)
    decoder = SpeculativeDecoder(target, small, sampling=GREEDY, num_draft_tokens=2, compile=True, max_length=20)
    counts = []
    for table, keys in ((OLD, "ab"), (OLD, "ab"), (NEW, "ab"), (OLD, "bb"), (NEW, "bc"), (OLD, "ab")):
        compiled.clear()
        for model, key in zip((target, small), keys, strict=True):
            model.new, model.compile_key = table, key
        # The others have the same shapes.
        assert CALLS["generate"](decoder) == texts_of(table)
        counts.append(len(compiled))
    assert counts[0] == counts[3] == counts[4] == 3 and counts[1] == counts[2] == counts[5] == 0


def test_version_recompiles_steps_of_a_session(without_inductor: None) -> None:
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


def test_changed_not_compiled(without_inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
