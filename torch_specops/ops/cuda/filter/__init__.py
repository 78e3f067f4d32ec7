"""top_k, top_p and min_p on CUDA without sorting: `bounds.py` finds the kept tokens, `logits.py` masks the rest."""

from .bounds import filter_bounds
from .logits import filter_logits

__all__ = ["filter_bounds", "filter_logits"]
