"""Speculative decoding behind transformers' own `generate`: the same call, the same tokens.

python examples/hf_generate.py
python examples/hf_generate.py --target HuggingFaceTB/SmolLM2-360M --draft HuggingFaceTB/SmolLM2-135M
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from torch_specops.drafts import PromptLookup
from torch_specops.hf import custom_generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a model's directory or hub id; default: a tiny random model")
    parser.add_argument("--draft", help="a smaller model with the same vocabulary; default: prompt lookup")
    parser.add_argument("--prompts", nargs="+", default=["def add(a, b):", "Once upon a time, there was a"])
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    tokenizer = None
    if args.target is None:
        target = tiny()
        # Two prompts, padded on the left as transformers wants them.
        batch = {
            "input_ids": torch.tensor([[5, 6, 7, 8, 5, 6], [0, 0, 9, 4, 3, 9]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]),
        }
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        batch = dict(tokenizer(args.prompts, padding=True, return_tensors="pt", return_token_type_ids=False))
    draft = PromptLookup() if args.draft is None else AutoModelForCausalLM.from_pretrained(args.draft).eval()

    options = {**batch, "do_sample": False, "max_new_tokens": args.max_new_tokens, "pad_token_id": 0}
    started = time.perf_counter()
    expected = target.generate(**options)
    plain_seconds = time.perf_counter() - started

    # All that changes. To sample, pass do_sample=True and top_k=0.
    drafting = {"assistant_model": draft, "num_draft_tokens": 4, "return_dict_in_generate": True}
    started = time.perf_counter()
    output = target.generate(**options, custom_generate=custom_generate, **drafting)
    seconds = time.perf_counter() - started

    for row in output.sequences:
        print(row.tolist() if tokenizer is None else tokenizer.decode(row, skip_special_tokens=True))
    # In 32 bits, two tokens that nearly tie may swap: a forward over five tokens rounds otherwise than one over one.
    print(f"identical to transformers: {torch.equal(output.sequences, expected)}")
    print(f"{output.stats.mean_acceptance_length:.2f} tokens per step")
    print(f"{plain_seconds:.2f} s with transformers alone, {seconds:.2f} s with drafts")


def tiny() -> LlamaForCausalLM:
    """Random weights, so that the example runs anywhere; in float64, where nothing ties."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).double().eval()


if __name__ == "__main__":
    main()
