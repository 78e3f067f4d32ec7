"""Tests for decoding loops, engines and verify ops.

`check_lossless` tests whether a decoding loop is lossless: it runs the loop many times, and compares the tokens with
the target's distribution. `check_engine` does the same for an engine, at each of its sampling settings.

For a verify op, `sample_inputs` yields test calls, and `compare` compares the results with the float64 oracle.
`verify_with_mistake` contains mistakes that a test must detect.

docs/testing.md explains how to use these functions and how to read their numbers.
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
