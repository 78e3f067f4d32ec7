"""Time whole texts of a large pair on CUDA beside transformers' ways to decode.

    python benchmarks/bench_generate.py [--target 7B --draft 1.3B] [--batch 1] [--out FILE.json]

The models have random weights (`bench_loop.py`), and acceptance is that of random weights. All ways sample at
temperature 1 from the same prompts, without an eos, and are timed from tokens on the device until the host has the
text, prompt included: transformers' `generate`; the same with a static cache, whose forward transformers compiles; its
assisted generation with as many draft tokens in each step, which takes one prompt; and this package with its defaults,
without and with the draft. Two calls of each way come first. `first_s` is the time of the first, with what is compiled
and captured in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_loop import SHAPES, random_model
from timing import Report, environment, options_of, settings_of, spread, take_turns, timer_of_host
from transformers import GenerationConfig, LlamaForCausalLM

from torch_specops import SamplingParams, SpeculativeDecoder

STATIC, ASSISTED = "transformers, static cache", "transformers, assisted"


def ways_of(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, batch: int, options: Any
) -> dict[str, Callable[[], Any]]:
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.config.vocab_size, (batch, options.prompt), generator=g).to(target.device)
    mask, new_tokens = torch.ones_like(prompts), options.new_tokens
    sampled = {"pad_token_id": 0, "do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": new_tokens}
    draft.generation_config = GenerationConfig(
        pad_token_id=0,
        num_assistant_tokens=options.num_draft_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )

    def theirs(**more: Any) -> list[list[int]]:
        config = GenerationConfig(**sampled)
        return target.generate(prompts, attention_mask=mask, generation_config=config, **more).tolist()

    def ours(decoder: SpeculativeDecoder) -> list[list[int]]:
        return decoder.generate(prompts, max_new_tokens=new_tokens, eos_token_id=()).sequences.tolist()

    settings = {"num_draft_tokens": options.num_draft_tokens, "schedule": "constant"}
    settings |= {"sampling": SamplingParams(temperature=1.0), "max_length": options.max_length}
    ways: dict[str, Callable[[], Any]] = {
        "transformers": theirs,
        STATIC: partial(theirs, cache_implementation="static"),
    }
    if batch == 1:
        ways[ASSISTED] = partial(theirs, assistant_model=draft)
    for name, source in {"no draft": None, "draft": draft}.items():
        ways[name] = partial(ours, SpeculativeDecoder(target, source, **settings))
    return ways


def checked(call: Callable[[], list[list[int]]], length: int) -> None:
    lengths = list(map(len, call()))
    if set(lengths) != {length}:
        raise RuntimeError(f"expected texts of {length} tokens, got {lengths}")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=3)
    parser.add_argument("--target", choices=SHAPES, default="7B")
    parser.add_argument("--draft", choices=SHAPES, default="1.3B")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=2048, help="slots of this package's cache")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    report = Report(options.out, environment(device, rounds=options.rounds), settings=settings_of(options))
    models = [random_model(shape, options, device) for shape in (options.target, options.draft)]
    for batch in options.batch:
        length = options.prompt + options.new_tokens
        ways = ways_of(*models, batch, options)
        runs = {name: timer_of_host(partial(checked, call, length), device) for name, call in ways.items()}
        first = {name: [run(0), run(0)][0] for name, run in runs.items()}
        times = take_turns(runs, options.rounds, warm_up=0)
        rates = {name: batch * options.new_tokens / statistics.median(own) for name, own in times.items()}
        report.add(
            {"batch": batch, "way": name, **spread(own, "ms"), "tokens_per_s": rates[name], "first_s": first[name]}
            for name, own in times.items()
        )
        print(*report.records[-len(times) :], sep="\n", flush=True)
    return report.records


if __name__ == "__main__":
    main()
