"""The decoding loop: `generate`, and the reusable `SpeculativeDecoder` behind it."""

from .beam import BeamOutput, beam_search
from .beam_tree import TreeModel
from .decoder import SpeculativeDecoder
from .generate import generate
from .greedy import GreedyCheck, GreedyDifference, check_greedy
from .output import GenerationOutput, GenerationStats, Step

__all__ = [
    "BeamOutput",
    "GenerationOutput",
    "GenerationStats",
    "GreedyCheck",
    "GreedyDifference",
    "SpeculativeDecoder",
    "Step",
    "TreeModel",
    "beam_search",
    "check_greedy",
    "generate",
]
