"""What the tests of every backend share: the inputs, the comparison with the float64 oracle, memory poison, chi-square.

An implementation in float32 may differ from the oracle where rounding decides, and nowhere else. Every row's set of
lawful results follows from a bound on float32 errors (`rounding_rows`), so no row goes unchecked.

`check_law` is for users: it tests whether a decoding loop of their own is lossless (docs/testing.md).
"""

from .comparison import Comparison, compare, rounding_rows
from .inputs import Case, sample_inputs
from .law import check_law
from .law_report import LawReport, LawTest
from .markov import MarkovModel, markov_pair
from .memory import poison_memory
from .statistics import chi_square

__all__ = [
    "Case",
    "Comparison",
    "LawReport",
    "LawTest",
    "MarkovModel",
    "check_law",
    "chi_square",
    "compare",
    "markov_pair",
    "poison_memory",
    "rounding_rows",
    "sample_inputs",
]
