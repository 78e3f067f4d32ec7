"""Speculative decoding that is exact, fast and traceable in plain PyTorch.

Importing the package registers `torch.ops.specops.verify_exact`, `verify_block`, `verify_sigmoid`, `sample` and
`filter_logits`; it imports torch alone. `torch_specops.hf`, which imports transformers, `analysis`, `beam`, `inductor`,
`parallel`, `reference` and `testing` are loaded when they are first used.
"""

from __future__ import annotations

from types import ModuleType

from . import drafts, ops
from .decode import GenerationOutput, SpeculativeDecoder, generate
from .sampling import SamplingParams, filter_logits, sample
from .uniforms import uniforms
from .verification import verify_block, verify_exact, verify_sigmoid

__version__ = "0.1.0"
__all__ = [
    "GenerationOutput",
    "SamplingParams",
    "SpeculativeDecoder",
    "drafts",
    "filter_logits",
    "generate",
    "ops",
    "sample",
    "uniforms",
    "verify_block",
    "verify_exact",
    "verify_sigmoid",
]


_LOADED_WHEN_USED = ("analysis", "beam", "hf", "inductor", "parallel", "reference", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _LOADED_WHEN_USED:
        from importlib import import_module

        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
