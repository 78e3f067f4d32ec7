"""Draft with an EAGLE-3 head, a small network that reads the target's hidden states: the same text in fewer steps.

    python examples/eagle3.py
    python examples/eagle3.py --target ./Llama-3.1-8B-Instruct --head ./EAGLE3-LLaMA3.1-Instruct-8B

The target is an unmodified transformers model. Heads of EAGLE and SpecForge load as they are, and those of the
speculators library; the weights have to be safetensors. By default both come with the package, where a token is a byte.
"""

import argparse
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.drafts import Eagle3

folder = files("torch_specops") / "data" / "austen_bytes"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=folder / "target")
parser.add_argument("--head", default=folder / "eagle3")
parser.add_argument("--prompts", nargs="+", default=["It was not to be ", "She could not help "])
parser.add_argument("--new-tokens", type=int, default=60)
args = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(args.target)
target = AutoModelForCausalLM.from_pretrained(args.target)
head = Eagle3.from_pretrained(args.head, target)

# The byte-level tokenizer has no padding. Any token will do, because the mask says which ones to ignore.
tokenizer.pad_token_id = 0
batch = tokenizer(args.prompts, padding=True, return_tensors="pt")

outputs = []
for name, draft in (("without drafts", None), ("with the head", head)):
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
    output = decoder.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=args.new_tokens,
        sampling=SamplingParams(temperature=0.0),
    )
    outputs.append(output)
    # A step emits the drafts that the target accepts, and one token more.
    print(f"{name}: {output.stats.num_steps} steps, {output.stats.mean_acceptance_length:.2f} tokens per row and step")

without, with_head = outputs
for prompt, text in zip(args.prompts, with_head.texts(tokenizer), strict=True):
    print(repr(prompt + text))
print(f"the same text: {torch.equal(without.sequences, with_head.sequences)}")
