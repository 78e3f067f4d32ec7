"""The verify ops on CUDA: `exact.py` and `sigmoid.py`, each maths, kernels and launcher."""

from .exact import verify_exact
from .sigmoid import verify_sigmoid

__all__ = ["verify_exact", "verify_sigmoid"]
