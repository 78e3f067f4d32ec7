"""hub/, the `custom_generate` repository, loaded by transformers from its folder."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_loops import TokenStreamer
from tiny_models import PROMPTS, encoder_inputs, padded, perturbed, tiny

from torch_specops.drafts import PromptLookup

HUB = Path(__file__).parents[2] / "hub"
OURS = {"custom_generate": str(HUB), "trust_remote_code": True}


def test_model_generate_decodes_by_the_repository() -> None:
    target, (prompts, mask) = tiny("llama"), padded(PROMPTS, "left")
    batch: dict[str, Any] = {"inputs": prompts, "attention_mask": mask, "do_sample": False, "max_new_tokens": 12}
    batch |= {"pad_token_id": 0, "eos_token_id": None}
    expected = target.generate(**batch)
    for draft in ({}, {"assistant_model": perturbed(target)}, {"draft_model": PromptLookup()}):
        output = target.generate(**batch, **OURS, **draft, schedule="constant", return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert (output.stats.num_proposed > 0) == bool(draft)
    assert target.generate(**batch | {"max_new_tokens": 2}, **OURS, prompt_lookup_num_tokens=3).shape[1] > 2
    streamer = TokenStreamer()
    batch |= {"inputs": prompts[:1], "attention_mask": mask[:1]}
    target.generate(**batch, **OURS, streamer=streamer)
    assert list(chain.from_iterable(streamer.heard[:-1])) == target.generate(**batch)[0].tolist()
    sampled = batch | {"do_sample": True, "temperature": 0.7}
    first, second, other = (target.generate(**sampled, **OURS, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**batch, custom_generate=str(HUB), trust_remote_code=False)


def test_a_generate_that_calls_the_repository_itself() -> None:
    """Whisper's own prepares the inputs, and hands the repository on."""
    target, inputs = tiny("whisper"), encoder_inputs("whisper")
    assert inputs is not None
    call: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    assert torch.equal(target.generate(**call, **OURS), target.generate(**call))
