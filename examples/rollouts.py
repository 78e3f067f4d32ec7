"""Sample answers for a training step, with the log-probabilities that the sampler gave them, and take the step.

    python examples/rollouts.py
    python examples/rollouts.py --target ./model --draft ./small-model --samples 8

A prompt gets several samples. They have exactly the target's distribution, whatever the draft, so that the policy that
is trained is the one that was sampled: the ratio of the two probabilities, which PPO and GRPO clip, begins at 1.
"""

from __future__ import annotations

import argparse
from importlib.resources import files

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torch_specops


def main(arguments: list[str] | None = None) -> float:
    folder = files("torch_specops") / "data" / "austen_bytes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=folder / "target")
    parser.add_argument("--draft", default=folder / "draft")
    parser.add_argument("--prompt", default="It was not to be ")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    policy = AutoModelForCausalLM.from_pretrained(args.target)
    draft = AutoModelForCausalLM.from_pretrained(args.draft)

    # Each sample has a seed of its own, which repeats it: output.stats.seeds.
    decoder = torch_specops.SpeculativeDecoder(policy, draft, num_draft_tokens=4)
    output = decoder.generate(
        tokenizer(args.prompt, return_tensors="pt")["input_ids"],
        num_return_sequences=args.samples,
        max_new_tokens=args.new_tokens,
        seed=0,
        logprobs="raw",
    )
    is_new = ~output.logprobs.isnan()

    # A stand-in for a reward: how many words. The advantage is over the mean of the samples.
    words = [len(tokenizer.decode(output.new_tokens(row)).split()) for row in range(args.samples)]
    reward = torch.tensor(words, dtype=torch.float32)
    advantage = reward - reward.mean()

    policy.train()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    logits = policy(output.sequences[:, :-1]).logits
    new = torch.log_softmax(logits.float(), -1).gather(2, output.sequences[:, 1:].unsqueeze(2)).squeeze(2)
    old = output.logprobs[:, 1:]
    ratio = (new - old)[is_new[:, 1:]].exp()
    loss = -(ratio * advantage.repeat_interleave(is_new.sum(1))).mean()
    loss.backward()
    optimizer.step()

    largest = float((ratio.detach() - 1).abs().max())
    print(f"{int(is_new.sum())} tokens, {output.stats.mean_acceptance_length:.2f} per step, {reward.mean():.1f} words")
    print(f"new / old probability before the step: 1 to within {largest:.0e}")
    return largest


if __name__ == "__main__":
    main()
