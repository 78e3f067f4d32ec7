"""The decoding loop: `generate`, and the reusable `SpeculativeDecoder` behind it."""

from .beam import BeamOutput, beam_search
from .beam_tree import TreeModel
from .decoder import SpeculativeDecoder
from .generate import generate
from .output import GenerationOutput, GenerationStats, Step

__all__ = [
    "BeamOutput",
    "GenerationOutput",
    "GenerationStats",
    "SpeculativeDecoder",
    "Step",
    "TreeModel",
    "beam_search",
    "generate",
]
