"""Gemma 4 assistants in the loop: what they draft is what transformers' module gives over a fresh forward of the
target, and what a plain computation gives; and nothing but speed depends on it."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_gemma4 import (
    IMAGE,
    can_be_built,
    gemma4_with_images,
    image,
    logits_of_transformers,
    plain_logits,
    tiny_gemma4,
)
from tiny_laws import V, first_tokens, model_laws, p_values
from tiny_loops import GREEDY, Given, Recording, new_tokens
from tiny_models import greedy_alone, padded, raised, shared_tiny
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import GenerationConfig, PreTrainedModel

from torch_specops import Request, SamplingParams, SpeculativeDecoder, compilation, generate
from torch_specops.compilation import compile_piece
from torch_specops.decode.kept import _kept
from torch_specops.drafts import Draft, Gemma4Assistant
from torch_specops.hf import custom_generate

pytestmark = can_be_built
# So few tokens that some drafts of a random assistant are accepted.
TOKENS = 8
PROMPTS = ([1, 3, 5, 2, 3, 5, 4], [1], [1, 6, 4, 7])
TRIALS = 2_000
INPUT_IDS, MASK = padded(PROMPTS, "left")
MIXED = SamplingParams(temperature=[0.0, 1.0, 0.7])
PAUSES = [3, 1, 4, 0, 0, 2, 0, 1]


class Recorder(Recording, Gemma4Assistant):
    def restart(self, *arguments: Any) -> None:
        """A source with a `start`, as a recorder has, needs one."""


def check_drafts(pair: tuple[PreTrainedModel, PreTrainedModel], draft: Recorder, ends: list[int], plain: bool) -> None:
    """Compare all that was drafted within texts of these lengths."""
    checked = 0
    for tokens, lengths, proposed in draft.seen:
        assert proposed.logits is not None and proposed.lse is not None
        for row, length in enumerate(lengths.tolist()):
            if length == 1:
                assert bool((proposed.tokens[row] == -1).all())
            if not 2 <= length < ends[row]:
                continue
            compute = plain_logits if plain else logits_of_transformers
            expected = compute(*pair, tokens[row, :length], proposed.tokens[row])
            if pair[1].masked_embedding is not None:
                # So transformers marks tokens of other centroids.
                expected = expected.masked_fill(expected == expected.amin(-1, keepdim=True), -torch.inf)
            torch.testing.assert_close(proposed.logits[row], expected, rtol=1e-4, atol=1e-4)
            checked += len(expected)
    assert checked > 20


@pytest.mark.parametrize(
    ("kind", "attention", "counts", "compiled"),
    [
        ("", None, PAUSES, True),
        ("shared", None, PAUSES, False),
        ("ordered", None, [4], True),
        ("k = v", "eager", [3], False),
        ("unified", None, [2], False),
    ],
)
def test_drafts_are_those_of_transformers(
    kind: str, attention: str | None, counts: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a ragged batch beyond the window, greedy and sampled; and nothing that an earlier batch left is read."""
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    target, assistant = tiny_gemma4(TOKENS, kind, attention)
    draft = Recorder(assistant)
    decoder = SpeculativeDecoder(target, draft, schedule=Given(counts), sampling=MIXED, compile=compiled)
    for limits in ((14, 9, 10), (6, 14, 4)):
        output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=limits, seed=4)
        assert new_tokens(output)[0] == greedy_alone(target, PROMPTS[0], limits[0])
        check_drafts((target, assistant), draft, output.lengths.tolist(), plain=kind == "")
        # Drafts must not be those of a stale cache.
        for layer in decoder.target.key_values:
            layer.keys.fill_(9.0)
    # Looks found no change, for which graphs would be captured again.
    assert draft.model.version == 1
    assert output.stats.num_accepted > 0


def test_rows_that_are_filled_again() -> None:
    """Also where the first texts have one token, so that the target has read nothing."""
    target, assistant = pair = tiny_gemma4(TOKENS)
    draft = Recorder(assistant)
    decoder = SpeculativeDecoder(target, draft, sampling=GREEDY, compile=False)
    prompts = [[1], [2], PROMPTS[0], [3, 3]]
    requests = [Request(prompt, 4 + 3 * index) for index, prompt in enumerate(prompts)]
    for done in decoder.generate_many(requests, batch_size=2, max_length=40):
        assert done.new_tokens.tolist() == greedy_alone(target, prompts[done.index], 4 + 3 * done.index)
    check_drafts(pair, draft, [30, 30], plain=False)


def test_drafts_after_images() -> None:
    """Also in rows that are filled again."""
    target, assistant = tiny_gemma4(TOKENS)
    model = gemma4_with_images(target)
    draft, checked = Recorder(assistant), 0
    decoder = SpeculativeDecoder(model, draft, num_draft_tokens=2, sampling=GREEDY, compile=False)
    prompts = [[1, 3, *[IMAGE] * 4, 2], [1, 4, 7], [2, *[IMAGE] * 4, 4, 4]]
    inputs = [image(0), {}, image(1)]
    requests = [Request(prompt, 6, inputs=own or None) for prompt, own in zip(prompts, inputs, strict=True)]
    list(decoder.generate_many(requests, batch_size=2))
    assert decoder.target.version == draft.model.version == 1
    for tokens, lengths, proposed in draft.seen:
        for row, length in enumerate(lengths.tolist()):
            text = tokens[row, :length]
            of_prompts = zip(prompts, inputs, strict=True)
            (own,) = [own for prompt, own in of_prompts if text[: len(prompt)].tolist() == prompt]
            expected = logits_of_transformers(model, assistant, text, proposed.tokens[row], **own)
            torch.testing.assert_close(proposed.logits[row], expected, rtol=1e-4, atol=1e-4)
            checked += bool(own)
    assert checked > 3


def test_the_text_is_that_of_no_draft() -> None:
    """With drafts that share the target's noise; and a pickled draft leaves its target behind."""
    target, assistant = tiny_gemma4(TOKENS, "ordered")
    draft = Gemma4Assistant(assistant)
    found = []
    for source in (None, draft, draft):
        if found[1:]:
            source = pickle.loads(pickle.dumps(draft))
            assert hasattr(draft, "_target") and not hasattr(source, "_target")
        decoder = SpeculativeDecoder(target, source, num_draft_tokens=3, sampling=MIXED, verify="gumbel")
        output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=20, seed=3)
        found.append(new_tokens(output))
    assert found[0] == found[1] == found[2] and output.stats.num_accepted > 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_steps_give_the_eager_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second batch compiles nothing: one graph each for a draft, the uniforms, the verification."""
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    target, assistant = tiny_gemma4(TOKENS, "ordered")
    found = []
    for compile in (False, True):
        decoder = SpeculativeDecoder(target, Gemma4Assistant(assistant), sampling=MIXED, compile=compile)
        for seed in (1, 2):
            output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=15, seed=seed)
            found.append((output.sequences.tolist(), output.stats.accepted_at))
            assert backend.frame_count == (3 if compile else 0)
    assert found[:2] == found[2:]


def test_an_assistant_in_another_dtype_and_autocast() -> None:
    target, assistant = tiny_gemma4(TOKENS)
    options: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 9, "sampling": GREEDY, "num_draft_tokens": 2}
    expected = new_tokens(generate(target.float(), INPUT_IDS, **options))
    # The user's model stays in training mode.
    draft = Recorder(assistant.bfloat16().train())
    assert new_tokens(generate(target, INPUT_IDS, draft=draft, **options)) == expected
    narrow = draft.seen[0][2].logits
    assistant.float()
    with torch.autocast("cpu", torch.bfloat16):
        generate(target, INPUT_IDS, draft=draft, **options)
    wide = draft.seen[0][2].logits
    assert assistant.training and narrow is not None and wide is not None and narrow.dtype == torch.bfloat16
    # Later drafts may follow others, and the second row has one token.
    torch.testing.assert_close(narrow[::2, 0].float(), wide[::2, 0].float(), rtol=0.1, atol=0.1 * float(wide.std()))


# The law.


class Likeliest(Gemma4Assistant):
    """As transformers: its argmax, as if it had been drawn."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.logits is not None
        return Draft(draft.logits.argmax(-1), draft.logits)


def test_sampled_text_has_the_law_of_the_target(report: Report) -> None:
    target, assistant = tiny_gemma4(V, "ordered", of_assistant={"num_centroids": 3})
    tokens = first_tokens(target, Gemma4Assistant(assistant), 2, 0.8, TRIALS)
    expect_laws(report, "loop, Gemma 4 assistant", p_values(tokens, model_laws(target, 0.8)))


def test_the_law_test_catches_wrong_drafts(report: Report) -> None:
    target, assistant = tiny_gemma4(V)
    tokens = first_tokens(target, Likeliest(assistant), 2, 0.8, TRIALS)
    expect_caught(report, "loop, Gemma 4 assistant, Likeliest", p_values(tokens, model_laws(target, 0.8)))


# transformers' own generate.


def test_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    target, assistant = tiny_gemma4(TOKENS)
    config = assistant.generation_config
    config.num_assistant_tokens = 3
    options: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12}
    expected = target.generate(INPUT_IDS, do_sample=False, **options)
    options |= {"custom_generate": custom_generate, "assistant_model": assistant, "return_dict_in_generate": True}
    kept = []
    for compile in (False, True, True):
        output = target.generate(INPUT_IDS, do_sample=False, compile=compile, **options)
        assert torch.equal(output.sequences, expected) and len(output.stats.accepted_at) == 3
        kept.append(_kept.get(target))
    assert kept[1] is not None and kept[1].decoder is kept[2].decoder
    # A compiled decoder is not kept for another K, whoever reads it from the assistant's settings.
    for count, is_wrapped in ((5, False), (4, True), (2, True)):
        config.num_assistant_tokens = count
        own = Gemma4Assistant(assistant) if is_wrapped else assistant
        output = target.generate(INPUT_IDS, do_sample=False, compile=True, **options | {"assistant_model": own})
        assert torch.equal(output.sequences, expected) and len(output.stats.accepted_at) == count
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"num_assistant_tokens": 0}, ValueError, "num_assistant_tokens: expected a number >= 1, got 0"),
        ({"num_assistant_tokens_schedule": "none"}, ValueError, "num_assistant_tokens_schedule: expected one of"),
        ({"assistant_confidence_threshold": 0.4}, NotImplementedError, "assistant_confidence_threshold: .*, got 0.4"),
    ]

    def with_settings(fields: dict[str, Any]) -> None:
        assistant.generation_config = GenerationConfig(**fields)
        target.generate(INPUT_IDS, **options)

    assert raised(with_settings, bad) == []
    assistant.generation_config = config
    sampled = target.generate(INPUT_IDS, do_sample=True, seed=3, **options)
    seeds = sampled.stats.seeds
    draft = Gemma4Assistant(assistant)
    ours = generate(target, INPUT_IDS, draft=draft, attention_mask=MASK, max_new_tokens=12, seed=seeds)
    assert sampled.stats.verify == "exact" and torch.equal(sampled.sequences[0, 7:], torch.tensor(ours.new_tokens(0)))


def test_models_that_do_not_fit() -> None:
    target, assistant = tiny_gemma4(TOKENS)
    other, sizes = "draft: it is for another target: ", "key heads and their size in "
    none = tiny_gemma4(TOKENS)[1]
    none.generation_config.num_assistant_tokens = 0
    flash, ordered = tiny_gemma4(TOKENS)[1], tiny_gemma4(TOKENS, "ordered")[1]
    flash.config.text_config._attn_implementation = "flex_attention"
    ordered.masked_embedding.token_ordering.zero_()
    few = tiny_gemma4(TOKENS, "ordered", of_assistant={"centroid_intermediate_top_k": 5})[1]
    odd = tiny_gemma4(TOKENS, of_assistant={"num_centroids": 3, "use_ordered_embeddings": True})[1]
    of_models: list[tuple[Any, type[Exception], str]] = [
        (target, TypeError, "model: expected a Gemma 4 assistant of transformers, as .* got .*Gemma4ForCausalLM"),
        ("assistant", TypeError, r"model: expected .* as AutoModelForCausalLM loads it \(5.23 cannot\), got .*str"),
        (none, ValueError, "num_assistant_tokens: expected a number >= 1, got 0"),
        (flash, ValueError, "model: attention 'flex_attention' takes no mask"),
        (ordered, ValueError, "model: expected each of 8 tokens once in token_ordering"),
        (few, ValueError, "model: expected num_centroids that .* at least centroid_intermediate_top_k = 5, got 4"),
        (odd, ValueError, "model: expected num_centroids that divides 8 tokens .* got 3"),
    ]
    of_targets: list[tuple[Any, type[Exception], str]] = [
        (shared_tiny("llama"), ValueError, other + "model_type gemma4_text, the target has llama"),
        (tiny_gemma4(TOKENS, hidden_size=24)[0], ValueError, other + "backbone_hidden_size 32, the target has 24"),
        (tiny_gemma4(TOKENS + 1)[0], ValueError, other + "vocab_size 8, the target has 9"),
        (tiny_gemma4(TOKENS, head_dim=16)[0], ValueError, other + sizes + r"sliding_.* \(2, 8\), .* \(2, 16\)"),
        (tiny_gemma4(TOKENS, "k = v")[0], ValueError, other + sizes + r"full_.* \(2, 16\), .* \(1, 16\)"),
    ]
    assert raised(Gemma4Assistant, of_models) == []
    draft = Gemma4Assistant(assistant)
    assert raised(lambda model: SpeculativeDecoder(model, draft), of_targets) == []
    of_sources = [("target", TypeError, "target: expected a transformers model, whose keys are read, got str")]
    assert raised(draft.model.sources, of_sources) == []
    # Without the class around it.
    of_drafts = [(assistant, ValueError, r"model: a Gemma 4 .*; expected drafts.Gemma4Assistant\(model\)")]
    assert raised(lambda model: SpeculativeDecoder(target, model), of_drafts) == []
