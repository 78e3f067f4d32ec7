"""Penalties, n-grams and banned words for each row of a batch, and transformers' own processors behind `generate`.

    python examples/processors.py
    python examples/processors.py --target ./model --draft ./small-model --prompt "Once upon a time"

Row by row: greedy decoding as it is, which repeats itself; with a repetition penalty; without repeated n-grams; without
two words. Drafts count as text for the tokens after them, so every row has exactly its own law.
"""

from __future__ import annotations

import argparse
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_specops


def main(arguments: list[str] | None = None) -> None:
    folder = files("torch_specops") / "data" / "austen_bytes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=folder / "target")
    parser.add_argument("--draft", default=folder / "draft")
    parser.add_argument("--prompt", default="It was not to be ")
    parser.add_argument("--words", nargs="+", default=[" great", " moment"])
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target)
    draft = AutoModelForCausalLM.from_pretrained(args.draft)
    prompt = tokenizer(args.prompt, return_tensors="pt")["input_ids"]

    words = [tokenizer(word, add_special_tokens=False)["input_ids"] for word in args.words]
    sampling = torch_specops.SamplingParams(
        temperature=0.0,
        repetition_penalty=[1.0, 1.2, 1.0, 1.0],
        no_repeat_ngram_size=[0, 0, 6, 0],
        bad_words=[[], [], [], words],
    )
    prompts = prompt.repeat(4, 1)
    output = torch_specops.generate(target, prompts, draft=draft, sampling=sampling, max_new_tokens=args.new_tokens)
    names = "as it is", "repetition penalty", "no repeated n-gram", "banned words"
    for name, text in zip(names, output.texts(tokenizer), strict=True):
        print(f"{name}: {text!r}")
    print(f"{output.stats.mean_acceptance_length:.2f} tokens per step")

    # transformers' arguments and processors mean there what they always mean.
    options = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 6, "bad_words_ids": words, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": args.new_tokens}
    plain = target.generate(prompt, **options)
    ours = target.generate(prompt, **options, custom_generate=torch_specops.hf.custom_generate, draft_model=draft)
    print(f"identical to transformers: {torch.equal(ours, plain)}")


if __name__ == "__main__":
    main()
