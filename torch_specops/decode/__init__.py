"""The decoding loop: `generate`, and the reusable `SpeculativeDecoder` behind it."""

from .decoder import SpeculativeDecoder
from .generate import generate
from .greedy import GreedyCheck, GreedyDifference, check_greedy
from .output import GenerationOutput, GenerationStats, Step

__all__ = [
    "GenerationOutput",
    "GenerationStats",
    "GreedyCheck",
    "GreedyDifference",
    "SpeculativeDecoder",
    "Step",
    "check_greedy",
    "generate",
]
