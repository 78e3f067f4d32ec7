"""The decoding loop: `generate`, and the class `SpeculativeDecoder`, which it uses."""

from .decoder import SpeculativeDecoder
from .kept import generate
from .output import GenerationOutput, GenerationStats, Step, TopLogprobs
from .pieces import TextPieces
from .requests import Completion, Handle, Request
from .rows import RowStep
from .session import Session
from .step import Verifier

__all__ = [
    "Completion",
    "GenerationOutput",
    "GenerationStats",
    "Handle",
    "Request",
    "RowStep",
    "Session",
    "SpeculativeDecoder",
    "Step",
    "TextPieces",
    "TopLogprobs",
    "Verifier",
    "generate",
]
