"""Requests that arrive over time: each gets the tokens that it gets alone, whatever happens beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_loops import DRAFTS, GREEDY, new_tokens, streamed
from tiny_models import VOCAB, PairModel, encoder_inputs, padded, perturbed, random_table, shared_tiny
from tiny_requests import alone, in_order, many, texts, texts_alone
from torch import Tensor

import torch_specops
from torch_specops import Completion, Request, SamplingParams, Session, SpeculativeDecoder
from torch_specops.decode import Handle
from torch_specops.decode import session as session_module
from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate

PROMPTS = [[1, 17, 5, 33, 17, 5, 48], [7], [3, 8, 3, 8, 3], [6, 6], [9, 4, 9, 4, 9, 4, 9]]
LIMITS = [12, 5, 16, 1, 9]
WAIT = 60.0


def requests(temperature: float, eos: int | None = None) -> list[Request]:
    params = SamplingParams(temperature=temperature)
    end: Any = () if eos is None else eos
    return [
        Request(prompt, limit, params, seed=[seed], eos_token_id=end)
        for seed, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


@contextmanager
def running(session: Session) -> Iterator[Session]:
    """The steps run in a thread of their own."""
    thread = threading.Thread(target=session.run, daemon=True)
    with session:
        thread.start()
        yield session
    thread.join(WAIT)
    assert not thread.is_alive()


@pytest.fixture
def greedy() -> SpeculativeDecoder:
    return SpeculativeDecoder(shared_tiny("llama"), sampling=GREEDY)


def until_done(session: Session, *handles: Handle) -> list[Completion]:
    found = []
    while not all(handle.done for handle in handles):
        found += session.step()
    return found


# The same tokens by every way in.


@pytest.mark.parametrize(
    ("draft", "temperature"), [("nothing", 1.0), ("perturbed", 0.0), ("perturbed", 1.0), ("prompt lookup", 0.0)]
)
def test_every_way_in_gives_the_same_tokens(draft: str, temperature: float) -> None:
    target = shared_tiny("llama")
    decoder = SpeculativeDecoder(target, DRAFTS[draft]("llama"), num_draft_tokens=3)
    given = requests(temperature)
    expected = texts_alone(decoder, given)
    assert len({tuple(text) for text in expected}) == len(given)
    ids, mask = padded(PROMPTS, "left")
    batch: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": LIMITS, "seed": list(range(len(given)))}
    batch |= {"sampling": given[0].sampling, "eos_token_id": ()}
    assert new_tokens(decoder.generate(ids, **batch)) == expected
    assert streamed(list(decoder.stream(ids, **batch)), len(given)) == expected
    assert many(decoder, given, 2) == expected
    with running(decoder.session(2, max_length=40)) as session:
        handles = [session.submit(request) for request in given]
        assert [list(handle.tokens()) for handle in handles] == expected
        # Each call begins with the first token.
        assert list(handles[0].tokens()) == handles[0].result(WAIT).new_tokens.tolist() == expected[0]
    call = {"do_sample": temperature > 0, "top_k": 0, "draft_model": decoder.draft, "num_draft_tokens": 3}
    call |= {"pad_token_id": 0, "eos_token_id": None, "custom_generate": custom_generate}
    for request, text in zip(given, expected, strict=True):
        prompt, limit = torch.tensor([request.input_ids]), request.max_new_tokens
        found = target.generate(prompt, max_new_tokens=limit, seed=request.seed, **call)
        assert found[0, prompt.shape[1] :].tolist() == text


# What arrives, leaves and fails.


def test_cancelled_requests_leave_their_rows(late: bool) -> None:
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS["perturbed"]("llama"), num_draft_tokens=3)
    given = requests(1.0)
    expected = texts_alone(decoder, given)
    with decoder.session(2, max_length=60) as session:
        long = [session.submit(Request([5, 6], 50, seed=seed)) for seed in range(2)]
        waiting, *others = [session.submit(request) for request in given]
        assert session.step() == [] or late
        waiting.cancel()
        assert waiting.done and waiting.result().finish_reason == "cancelled"
        long[0].cancel()
        assert not long[0].done
        found = session.step()
        assert [each.index for each in found] == [2, 0] and long[0].done
        found += until_done(session, *others)
        assert not long[1].done
        # Nobody takes its row, while the other one goes on.
        last = session.submit(given[2])
        long[1].cancel()
        long[1].cancel()
        found += until_done(session, last)
    for seed, handle in enumerate(long):
        whole, new = alone(decoder, Request([5, 6], 50, seed=seed)).new_tokens(0), handle.new_tokens
        assert handle.result().finish_reason == "cancelled" and handle.result().error is None
        assert handle.result().new_tokens.tolist() == new == whole[: len(new)] and 0 < len(new) < 50
    # Each ends once.
    assert [each.index for each in in_order(found)] == list(range(8))
    assert texts([each for each in found if each.index > 2]) == [*expected[1:], expected[2]]
    # No step counts what a row would have emitted after its request was cancelled.
    assert session.stats.num_tokens == sum(len(each.new_tokens) for each in found)


def test_requests_that_end_at_once_let_others_step(greedy: SpeculativeDecoder) -> None:
    with greedy.session(2, max_length=40) as session:
        long = session.submit(Request([5, 6], 20))
        instant = [session.submit(Request([5], 0) if index % 2 else Request([VOCAB], 3)) for index in range(300)]
        assert not any(handle.done for handle in instant)
        steps = 0
        while not long.done:
            found = session.step()
            steps += 1
            assert len(found) <= 2 + 1
        assert steps <= 21 and sum(handle.done for handle in instant) == 2 * steps - 1
        until_done(session, *instant)
        reasons = [(handle.result().finish_reason, handle.result().error is None) for handle in instant[:2]]
        assert reasons == [("error", False), ("length", True)]
        assert session.step() == [] and session.is_idle


def test_closing_ends_all_requests(greedy: SpeculativeDecoder) -> None:
    session = greedy.session(1, max_length=90)
    with running(session):
        active = session.submit(Request([5, 6], 80, eos_token_id=()))
        waiting = session.submit(Request([5, 6], 80))
        next(active.tokens())
        with pytest.raises(TimeoutError, match="timeout: request 1 has not ended"):
            waiting.result(0.01)
    assert active.result().finish_reason == waiting.result().finish_reason == "cancelled"
    assert list(active.tokens()) == active.result().new_tokens.tolist() and list(waiting.tokens()) == []
    with pytest.raises(RuntimeError, match="submit: the session is closed"):
        session.submit([5, 6])
    assert len(session.step()) <= 2 and session.step() == []


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_session_error_leaves_a_working_decoder(error: BaseException) -> None:
    target = PairModel(random_table(VOCAB, seed=5))
    decoder = SpeculativeDecoder(target, PromptLookup(), num_draft_tokens=3, schedule="constant")
    expected = texts_alone(decoder, requests(1.0))
    session = decoder.session(2, max_length=60, logprobs="raw")
    handles = [session.submit(Request([5, 6], 50, eos_token_id=())) for _ in range(3)]
    session.step()
    with mock.patch.object(target, "forward", side_effect=error), pytest.raises(type(error)):
        session.step()
    for handle in handles:
        assert handle.result(0).finish_reason == "error" and type(error).__name__ in str(handle.result().error)
    with pytest.raises(RuntimeError, match="the session is closed"):
        session.submit([5])
    assert many(decoder, requests(1.0), 2) == expected


def test_an_idle_session_uses_no_processor_time(greedy: SpeculativeDecoder) -> None:
    with running(greedy.session(2, max_length=40)) as session:
        session.submit(Request([5, 6], 3)).result(WAIT)
        # The step that ended the request is over soon after.
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(0.4)
        assert time.process_time() - before < 0.1


def test_many_threads_submit_and_cancel() -> None:
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), DRAFTS["prompt lookup"]("llama"), num_draft_tokens=3, schedule="constant"
    )
    given = requests(1.0)
    expected = texts_alone(decoder, given)
    wrong: list[Any] = []

    def client(number: int) -> None:
        for place in range(4):
            index = (number + place) % len(given)
            handle = session.submit(given[index])
            if (number + place) % 3 == 0:
                handle.cancel()
            found = list(handle.tokens())
            completion = handle.result(WAIT)
            right = expected[index] if completion.finish_reason != "cancelled" else expected[index][: len(found)]
            if not found == completion.new_tokens.tolist() == right:
                wrong.append((index, found, completion))

    with running(decoder.session(3, max_length=40)) as session:
        threads = [threading.Thread(target=client, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


# What a request may ask for.


def test_time_that_is_up_ends_a_request(greedy: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(session_module, "time", type("Clock", (), {"monotonic": lambda: now[0]}))
    with greedy.session(1, max_length=40) as session:
        both = [session.submit(Request([5, 6], 30, eos_token_id=(), max_time=5.0)) for _ in range(2)]
        # The time of the second one begins with its row.
        for handle, times in zip(both, ((1.0, 4.0, 6.0), (7.0, 10.0, 13.0)), strict=True):
            for now[0] in times:
                session.step()
            assert handle.result(0).finish_reason == "time" and len(handle.result().new_tokens) == 3
        refused = session.submit(Request([5], 3, max_time="soon"))  # type: ignore[arg-type]
        session.step()
        assert "max_time: expected" in str(refused.result(0).error)


def test_stop_strings_of_each_row_and_request(austen: tuple[Any, Any, Any]) -> None:
    target, _, tokenizer = austen
    decoder = SpeculativeDecoder(target, PromptLookup(min_ngram=1), schedule="constant", sampling=GREEDY)
    prompts = [list(text.encode()) for text in ("It was not to be ", "She had ", "Mr. Darcy said that he would ")]
    strings: list[list[str]] = [[" the", "e"], [], ["h"]]
    ids, mask = padded(prompts, "left")
    call: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "eos_token_id": (), "tokenizer": tokenizer}
    output = decoder.generate(ids, **call, stop_strings=strings)
    free = decoder.generate(ids, **call)
    for own, whole, stopped in zip(strings, new_tokens(free), new_tokens(output), strict=True):
        text = bytes(whole).decode()
        ends = [text.index(string) + len(string) for string in own if string in text]
        assert stopped == whole[: min(ends, default=30)]
    assert output.finish_reasons == ["stop", "length", "stop"]
    given = [
        Request(prompt, 30, eos_token_id=(), stop_strings=own, tokenizer=tokenizer)
        for prompt, own in zip(prompts, strings, strict=True)
    ]
    # The third one and those behind it get rows that others had.
    completions = in_order(decoder.generate_many([*given, *given], batch_size=2))
    assert texts(completions) == new_tokens(output) * 2
    assert [each.finish_reason for each in completions] == output.finish_reasons * 2
    with pytest.raises(ValueError, match="stop_strings: expected strings for all rows, or for each of 3, got 2"):
        decoder.generate(ids, **call, stop_strings=strings[:2])


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_requests_with_inputs_of_an_encoder(family: str) -> None:
    """Inputs of other lengths, with and without masks, beside rows that go on; what is refused harms none of them."""
    target = shared_tiny(family)
    decoder = SpeculativeDecoder(target, perturbed(target), num_draft_tokens=3, sampling=GREEDY)
    generator = torch.Generator().manual_seed(3)
    inputs: list[dict[str, Tensor]] = []
    for index in range(6):
        if family == "t5":
            ids = torch.randint(3, VOCAB, (1, [10, 14, 6][index % 3]), generator=generator)
            inputs.append({"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if index % 2 else {}))
        else:
            whole = encoder_inputs(family)
            assert whole is not None
            inputs.append({name: value[index % 3, None] * (1 + index) for name, value in whole.items()})
    given = [Request([1], 7 + index, eos_token_id=(), inputs=own) for index, own in enumerate(inputs)]
    expected = texts_alone(decoder, given)
    assert len({tuple(text[:7]) for text in expected}) > 3
    bad: list[tuple[dict[str, Tensor] | None, str]] = [
        ({"unknown": torch.ones(1, 3)}, "inputs: expected input_"),
        (None, "inputs: expected those of the target's encoder, got <class 'NoneType'>"),
        ({"input_ids": torch.ones(2, 3)}, "inputs: expected input_ids with a batch of one"),
    ]
    refused = [Request([1], 3, inputs=own) for own, _ in bad]
    found = in_order(decoder.generate_many([*given[:3], *refused, *given[3:]], batch_size=2))
    assert all(message in str(each.error) for each, (_, message) in zip(found[3:6], bad, strict=True))
    assert texts(found[:3] + found[6:]) == expected


# Log-probabilities.


@pytest.mark.parametrize("kind", ["raw", "processed"])
@pytest.mark.parametrize("sampling", [SamplingParams(0.7, top_k=4), GREEDY], ids=["sampled", "greedy"])
def test_top_logprobs_are_those_of_the_softmax(sampling: SamplingParams, kind: str) -> None:
    target, prompts, count = shared_tiny("llama"), torch.tensor([[5, 6, 7]] * 2), 6
    decoder = SpeculativeDecoder(target, DRAFTS["perturbed"]("llama"), num_draft_tokens=3, sampling=sampling)
    call: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": (), "seed": 3, "top_logprobs": count}
    output = decoder.generate(prompts, **call, logprobs=kind)
    top = output.top_logprobs
    assert top is not None and output.logprobs is not None
    assert top.tokens[:, :3].unique().tolist() == [-1] and bool(top.values[:, :3].isnan().all())
    logits = target(output.sequences).logits[:, 2:-1]
    if kind == "processed":
        kept = logits >= logits.topk(1 if sampling is GREEDY else 4).values[..., -1:]
        logits = (logits / 0.7).masked_fill(~kept, -torch.inf)
    wanted, found = logits.log_softmax(2).float(), top.values[:, 3:]
    torch.testing.assert_close(found, wanted.topk(count).values, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, wanted.gather(2, top.tokens[:, 3:]), atol=1e-4, rtol=1e-4)
    # A token among the most likely ones has the same number in both.
    is_own = top.tokens == output.sequences.unsqueeze(2)
    own = output.logprobs.unsqueeze(2).expand_as(top.values)
    torch.testing.assert_close(top.values[is_own], own[is_own])
    # Without `logprobs` these are the raw ones.
    if kind == "raw":
        output = decoder.generate(prompts, **call)
        assert output.logprobs is None and output.top_logprobs is not None
        torch.testing.assert_close(output.top_logprobs.values, top.values, equal_nan=True)


def test_equally_likely_tokens_come_by_index() -> None:
    table = torch.zeros(10, 9, 9)
    table[..., 4] = table[..., 7] = 1.0
    table[..., 8] = -torch.inf
    output = torch_specops.generate(PairModel(table), torch.tensor([[1, 2]]), max_new_tokens=3, top_logprobs=9)
    assert output.top_logprobs is not None
    assert output.top_logprobs.tokens[0, 2:].tolist() == [[4, 7, 0, 1, 2, 3, 5, 6, 8]] * 3
    assert output.top_logprobs.values[0, 2:, -1].tolist() == [-torch.inf] * 3
    with pytest.raises(ValueError, match="top_logprobs: expected at most the 9 tokens of the target, got 10"):
        torch_specops.generate(PairModel(table), torch.tensor([[1, 2]]), top_logprobs=10)


def test_a_session_has_the_log_probabilities_of_generate() -> None:
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS["perturbed"]("llama"), num_draft_tokens=3)
    given = requests(1.0)
    options: dict[str, Any] = {"logprobs": "processed", "top_logprobs": 3}
    outputs = [alone(decoder, request, **options) for request in given]
    for completion in decoder.generate_many(given, batch_size=2, **options):
        output, new = outputs[completion.index], slice(len(given[completion.index].input_ids), None)
        assert output.logprobs is not None and output.top_logprobs is not None
        assert completion.logprobs is not None and completion.top_logprobs is not None
        torch.testing.assert_close(completion.logprobs, output.logprobs[0, new])
        assert torch.equal(completion.top_logprobs.tokens, output.top_logprobs.tokens[0, new])
        torch.testing.assert_close(completion.top_logprobs.values, output.top_logprobs.values[0, new])


def test_progress_is_shown(greedy: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(greedy.generate_many(requests(0.0), batch_size=2, progress=True))) == 5
    assert "5/5" in capsys.readouterr().err
