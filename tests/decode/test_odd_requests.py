"""Requests with numbers and lists of absurd sizes: they end or are refused by name, and the requests after them do not
notice. Costs are counted in steps and in elements of tensors, because seconds depend on the machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, PairModel, TracedPairs, random_table
from tiny_requests import in_order, texts_alone
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from torch_specops import Request, SamplingParams, Session, SpeculativeDecoder
from torch_specops.decode import Handle
from torch_specops.drafts import ModelDraft
from torch_specops.sampling import Processors

HUGE = 10**12
WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)})))
NORMAL = Request([5, 6, 7], 8, SamplingParams(temperature=0.9, top_k=20), seed=[3], eos_token_id=())

# For each field what a request may ask for, and what the error says if it is refused.
SAMPLING: dict[str, list[tuple[Any, str | None]]] = {
    "temperature": [
        (1e-30, None),
        (3e38, None),
        (1e-38, "temperature: expected 0 (greedy) or finite numbers >= 1e-30"),
    ],
    "top_k": [(2**62, None), (10**400, "top_k: expected numbers of 64 bits")],
    "top_p": [(1e-30, None), (math.nan, "top_p: expected")],
    "min_p": [(1e-30, None), (-math.inf, "min_p: expected")],
    "repetition_penalty": [(1e30, None), (1e-38, "repetition_penalty: expected numbers in [1e-30, 1e+30]")],
    "presence_penalty": [(-1e30, None), (1e38, "presence_penalty: expected numbers in [-1e+30, 1e+30]")],
    "frequency_penalty": [(1e30, None), (-1e38, "frequency_penalty: expected numbers in")],
    "no_repeat_ngram_size": [(HUGE, None), (2**63 - 1, None), (3, None), (10**400, "no_repeat_ngram_size: expected")],
    "min_new_tokens": [(2**62, None), (10**400, "min_new_tokens: expected")],
    "logit_bias": [(dict.fromkeys(range(VOCAB), 1.0), None), ({10**400: 1.0}, "logit_bias: expected tokens in")],
    "bad_words": [
        ([[n % VOCAB, n // VOCAB % VOCAB, 1] for n in range(1000)], None),
        ([[1] * 1000], None),
        ([[10**400]], "bad_words: expected tokens in"),
    ],
}
FIELDS: dict[str, list[tuple[Any, str | None]]] = {
    "input_ids": [
        ([5] * 30, None),
        ([2**70], "input_ids: expected"),
        ([5] * 4000, "max_new_tokens: expected prompt and new tokens within max_length"),
    ],
    "max_new_tokens": [
        (HUGE, "max_new_tokens: expected a number <= 2147483647"),
        (2**62, "max_new_tokens: expected"),
        (10**400, "max_new_tokens: expected"),
        (2**31 - 1, "max_new_tokens: expected prompt and new tokens within max_length"),
    ],
    "sampling": [
        ({"temperature": 0.0, "top_k": 3}, None),
        ({"temperature": -1.0}, "temperature: expected 0 (greedy) or"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias, bad_words: expected tokens in"),
        ({"heat": 1.0}, "sampling: SamplingParams.__init__() got an unexpected keyword argument 'heat'"),
        ({3: 1.0}, ""),
        ([1.0], "sampling: expected SamplingParams, got"),
    ],
    "seed": [(2**63 - 1, None), (10**400, "seed: expected a 64-bit number"), (math.nan, "seed: expected an int")],
    "eos_token_id": [(list(range(VOCAB)) * 50, None), ([2**70], "eos_token_id: expected"), ([3, -1], "eos_token_id: ")],
    "stop_strings": [(["w5" * 5000, *(f"w{n} w5" for n in range(1000))], None), ([3], "stop_strings: expected")],
    "tokenizer": [(3, "tokenizer: expected a tokenizer")],
    "max_time": [
        (1e-300, None),
        (math.inf, None),
        *((value, "max_time: expected seconds >= 0") for value in (math.nan, -1, -math.inf, 10**400)),
        *((value, "max_time: expected a number") for value in (True, "1", [1])),
    ],
    "inputs": [({}, "inputs: expected None")],
    "grammar": [(3, "grammar: expected a Grammar")],
}


class Work(TorchDispatchMode):
    """Counts the elements of all tensors that are computed."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
            self.elements += output.numel() if isinstance(output, torch.Tensor) else 0
        return outputs


def work(function: Callable[[], object]) -> int:
    with Work() as counted:
        function()
    return counted.elements


def steps_of(session: Session, handle: Handle) -> int:
    steps = 0
    while not handle.done:
        session.step()
        steps += 1
    return steps


def decoder() -> SpeculativeDecoder:
    table, other = random_table(VOCAB, seed=5), random_table(VOCAB, seed=6)
    return SpeculativeDecoder(PairModel(table), ModelDraft(PairModel(table + 0.3 * other)), num_draft_tokens=3)


def odd_requests() -> list[tuple[Any, str | None]]:
    """Functions, because a field of `SamplingParams` may be refused when it is made."""

    def made(name: str, value: Any) -> Request:
        fields: dict[str, Any] = {name: value}
        if name in SAMPLING:
            fields = {"sampling": SamplingParams(**{"temperature": 1.0, **fields})}
        elif name in ("stop_strings", "tokenizer"):
            fields = {"stop_strings": "w5", "tokenizer": WORDS, **fields}
        return Request(**{"input_ids": [5, 6, 5, 6], "max_new_tokens": 6, "seed": 1, "eos_token_id": (), **fields})

    odd = []
    for fields in (SAMPLING, FIELDS):
        for name, values in fields.items():
            odd += [(lambda name=name, value=value: made(name, value), error) for value, error in values]
    return odd


def test_odd_request_slows_no_later_one() -> None:
    fields = {each.name for kind in (Request, SamplingParams) for each in dataclasses.fields(kind)}
    assert fields == {*SAMPLING, *FIELDS}
    session = decoder().session(4, max_length=40)
    (expected,) = texts_alone(decoder(), [NORMAL])

    def normal() -> None:
        handle = session.submit(NORMAL)
        found.append((steps_of(session, handle), handle.result(0).new_tokens.tolist()))

    found: list[Any] = []
    normal()
    before, first = work(normal), found[0]
    assert first[1] == expected
    wrong = []
    for make, error in odd_requests():
        try:
            handle = session.submit(make())
            steps = steps_of(session, handle)
            said = handle.result(0).error
        except (TypeError, ValueError) as refused:
            steps, said = 0, str(refused)
        after = work(normal)
        if (error is None) != (said is None) or error not in (None, str(said)[: len(error or "")]):
            wrong.append((error, said))
        elif steps > 7 or (after, found[-1]) != (before, first):
            wrong.append((error, steps, after / before))
    assert wrong == []


def test_refused_request_ends_no_other() -> None:
    """Nor do the numbers that it asks for choose their buffers."""
    odd = [
        {name: value}
        for name, values in FIELDS.items()
        for value, error in values
        if error and "max_length" not in error
    ]
    odd.remove({"tokenizer": 3})
    odd += [{"max_new_tokens": math.inf}, {"max_new_tokens": -HUGE}]
    given = [NORMAL, *(Request(**{"input_ids": [5], "max_new_tokens": 2, **fields}) for fields in odd), NORMAL]
    (expected,) = texts_alone(decoder(), [NORMAL])
    found = in_order(decoder().generate_many(given, batch_size=2))
    assert [found[place].new_tokens.tolist() for place in (0, -1)] == [expected, expected]
    assert [found[place + 1] for place in range(len(odd)) if found[place + 1].error is None] == []


def test_odd_request_costs_its_size() -> None:
    """Not the number of rows, nor its longest word, times the number of its words; and not n for n-grams."""
    text, lengths = torch.randint(0, VOCAB, (8, 200)), torch.full((8, 4), 190)
    logits, prompt_lengths = torch.randn(8, 4, VOCAB), torch.full((8,), 100)

    def cost(**fields: Any) -> int:
        rows = {name: [value, *[[] if name == "bad_words" else 0] * 7] for name, value in fields.items()}
        tensors = SamplingParams(**rows).tensors(8, prompt_lengths=prompt_lengths)
        assert isinstance(tensors.processors, Processors)
        return work(lambda: tensors.process(logits, text, lengths))

    none = cost(bad_words=[[1]])
    many, long = [[n % VOCAB, n // VOCAB % VOCAB] for n in range(1000)], [[1] * 1000]
    assert cost(bad_words=many + long) - none < 2.1 * (cost(bad_words=many) - none)
    assert cost(bad_words=many) - none < 40 * 4 * sum(map(len, many))
    assert cost(no_repeat_ngram_size=HUGE) < 3 * cost(no_repeat_ngram_size=3)


@pytest.mark.usefixtures("without_inductor")
def test_an_odd_request_compiles_nothing() -> None:
    """Its steps, and those of its neighbours, run eagerly, and then the compiled ones come back."""
    odd = [{"no_repeat_ngram_size": HUGE}, {"bad_words": [[n % VOCAB, 1, n // VOCAB] for n in range(400)]}]
    given = [NORMAL, *(Request([5, 6, 5, 6], 6, SamplingParams(**own), seed=1, eos_token_id=()) for own in odd)]
    given += [Request([5, 6], 6, seed=1, eos_token_id=list(range(0, VOCAB, 2))), NORMAL]
    target = TracedPairs(random_table(VOCAB, seed=5))
    expected = texts_alone(SpeculativeDecoder(target), given)
    every = SamplingParams(0.5, 9, 0.9, 0.1, 1.1, 0.1, 0.1, 3, 1, {3: 1.0}, [[4, 5]])
    with SpeculativeDecoder(target, compile=True).session(2, max_length=40) as session:
        steps_of(session, session.submit(Request([5, 6], 6, every)))
        with torch.compiler.set_stance("fail_on_recompile"):
            handles = [session.submit(request) for request in given]
            steps_of(session, handles[-1])
    assert [handle.result(0).new_tokens.tolist() for handle in handles] == expected


def test_a_time_limit_of_result_is_a_number() -> None:
    session = decoder().session(1, max_length=40)
    handle = session.submit(Request([5], 0))
    for wrong, error in ((math.nan, ValueError), (-1, ValueError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match="timeout: expected"):
            handle.result(wrong)  # type: ignore[arg-type]
    session.step()
    assert {handle.result(limit).finish_reason for limit in (None, 0, 1e300, math.inf, 10**400)} == {"length"}
