"""More requests than rows: a request gets the tokens that it gets alone, whoever had its row before."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_loops import DRAFTS, GREEDY, AnyDraft, Late, Pauses, expected_rows, new_tokens
from tiny_models import (
    PROMPTS,
    VOCAB,
    PairModel,
    TracedPairs,
    padded,
    raised,
    random_table,
    shared_tiny,
    tiny,
)
from tiny_requests import alone, in_order, many, texts, texts_alone
from torch import Tensor
from torch._dynamo.utils import counters

from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.decode import batch as batch_module
from torch_specops.drafts import Draft, DraftSource, HierarchicalDraft, ModelDraft, SuffixLookup, TokenMap
from torch_specops.hf import language_model
from torch_specops.models.reading import groups_by_length
from torch_specops.schedules import Constant

# Greedy and sampled ones, with and without filters, of every length; eos tokens that come, or do not.
REQUESTS = [
    Request([1, 17, 5, 33, 17, 5, 48], 12, SamplingParams(temperature=0.0)),
    Request(torch.tensor([7]), 5, SamplingParams(temperature=0.7, top_k=12), seed=3, eos_token_id=[9, 12]),
    Request([3, 8, 3, 8, 3], 12, SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02), seed=[2**62]),
    Request([1, 29, 40, 8], 1, seed=11, eos_token_id=()),
    Request([6, 6], 7, seed=11),
    Request([9, 4, 9, 4, 9, 4, 9, 4, 9, 4, 9, 4], 7, SamplingParams(temperature=0.0), eos_token_id=33),
    Request([5], 0, seed=1),
    Request([44, 2], 10, seed=-5, eos_token_id=[*range(0, 60, 11), *[59] * 5]),
    Request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 3, SamplingParams(temperature=0.0)),
    Request([50, 51, 50], 9, SamplingParams(temperature=0.5), seed=0),
    Request([3, 4, 3, 4, 3], 8, SamplingParams(repetition_penalty=1.3, no_repeat_ngram_size=2), seed=4),
    Request([3, 4, 5], 8, SamplingParams(min_new_tokens=6, bad_words=[[9], [3, 4, 5]]), seed=4, eos_token_id=range(50)),
    Request([3, 4, 5], 8, SamplingParams(temperature=0.0, presence_penalty=2.0), eos_token_id=11),
    Request([8], 6, SamplingParams(no_repeat_ngram_size=3, logit_bias=dict.fromkeys(range(9), 1.0)), seed=9),
    Request([1, 17, 5, 33, 17, 5, 48], 12, SamplingParams(temperature=0.0)),
]


def new_decoder(draft: str | AnyDraft = None, **options: Any) -> SpeculativeDecoder:
    source = DRAFTS[draft]("llama") if isinstance(draft, str) else draft
    return SpeculativeDecoder(
        shared_tiny("llama"), source, **({"num_draft_tokens": 3, "schedule": "constant"} | options)
    )


@pytest.mark.parametrize("draft", DRAFTS)
def test_generate_many_gives_each_request_its_tokens(draft: str) -> None:
    decoder = new_decoder(draft)
    # Of most drafts every second request, and of these every third alone: how they sample is no matter of the draft.
    requests, step = (REQUESTS, 1) if draft in ("nothing", "perturbed") else (REQUESTS[::2], 3)
    expected = many(decoder, requests, 16)
    assert len({tuple(text) for text in expected}) == len(requests) - 1
    assert many(decoder, requests, 3) == expected
    # What a batch leaves disturbs nobody.
    assert texts_alone(decoder, requests[::step]) == expected[::step]


@pytest.mark.parametrize("draft", [False, True])
def test_a_model_that_reads_all_rows_at_once(draft: bool) -> None:
    """It remembers what it read where, so a row that was read in passing would show."""
    source = PairModel(random_table(60, seed=6)) if draft else None
    decoder = SpeculativeDecoder(PairModel(random_table(60, seed=5)), source, num_draft_tokens=3)
    expected = texts_alone(decoder, REQUESTS)
    for batch_size in (1, 4):
        assert many(decoder, REQUESTS, batch_size) == expected


@pytest.mark.parametrize("draft", ["nothing", "perturbed"])
def test_late_records_of_refilled_rows(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that the row has ended, when the row has another request already."""
    decoder, requests = new_decoder(draft), REQUESTS[::2]
    expected = many(decoder, requests, 16)
    monkeypatch.setattr(batch_module, "RecordReader", Late)
    for batch_size in (1, 3):
        assert many(decoder, requests, batch_size) == expected
        assert decoder.stats.num_tokens == sum(map(len, expected))


def test_completions() -> None:
    decoder = new_decoder("perturbed")
    assert decoder.stats.num_tokens == 0
    outputs = [alone(decoder, request) for request in REQUESTS]
    found = in_order(decoder.generate_many(REQUESTS, batch_size=3))
    for request, output, completion in zip(REQUESTS, outputs, found, strict=True):
        assert torch.equal(completion.tokens, output.sequences[0])
        assert torch.equal(completion.new_tokens, completion.tokens[len(request.input_ids) :])
        assert [completion.finish_reason] == output.finish_reasons and completion.error is None
        assert completion.logprobs is None
        assert request.seed is None or [completion.seed] == output.stats.seeds
    assert {completion.finish_reason for completion in found} == {"eos", "length"}
    stats = decoder.stats
    assert stats.num_tokens == sum(len(completion.new_tokens) for completion in found)
    assert stats.num_row_steps > stats.num_steps > 0 and stats.prefill_seconds > 0
    # They come as they finish.
    requests = [Request([5, 6], limit, GREEDY) for limit in (20, 4, 9, 2, 1, 6)]
    order = [completion.index for completion in new_decoder().generate_many(requests, batch_size=2)]
    assert order == [1, 3, 2, 4, 0, 5] or order == [1, 2, 3, 4, 0, 5]


def test_seeds() -> None:
    """A request without a seed gets the next one of torch's generator; the one that is reported repeats it."""
    decoder = new_decoder("perturbed")
    requests = [Request([5, 6], 8) for _ in range(5)]
    torch.manual_seed(3)
    first = in_order(decoder.generate_many(requests, batch_size=2))
    torch.manual_seed(3)
    assert many(decoder, requests, 3) == texts(first)
    assert len({each.seed for each in first}) == 5
    again = [Request([5, 6], 8, seed=[each.seed]) for each in first]
    assert many(decoder, again, 2) == texts(first)


# Drafts.


def itself() -> Any:
    return language_model(shared_tiny("llama"))


@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        (lambda: ModelDraft(itself()), "constant"),
        (lambda: TokenMap(itself(), torch.arange(60)), "pauses"),
        (lambda: HierarchicalDraft(itself(), num_forwards=8), "constant"),
        (lambda: HierarchicalDraft(itself(), num_forwards=8), "pauses"),
    ],
)
def test_a_draft_reads_the_prompts_of_its_rows(
    make: Callable[[], AnyDraft], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target as its own draft is always right, also about a text that it reads behind another one."""

    def acceptance_rate() -> float:
        decoder = new_decoder(make(), schedule=Pauses() if schedule == "pauses" else "constant")
        list(decoder.generate_many(REQUESTS, batch_size=3))
        assert decoder.stats.acceptance_rate is not None and decoder.stats.num_accepted > 20
        return decoder.stats.acceptance_rate

    assert acceptance_rate() == 1.0
    # A draft that does not read them is seen.
    monkeypatch.setattr(ModelDraft, "restart", lambda *arguments: None)
    assert acceptance_rate() < 0.9


class Started(DraftSource):
    """A source that reads the prompts."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], list[int]]] = []

    def start(self, *arguments: Any) -> None:
        pass

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return Draft(tokens.new_full((len(tokens), num_draft_tokens), -1))


class Restarted(Started):
    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        self.rows += [tokens[row, : lengths[row]].tolist() for row in rows]


def test_user_draft_is_restarted_with_new_prompts() -> None:
    for draft in (Started(), HierarchicalDraft(itself(), Started())):
        with pytest.raises(ValueError, match="draft: a session needs the method restart"):
            new_decoder(draft).generate_many(REQUESTS, batch_size=2)
    draft = Restarted()
    prompts = [[5, 6], [7], [8, 9, 10]]
    list(new_decoder(draft).generate_many([Request(prompt, 3) for prompt in prompts], batch_size=2))
    assert draft.rows == prompts


def test_suffix_lookup_learns_each_text_when_it_ends() -> None:
    """And without a memory it gives the tokens of a request alone."""
    decoder = new_decoder(SuffixLookup(min_ngram=1, memory=0))
    assert many(decoder, REQUESTS, 3) == texts_alone(decoder, REQUESTS)
    requests = [Request(prompt, 20, GREEDY) for prompt in (*PROMPTS, *PROMPTS)]
    decoder = new_decoder(SuffixLookup())
    completions = decoder.generate_many(requests, batch_size=3)
    for _ in range(3):
        next(completions)
    before = decoder.stats.num_row_steps
    assert many(decoder, requests, 3) == expected_rows() * 2
    assert decoder.stats.num_row_steps < before + 3 * 20


def test_schedules_know_that_rows_are_refilled() -> None:
    schedule = Constant(3)
    schedule.plan = mock.Mock(wraps=schedule.plan)  # type: ignore[method-assign]
    decoder = new_decoder("prompt lookup", schedule=schedule)
    completions = list(decoder.generate_many([Request([5, 6, 5, 6], n, GREEDY) for n in (9, 4, 5)], batch_size=2))
    steps = [call.args[0] for call in schedule.plan.call_args_list]
    assert len(completions) == 3 and all(step.is_refilled and step.num_rows == 2 for step in steps)
    assert len({text for step in steps for text in step.texts}) >= 2 and steps[-1].left[0] <= 5


# What is compiled.


@pytest.mark.usefixtures("without_inductor")
def test_other_requests_compile_nothing() -> None:
    greedy = [Request(prompt, 5 + i, GREEDY, eos_token_id=list(range(i))) for i, prompt in enumerate(PROMPTS)]
    requests = greedy + [
        Request([i, i + 1], 4 + i, sampling, seed=i)
        for sampling in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.8))
        for i in range(3)
    ]
    target, draft = (TracedPairs(random_table(VOCAB, seed=seed)) for seed in (5, 6))
    # More drafts would be one graph more in each set.
    eager, decoder = (
        SpeculativeDecoder(target, draft, num_draft_tokens=1, compile=compile, max_length=40)
        for compile in (False, True)
    )
    expected = texts_alone(eager, requests)
    graphs, found = [], []
    with torch._dynamo.config.patch(recompile_limit=1):
        for completion in decoder.generate_many(requests, batch_size=2):
            found.append(completion)
            graphs.append(counters["stats"]["unique_graphs"])
    assert texts(found) == expected
    # One set of pieces for greedy requests, one with the first sampled one, one with the first filter.
    assert len(set(graphs)) == 3
    with torch.compiler.set_stance("fail_on_recompile"):
        assert many(decoder, requests, 2) == expected


# What fails.


def test_a_request_that_is_refused_is_a_completion() -> None:
    cases: list[tuple[Any, str]] = [
        (Request([], 3), r"input_ids: expected \[P\] with P >= 1, got shape \[0\]"),
        (torch.tensor([[1, 2]]), r"input_ids: expected \[P\] with P >= 1, got shape \[1, 2\]"),
        (Request(["a"], 3), r"input_ids: expected an int64 tensor \[P\] or a list of tokens, got <class 'list'>"),
        ("text", r"input_ids: expected an int64 tensor \[P\] or a list of tokens, got <class 'str'>"),
        (Request([1.5], 3), "input_ids: expected an int64 tensor"),
        (Request([1], 40), "max_new_tokens: expected prompt and new tokens within max_length = 40, got 41"),
        (Request([1], 3, SamplingParams(temperature=[0.0, 1.0])), "temperature: expected one number or 1, got shape"),
        (Request([1], 3, eos_token_id=60), r"eos_token_id: expected tokens in \[0, 60\), got 60"),
    ]
    good = Request([5, 6], 4, GREEDY)
    decoder = new_decoder("perturbed", max_length=40)
    mixed = chain.from_iterable((bad, good) for bad, _ in cases)
    found = in_order(decoder.generate_many(mixed, batch_size=2))
    for (_, message), refused in zip(cases, found[::2], strict=True):
        assert (refused.finish_reason, refused.seed, len(refused.tokens)) == ("error", None, 0)
        assert re.match(message, str(refused.error))
    assert texts(found[1::2]) == texts_alone(decoder, [good]) * len(cases)
    assert all(each.error is None for each in found[1::2])
    [other] = SpeculativeDecoder(shared_tiny("gpt2")).generate_many([Request([1, 2], 95)], batch_size=1)
    assert other.error == "max_new_tokens: expected prompt and new tokens within the 96 that the target reads, got 97"


def test_failed_row_leaves_nothing() -> None:
    """What the model computed of it is NaN, in slots that the next text does not see; 0 times NaN is NaN."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = math.nan
    decoder = SpeculativeDecoder(model, tiny("llama"), num_draft_tokens=3, sampling=GREEDY, max_length=60)
    bad, good = Request([5, 4, 3, 2, 13, 13], 6), Request([5, 6], 9, eos_token_id=())
    long = Request([1] * 20, 40)
    others = [Request([3, 8, 3, 8], 9), Request([7], 9)]
    expected = texts_alone(decoder, [long, good, *others])
    found = in_order(decoder.generate_many([long, bad, good, bad, good, bad], batch_size=2))
    assert texts(found) == [expected[0], [], expected[1], [], expected[1], []]
    assert [each.error for each in found[1::2]] == ["target: no finite logit after 6 tokens"] * 3
    assert found[1].finish_reason == "error" and found[1].tokens.tolist() == bad.input_ids
    # Nor to the next batch, which has the same cache, and whose shorter prompts overwrite less.
    ids, mask = padded([request.input_ids for request in others], "left")
    output = decoder.generate(ids, attention_mask=mask, max_new_tokens=9)
    assert new_tokens(output) == expected[2:] and output.errors == {}


def test_wrong_arguments() -> None:
    decoder = new_decoder()

    def call(given: Any) -> None:
        decoder.generate_many(**({"requests": REQUESTS, "batch_size": 2} | given))

    cases: list[tuple[Any, type[Exception], str]] = [
        ({"requests": REQUESTS[0]}, TypeError, "requests: expected an iterable of Request, got .*Request"),
        ({"requests": "text"}, TypeError, "requests: expected an iterable of Request, got .*str"),
        ({"batch_size": 0}, ValueError, "batch_size: expected"),
        ({"max_length": 1}, ValueError, "max_length: expected"),
        ({"logprobs": "all"}, ValueError, "logprobs: expected None, 'raw' or 'processed', got 'all'"),
        ({"requests": iter(REQUESTS)}, ValueError, "max_length: expected a number, because requests that are read"),
    ]
    assert raised(call, cases) == []


# The input, and other calls.


def test_generate_many_reads_requests_lazily() -> None:
    """Also without an end, and by what came of the requests before."""
    read = 0
    done: list[int] = []

    def requests() -> Iterator[Request | Tensor]:
        nonlocal read
        assert not torch.is_inference_mode_enabled()
        while True:
            assert read - len(done) < 3
            read += 1
            yield Request([5, 6], [3, 9, 1, 6, 0, -1][read % 6], GREEDY)

    for completion in new_decoder("perturbed").generate_many(requests(), batch_size=3, max_length=20):
        assert not torch.is_inference_mode_enabled() and not completion.tokens.is_inference()
        done.append(completion.index)
        if len(done) == 20:
            break
    assert read <= 22
    assert list(new_decoder().generate_many([], batch_size=3)) == []
    assert list(new_decoder().generate_many(iter([]), batch_size=3, max_length=9)) == []


def test_rows_up_to_the_models_length() -> None:
    prompts = torch.tensor([[5, 6], [7, 8], [9, 10]])
    decoder = new_decoder(sampling=GREEDY)
    expected = decoder.generate(prompts, max_new_tokens=94).sequences.tolist()
    requests = (Request(prompt, 94) for prompt in prompts)
    found = in_order(decoder.generate_many(requests, batch_size=2, max_length=96))
    assert [each.tokens.tolist() for each in found] == expected


def test_a_decoder_serves_others_before_and_after() -> None:
    decoder, requests = new_decoder("perturbed"), REQUESTS[::2]
    expected = texts_alone(decoder, requests)
    abandoned = decoder.generate_many(requests, batch_size=2)
    next(abandoned)
    with pytest.raises(RuntimeError, match="output: the newest call is not generate or stream"):
        decoder.output()
    never_begun = decoder.generate_many(requests, batch_size=2)
    assert texts_alone(decoder, requests[::3]) == expected[::3]
    assert many(decoder, requests, 3) == expected
    assert len([*abandoned]) == len(requests) - 1 and texts(never_begun) == expected


def test_prompts_of_similar_length_are_read_together() -> None:
    cases = [
        ([10, 500, 490, 12], 32, [[1, 2], [3, 0]]),
        ([10, 20, 30], 32, [[2, 1, 0]]),
        ([10, 20, 30], 29, [[2, 1], [0]]),
        ([10, 500], None, [[1, 0]]),
        ([4], 32, [[0]]),
        ([], 32, []),
    ]
    for counts, forward_cost, expected in cases:
        assert groups_by_length(counts, forward_cost) == expected
