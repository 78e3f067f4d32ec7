"""Is a decoding loop lossless? `check_lossless` runs it many times and compares its tokens with the target's law;
`check_engine` does the same for an engine, at each of its sampling settings.

docs/testing.md says how to use them and what their numbers mean.
"""

from .check import check_engine, check_lossless
from .markov import MarkovModel, markov_pair
from .report import EngineReport, LawTest, LosslessReport
from .statistics import chi_square

__all__ = [
    "EngineReport",
    "LawTest",
    "LosslessReport",
    "MarkovModel",
    "check_engine",
    "check_lossless",
    "chi_square",
    "markov_pair",
]
