"""The ops of `torch.ops.specops`. They are defined in `api.py` and `gumbel.py`; their CPU code is in `cpu/` and their
CUDA kernels are in `cuda/`."""

from .api import filter_logits, sample, verify_block, verify_exact, verify_sigmoid
from .gumbel import sample_gumbel, verify_gumbel

__all__ = [
    "filter_logits",
    "sample",
    "sample_gumbel",
    "verify_block",
    "verify_exact",
    "verify_gumbel",
    "verify_sigmoid",
]
