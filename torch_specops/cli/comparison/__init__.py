"""The same prompts decoded in several ways, timed in turns: by this package with and without a draft, and by
transformers.

Everybody decodes the same number of tokens and does not stop at an eos. Before anything is timed, greedy outputs are
compared token for token; where they differ, plain greedy decoding says how far apart the logits are.
"""

from .providers import ASSISTED, GENERATE
from .turns import Comparison
from .work import Measurement, Models, Workload

__all__ = ["ASSISTED", "GENERATE", "Comparison", "Measurement", "Models", "Workload"]
