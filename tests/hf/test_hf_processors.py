"""transformers' logits processors through `custom_generate`: the tokens of `model.generate`, and the exact law."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from chains import expect_caught, expect_laws
from report import Report
from test_custom_generate import arguments, ours, plain
from tiny_laws import FEWER_TRIALS, LENGTH, SEED, V, joint_law, tiny_transformer
from tiny_models import PROMPTS, VOCAB, perturbed, shared_tiny
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from torch_specops.drafts import Draft, DraftSource, EarlyExit, HierarchicalDraft, PromptLookup
from torch_specops.hf import custom_generate, language_model
from torch_specops.hf.processors import _Called
from torch_specops.laws import chi_square
from torch_specops.sampling import SamplingTensors

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
        "some of the prompt is no text": processed(RepetitionPenaltyLogitsProcessor(1.8, 3)),
        "nor of any prompt": processed(RepetitionPenaltyLogitsProcessor(1.8, 9)),
        "mixed": eos
        | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": words, "sequence_bias": biases}
        | {"min_new_tokens": 4, "begin_suppress_tokens": free[0][:1], "suppress_tokens": [3, 4]},
        "suppressed": {"suppress_tokens": [free[0][2], free[1][5]]},
        "suppressed at first": {"begin_suppress_tokens": [row[0] for row in free]},
        "of the user": processed(Alternating()),
        "in place": processed(InPlace()),
        "of the user, between others": processed(Alternating(), RepetitionPenaltyLogitsProcessor(1.5))
        | {"no_repeat_ngram_size": 2},
        "only some of the user": processed(RepetitionPenaltyLogitsProcessor(1.5)),
    }


if transformers.__version__ >= "5.23":

    def test_a_repetition_penalty_that_ignores_its_own_part_of_each_row() -> None:
        target = shared_tiny("llama")
        options = {**arguments("llama"), "max_new_tokens": NEW}
        for ignored in ([5, 3, 6], [0, 6, 0], [7, 8, 9]):
            own = processed(RepetitionPenaltyLogitsProcessor(1.8, torch.tensor(ignored)))
            for others in ({}, {"no_repeat_ngram_size": 2}):
                expected = plain(target, **options, **own, **others)
                assert torch.equal(ours(target, **options, **own, **others, draft_model=target), expected), ignored


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_the_decoder_s_mask_says_what_a_repetition_penalty_counts(family: str) -> None:
    target = shared_tiny(family)
    options = {**arguments(family), "max_new_tokens": NEW, "repetition_penalty": 1.8}
    mask = torch.ones_like(options["decoder_input_ids"])
    for given in ({}, {"decoder_attention_mask": mask}):
        assert torch.equal(ours(target, **options, **given, draft_model=target), plain(target, **options, **given))


def test_a_sequence_as_long_as_prompt_and_next_token() -> None:
    """transformers 5.17 ignores it, and later releases do not."""
    target, prompt = shared_tiny("llama"), torch.tensor([[3, 17]])
    options: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 6}
    first, second = plain(target, **options)[0, 2:4].tolist()
    words = {"bad_words_ids": [[3, 17, first], [3, 17, second, first]]}
    assert torch.equal(ours(target, **options, **words, draft_model=target), plain(target, **options, **words))


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


class Noting(LogitsProcessor):
    """Keeps the texts of every call."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(input_ids.tolist())
        return scores


def test_no_processor_is_called_for_what_follows_an_eos() -> None:
    """All rows that go on have equally many new tokens, because there is no draft."""
    options, noting = {**arguments("llama"), "max_new_tokens": NEW}, Noting()
    free = ours(shared_tiny("llama"), **options)[:, -NEW:].tolist()
    eos = [free[0][3], free[1][6], free[2][1]]
    output = ours(shared_tiny("llama"), **options, **processed(noting), eos_token_id=eos)
    widths = [len(texts[0]) for texts in noting.calls]
    assert widths == list(range(options["input_ids"].shape[1], output.shape[1])) and len(widths) > 3


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


class Automaton:
    """Allows about half of all tokens after each text, and raises on texts that it did not allow.

    Args:
        ids, mask: the prompts.
    """

    def __init__(self, ids: Tensor, mask: Tensor) -> None:
        self.prompts = [row[row_mask == 1].tolist() for row, row_mask in zip(ids, mask, strict=True)]
        self.asked: list[tuple[int, ...]] = []

    @staticmethod
    def next_tokens(row: int, new: list[int]) -> list[int]:
        return [token for token in range(3, VOCAB) if (token * 7 + 5 * sum(new) + len(new) + row) % 11 < 5]

    def check(self, row: int, new: list[int]) -> None:
        for index, token in enumerate(new):
            if token not in self.next_tokens(row, new[:index]):
                raise AssertionError(f"row {row}: {new} cannot come about")

    def __call__(self, row: int, text: Tensor) -> list[int]:
        """As a `prefix_allowed_tokens_fn`."""
        new = text.tolist()[self.width :]
        assert text[: self.width].tolist()[-len(self.prompts[row]) :] == self.prompts[row], f"row {row}: {text}"
        self.check(row, new)
        assert not EOS & set(new), f"row {row}: asked behind an eos"
        self.asked.append((row, *new))
        return self.next_tokens(row, new)

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))


class StrictProcessor(LogitsProcessor):
    """The same for all rows of a call; a row may have more padding on its left, and behind an eos."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -math.inf)
        for row, text in enumerate(input_ids.tolist()):
            prompt = self.automaton.prompts[row]
            start = next(n for n in range(len(text)) if text[n : n + len(prompt)] == prompt)
            new = text[start + len(prompt) :]
            ends = [index for index, token in enumerate(new) if token in EOS]
            assert set(text[:start]) <= {0, 7} and (not ends or set(new[ends[0] + 1 :]) <= {0})
            new = new[: ends[0]] if ends else new
            self.automaton.check(row, new)
            self.automaton.asked.append((row, *new))
            masked[row, self.automaton.next_tokens(row, new)] = 0.0
        return scores + masked


EOS = {4, 37}


class Ending(DraftSource):
    """Proposes some token, and then an eos, which nothing follows if the first one is forbidden."""

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        drafts = torch.full((len(lengths), num_draft_tokens), min(EOS))
        drafts[:, 0] = lengths * 7 % VOCAB
        return Draft(drafts)


def restricted(automaton: Automaton, way: str) -> dict[str, Any]:
    if way == "function":
        return {"prefix_allowed_tokens_fn": automaton}
    return processed(StrictProcessor(automaton))


@pytest.mark.parametrize(("side", "way"), [("left", "processor"), ("right", "function")])
def test_only_texts_that_can_come_about_are_asked_about(side: str, way: str) -> None:
    """In rows of different lengths and speeds, whose drafts are often forbidden."""

    def row_alone(row: int, prompt: list[int]) -> list[int]:
        def allowed(_: int, text: Tensor) -> list[int]:
            return Automaton.next_tokens(row, text[len(prompt) :].tolist())

        ids = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
        found = plain(target, **ids, prefix_allowed_tokens_fn=allowed, max_new_tokens=NEW, eos_token_id=sorted(EOS))
        return found[0, len(prompt) :].tolist()

    target = shared_tiny("llama")
    options = {**arguments("llama", side), "max_new_tokens": NEW, "eos_token_id": sorted(EOS)}
    prompts = options["input_ids"], options["attention_mask"]
    rows = [row_alone(row, prompt) for row, prompt in enumerate(Automaton(*prompts).prompts)]
    assert len({len(row) for row in rows}) > 1
    models = perturbed(target, 0.1), HierarchicalDraft(language_model(target))
    for draft in (None, PromptLookup(min_ngram=1), Ending(), *models):
        automaton = Automaton(*prompts)
        found: Any = ours(target, **options, **restricted(automaton, way), draft_model=draft, num_draft_tokens=4)
        new = found[:, automaton.width :].tolist()
        assert [each[: len(row)] for each, row in zip(new, rows, strict=True)] == rows
        if draft is None:
            expected = {(row, *text[:size]) for row, text in enumerate(rows) for size in range(len(text))}
            assert set(automaton.asked) == expected
            assert way == "processor" or len(automaton.asked) == len(expected)
        ours(target, **options, **restricted(automaton, way), do_sample=True, draft_model=draft, seed=3)


def test_no_text_is_asked_about_twice_but_the_first() -> None:
    prompt = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 30}
    for draft, twice in ((None, []), (PromptLookup(min_ngram=1), [tuple(PROMPTS[0])])):
        noting = Noting()
        output = ours(shared_tiny("llama"), **options, **processed(noting), draft_model=draft)
        asked = Counter(tuple(text) for (text,) in noting.calls)
        assert [text for text, count in asked.items() if count > 1] == twice and max(asked.values()) <= 2
        assert {tuple(output[0, :size].tolist()) for size in range(len(PROMPTS[0]), output.shape[1])} <= set(asked)


class Counting(LogitsProcessor):
    """By the number of its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.count += 1
        return scores - 6.0 * (torch.arange(scores.shape[1]) % 3 == self.count % 3)


class Following(LogitsProcessor):
    """Expects one more token in every call."""

    def __init__(self) -> None:
        self.text: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.text is not None and not torch.equal(input_ids[:, :-1], self.text):
            raise LookupError("no next state")
        self.text = input_ids
        return scores


class Grammar(LogitsProcessor):
    """Answers all alike."""

    __module__ = "outlines.backends"

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_a_processor_that_remembers_its_calls_works_where_texts_are_asked_about_once() -> None:
    target = shared_tiny("llama")
    options = {**arguments("llama"), "max_new_tokens": NEW}
    synthid = SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)
    remembering: list[tuple[Any, str]] = [
        (
            lambda: processed(Counting()),
            r"test_hf_processors\.Counting answered one text in two ways; .*decode without them",
        ),
        (lambda: processed(Alternating(), Counting()), "Counting answered one text in two ways"),
        (lambda: processed(Following()), "Following raised LookupError on a later text"),
        (lambda: processed(Grammar()), r"outlines\.backends\.Grammar remembers its calls"),
        (lambda: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor answered one text in two"),
        (lambda: {"watermarking_config": synthid}, "SynthIDTextWatermarkLogitsProcessor remembers its calls"),
    ]
    for given, message in remembering:
        assert torch.equal(ours(target, **options, **given()), plain(target, **options, **given())), message
        drafts = (PromptLookup(min_ngram=1), perturbed(target), EarlyExit(1))
        scores = {"return_dict_in_generate": True, "output_scores": True}
        for more in (*({"draft_model": draft} for draft in drafts), scores):
            with pytest.raises(NotImplementedError, match=message) as caught:
                ours(target, **options, **given(), **more)
            if "LookupError" in message:
                cause = caught.value.__cause__
                assert (
                    isinstance(cause, LookupError) and traceback.extract_tb(cause.__traceback__)[-1].name == "__call__"
                )


def test_an_exception_without_a_draft_is_the_processor_s_own() -> None:
    def broken(row: int, text: Tensor) -> list[int]:
        raise LookupError("the user's")

    for draft in (None, shared_tiny("llama")):
        options = {**arguments("llama"), "max_new_tokens": 3, "prefix_allowed_tokens_fn": broken}
        with pytest.raises(LookupError, match="the user's") as caught:
            ours(shared_tiny("llama"), **options, draft_model=draft)
        assert caught.traceback[-1].name == "broken"


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
