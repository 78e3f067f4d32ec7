"""Hugging Face models in the decoding loop."""

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..decode.stop_strings import stop_string_rule
    from .door.generate import custom_generate

# transformers imports torchao if it is installed. torchao then logs kernels that it cannot load and deprecation
# warnings from torch, and users can act on neither.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)
try:
    from .adapter import language_model
    from .encoder_decoder import EncoderDecoderModel
    from .models import TransformersModel
finally:
    for _logger, _level in zip(_loggers, _levels, strict=True):
        _logger.setLevel(_level)

__all__ = ["EncoderDecoderModel", "TransformersModel", "custom_generate", "language_model", "stop_string_rule"]


def __getattr__(name: str) -> Any:
    # Import this module only on demand, because the import wraps two methods of `GenerationMixin`.
    if name == "custom_generate":
        return import_module(".door.generate", __name__).custom_generate
    # Import this module only on demand, because `decode` is a higher layer, which imports this package.
    if name == "stop_string_rule":
        return import_module("..decode.stop_strings", __name__).stop_string_rule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
