"""What a model of images is asked before it is read, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_images import (
    FAMILIES,
    Prompt,
    alone,
    batch,
    expected,
    image_call,
    image_loop,
    images,
    prompt,
    prompts,
    small_vision_model,
    vision_model,
)
from tiny_loops import GREEDY, new_tokens
from tiny_models import raised, sharp_model, tiny
from transformers import AutoModelForImageTextToText

import torch_specops
from torch_specops import SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.drafts import EarlyExit
from torch_specops.hf import custom_generate, language_model
from torch_specops.hf import images as images_module


def test_image_hooks_of_transformers_stay_in_the_copy() -> None:
    """LLaVA asks its tower for hidden states, and transformers adds hooks for them in the first forward."""
    model = sharp_model(FAMILIES["llava"].config(), auto=AutoModelForImageTextToText)
    decoder = SpeculativeDecoder(model, EarlyExit(1), sampling=GREEDY)
    for _ in range(2):
        assert new_tokens(decoder.generate(**image_call("llava", prompts("llava")))) == expected("llava")
    assert not any(each._forward_hooks for each in model.modules())
    for copied in (copy.deepcopy(decoder), pickle.loads(pickle.dumps(decoder))):
        assert new_tokens(copied.generate(**image_call("llava", prompts("llava")))) == expected("llava")
    assert alone(model, "llava", prompts("llava")[0]) == expected("llava")[0]


def test_untested_image_models_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "TESTED_MODELS", ())
    for family in ("qwen2_5_vl", "gemma3", "qwen3_5"):
        # A draft leaves two tokens of a prompt unread; the second newest one of the last prompt belongs to its image.
        rows = [*prompts(family), prompt(family, 5, "1")]
        texts = [*expected(family), alone(vision_model(family), family, rows[-1])]
        for draft in (None, small_vision_model(family), EarlyExit(1)):
            assert new_tokens(image_loop(family, draft).generate(**image_call(family, rows))) == texts
    monkeypatch.setattr(images_module.ImageTextModel, "_position_ids", lambda self, positions: positions)
    with pytest.raises(ValueError, match="does not read text behind images right"):
        image_loop("qwen2_5_vl").generate(**image_call("qwen2_5_vl", prompts("qwen2_5_vl")))


def test_hybrid_drafts_read_a_whole_image() -> None:
    """The state before the last token of an image is the state after the image."""
    row = prompt("qwen3_5", 5, "1")
    decoder: Any = image_loop("qwen3_5", small_vision_model("qwen3_5"))
    decoder.generate(**image_call("qwen3_5", [row]) | {"max_new_tokens": 1})
    cache, newest = decoder.draft.model._require_cache(), len(row.tokens) - 1
    for ring in cache.rings:
        before, after = (ring[0, place % cache.num_slots] for place in (newest - 1, newest))
        assert bool(before.any()) and torch.equal(before, after)


def test_bad_image_inputs() -> None:
    family = "qwen2_5_vl"
    rows = prompts(family)
    model, target = vision_model(family), language_model(vision_model(family))
    given = image_call(family, rows)
    inputs, types = given["inputs"], batch(family, rows)["mm_token_type_ids"]
    text = image_call(family, rows[1:2])
    pixels = {"pixel_values": inputs["pixel_values"]}
    ended = prompt(family, 5, "1")
    ends_with_image = Prompt(ended.tokens[:-1], ended.images)

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
        (generate(image_call(family, rows[:1]), images(family, rows[2:3])), ValueError, "cannot read these images"),
        (generate(image_call(family, [ends_with_image])), ValueError, "expected text behind the last image"),
        (
            lambda: beam_search(model, given["input_ids"], num_beams=2, inputs=inputs),
            ValueError,
            "beam search reads no images",
        ),
        (
            lambda: image_loop("llava", vision_model(family)).generate(**image_call("llava", prompts("llava")[:1])),
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
        (lambda: image_loop("qwen2_5_vl", vision_model("llava")).generate(**given), ValueError, "got image_grid_thw"),
        (
            lambda: torch_specops.generate(tiny("llama"), given["input_ids"] % 50, inputs=inputs, max_new_tokens=4),
            ValueError,
            "reads tokens alone",
        ),
    ]
    assert new_tokens(generate(given, inputs | {"mm_token_type_ids": types}, sampling=GREEDY)()) == expected(family)
    assert raised(lambda use: use(), [(use, kind, f".*{message}") for use, kind, message in cases]) == []
