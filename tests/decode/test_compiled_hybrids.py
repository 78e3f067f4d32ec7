"""Hybrids in compiled steps: pieces and one graph give the eager text."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_hybrids import tiny_hybrid
from tiny_loops import GREEDY, new_tokens
from tiny_models import greedy_alone, padded, perturbed
from torch._dynamo.utils import counters

from torch_specops import SpeculativeDecoder
from torch_specops.drafts import PromptLookup

PROMPTS = ([5, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6], [3], [11, 12, 13, 11, 12, 13, 11, 12], [4, 9])
NEW = 14
# A layer with a state, and one with attention.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def is_as_generate(model: Any, draft: Any, **options: Any) -> bool:
    """Whether a ragged batch of which some drafts are rejected gets the text of transformers' own decoding."""
    ids, mask = padded(PROMPTS, "left")
    decoder = SpeculativeDecoder(model, draft, num_draft_tokens=3, schedule="constant", sampling=GREEDY, **options)
    output = decoder.generate(ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0)
    assert 0 < output.stats.num_accepted < output.stats.num_proposed
    return new_tokens(output) == [greedy_alone(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.slow
def test_inductor_compiles_a_whole_step() -> None:
    model = tiny_hybrid("lfm2", num_hidden_layers=2, **KINDS["lfm2"])
    assert is_as_generate(model, PromptLookup(1, 1), compile=True, one_graph=True)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("one_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_compiles_targets_and_drafts(kind: str, one_graph: bool) -> None:
    model = tiny_hybrid(kind, num_hidden_layers=2, **KINDS[kind])
    assert is_as_generate(model, perturbed(model, 0.02), compile=True, one_graph=one_graph)
    # A piece for two tokens of the draft, one for a single token, and the verification.
    assert counters["stats"]["unique_graphs"] == (1 if one_graph else 3) and not counters["graph_break"]
