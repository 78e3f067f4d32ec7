"""Check engines at several sampling settings: this package, and transformers' assisted generation.

python examples/check_engine.py

An engine is a function that continues prompts. The last one is wrong on purpose: with an ensemble weight, transformers
accepts drafts by a mixture of both models. Nothing about its text looks wrong.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.testing import check_engine

VOCAB_SIZE = 6
NUM_TOKENS = 3
NUM_DRAFT_TOKENS = 2
# Prompts of other lengths, and settings that do not leave the same tokens: requests of all settings share a batch.
PROMPTS = [[1, 0, 1], [2, 3], [4, 0, 2, 3, 5]]
SETTINGS = {
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top-k 3": SamplingParams(top_k=3),
    "greedy": SamplingParams(temperature=0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="for each setting; transformers makes a tenth of it")
    args = parser.parse_args()
    target, draft = tiny_pair()
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=NUM_DRAFT_TOKENS)
    for name, engine, trials in (
        ("this package", partial(package, decoder), args.trials),
        ("transformers", partial(transformers, target, draft), args.trials // 10),
        ("transformers, ensemble weight 0.1", partial(transformers, target, draft, weight=0.1), args.trials // 10),
    ):
        report = check_engine(
            engine,
            # Before temperature and filters: the check applies those of each setting.
            target=lambda text: target(text).logits,
            settings=SETTINGS,
            prompts=PROMPTS,
            vocab_size=VOCAB_SIZE,
            num_tokens=NUM_TOKENS,
            trials=trials,
        )
        print(f"{name}:\n{report}\n")
    # In a test: report.assert_lossless()


def package(
    decoder: SpeculativeDecoder, prompts: list[list[int]], params: list[SamplingParams], seeds: list[int]
) -> list[list[int]]:
    """One batch with its own parameters and seed in each row, padded on the left."""
    longest = max(map(len, prompts))
    output = decoder.generate(
        torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        max_new_tokens=NUM_TOKENS,
        sampling=SamplingParams(
            temperature=[each.temperature for each in params],
            top_k=[each.top_k for each in params],
            top_p=[each.top_p for each in params],
        ),
        seed=seeds,
        eos_token_id=(),
        pad_token_id=0,
    )
    return [output.new_tokens(row) for row in range(len(prompts))]


def transformers(
    target: nn.Module,
    draft: nn.Module,
    prompts: list[list[int]],
    params: list[SamplingParams],
    seeds: list[int],
    weight: float | None = None,
) -> list[list[int]]:
    """One prompt after the other, as assisted generation has it."""
    rows = []
    for prompt, each, seed in zip(prompts, params, seeds, strict=True):
        torch.manual_seed(seed)
        sampling = {"do_sample": False}
        if each.temperature > 0:
            sampling = {"do_sample": True, "temperature": each.temperature, "top_k": each.top_k, "top_p": each.top_p}
            sampling |= {"assistant_ensemble_weight": weight}
        text = torch.tensor([prompt])
        output = target.generate(
            text,
            attention_mask=torch.ones_like(text),
            assistant_model=draft,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
            **sampling,
        )
        rows.append(output[0, len(prompt) :].tolist())
    return rows


def tiny_pair() -> tuple[nn.Module, nn.Module]:
    """Random weights and few tokens: the law is known exactly, and mistakes move it far enough to be seen. The draft is
    the target with noise, so that drafts are accepted and rejected."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    target, draft = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    draft.load_state_dict({name: value + 0.1 * torch.randn_like(value) for name, value in target.state_dict().items()})
    draft.generation_config.num_assistant_tokens = NUM_DRAFT_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return target, draft


if __name__ == "__main__":
    main()
