"""Stands in for FlashInfer: our op behind its function, on probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_specops


def verify(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    u, s = (torch.rand(shape, device=p.device) for shape in (tokens.shape, len(tokens)))
    return torch_specops.verify_exact(p.log(), tokens, q.log(), u, s)


def softmax(logits: Tensor, temperature: float | Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    assert logits.dim() == 2 and temperature is None
    return logits.float().softmax(-1)


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    assert draft_probs.dtype == target_probs.dtype == torch.float32
    assert draft_token_ids.dtype == torch.int32
    tokens, _ = verify(target_probs, draft_probs, draft_token_ids)
    return tokens.int(), maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num
