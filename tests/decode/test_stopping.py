"""What ends rows besides eos and limit: stop strings, and stopping criteria of transformers, as it calls them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
import torch
import transformers
from tiny_loops import DRAFTS, GREEDY, Late, expected_rows, limited, new_tokens, streamed
from tiny_models import PROMPTS, VOCAB, PairModel, encoder_inputs, padded, perturbed, raised, random_table, shared_tiny
from tokenizers import decoders, models
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import StopStringCriteria

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.decode import Step
from torch_specops.decode import batch as batch_module
from torch_specops.decode.rows import BatchRules, Row, ask_row_rules
from torch_specops.decode.stop_strings import letters_of_bytes
from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate, stop_string_rule

LENGTH = 14
IDS, MASK = padded(PROMPTS, "left")
WIDTH = IDS.shape[1]
TEXTS = ["It was not to be ", "She had ", "Mr. Darcy said that he would "]
STRINGS = [" the", "d b"]


class Watched(StoppingCriteria):
    """Keeps what it is shown, and stops where a function of that says."""

    def __init__(self, stops: Callable[[Tensor], Any]) -> None:
        self.stops = stops
        self.shown: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.shown.append(input_ids.clone())
        return self.stops(input_ids)


def endings() -> dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]]:
    """Criteria, and other settings, that end the greedy rows in different ways."""
    first, second, third = rows = expected_rows(LENGTH)
    return {
        "each at a token of its own": (lambda ids: ids[:, -1] == torch.tensor([first[4], second[9], third[2]]), {}),
        "all at a token of the first": (lambda ids: bool(ids[0, -1] == first[4]), {}),
        "one at the sixth token": (lambda ids: torch.tensor([False, ids.shape[1] == WIDTH + 6, False]), {}),
        "an even neighbour": (lambda ids: (ids[:, -1].roll(1) % 2 == 0) & (ids.shape[1] > WIDTH + 3), {}),
        "none": (lambda ids: False, {}),
        "an eos before the criterion": (
            lambda ids: ids[:, -1] == torch.tensor([row[6] for row in rows]),
            {"eos_token_id": first[4]},
        ),
        "an eos or the ninth token": (lambda ids: ids.shape[1] == WIDTH + 9, {"eos_token_id": first[4]}),
        "time that is up after a token": (lambda ids: False, {"max_time": 1e-9}),
    }


def generate(model: PreTrainedModel, rule: Callable[[Tensor], Any], **options: Any) -> tuple[Any, list[Tensor]]:
    watched = Watched(rule)
    call = {"attention_mask": MASK, "max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 11}
    # An eos that never comes makes transformers fill the rows that have ended.
    call |= {"eos_token_id": VOCAB + 7, "stopping_criteria": StoppingCriteriaList([watched])}
    return model.generate(IDS, **(call | options)), watched.shown


@functools.cache
def of_transformers(name: str) -> tuple[Any, list[Tensor]]:
    rule, options = endings()[name]
    return generate(shared_tiny("llama"), rule, **options)


@pytest.mark.parametrize("draft", ["nothing", "prompt lookup", "perturbed", "itself"])
def test_stopping_criteria_as_in_transformers(draft: str) -> None:
    """Rows get different numbers of tokens per step, some of them beyond the place where they are to end."""
    target, source = shared_tiny("llama"), DRAFTS[draft]("llama")
    all_lengths = set()
    for name, (rule, options) in endings().items():
        expected, expected_shown = of_transformers(name)
        steps: list[Step] = []
        drafting = {"draft_model": source, "num_draft_tokens": 4, "token_streamer": steps.append}
        output, shown = generate(target, rule, **options, custom_generate=custom_generate, **drafting)
        assert torch.equal(output, expected), name
        assert list(map(Tensor.tolist, shown)) == list(map(Tensor.tolist, expected_shown)), name
        # What a streamer hears is cut already.
        new = expected[:, WIDTH:].tolist()
        lengths = [row.index(11) if 11 in row else len(row) for row in new]
        assert streamed(steps) == limited(new, lengths) and steps[-1].finished == [True] * 3, name
        all_lengths.add(tuple(lengths))
    assert len(all_lengths) == 8


def test_an_interrupt_keeps_what_no_criterion_can_cut() -> None:
    """The rows that are ahead of the slowest one have more tokens, which nobody has heard."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS["perturbed"]("llama"), num_draft_tokens=4)
    steps, asked = list[Step](), list[int]()

    def interrupted(step: Step) -> None:
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.run(
            IDS,
            {"attention_mask": MASK, "max_new_tokens": LENGTH, "sampling": GREEDY},
            interrupted,
            batch_rules=BatchRules([lambda ids: bool(asked.append(ids.shape[1]))], IDS, 11),
        )
    new = new_tokens(decoder.output())
    assert new == streamed(steps) and len(asked) == max(map(len, new)) < LENGTH
    assert max(steps[0].num_accepted) + 1 > max(map(len, steps[0].tokens))


def test_held_back_text_has_its_finish_reason() -> None:
    """A criterion waits for the slowest row, steps after a rule of its own has ended the fastest."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS["perturbed"]("llama"), num_draft_tokens=4)
    output = decoder.run(
        IDS,
        {"attention_mask": MASK, "max_new_tokens": LENGTH, "sampling": GREEDY},
        row_rules=[lambda texts: [len(text) == 12 for text in texts]],
        batch_rules=BatchRules([lambda ids: False], IDS, 11),
    )
    assert output.lengths.tolist() == [12] * 3
    assert output.finish_reasons == ["stop"] * 3 and output.errors == {}


def test_a_clock_stops_rows_where_they_are() -> None:
    """Rows that are ahead of others keep what they have, and one token more as all do."""
    is_late = False
    rules = [lambda texts: [is_late] * len(texts)]
    rows = [Row([1], 20, [], rules, tokens=[5, 6, 7]), Row([2], 20, [], rules, tokens=[8])]
    assert ask_row_rules(rows, [3, 1]) == set() and not any(row.ended for row in rows)
    is_late = True
    for row, new in zip(rows, [[9, 9], [9, 9, 9]], strict=True):
        row.tokens += new
    assert ask_row_rules(rows, [2, 3]) == {0, 1} and all(row.ended for row in rows)
    assert [row.tokens for row in rows] == [[5, 6, 7, 9], [8, 9]]


def test_stop_strings_are_those_of_transformers(austen: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = austen
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    call = {**batch, "max_new_tokens": 48, "do_sample": False, "stop_strings": STRINGS, "tokenizer": tokenizer}
    expected = target.generate(**call)
    # The second one begins in its prompt.
    new = [text.strip("\0") for text in tokenizer.batch_decode(expected[:, batch["input_ids"].shape[1] :])]
    assert new[1] == "b" and all(text.endswith(" the") for text in new[::2])
    options = {**batch, "max_new_tokens": 48, "stop_strings": STRINGS, "tokenizer": tokenizer}
    lookup = PromptLookup(min_ngram=1)
    for source in (None, draft, lookup):
        own = torch_specops.generate(target, **options, draft=source, sampling=GREEDY)
        assert [tokenizer.decode(own.new_tokens(row)) for row in range(3)] == new
        assert own.finish_reasons == ["stop"] * 3
    # The criterion alone, without a tokenizer to read, is called.
    alone = {**call, "stop_strings": None, "tokenizer": None}
    alone["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, STRINGS)])
    for source, given in ((draft, call), (lookup, call), (draft, alone)):
        assert torch.equal(target.generate(**given, custom_generate=custom_generate, draft_model=source), expected)
    # Nothing stands before a text, not even what token 0 stands for.
    assert stop_string_rule(tokenizer, ["\0a"])([[97], [0, 97]]) == [False, True]


def test_a_request_that_a_stop_string_cuts_has_the_steps_of_its_row(austen: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = austen
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=6, schedule="constant", sampling=GREEDY)
    ids, options = tokenizer("She was ")["input_ids"], {"stop_strings": STRINGS, "tokenizer": tokenizer}
    (completion,) = decoder.generate_many([Request(ids, 48, **options)], batch_size=1)
    output = decoder.generate([ids], max_new_tokens=48, **options)
    assert completion.new_tokens.tolist() == output.new_tokens(0) and completion.steps == output.steps[0]
    assert sum(step.num_tokens for step in completion.steps) > len(completion.new_tokens)


def test_the_new_text_of_every_row(austen: tuple[Any, Any, Any]) -> None:
    """Without padding, and without the eos that ended a row."""
    target, draft, tokenizer = austen
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    call: dict[str, Any] = {**batch, "draft": draft, "sampling": GREEDY}
    output = torch_specops.generate(target, **call, max_new_tokens=[9, 6, 0], eos_token_id=ord("t"))
    assert output.finish_reasons == ["eos", "length", "length"]
    rows = ["".join(map(chr, output.new_tokens(row))) for row in range(3)]
    assert rows[0].endswith("t") and len(rows[1]) == 6 and rows[2] == ""
    assert output.texts(tokenizer) == [rows[0][:-1], *rows[1:]]
    assert output.texts(tokenizer, skip_special_tokens=False) == rows
    # Stop strings are text. Arguments are those of `decode`.
    stopped = torch_specops.generate(target, **call, max_new_tokens=48, stop_strings=STRINGS, tokenizer=tokenizer)
    assert [text.endswith(tuple(STRINGS)) for text in stopped.texts(tokenizer)] == [True, False, True]
    tokenizer = Mock(decode=Mock(return_value=""))
    output.texts(tokenizer, errors="ignore")
    assert tokenizer.decode.call_args.kwargs == {"skip_special_tokens": True, "errors": "ignore"}
    # A tokenizer that drops the space before the first word, as SentencePiece does, and one whose tokens depend on
    # those before them: half a character is no text.
    words = Mock(decode=lambda ids, **_: "".join(f" {token}" for token in ids).removeprefix(" "))
    assert words.decode([7]) == "7" and output.texts(words)[1] == "".join(f" {token}" for token in output.new_tokens(1))
    halves = Mock(decode=lambda ids, **_: "?" * (len(ids) % 2) + "x" * len(ids))
    assert output.texts(halves)[1] in ("x" * 6, "?" + "x" * 6)


def made_tokenizer(tokens: str, model: Any = models.BPE, decoder: Any = None, **options: Any) -> Any:
    arguments = ({token: index for index, token in enumerate(tokens.split())}, *([[]] if model is models.BPE else []))
    core = tokenizers.Tokenizer(model(*arguments, **options))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if decoder is not None:
        core.decoder = decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **options)


SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
TOKENIZERS = {
    "letters for bytes": made_tokenizer("a b c d e f ab ba \u0120a \u0120 abc cc", decoder=decoders.ByteLevel()),
    "named bytes": made_tokenizer("\u2581 a b c d e f ab \u2581a \u2581ba <0xC3> <0xA9> cc", decoder=SENTENCEPIECE),
    "parts of words": made_tokenizer(
        "[UNK] a b ##b ##c ##d ##e ##f c ab", models.WordPiece, decoders.WordPiece(), unk_token="[UNK]"
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_stop_rules_as_in_transformers(name: str) -> None:
    """Of random texts, some with a token that the tokenizer does not have."""
    tokenizer, generator, num_found = TOKENIZERS[name], random.Random(3), 0
    for strings in (["ab"], ["a b", "cc"], ["abcab", "b"], [" a"], ["cab", "ba a"]):
        criterion, rule = StopStringCriteria(tokenizer, strings), stop_string_rule(tokenizer, strings)
        texts = [generator.choices(range(len(tokenizer) + 1), k=generator.randint(1, 8)) for _ in range(200)]
        padded_texts = torch.tensor([[2**62] * (8 - len(text)) + text for text in texts])
        found = rule(texts)
        assert found == criterion(padded_texts, None).tolist(), strings
        num_found += sum(found)
    assert num_found > 20
    assert {byte: letter for letter, byte in letters_of_bytes().items()} == bytes_to_unicode()


def test_stop_strings_of_a_tokenizer_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which transformers refuses: it looks for letters that the vocabulary lacks."""
    for options in ({"unk_token": "[UNK]"}, {}):
        words = made_tokenizer("[UNK] the stop word it", models.WordLevel, **options)
        rule = stop_string_rule(words, ["stop word", "it t"])
        assert rule([[1, 2, 3], [3], [2, 1, 3], [2, 3, 1], [4, 1]]) == [True, False, False, False, True]
    ctc = made_tokenizer("a b", models.WordLevel, decoders.CTC())
    ids = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=r"stop_strings: .* does not say what a token adds to a text; end such texts"):
        torch_specops.generate(shared_tiny("llama"), ids, stop_strings="a", tokenizer=ctc)
    # A token is read once, for all rules; one that the tokenizer gets later is found too.
    letters = made_tokenizer("a b c", decoder=decoders.Fuse())
    asked: list[Any] = []
    read = letters.convert_tokens_to_string
    monkeypatch.setattr(letters, "convert_tokens_to_string", lambda tokens: asked.append(tokens) or read(tokens))
    first, second = stop_string_rule(letters, ["ab"]), stop_string_rule(letters, ["bc"])
    assert first([[0, 1], [1, 2], [0, 3]]) == [True, False, False]
    num_asked = len(asked)
    assert second([[0, 1], [1, 2]]) == [False, True] and len(asked) == num_asked
    letters.add_tokens("b!")
    assert first([[0, 3]]) == [True]


def test_a_pipeline_takes_the_loop(austen: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = austen
    plain = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer)
    assisted = transformers.pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    call = {"do_sample": False, "max_new_tokens": 12, "batch_size": 3}
    for stops in ({}, {"stop_sequence": "e"}, {"stop_strings": STRINGS, "tokenizer": tokenizer}):
        expected = plain(TEXTS, **call, **stops)
        steps: list[Step] = []
        ours = {**call, **stops, "custom_generate": custom_generate, "token_streamer": steps.append}
        assert assisted(TEXTS, **ours) == plain(TEXTS, **ours, draft_model=PromptLookup()) == expected
        # The one with a draft model, which is the first.
        assert sum(steps[0].num_accepted) > 0
    heard, ours_heard = (TextIteratorStreamer(tokenizer, skip_prompt=True) for _ in range(2))
    plain(TEXTS[0], **call, **stops, streamer=heard)
    plain(TEXTS[0], **call, **stops, streamer=ours_heard, assistant_model=draft, custom_generate=custom_generate)
    assert "".join(ours_heard) == "".join(heard)


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_keeps_the_text_up_to_it(
    late: bool, austen: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled rows: the same tokens as without the stop, so far, and the same counts whenever the host looks."""
    target, draft, tokenizer = austen
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    sampler = SpeculativeDecoder(target, draft, sampling=SamplingParams(temperature=0.7))
    call: dict[str, Any] = {**batch, "max_new_tokens": [60, 60, 5], "seed": 8, "logprobs": "processed"}
    whole = sampler.generate(**call)
    kept = [text[: text.index(ord("e")) + 1] if ord("e") in text else text for text in new_tokens(whole)]
    lengths = list(map(len, kept))
    assert len(set(lengths)) == 3
    ended: list[int] = []
    sampler.draft.on_finished = lambda tokens, at: ended.extend(at.tolist())
    if late:
        monkeypatch.setattr(batch_module, "RecordReader", Late)
    steps: list[Step] = []
    output = sampler.generate(**call, stop_strings=["e"], tokenizer=tokenizer, streamer=steps.append)
    assert streamed(steps) == new_tokens(output) == kept and output.stats.num_tokens == sum(lengths)
    assert output.finish_reasons == ["stop", "stop", "length"]
    assert output.lengths.tolist() == sampler._newest.state.lengths.tolist()
    assert sorted(ended) == sorted(output.lengths.tolist())
    assert any(0 < len(own) <= step.num_accepted[row] for step in steps for row, own in enumerate(step.tokens[:2]))
    # An end is an end, and a step that a row took part in after it does not count.
    ends = [[step.finished[row] for step in steps] for row in range(3)]
    assert ends == list(map(sorted, ends))
    assert output.stats.num_row_steps == sum(bool(tokens) for step in steps for tokens in step.tokens)
    assert output.logprobs is not None and whole.logprobs is not None
    inside = torch.arange(output.logprobs.shape[1]) < output.lengths.unsqueeze(1)
    wanted = whole.logprobs[:, : output.logprobs.shape[1]].where(inside, torch.nan)
    torch.testing.assert_close(output.logprobs, wanted, equal_nan=True)


def test_what_comes_after_a_stop_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "RecordReader", Late)
    table = random_table(5, 0)
    # After a 1 there is no finite logit, and after anything else a 1.
    table[:] = torch.tensor([0.0, 9.0, 0.0, 0.0, 0.0])
    table[:, 1] = torch.nan
    sampler = SpeculativeDecoder(PairModel(table), sampling=GREEDY)
    ends = [lambda texts: [text[-1] == 1 for text in texts]]
    output = sampler.run(torch.tensor([[3]]), {}, row_rules=ends)
    assert output.new_tokens(0) == [1] and output.errors == {} and output.finish_reasons == ["stop"]


def test_several_sequences_of_a_prompt_are_rows() -> None:
    """What is given per row is given per sequence, and seeds given back repeat the output."""
    target = shared_tiny("llama")
    call: dict[str, Any] = {"draft": perturbed(target), "max_new_tokens": [3, 4, 5, 6, 7, 8]}
    of_prompts = {"attention_mask": MASK, "num_return_sequences": 2}
    output = torch_specops.generate(target, IDS, **call, **of_prompts, seed=3)
    again = torch_specops.generate(target, IDS, **call, **of_prompts, seed=output.stats.seeds)
    assert output.prompt_lengths.tolist() == [7, 7, 1, 1, 4, 4] and torch.equal(output.sequences, again.sequences)
    assert (output.lengths - output.prompt_lengths).tolist() == [3, 4, 5, 6, 7, 8]
    copies, mask = IDS.repeat_interleave(2, 0), MASK.repeat_interleave(2, 0)
    rows = torch_specops.generate(target, copies, **call, attention_mask=mask, seed=3)
    assert torch.equal(output.sequences, rows.sequences) and len({*map(str, output.sequences[:, 1:].tolist())}) == 6


def test_stopping_criteria_with_an_encoder() -> None:
    """Draft and target read the same inputs, and all drafts are accepted."""
    target, inputs, start = shared_tiny("t5"), encoder_inputs("t5"), torch.ones(3, 1, dtype=torch.int64)
    call: dict[str, Any] = {"draft": target, "max_new_tokens": 8, "seed": 3, "eos_token_id": ()}
    output = torch_specops.generate(target, start, **call, inputs=inputs, num_return_sequences=2)
    assert output.stats.acceptance_rate == 1.0
    copies = {name: value.repeat_interleave(2, 0) for name, value in inputs.items()}
    rows = torch_specops.generate(target, start.repeat(2, 1), **call, inputs=copies)
    assert torch.equal(output.sequences, rows.sequences)


def test_wrong_arguments_are_named(austen: tuple[Any, Any, Any]) -> None:
    tokenizer = austen[2]
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"stop_strings": ["a", 3]}, TypeError, r"stop_strings: expected strings that are not empty, got \['a', 3\]"),
        ({"stop_strings": ""}, TypeError, "stop_strings: expected strings that are not empty, got ''"),
        ({"stop_strings": "a", "tokenizer": None}, TypeError, "tokenizer: expected a tokenizer of transformers"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences: expected"),
        ({"num_return_sequences": 2, "seed": [1]}, ValueError, r"seed: expected an int, or int64 \[2\]"),
        ({"num_return_sequences": 2, "streamer": TextStreamer(tokenizer)}, ValueError, "streamer: .* got 2 rows"),
    ]
    call = {"max_new_tokens": 3, "tokenizer": tokenizer}
    ids = torch.tensor([[1, 2]])
    assert raised(lambda given: torch_specops.generate(shared_tiny("llama"), ids, **(call | given)), wrong) == []
