"""The loop with rows that fail, bad arguments, and how arguments reach the ops."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_loops import GREEDY, LENGTH, Given, TokenStreamer, expected_rows, limited, new_tokens, streamed
from tiny_models import PROMPTS, PairModel, encoder_inputs, padded, perturbed, raised, random_table, shared_tiny
from torch import Tensor, nn

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder, Verifier
from torch_specops.decode import GenerationOutput, Step
from torch_specops.decode.inputs import GenerateArguments, read_prompts
from torch_specops.decode.planning import Planner
from torch_specops.drafts import Draft, EarlyExit, HierarchicalDraft, LanguageModel, LookupElse, PromptLookup
from torch_specops.ops.uniforms import row_seeds
from torch_specops.sampling import SamplingTensors
from torch_specops.schedules import Auto, Heuristic, NextStep


class FailingRow(PairModel):
    """From a position on, the logits of row 1 are NaN."""

    def __init__(self, table: Tensor, position: int) -> None:
        super().__init__(table)
        self.position = position

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        logits = super().forward(tokens, positions, num_logits).clone()
        logits[1][positions[1, -logits.shape[1] :] >= self.position] = torch.nan
        return logits


TABLE = random_table(8, seed=5)
SHORT_PROMPTS = [[1, 2, 3], [4, 5], [6, 0, 2, 7]]


def run_tables(target: LanguageModel, draft: Any = None, **options: Any) -> GenerationOutput:
    input_ids, mask = padded(SHORT_PROMPTS, "left")
    arguments = {"max_new_tokens": 12, "num_draft_tokens": 3, "sampling": GREEDY, "seed": 3} | options
    return torch_specops.generate(target, input_ids, attention_mask=mask, draft=draft, **arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_ends_alone(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    for source in (None, PairModel(TABLE), PairModel(-TABLE), PromptLookup()):
        whole = run_tables(PairModel(TABLE), source, sampling=sampling)
        # Row 1 has two tokens: with position 1 it emits nothing.
        for position in (1, 2, 7):
            message = f"target: no finite logit after {position + 1} tokens"
            with pytest.warns(RuntimeWarning, match=f"row 1: {message}"):
                output = run_tables(FailingRow(TABLE, position), source, sampling=sampling)
            assert output.errors == {1: message}
            assert output.lengths.tolist() == [15, position + 1, 16]
            assert new_tokens(output) == limited(new_tokens(whole), [12, position - 1, 12])
            assert (output.sequences[1, position + 1 :] == 0).all()


def test_ended_row_has_no_error() -> None:
    """The limit or an eos comes with the last token for which the target had finite logits."""
    whole = run_tables(PairModel(TABLE)).new_tokens(1)
    for draft in (None, PairModel(TABLE)):
        for options in ({"max_new_tokens": 3}, {"eos_token_id": [[], [whole[2]], []]}):
            output = run_tables(FailingRow(TABLE, 4), draft, **options)
            assert output.errors == {}
            assert output.new_tokens(1) == whole[: whole.index(whole[2]) + 1 if "eos_token_id" in options else 3]


def test_draft_without_finite_logits() -> None:
    whole, output = (run_tables(PairModel(TABLE), draft) for draft in (None, FailingRow(TABLE, 4)))
    assert torch.equal(whole.sequences, output.sequences) and output.errors == {}
    assert whole.stats.num_steps > output.stats.num_steps > 2


@pytest.mark.parametrize("op", ["exact", "block", "sigmoid"])
def test_the_verifier_passes_everything_on(op: str) -> None:
    """Same tokens as from the op itself; without any one of its arguments they would differ."""
    generator = torch.Generator().manual_seed(0)
    target, logits = 2 * torch.randn(2, 500, 3, 8, generator=generator)
    tokens = torch.randint(8, (500, 2), generator=generator)
    draft = Draft(tokens, logits[:, :2], torch.zeros(500, 2))
    accept, sample = torch.rand(500, 2, generator=generator), torch.rand(500, generator=generator)
    temperature = torch.tensor([0.0, 0.6]).repeat(250)
    values = {"top_k": [3, 0, 0, 0], "top_p": [1, 0.6, 1, 1], "min_p": [0, 0, 0.3, 0.3]}
    filters = {name: torch.tensor(value).repeat_interleave(125) for name, value in values.items()}
    everything = SamplingTensors(temperature, **filters)

    def run(draft: Draft = draft, sampling: SamplingTensors = everything, **options: float) -> list[list[int]]:
        return Verifier(op, **options)(target, draft, (accept, sample), sampling)[0].tolist()

    first = (target, tokens, draft.logits, accept, sample)
    if op == "exact":
        lossy = {"lenience": 0.5, "argmax_lenience": 0.3}
        direct = torch_specops.verify_exact(*first, temperature, draft.lse, **filters, **lossy)
        assert run(**lossy) == direct[0].tolist()
        assert run(**lossy) != run(lenience=0.5) != run() != run(argmax_lenience=0.3)
    elif op == "block":
        direct = torch_specops.verify_block(*first, temperature, draft.lse, **filters)
        assert run() == direct[0].tolist() != run(Draft(tokens, draft.logits))
    else:
        kept = [
            torch_specops.filter_logits(row, temperature, **filters)
            for row in torch.cat([target, logits[:, :2]], 1).unbind(1)
        ]
        rows = (torch.stack(kept[:3], 1), tokens, torch.stack(kept[3:], 1), accept, sample)
        for bounds in ({}, {"alpha": -2.0}, {"beta": 0.5}, {"alpha": -2.0, "beta": 0.5}):
            direct = torch_specops.verify_sigmoid(*rows, **bounds, temperature=temperature)
            assert run(**bounds) == direct[0].tolist()
        assert run(alpha=-2.0, beta=0.5) not in (run(), run(alpha=-2.0), run(beta=0.5))
    assert op == "sigmoid" or run() != run(Draft(tokens))
    for name in filters:
        assert run() != run(sampling=SamplingTensors(temperature, **(filters | {name: None})))
    assert run() != run(sampling=SamplingTensors(torch.ones(500), **filters))


# Bad input.

PROMPT = torch.tensor([[1, 2], [3, 4]])
THREE = torch.tensor([[1, 2, 3], [1, 2, 3]])

BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_ids": torch.ones(3, dtype=torch.int64)}, ValueError, r"input_ids: expected \[B, P\] .* shape \[3\]"),
    ({"input_ids": torch.ones(1, 3)}, TypeError, "input_ids: expected an int64 tensor .* got torch.float32"),
    ({"input_ids": torch.tensor([[1, -1]])}, ValueError, r"input_ids: expected tokens in \[0, 8\), got -1"),
    ({"attention_mask": PROMPT[:1]}, ValueError, r"attention_mask: expected \[2, 2\], .* got \[1, 2\]"),
    ({"attention_mask": [[1, 1], [1, 1]]}, TypeError, "attention_mask: expected a tensor .* got <class 'list'>"),
    ({"attention_mask": PROMPT}, ValueError, "attention_mask: expected zeros and ones"),
    ({"attention_mask": PROMPT == 1}, ValueError, "attention_mask: .* got none in row 1"),
    (
        {"input_ids": THREE, "attention_mask": torch.tensor([[0], [2]]) != THREE},
        ValueError,
        "attention_mask: .* hole in row 1",
    ),
    ({"max_new_tokens": [3, -2]}, ValueError, "max_new_tokens: expected a number >= 0, got -2"),
    ({"max_new_tokens": [3, 2, 1]}, ValueError, "max_new_tokens: expected one number or 2, got 3"),
    ({"max_new_tokens": [2, 2.5]}, TypeError, "max_new_tokens: expected an int, got <class 'float'>"),
    ({"seed": 2**63}, ValueError, "seed: expected a 64-bit number, got 9223372036854775808"),
    ({"seed": [0, 2**63]}, ValueError, "seed: expected a 64-bit number, got 9223372036854775808"),
    ({"seed": "x"}, TypeError, r"seed: expected an int, or int64 \[2\] .* got <class 'str'>"),
    ({"seed": [1, 2.0]}, TypeError, r"seed: expected an int, or int64 \[2\] .* got <class 'float'>"),
    ({"seed": torch.tensor([1.0, 2.0])}, TypeError, r"seed: expected an int, or int64 \[2\] .* got torch.float32"),
    ({"seed": torch.tensor([1, 2, 3])}, ValueError, r"seed: expected an int, or int64 \[2\] .* got 3 numbers"),
    ({"eos_token_id": "draft"}, TypeError, "eos_token_id: expected an int, got <class 'str'>"),
    ({"eos_token_id": -1}, ValueError, "eos_token_id: expected a number >= 0, got -1"),
    ({"eos_token_id": [1, 8]}, ValueError, r"eos_token_id: expected tokens in \[0, 8\), got 8"),
    ({"eos_token_id": [[1], [2], [3]]}, ValueError, "eos_token_id: expected tokens .* for each of 2, got 3"),
    ({"eos_token_id": [[1], 2.5]}, TypeError, "eos_token_id: expected an int, got <class 'float'>"),
    ({"pad_token_id": -1}, ValueError, "pad_token_id: expected a number >= 0, got -1"),
    ({"sampling": 0.7}, TypeError, "sampling: expected SamplingParams"),
    ({"sampling": {"heat": 1.0}}, TypeError, "sampling: SamplingParams.__init__.* unexpected keyword argument 'heat'"),
    ({"sampling": {"top_p": 2.0}}, ValueError, r"top_p: expected numbers in \(0, 1\], got 2.0"),
    ({"sampling": SamplingParams(temperature=[0.5, 1.0, 2.0])}, ValueError, "temperature: expected one number or 2"),
]


def test_bad_arguments_of_a_call() -> None:
    """Refused by `generate`, and by `stream` at the call and not at the first step."""
    decoder = SpeculativeDecoder(PairModel(TABLE))
    with pytest.raises(RuntimeError, match="output: the newest call is not generate or stream"):
        decoder.output()
    given = {"input_ids": PROMPT, "max_new_tokens": 4}
    for call in (decoder.generate, decoder.stream):
        assert raised(lambda bad, call=call: call(**(given | bad)), BAD_CALLS) == []


SIGMOID = "verify: 'sigmoid' .* a draft with probabilities"
BAD_DECODERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target": 3}, TypeError, "target: expected a transformers model or a LanguageModel, got <class 'int'>"),
    ({"target": nn.Linear(2, 2)}, TypeError, "target: .*Linear'>; of a wrapper, .* must derive from .*LanguageModel"),
    ({"target": PairModel}, TypeError, "target: expected an object, got the class PairModel"),
    ({"draft": "x"}, TypeError, r"draft: expected a model, a DraftSource or None, got .*str'>; .*PromptLookup\(\)"),
    ({"draft": nn.Linear(2, 2)}, TypeError, "draft: expected .*, got .*Linear'>; of a wrapper"),
    ({"draft": PromptLookup}, TypeError, "draft: expected an object, got the class PromptLookup"),
    ({"draft": EarlyExit(1)}, TypeError, "target: early exit needs the method first_layers, which PairModel lacks"),
    ({"draft": PairModel(random_table(7, 0))}, ValueError, r"draft: .* \(8 tokens\), got 7 tokens .*TokenMap"),
    ({"draft": PairModel(TABLE.to("meta"))}, ValueError, "draft: expected a draft on cpu, as the target is, got meta"),
    ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected a number >= 1, got 0"),
    ({"schedule": "fast"}, ValueError, r"schedule: expected 'auto', .* or a Schedule, got 'fast'"),
    ({"schedule": "fast", "draft": None}, ValueError, r"schedule: expected 'auto', .* or a Schedule, got 'fast'"),
    ({"verify": "typical"}, ValueError, "verify: expected 'exact', 'block', 'gumbel' or 'sigmoid', got 'typical'"),
    ({"verify": "sigmoid", "draft": None}, ValueError, SIGMOID),
    ({"verify": "sigmoid", "draft": PromptLookup()}, ValueError, SIGMOID),
    ({"verify": "sigmoid", "draft": LookupElse(PairModel(TABLE))}, ValueError, f"{SIGMOID} in all rows"),
    ({"lenience": 0.5}, TypeError, r"lenience: SpeculativeDecoder has no such argument; pass verify=.*Verifier"),
    ({"beta": 2}, TypeError, r'beta: .* pass verify=torch_specops.Verifier\("sigmoid", alpha=..., beta=...\)'),
    ({"compile": "always"}, ValueError, "compile: expected True, False or 'auto', got 'always'"),
    ({"max_length": 1}, ValueError, "max_length: expected a number >= 2, got 1"),
    ({"sampling": 0.7}, TypeError, "sampling: expected SamplingParams"),
]


def test_bad_arguments_of_a_decoder() -> None:
    models = {"target": PairModel(TABLE), "draft": PairModel(TABLE)}
    assert raised(lambda bad: SpeculativeDecoder(**(models | bad)), BAD_DECODERS) == []


def test_a_keyword_that_a_call_does_not_have() -> None:
    """The error names the call, and what to pass: another name, another call, or the nearest name."""
    decoder, prompt = SpeculativeDecoder(PairModel(TABLE)), [1, 2]
    calls: dict[str, Callable[..., object]] = {
        "generate": partial(torch_specops.generate, PairModel(TABLE), PROMPT),
        "SpeculativeDecoder": partial(SpeculativeDecoder, PairModel(TABLE)),
        "SpeculativeDecoder.generate": partial(decoder.generate, PROMPT),
        "SpeculativeDecoder.stream": partial(decoder.stream, PROMPT),
        "SpeculativeDecoder.session": partial(decoder.session, 2, max_length=8),
        "SpeculativeDecoder.generate_many": partial(decoder.generate_many, [prompt], batch_size=2),
        "Request": partial(Request, prompt),
    }
    greedy, beams = r"sampling=SamplingParams\(temperature=0.0\) for greedy", r"beam search is .*\.beam_search\("
    before = " to Request or SpeculativeDecoder"
    advice = [
        ("generate", "temperature", r"pass sampling=SamplingParams\(temperature=...\)$"),
        ("generate", "do_sample", f"pass {greedy}"),
        ("generate", "max_length", "pass max_new_tokens=..., which does not count the prompt"),
        ("generate", "stop", "pass stop_strings=... with tokenizer=...$"),
        ("generate", "num_beams", beams),
        ("generate", "sedd", r"did you mean seed\?"),
        ("generate", "foo", "expected one of target, input_ids, draft, .*, attention_mask, .*, grammar$"),
        ("SpeculativeDecoder", "assistant_model", "pass draft=...$"),
        ("SpeculativeDecoder", "max_new_tokens", "pass it to .*SpeculativeDecoder.generate or .*.stream"),
        ("SpeculativeDecoder.generate", "draft", "pass it to SpeculativeDecoder$"),
        ("SpeculativeDecoder.generate", "draft_model", "pass draft=... to SpeculativeDecoder$"),
        ("SpeculativeDecoder.stream", "max_tokens", "pass max_new_tokens=...$"),
        ("SpeculativeDecoder.stream", "streamer", "pass it to generate or SpeculativeDecoder.generate$"),
        ("SpeculativeDecoder.session", "top_k", rf"pass sampling=SamplingParams\(top_k=...\){before}$"),
        ("SpeculativeDecoder.generate_many", "max_new_tokens", "pass it to Request$"),
        ("Request", "min_p", r"pass sampling=SamplingParams\(min_p=...\)$"),
        ("Request", "max_tokens", "pass max_new_tokens=...$"),
    ]
    cases = [((call, name), TypeError, f"{name}: {call} has no such argument; {text}") for call, name, text in advice]
    assert raised(lambda case: calls[case[0]](**{case[1]: 1}), cases) == []
    assert {call for call, *_ in advice} == set(calls)


def test_calls_show_the_same_keywords() -> None:
    """What `help` and editors show. The defaults stand in each signature, and may not differ."""

    def keywords(call: Callable[..., object]) -> dict[str, tuple[Any, Any]]:
        parameters = inspect.signature(call).parameters.values()
        return {each.name: (each.default, each.annotation) for each in parameters if each.kind is each.KEYWORD_ONLY}

    stream = keywords(SpeculativeDecoder.stream)
    streamer = {"streamer": (None, "Streamer | None"), "progress": (False, "bool")}
    of_decoder = keywords(SpeculativeDecoder.__init__)
    assert keywords(SpeculativeDecoder.generate) == stream | streamer
    own = {name: of_decoder[name] for name in ("num_draft_tokens", "schedule", "verify", "compile", "invariant")}
    assert keywords(torch_specops.generate) == stream | streamer | own | {"draft": (None, "AnyDraft")}
    of_loop = {"default_sampling", "row_rules", "min_new_tokens"}
    assert {name: of for name, of in keywords(read_prompts).items() if name not in of_loop} == stream
    assert GenerateArguments.__annotations__.keys() == stream.keys()
    request = inspect.signature(Request).parameters
    assert {name: of.annotation for name, of in request.items() if name != "unknown"} == Request.__annotations__
    # Dataclasses that derive from it make their signatures of these.
    assert {each.name: each.default for each in fields(Request)[1:]} == {
        name: of.default for name, of in request.items() if name not in ("input_ids", "unknown")
    }


def test_numbers_of_numpy_are_numbers() -> None:
    """Where they would otherwise reach sizes, products and compiled code, they are Python's from there on."""

    def decode(integer: Callable[[int], Any], number: Callable[[float], Any]) -> list[Any]:
        sampling: dict[str, Any] = {"temperature": number(0.5), "top_k": integer(7), "repetition_penalty": number(1.5)}
        sampling |= {"logit_bias": {integer(5): number(0.5)}, "bad_words": [[integer(1), integer(2)]]}
        verify = Verifier("exact", lenience=number(0.5), argmax_lenience=number(0.5))
        draft = HierarchicalDraft(PairModel(TABLE), num_inner_tokens=integer(2), num_forwards=integer(2))
        kwargs: dict[str, Any] = {"num_draft_tokens": integer(3), "max_length": integer(20), "verify": verify}
        decoder = SpeculativeDecoder(PairModel(TABLE), draft, **kwargs)
        call = {"max_new_tokens": integer(5), "seed": integer(3), "eos_token_id": integer(4)}
        counts = {"num_return_sequences": integer(2), "top_logprobs": integer(2), "pad_token_id": integer(6)}
        output = decoder.generate([[1, 2], [3]], sampling=sampling, **call, **counts)
        request = Request([1, 2], sampling=sampling, max_time=number(9.5), **call)
        done = list(decoder.generate_many([request], batch_size=integer(2), top_logprobs=integer(2)))
        schedules = Auto(integer(3), buckets=[integer(0), integer(3)]), Heuristic(integer(2), maximum=integer(3))
        kinds = {type(count) for count in (*schedules[0].buckets, schedules[1]._value, decoder.schedule.buckets[0])}
        assert kinds == {int} and {type(value) for name, value in vars(verify).items() if name != "op"} == {float}
        return [output.sequences.tolist(), output.stats.seeds, [each.tokens.tolist() for each in done]]

    assert decode(np.int16, np.float16) == decode(np.uint8, np.float32) == decode(int, float)
    plan, step = Given([np.int64(3)]), NextStep([0], rooms=[9], left=[9], num_rows=1)
    assert [*map(type, Planner(plan, None, ())._counts(step))] == [int]
    refused = [
        (value, TypeError, "num_return_sequences: expected an int, got") for value in (np.bool_(1), np.float64(2))
    ]
    decoder = SpeculativeDecoder(PairModel(TABLE))
    assert raised(lambda value: decoder.generate([[1]], num_return_sequences=value), refused) == []


def test_a_mapping_is_sampling_everywhere() -> None:
    greedy = {"temperature": 0}
    alone = SpeculativeDecoder(PairModel(TABLE), sampling=GREEDY).generate([[1, 2]], max_new_tokens=6).sequences
    by_decoder = SpeculativeDecoder(PairModel(TABLE), sampling=greedy).generate([[1, 2]], max_new_tokens=6)
    by_call = torch_specops.generate(PairModel(TABLE), [[1, 2]], max_new_tokens=6, sampling=greedy)
    assert torch.equal(alone, by_decoder.sequences) and torch.equal(alone, by_call.sequences)


def test_padding_without_a_mask_is_said() -> None:
    class Padded(PairModel):
        pad_token_id = 7
        eos_token_ids = (6,)

    def warns(*rows: list[int], **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_specops.generate(Padded(TABLE), torch.tensor(rows), max_new_tokens=2, **options)
        return [str(each.message) for each in caught]

    for rows, verb in (
        ([[1, 2, 3], [7, 4, 5]], "begins"),
        ([[7, 1, 2], [7, 7, 3]], "begins"),
        ([[7, 7, 4]], "begins"),
        ([[1, 2, 3], [4, 5, 7]], "ends"),
        ([[4, 7, 7]], "ends"),
    ):
        (message,) = warns(*rows)
        assert message.startswith(f"attention_mask: none was given, and row {len(rows) - 1} {verb} with the pad token")
    # The tokenizer's pad token is often another: an eos token of the call or of the target, token 0, or what is known.
    for rows, token, options in (
        ([[1, 2, 3], [6, 4, 5]], 6, {"eos_token_id": ()}),
        ([[1, 2, 4], [1, 3, 3]], 3, {"eos_token_id": [5, 3]}),
        ([[0, 1, 2], [0, 0, 3]], 0, {}),
        ([[1, 2, 3], [4, 0, 0]], 0, {}),
        ([[1, 2, 3], [4, 4, 3]], 4, {"tokenizer": SimpleNamespace(pad_token_id=4)}),
    ):
        (message,) = warns(*rows, **options)
        assert f"row 1 {'ends' if rows[1][-1] == token else 'begins'} with token {token}, which is" in message
    # A repeated prompt, prompts that all begin or end so, a single row, and texts that end in an exclamation mark.
    ordinary = [[[0, 1, 6]] * 3, [[0, 1, 2], [0, 3, 4]], [[1, 2, 6], [3, 4, 6]], [[6, 6, 1]], [[0, 0, 6]]]
    assert [warns(*rows) for rows in [*ordinary, [[1, 2, 0], [3, 4, 2]]]] == [[]] * 6
    # A model whose texts begin or end with its pad token; another pad token; and a mask.
    assert warns([7, 1, 2], [7, 4, 5]) == warns([7, 1, 2]) == warns([1, 2, 7], [4, 5, 7]) == warns([7]) == []
    assert warns([1, 2, 3], [7, 4, 5], pad_token_id=6) == []
    assert warns([1, 2, 3], [7, 4, 5], attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]])) == []


def test_missing_mask_warns() -> None:
    target, ours = shared_tiny("llama"), {"custom_generate": torch_specops.hf.custom_generate, "max_new_tokens": 2}
    padded_ids = torch.tensor([[5, 6, 7], [0, 0, 8]])
    message = "attention_mask: none was given, and row 1 begins with token 0, which is"
    with pytest.warns(UserWarning, match=message):
        target.generate(padded_ids, pad_token_id=11, **ours)
    # transformers drops a mask of ones, and finds its own pad token.
    target.generate(padded_ids, pad_token_id=11, **ours, attention_mask=torch.ones_like(padded_ids))
    target.generate(padded_ids, pad_token_id=0, **ours)
    inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]])}
    with pytest.warns(UserWarning, match="inputs: attention_mask: none was given, and row 1 ends with the pad token 0"):
        torch_specops.generate(shared_tiny("t5"), torch.tensor([[1], [1]]), inputs=inputs, max_new_tokens=2)


def test_prompts_may_be_a_list() -> None:
    """Of lists, tensors and arrays; with a list of masks, as a tokenizer gives it."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), PromptLookup(min_ngram=1), sampling=GREEDY)
    tensors = [torch.tensor(prompt, dtype=torch.int32) for prompt in PROMPTS]
    masks = [[1] * len(prompt) for prompt in PROMPTS]
    # The second prompt is padded on the left.
    padded_masks = [[0] * (index == 1) + mask for index, mask in enumerate(masks)]
    padded_prompts = [[9] * (index == 1) + list(prompt) for index, prompt in enumerate(PROMPTS)]
    # What pandas has for a column of lists.
    objects = np.array([*map(list, PROMPTS)], dtype=object)
    column = SimpleNamespace(to_numpy=lambda: objects)
    for prompts, mask in (
        ([list(prompt) for prompt in PROMPTS], None),
        (tuple(tensors), None),
        ([np.array(prompt) for prompt in PROMPTS], masks),
        (padded_prompts, padded_masks),
        (objects, np.array(masks, dtype=object)),
        (column, None),
    ):
        output = decoder.generate(prompts, attention_mask=mask, max_new_tokens=LENGTH)
        assert new_tokens(output) == expected_rows()
        assert output.prompt_lengths.tolist() == list(map(len, PROMPTS))
    assert streamed(list(decoder.stream([tensors[0]], max_new_tokens=LENGTH)), 1) == expected_rows()[:1]
    streamer = TokenStreamer()
    decoder.generate([tensors[0]], max_new_tokens=2, streamer=streamer)
    assert streamer.heard[0] == list(PROMPTS[0])
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"input_ids": []}, ValueError, "input_ids: expected at least one prompt, got an empty list"),
        ({"input_ids": [1, 2]}, ValueError, r"input_ids: expected a list of prompts, got a list of tokens"),
        ({"input_ids": "She had"}, TypeError, r"input_ids: expected an int64 tensor .* a list of prompts, .* 'str'"),
        ({"input_ids": [[1], []]}, ValueError, r"input_ids\[1\]: expected \[P\] with P >= 1, got shape \[0\]"),
        ({"input_ids": [[1], "a"]}, TypeError, r"input_ids\[1\]: expected an int64 tensor"),
        ({"input_ids": [[1], [0.5]]}, TypeError, "input_ids: expected int64 tokens in every prompt, got .*float32"),
        ({"input_ids": np.array([[1], "a"], dtype=object)}, TypeError, r"input_ids\[1\]: expected an int64 tensor"),
        (
            {"input_ids": np.array([1, 2], dtype=object)},
            ValueError,
            "input_ids: expected a list of prompts, got a list",
        ),
        ({"input_ids": [[1], [60]]}, ValueError, r"input_ids: expected tokens in \[0, 60\), got 60"),
        (
            {"input_ids": [[1]], "attention_mask": torch.ones(1, 1)},
            TypeError,
            "attention_mask: expected None or a list",
        ),
        ({"input_ids": [[1]], "attention_mask": [[1, 1]]}, ValueError, "attention_mask: expected a number for each"),
    ]
    assert raised(lambda call: decoder.generate(**call), wrong) == []


def test_generate_passes_everything_on() -> None:
    input_ids, mask = padded(PROMPTS, "left")
    steps: list[Step] = []
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": [9, 20, 4], "seed": 3}
    arguments |= {"eos_token_id": [5, 6], "pad_token_id": 9}
    options: dict[str, Any] = {"num_draft_tokens": 4, "schedule": "heuristic", "compile": False}
    options |= {"verify": Verifier("sigmoid", alpha=-2.0, beta=0.5)}
    sampling = SamplingParams(temperature=0.8)
    # It is often rejected.
    model = shared_tiny("llama")
    draft = perturbed(model, 0.2)

    def run(**others: Any) -> GenerationOutput:
        given = {"draft": draft, "sampling": sampling, **arguments, **options, **others}
        return torch_specops.generate(model, input_ids, **given)

    output = run(streamer=steps.append)
    same = SpeculativeDecoder(model, draft, sampling=sampling, **options).generate(input_ids, **arguments)
    assert torch.equal(output.sequences, same.sequences)
    assert new_tokens(run(verify="sigmoid")) != new_tokens(output)
    assert output.stats.seeds == row_seeds(3, 3).tolist() and len(steps) == output.stats.num_steps
    assert output.stats.compiled == "compile=False was asked for"
    # The default limit is 128 tokens.
    inputs = encoder_inputs("t5", slice(1))
    whole = torch_specops.generate(shared_tiny("t5"), input_ids[:1], inputs=inputs, sampling=GREEDY).new_tokens(0)
    assert len(whole) == 128 and whole[:LENGTH] == expected_rows(family="t5")[0]
