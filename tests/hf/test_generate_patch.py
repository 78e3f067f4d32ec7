"""What reaches `custom_generate` although transformers keeps it: the draft and the streamer; and what comes back."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import pytest
import torch
from tiny_loops import TokenStreamer
from tiny_models import encoder_inputs, perturbed, shared_tiny
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate, generate_patch

PROMPT = torch.tensor([[3, 17, 5, 3, 17]])
CALL: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 9, "do_sample": False}


def test_the_assistant_drafts_and_the_streamer_hears() -> None:
    target, own, ours = shared_tiny("llama"), TokenStreamer(), TokenStreamer()
    expected = target.generate(PROMPT, **CALL, streamer=own)
    for given in (custom_generate, functools.partial(custom_generate, num_draft_tokens=3)):
        ours.heard.clear()
        output = target.generate(
            PROMPT,
            **CALL,
            custom_generate=given,
            assistant_model=perturbed(target),
            streamer=ours,
            return_dict_in_generate=True,
        )
        assert isinstance(output, GenerateDecoderOnlyOutput) and torch.equal(output.sequences, expected)
        # The prompt once, then the tokens as they came, then the end.
        assert ours.heard[0] == own.heard[0] == PROMPT[0].tolist()
        assert list(chain.from_iterable(ours.heard)) == list(chain.from_iterable(own.heard))
        assert output.stats.num_accepted > 0 and len(ours.heard) == output.stats.num_steps + 2 < len(own.heard)


def test_a_draft_source_is_an_assistant_too() -> None:
    """It has no config, which transformers would look into."""
    target, inputs = shared_tiny("t5"), encoder_inputs("t5")
    assert inputs is not None
    options = {**inputs, "decoder_input_ids": torch.tensor([[1, 9, 17]] * 3), "max_new_tokens": 9}
    output = GenerationMixin.generate(
        target,
        **options,
        custom_generate=custom_generate,
        assistant_model=PromptLookup(1, 1),
        return_dict_in_generate=True,
    )
    assert isinstance(output, GenerateEncoderDecoderOutput) and output.sequences.shape == (3, 12)
    assert output.stats.num_proposed > 0 and len(output.stats.seeds) == 3


def test_what_cannot_be_handed_on_is_an_error() -> None:
    target = shared_tiny("llama")
    ours = {**CALL, "custom_generate": custom_generate}
    draft = PromptLookup()
    for options, error, message in (
        ({"assistant_model": draft, "draft_model": draft}, ValueError, "assistant_model: expected None beside draft"),
        (
            {"streamer": TokenStreamer(), "token_streamer": print},
            ValueError,
            "streamer: expected None beside token_streamer",
        ),
        ({"assistant_model": target, "assistant_tokenizer": 1}, NotImplementedError, "assistant_tokenizer: .*TokenMap"),
    ):
        with pytest.raises(error, match=message):
            target.generate(PROMPT, **ours, **options)


def test_other_functions_see_no_difference() -> None:
    found: dict[str, Any] = {}

    def other(model: Any, input_ids: Tensor, **rest: Any) -> Tensor:
        found.update(rest)
        return input_ids

    target = shared_tiny("llama")
    target.generate(
        PROMPT, **CALL, custom_generate=other, assistant_model=target, streamer=TokenStreamer(), tokenizer=1
    )
    assert "logits_processor" in found
    assert not found.keys() & {"assistant_model", "draft_model", "streamer", "token_streamer", "tokenizer"}


def test_a_release_without_the_method_is_said() -> None:
    for mixin in (type("Mixin", (), {}), type("Mixin", (), {generate_patch.METHOD: lambda self, kwargs: {}})):
        with pytest.warns(RuntimeWarning, match="does not hand streamer= and assistant_model= on"):
            generate_patch.hand_on_arguments(mixin, custom_generate)
