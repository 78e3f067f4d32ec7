"""Is a decoding loop lossless? `check_law` runs it many times and compares its tokens with the target's law.

docs/testing.md says how to use it and what its numbers mean.
"""

from .check import check_law
from .judgement import chi_square
from .markov import MarkovModel, markov_pair
from .report import LawReport, LawTest

__all__ = ["LawReport", "LawTest", "MarkovModel", "check_law", "chi_square", "markov_pair"]
