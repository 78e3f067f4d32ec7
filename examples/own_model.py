"""Decode with a model of your own: a `torch_specops.drafts.LanguageModel` with a static cache, without transformers.

    python examples/own_model.py

The target is a small transformer with random weights, the draft a noisy copy of it. Both are plain modules. All that
the loop asks of them is in `Transformer`: vocab_size, device, max_length, start and forward. `LanguageModel` has the
rest, which does nothing.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import torch_specops
from torch_specops import SamplingParams
from torch_specops.drafts import LanguageModel


class Block(nn.Module):
    """Attention over a static cache, then an MLP."""

    keys: Tensor
    values: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def start(self, batch: int, capacity: int) -> None:
        shape, like = (batch, capacity, self.heads, self.head_width), self.project.weight
        # Not part of the state dict: the cache belongs to a batch.
        self.register_buffer("keys", like.new_zeros(shape), persistent=False)
        self.register_buffer("values", like.new_zeros(shape), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(self.before_attention(x)).view(batch, length, 3, self.heads, self.head_width)
        queries, keys, values = parts.unbind(2)
        # Each row writes at its own positions. A rejected draft is overwritten when its position is read again.
        rows = torch.arange(batch, device=x.device).unsqueeze(1)
        self.keys[rows, positions] = keys
        self.values[rows, positions] = values
        # A token sees the slots up to its own position, and so never what a later, rejected draft left behind.
        slots = torch.arange(self.keys.shape[1], device=x.device)
        visible = (slots <= positions.unsqueeze(2)).unsqueeze(1)
        seen = scaled_dot_product_attention(
            queries.transpose(1, 2), self.keys.transpose(1, 2), self.values.transpose(1, 2), attn_mask=visible
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module, LanguageModel):
    def __init__(
        self, vocab_size: int = 64, width: int = 64, heads: int = 4, layers: int = 2, length: int = 256
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_length = vocab_size, length
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        for block in self.blocks:
            block.start(batch, capacity)

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, positions)
        # Logits are float32 or of 16 bits, whatever the model computes in.
        return self.head(x if num_logits is None else x[:, -num_logits:]).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    # In float64, so that no two tokens tie within rounding.
    target = Transformer().double()
    draft = copy.deepcopy(target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.01 * torch.randn_like(weight))

    prompts = torch.tensor([[0, 0, 5, 9], [7, 7, 3, 1]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": args.max_new_tokens, "compile": args.compile}
    greedy = SamplingParams(temperature=0.0)
    output = torch_specops.generate(target, prompts, draft=draft, sampling=greedy, **options)
    alone = torch_specops.generate(target, prompts, sampling=greedy, **options)
    print(output.new_tokens(0))
    print(f"{output.stats.mean_acceptance_length:.2f} tokens per step")
    print(f"identical to decoding without drafts: {torch.equal(output.sequences, alone.sequences)}")
    print(f"still in training mode: {target.training and draft.training}")


if __name__ == "__main__":
    main()
