"""Your own decoding loop: a whole step, models included, as one compiled graph.

    python examples/compiled_loop.py
    python examples/compiled_loop.py --target HuggingFaceTB/SmolLM2-360M --draft HuggingFaceTB/SmolLM2-135M

Rows have their own lengths and never wait for each other. Every forward here reads the whole text, which keeps the
loop short; the cache that makes it fast is what `torch_specops.generate` adds.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from torch_specops import uniforms

K = 3


@torch.compile(fullgraph=True, dynamic=False)
def step(
    target: nn.Module, draft: nn.Module, tokens: Tensor, lengths: Tensor, propose: Tensor, accept: Tensor, draw: Tensor
) -> tuple[Tensor, Tensor]:
    """Emit 1 to K + 1 tokens in every row. tokens [B, W] hold the texts from index 0 on, lengths [B] say how far;
    propose and accept [B, K] and draw [B] are uniforms."""
    rows = torch.arange(tokens.shape[0])
    draft_logits, draft_lse = [], []
    for i in range(K):
        logits = draft(tokens)[rows, lengths + i - 1]
        token, lse = torch.ops.specops.sample(logits, propose[:, i])
        tokens = tokens.scatter(1, (lengths + i).unsqueeze(1), token.unsqueeze(1))
        draft_logits.append(logits)
        draft_lse.append(lse)

    # The newest token and the drafts, and what the target says after each of them.
    places = (lengths - 1).unsqueeze(1) + torch.arange(K + 1)
    target_logits = target(tokens)[rows.unsqueeze(1), places]
    output_tokens, num_accepted = torch.ops.specops.verify_exact(
        target_logits,
        tokens.gather(1, places[:, 1:]),
        torch.stack(draft_logits, 1),
        accept,
        draw,
        draft_lse=torch.stack(draft_lse, 1),
    )
    # What stands behind a row's new length is no text: the next step writes over it.
    return tokens.scatter(1, places + 1, output_tokens.clamp(min=0)), lengths + num_accepted + 1


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model's directory or hub id; default: a tiny random one")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary; default: the target with some noise")
    parser.add_argument("--width", type=int, default=64, help="room for each text, drafts included")
    args = parser.parse_args()
    target = load(args.target)
    draft = with_noise(target) if args.draft is None else load(args.draft)

    # Two prompts of different lengths.
    tokens = torch.zeros(2, args.width, dtype=torch.int64)
    tokens[0, :5], tokens[1, :2] = torch.tensor([5, 6, 7, 5, 6]), torch.tensor([9, 4])
    lengths, seeds, num_steps = torch.tensor([5, 2]), torch.tensor([1, 2]), 0
    while int(lengths.max()) + K < args.width:
        # A few numbers a row, drawn outside: inside, their integer arithmetic would take longest of all to compile.
        propose, accept = uniforms(seeds, lengths, K, "propose"), uniforms(seeds, lengths, K, "accept")
        draw = uniforms(seeds, lengths, 1, "sample")[:, 0]
        tokens, lengths = step(target, draft, tokens, lengths, propose, accept, draw)
        num_steps += 1
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        print(row[:length])
    emitted = (lengths - torch.tensor([5, 2])).tolist()
    print(f"{num_steps} steps, one compiled graph; {emitted} tokens emitted")


class Tiny(nn.Module):
    """A language model in three lines: tokens [B, W] -> logits [B, W, V], each from the tokens up to its own."""

    def __init__(self, vocab_size: int = 64, hidden_size: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        newest = self.embedding(tokens)
        seen = newest.cumsum(1) / torch.arange(1, tokens.shape[1] + 1).unsqueeze(1)
        return self.head(torch.tanh(newest + seen))


class Transformer(nn.Module):
    """A transformers model in the same form."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(name).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def load(name: str | None) -> nn.Module:
    torch.manual_seed(0)
    return Tiny() if name is None else Transformer(name)


def with_noise(model: nn.Module) -> nn.Module:
    noisy = copy.deepcopy(model)
    for parameter in noisy.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    return noisy


if __name__ == "__main__":
    main()
