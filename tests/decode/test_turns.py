"""Calls that take turns with the models of one decoder, or of several that share them: each gets the text that it gets
alone, because a call whose models have read for another one lets them read its texts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import pytest
import torch
from tiny_hybrids import tiny_hybrid
from tiny_images import expected, images, prompts, vision_model
from tiny_loops import DRAFTS, GREEDY, new_tokens, streamed
from tiny_models import PROMPTS, PairModel, encoder_inputs, padded, perturbed, random_table, shared_tiny, tiny
from tiny_mtp import tiny_mtp
from tiny_requests import alone, many

from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.decode import Step
from torch_specops.decode.batch import Batch
from torch_specops.drafts import MTP, DraftSource, EarlyExit, HierarchicalDraft
from torch_specops.hf import language_model

IDS, MASK = padded(PROMPTS, "left")
OTHER_IDS = torch.tensor([[9, 8, 7, 9, 8], [4, 4, 6, 4, 4]])
SAMPLED = SamplingParams(temperature=0.8, top_k=20)
CALLS: list[dict[str, Any]] = [
    {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": [8, 4, 6], "seed": 1, "sampling": SAMPLED},
    {"input_ids": OTHER_IDS, "max_new_tokens": 7, "seed": 2, "logprobs": "raw"},
]


def decoder(kind: str, **options: Any) -> SpeculativeDecoder:
    settings: dict[str, Any] = {"num_draft_tokens": 3, "schedule": "constant"} | options
    if kind == "mtp":
        tiny = tiny_mtp("qwen3_next", 1)
        return SpeculativeDecoder(tiny.model, MTP.from_pretrained(tiny.model), **settings)
    if kind == "hybrid":
        target = tiny_hybrid("qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
        return SpeculativeDecoder(target, perturbed(target, 0.02), **settings)
    return SpeculativeDecoder(shared_tiny("llama"), DRAFTS[kind]("llama"), **settings)


def in_turns(streams: list[Iterator[Step]]) -> list[list[Step]]:
    steps: list[list[Step]] = [[] for _ in streams]
    for turn in zip_longest(*streams):
        for own, step in zip(steps, turn, strict=True):
            own += [] if step is None else [step]
    return steps


def assert_texts_alone(loop: SpeculativeDecoder) -> None:
    expected = [new_tokens(loop.generate(**call)) for call in CALLS]
    # The third never begins before the others have ended.
    streams = [loop.stream(**call) for call in (*CALLS, CALLS[0])]
    steps = in_turns(streams[:2])
    assert [streamed(own, len(texts)) for own, texts in zip(steps, expected, strict=True)] == expected
    assert streamed(list(streams[2]), 3) == expected[0]


KINDS = ("nothing", "prompt lookup", "perturbed", "hierarchical", "eagle 3", "dflash", "mtp", "hybrid")


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_a_decoder(kind: str) -> None:
    assert_texts_alone(decoder(kind, compile=False))


def test_streams_in_turn_with_adaptive_schedule() -> None:
    """Of each stream by its own: otherwise the numbers of drafts, and with them a sampled text, would be others."""
    target = PairModel(random_table(8, seed=5))
    draft = PairModel(target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(0)))
    loop = SpeculativeDecoder(target, draft, num_draft_tokens=3, schedule="heuristic", verify="exact")
    calls = [{"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 30, "seed": seed} for seed in (1, 2)]
    expected = [list(loop.stream(**call)) for call in calls]
    for steps, own in zip(in_turns([loop.stream(**call) for call in calls]), expected, strict=True):
        assert [(step.tokens, step.num_proposed) for step in steps] == [
            (step.tokens, step.num_proposed) for step in own
        ]


@pytest.mark.usefixtures("fresh_dynamo", "uncompiled")
@pytest.mark.parametrize("kind", ["perturbed", "eagle 3"])
def test_streams_of_compiled_steps(kind: str) -> None:
    """Of one shape: both have the tensors of the compiled step in turns."""
    loop = decoder(kind, compile=True, max_length=40)
    calls = [CALLS[1], CALLS[1] | {"input_ids": OTHER_IDS + 1, "seed": 3}]
    expected = [loop.generate(**call) for call in calls]
    batches = [loop._begin(call.pop("input_ids"), call) for call in (dict(call) for call in calls)]
    in_turns([loop._steps(*each) for each in batches])
    for (batch, _), output in zip(batches, expected, strict=True):
        assert torch.equal(batch.output().sequences, output.sequences)
        assert torch.allclose(batch.output().logprobs, output.logprobs, atol=1e-5, equal_nan=True)


def test_without_reading_again_the_text_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "read_again", lambda batch: None)
    loop, calls = decoder("perturbed"), [CALLS[1], CALLS[1] | {"input_ids": OTHER_IDS + 1}]
    expected = [new_tokens(loop.generate(**call)) for call in calls]
    assert [streamed(steps, 2) for steps in in_turns([loop.stream(**call) for call in calls])] != expected


class Reads(DraftSource):
    """Has read the hidden states of texts, as many as it says."""

    feature_layers = (1,)

    def start(self, tokens: Any, lengths: Any, *rest: Any) -> None:
        self.lengths = lengths.tolist()

    def propose(self, tokens: Any, lengths: Any, *rest: Any) -> Any:
        assert len(self.lengths) == len(lengths)
        return DRAFTS["n-gram"]("llama").propose(tokens, lengths, *rest)


@pytest.mark.parametrize("shared", ["target", "draft", "draft of a draft", "draft that reads features", "early exit"])
def test_streams_of_decoders_that_share_a_model(shared: str) -> None:
    target, small = (PairModel(random_table(8, seed)) for seed in (5, 6))
    ids = torch.tensor([[1, 2], [3, 4]])
    if own := {"draft that reads features": Reads(), "early exit": EarlyExit(1)}.get(shared):
        loops = [SpeculativeDecoder(shared_tiny(family), own, sampling=GREEDY) for family in ("llama", "gpt2")]
    else:
        own = {"draft": small, "draft of a draft": HierarchicalDraft(PairModel(random_table(8, 7)), small)}.get(shared)
        other = target if shared == "target" else PairModel(target.table)
        loops = [
            SpeculativeDecoder(target, own, sampling=GREEDY),
            SpeculativeDecoder(other, own and small, sampling=GREEDY),
        ]
    calls = [{"input_ids": ids, "max_new_tokens": 9}, {"input_ids": ids[:1] + 1, "max_new_tokens": 9}]
    expected = [new_tokens(loop.generate(**call)) for loop, call in zip(loops, calls, strict=True)]
    steps = in_turns([loop.stream(**call) for loop, call in zip(loops, calls, strict=True)])
    assert [streamed(own, len(texts)) for own, texts in zip(steps, expected, strict=True)] == expected


@pytest.mark.parametrize("kind", ["early exit", "eagle 3", "dflash"])
def test_new_decoder_takes_the_draft_in_turn(kind: str) -> None:
    """With a target that fits, and in a constructor that refuses; beam search takes it too."""
    draft = DRAFTS[kind]("llama")
    loop = SpeculativeDecoder(shared_tiny("llama"), draft, sampling=GREEDY, schedule="constant")
    expected = new_tokens(loop.generate(OTHER_IDS, max_new_tokens=12))
    stream = loop.stream(OTHER_IDS, max_new_tokens=12)
    steps = [next(stream)]
    SpeculativeDecoder(tiny("llama", seed=3), draft)
    steps.append(next(stream))
    with pytest.raises(ValueError, match="max_length"):
        SpeculativeDecoder(tiny("llama", seed=3), draft, max_length=1)
    if kind == "early exit":
        steps.append(next(stream))
        beam_search(tiny("llama", seed=3), OTHER_IDS[:1], num_beams=2, max_new_tokens=3, draft=draft)
    assert streamed(steps + list(stream), 2) == expected


def test_beam_search_between_two_steps() -> None:
    """It reads with the adapter's cache, in which the text of the stream was."""
    target = language_model(shared_tiny("llama"))
    loop = SpeculativeDecoder(target, sampling=GREEDY)
    expected = new_tokens(loop.generate(OTHER_IDS, max_new_tokens=6))
    stream = loop.stream(OTHER_IDS, max_new_tokens=6)
    steps = [next(stream)]
    beams = [beam_search(target, OTHER_IDS + 1, num_beams=2, max_new_tokens=3).sequences]
    assert streamed(steps + list(stream), 2) == expected
    beams.append(beam_search(shared_tiny("llama"), OTHER_IDS + 1, num_beams=2, max_new_tokens=3).sequences)
    assert torch.equal(*beams)


def test_a_vocabulary_that_grows_and_shrinks() -> None:
    """A text may have tokens of the largest one."""
    target = PairModel(random_table(8, 0))
    loop = SpeculativeDecoder(target, sampling=GREEDY)
    stream = loop.stream(torch.tensor([[1, 2]]), max_new_tokens=9)
    next(stream)
    for vocab in (12, 10):
        target.table, target.vocab_size = random_table(vocab, 1), vocab
        loop.generate(torch.tensor([[3]]), max_new_tokens=2)
        if vocab == 12:
            next(stream)
    with pytest.raises(RuntimeError, match="target: expected its 12 tokens until the texts end, got 10"):
        next(stream)


def test_a_request_that_a_smaller_vocabulary_refuses() -> None:
    """Its row has the log-probabilities of the request before."""
    target = PairModel(random_table(12, 0))
    session = SpeculativeDecoder(target, sampling=GREEDY).session(1, max_length=32, logprobs="raw")
    handles = [session.submit(Request([1, 2], max_new_tokens=5))]
    while not handles[0].done:
        session.step()
    handles.append(session.submit(Request([11], max_new_tokens=3)))
    target.table, target.vocab_size = random_table(10, 1), 10
    handles.append(session.submit(Request([3], max_new_tokens=2)))
    while not handles[2].done:
        session.step()
    reasons = [(handle.result().finish_reason, len(handle.result().logprobs)) for handle in handles]
    assert reasons == [("length", 5), ("error", 0), ("length", 2)]


@pytest.mark.parametrize("call", ["generate", "beam search"])
def test_a_refused_call_that_sees_a_change(call: str) -> None:
    """Other streams then read again, as behind a call that is not refused, and do not mix two models' keys."""
    texts = []
    for num_tokens in (2, -1):
        model = tiny("llama")
        adapter = language_model(model)
        stream = SpeculativeDecoder(adapter, sampling=GREEDY).stream(IDS, attention_mask=MASK, max_new_tokens=8)
        tokens = [next(stream).tokens, next(stream).tokens]
        model.model.layers[0] = perturbed(model, 0.3).model.layers[0]
        with nullcontext() if num_tokens > 0 else pytest.raises(ValueError, match="max_new_tokens"):
            if call == "generate":
                SpeculativeDecoder(adapter).generate(IDS, attention_mask=MASK, max_new_tokens=num_tokens)
            else:
                beam_search(adapter, IDS, attention_mask=MASK, num_beams=2, max_new_tokens=num_tokens)
        texts.append([*tokens, *(step.tokens for step in stream)])
    assert texts[0] == texts[1]


def test_a_call_inside_a_call() -> None:
    """Also after the last step."""
    loop = decoder("perturbed")
    expected = [new_tokens(loop.generate(**call)) for call in CALLS]
    found: list[list[list[int]]] = []
    outer = loop.generate(**CALLS[0], streamer=lambda step: found.append(new_tokens(loop.generate(**CALLS[1]))))
    assert new_tokens(outer) == expected[0] and len(found) > 3 and all(texts == expected[1] for texts in found)


def test_each_keeps_its_autocast() -> None:
    loop = SpeculativeDecoder(tiny("llama").float(), sampling=GREEDY)
    call: dict[str, Any] = {"max_new_tokens": 12, "logprobs": "raw"}
    plain = loop.generate(OTHER_IDS, **call).logprobs[:, 5:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = loop.generate(OTHER_IDS, **call).logprobs[:, 5:]
        batch, stream = loop._begin(OTHER_IDS, call)
    in_turns([loop._steps(batch, stream), loop.stream(OTHER_IDS, **call)])
    found, other = batch.output().logprobs[:, 5:], loop.output().logprobs[:, 5:]
    assert torch.allclose(other, plain, atol=1e-5)
    assert float((found - rounded).abs().max()) < 0.5 * float((plain - rounded).abs().max())


@pytest.mark.parametrize("kind", ["perturbed", "mtp"])
def test_a_session_goes_on_beside_other_calls(kind: str) -> None:
    """While its rows are in use, while some are free, and while all are."""
    loop = decoder(kind)
    short = {"input_ids": OTHER_IDS, "max_new_tokens": 1}
    requests = [Request(prompt, 4 + 2 * place, seed=place) for place, prompt in enumerate([*PROMPTS, [7, 7]])]
    expected = many(loop, requests, 2)
    # They need no more than a step to overwrite what the session has read.
    calls = [call | {"max_new_tokens": 2} for call in CALLS]
    others = [loop.generate(**call) for call in calls]
    with loop.session(2, max_length=60, logprobs="raw") as session:
        handles = []
        for request in requests:
            handles.append(session.submit(request))
            for call, output in zip(calls, others, strict=True):
                session.step()
                assert torch.equal(loop.generate(**call).sequences, output.sequences)
        while not session.is_idle:
            session.step()
            loop.generate(**short)
        handles.append(session.submit(requests[0]))
        while not session.is_idle:
            session.step()
    found = [handle.result(0) for handle in handles]
    assert [each.new_tokens.tolist() for each in found] == [*expected, expected[0]]
    reference = alone(loop, requests[3], logprobs="raw").logprobs
    assert torch.allclose(found[3].logprobs, reference[0, len(requests[3].input_ids) :], atol=1e-4)


def test_streams_in_turn_keep_encoder_inputs() -> None:
    loop = SpeculativeDecoder(shared_tiny("t5"), sampling=GREEDY)
    stream = loop.stream(IDS, attention_mask=MASK, max_new_tokens=6, inputs=encoder_inputs("t5"))
    next(stream)
    call: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 2, "inputs": encoder_inputs("t5")}
    with pytest.raises(TypeError, match="seed: expected an int"):
        loop.generate(IDS, **call, seed=0.5)
    # A call that is refused reads nothing.
    next(stream)
    loop.generate(IDS, **call)
    with pytest.raises(RuntimeError, match="inputs: expected to go on before another call"):
        next(stream)


def test_images_are_not_read_again() -> None:
    """But a text without images goes on, also in a row that had some before."""
    family = "llava"
    rows = prompts(family)
    requests = [Request(list(row.tokens), 8, inputs=images(family, [row]) or None, eos_token_id=()) for row in rows]
    loop = SpeculativeDecoder(vision_model(family), sampling=GREEDY)
    session = loop.session(1, max_length=80)
    for request, text in zip(requests[:2], expected(family), strict=False):
        handle = session.submit(request)
        session.step()
        if request.inputs is None:
            loop.generate(IDS, attention_mask=MASK, max_new_tokens=2)
        while not handle.done:
            session.step()
        assert handle.result().new_tokens.tolist() == text[:8]
    session.submit(requests[0])
    session.step()
    loop.generate(IDS, attention_mask=MASK, max_new_tokens=2)
    with pytest.raises(RuntimeError, match="inputs: expected to go on before another call"):
        session.step()
