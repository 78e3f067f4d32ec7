"""With `invariant=True` and `verify="gumbel"` the text of a request and its log-probabilities have the same bits with
any draft, K, schedule, batch, order and way in, and in a trainer's forward."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from marks import slow
from tiny_eagle3 import trained_head
from tiny_grammars import Allowing
from tiny_loops import EachItsOwn
from tiny_models import VOCAB, perturbed, tiny
from tiny_requests import in_order
from torch import Tensor

import torch_specops
from torch_specops import Completion, GenerationOutput, Request, SamplingParams, SpeculativeDecoder
from torch_specops.drafts import Eagle3, EarlyExit, PromptLookup, SuffixLookup
from torch_specops.hf import custom_generate, language_model

PROMPTS = ([1, 17, 5, 33, 17, 5, 48], [1], [1, 29, 40, 8, 1, 29], [1, 17, 5, 33] * 6, [9, 9])
SEEDS = [11, -5, 2**62, 11, 3]
LENGTHS = [14, 11, 6, 12, 8]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.2},
    {"temperature": 1.3, "min_p": 0.02},
    {"temperature": 0.4, "presence_penalty": 0.5},
    {"temperature": 0.0},
]
# A text and its log-probabilities.
Text = tuple[list[int], Tensor]


@cache
def target(dtype: torch.dtype) -> transformers.PreTrainedModel:
    return tiny("llama", intermediate_size=148).to(dtype)


def decoder(dtype: torch.dtype, draft: Any = None, k: int = 3, **options: Any) -> SpeculativeDecoder:
    own = {"num_draft_tokens": k, "verify": "gumbel", "schedule": "constant", "invariant": True} | options
    return SpeculativeDecoder(own.pop("of", target(dtype)), draft, **own)


def settings(rows: list[int]) -> SamplingParams:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    own = [neutral | SETTINGS[row] for row in rows]
    return SamplingParams(**{name: [each[name] for each in own] for name in own[0]})


def arguments(rows: list[int]) -> dict[str, Any]:
    return {
        "input_ids": [PROMPTS[row] for row in rows],
        "seed": [SEEDS[row] for row in rows],
        "sampling": settings(rows),
        "max_new_tokens": [LENGTHS[row] for row in rows],
        "eos_token_id": (),
        "logprobs": "raw",
    }


def of_output(output: GenerationOutput) -> list[Text]:
    assert output.stats.invariant and output.logprobs is not None
    spans = zip(output.prompt_lengths.tolist(), output.lengths.tolist(), strict=True)
    return [(output.new_tokens(row), output.logprobs[row, a:b].clone()) for row, (a, b) in enumerate(spans)]


def of_completions(completions: list[Completion]) -> list[Text]:
    return [(each.new_tokens.tolist(), each.logprobs) for each in in_order(completions)]


def requests(rows: list[int], **options: Any) -> list[Request]:
    return [
        Request(
            PROMPTS[row],
            seed=torch.tensor([SEEDS[row]]),
            sampling=SamplingParams(**SETTINGS[row]),
            max_new_tokens=LENGTHS[row],
            eos_token_id=(),
            **options,
        )
        for row in rows
    ]


@cache
def expected(dtype: torch.dtype) -> list[Text]:
    """Each alone, without a draft."""
    return [of_output(decoder(dtype).generate(**arguments([row])))[0] for row in range(len(PROMPTS))]


def are_same(found: list[Text], wanted: list[Text]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(text == other and torch.equal(bits, others) for (text, bits), (other, others) in pairs)


ALL = list(range(len(PROMPTS)))


def in_many_ways(dtype: torch.dtype) -> Iterator[tuple[str, list[Text]]]:
    draft = perturbed(target(dtype), 0.01)
    yield "a batch", of_output(decoder(dtype).generate(**arguments(ALL)))
    for k in (1, 3, 5):
        rows = [ALL, ALL[::-1], [2, 0, 1, 4, 3]][k % 3]
        found = of_output(decoder(dtype, draft, k).generate(**arguments(rows)))
        yield f"K = {k}", [found[rows.index(row)] for row in ALL]
    for name, source in (
        ("prompt lookup", PromptLookup(min_ngram=1)),
        ("suffixes", SuffixLookup()),
        ("early exit", EarlyExit(1)),
        ("itself", target(dtype)),
        ("EAGLE-3", Eagle3(copy.deepcopy(trained_head()).to(dtype))),
    ):
        yield name, of_output(decoder(dtype, source).generate(**arguments(ALL)))
    # Rows have different numbers of drafts, and are packed.
    plan = EachItsOwn([3, 0, 1, 5, 2])
    yield "packed", of_output(decoder(dtype, draft, 5, schedule=plan).generate(**arguments(ALL)))
    everything = [Allowing(lambda text: range(VOCAB)) for _ in PROMPTS]
    yield "a grammar", of_output(decoder(dtype, draft).generate(**arguments(ALL), grammar=everything))
    yield "capacity", of_output(decoder(dtype, draft, max_length=96).generate(**arguments(ALL)))
    many = decoder(dtype, PromptLookup()).generate_many(requests(ALL), batch_size=2, max_length=70, logprobs="raw")
    yield "two rows", of_completions(list(many))
    yield "a session", in_a_session(dtype, draft)
    yield "turns", in_turns(dtype, draft)
    yield "transformers", through_transformers(dtype, draft)


def in_a_session(dtype: torch.dtype, draft: Any) -> list[Text]:
    """Rows are refilled beside requests that come, end and are cancelled."""
    with decoder(dtype, draft, max_length=64).session(3, logprobs="raw") as session:
        session.submit(Request([1, 2, 3], max_new_tokens=5, seed=4))
        cancelled = session.submit(Request([9, 9], max_new_tokens=30, seed=5))
        session.step()
        handles = [session.submit(request) for request in requests(ALL)]
        session.step()
        cancelled.cancel()
        while not session.is_idle:
            session.step()
        return of_completions([handle.result() for handle in handles])


def in_turns(dtype: torch.dtype, draft: Any) -> list[Text]:
    """Another stream uses the model in between, after which texts are read again."""
    shared = language_model(target(dtype), invariant=True)
    made, other = (decoder(dtype, draft, of=shared) for _ in range(2))
    for number, _ in enumerate(made.stream(**arguments(ALL))):
        if number % 3 == 1:
            other.generate([[5, 6, 7, 8]], max_new_tokens=2)
    return of_output(made.output())


def through_transformers(dtype: torch.dtype, draft: Any) -> list[Text]:
    """Its output has logits instead of log-probabilities."""
    found = []
    for row, own in enumerate(SETTINGS):
        if "presence_penalty" in own or own["temperature"] == 0:
            found.append(expected(dtype)[row])
            continue
        output = target(dtype).generate(
            torch.tensor([PROMPTS[row]]),
            do_sample=True,
            custom_generate=custom_generate,
            assistant_model=draft,
            verify="gumbel",
            invariant=True,
            seed=torch.tensor([SEEDS[row]]),
            max_new_tokens=LENGTHS[row],
            return_dict_in_generate=True,
            output_logits=True,
            **({"top_k": 0} | own),
        )
        new = output.sequences[0, len(PROMPTS[row]) :]
        assert output.stats.invariant
        found.append((new.tolist(), torch_specops.raw_logprobs(torch.stack(output.logits, 1)[0], new)))
    return found


# Some processors round a batch in bfloat16 as they round each text alone.
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_no_way_changes_a_bit(dtype: torch.dtype) -> None:
    for way, found in in_many_ways(dtype):
        assert are_same(found, expected(dtype)), way
    # A trainer's forward of all texts.
    texts = [torch.tensor(prompt + text) for prompt, (text, _) in zip(PROMPTS, expected(dtype), strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    logits = torch_specops.invariant_forward(target(dtype))(ids).logits
    logprobs = torch_specops.raw_logprobs(logits[:, :-1], ids[:, 1:]).detach()
    starts = [len(prompt) - 1 for prompt in PROMPTS]
    rows = [
        (text, logprobs[row, start : start + len(text)])
        for row, (start, (text, _)) in enumerate(zip(starts, expected(dtype), strict=True))
    ]
    assert are_same(rows, expected(dtype))


def test_without_the_option_bits_differ() -> None:
    dtype = torch.float32
    output = decoder(dtype, perturbed(target(dtype), 0.01), invariant=False).generate(**arguments(ALL))
    assert not output.stats.invariant
    starts = [(len(prompt), len(prompt) + length) for prompt, length in zip(PROMPTS, LENGTHS, strict=True)]
    found = [output.logprobs[row, start:end] for row, (start, end) in enumerate(starts)]
    assert not all(torch.equal(own, bits) for own, (_, bits) in zip(found, expected(dtype), strict=True))


def test_a_grammar_that_decides() -> None:
    found = []
    for draft in (None, PromptLookup(min_ngram=1), perturbed(target(torch.float32), 0.01)):
        own = [Allowing(lambda text: [2 * len(text) % VOCAB, (2 * len(text) + 1) % VOCAB, 7]) for _ in PROMPTS]
        found.append(of_output(decoder(torch.float32, draft).generate(**arguments(ALL), grammar=own)))
    assert are_same(found[1], found[0]) and are_same(found[2], found[0])
    assert found[0][0][0] != expected(torch.float32)[0][0]


def test_raw_logprobs() -> None:
    logits = torch.tensor([[1.0, 2.0, math.nan], [math.inf, 0.0, -math.inf]])
    tokens = torch.tensor([1, 1])
    expected = [-math.log1p(math.exp(-1.0)), -torch.finfo(torch.float32).max]
    torch.testing.assert_close(torch_specops.raw_logprobs(logits, tokens), torch.tensor(expected))
    for shape in ((3,), (2, 1), ()):
        with pytest.raises(ValueError, match=r"tokens: expected \[2\], as the logits have rows, got "):
            torch_specops.raw_logprobs(logits, torch.zeros(shape, dtype=torch.int64))
