"""What a draft may ask of its target and of the decoder: features up to the head's, and its own number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hybrids import tiny_hybrid
from tiny_loops import decode
from tiny_models import PROMPTS, raised, shared_tiny
from torch import Tensor

from torch_specops import SpeculativeDecoder
from torch_specops.drafts import Draft, DraftSource
from torch_specops.hf import language_model
from torch_specops.schedules import Constant


class Reads(DraftSource):
    """Guesses, and reads the features of all layers, the head's among them."""

    def bind(self, target: Any) -> None:
        self.target = target
        self.feature_layers = tuple(range(target.num_layers + 1))

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Any) -> Draft:
        return Draft(tokens[:, :1].expand(-1, num_draft_tokens))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_5_text", "first layer"])
def test_features_are_the_hidden_states_of_transformers(family: str) -> None:
    model = tiny_hybrid(family) if family == "qwen3_5_text" else shared_tiny(family.replace("first layer", "llama"))
    target: Any = language_model(model)
    if family == "first layer":
        target = target.first_layers(1)
    output = decode(Reads(), 2, target=target)
    for row, prompt in enumerate(PROMPTS):
        text = torch.tensor([[*prompt, *output.new_tokens(row)]])
        hidden = list(target.model(text, output_hidden_states=True).hidden_states)
        if family == "first layer":
            hidden = [hidden[0], target.model.model.norm(hidden[1])]
        # The newest token has not been read.
        found = target.features[row, : text.shape[1] - 1].chunk(len(hidden), 1)
        for own, expected in zip(found, hidden, strict=True):
            torch.testing.assert_close(own, expected[0, :-1], rtol=1e-4, atol=1e-4)


class OfThree(Reads):
    default_draft_tokens = 3
    max_draft_tokens = 3


def test_num_draft_tokens_defaults_to_the_draft() -> None:
    model = shared_tiny("llama")
    assert SpeculativeDecoder(model, OfThree()).schedule.buckets == (0, 3)
    assert SpeculativeDecoder(model, OfThree(), num_draft_tokens=2).schedule.buckets == (0, 2)
    assert SpeculativeDecoder(model, OfThree(), schedule="heuristic").schedule.buckets == (1, 2, 3)
    assert SpeculativeDecoder(model, Reads()).schedule.buckets == (0, 5)
    cases = [
        ({"num_draft_tokens": 4}, ValueError, "num_draft_tokens: this draft has at most 3 tokens per step, got 4"),
        ({"schedule": Constant(5)}, ValueError, "schedule: this draft has at most 3 tokens per step, got 5"),
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected a number >= 1, got 0"),
    ]
    assert raised(lambda fields: SpeculativeDecoder(model, OfThree(), **fields), cases) == []
