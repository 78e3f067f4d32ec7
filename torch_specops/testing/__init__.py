"""Is a decoding loop lossless? `check_lossless` runs it many times and compares its tokens with the target's law;
`check_engine` does the same for an engine, at each of its sampling settings. Is a verify op right? `sample_inputs`
yields test calls, `compare` compares the results with the float64 oracle, and `verify_with_mistake` has mistakes that a
test must find.

docs/testing.md explains their use and their numbers.
"""

from .cases import Case, sample_inputs
from .check import check_engine, check_lossless
from .comparison import Comparison, compare, rounding_rows
from .markov import MarkovModel, markov_pair
from .memory import poison_memory
from .mistakes import MISTAKES, verify_with_mistake
from .report import EngineReport, LawTest, LosslessReport
from .statistics import chi_square

__all__ = [
    "MISTAKES",
    "Case",
    "Comparison",
    "EngineReport",
    "LawTest",
    "LosslessReport",
    "MarkovModel",
    "check_engine",
    "check_lossless",
    "chi_square",
    "compare",
    "markov_pair",
    "poison_memory",
    "rounding_rows",
    "sample_inputs",
    "verify_with_mistake",
]
