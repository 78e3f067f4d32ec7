"""What tests of published drafters share: their files, and rows that are filled again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tiny_models import PROMPTS, greedy_alone
from torch import Tensor
from transformers import PreTrainedModel

from torch_specops import Request, SpeculativeDecoder


def with_layers(raw: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A config of speculators with these fields of its layers."""
    return {**raw, "transformer_layer_config": raw["transformer_layer_config"] | fields}


def save_checkpoint(raw: Mapping[str, Any], weights: Mapping[str, Tensor], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(weights), folder / "model.safetensors")
    return folder


def check_refilled_rows(decoder: SpeculativeDecoder, target: PreTrainedModel, max_length: int | None = None) -> None:
    """Decode four prompts in two rows, greedily. None = the last text ends at the capacity."""
    prompts = [[*PROMPTS[index % 3], *range(2, 2 + index)] for index in range(4)]
    requests = [Request(prompt, 5 + 3 * index) for index, prompt in enumerate(prompts)]
    capacity = len(prompts[3]) + 14 if max_length is None else max_length
    for completion in decoder.generate_many(requests, batch_size=2, max_length=capacity):
        index = completion.index
        assert completion.new_tokens.tolist() == greedy_alone(target, prompts[index], 5 + 3 * index)
