"""What a decoder leaves to others: results that can be trained on, and a model that other threads use too."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from tiny_grammars import Allowing
from tiny_loops import GREEDY, expected_rows, limited, new_tokens, streamed
from tiny_models import PROMPTS, PairModel, padded, perturbed, random_table, tiny
from torch import Tensor

import torch_specops
from torch_specops import Request, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.decode import guard
from torch_specops.drafts import (
    Draft,
    DraftSource,
    EarlyExit,
    HierarchicalDraft,
    ModelDraft,
    PromptLookup,
    TokenMap,
)
from torch_specops.hf import language_model

IDS, MASK = padded(PROMPTS, "left")
CALL: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 8}
SHORT = torch.tensor([[1, 2], [3, 4]])


def in_a_thread(call: Callable[[], object]) -> object:
    """What the call returns in a thread of its own, or the error that it raises there."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("call", ["generate", "beam search"])
def test_a_model_learns_from_what_it_generated(call: str) -> None:
    model = tiny("llama").train()
    if call == "generate":
        output = torch_specops.generate(model, IDS, draft=perturbed(model), **CALL)
    else:
        output = beam_search(model, IDS, num_beams=2, **CALL)
    assert not any(value.is_inference() for value in vars(output).values() if isinstance(value, Tensor))
    model(output.sequences, labels=output.sequences).loss.backward()
    assert bool((model.lm_head.weight.grad != 0).any())


def test_decoders_of_other_threads_share_the_model() -> None:
    """One decodes while the other is inside a forward."""
    model, others = tiny("llama"), list[object]()

    def decode() -> list[list[int]]:
        return new_tokens(torch_specops.generate(model, IDS, draft=model, sampling=GREEDY, **CALL))

    def meanwhile(*call: object) -> None:
        if not others:
            others.append(None)
            others.append(in_a_thread(decode))

    with model.get_decoder().register_forward_hook(meanwhile):
        assert decode() == limited(expected_rows(), [8] * 3) == others[1]


class Interrupted(PairModel):
    """Makes a call inside a forward."""

    meanwhile: Callable[[], object] | None = None

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        # The call may read the model too.
        call, self.meanwhile = self.meanwhile, None
        if call is not None:
            call()
        self.meanwhile = call
        return super().forward(tokens, positions, num_logits)


def test_one_thread_at_a_time_uses_a_decoder() -> None:
    model = Interrupted(random_table(8, seed=5))
    decoder = SpeculativeDecoder(model, sampling=GREEDY)
    # A decoder of another kind with the same target, which has one cache.
    other = SpeculativeDecoder(model, PromptLookup())
    drafting = SpeculativeDecoder(PairModel(model.table), model, sampling=GREEDY)
    expected = decoder.generate(SHORT, max_new_tokens=6).sequences
    old = decoder.stream(SHORT, max_new_tokens=6)
    steps = [next(old)]
    many = decoder.generate_many([Request(row, 6) for row in SHORT], batch_size=1)
    session, served = (decoder.session(1, max_length=20) for _ in range(2))
    handle, ended = (each.submit(Request(SHORT[0], 6)) for each in (session, served))
    calls = (
        lambda: decoder.generate(SHORT, max_new_tokens=6),
        lambda: decoder.stream(SHORT, max_new_tokens=6),
        lambda: other.generate(SHORT),
        lambda: drafting.generate(SHORT),
        decoder.output,
        session.step,
        lambda: next(old),
        lambda: next(many),
    )
    errors: list[object] = []

    def meanwhile(*step: object) -> None:
        errors.extend(in_a_thread(call) for call in calls)

    # Inside a step, and between two steps of `generate`.
    model.meanwhile = meanwhile
    list(decoder.stream(SHORT, max_new_tokens=2))
    model.meanwhile = lambda: ended.done or errors.append(in_a_thread(served.run))
    session.step()
    model.meanwhile = None
    assert torch.equal(decoder.generate(SHORT, max_new_tokens=6, streamer=meanwhile).sequences, expected)
    message = "another thread is using this decoder or its target"
    assert len(errors) > 28 and all(message in str(error) for error in errors)
    # Afterwards it serves any thread.
    again = in_a_thread(calls[0])
    assert isinstance(again, torch_specops.GenerationOutput) and torch.equal(again.sequences, expected)
    # A step that was refused has changed nothing: iterators go on. Nobody would make the steps of `run` any more.
    steps += old
    assert torch.equal(torch.tensor(streamed(steps, 2)), expected[:, 2:])
    assert torch.equal(torch.stack([completion.tokens for completion in many]), expected)
    while not session.is_idle:
        session.step()
    assert torch.equal(handle.result().tokens, expected[0]) and ended.result(timeout=0).finish_reason == "error"


class Calling(DraftSource):
    """Makes a call in every step."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        self.call()
        return PromptLookup(min_ngram=1).propose(tokens, lengths, num_draft_tokens)


class CallingGrammar(Allowing):
    """Allows everything, and makes a call when it is asked."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(lambda text: range(60))
        self.call = call

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        self.call()
        super().fill_bitmask(bitmask, row)

    def accept(self, token: int) -> bool:
        self.call()
        return super().accept(token)


@pytest.mark.parametrize("place", ["draft", "grammar", "forward"])
def test_a_call_inside_a_step_is_refused(place: str) -> None:
    """Between the drafts and the target's forward it would overwrite what both have read: another text, in silence."""
    target, errors = language_model(tiny("llama")), list[Exception]()
    texts: dict[str, Any] = {"input_ids": torch.tensor([[5, 6, 5], [9, 8, 9]]), "max_new_tokens": 8}
    other = texts | {"input_ids": texts["input_ids"] + 1}
    second = SpeculativeDecoder(target, sampling=GREEDY)
    expected = new_tokens(second.generate(**texts))
    session = second.session(2, max_length=20)
    session.submit([5, 6])
    exits = EarlyExit(1)
    calls = (
        lambda: second.generate(**other),
        lambda: beam_search(target, other["input_ids"], num_beams=2),
        lambda: second.session(2, max_length=20),
        lambda: second.stream(**other),
        session.step,
    )

    def call() -> None:
        for each in calls:
            try:
                each()
            except RuntimeError as error:
                errors.append(error)

    draft = Calling(call) if place == "draft" else PromptLookup(min_ngram=1)
    if place == "forward":
        # A decoder that is made would take the draft.
        draft, calls = exits, (*calls, lambda: SpeculativeDecoder(tiny("llama"), exits))
    decoder = SpeculativeDecoder(target, draft, sampling=GREEDY, num_draft_tokens=3, schedule="constant")
    if place == "grammar":
        texts["grammar"] = [CallingGrammar(call), None]
    if place == "forward":
        target.prepared.register_forward_pre_hook(lambda *given: call())
    assert new_tokens(decoder.generate(**texts)) == expected
    assert len(errors) >= 15 and all("is under way and has called this code" in str(error) for error in errors)


class Notes(DraftSource):
    """Keeps its target, and reads nothing with it."""

    def bind(self, target: Any) -> None:
        self.model = target

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return PromptLookup(min_ngram=1).propose(tokens, lengths, num_draft_tokens)


def test_a_source_may_keep_its_target() -> None:
    decoder = SpeculativeDecoder(tiny("llama"), Notes(), sampling=GREEDY)
    assert decoder.generate(SHORT, max_new_tokens=4).lengths.tolist() == [6, 6]


@pytest.mark.parametrize("kind", [PairModel, language_model])
def test_a_model_is_not_read_in_two_places(kind: Callable[[Any], Any]) -> None:
    """It has one cache: the draft's prompt would replace the target's."""
    source: list[Any] = (
        [random_table(8, 5), random_table(8, 6)] if kind is PairModel else [tiny("llama"), tiny("llama")]
    )
    model, other = map(kind, source)
    twins = torch.arange(model.vocab_size)
    drafts = [
        model,
        ModelDraft(model),
        TokenMap(model, twins),
        HierarchicalDraft(model),
        HierarchicalDraft(other, model),
        HierarchicalDraft(other, TokenMap(model, twins)),
        HierarchicalDraft(other, other),
    ]
    for draft in drafts:
        with pytest.raises(ValueError, match="draft: expected other models than the target"):
            SpeculativeDecoder(model, draft)
    if kind is language_model:
        with pytest.raises(ValueError, match="draft: expected other models than the target"):
            beam_search(model, SHORT, num_beams=2, draft=model)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_process_decodes_beside_a_thread() -> None:
    model = Interrupted(random_table(8, seed=5))
    decoder = SpeculativeDecoder(model, sampling=GREEDY)
    expected = decoder.generate(SHORT, max_new_tokens=6).sequences
    is_inside, goes_on = threading.Event(), threading.Event()
    model.meanwhile = lambda: (is_inside.set(), goes_on.wait(60))
    thread = threading.Thread(target=decoder.generate, args=(SHORT,), kwargs={"max_new_tokens": 1})
    thread.start()
    is_inside.wait(60)
    if (child := os.fork()) == 0:
        code = 1
        # OpenMP's threads are not in the child, and an operation would wait for them.
        torch.set_num_threads(1)
        with contextlib.suppress(RuntimeError):
            model.meanwhile = None
            code = 0 if torch.equal(decoder.generate(SHORT, max_new_tokens=6).sequences, expected) else 2
        os._exit(code)
    goes_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("is_observed", [True, False])
def test_interrupt_leaves_no_thread_and_no_mode(is_observed: bool) -> None:
    """Before every bytecode with which a thread begins and ends its work, nested as in a call of `generate`: with
    `torch.no_grad` as for a model with hooks, or in a stream that began under autocast."""
    model, left = PairModel(random_table(8, seed=5)), 0
    model.is_observed = is_observed  # type: ignore[attr-defined]
    decoder_guard = guard.Guard(model, None)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not is_observed):
        stream = decoder_guard.begin_stream()

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in (guard.__file__, contextlib.__file__):
            return None
        frame.f_trace_opcodes = True
        # Python 3.12 has no events of bytecodes in the first call that is traced.
        if event in ("opcode", "line"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    def work() -> None:
        with decoder_guard.working(), decoder_guard.computing(stream):
            pass

    before, moments = sys.gettrace(), 0
    while left <= 0:
        moments += 1
        left = moments
        sys.settrace(interrupt)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert in_a_thread(work) is None, f"after {moments} bytecodes"
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), f"after {moments} bytecodes"
        assert not torch.is_autocast_enabled("cpu"), f"after {moments} bytecodes"
    assert moments > 200
