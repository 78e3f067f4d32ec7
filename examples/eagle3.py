"""Draft with an EAGLE-3 head, which reads the target's hidden states.

    python examples/eagle3.py
    python examples/eagle3.py --target ./Llama-3.1-8B-Instruct --head ./EAGLE3-LLaMA3.1-Instruct-8B

The target is an unmodified transformers model. Heads of EAGLE and SpecForge load as they are, and those of the
speculators library; the weights have to be safetensors. By default both come with the package, where a token is a byte.
"""

from __future__ import annotations

import argparse
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.drafts import Eagle3


def main() -> None:
    folder = files("torch_specops") / "data" / "austen_bytes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=folder / "target")
    parser.add_argument("--head", default=folder / "eagle3")
    parser.add_argument("--prompts", nargs="+", default=["It was not to be ", "She could not help "])
    parser.add_argument("--new-tokens", type=int, default=60)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target)
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"][0] for prompt in args.prompts]
    input_ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)

    head = Eagle3.from_pretrained(args.head, target)
    decoder = SpeculativeDecoder(target, head, num_draft_tokens=args.num_draft_tokens)
    plain = SpeculativeDecoder(target)
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": args.new_tokens, "sampling": SamplingParams(temperature=temperature), "seed": 1}
        output = decoder.generate(input_ids, attention_mask=mask, **options)
        print(f"temperature {temperature}: {output.stats.mean_acceptance_length:.2f} tokens per step")
        for prompt, row in zip(args.prompts, range(len(prompts)), strict=True):
            print(f"  {prompt + tokenizer.decode(output.new_tokens(row))!r}")
        if temperature == 0:
            alone = plain.generate(input_ids, attention_mask=mask, **options)
            print(f"  identical to decoding without drafts: {torch.equal(output.sequences, alone.sequences)}")


if __name__ == "__main__":
    main()
