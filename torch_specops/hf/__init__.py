"""Hugging Face models in the decoding loop."""

# First, because it imports transformers.
from . import quiet_import  # noqa: F401
from .generate import custom_generate
from .models import EncoderDecoderModel, TransformersModel, language_model
from .stopping import stop_string_rule

__all__ = [
    "EncoderDecoderModel",
    "TransformersModel",
    "custom_generate",
    "language_model",
    "stop_string_rule",
]
