"""Speculative decoding that is exact, fast and traceable in plain PyTorch.

Importing the package registers `torch.ops.specops.verify_exact` and the other ops, and imports nothing but torch and
numpy. `torch_specops.hf`, which imports transformers, and `analysis`, `beam`, `inductor`, `plot`, `reference`,
`testing` and `vocab_parallel` are loaded at their first use.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from . import drafts, grammars, ops
from .decode import (
    Completion,
    GenerationOutput,
    Handle,
    Request,
    Session,
    SpeculativeDecoder,
    TextPieces,
    Verifier,
    generate,
)
from .grammars import Grammar
from .models.conversion import invariant_forward
from .ops import *  # noqa: F403
from .ops.uniforms import uniforms
from .sampling import SamplingParams, raw_logprobs

__version__ = "0.4.0"
__all__ = [
    "Completion",
    "GenerationOutput",
    "Grammar",
    "Handle",
    "Request",
    "SamplingParams",
    "Session",
    "SpeculativeDecoder",
    "TextPieces",
    "Verifier",
    "drafts",
    "generate",
    "grammars",
    "invariant_forward",
    "ops",
    "raw_logprobs",
    "uniforms",
]
__all__ += ops.__all__


_LOADED_WHEN_USED = ("analysis", "beam", "hf", "inductor", "plot", "reference", "testing", "vocab_parallel")


def __getattr__(name: str) -> ModuleType:
    if name in _LOADED_WHEN_USED:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", "decode", "schedules", *__all__, *_LOADED_WHEN_USED])
