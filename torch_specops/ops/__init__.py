"""`torch.ops.specops`: each op once in `api.py`, its forms on a CPU in `cpu/`, its Triton kernels in `cuda/`."""

from .api import filter_logits, sample, verify_block, verify_exact, verify_sigmoid

__all__ = ["filter_logits", "sample", "verify_block", "verify_exact", "verify_sigmoid"]
