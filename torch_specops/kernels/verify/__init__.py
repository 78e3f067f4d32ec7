"""The verify ops on CUDA: `block.py`, `exact.py` and `sigmoid.py`, each maths, kernels and launcher. They accept by
`accept.py`; the first two begin with `stats.py`, and draw by `residual.py`."""

from .block import verify_block
from .exact import verify_exact
from .sigmoid import verify_sigmoid

__all__ = ["verify_block", "verify_exact", "verify_sigmoid"]
