"""Hugging Face models in the decoding loop."""

import logging

# transformers imports torchao where it is installed, which logs the kernels that it cannot load and what torch
# deprecates in it. A user can do nothing about either.
_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)
try:
    from .adapter import language_model
    from .encoder_decoder import EncoderDecoderModel
    from .generate import custom_generate
    from .models import TransformersModel
    from .stopping import stop_string_rule
finally:
    for _logger, _level in zip(_loggers, _levels, strict=True):
        _logger.setLevel(_level)

__all__ = ["EncoderDecoderModel", "TransformersModel", "custom_generate", "language_model", "stop_string_rule"]
