"""Hugging Face models in the decoding loop. The only part of the package that imports transformers."""

# First, because it imports transformers.
from . import quiet_import  # noqa: F401
from .assisted import AssistedStats, assisted_generation
from .generate import custom_generate
from .loading import (
    SMOLLM2,
    Tokenizer,
    load_model,
    load_smollm2,
    load_tokenizer,
    smollm2_directory,
    smollm2_is_converted,
)
from .models import EncoderDecoderModel, TransformersModel, language_model

__all__ = [
    "SMOLLM2",
    "AssistedStats",
    "EncoderDecoderModel",
    "Tokenizer",
    "TransformersModel",
    "assisted_generation",
    "custom_generate",
    "language_model",
    "load_model",
    "load_smollm2",
    "load_tokenizer",
    "smollm2_directory",
    "smollm2_is_converted",
]
