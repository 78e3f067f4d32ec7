"""Stands in for vLLM's file: our op behind its function, on logits and in its layout."""

import torch

import torch_specops


def rejection_sample(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    seed,
    num_speculative_steps,
    use_fp64=False,
):
    batch, width, device = len(cu_num_logits) - 1, num_speculative_steps + 1, target_logits.device
    # The draft that row i is verified with stands at i + 1.
    rows = torch.arange(batch * width, device=device).view(batch, width)[:, :-1]
    tokens, n = torch_specops.verify_exact(
        target_logits.view(batch, width, -1),
        draft_sampled[rows + 1].long(),
        draft_logits,
        torch.rand(batch, width - 1, device=device),
        torch.rand(batch, device=device),
        temperature,
    )
    return tokens.where(tokens >= 0, 12345), (n + 1).int()
