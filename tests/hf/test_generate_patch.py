"""What reaches `custom_generate` although transformers keeps it: the draft and the streamer; and what comes back."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any

import pytest
import torch
from tiny_loops import TokenStreamer
from tiny_models import perturbed, shared_tiny
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from torch_specops.hf import custom_generate
from torch_specops.hf.door import patch

PROMPT = torch.tensor([[3, 17, 5, 3, 17]])
CALL: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 9, "do_sample": False}


def test_the_assistant_drafts_and_the_streamer_hears() -> None:
    target, own, ours = shared_tiny("llama"), TokenStreamer(), TokenStreamer()
    expected = target.generate(PROMPT, **CALL, streamer=own)
    for given in (custom_generate, functools.partial(custom_generate, num_draft_tokens=3)):
        ours.heard.clear()
        handed_on = {"assistant_model": perturbed(target), "streamer": ours, "return_dict_in_generate": True}
        output = target.generate(PROMPT, **CALL, custom_generate=given, **handed_on)
        assert isinstance(output, GenerateDecoderOnlyOutput) and torch.equal(output.sequences, expected)
        # The prompt once, then the tokens as they came, then the end.
        assert ours.heard[0] == own.heard[0] == PROMPT[0].tolist()
        assert list(chain.from_iterable(ours.heard)) == list(chain.from_iterable(own.heard))
        assert output.stats.num_accepted > 0 and len(ours.heard) == output.stats.num_steps + 2 < len(own.heard)


def test_other_functions_see_no_difference() -> None:
    found: dict[str, Any] = {}

    def other(model: Any, input_ids: Tensor, **rest: Any) -> Tensor:
        found.update(rest)
        return input_ids

    target = shared_tiny("llama")
    withheld = {"assistant_model": target, "streamer": TokenStreamer(), "tokenizer": 1}
    target.generate(PROMPT, **CALL, custom_generate=other, **withheld)
    assert "logits_processor" in found
    assert not found.keys() & {"assistant_model", "draft_model", "streamer", "token_streamer", "tokenizer"}


def test_a_release_without_the_method_is_said() -> None:
    for mixin in (type("Mixin", (), {}), type("Mixin", (), {patch.METHOD: lambda self, kwargs: {}})):
        with pytest.warns(RuntimeWarning, match="does not hand streamer= and assistant_model= on"):
            patch.hand_on_arguments(mixin, custom_generate)
