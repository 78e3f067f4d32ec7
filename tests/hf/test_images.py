"""Images in the prompt, in one call: the text that `generate` gives each row alone, and the law of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import chi_square, expect_caught, expect_laws
from report import Report
from tiny_eagle3 import new_head
from tiny_grammars import Allowing
from tiny_images import (
    FAMILIES,
    NEW,
    VOCAB,
    Prompt,
    alone,
    batch,
    expected,
    image_call,
    image_loop,
    next_logits,
    prompt,
    prompts,
    small_vision_model,
    vision_model,
)
from tiny_loops import new_tokens
from tiny_models import perturbed, tiny
from torch import Tensor

from torch_specops import SamplingParams
from torch_specops.drafts import Eagle3, EarlyExit, PromptLookup, SuffixLookup
from torch_specops.hf import custom_generate
from torch_specops.hf import images as images_module


def custom_generate_rows(family: str, rows: list[Prompt], **options: Any) -> list[list[int]]:
    """By `model.generate`, with all that a processor gives."""
    given = batch(family, rows)
    options = {"max_new_tokens": NEW, "eos_token_id": None, "custom_generate": custom_generate, **options}
    return vision_model(family).generate(**given, **options)[:, given["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_images_give_the_text_of_generate(family: str) -> None:
    rows = prompts(family)
    # Rows differ, and the images count.
    assert len({tuple(row) for row in expected(family)}) == len(rows)
    assert alone(vision_model(family), family, rows[0]._replace(images=(3, 4))) != expected(family)[0]
    assert new_tokens(image_loop(family, PromptLookup(1, 1)).generate(**image_call(family, rows))) == expected(family)
    output = image_loop(family, small_vision_model(family)).generate(**image_call(family, rows, "right"))
    assert new_tokens(output) == expected(family)
    assert output.stats.num_accepted > 0
    assistant = {"assistant_model": small_vision_model(family), "num_assistant_tokens": 3}
    assert custom_generate_rows(family, rows, do_sample=False, **assistant) == expected(family)


TOWERS = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "gemma3": "SiglipVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "idefics3": "Idefics3VisionTransformer",
}


@pytest.mark.parametrize("family", TOWERS)
def test_images_with_num_return_sequences(family: str) -> None:
    """A seed gives the same text alone and beside others; equal tokens with other images are another prompt."""
    first = prompts(family)[0]
    rows = [first, prompts(family)[1], first._replace(images=(3, 4))]
    given, seeds, encoded = {"sampling": SamplingParams(temperature=1.0)}, [3, 4, 5, 6, 7, 8], []
    hooks = [
        module.register_forward_hook(lambda module, *call: encoded.append(module))
        for module in vision_model(family).modules()
        if type(module).__name__ == TOWERS[family]
    ]
    found = new_tokens(
        image_loop(family, PromptLookup(1, 1)).generate(
            **image_call(family, rows), **given, num_return_sequences=2, seed=seeds
        )
    )
    for hook in hooks:
        hook.remove()
    # Sequences of a prompt share its images. Qwen3.5 reads each prompt alone.
    assert len(encoded) == (2 if family == "qwen3_5" else 1)
    assert len({tuple(row) for row in found}) == len(seeds)
    for place, row in ((0, 0), (1, 0), (4, 2), (5, 2)):
        own = image_loop(family).generate(**image_call(family, rows[row : row + 1]), **given, seed=[seeds[place]])
        assert new_tokens(own)[0] == found[place]
    sampled = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "seed": seeds}
    assert custom_generate_rows(family, rows, **sampled) == found


def test_images_keep_the_law(report: Report) -> None:
    """The law of two tokens; the law after other images and a loop with another delta are rejected."""
    family, sampling = "qwen2_5_vl", SamplingParams(temperature=3.0, top_k=4)
    row = prompts(family)[0]
    draft = perturbed(vision_model(family), 0.05)
    decoder = image_loop(family, draft, sampling=sampling, verify="exact", num_draft_tokens=2)
    given = image_call(family, [row]) | {"max_new_tokens": 3}

    def counts() -> Tensor:
        texts = torch.tensor(new_tokens(decoder.generate(**given, num_return_sequences=1500, seed=5)))
        return torch.bincount(texts[:, 0] * VOCAB + texts[:, 1], minlength=VOCAB**2)

    def next_law(row: Prompt, *new: int) -> Tensor:
        logits = next_logits(family, row, *new).double() / 3.0
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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava", "idefics3"])
def test_images_with_prompt_lookup(family: str) -> None:
    """Where transformers raises: the match lies before the image, and the placeholders after it are no drafts."""
    model, row = vision_model(family), prompt(family, 5, 6, "2", 9, 5, 6)
    options: dict[str, Any] = {"do_sample": False, "prompt_lookup_num_tokens": 4}
    with pytest.raises((ValueError, RuntimeError, IndexError, StopIteration)):
        model.generate(**batch(family, [row]), **options, max_new_tokens=NEW, eos_token_id=None)
    assert custom_generate_rows(family, [row], **options) == [alone(model, family, row)]
    steps: list[Any] = []
    decoder = image_loop(family, PromptLookup(2, 1, repeat=False), num_draft_tokens=4)
    decoder.generate(**image_call(family, [row]), streamer=steps.append)
    # The token after the match, which begins the image, and no more.
    assert steps[0].num_proposed == [1]


def test_images_with_other_drafts() -> None:
    family = "qwen2_5_vl"
    drafts: dict[str, Callable[[], Any]] = {
        "of text": lambda: tiny("llama", vocab=VOCAB),
        "early exit": lambda: EarlyExit(1),
        "eagle 3": lambda: Eagle3(new_head(vocab_size=VOCAB, draft_vocab_size=VOCAB)),
        "suffix lookup": SuffixLookup,
    }
    for name, make in drafts.items():
        for verify in ("exact", "gumbel"):
            found = image_loop(family, make(), verify=verify).generate(**image_call(family, prompts(family)))
            assert new_tokens(found) == expected(family), (name, verify)
    # Features of the prompt are those of its images.
    decoder = image_loop(family, drafts["eagle 3"]())
    decoder.generate(**image_call(family, prompts(family)[:1]))
    model, row = vision_model(family), batch(family, prompts(family)[:1])
    with torch.no_grad():
        states = model(**row, output_hidden_states=True).hidden_states
    width = row["input_ids"].shape[1]
    target: Any = decoder.target
    torch.testing.assert_close(target.features[0, :width, :32], states[0][0])
    torch.testing.assert_close(target.features[0, :width, 32:64], states[1][0])


def test_images_with_grammar_and_logprobs() -> None:
    family = "gemma3"
    (row,) = prompts(family)[:1]
    options: dict[str, Any] = {"grammar": Allowing(lambda text: range(10, 30)), "logprobs": "raw"}
    output = image_loop(family, PromptLookup(1, 1)).generate(**image_call(family, [row]), **options)
    new = new_tokens(output)[0]
    assert output.logprobs is not None
    for place, token in enumerate(new):
        own = next_logits(family, row, *new[:place]).log_softmax(0)
        assert token == 10 + int(own[10:30].argmax())
        logprob = output.logprobs[0, len(row.tokens) + place].double()
        torch.testing.assert_close(logprob, own[token], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_images_in_compiled_steps(family: str) -> None:
    decoder = image_loop(family, small_vision_model(family), compile=True)
    for rows in (prompts(family), prompts(family)[::-1], prompts(family)[1:2] * 4):
        texts = [expected(family)[prompts(family).index(row)] for row in rows]
        assert new_tokens(decoder.generate(**image_call(family, rows))) == texts
    # A shift of all of a text changes its rounding alone.
    target: Any = decoder.target
    assert family == "gemma3" or not target._offsets.values.any()
