"""A quantised copy of the target as its draft: no second model to find, and it nearly always agrees.

    pip install torchao
    python examples/quantised_draft.py
    python examples/quantised_draft.py --target HuggingFaceTB/SmolLM2-135M-Instruct --weights int4

The output has the target's law, not the quantised model's. On a CPU the copy is no faster than the target, so this is
an exercise there; on a GPU a batch of one waits for the weights, and smaller ones arrive sooner.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import torch_specops
from torch_specops.drafts import quantised_copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model's directory or hub id; default: a tiny random model")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--weights", choices=["int8", "int4"], default="int8")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()

    tokenizer = None
    if args.target is None:
        target, prompt = tiny(), torch.tensor([[5, 6, 7, 5, 6]])
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        prompt = tokenizer(args.prompt, return_tensors="pt")["input_ids"]

    draft = quantised_copy(target, args.weights)
    output = torch_specops.generate(
        target,
        prompt,
        draft=draft,
        max_new_tokens=args.max_new_tokens,
        num_draft_tokens=4,
        sampling=torch_specops.SamplingParams(temperature=args.temperature),
        seed=0,
    )
    new_tokens = output.new_tokens(0)
    print(new_tokens if tokenizer is None else tokenizer.decode(output.sequences[0], skip_special_tokens=True))
    stats = output.stats
    print(
        f"{args.weights} copy: {stats.acceptance_rate:.0%} of its drafts accepted, "
        f"{stats.mean_acceptance_length:.2f} tokens per step"
    )


def tiny() -> LlamaForCausalLM:
    """Random weights, so that the example runs anywhere; its layers are multiples of 32, as int4 groups want them."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    main()
