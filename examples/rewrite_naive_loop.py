"""Speculative decoding in plain PyTorch, whose verification becomes the op when it is compiled.

python examples/rewrite_naive_loop.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

import torch_specops.inductor

NUM_DRAFT_TOKENS = 3


def verify(t: Tensor, x: Tensor, d: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 1 of Leviathan et al. 2023 as it is often written: a softmax over everything. Target logits, draft
    tokens, draft logits and uniform numbers to the number of accepted drafts and the next token."""
    p, q = torch.softmax(t, -1), torch.softmax(d, -1)
    p_x = p[:, :-1].gather(2, x.unsqueeze(2)).squeeze(2)
    q_x = q.gather(2, x.unsqueeze(2)).squeeze(2)
    accepted = u < torch.clamp(p_x / q_x, max=1.0)
    n = ((~accepted).cumsum(1) < 1).sum(1)
    rows = torch.arange(x.shape[0])
    weights = torch.relu(p[rows, n] - pad(q, (0, 0, 0, 1))[rows, n])
    weights = weights / weights.sum(-1, keepdim=True)
    return n, (weights.cumsum(-1) > s[:, None]).int().argmax(-1)


def decode(verify: Callable[..., tuple[Tensor, Tensor]], num_steps: int) -> list[int]:
    """One sequence. The models are tables of logits for the last token."""
    generator = torch.Generator().manual_seed(0)
    target = 2 * torch.randn(64, 64, generator=generator)
    draft = target + torch.randn(64, 64, generator=generator)
    text = [0]
    for _ in range(num_steps):
        read = text[-1:]
        for _ in range(NUM_DRAFT_TOKENS):
            read.append(int(torch.multinomial(torch.softmax(draft[read[-1]], -1), 1, generator=generator)))
        u, s = torch.rand(1, NUM_DRAFT_TOKENS, generator=generator), torch.rand(1, generator=generator)
        n, token = verify(target[read].unsqueeze(0), torch.tensor([read[1:]]), draft[read[:-1]].unsqueeze(0), u, s)
        text += [*read[1 : 1 + int(n)], int(token)]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=20)
    args = parser.parse_args()

    with torch_specops.inductor.rewrite() as counted:
        text = decode(torch.compile(verify, fullgraph=True), args.num_steps)
    print(text)
    # A graph that comes out of Inductor's cache was rewritten by the run that put it there.
    print(f"rewritten: {counted.matched}, refused: {dict(counted.refused)}")
    print(f"the same tokens as not compiled: {text == decode(verify, args.num_steps)}")


if __name__ == "__main__":
    main()
