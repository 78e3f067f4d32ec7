"""Decodes the same prompts in several ways and times them in turns: this package with and without a draft, and
transformers.

All of them decode the same number of tokens and do not stop at an eos. Before anything is timed, greedy outputs are
compared token for token; where they differ, plain greedy decoding shows how far apart the logits are.
"""

from .providers import ASSISTED, GENERATE, PLAIN, SPECULATIVE
from .turns import Comparison
from .work import Case, Measurement, Models, Run, Workload, batches_of

__all__ = [
    "ASSISTED",
    "GENERATE",
    "PLAIN",
    "SPECULATIVE",
    "Case",
    "Comparison",
    "Measurement",
    "Models",
    "Run",
    "Workload",
    "batches_of",
]
