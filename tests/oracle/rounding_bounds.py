"""The float32 error bounds that every set of lawful results starts from; `rounding_rows` derives them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["ENTRY", "EPS", "SUM", "TINY", "exponential"]

# Unit roundoff of float32; what an entry of a softmax or sigmoid may lose besides the rounding of its argument (exp
# and sigmoid 4, rescaling a tile 5, normalising 3); what a sum or prefix sum over a vocabulary may lose (in a tile 32
# entries of a thread one by one, 7 levels of a tree and the correction of the shift, then some hundreds of tiles).
EPS = 2.0**-24
ENTRY = 12
SUM = 48
# Smaller weights may be flushed to zero in float32.
TINY = 1e-37


def exponential(z: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """exp(z - a) and the bound of `rounding_rows`; not linearised, as a large |z| may move a weight by any factor."""
    finite = torch.where(z > -math.inf, z, 0.0)
    gap = torch.where(z > -math.inf, z - a, -math.inf)
    larger = torch.maximum(finite.abs(), a.abs())
    slack = torch.where(finite == a, 0.0, EPS * (2 * larger + 3.25 * (finite - a).abs()))
    weight = torch.exp(gap)
    upper, lower = torch.exp(gap + slack), torch.exp(gap - slack)
    return weight, torch.maximum(upper - weight, weight - lower) + ENTRY * EPS * weight
