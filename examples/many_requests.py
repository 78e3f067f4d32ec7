"""Decode more prompts than fit into a batch: a row whose text has ended takes the next prompt.

    python examples/many_requests.py
    python examples/many_requests.py --target ./model --draft ./small-model --batch-size 16

Each request has its own sampling, seed and limit. Answers come as they finish, and are those that each prompt would get
alone.
"""

from __future__ import annotations

import argparse
from importlib.resources import files

from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_specops import Request, SamplingParams, SpeculativeDecoder

PROMPTS = ["It was not to be ", "Her mother ", "Mr. Darcy ", "The ball ", "In the morning ", "A letter "]
LIMITS = [40, 8, 32, 16, 24, 12]


def main(arguments: list[str] | None = None) -> None:
    folder = files("torch_specops") / "data" / "austen_bytes"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=folder / "target")
    parser.add_argument("--draft", default=folder / "draft")
    parser.add_argument("--batch-size", type=int, default=2)
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target)
    draft = AutoModelForCausalLM.from_pretrained(args.draft)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)

    def request(number: int) -> Request:
        sampling = SamplingParams(temperature=0.7 if number % 2 else 0.0, top_p=0.9)
        return Request(tokenizer(PROMPTS[number])["input_ids"], LIMITS[number], sampling, seed=number)

    # A request is made when a row is free for it.
    requests = map(request, range(len(PROMPTS)))
    texts = {}
    for completion in decoder.generate_many(requests, batch_size=args.batch_size, max_length=96):
        print(f"{completion.index} ({completion.finish_reason}): {tokenizer.decode(completion.tokens)!r}")
        texts[completion.index] = completion.new_tokens.tolist()
    stats = decoder.stats
    print(f"{len(texts)} requests, {stats.num_tokens} tokens, {stats.mean_acceptance_length:.2f} per row and step")

    alone = {number: next(decoder.generate_many([request(number)], batch_size=1)) for number in texts}
    same = all(texts[number] == completion.new_tokens.tolist() for number, completion in alone.items())
    print(f"the same as each request alone: {same}")


if __name__ == "__main__":
    main()
