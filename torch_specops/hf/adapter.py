"""Chooses the adapter of a transformers model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from .architecture import unwrapped
from .encoder_decoder import EncoderDecoderModel
from .first_use import check_reading, has_own_forward
from .models import TESTED_FAMILIES, TransformersModel

__all__ = ["language_model"]


def language_model(model: PreTrainedModel | nn.Module) -> TransformersModel:
    """The adapter that reads ragged rows with an unmodified transformers model.

    Args:
        model: a `PreTrainedModel` with a language head, all of it on one device, or a `PeftModel` around one: its base
            with the active adapter.

    Raises:
        TypeError: no transformers model.
        ValueError: a model that cannot be rolled back (recurrent layers), one without a language head, offloaded or on
            several devices, an attention implementation that takes no mask, a `forward` set on a module that may run
            modules in training mode, or an encoder-decoder model other than Whisper and T5.
    """
    model = unwrapped(model)
    # Not by its text model: what is around that may read in its own way.
    is_tested = model.config.model_type in TESTED_FAMILIES
    if model.config.is_encoder_decoder:
        if not is_tested:
            raise ValueError(
                f"model: of encoder-decoder models Whisper and T5 are supported, got {type(model).__name__}"
            )
        return EncoderDecoderModel(model)
    adapter = TransformersModel(model)
    if not is_tested or has_own_forward(model):
        check_reading(adapter)
    return adapter
