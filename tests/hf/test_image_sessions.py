"""Images in requests: rows are refilled, requests are refused, and no image is kept longer than it is read."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
from tiny_images import (
    END,
    IMAGE,
    NEW,
    VOCAB,
    alone,
    expected,
    image_call,
    image_loop,
    image_request,
    images,
    prompts,
    small_vision_model,
    vision_model,
)
from tiny_loops import new_tokens
from tiny_requests import in_order
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from torch_specops import Request
from torch_specops.drafts import PromptLookup


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_5", "idefics3"])
def test_image_requests_in_refilled_rows(family: str) -> None:
    """After a prompt with images, a row gets one without, and the other way round."""
    rows = [*prompts(family), *prompts(family)[::-1]]
    requests = [image_request(family, row, NEW - index % 3) for index, row in enumerate(rows)]
    images_of_another = Request(list(rows[0].tokens), NEW, inputs=images(family, rows[2:3]))
    no_images = Request(list(rows[0].tokens), NEW)
    texts = [*expected(family), *expected(family)[::-1]]
    for draft in (None, small_vision_model(family)):
        decoder = image_loop(family, draft)
        found = in_order(decoder.generate_many([images_of_another, no_images, *requests], batch_size=2))
        assert "cannot read these images" in str(found[0].error)
        assert "placeholders of images" in str(found[1].error)
        new = [each.new_tokens.tolist() for each in found[2:]]
        assert new == [text[: NEW - index % 3] for index, text in enumerate(texts)]


def test_image_request_that_a_draft_refuses() -> None:
    """Its images are not read for the next request."""
    family, rows = "qwen2_5_vl", prompts("qwen2_5_vl")
    requests = [image_request(family, row) for row in rows[:2]]
    found = in_order(image_loop(family, vision_model("llava")).generate_many(requests, batch_size=1))
    assert "got image_grid_thw" in str(found[0].error)
    assert found[1].new_tokens.tolist() == expected(family)[1]


def test_images_with_stop_strings() -> None:
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
    for draft in (PromptLookup(1, 1), small_vision_model(family)):
        decoder = image_loop(family, draft)
        assert new_tokens(decoder.generate(**image_call(family, rows), **options)) == texts
        requests = [
            image_request(family, row, stop_strings=own, tokenizer=tokenizer)
            for row, own in zip(rows, strings, strict=True)
        ]
        found = in_order(decoder.generate_many(requests, batch_size=2))
        assert [each.new_tokens.tolist() for each in found] == texts
        assert {each.finish_reason for each in found} == {"stop"}


def watched(request: Request) -> weakref.ref[Tensor]:
    assert request.inputs is not None
    return weakref.ref(request.inputs["pixel_values"])


def test_images_are_freed_after_the_prefill() -> None:
    family = "qwen2_5_vl"
    row = prompts(family)[0]
    decoder = image_loop(family, small_vision_model(family))
    call = image_call(family, prompts(family))
    image = weakref.ref(call["inputs"]["pixel_values"])
    steps = decoder.stream(**call)
    del call
    next(steps)
    assert image() is None
    list(steps)
    session = decoder.session(2, max_length=80)
    request = image_request(family, row)
    image, handle = watched(request), session.submit(request)
    del request
    while not handle.done:
        session.step()
    assert image() is None
    # Requests that never get a row: without new tokens, cancelled, and waiting at the end.
    requests = [image_request(family, row, num_new) for num_new in (0, NEW, NEW)]
    waiting = [watched(each) for each in requests]
    handles = [session.submit(each) for each in requests]
    del requests
    handles[1].cancel()
    session.close()
    assert [each() for each in waiting] == [None] * 3


def test_image_positions_belong_to_the_rows() -> None:
    """Qwen counts an image's tokens in a grid: the text after it is shifted, and a row that is refilled is not."""
    family = "qwen2_5_vl"
    rows, model = prompts(family), vision_model(family)
    decoder = image_loop(family, small_vision_model(family))
    target: Any = decoder.target
    alone(model, family, rows[0])
    kept = model.model.rope_deltas
    assert kept is not None
    decoder.generate(**image_call(family, rows))
    assert target._offsets.values[0, :, -1].tolist() == [-6, 0, -4, 0]
    assert model.model.rope_deltas is kept
    session = decoder.session(2, max_length=80)
    for row, shift in ((rows[0], -6), (rows[1], 0)):
        handle = session.submit(image_request(family, row))
        while not handle.done:
            session.step()
        assert target._offsets.values[0, :, -1].tolist() == [shift, 0]
    session.close()
    # What transformers keeps of its calls is no change of the model.
    version = target.version
    alone(model, family, rows[2])
    decoder.generate(**image_call(family, rows))
    assert target.version == version
