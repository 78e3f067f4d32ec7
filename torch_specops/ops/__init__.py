"""`torch.ops.specops`: each op once in `api.py` or `gumbel.py`, its forms on a CPU in `cpu/`, kernels in `cuda/`."""

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
