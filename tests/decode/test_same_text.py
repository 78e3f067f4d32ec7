"""With `verify="gumbel"` the text of a request depends on target, prompt, sampling and seed alone: not on the draft, K,
the schedule, the batch, the order of requests, the way in, or a grammar that allows what comes anyway."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tiny_grammars import Allowing, by_turns
from tiny_loops import DRAFTS, EachItsOwn, Given, new_tokens, streamed
from tiny_models import VOCAB, padded, shared_tiny
from tiny_mtp import TinyMtp
from tiny_requests import many, texts
from torch import Tensor

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.decode import step
from torch_specops.drafts import MTP, PromptLookup, SuffixLookup
from torch_specops.hf import custom_generate

PROMPTS = ([1, 17, 5, 33, 17, 5, 48], [1], [1, 29, 40, 8], [1, 17, 5, 33])
SEEDS = [11, -5, 2**62, 11]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.2},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.4, "presence_penalty": 0.5},
]
LENGTHS = [16, 12, 9, 14]
# Drafts that are like the target at any temperature.
ACCEPTED = ("itself", "perturbed", "early exit", "hierarchical", "over a model", "token map", "eagle 3", "dflash")
Texts = list[list[int]]


def sampling(rows: list[int]) -> SamplingParams:
    """Of several rows at once."""
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    own = [neutral | SETTINGS[row] for row in rows]
    return SamplingParams(**{name: [each[name] for each in own] for name in own[0]})


def arguments(rows: list[int] | None = None) -> dict[str, Any]:
    rows = rows or list(range(len(PROMPTS)))
    input_ids, mask = padded([PROMPTS[row] for row in rows], "left")
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "seed": [SEEDS[row] for row in rows],
        "sampling": sampling(rows),
        "max_new_tokens": [LENGTHS[row] for row in rows],
        "eos_token_id": (),
    }


def decoder(draft: str = "nothing", num_draft_tokens: int = 3, **options: Any) -> SpeculativeDecoder:
    own = {"num_draft_tokens": num_draft_tokens, "verify": "gumbel", "schedule": "constant"} | options
    return SpeculativeDecoder(shared_tiny("llama"), DRAFTS[draft]("llama"), **own)


def requests(**options: Any) -> list[Request]:
    settings = [SamplingParams(**each) for each in SETTINGS]
    rows = zip(PROMPTS, SEEDS, settings, LENGTHS, strict=True)
    return [
        Request(prompt, seed=torch.tensor([seed]), sampling=own, max_new_tokens=length, eos_token_id=(), **options)
        for prompt, seed, own, length in rows
    ]


@cache
def expected() -> tuple[tuple[int, ...], ...]:
    """Each alone, without a draft."""
    found = [new_tokens(decoder().generate(**arguments([row])))[0] for row in range(len(PROMPTS))]
    return tuple(map(tuple, found))


def is_expected(found: Texts) -> bool:
    return [*map(tuple, found)] == [*expected()]


@pytest.mark.parametrize("kind", DRAFTS)
def test_no_draft_changes_the_text(kind: str) -> None:
    output = decoder(kind).generate(**arguments())
    assert is_expected(new_tokens(output)) and output.stats.verify == "gumbel"
    if kind == "itself":
        # A draft that shares the noise and the logits is never wrong.
        assert output.stats.acceptance_rate == 1
    assert kind not in ACCEPTED or output.stats.num_accepted > 0


def test_mtp_layers_change_no_text() -> None:
    tiny = TinyMtp("glm4_moe", 1)
    plain, drafted = (
        SpeculativeDecoder(tiny.model, draft, num_draft_tokens=3, verify="gumbel").generate(**arguments())
        for draft in (None, MTP.from_pretrained(tiny.model))
    )
    assert new_tokens(plain) == new_tokens(drafted) and drafted.stats.num_accepted > 0


def in_other_ways() -> Iterator[tuple[str, Texts]]:
    for schedule in ("heuristic", "auto", Given([3, 0, 1, 5, 0, 0, 2]), EachItsOwn([3, 0, 1, 5, 2])):
        output = decoder("perturbed", schedule=schedule).generate(**arguments())
        yield str(schedule), new_tokens(output)
    yield "auto, prompt lookup", new_tokens(decoder("prompt lookup", schedule="auto").generate(**arguments()))
    for rows in ([3, 2, 1, 0], [2, 0], [1, 1, 3, 1]):
        found = new_tokens(decoder("perturbed").generate(**arguments(rows)))
        yield f"rows {rows}", [found[rows.index(row)] if row in rows else list(expected()[row]) for row in range(4)]
    yield "stream", streamed(list(decoder("n-gram").stream(**arguments())), len(PROMPTS))
    for kind in ("prompt lookup", "eagle 3"):
        yield f"two rows, {kind}", many(decoder(kind), requests(), 2)
    yield "two rows, reversed", many(decoder("perturbed"), requests()[::-1], 2)[::-1]
    everything = [Allowing(lambda text: range(VOCAB)) for _ in PROMPTS]
    yield "a grammar that allows all", new_tokens(decoder("perturbed").generate(**arguments(), grammar=everything))
    remembers = SpeculativeDecoder(shared_tiny("llama"), SuffixLookup(), num_draft_tokens=4)
    for call in ("new", "remembering"):
        yield f"suffixes, {call}", new_tokens(remembers.generate(**arguments()))
    yield "session", in_a_session()
    yield "the door of transformers", through_transformers()


def in_a_session() -> Texts:
    """Beside requests that come, end and are cancelled."""
    with decoder("perturbed", max_length=64).session(3) as session:
        session.submit(Request([1, 2, 3], max_new_tokens=5, seed=4))
        cancelled = session.submit(Request([9, 9], max_new_tokens=30, seed=5))
        session.step()
        handles = [session.submit(request) for request in requests()]
        session.step()
        cancelled.cancel()
        while not session.is_idle:
            session.step()
        return texts(handle.result() for handle in handles)


def through_transformers() -> Texts:
    """Each prompt alone, because there all rows have the same sampling."""
    found = []
    for row, (prompt, own) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        if "presence_penalty" in own:
            found.append(list(expected()[row]))
            continue
        output = shared_tiny("llama").generate(
            torch.tensor([prompt]),
            do_sample=True,
            custom_generate=custom_generate,
            draft_model=PromptLookup(min_ngram=1),
            seed=torch.tensor([SEEDS[row]]),
            max_new_tokens=LENGTHS[row],
            **({"top_k": 0} | own),
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def test_no_way_in_changes_the_text() -> None:
    for way, found in in_other_ways():
        assert is_expected(found), way


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nothing", "prompt lookup", "perturbed", "eagle 3"])
def test_compiled_steps_change_no_text(kind: str, fresh_dynamo: None) -> None:
    compiled = decoder(kind, compile=True)
    assert is_expected(new_tokens(compiled.generate(**arguments()))) and compiled.compiled


def test_a_grammar_gives_one_text_with_every_draft() -> None:
    found = []
    for kind in ("nothing", "prompt lookup", "perturbed", "dflash"):
        own = [Allowing(by_turns) for _ in PROMPTS]
        found.append(new_tokens(decoder(kind).generate(**arguments(), grammar=own)))
    assert found[1:] == found[:-1] and not is_expected(found[0])


def test_noise_of_the_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong loop, whose noise depends on where a step begins."""

    def verify(logits: Tensor, drafts: Tensor, seeds: Tensor, lengths: Tensor, *args: Any, **filters: Any) -> Any:
        return torch_specops.verify_gumbel(logits, drafts, seeds, 2 * lengths, *args, **filters)

    # What is expected is computed once, by the loop as it is.
    assert is_expected(new_tokens(decoder("nothing").generate(**arguments())))
    monkeypatch.setattr(step, "verify_gumbel", verify)
    wrong = [new_tokens(decoder(kind).generate(**arguments())) for kind in ("nothing", "n-gram", "perturbed")]
    assert wrong[0] != wrong[1] and wrong[0] != wrong[2]


def test_what_is_the_default() -> None:
    for kind, verify in (("nothing", "gumbel"), ("prompt lookup", "gumbel"), ("perturbed", "exact")):
        for given, used in ((None, verify), ("exact", "exact"), ("gumbel", "gumbel")):
            assert decoder(kind, verify=given).generate(torch.tensor([[1]]), max_new_tokens=2).stats.verify == used
