"""Speculative decoding with a tensor-parallel target whose logits are never gathered.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --target meta-llama/Llama-3.1-8B \\
        --draft meta-llama/Llama-3.2-1B

The target is loaded with transformers' `tp_plan="auto"`, but for its head: the plan gathers the logits, and here every
rank keeps the columns it computed. The draft is small, and every rank runs it whole. As in compiled_loop.py, every
forward reads the whole text, which keeps the loop short.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import torch_specops
from torch_specops import uniforms, vocab_parallel

K = 3
PROMPTS = [[5, 6, 7, 5, 6], [9, 4]]


class ShardedLlama(LlamaForCausalLM):
    """For another family, its own class with this plan of the head."""

    _tp_plan = {"lm_head": "colwise"}  # noqa: RUF012


def decode(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    sample: Callable[..., tuple[Tensor, Tensor]],
    verify: Callable[..., tuple[Tensor, Tensor]],
    temperature: float,
    width: int,
) -> tuple[list[list[int]], int]:
    """The texts when one of them has no room for another step, and the number of steps."""
    device = target.device
    tokens = torch.zeros(len(PROMPTS), width, dtype=torch.int64, device=device)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS], device=device)
    seeds, rows = torch.arange(len(PROMPTS), device=device), torch.arange(len(PROMPTS), device=device)
    t = torch.full((len(PROMPTS),), temperature, device=device)
    num_steps = 0
    while int(lengths.max()) + K < width:
        # From seeds and positions: the same numbers on every rank.
        propose, accept = uniforms(seeds, lengths, K, "propose"), uniforms(seeds, lengths, K, "accept")
        draw = uniforms(seeds, lengths, 1, "sample")[:, 0]
        draft_logits, draft_lse = [], []
        for i in range(K):
            logits = draft(tokens, use_cache=False).logits[rows, lengths + i - 1]
            # Every rank has these logits, but they draw together: all are sure to read the same draft.
            token, lse = sample(logits, propose[:, i], t)
            tokens = tokens.scatter(1, (lengths + i).unsqueeze(1), token.unsqueeze(1))
            draft_logits.append(logits)
            draft_lse.append(lse)
        places = (lengths - 1).unsqueeze(1) + torch.arange(K + 1, device=device)
        output_tokens, num_accepted = verify(
            target(tokens, use_cache=False).logits[rows.unsqueeze(1), places],
            tokens.gather(1, places[:, 1:]),
            torch.stack(draft_logits, 1),
            accept,
            draw,
            t,
            torch.stack(draft_lse, 1),
        )
        tokens = tokens.scatter(1, places + 1, output_tokens.clamp(min=0))
        lengths = lengths + num_accepted + 1
        num_steps += 1
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)], num_steps


def tiny_llama(folder: str) -> str:
    """A random model; 250 tokens do not split evenly over 3 or 4 ranks."""
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=250, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **heads)
    model = LlamaForCausalLM(config)
    # Random weights as they come make every token as likely as any other.
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)
    model.save_pretrained(folder)
    return folder


def with_noise(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    return model


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a Llama's directory or hub id; default: a tiny random one")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary; default: the target with some noise")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--width", type=int, default=32, help="room for each text, drafts included")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        name = args.target or tiny_llama(folder)
        target = ShardedLlama.from_pretrained(name, distributed_config=DistributedConfig(tp_plan="auto"))
        whole = LlamaForCausalLM.from_pretrained(name).to(target.device)
        draft = (
            with_noise(LlamaForCausalLM.from_pretrained(name))
            if args.draft is None
            else AutoModelForCausalLM.from_pretrained(args.draft)
        )
        draft = draft.to(target.device)

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    functions = vocab_parallel.sample, vocab_parallel.verify_exact
    sharded = [partial(function, vocab_size=target.config.vocab_size) for function in functions]
    texts, num_steps = decode(target, draft, *sharded, args.temperature, args.width)
    alone = torch_specops.sample, torch_specops.verify_exact
    expected, _ = decode(whole, draft, *alone, args.temperature, args.width)
    columns = target(torch.tensor(PROMPTS[:1], device=target.device)).logits.shape[-1]
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, (texts, columns))
    if rank == 0:
        for text in texts:
            print(text)
        print(f"{num_steps} steps; {[len(a) - len(b) for a, b in zip(texts, PROMPTS, strict=True)]} tokens emitted")
        print(f"columns of each rank: {[columns for _, columns in every]}")
        print(f"the same on every rank: {all(other == texts for other, _ in every)}")
        print(f"the same as on one rank: {texts == expected}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # A thread of gloo may still be about to free a tensor of the last collective. It needs Python's lock for that, and
    # Python aborts if it gets there while Python itself ends (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)
