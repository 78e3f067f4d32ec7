"""transformers' logits processors through `custom_generate`: the tokens of `model.generate`, and the exact law."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from conftest import Report
from test_custom_generate import arguments, ours, plain
from test_loop_laws import tiny_transformer
from tiny_laws import FEWER_TRIALS, LENGTH, SEED, V, joint_law
from tiny_models import perturbed, shared_tiny
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate
from torch_specops.hf.processors import _Called
from torch_specops.laws import chi_square

NEW = 14


class Alternating(LogitsProcessor):
    """By the width of the text, padding included, by the row, and by the newest token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens = torch.arange(scores.shape[1])
        step = (input_ids.shape[1] + torch.arange(len(input_ids)).unsqueeze(1) + input_ids[:, -1:]) % 3
        return torch.where(tokens % 3 == step, scores - 4.0, scores)


class InPlace(Alternating):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.copy_(super().__call__(input_ids, scores))


def processed(*processors: LogitsProcessor) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList(processors)}


def cases() -> dict[str, dict[str, Any]]:
    """Options that change the greedy tokens, taken from these. The prompts are padded with token 7."""
    free = plain(shared_tiny("llama"), **arguments("llama"), max_new_tokens=NEW)[:, -NEW:].tolist()
    words = [free[0][2:4], free[1][4:7], [free[2][1]], [7, 9]]
    biases = {(free[0][1],): -2.0, tuple(free[1][2:5]): -math.inf, (7,): 3.0, tuple(free[2][3:5]): -9.0}
    eos = {"eos_token_id": [free[0][1], free[1][3], free[2][0]]}
    return {
        "repetition penalty": {"repetition_penalty": 1.8},
        "n-grams": {"no_repeat_ngram_size": 2, "suppress_tokens": [token for token in range(60) if token > 12]},
        "bad words": {"bad_words_ids": words, "eos_token_id": free[2][1]},
        "biases": {"sequence_bias": biases},
        "least length": eos | {"min_length": 12},
        "least new tokens": eos | {"min_new_tokens": 6},
        "mixed": eos
        | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": words, "sequence_bias": biases}
        | {"min_new_tokens": 4, "begin_suppress_tokens": free[0][:1], "suppress_tokens": [3, 4]},
        "of the user": processed(Alternating()),
        "in place": processed(InPlace()),
        "of the user, between others": processed(Alternating(), RepetitionPenaltyLogitsProcessor(1.5))
        | {"no_repeat_ngram_size": 2},
        "only some of the user": processed(RepetitionPenaltyLogitsProcessor(1.5)),
    }


@pytest.mark.parametrize("name", cases())
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Three rows of different lengths, padded on the left."""
    target, options = shared_tiny("llama"), {**arguments("llama"), "max_new_tokens": NEW, **cases()[name]}
    expected = plain(target, **options)
    assert not torch.equal(expected, plain(target, **arguments("llama"), max_new_tokens=NEW))
    for draft in (None, perturbed(target), PromptLookup(min_ngram=1)):
        assert torch.equal(ours(target, **options, draft_model=draft, num_draft_tokens=3), expected)


def test_a_draft_goes_through_the_same() -> None:
    """The target as its own draft: everything is accepted."""
    target, taken = shared_tiny("llama"), dict[str, float]()
    for name in ("mixed", "of the user, between others"):
        options = {**arguments("llama"), **cases()[name], "max_new_tokens": NEW, "return_dict_in_generate": True}
        for sampled in ({}, {"do_sample": True, "top_k": 0, "seed": 1}):
            output: Any = ours(target, **options, **sampled, draft_model=target)
            taken[f"{name}, {sampled}"] = output.stats.acceptance_rate
    assert min(taken.values()) > 0.999, taken


def test_no_processor_is_called_for_what_follows_an_eos() -> None:
    """All rows that go on have equally many new tokens, because there is no draft."""
    widths = list[int]()

    class Noting(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            widths.append(input_ids.shape[1])
            return scores

    output = ours(shared_tiny("llama"), **arguments("llama"), max_new_tokens=NEW)
    prompt = output.shape[1] - NEW
    eos = [int(output[0, prompt + 3]), int(output[1, prompt + 6]), int(output[2, prompt + 1])]
    output = ours(
        shared_tiny("llama"), **arguments("llama"), **processed(Noting()), max_new_tokens=NEW, eos_token_id=eos
    )
    assert widths == list(range(prompt, output.shape[1])) and len(widths) > 3


def test_what_has_no_counterpart_is_called_and_says_so() -> None:
    target = shared_tiny("llama")
    options: dict[str, Any] = {**arguments("llama"), "max_new_tokens": 4, "draft_model": target, "seed": 2}
    for given, called in (
        (processed(Alternating()), "eager: Alternating of logits_processor: called as they are"),
        ({"typical_p": 0.9}, "eager: TemperatureLogitsWarper, TypicalLogitsWarper of logits_processor"),
        (processed(TopPLogitsWarper(0.5, -math.inf, 2)), "eager: TopPLogitsWarper of"),
        (processed(MinPLogitsWarper(0.5, -9.0)), "eager: MinPLogitsWarper of"),
        (processed(MinPLogitsWarper(0.5), TopPLogitsWarper(0.5)), "eager: MinPLogitsWarper, TopPLogitsWarper of"),
        (processed(TemperatureLogitsWarper(2.0), TemperatureLogitsWarper(3.0)), "eager: TemperatureLogitsWarper, Temp"),
        ({"top_k": 5, "repetition_penalty": 1.1}, "eager: on cpu compiling pays"),
    ):
        sampled = {"do_sample": True, "top_k": 0, "temperature": 1.5} | given
        output: Any = ours(target, **options, **sampled, return_dict_in_generate=True)
        assert output.stats.compiled.startswith(called), output.stats.compiled
        assert output.stats.acceptance_rate > 0.999
    with pytest.raises(
        ValueError, match="compile: expected False or 'auto', got True: Alternating of logits_processor"
    ):
        ours(target, **options, **processed(Alternating()), compile=True)


@torch.inference_mode()
def law(model: Any, prompt: list[int], penalty: float) -> Tensor:
    """[V, V, V] of the first three tokens under `Alternating` and a repetition penalty."""
    processors = [Alternating(), RepetitionPenaltyLogitsProcessor(penalty)]

    def next_law(new: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *new]])
        scores = model(ids).logits[:, -1].float()
        for processor in processors:
            scores = processor(ids, scores)
        return scores[0].double().softmax(-1)

    return joint_law(next_law)


def sampled_p_value(model: Any, expected: Tensor, prompt: list[int]) -> float:
    """The rows of one index in many calls would take long; those of a batch are one call, and every third is alike."""
    ids = torch.tensor([prompt]).repeat(FEWER_TRIALS, 1)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=LENGTH,
        eos_token_id=None,
        pad_token_id=0,
        custom_generate=custom_generate,
        draft_model=perturbed(model, 0.2),
        num_draft_tokens=2,
        seed=SEED,
        **processed(Alternating(), RepetitionPenaltyLogitsProcessor(1.6)),
    )
    texts = output[::3, -LENGTH:] @ torch.tensor([V * V, V, 1])
    return chi_square(torch.bincount(texts, minlength=V**3), expected.flatten())


def test_processors_that_are_called_keep_the_law(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a loop is caught that calls them for the first position of a step alone."""
    model, prompt = tiny_transformer(), [1, 0, 2, 0, 3]
    expected = law(model, prompt, 1.6)
    expect_laws(report, "processors called as they are", {"text": sampled_p_value(model, expected, prompt)})
    right = _Called.__call__
    monkeypatch.setattr(
        _Called, "__call__", lambda self, logits, text, lengths: right(self, logits, text, 0 * lengths + lengths[:, :1])
    )
    p_value = sampled_p_value(model, expected, prompt)
    expect_caught(report, "processors called without the drafts", {"text": p_value})
