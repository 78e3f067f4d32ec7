"""torch's default device and dtype, which programs set for tensors of their own, change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_grammars import Allowing, by_turns
from tiny_loops import DRAFTS, GREEDY, ByTurns
from tiny_models import PROMPTS, padded, shared_tiny

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.drafts import SuffixLookup
from torch_specops.hf import custom_generate
from torch_specops.schedules import Schedule
from torch_specops.testing import markov_pair

EVERYTHING = SamplingParams(
    temperature=torch.tensor([0.8, 0.0, 1.2]),
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.7,
    no_repeat_ngram_size=3,
    logit_bias={3: 0.3},
    bad_words=[[5, 6]],
)
IDS, MASK = padded(PROMPTS, "left")


def ops(vocab_size: int) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(3, count, vocab_size, generator=generator) for count in (4, 3))
    drafts = torch.randint(vocab_size, (3, 3), generator=generator)
    numbers = torch.rand(3, 3, generator=generator), torch.rand(3, generator=generator), torch.tensor([0.7, 0.0, 1.1])
    noise = torch.tensor([1, 2, 3]), torch.tensor([0, 5, 2**33])
    filters = {"top_k": torch.tensor([50, 0, 0]), "top_p": torch.tensor([0.9, 1.0, 0.8]), "min_p": 0.001}

    def call() -> Any:
        found = []
        for own in ({}, filters):
            for op in (torch_specops.verify_exact, torch_specops.verify_block):
                found += [*op(target, drafts, draft, *numbers, **own), *op(target, drafts, None, *numbers, **own)]
            found += torch_specops.sample(target[:, 0], *numbers[1:], **own)
            found += torch_specops.verify_gumbel(target, drafts, *noise, numbers[2], **own)
            found.append(torch_specops.sample_gumbel(target[:, 0], *noise, numbers[2], **own))
        scores = torch_specops.verify_sigmoid(target, drafts, draft, *numbers[:2], -10.0, 10.0, numbers[2])
        return [*found, *scores, torch_specops.filter_logits(target[:, 0], numbers[2], **filters)]

    return call


def rows(draft: str, schedule: Schedule | None = None) -> Callable[[], Any]:
    options: dict[str, Any] = {"num_draft_tokens": 3, "schedule": schedule, "compile": False}
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS[draft]("llama"), **options)

    def call() -> Any:
        found = []
        for sampling, logprobs in ((GREEDY, "raw"), (EVERYTHING, "processed")):
            arguments: dict[str, Any] = {"max_new_tokens": [9, 4, 0], "seed": 1, "logprobs": logprobs}
            output = decoder.generate(IDS, attention_mask=MASK, sampling=sampling, top_logprobs=2, **arguments)
            assert output.top_logprobs is not None
            found += [output.sequences, output.logprobs, *output.top_logprobs]
        return found

    return call


def requests() -> Callable[[], Any]:
    decoder = SpeculativeDecoder(shared_tiny("llama"), SuffixLookup(), num_draft_tokens=3, compile=False)
    given = [Request(prompt, 6, GREEDY if index else None, index) for index, prompt in enumerate(PROMPTS)]

    def call() -> Any:
        assert isinstance(decoder.draft, SuffixLookup)
        decoder.draft.forget()
        own = [Request([5, 6], 9, seed=3, grammar=Allowing(by_turns)), *given]
        found = decoder.generate_many(own, batch_size=2, max_length=60, logprobs="raw", top_logprobs=2)
        return [part for each in found for part in (each.tokens, each.logprobs, *(each.top_logprobs or ()))]

    return call


def of_transformers() -> Any:
    model, options = shared_tiny("llama"), {"repetition_penalty": 1.2, "min_new_tokens": 2, "max_new_tokens": 6}
    options |= {"pad_token_id": 0, "assistant_model": shared_tiny("llama", seed=3)}
    return [model.generate(IDS, attention_mask=MASK, custom_generate=custom_generate, seed=1, **options)]


def beams() -> Any:
    output = beam_search(
        shared_tiny("llama"), IDS, attention_mask=MASK, num_beams=2, max_new_tokens=5, draft=shared_tiny("llama")
    )
    return [output.sequences, output.scores]


WAYS: dict[str, Callable[[], Callable[[], Any]]] = {
    "ops": lambda: ops(300),
    # Filters read long rows in another way.
    "ops over long rows": lambda: ops(40_000),
    # The others are made of the same code.
    **{
        draft: lambda draft=draft: rows(draft)
        for draft in DRAFTS
        if draft not in ("itself", "stranger", "n-gram", "over a model")
    },
    "two sources": lambda: rows("lookup else", ByTurns(3)),
    "requests": requests,
    "transformers": lambda: of_transformers,
    "beams": lambda: beams,
    "models of laws": lambda: lambda: [model.table for model in markov_pair(4)],
}


@pytest.mark.parametrize("way", WAYS)
def test_they_change_nothing(way: str) -> None:
    call, before = WAYS[way](), torch.get_default_dtype()
    expected = call()
    torch.set_default_dtype(torch.bfloat16)
    try:
        # A tensor that the package makes without a device has no data.
        with torch.device("meta"):
            found = call()
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
