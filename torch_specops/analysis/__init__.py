"""The formulas of Leviathan et al. 2023 (arXiv 2211.17192) for the gain of speculative decoding, on tensors.

alpha is the probability that a draft is accepted, given that the drafts before it were; K (gamma in the paper) is the
number of drafts per step, and c the cost ratio. Every function of alpha assumes that drafts are accepted independently
with the same probability, and that the target reads K + 1 tokens in the time of one. Arithmetic is float64. Arguments
are numbers or tensors, and broadcast against each other.

Example:
    >>> import torch
    >>> from torch_specops.analysis import optimal_num_draft_tokens, walltime_factor
    >>> alpha = torch.tensor([0.6, 0.8, 0.9])
    >>> best = optimal_num_draft_tokens(alpha, cost_ratio=0.05)
    >>> best, walltime_factor(alpha, 0.05, best)
    (tensor([ 4,  8, 13]), tensor([1.9213, 3.0921, 4.6741], dtype=torch.float64))
"""

from .acceptance import acceptance_probability, alpha_from_counts, divergence, token_acceptance_probability
from .formulas import (
    expected_tokens_per_step,
    memory_access_factor,
    operations_factor,
    optimal_num_draft_tokens,
    oracle_walltime_factor,
    walltime_factor,
)

__all__ = [
    "acceptance_probability",
    "alpha_from_counts",
    "divergence",
    "expected_tokens_per_step",
    "memory_access_factor",
    "operations_factor",
    "optimal_num_draft_tokens",
    "oracle_walltime_factor",
    "token_acceptance_probability",
    "walltime_factor",
]
