"""Check whether a decoding loop is lossless: a wrong loop and a right one, told apart in seconds.

python examples/check_lossless.py

Both loops sample with top-k. The mistake is that of transformers issue 47932: drafts are drawn after top-k, and
verified against the draft's probabilities before it. Nothing about the text looks wrong.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from torch_specops.testing import check_lossless

VOCAB_SIZE = 6
TOP_K = 3
NUM_DRAFT_TOKENS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000)
    args = parser.parse_args()
    target, draft = tiny_pair()
    for name, q_before_top_k in (("q before top-k", True), ("q after top-k", False)):
        report = check_lossless(
            partial(step, target, draft, q_before_top_k),
            # The law to keep is that of the filtered logits. The check reads the last position of [N, t, V].
            target=lambda text: keep_top_k(target(text).logits),
            draft=lambda text: keep_top_k(draft(text).logits),
            vocab_size=VOCAB_SIZE,
            trials=args.trials,
        )
        print(f"{name}:\n{report}\n")
    # In a test: report.assert_lossless()


@torch.inference_mode()
def step(
    target: nn.Module, draft: nn.Module, q_before_top_k: bool, prompts: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loop to check, here a single step: a batch of prompts in, 1 to K + 1 tokens out, then -1."""
    generator = torch.Generator().manual_seed(int(seeds[0]))
    rows = torch.arange(len(prompts))

    # 1. The draft proposes K tokens.
    text, q = prompts, []
    for _ in range(NUM_DRAFT_TOKENS):
        logits = draft(text).logits[:, -1]
        probabilities = torch.softmax(keep_top_k(logits), -1)
        text = torch.cat([text, torch.multinomial(probabilities, 1, generator=generator)], 1)
        # q must be the law that the draft was drawn from.
        q.append(torch.softmax(logits, -1) if q_before_top_k else probabilities)

    # 2. The target reads them all.
    p = torch.softmax(keep_top_k(target(text).logits[:, -NUM_DRAFT_TOKENS - 1 :]), -1)

    # 3. Accept a prefix of the drafts (Leviathan et al. 2023, Algorithm 1).
    tokens = torch.full((len(prompts), NUM_DRAFT_TOKENS + 1), -1)
    num_accepted = torch.zeros(len(prompts), dtype=torch.int64)
    weights = p[:, -1].clone()
    for i, x in enumerate(text[:, prompts.shape[1] :].unbind(1)):
        reached = num_accepted == i
        accepted = reached & (torch.rand(len(rows), generator=generator) * q[i][rows, x] < p[rows, i, x])
        rejected = reached & ~accepted
        tokens[accepted, i] = x[accepted]
        num_accepted += accepted
        # A rejected draft is replaced by a draw from the residual; its sum is zero only where nothing is rejected.
        weights[rejected] = (p[:, i] - q[i]).clamp(min=0)[rejected]
    tokens[rows, num_accepted] = torch.multinomial(weights, 1, generator=generator).squeeze(1)
    return tokens, num_accepted, (num_accepted + 1).clamp(max=NUM_DRAFT_TOKENS)


def keep_top_k(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(TOP_K).values[..., -1:], -torch.inf)


def tiny_pair() -> tuple[nn.Module, nn.Module]:
    """Random weights and few tokens: the law is known exactly, and mistakes move it far enough to be seen. The draft is
    the target with noise, so that drafts are accepted and rejected."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    draft.load_state_dict({name: value + 0.05 * torch.randn_like(value) for name, value in target.state_dict().items()})
    return target, draft


if __name__ == "__main__":
    main()
