"""Hugging Face models in the decoding loop."""

# First, because it imports transformers.
from . import quiet_import  # noqa: F401
from .adapter import language_model
from .encoder_decoder import EncoderDecoderModel
from .generate import custom_generate
from .models import TransformersModel
from .stopping import stop_string_rule

__all__ = [
    "EncoderDecoderModel",
    "TransformersModel",
    "custom_generate",
    "language_model",
    "stop_string_rule",
]
