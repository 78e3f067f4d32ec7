"""What the tests of every backend share: inputs, the comparison with the float64 oracle, poisoned memory."""

from .cases import Case, case_names, mixed_inputs, sample_inputs
from .comparison import Comparison, compare, rounding_rows
from .memory import poison_memory

__all__ = [
    "Case",
    "Comparison",
    "case_names",
    "compare",
    "mixed_inputs",
    "poison_memory",
    "rounding_rows",
    "sample_inputs",
]
