"""Text in a grammar: greedy text is transformers' own in the same grammar; what rows and requests do to others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from grammar_libraries import EOS, LIBRARIES, TEXTS, compiled
from tiny_grammars import Allowing, by_turns
from tiny_hybrids import tiny_hybrid
from tiny_loops import DRAFTS, GREEDY, LENGTH, Pauses, Recording, decode, expected_rows, new_tokens, steps_of, streamed
from tiny_models import PROMPTS, VOCAB, TracedPairs, padded, perturbed, raised, random_table, shared_tiny
from tiny_requests import in_order, texts
from torch import Tensor
from torch._dynamo.utils import counters
from xgrammar.contrib.hf import LogitsProcessor

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.decode import grammar as grammar_module
from torch_specops.drafts import ModelDraft, PromptLookup

# Long enough for the limit, and short enough for an eos.
REGEX = r"[a-f]{3,9}(: (true|10+))?"
# Without an eos of the grammar, and with forced tokens.
FORCED = r"name: (true, name: ){8}"


def hf_text(prompts: Sequence[list[int]] = PROMPTS, **options: Any) -> Any:
    """transformers' `generate`, of a padded batch."""
    input_ids, mask = padded(prompts, "left")
    options = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": EOS} | options
    return shared_tiny("llama").generate(input_ids, attention_mask=mask, **options)


@cache
def transformers_rows(regex: str) -> list[list[int]]:
    """What transformers' greedy text is, of each prompt alone, up to its eos."""
    texts = [hf_text([prompt], logits_processor=[LogitsProcessor(compiled(regex))])[0].tolist() for prompt in PROMPTS]
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@cache
def greedy_by_turns() -> list[list[int]]:
    return new_tokens(decode("nothing", 1, grammar=[Allowing(by_turns) for _ in PROMPTS], eos_token_id=()))


@pytest.mark.parametrize(
    ("draft", "is_compiled"),
    [
        *((draft, False) for draft in DRAFTS if draft not in ("itself", "stranger", "n-gram", "over a model")),
        *((draft, True) for draft in ("nothing", "prompt lookup", "perturbed")),
    ],
)
def test_greedy_text_is_that_of_transformers(draft: str, is_compiled: bool) -> None:
    """Beside a row without a grammar, in ragged batches, for every kind of draft. Compiled pieces run as they stand."""
    # Forced tokens without drafts, and beside looked-up drafts, a model's, and both.
    forced = [(FORCED, 2)] * (draft in ("nothing", "prompt lookup", "perturbed", "lookup else"))
    for regex, num_draft_tokens in ((REGEX, 4), *forced):
        grammars = [LIBRARIES["xgrammar"](regex), None, LIBRARIES["xgrammar"](regex)]
        with torch.compiler.set_stance("force_eager"):
            output = decode(draft, num_draft_tokens, grammar=grammars, eos_token_id=EOS, compile=is_compiled)
        expected = transformers_rows(regex)
        assert new_tokens(output) == [expected[0], expected_rows()[1], expected[2]]
        assert output.errors == {} and output.finish_reasons[1] == "length"
        assert output.finish_reasons[0] == ("eos" if expected[0][-1] == EOS else "length")


@pytest.mark.parametrize(
    ("draft", "schedule"), [("nothing", "heuristic"), ("perturbed", Pauses()), ("prompt lookup", "heuristic")]
)
def test_schedules_and_top_logprobs(draft: str, schedule: Any, late: bool) -> None:
    """The grammar accepts every emitted token, and no other. Reading steps late, as on CUDA, changes nothing."""
    grammars = [Allowing(by_turns), Allowing(by_turns), None]
    sampling = SamplingParams(temperature=[0.0, 0.0, 0.9])
    options: dict[str, Any] = {"grammar": grammars, "eos_token_id": (), "logprobs": "processed", "seed": 3}
    steps, output = steps_of(draft, 3, sampling=sampling, top_logprobs=3, schedule=schedule, **options)
    rows, top = new_tokens(output), output.top_logprobs
    assert streamed(steps) == rows and rows[:2] == greedy_by_turns()[:2]
    for row, grammar in enumerate(grammars[:2]):
        assert grammar is not None and list(grammar.text) == rows[row]
        new = slice(output.prompt_lengths[row], output.lengths[row])
        for place, (tokens, values) in enumerate(zip(top.tokens[row, new], top.values[row, new], strict=True)):
            assert set(tokens[values > -torch.inf].tolist()) <= set(by_turns(tuple(rows[row][:place])))


def test_logprobs_are_over_the_allowed_tokens() -> None:
    grammar = Allowing(by_turns)
    prompt = torch.tensor([PROMPTS[0]])
    output = torch_specops.generate(
        shared_tiny("llama"), prompt, grammar=grammar, max_new_tokens=8, eos_token_id=(), seed=1, logprobs="processed"
    )
    text = output.sequences[:, :-1]
    logits = shared_tiny("llama")(text).logits[0, len(PROMPTS[0]) - 1 :].float()
    for place, token in enumerate(output.new_tokens(0)):
        allowed = by_turns(tuple(output.new_tokens(0)[:place]))
        expected = logits[place, token] - logits[place, allowed].logsumexp(0)
        torch.testing.assert_close(output.logprobs[0, len(PROMPTS[0]) + place], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft", ["nothing", "prompt lookup"])
def test_forced_tokens_need_no_draft(draft: str) -> None:
    """Every fourth token is forced, and comes with the one behind it; the last one has none."""
    grammar = Allowing(by_turns)
    output = decode(draft, 2, prompts=PROMPTS[1:2], grammar=grammar, eos_token_id=())
    assert output.stats.num_steps <= LENGTH - LENGTH // 4 + 1
    assert output.new_tokens(0)[3::4] == [11, 12, 13, 11, 12]


class Recorder(Recording, ModelDraft):
    def restart(self, *arguments: Any) -> None:
        """A source with a `start`, as a recorder has, needs one."""


def in_runs(text: tuple[int, ...]) -> list[int]:
    """Three of seven tokens are forced."""
    return [11 + len(text)] if len(text) % 7 > 3 else list(range(VOCAB))


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "is_compiled"), [("llama", False), ("llama", True), ("qwen3_5_text", False)])
def test_a_draft_model_reads_forced_tokens(kind: str, is_compiled: bool) -> None:
    """With "gumbel" they replace its drafts. Later drafts are those of a model that has read the text alone."""
    target = shared_tiny("llama") if kind == "llama" else tiny_hybrid(kind)
    model, grammars = perturbed(target), [Allowing(in_runs) for _ in PROMPTS]
    options: dict[str, Any] = {"num_draft_tokens": 4, "verify": "gumbel", "sampling": GREEDY}
    decoder = SpeculativeDecoder(target, draft := Recorder(model), compile=is_compiled, **options)
    input_ids, mask = padded(PROMPTS, "left")
    with torch.compiler.set_stance("force_eager"):
        decoder.generate(input_ids, attention_mask=mask, max_new_tokens=24, grammar=grammars, eos_token_id=())
    checked = 0
    for tokens, lengths, proposed in draft.seen:
        for row, length in enumerate(lengths.tolist()):
            checked += length > len(PROMPTS[row]) + 7
            text = tokens[row : row + 1, :length]
            assert int(proposed.tokens[row, 0]) == int(model(text).logits[0, -1].argmax()), (row, length)
    assert checked > 5


def test_grammar_is_not_asked_after_an_end() -> None:
    """Each text that is asked about begins with tokens that were allowed, and has no eos before its end."""
    for draft in ("stranger", "n-gram", "prompt lookup"):
        grammar = Allowing(lambda text: [*by_turns(text), EOS])
        output = decode(draft, 5, prompts=PROMPTS[:1], grammar=grammar, eos_token_id=EOS)
        assert list(grammar.text) == output.new_tokens(0)
        for text in grammar.asked:
            assert EOS not in text
            assert all(token in grammar.allowed(text[:place]) for place, token in enumerate(text))


class Raising(Allowing):
    """Raises at the sixth token, where `where` says."""

    def __init__(self, where: str) -> None:
        super().__init__(by_turns)
        self.where = where

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        if self.where == "fill" and len(self.text) == 6:
            raise LookupError("no state")
        super().fill_bitmask(bitmask, row)
        if self.where == "empty" and len(self.text) == 6:
            bitmask[row] = 0

    def accept(self, token: int) -> bool:
        if self.where == "accept" and len(self.text) == 5:
            raise LookupError("no state")
        if self.where == "refuse" and len(self.text) == 5:
            return False
        return super().accept(token)

    def rollback(self, count: int) -> None:
        if self.where == "rollback" and len(self.text) >= 6:
            raise LookupError("no state")
        super().rollback(count)


@pytest.mark.parametrize(
    ("where", "message", "num_tokens"),
    [
        ("fill", "grammar: LookupError: no state after", [6]),
        ("empty", "grammar: allows no token after|target: no finite logit among the tokens that the grammar", [6]),
        ("accept", "grammar: LookupError: no state after", [5, 6]),
        ("refuse", r"grammar: refuses token \d+, which its mask allows, after", [5, 6]),
        ("rollback", "grammar: LookupError: no state after", [3, 4, 5, 6]),
    ],
)
def test_a_grammar_that_fails_ends_its_row_alone(where: str, message: str, num_tokens: list[int], late: bool) -> None:
    expected = greedy_by_turns()
    for draft in ("nothing", "perturbed") if late else ("perturbed", "n-gram"):
        grammars = [Allowing(by_turns), Raising(where), None]
        with pytest.warns(RuntimeWarning, match=f"row 1: ({message})"):
            output = decode(draft, 3, grammar=grammars, eos_token_id=())
        rows = new_tokens(output)
        assert rows[0] == expected[0] and rows[2] == expected_rows()[2]
        assert len(rows[1]) in num_tokens and rows[1] == expected[1][: len(rows[1])]
        assert output.finish_reasons == ["length", "error", "length"] and list(output.errors) == [1]


@pytest.mark.parametrize("draft", ["nothing", "perturbed", "prompt lookup"])
def test_requests_with_and_without_grammars(draft: str, late: bool) -> None:
    """Each gets the tokens that it gets alone, whatever runs beside it; its grammar is its own."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS[draft]("llama"), num_draft_tokens=3)

    def requests() -> list[Request]:
        given: list[dict[str, Any]] = [
            {"grammar": Allowing(by_turns)}, {}, {"grammar": LIBRARIES["xgrammar"](REGEX), "eos_token_id": EOS},
            {"grammar": Raising("fill")}, {"sampling": GREEDY}, {"grammar": Allowing(by_turns)},
        ]  # fmt: skip
        return [
            Request(PROMPTS[index % 3], 6 + index, **({"seed": index, "eos_token_id": ()} | each))
            for index, each in enumerate(given)
        ]

    alone = [next(decoder.generate_many([each], batch_size=1, max_length=40)) for each in requests()]
    together = in_order(decoder.generate_many(requests(), batch_size=2, max_length=40))
    assert texts(together) == texts(alone)
    assert [each.finish_reason for each in together] == [each.finish_reason for each in alone]
    assert together[3].finish_reason == "error" and "grammar: LookupError" in (together[3].error or "")
    assert [each.error for each in together[:3] + together[4:]] == [None] * 5


def test_one_grammar_is_for_one_text() -> None:
    grammar = Allowing(by_turns)
    decoder = SpeculativeDecoder(shared_tiny("llama"), sampling=GREEDY)
    with decoder.session(2, max_length=30) as session:
        first, second = (session.submit(Request([5, 6], 5, grammar=grammar, eos_token_id=())) for _ in range(2))
        session.step()
        third = session.submit(Request([5, 6], 5, grammar=grammar))
        while not first.done:
            session.step()
        assert first.result().error is None
        for refused in (second, third):
            assert refused.result().error == "grammar: it is the state of one text, and another request has it"
    grammar = Allowing(by_turns)
    wrong = raised(
        lambda options: decode("nothing", 1, **options),
        [
            ({"grammar": grammar}, ValueError, "grammar: it is the state of one text; expected one for each of 3 rows"),
            ({"grammar": [grammar, None, grammar]}, ValueError, "grammar: it is the state of one text; .* got one twi"),
            ({"grammar": [grammar]}, ValueError, "grammar: expected one, or None, for each of 3 rows, got 1"),
            ({"grammar": Allowing}, TypeError, "grammar: expected a Grammar .* got <class 'type'>"),
            ({"grammar": [None, "a*", None]}, TypeError, "grammar: expected a Grammar .* got <class 'str'>"),
            (
                {"grammar": '{"type": "object"}'},
                TypeError,
                "grammar: expected a Grammar .*llguidance.* got <class 'str'>",
            ),
            ({"grammar": {"type": "object"}}, TypeError, "grammar: expected a Grammar .* got <class 'dict'>"),
            (
                {"grammar": [Slotted(), None, None]},
                TypeError,
                "grammar: expected '__weakref__' in __slots__, got .*Slot",
            ),
        ],
    )
    assert not wrong, wrong


USED = "grammar: it is the state of one text, and another text has used it; make a new grammar for every row and call"


@dataclass
class Counting:
    """The first tokens in order. Its objects compare by value, and are not hashable."""

    count: int = 0

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        bitmask[row] = 0
        bitmask[row, self.count // 32] = 1 << self.count % 32

    def accept(self, token: int) -> bool:
        self.count += token == self.count
        return token == self.count - 1

    def rollback(self, count: int) -> None:
        self.count -= count


class Slotted:
    """An object of this class cannot be referenced weakly."""

    __slots__ = ()
    fill_bitmask, accept, rollback = Counting.fill_bitmask, Counting.accept, Counting.rollback


GRAMMARS: dict[str, Callable[[], Any]] = {
    "of a class": Counting,
    **{name: partial(make, FORCED) for name, make in LIBRARIES.items()},
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_used_grammar_is_refused_in_every_call(kind: str) -> None:
    used, fresh = [GRAMMARS[kind]()], GRAMMARS[kind]()
    decoder = SpeculativeDecoder(shared_tiny("llama"), sampling=GREEDY)
    prompt, call = torch.tensor([[5, 6]]), {"max_new_tokens": 4, "eos_token_id": ()}
    first = decoder.generate(prompt, grammar=used, **call).new_tokens(0)
    hf = {"custom_generate": torch_specops.hf.custom_generate, "attention_mask": torch.ones_like(prompt)}
    calls: list[Callable[[Any], Any]] = [
        lambda grammar: torch_specops.generate(shared_tiny("llama"), prompt, grammar=grammar, **call),
        lambda grammar: decoder.stream(prompt, grammar=[grammar], **call),
        lambda grammar: shared_tiny("llama").generate(prompt, grammar=grammar, max_new_tokens=4, **hf),
    ]
    cases = [(each, ValueError, USED) for each in calls]
    assert raised(lambda each: each(used[0]), cases) == []
    (completion,) = decoder.generate_many([Request([5, 6], 4, grammar=used[0])], batch_size=1, max_length=9)
    assert completion.error == USED
    # Another object is not meant, even one that is equal, and a used one is not kept alive.
    assert decoder.generate(prompt, grammar=fresh, **call).new_tokens(0) == first
    before, kept = len(grammar_module._used), weakref.ref(used.pop())
    gc.collect()
    assert kept() is None and len(grammar_module._used) < before


def test_a_matcher_that_has_moved_is_used() -> None:
    for make in LIBRARIES.values():
        grammar, token = make(REGEX), TEXTS.index("a")
        assert grammar.accept(token)
        with pytest.raises(ValueError, match=USED):
            decode("nothing", 1, prompts=PROMPTS[:1], grammar=grammar)
        grammar.rollback(1)
        assert not grammar.accept(TEXTS.index("9"))
        assert decode("nothing", 1, prompts=PROMPTS[:1], grammar=grammar, max_new_tokens=2).errors == {}


def test_a_grammar_without_a_token_is_new() -> None:
    """After a call that was refused, one that was interrupted in its first step, and a request without a row."""
    grammar, prompt, call = Counting(), torch.tensor([[5, 6]]), {"max_new_tokens": 4, "eos_token_id": ()}
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS["perturbed"]("llama"), sampling=GREEDY)
    with pytest.raises(TypeError, match="seed:"):
        decoder.generate(prompt, grammar=grammar, seed="x", **call)
    with (
        mock.patch.object(decoder._compiled_steps, "run", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        decoder.generate(prompt, grammar=grammar, **call)
    with decoder.session(1, max_length=30) as session:
        assert session.submit(Request([5, 6], 50, grammar=grammar)).index == 0
        session.submit(Request([5, 6], 3))
        waiting = session.submit(Request([5, 6], 3, grammar=grammar))
        session.step()
        waiting.cancel()
        assert waiting.result().error is None
        # Used elsewhere while it waits.
        late = session.submit(Request([5, 6], 3, grammar=grammar, eos_token_id=()))
        other = torch_specops.generate(shared_tiny("llama"), prompt, grammar=grammar, **call)
        assert other.new_tokens(0) == [0, 1, 2, 3]
        while not late.done:
            session.step()
        assert late.result().error == f"{USED} after 2 tokens"
    # An interrupt inside a grammar may leave it anywhere.
    grammar = Counting()
    with mock.patch.object(Counting, "accept", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        decode("perturbed", 2, prompts=PROMPTS[:1], grammar=grammar)
    with pytest.raises(ValueError, match=USED):
        decoder.generate(prompt, grammar=grammar, **call)


def test_one_graph_is_refused() -> None:
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), PromptLookup(), schedule="constant", one_graph=True, compile=False
    )
    with pytest.raises(NotImplementedError, match="grammar: a step that is one graph"):
        decoder.generate(torch.tensor([[5, 6]]), grammar=Allowing(by_turns))
    with decoder.session(1, max_length=30) as session:
        handle = session.submit(Request([5, 6], 5, grammar=Allowing(by_turns)))
        session.step()
        assert "one_graph=False" in (handle.result().error or "")


@pytest.mark.usefixtures("without_inductor")
def test_batches_without_grammars_compile_nothing_more() -> None:
    target = TracedPairs(random_table(VOCAB, seed=5))
    decoder = SpeculativeDecoder(target, PromptLookup(), num_draft_tokens=3, schedule="constant", compile=True)
    graphs = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for grammar in (None, Allowing(by_turns), None, Allowing(by_turns)):
            decoder.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, grammar=grammar, eos_token_id=())
            graphs.append(counters["stats"]["unique_graphs"])
    first, *others = graphs
    assert others == [first + 1] * 3


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("draft", ["nothing", "perturbed", "prompt lookup"])
def test_compiled_steps_give_the_same_text(draft: str) -> None:
    def text(is_compiled: bool) -> list[list[int]]:
        grammars = [LIBRARIES["xgrammar"](REGEX), None, LIBRARIES["llguidance"](REGEX)]
        return new_tokens(decode(draft, 3, grammar=grammars, eos_token_id=EOS, compile=is_compiled))

    assert text(True) == text(False)


def test_xgrammar_processor_becomes_a_grammar() -> None:
    ours = {"custom_generate": torch_specops.hf.custom_generate}
    lookup, model = PromptLookup(min_ngram=1), DRAFTS["perturbed"]("llama")
    for more, drafts in (
        ({}, (None, model)),
        ({"repetition_penalty": 1.3}, (lookup,)),
        ({"return_dict_in_generate": True, "output_scores": True}, (lookup, model)),
    ):

        def processors() -> list[Any]:
            return [LogitsProcessor([compiled(REGEX), compiled(FORCED), compiled(REGEX)])]

        expected = hf_text(logits_processor=processors(), **more)
        for draft in drafts:
            found = hf_text(logits_processor=processors(), draft_model=draft, **ours, **more)
            if more.get("output_scores"):
                for own, theirs in zip(found.scores, expected.scores, strict=True):
                    assert torch.equal(own.isneginf()[~own.isnan()], theirs.isneginf()[~own.isnan()])
                assert torch.equal(found.sequences, expected.sequences)
            else:
                assert torch.equal(found, expected)
    expected = hf_text(logits_processor=[LogitsProcessor(compiled(REGEX))])
    given = hf_text(grammar=[LIBRARIES["xgrammar"](REGEX) for _ in PROMPTS], draft_model=model, **ours)
    assert torch.equal(given, expected)


def test_unknown_grammar_processor_is_refused() -> None:
    used = LogitsProcessor(compiled(REGEX))
    hf_text(logits_processor=[used])
    fresh = {"logits_processor": [LogitsProcessor(compiled(REGEX))]}
    grammar = {"grammar": [LIBRARIES["xgrammar"](REGEX) for _ in PROMPTS]}
    scores = {"output_scores": True, "return_dict_in_generate": True}
    ours = {"custom_generate": torch_specops.hf.custom_generate, "draft_model": PromptLookup()}
    wrong = raised(
        lambda options: hf_text(**ours, **options),
        [
            ({"logits_processor": [used]}, NotImplementedError, "logits_processor: xgrammar.*passed as grammar="),
            (fresh | grammar, ValueError, "grammar: expected None beside xgrammar.contrib.hf.LogitsProcessor"),
            (grammar | scores, NotImplementedError, "grammar: scores come from logits_processor"),
        ],
    )
    assert not wrong, wrong
