"""Imports transformers without messages that a user can do nothing about.

transformers imports torchao where it is installed, and torchao then logs which of its kernels it cannot load and what
torch deprecates in it.
"""

import logging

__all__: list[str] = []

_loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_levels = [logger.level for logger in _loggers]
for _logger in _loggers:
    _logger.setLevel(logging.ERROR)
try:
    from transformers import PreTrainedModel  # noqa: F401
finally:
    for _logger, _level in zip(_loggers, _levels, strict=True):
        _logger.setLevel(_level)
