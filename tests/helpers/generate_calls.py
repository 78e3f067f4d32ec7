"""transformers' `generate`, with and without the loop behind it, on the tiny models."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import PROMPTS, encoder_inputs, padded
from transformers import GenerationMixin, PreTrainedModel

from torch_specops.hf import custom_generate


def arguments(family: str, side: str = "left") -> dict[str, Any]:
    """A ragged batch, as `generate` takes it."""
    ids, mask = padded(PROMPTS, side)
    inputs = encoder_inputs(family)
    if inputs is None:
        return {"input_ids": ids, "attention_mask": mask}
    # transformers wants the decoder's prompts of one length: a padded one would begin with a start token of its own.
    ids = torch.tensor([[1, 9, 17], [1, 9, 4], [1, 30, 4]])
    return {**inputs, "decoder_input_ids": ids}


def plain(model: PreTrainedModel, **options: Any) -> Any:
    """By transformers alone. T5's own cache has as many layers as its encoder; Whisper's `generate` forces tokens."""
    if model.config.is_encoder_decoder:
        options["use_cache"] = False
    return GenerationMixin.generate(model, **({"do_sample": False, "pad_token_id": 0} | options))


def ours(model: PreTrainedModel, **options: Any) -> Any:
    defaults = {"do_sample": False, "pad_token_id": 0, "custom_generate": custom_generate}
    return GenerationMixin.generate(model, **(defaults | options))
