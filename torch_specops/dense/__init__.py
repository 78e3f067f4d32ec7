"""The ops as a compiler traces them on a CPU: no loops over data and no data-dependent shapes, so Inductor fuses them.

Symbols as in docs/math.md: p is the target's distribution, q the draft's, x the draft tokens, z logits divided by the
temperature. The accept rule is `walk.accepts`. Logits are scaled and exponentiated in float32; sums, distribution
functions and the few probabilities that decide an acceptance are float64. The law is that of `reference.py`.
Eager calls on a CPU use `eager/`.
"""

from .block import verify_block
from .exact import verify_exact
from .filters import filter_logits
from .sample import sample
from .sigmoid import verify_sigmoid

__all__ = ["filter_logits", "sample", "verify_block", "verify_exact", "verify_sigmoid"]
