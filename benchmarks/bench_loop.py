"""Time a step of the decoding loop on CUDA against the forwards of its two models alone.

    python benchmarks/bench_loop.py [--target 7B --draft 1.3B] [--batch 1 8] [--no-inductor] [--profile] [--out F.json]

The models have the shapes of Llama-2 7B, Llama-3 8B, Sheared-LLaMA 1.3B or the package's byte-level target, and random
weights that are made on the device. A step is one CUDA graph: K drafts, one forward of the target over K + 1 tokens,
verification, bookkeeping. "forwards" is a graph of the forwards alone, over caches of the same size, compiled and
captured in the same way; with --draft lookup it is the target's. Both are timed one replay at a time. --no-inductor
leaves out torch.compile on both sides and compares only what is captured.

A record has the two times, the host's time to queue a step, the error of a host synchronisation inside a step (null if
there is none), tokens per second of a whole `generate`, and memory. Acceptance is that of random weights. --profile
adds the launches of a step and its slowest kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from timing import (
    Lead,
    Report,
    call_seconds,
    capture,
    copy_rate,
    environment,
    options_of,
    settings_of,
    slowest_kernels,
    spread,
    take_turns,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.compilation import compile_piece
from torch_specops.decode.step import StepPlan
from torch_specops.drafts import ModelDraft, PromptLookup
from torch_specops.hf import language_model

SHAPES = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1.3B": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16},
    "bytes": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 8, "num_attention_heads": 4},
    "tiny": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
}
# The draft that has no model.
LOOKUP = "lookup"


def random_model(shape: str, options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    sizes = SHAPES[shape] | {"vocab_size": options.vocab, "max_position_embeddings": options.max_length}
    config = LlamaConfig(**sizes, eos_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, options.dtype))
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def forwards_alone(
    models: list[LlamaForCausalLM], batch: int, num_draft_tokens: int, length: int, capacity: int
) -> Callable[[], Tensor]:
    """The forwards of a step: the target reads K + 1 tokens, before it a draft the two newest and K - 1 drafts."""
    target, *drafts = models
    device = target.device

    def reader(model: LlamaForCausalLM, width: int, num_logits: int) -> Callable[[], Tensor]:
        tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
        positions = torch.arange(length - 1, length - 1 + width, device=device).expand(batch, -1).contiguous()
        read = compile_piece(adapters[id(model)].forward)
        return lambda: read(tokens, positions, num_logits)

    adapters = {id(model): language_model(model) for model in models}
    for adapter in adapters.values():
        adapter.start(batch, capacity)
        # Allocates the cache.
        adapter.forward(*(torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2)))
    before = [(reader(draft, 2, 1), reader(draft, 1, 1)) for draft in drafts]
    verified = reader(target, num_draft_tokens + 1, num_draft_tokens + 1)

    def call() -> Tensor:
        for first, following in before:
            first()
            for _ in range(num_draft_tokens - 1):
                following()
        return verified()

    return call


def host_synchronisation(run: Callable[[], object]) -> str | None:
    """The error that torch raises if the host waits for the device; None if it does not wait."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch warns that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                run()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return None


def measure(models: list[LlamaForCausalLM], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    target, *drafts = models
    device, num_drafts = target.device, options.num_draft_tokens
    g = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.config.vocab_size, (batch, options.prompt), generator=g).to(device)
    torch.cuda.reset_peak_memory_stats(device)
    how: dict[str, Any] = {"num_draft_tokens": num_drafts, "schedule": "constant"}
    how |= {"compile": True, "max_length": options.max_length}
    source = ModelDraft(language_model(drafts[0])) if drafts else PromptLookup()
    decoder = SpeculativeDecoder(language_model(target), source, sampling=SamplingParams(temperature=1.0), **how)
    settings = {"max_new_tokens": options.new_tokens, "seed": 0, "eos_token_id": ()}
    compile_seconds = decoder.generate(prompts, **settings).stats.compile_seconds
    stats = decoder.generate(prompts, **settings).stats
    peak = torch.cuda.max_memory_allocated(device)

    decoder.stream(prompts, **settings)
    state, plan = decoder._newest.state, StepPlan(num_drafts, is_compiled=True)

    def step() -> Tensor:
        return decoder._compiled_steps.run(state, plan)[0]

    waited = host_synchronisation(step)
    queued = []
    for _ in range(options.rounds):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        step()
        queued.append(time.perf_counter() - started)
    # Kept in a variable, because a graph does not keep the tensors that it reads.
    forwards = forwards_alone(models, batch, num_drafts, options.prompt, options.max_length)
    alone, lead = capture([forwards]), Lead(device)
    calls: dict[str, Callable[[], object]] = {"step": step, "forwards": alone.replay}
    runs = {mode: lambda _, call=call: call_seconds(call, device, lead) for mode, call in calls.items()}
    seconds = take_turns(runs, options.rounds)
    return {
        "batch": batch,
        **spread(seconds["step"], "ms", "step"),
        **spread(seconds["forwards"], "ms", "forwards"),
        "step_over_forwards": statistics.median(seconds["step"]) / statistics.median(seconds["forwards"]),
        "host_queue_ms": statistics.median(queued) * 1e3,
        "host_synchronisation": waited,
        "tokens_per_s": stats.num_tokens / stats.seconds,
        "tokens_per_step": stats.num_tokens / stats.num_row_steps,
        "accepted": stats.num_accepted / max(stats.num_proposed, 1),
        "compile_s": compile_seconds,
        "peak_gb": peak * 1e-9,
        **(slowest_kernels(step, device) if options.profile else {}),
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=20)
    parser.add_argument("--target", choices=SHAPES, default="7B")
    parser.add_argument("--draft", choices=[*SHAPES, LOOKUP], default="1.3B")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=2048, help="slots of a cache")
    parser.add_argument("--no-inductor", action="store_true", help="capture without compiling")
    parser.add_argument("--profile", action="store_true", help="record the slowest kernels of a step")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    device = torch.device("cuda")
    if options.no_inductor:
        torch.compiler.set_stance("force_eager")
    described = environment(device, copy_gb_per_s=copy_rate(device) * 1e-9, rounds=options.rounds)
    shapes = [shape for shape in (options.target, options.draft) if shape != LOOKUP]
    models = [random_model(shape, options, device) for shape in shapes]
    weights = [sum(p.nbytes for p in model.parameters()) * 1e-9 for model in models]
    report = Report(options.out, described, settings=settings_of(options), weights_gb=weights)
    with torch.inference_mode():
        for batch in options.batch:
            report.add([measure(models, batch, options)])
            print(report.records[-1], flush=True)
    return report.records


if __name__ == "__main__":
    main()
