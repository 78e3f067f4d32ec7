"""The ops on CPU, vectorised in torch: no loop, no data-dependent shape, so Inductor fuses them into C++. An eager call
looks whether any row is sampled; a traced one cannot, and does what rows of both kinds need.

Logits are scaled and exponentiated in float32; sums, distribution functions and the few probabilities that decide
an acceptance are float64. The law is that of `reference.py`.
"""

from .block import verify_block
from .exact import verify_exact
from .filters import filter_logits
from .sample import sample
from .sigmoid import verify_sigmoid

__all__ = ["filter_logits", "sample", "verify_block", "verify_exact", "verify_sigmoid"]
