"""Hugging Face models in the decoding loop."""

from .assisted import AssistedStats, assisted_generation
from .generate import custom_generate
from .models import EncoderDecoderModel, TransformersModel, language_model

__all__ = [
    "AssistedStats",
    "EncoderDecoderModel",
    "TransformersModel",
    "assisted_generation",
    "custom_generate",
    "language_model",
]
