"""top_k, top_p and min_p on CUDA without sorting. `bounds.py` finds the kept tokens, and `logits.py` masks all
others."""

from .bounds import filter_bounds, top_values
from .logits import filter_logits

__all__ = ["filter_bounds", "filter_logits", "top_values"]
