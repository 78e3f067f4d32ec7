"""transformers' logits processors through `custom_generate`: the tokens of `model.generate`, and the exact law."""

from __future__ import annotations

import functools
import math
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from chains import expect_caught, expect_laws
from generate_calls import arguments, ours, plain
from report import Report
from tiny_laws import FEWER_TRIALS, LENGTH, SEED, V, joint_law, tiny_transformer
from tiny_models import PROMPTS, VOCAB, perturbed, shared_tiny, tiny
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
from torch_specops.hf.door.processors import _HostProcessors
from torch_specops.sampling import SamplingTensors
from torch_specops.testing import chi_square

NEW = 14
TARGET = shared_tiny("llama")
# Three rows of different lengths, padded on the left with token 7.
OPTIONS: dict[str, Any] = {**arguments("llama"), "max_new_tokens": NEW}
DICT = {"return_dict_in_generate": True}


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


def cases(free: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Options that change the greedy tokens `free`, taken from these."""
    words = [free[0][2:4], free[1][4:7], [free[2][1]], [7, 9]]
    biases = {(free[0][1],): -2.0, tuple(free[1][2:5]): -math.inf, (7,): 3.0, tuple(free[2][3:5]): -9.0}
    eos = {"eos_token_id": [free[0][1], free[1][3], free[2][0]]}
    # Since 5.23 each row may have a part of its own that is no text; in the last one it is all of the prompt.
    parts = ([5, 3, 6], [0, 6, 0], [7, 8, 9]) if transformers.__version__ >= "5.23" else ()
    penalties = {str(part): processed(RepetitionPenaltyLogitsProcessor(1.8, torch.tensor(part))) for part in parts}
    return {
        **penalties,
        **{f"{part} and n-grams": given | {"no_repeat_ngram_size": 2} for part, given in penalties.items()},
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


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_repetition_penalty_with_decoder_attention_mask(family: str) -> None:
    target = shared_tiny(family)
    options = {**arguments(family), "max_new_tokens": NEW, "repetition_penalty": 1.8}
    mask = torch.ones_like(options["decoder_input_ids"])
    for given in ({}, {"decoder_attention_mask": mask}):
        assert torch.equal(ours(target, **options, **given, draft_model=target), plain(target, **options, **given))


def test_bad_words_as_long_as_the_text() -> None:
    """transformers 5.17 ignores it, and later releases do not."""
    ids = torch.tensor([[3, 17]])
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6}
    first, second = plain(TARGET, **options)[0, 2:4].tolist()
    options["bad_words_ids"] = [[3, 17, first], [3, 17, second, first]]
    assert torch.equal(ours(TARGET, **options, draft_model=TARGET), plain(TARGET, **options))


@functools.cache
def free() -> Tensor:
    return plain(TARGET, **OPTIONS)


@functools.cache
def cases_of_the_target() -> dict[str, dict[str, Any]]:
    return cases(free()[:, -NEW:].tolist())


# No model runs for the names.
@pytest.mark.parametrize("name", cases([list(range(NEW))] * 3))
def test_processors_give_the_greedy_tokens_of_transformers(name: str) -> None:
    options = OPTIONS | cases_of_the_target()[name]
    expected = plain(TARGET, **options)
    assert not torch.equal(expected, free())
    drafts = [None, perturbed(TARGET)]
    drafts += [PromptLookup(min_ngram=1)] * (name in ("mixed", "of the user, between others"))
    for draft in drafts:
        assert torch.equal(ours(TARGET, **options, draft_model=draft, num_draft_tokens=3), expected)


def test_processors_without_counterpart_are_called() -> None:
    """With the target as its own draft, which goes through the same: everything is accepted."""
    options: dict[str, Any] = {**OPTIONS, **DICT, "max_new_tokens": 4, "draft_model": TARGET, "seed": 2}
    for given, called in (
        (processed(Alternating()), "eager: Alternating of logits_processor: called as they are"),
        ({"typical_p": 0.9, "temperature": 1.5}, "eager: TemperatureLogitsWarper, TypicalLogitsWarper of logits_proc"),
        (processed(TopPLogitsWarper(0.5, -math.inf, 2)), "eager: TopPLogitsWarper of"),
        (processed(MinPLogitsWarper(0.5, -9.0)), "eager: MinPLogitsWarper of"),
        (processed(MinPLogitsWarper(0.5), TopPLogitsWarper(0.5)), "eager: MinPLogitsWarper of"),
        (processed(TemperatureLogitsWarper(2.0), TemperatureLogitsWarper(3.0)), "eager: TemperatureLogitsWarper of"),
        ({"top_k": 5, "repetition_penalty": 1.1}, "eager: on cpu compiling pays"),
        (cases_of_the_target()["mixed"], "eager: on cpu compiling pays"),
    ):
        output: Any = ours(TARGET, **(options | {"do_sample": True, "top_k": 0} | given))
        assert output.stats.compiled.startswith(called), output.stats.compiled
        assert output.stats.acceptance_rate > 0.999
    with pytest.raises(ValueError, match="compile: expected False or 'auto', got True: Alternating of logits"):
        ours(TARGET, **options, **processed(Alternating()), compile=True)


def test_a_draft_that_cannot_read_a_prompt() -> None:
    """It gets one token of the row, and the processors are not asked about that."""
    options = OPTIONS | processed(Alternating())
    draft = tiny("gpt2", n_positions=6)
    assert torch.equal(ours(TARGET, **options, draft_model=draft, num_draft_tokens=3), plain(TARGET, **options))


class Automaton:
    """Allows about half of all tokens after each text, and raises on texts that it did not allow.

    Args:
        ids, mask: the prompts.
    """

    def __init__(self, ids: Tensor, mask: Tensor) -> None:
        self.prompts = [row[row_mask == 1].tolist() for row, row_mask in zip(ids, mask, strict=True)]
        self.width = ids.shape[1]
        self.asked: list[tuple[int, ...]] = []
        self.num_calls = 0

    @staticmethod
    def next_tokens(row: int, new: list[int]) -> list[int]:
        return [token for token in range(3, VOCAB) if (token * 7 + 5 * sum(new) + len(new) + row) % 11 < 5]

    def check(self, row: int, new: list[int]) -> None:
        for index, token in enumerate(new):
            assert token in self.next_tokens(row, new[:index]), f"row {row}: {new} cannot come about"
        self.asked.append((row, *new))

    def __call__(self, row: int, text: Tensor) -> list[int]:
        """As a `prefix_allowed_tokens_fn`."""
        new = text.tolist()[self.width :]
        assert text[: self.width].tolist()[-len(self.prompts[row]) :] == self.prompts[row], f"row {row}: {text}"
        self.check(row, new)
        assert not EOS & set(new), f"row {row}: asked behind an eos"
        self.num_calls += 1
        return self.next_tokens(row, new)


class StrictProcessor(LogitsProcessor):
    """The same for all rows of a call; a row may have more padding on its left, and behind an eos."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -math.inf)
        self.automaton.num_calls += 1
        for row, text in enumerate(input_ids.tolist()):
            prompt = self.automaton.prompts[row]
            start = next(n for n in range(len(text)) if text[n : n + len(prompt)] == prompt)
            new = text[start + len(prompt) :]
            ends = [index for index, token in enumerate(new) if token in EOS]
            assert set(text[:start]) <= {0, 7} and (not ends or set(new[ends[0] + 1 :]) <= {0})
            new = new[: ends[0]] if ends else new
            self.automaton.check(row, new)
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


@pytest.mark.parametrize(("side", "way"), [("left", "processor"), ("right", "function")])
def test_processors_get_only_possible_texts(side: str, way: str) -> None:
    """In rows of different lengths and speeds, whose drafts are often forbidden."""
    options = {**OPTIONS, **arguments("llama", side), "eos_token_id": sorted(EOS)}

    def row_alone(row: int, prompt: list[int]) -> list[int]:
        def allowed(_: int, text: Tensor) -> list[int]:
            return Automaton.next_tokens(row, text[len(prompt) :].tolist())

        ids = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
        return plain(TARGET, **(options | ids), prefix_allowed_tokens_fn=allowed)[0, len(prompt) :].tolist()

    def automaton_of_a_call(**more: Any) -> tuple[Automaton, Tensor]:
        automaton = Automaton(options["input_ids"], options["attention_mask"])
        given = {"prefix_allowed_tokens_fn": automaton}
        if way == "processor":
            given = processed(StrictProcessor(automaton))
        return automaton, ours(TARGET, **options, **given, **more)

    prompts = Automaton(options["input_ids"], options["attention_mask"]).prompts
    rows = [row_alone(row, prompt) for row, prompt in enumerate(prompts)]
    assert len({len(row) for row in rows}) > 1
    model = perturbed(TARGET, 0.1) if way == "processor" else HierarchicalDraft(TARGET)
    for draft in (None, PromptLookup(min_ngram=1), Ending(), model):
        automaton, found = automaton_of_a_call(draft_model=draft, num_draft_tokens=4)
        new = found[:, automaton.width :].tolist()
        assert [each[: len(row)] for each, row in zip(new, rows, strict=True)] == rows
        if draft is None:
            expected = {(row, *text[:size]) for row, text in enumerate(rows) for size in range(len(text))}
            assert set(automaton.asked) == expected
            # A processor is called with all rows that go on.
            assert automaton.num_calls == (max(map(len, rows)) if way == "processor" else len(expected))
        automaton_of_a_call(do_sample=True, draft_model=draft, seed=3)


class Noting(LogitsProcessor):
    """Keeps the texts of every call."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.asked.update(map(tuple, input_ids.tolist()))
        return scores


def test_processors_get_each_text_once() -> None:
    prompt = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 30}
    for draft, twice in ((None, {}), (PromptLookup(min_ngram=1), {tuple(PROMPTS[0]): 2})):
        noting = Noting()
        output = ours(TARGET, **options, **processed(noting), draft_model=draft)
        assert {text: count for text, count in noting.asked.items() if count > 1} == twice
        texts = {tuple(output[0, :size].tolist()) for size in range(len(PROMPTS[0]), output.shape[1])}
        assert texts <= noting.asked.keys()


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: processed(Counting()), r"test_hf_processors\.Counting answered one text in two ways; .*without them"),
        (lambda: processed(Alternating(), Counting()), "Counting answered one text in two ways"),
        (lambda: processed(Following()), "Following raised LookupError on a later text"),
        (lambda: processed(Grammar()), r"outlines\.backends\.Grammar remembers its calls"),
        (lambda: {"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor answered one text in two"),
        (
            lambda: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
            "SynthIDTextWatermarkLogitsProcessor remembers its calls",
        ),
    ],
)
def test_processors_that_remember_calls_need_no_draft(given: Callable[[], dict[str, Any]], message: str) -> None:
    assert torch.equal(ours(TARGET, **OPTIONS, **given()), plain(TARGET, **OPTIONS, **given()))
    drafts = (PromptLookup(min_ngram=1), perturbed(TARGET), EarlyExit(1))
    for more in (*({"draft_model": draft} for draft in drafts), DICT | {"output_scores": True}):
        with pytest.raises(NotImplementedError, match=message) as caught:
            ours(TARGET, **OPTIONS, **given(), **more)
        if "LookupError" in message:
            cause = caught.value.__cause__
            assert isinstance(cause, LookupError) and traceback.extract_tb(cause.__traceback__)[-1].name == "__call__"


def test_exceptions_of_processors_pass_through() -> None:
    def broken(row: int, text: Tensor) -> list[int]:
        raise LookupError("the user's")

    for draft in (None, TARGET):
        with pytest.raises(LookupError, match="the user's") as caught:
            ours(TARGET, **OPTIONS, prefix_allowed_tokens_fn=broken, draft_model=draft)
        assert caught.traceback[-1].name == "broken"


def test_processors_that_are_called_keep_the_law(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a loop is caught that calls them for the first position of a step alone."""
    model, prompt = tiny_transformer(), torch.tensor([[1, 0, 2, 0, 3]])
    processors = LogitsProcessorList([Alternating(), RepetitionPenaltyLogitsProcessor(1.6)])

    @torch.inference_mode()
    def next_law(new: list[int]) -> Tensor:
        ids = torch.cat([prompt, torch.tensor([new], dtype=torch.int64)], 1)
        return processors(ids, model(ids).logits[:, -1].float())[0].double().softmax(-1)

    def p_value(trials: int) -> float:
        # The rows of one index in many calls would take long; of a batch, which is one call, every third is alike.
        ids = prompt.repeat(trials, 1)
        options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "num_draft_tokens": 2}
        draft = {"draft_model": perturbed(model, 0.2), "logits_processor": processors, "seed": SEED}
        output = ours(model, input_ids=ids, attention_mask=torch.ones_like(ids), **options, **draft)
        texts = output[::3, -LENGTH:] @ torch.tensor([V * V, V, 1])
        return chi_square(torch.bincount(texts, minlength=V**3), expected.flatten())

    expected = joint_law(next_law)
    expect_laws(report, "processors called as they are", {"text": p_value(FEWER_TRIALS)})
    right = _HostProcessors.__call__
    monkeypatch.setattr(
        _HostProcessors,
        "__call__",
        lambda self, logits, text, lengths: right(self, logits, text, 0 * lengths + lengths[:, :1]),
    )
    expect_caught(report, "processors called without the drafts", {"text": p_value(FEWER_TRIALS // 2)})
