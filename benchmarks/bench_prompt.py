"""Time how long a prompt takes to its first token on CUDA, with each way to read it.

    python benchmarks/bench_prompt.py [--target 8B] [--prompts 512 4096 16384] [--batch 1] [--out FILE.json]

"attend" reads the prompt with the kernel for decoding, "causal" with torch's causal attention. Which one a call takes
is decided by `MIN_CAUSAL_TOKENS` (`torch_specops/ops/attention.py`), which is to be set by these times. "transformers"
is `generate` of the same model, whose weights are random (`bench_loop.py`). A call makes one token and is timed from
tokens on the device until the host has it. `differs` is the largest difference of the logits after the prompt from
those of transformers' forward, over the largest of the latter.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial
from typing import Any

import torch
from bench_loop import SHAPES, random_model
from timing import Report, environment, options_of, settings_of, spread, take_turns, timer_of_host
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.hf import language_model
from torch_specops.ops import attention

# The least number of tokens of a text that is read by causal attention. Steps have fewer.
WAYS = {"attend": 2**62, "causal": attention.MAX_STEP_TOKENS + 1}


def logits_after(model: LlamaForCausalLM, prompts: Tensor, least: int) -> Tensor:
    attention.MIN_CAUSAL_TOKENS = least
    adapter = language_model(model)
    adapter.start(*prompts.shape)
    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    return adapter.forward(prompts, positions, 1).float()


def measure(model: LlamaForCausalLM, batch: int, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (batch, length), generator=g).to(model.device)
    expected = model(prompts, logits_to_keep=1).logits.float()
    differs = {name: logits_after(model, prompts, least) - expected for name, least in WAYS.items()}
    greedy = GenerationConfig(pad_token_id=0, max_new_tokens=1, do_sample=False)
    decoder = SpeculativeDecoder(
        language_model(model), sampling=SamplingParams(temperature=0.0), max_length=options.max_length
    )

    def ours(least: int) -> object:
        attention.MIN_CAUSAL_TOKENS = least
        return decoder.generate(prompts, max_new_tokens=1, eos_token_id=()).sequences.tolist()

    def theirs() -> object:
        return model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=greedy).tolist()

    calls = {name: partial(ours, least) for name, least in WAYS.items()} | {"transformers": theirs}
    runs = {name: timer_of_host(call, model.device) for name, call in calls.items()}
    # A first call captures the step.
    for run in runs.values():
        run(0)
    return [
        {
            "batch": batch,
            "prompt": length,
            "way": name,
            **spread(own, "ms"),
            "prompt_tokens_per_s": batch * length / statistics.median(own),
            "differs": float(differs[name].abs().amax() / expected.abs().amax()) if name in differs else None,
        }
        for name, own in take_turns(runs, options.rounds).items()
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=8)
    parser.add_argument("--target", choices=SHAPES, default="8B")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 16384], help="their tokens")
    parser.add_argument("--max-length", type=int, default=16640, help="slots of a cache")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    report = Report(options.out, environment(device, rounds=options.rounds), settings=settings_of(options))
    with torch.inference_mode():
        model = random_model(options.target, options, device)
        for batch, length in itertools.product(options.batch, options.prompts):
            records = measure(model, batch, length, options)
            report.add(records)
            print(*records, sep="\n", flush=True)
    return report.records


if __name__ == "__main__":
    main()
