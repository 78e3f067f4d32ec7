"""Speculative decoding that is exact, fast and traceable in plain PyTorch.

Importing the package registers `torch.ops.specops.verify_exact`, `verify_sigmoid` and `sample`; it imports torch
alone.
"""

from . import ops
from .sampling import SamplingParams, sample
from .uniforms import uniforms
from .verification import verify_exact, verify_sigmoid

__version__ = "0.1.0"
__all__ = ["SamplingParams", "ops", "sample", "uniforms", "verify_exact", "verify_sigmoid"]
