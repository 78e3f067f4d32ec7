"""A step of reinforcement learning: sample answers with drafts, and train on their log-probabilities.

    python examples/rollouts.py
    python examples/rollouts.py --target ./model --draft ./small-model --samples 8

The answers have exactly the policy's distribution, whatever the draft: the ratio of the new and the old probability,
which PPO and GRPO clip, begins at 1. By default a token is a byte, and the reward is the number of words.
"""

import argparse
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import SpeculativeDecoder

folder = files("torch_specops") / "data" / "austen_bytes"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default=folder / "target")
parser.add_argument("--draft", default=folder / "draft")
parser.add_argument("--prompt", default="It was not to be ")
parser.add_argument("--samples", type=int, default=4)
parser.add_argument("--new-tokens", type=int, default=32)
args = parser.parse_args()
tokenizer = AutoTokenizer.from_pretrained(args.target)
policy = AutoModelForCausalLM.from_pretrained(args.target)
draft = AutoModelForCausalLM.from_pretrained(args.draft)

# Sample several answers to the prompt. `logprobs` [B, L] is NaN where no token was generated.
decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=4)
prompt = tokenizer(args.prompt, return_tensors="pt")["input_ids"]
options = {"max_new_tokens": args.new_tokens, "logprobs": "raw"}
rollout = decoder.generate(prompt, num_return_sequences=args.samples, seed=0, **options)
answers = rollout.texts(tokenizer)
for answer in answers:
    print(repr(answer))
print(f"{rollout.stats.num_tokens} tokens, {rollout.stats.mean_acceptance_length:.2f} per row and step")

# Each answer has a seed of its own, which repeats it without the others.
again = decoder.generate(prompt, seed=rollout.stats.seeds[-1:], **options)
print(f"the last answer again, alone: {again.new_tokens(0) == rollout.new_tokens(-1)}")


def training_logprobs():
    """The log-probability of each new token by a training forward: the logits at a token are for the next one. Padding
    stands at the end, where no token sees it."""
    logits = policy(rollout.sequences[:, :-1]).logits
    return torch.log_softmax(logits, -1).gather(2, rollout.sequences[:, 1:, None]).squeeze(2)[is_new]


# The sampler's log-probabilities are those of the training forward, up to rounding.
is_new = ~rollout.logprobs[:, 1:].isnan()
old = rollout.logprobs[:, 1:][is_new]
policy.train()
new = training_logprobs()
print(f"equal to the log-probabilities of the training forward: {torch.allclose(new, old, rtol=0, atol=1e-4)}")

# One policy-gradient step. An answer's advantage is its reward over the mean, for each of its tokens.
reward = torch.tensor([float(len(answer.split())) for answer in answers])
advantage = (reward - reward.mean()).unsqueeze(1).expand_as(is_new)[is_new]
loss = -((new - old).exp() * advantage).mean()
loss.backward()
torch.optim.SGD(policy.parameters(), lr=0.1).step()

# The best answer is more likely now. The decoder reads the new weights in its next call.
best = advantage == advantage.max()
before, after = old[best].sum(), training_logprobs()[best].sum()
print(f"log-probability of the answer with the most words: {before:.1f}, after the step {after:.1f}")
