"""Stands in for a kernel of Wagner et al. 2024: our op behind their function."""

import torch
from torch import Tensor

import torch_specops


def sampling_cuda(
    ids: Tensor, candidate_logits: Tensor, length: int, new_logits: Tensor, is_eos: bool, max_matches: int
) -> tuple[Tensor, int]:
    assert candidate_logits.dtype == new_logits.dtype == torch.float32
    u, s = (torch.rand(shape, device=ids.device) for shape in ((1, length), 1))
    tokens, n = torch_specops.verify_exact(new_logits, ids[:, -length:], candidate_logits, u, s)
    return tokens[:, : int(n) + 1], min(int(n), max_matches)
