"""A model with linear attention drafts for itself: a rejected draft leaves nothing in its state.

python examples/hybrid.py
"""

from __future__ import annotations

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import torch_specops
from torch_specops import SamplingParams
from torch_specops.drafts import EarlyExit


def main() -> None:
    target = tiny()
    # Two prompts of 6 and 4 tokens, padded on the left.
    prompts = torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 9, 4, 3, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    # The first layers of the target draft. They have a cache and states of their own.
    options = {"draft": EarlyExit(2), "num_draft_tokens": 4, "sampling": SamplingParams(temperature=0.0)}
    output = torch_specops.generate(target, prompts, attention_mask=mask, max_new_tokens=40, pad_token_id=0, **options)

    same = True
    for row, length in enumerate(output.prompt_lengths.tolist()):
        alone = target.generate(prompts[row : row + 1, -length:], max_new_tokens=40, do_sample=False, pad_token_id=0)
        same &= output.new_tokens(row) == alone[0, length:].tolist()
    print(f"identical to transformers: {same}")
    print(f"{output.stats.mean_acceptance_length:.2f} tokens per step")
    print(f"{output.stats.num_proposed - output.stats.num_accepted} drafts were rejected")
    print(f"{output.stats.state_bytes / 1000:.0f} kB of states of target and draft")


def tiny() -> Qwen3_5ForCausalLM:
    """Random weights, so that the example runs anywhere; in float64, where nothing ties."""
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        initializer_range=0.1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).double().eval()


if __name__ == "__main__":
    main()
