"""The tokens of a prompt depend on its sampling parameters and its seed alone: not on the batch around it, its place in
the batch, or how the loop runs. And no random number is used twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from gpu_suite import size
from tiny_loops import new_tokens
from tiny_models import VOCAB, padded, perturbed, tiny
from torch import Tensor

import torch_specops
from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import step
from torch_specops.drafts import DraftSource, ModelDraft, NGram, PromptLookup, model, ngram
from torch_specops.hf import language_model

# Each prompt with its seed and its settings.
REQUESTS: list[tuple[list[int], int, dict[str, float]]] = [
    ([5, 9, 9, 4, 5, 9], 11, {"temperature": 1.0}),
    ([7], -5, {"temperature": 0.7, "top_k": 12}),
    ([3, 8, 3, 8, 3], 2**62, {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02}),
    ([6, 6], 11, {"temperature": 0.0, "top_k": 3}),
]
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
NEW_TOKENS = size("new tokens of a request")


def source(kind: str, device: str = "cpu") -> DraftSource | None:
    if kind == "model":
        return ModelDraft(language_model(perturbed(tiny("llama"), 0.05).to(device)))
    if kind == "n-gram":
        text = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1))
        return NGram.from_tokens(text, vocab_size=VOCAB, probabilities=True)
    return PromptLookup(min_ngram=1) if kind == "lookup" else None


def decoder(kind: str, device: str = "cpu", verify: str | None = None) -> SpeculativeDecoder:
    options: dict[str, Any] = {"num_draft_tokens": 3, "schedule": "constant", "verify": verify}
    return SpeculativeDecoder(tiny("llama").to(device), source(kind, device), **options)


def arguments(chosen: list[int]) -> dict[str, Any]:
    prompts, seeds, settings = zip(*(REQUESTS[index] for index in chosen), strict=True)
    input_ids, mask = padded(prompts, "left")
    rows = [NEUTRAL | own for own in settings]
    sampling = SamplingParams(**{name: [own[name] for own in rows] for name in ("temperature", *NEUTRAL)})
    own = {"input_ids": input_ids, "attention_mask": mask, "seed": seeds, "sampling": sampling}
    return own | {"max_new_tokens": NEW_TOKENS, "eos_token_id": ()}


def texts(loop: SpeculativeDecoder, chosen: list[int], **changes: Any) -> list[list[int]]:
    given = arguments(chosen) | changes
    moved = {name: value.to(loop.target.device) for name, value in given.items() if isinstance(value, Tensor)}
    return new_tokens(loop.generate(**(given | moved)))


def texts_alone(kind: str) -> list[list[int]]:
    alone = [texts(decoder(kind), [request])[0] for request in range(len(REQUESTS))]
    # One seed, two temperatures: the greedy request uses none of its numbers.
    assert len({tuple(text) for text in alone}) == len(alone)
    return alone


@pytest.mark.parametrize("kind", ["none", "lookup", "n-gram", "model"])
def test_tokens_do_not_depend_on_the_batch(kind: str) -> None:
    alone = texts_alone(kind)
    for chosen in ([3, 2, 1, 0], [2, 0], [1, 1, 2, 1]):
        assert texts(decoder(kind), chosen) == [alone[index] for index in chosen]
    # Neighbours that end early change nothing.
    assert texts(decoder(kind), [2, 1, 0], max_new_tokens=[2, NEW_TOKENS, 0])[1] == alone[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_a_captured_graph_gives_the_same_tokens(kind: str) -> None:
    alone = texts_alone(kind)
    loop = decoder(kind, "cuda")
    for chosen in size("requests in turn"):
        assert texts(loop, chosen) == [alone[index] for index in chosen]
    assert loop._compiled_steps._graphs


def numbers_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int, str, int]]:
    """(seed, position, stream, index) of every random number that a batch's loop asked for while the row was open."""
    used: Counter[tuple[int, int, str, int]] = Counter()

    def note(seeds: Tensor, positions: Tensor, n: int, stream: str) -> None:
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
            used.update((seed, position, stream, index) for index in range(n))

    def uniforms(seeds: Tensor, positions: Tensor, n: int, stream: str) -> Tensor:
        note(seeds, positions, n, stream)
        return torch_specops.uniforms(seeds, positions, n, stream)

    def verification_uniforms(seeds: Tensor, positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
        note(seeds, positions, n, "accept")
        note(seeds, positions, 1, "sample")
        return real(seeds, positions, n)

    real = step.verification_uniforms
    monkeypatch.setattr(step, "verification_uniforms", verification_uniforms)
    monkeypatch.setattr(model, "uniforms", uniforms)
    monkeypatch.setattr(ngram, "uniforms", uniforms)
    decoder(kind, verify="exact").generate(**arguments([1]))
    return used


@pytest.mark.parametrize("kind", ["none", "n-gram", "model"])
def test_no_number_is_used_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = numbers_used(kind, monkeypatch)
    assert {stream for _, _, stream, _ in used} == {"sample", *(["propose", "accept"] if kind != "none" else [])}
    assert set(used.values()) == {1}


def test_a_number_that_is_used_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong draft that proposes with the numbers of the acceptance tests."""

    def numbers(self: ModelDraft, seeds: Tensor, lengths: Tensor, n: int, sampling: Any) -> Any:
        return model.uniforms(seeds, lengths, n, "accept").unbind(1)

    monkeypatch.setattr(ModelDraft, "_numbers", numbers)
    assert set(numbers_used("model", monkeypatch).values()) == {1, 2}
