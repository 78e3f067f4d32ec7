"""Stands in for SGLang's file: our op behind its function, on probabilities and in its layout."""

import torch

import torch_specops


def chain_speculative_sampling_triton(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single,
    threshold_acc,
    deterministic,
):
    drafts = candidates.flatten()[retrive_next_token[:, :-1]]
    tokens, n = torch_specops.verify_exact(
        target_probs.log(), drafts, draft_probs.log(), uniform_samples, uniform_samples_for_final_sampling
    )
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    predicts[retrive_index] = tokens.where(slots <= n.unsqueeze(-1), predicts[retrive_index]).to(predicts.dtype)
    accept_token_num.copy_(n)
