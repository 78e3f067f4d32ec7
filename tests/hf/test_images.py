"""Images in the prompt: every row gets the text that `generate` gives it alone, with any draft and by every way in."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import chi_square, expect_caught, expect_laws
from report import Report
from tiny_eagle3 import new_head
from tiny_grammars import Allowing
from tiny_images import (
    END,
    FAMILIES,
    IMAGE,
    NEW,
    VOCAB,
    Prompt,
    alone,
    batch,
    expected,
    images,
    prompt,
    prompts,
    vision_model,
)
from tiny_loops import GREEDY, new_tokens
from tiny_models import perturbed, sharp_model, tiny
from tiny_mtp import add_mtp_layer
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.drafts import MTP, Eagle3, EarlyExit, PromptLookup, SuffixLookup
from torch_specops.hf import custom_generate, language_model
from torch_specops.hf import images as images_module

SOME = ("qwen2_5_vl", "gemma3", "qwen3_5")


@functools.cache
def small(family: str) -> PreTrainedModel:
    """A draft that often agrees."""
    return perturbed(vision_model(family), 0.01)


def call(family: str, rows: list[Prompt], side: str = "left") -> dict[str, Any]:
    """Arguments of `generate`, without type ids."""
    given = batch(family, rows, side)
    return {name: given[name] for name in ("input_ids", "attention_mask")} | {
        "inputs": images(family, rows) or None,
        "max_new_tokens": NEW,
        "eos_token_id": (),
    }


def loop(family: str, draft: Any = None, **options: Any) -> SpeculativeDecoder:
    options = {"sampling": GREEDY, "schedule": "constant", "num_draft_tokens": 3} | options
    return SpeculativeDecoder(vision_model(family), draft, **options)


class Count:
    """How often modules of a class ran, in a model or its copies."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        self.calls: list[str] = []
        modules = [each for each in model.modules() if type(each).__name__ in names]
        self._hooks = [each.register_forward_hook(self._add) for each in modules]

    def _add(self, module: nn.Module, *others: Any) -> None:
        self.calls.append(type(module).__name__)

    def __enter__(self) -> Count:
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_is_what_generate_gives_it_alone(family: str) -> None:
    rows, model = prompts(family), vision_model(family)
    assert len({tuple(row) for row in expected(family)}) == len(rows)
    # The images count.
    other = rows[0]._replace(images=(3, 4))
    assert alone(model, family, other) != expected(family)[0]
    assert new_tokens(loop(family, PromptLookup(1, 1)).generate(**call(family, rows))) == expected(family)
    output = loop(family, small(family)).generate(**call(family, rows, "right"))
    assert new_tokens(output) == expected(family)
    assert output.stats.num_accepted > 0
    # By the other door, with everything that a processor gives; transformers has not encoded the images.
    given = batch(family, rows)
    tokens = model.generate(
        **given,
        custom_generate=custom_generate,
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=None,
        assistant_model=small(family),
        num_assistant_tokens=3,
    )
    assert tokens[:, given["input_ids"].shape[1] :].tolist() == expected(family)


@pytest.mark.parametrize("family", [*SOME, "idefics3"])
def test_rows_of_a_session_get_their_own_images(family: str) -> None:
    """Rows are refilled: behind a prompt with images comes one without, and the other way round."""
    rows = [*prompts(family), *prompts(family)[::-1]]
    requests = [
        Request(list(row.tokens), NEW - index % 3, inputs=images(family, [row]) or None, eos_token_id=())
        for index, row in enumerate(rows)
    ]
    # Their images do not fit.
    wrong = Request(list(rows[0].tokens), NEW, inputs=images(family, rows[2:3]))
    none = Request(list(rows[0].tokens), NEW)
    texts = [*expected(family), *expected(family)[::-1]]
    for draft in (None, small(family)):
        found = list(loop(family, draft).generate_many([wrong, none, *requests], batch_size=2))
        by_index = {each.index: each for each in found}
        assert "cannot read these images" in str(by_index[0].error)
        assert "placeholders of images" in str(by_index[1].error)
        got = [by_index[index + 2].new_tokens.tolist() for index in range(len(rows))]
        assert got == [text[: NEW - index % 3] for index, text in enumerate(texts)]


def test_images_that_a_draft_refuses_are_not_for_the_next_request() -> None:
    family, rows = "qwen2_5_vl", prompts("qwen2_5_vl")
    refused = Request(list(rows[0].tokens), NEW, inputs=images(family, rows[:1]))
    text = Request(list(rows[1].tokens), NEW, eos_token_id=())
    found = list(loop(family, vision_model("llava")).generate_many([refused, text], batch_size=1))
    assert "got image_grid_thw" in str(found[0].error)
    assert found[1].new_tokens.tolist() == expected(family)[1]


@pytest.mark.parametrize("family", [*SOME, "idefics3"])
def test_several_sequences_of_a_prompt(family: str) -> None:
    """A seed gives the same text alone and beside others; equal tokens with other images are another prompt."""
    first = prompts(family)[0]
    rows = [first, prompts(family)[1], first._replace(images=(3, 4))]
    given = call(family, rows) | {"sampling": SamplingParams(temperature=1.0)}
    seeds = [3, 4, 5, 6, 7, 8]
    model = vision_model(family)
    names = {"Qwen2_5_VisionTransformerPretrainedModel", "SiglipVisionModel", "Idefics3VisionTransformer"}
    with Count(model, *names, "Qwen3_5VisionModel") as count:
        output = loop(family, PromptLookup(1, 1)).generate(**given, num_return_sequences=2, seed=seeds)
    # Qwen3.5 reads each prompt alone.
    assert len(count.calls) == (2 if family == "qwen3_5" else 1)
    found = new_tokens(output)
    assert len({tuple(row) for row in found}) == len(seeds)
    for index, seed in enumerate(seeds[:2] + seeds[4:]):
        row = [0, 0, 2, 2][index]
        one = call(family, rows[row : row + 1]) | {"sampling": given["sampling"]}
        alone_ = loop(family).generate(**one, seed=[seed])
        assert new_tokens(alone_)[0] == found[seeds.index(seed)]
    greedy = batch(family, rows)
    tokens = model.generate(
        **greedy,
        custom_generate=custom_generate,
        do_sample=True,
        num_return_sequences=2,
        max_new_tokens=NEW,
        top_k=0,
        eos_token_id=None,
        seed=seeds,
    )
    assert tokens[:, greedy["input_ids"].shape[1] :].tolist() == found


def test_sampled_text_has_the_law_behind_its_images(report: Report) -> None:
    """The law of two tokens; that behind other images, or shifted by another delta, is rejected."""
    family, sampling = "qwen2_5_vl", SamplingParams(temperature=3.0, top_k=4)
    model, row = vision_model(family), prompts("qwen2_5_vl")[0]
    decoder = loop(family, perturbed(model, 0.05), sampling=sampling, verify="exact", num_draft_tokens=2)
    given = call(family, [row]) | {"max_new_tokens": 3}

    def counts() -> Tensor:
        texts = torch.tensor(new_tokens(decoder.generate(**given, num_return_sequences=1500, seed=5)))
        return torch.bincount(texts[:, 0] * VOCAB + texts[:, 1], minlength=VOCAB**2)

    def next_law(row: Prompt, *text: int) -> Tensor:
        arguments, more = batch(family, [row]), torch.tensor([text], dtype=torch.int64)
        ids = torch.cat([arguments["input_ids"], more], 1)
        types = torch.cat([arguments["mm_token_type_ids"], torch.zeros_like(more)], 1)
        changed = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
        with torch.no_grad():
            logits = model(**(arguments | changed)).logits[0, -1].double() / 3.0
        return torch.where(logits >= logits.topk(4).values[-1], logits, -torch.inf).softmax(0)

    def law(row: Prompt) -> Tensor:
        """[VOCAB * VOCAB], from forwards over whole texts."""
        joint, first = torch.zeros(VOCAB, VOCAB, dtype=torch.float64), next_law(row)
        for token in first.nonzero().flatten().tolist():
            joint[token] = first[token] * next_law(row, token)
        return joint.flatten()

    found, right = counts(), law(row)
    expect_laws(report, "images", {"two tokens": chi_square(found, right)})
    other = row._replace(images=(3, 4))
    expect_caught(report, "images, the law of others", {"two tokens": chi_square(found, law(other))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images_module.ImageTextModel, "_position_ids", lambda self, positions: positions)
        expect_caught(report, "images, a wrong delta", {"two tokens": chi_square(counts(), right)})


def test_prompt_lookup_where_transformers_raises() -> None:
    """The match lies before the image, and the placeholders behind it are no drafts."""
    for family in ("qwen2_5_vl", "gemma3", "llava", "idefics3"):
        model, row = vision_model(family), prompt(family, 5, 6, "2", 9, 5, 6)
        given = batch(family, [row])
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
        options["prompt_lookup_num_tokens"] = 4
        with pytest.raises((ValueError, RuntimeError, IndexError, StopIteration)):
            model.generate(**given, **options)
        tokens = model.generate(**given, **options, custom_generate=custom_generate)
        assert tokens[0, len(row.tokens) :].tolist() == alone(model, family, row)
        steps: list[Any] = []
        decoder = loop(family, PromptLookup(2, 1, repeat=False), num_draft_tokens=4)
        decoder.generate(**call(family, [row]), streamer=steps.append)
        # The token behind the match that begins the image, and no more.
        assert steps[0].num_proposed == [1]


def test_other_drafts() -> None:
    family = "qwen2_5_vl"
    drafts: dict[str, Callable[[], Any]] = {
        "of text": lambda: tiny("llama", vocab=VOCAB),
        "early exit": lambda: EarlyExit(1),
        "eagle 3": lambda: Eagle3(new_head(vocab_size=VOCAB, draft_vocab_size=VOCAB)),
        "suffix lookup": SuffixLookup,
    }
    for name, make in drafts.items():
        for verify in ("exact", "gumbel"):
            found = loop(family, make(), verify=verify).generate(**call(family, prompts(family)))
            assert new_tokens(found) == expected(family), (name, verify)
    # Features of the prompt are those of its images.
    decoder = loop(family, drafts["eagle 3"]())
    decoder.generate(**call(family, prompts(family)[:1]))
    model, row = vision_model(family), batch(family, prompts(family)[:1])
    with torch.no_grad():
        states = model(**row, output_hidden_states=True).hidden_states
    width = row["input_ids"].shape[1]
    target: Any = decoder.target
    torch.testing.assert_close(target.features[0, :width, :32], states[0][0])
    torch.testing.assert_close(target.features[0, :width, 32:64], states[1][0])


def test_mtp_layers_behind_images(tmp_path: Path) -> None:
    family, rows = "qwen3_5", [*prompts("qwen3_5"), prompt("qwen3_5", 5, "1")]
    texts = [*expected(family), alone(vision_model(family), family, rows[-1])]
    vision_model(family).save_pretrained(tmp_path)
    add_mtp_layer(tmp_path, "model.language_model.")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float64).eval()
    model.generation_config.eos_token_id = None
    decoder = SpeculativeDecoder(model, MTP.from_pretrained(model), sampling=GREEDY, num_draft_tokens=2)
    requests = [Request(list(row.tokens), NEW, inputs=images(family, [row]) or None) for row in rows]
    found = {each.index: each.new_tokens.tolist() for each in decoder.generate_many(requests, batch_size=2)}
    assert [found[index] for index in range(len(rows))] == texts
    output = decoder.generate(**call(family, rows))
    assert new_tokens(output) == texts and output.stats.num_proposed > 0
    target: Any = decoder.target
    for index, row in enumerate(rows):
        with torch.no_grad():
            states = model.model(**batch(family, [row])).last_hidden_state[0, :-1]
        torch.testing.assert_close(target.features[index, : len(states)], states)
    given = batch(family, rows, "right")
    options = {"do_sample": False, "max_new_tokens": NEW, "use_mtp": True, "custom_generate": custom_generate}
    assert model.generate(**given, **options)[:, given["input_ids"].shape[1] :].tolist() == texts


def test_stop_strings_behind_images() -> None:
    """Of two tokens, the last of the prompt and the first of the text or later; what stands in a prompt ends no row."""
    family = "qwen2_5_vl"
    words = models.WordLevel({f"w{token}": token for token in range(VOCAB)})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    rows, texts, strings = prompts(family), [], []
    for index, (row, text) in enumerate(zip(rows, expected(family), strict=True)):
        pairs = list(itertools.pairwise([row.tokens[-1], *text]))
        pair = pairs[3 * index]
        texts.append(text[: pairs.index(pair) + 1])
        strings.append([f"w{pair[0]} w{pair[1]}", f"w{IMAGE} w{END}"])
    assert 1 == len(texts[0]) < len(texts[1]) < len(texts[2])
    options = {"stop_strings": strings, "tokenizer": tokenizer}
    for draft in (PromptLookup(1, 1), small(family)):
        decoder = loop(family, draft)
        assert new_tokens(decoder.generate(**call(family, rows), **options)) == texts
        requests = [
            Request(
                list(row.tokens),
                NEW,
                inputs=images(family, [row]) or None,
                eos_token_id=(),
                stop_strings=own,
                tokenizer=tokenizer,
            )
            for row, own in zip(rows, strings, strict=True)
        ]
        found = {each.index: each for each in decoder.generate_many(requests, batch_size=2)}
        assert [found[index].new_tokens.tolist() for index in range(len(rows))] == texts
        assert {each.finish_reason for each in found.values()} == {"stop"}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", SOME)
def test_steps_of_a_fixed_shape(family: str) -> None:
    decoder = loop(family, small(family), compile=True)
    for rows in (prompts(family), prompts(family)[::-1], prompts(family)[1:2] * 4):
        texts = [expected(family)[prompts(family).index(row)] for row in rows]
        assert new_tokens(decoder.generate(**call(family, rows))) == texts
    # A shift of all of a text changes its rounding alone.
    target: Any = decoder.target
    assert family == "gemma3" or not target._offsets.values.any()


def test_grammar_logprobs_and_stop_tokens() -> None:
    family = "gemma3"
    rows, model = prompts(family)[:1], vision_model(family)
    allowed = Allowing(lambda text: range(10, 30))
    output = loop(family, PromptLookup(1, 1)).generate(**call(family, rows), grammar=allowed, logprobs="raw")
    new = new_tokens(output)[0]
    given = batch(family, rows)
    for place, token in enumerate(new):
        more = torch.tensor([new[:place]], dtype=torch.int64)
        ids = torch.cat([given["input_ids"], more], 1)
        types = torch.cat([given["token_type_ids"], torch.zeros_like(more)], 1)
        with torch.no_grad():
            row = model(ids, pixel_values=given["pixel_values"], token_type_ids=types).logits[0, -1].log_softmax(0)
        assert token == 10 + int(row[10:30].argmax())
        start = ids.shape[1] - given["input_ids"].shape[1] + len(rows[0].tokens)
        assert output.logprobs is not None
        torch.testing.assert_close(output.logprobs[0, start].double(), row[token], atol=1e-5, rtol=0)


def test_images_are_freed_and_the_model_is_left_alone() -> None:
    family = "qwen2_5_vl"
    model = vision_model(family)
    alone(model, family, prompts(family)[0])
    kept = model.model.rope_deltas
    assert kept is not None
    given = call(family, prompts(family))
    image = weakref.ref(given["inputs"]["pixel_values"])
    decoder = loop(family, small(family))
    steps = decoder.stream(**given)
    del given
    next(steps)
    assert image() is None
    target: Any = decoder.target
    assert target._offsets.values[0, :, -1].tolist() == [-6, 0, -4, 0]
    list(steps)
    assert model.model.rope_deltas is kept
    session = decoder.session(2, max_length=80)
    inputs = images(family, prompts(family)[:1])
    image = weakref.ref(inputs["pixel_values"])
    handle = session.submit(Request(list(prompts(family)[0].tokens), NEW, inputs=inputs, eos_token_id=()))
    del inputs
    while not handle.done:
        session.step()
    assert handle.result().new_tokens.tolist() == expected(family)[0]
    assert image() is None
    assert target._offsets.values[0, :, -1].tolist() == [-6, 0]
    handle = session.submit(Request(list(prompts(family)[1].tokens), NEW, eos_token_id=()))
    while not handle.done:
        session.step()
    assert target._offsets.values[0, :, -1].tolist() == [0, 0]
    # Requests that never get a row.
    handles, kept = [], []
    for num_new in (0, NEW, NEW):
        inputs = images(family, prompts(family)[:1])
        kept.append(weakref.ref(inputs["pixel_values"]))
        handles.append(session.submit(Request(list(prompts(family)[0].tokens), num_new, inputs=inputs)))
        del inputs
    handles[1].cancel()
    session.close()
    assert [each() for each in kept] == [None] * 3
    # What transformers keeps of its own calls is no change of the model.
    version = target.version
    alone(model, family, prompts(family)[2])
    decoder.generate(**call(family, prompts(family)))
    assert target.version == version


def test_hooks_of_transformers_stay_in_the_copy() -> None:
    """LLaVA asks its tower for hidden states, and transformers adds hooks for them in the first forward."""
    model = sharp_model(FAMILIES["llava"].config(), auto=AutoModelForImageTextToText)
    decoder = SpeculativeDecoder(model, EarlyExit(1), sampling=GREEDY)
    for _ in range(2):
        assert new_tokens(decoder.generate(**call("llava", prompts("llava")))) == expected("llava")
    assert not any(each._forward_hooks for each in model.modules())
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert new_tokens(copied.generate(**call("llava", prompts("llava")))) == expected("llava")
    assert alone(model, "llava", prompts("llava")[0]) == expected("llava")[0]


def test_models_that_were_not_tested_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "TESTED_MODELS", ())
    for family in ("qwen2_5_vl", "gemma3", "qwen3_5"):
        # A draft leaves two tokens of a prompt unread; the second newest one of the last prompt belongs to its image.
        rows = [*prompts(family), prompt(family, 5, "1")]
        texts = [*expected(family), alone(vision_model(family), family, rows[-1])]
        for draft in (None, small(family), EarlyExit(1)):
            assert new_tokens(loop(family, draft).generate(**call(family, rows))) == texts
    # Qwen3.5 drafts behind a whole image: the state before that token is the one behind it.
    decoder: Any = loop(family, small(family))
    decoder.generate(**call(family, rows[-1:]) | {"max_new_tokens": 1})
    cache, newest = decoder.draft.model._require_cache(), len(rows[-1].tokens) - 1
    for ring in cache.rings:
        before, behind = (ring[0, place % cache.num_slots] for place in (newest - 1, newest))
        assert bool(before.any()) and torch.equal(before, behind)
    monkeypatch.setattr(images_module.ImageTextModel, "_position_ids", lambda self, positions: positions)
    with pytest.raises(ValueError, match="does not read text behind images right"):
        loop("qwen2_5_vl").generate(**call("qwen2_5_vl", prompts("qwen2_5_vl")))


def test_wrong_inputs_are_errors_by_name() -> None:
    family = "qwen2_5_vl"
    rows = prompts(family)
    model, target = vision_model(family), language_model(vision_model(family))
    given = call(family, rows)
    inputs, types = given["inputs"], batch(family, rows)["mm_token_type_ids"]
    text = call(family, rows[1:2])
    pixels = {"pixel_values": inputs["pixel_values"]}
    behind = prompt(family, 5, "1")._replace(images=(1,))
    ends = Prompt(behind.tokens[:-1], behind.images)

    def generate(arguments: dict[str, Any], more: Any = None, **others: Any) -> Callable[[], object]:
        changed = {"inputs": more} if more is not None else {}
        return lambda: torch_specops.generate(target, **(arguments | changed | others))

    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (generate(given, {}), ValueError, "inputs: expected pixel_values, image_grid_thw for the placeholders"),
        (generate(given, {"image_grid_thw": inputs["image_grid_thw"]}), ValueError, "got image_grid_thw"),
        (generate(text, inputs), ValueError, r"input_ids: expected placeholders \(token 60\) for the images, got none"),
        (generate(given, inputs | {"pixel_values_videos": types}), ValueError, "got pixel_values_videos"),
        (generate(given, inputs | {"input_features": types}), ValueError, "gets images alone here"),
        (generate(given, inputs | {"pixel_values": [1]}), TypeError, "expected pixel_values as a tensor"),
        (generate(given, [inputs["pixel_values"]]), TypeError, "inputs: expected tensors by name, got <class 'list'>"),
        (generate(given, inputs | {"mm_token_type_ids": 1 - types}), ValueError, "expected mm_token_type_ids"),
        (generate(given, pixels), ValueError, "cannot read these images"),
        (generate(call(family, rows[:1]), images(family, rows[2:3])), ValueError, "cannot read these images"),
        (generate(call(family, [ends])), ValueError, "expected text behind the last image"),
        (
            lambda: beam_search(model, given["input_ids"], num_beams=2, inputs=inputs),
            ValueError,
            "beam search reads no images",
        ),
        (
            lambda: loop("llava", vision_model(family)).generate(**call("llava", prompts("llava")[:1])),
            ValueError,
            "cannot read",
        ),
        (
            lambda: model.generate(
                **batch(family, rows[1:2]),
                custom_generate=custom_generate,
                mm_encoder_outputs={"image": torch.ones(1)},
                max_new_tokens=2,
            ),
            ValueError,
            "mm_encoder_outputs",
        ),
        (lambda: loop("qwen2_5_vl", vision_model("llava")).generate(**given), ValueError, "got image_grid_thw"),
        (
            lambda: torch_specops.generate(tiny("llama"), given["input_ids"] % 50, inputs=inputs, max_new_tokens=4),
            ValueError,
            "reads tokens alone",
        ),
    ]
    assert new_tokens(generate(given, inputs | {"mm_token_type_ids": types}, sampling=GREEDY)()) == expected(family)
    problems = []
    for index, (run, kind, message) in enumerate(cases):
        try:
            run()
        except kind as error:
            if re.search(message, str(error)) is None:
                problems.append((index, str(error)))
        else:
            problems.append((index, "no error"))
    assert not problems
