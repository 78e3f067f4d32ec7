"""Ways to decode the same prompts, timed in turns: this package's loop without and with a draft, and transformers' own.

Every provider decodes the same number of tokens, without an eos. Before anything is timed, greedy outputs are compared
token for token; where they differ, plain greedy decoding says by how much the logits do.
"""

from .turns import ASSISTED, GENERATE, Benchmark
from .work import Difference, Measurement, Pair, Workload

__all__ = ["ASSISTED", "GENERATE", "Benchmark", "Difference", "Measurement", "Pair", "Workload"]
