"""Which weights to give a target, and which a draft that is its copy: what a forward costs, and how often it agrees.

    python benchmarks/bench_quantised.py --layers 10 --out out.json
    python benchmarks/bench_quantised.py --random --layers 1 --rounds 2 --no-compiled
    python benchmarks/bench_quantised.py --device cuda

SmolLM2-135M-Instruct (or, with --random, random weights of its shapes), in the kinds of weights that torchao makes for
the device. For each: the time of a forward over one token, as a draft does it, and over K + 1 tokens, as a target does
it, through the loop's own cache, eager and compiled as the loop compiles it. All calls take turns; a number is the
median of `--rounds`. `--layers` times the first layers, with embeddings and head, because each compiled form takes
as many seconds as it has layers.

Agreement is that of the whole model with the float32 one, on text that the float32 one sampled: `acceptance`, the sum
of min(p, q), is the probability that a sampled draft is accepted (Leviathan et al. 2023, corollary 3.6), `same argmax`
that of a greedy one. `gain` is theorem 3.8 with these: tokens per second over the float32 model alone, when the copy
drafts K tokens for it; the time of the target's forward over K + 1 tokens is the measured one.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import environment
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import torch_specops
from torch_specops.cli.env import versions
from torch_specops.cli.loading import SMOLLM2, load_model, load_tokenizer
from torch_specops.compilation import compile_piece
from torch_specops.drafts.quantised import quantised_copy
from torch_specops.hf import TransformersModel, language_model

PROMPT = "Write about a walk along the river in the evening, and about what two old friends say to each other."
CAPACITY = 64


def random_model(num_layers: int) -> PreTrainedModel:
    """SmolLM2-135M's shapes."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def float8_copy(model: PreTrainedModel) -> PreTrainedModel:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    clone = copy.deepcopy(model)
    quantize_(clone, Float8WeightOnlyConfig(set_inductor_config=False))
    return clone


def bfloat16_copy(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).bfloat16()


# name -> the copy
Make = Callable[[PreTrainedModel], PreTrainedModel]
KINDS: dict[str, Make] = {
    "float32": lambda model: model,
    "bfloat16": bfloat16_copy,
    "int8": lambda model: quantised_copy(model, "int8"),
    "int8, bfloat16": lambda model: quantised_copy(bfloat16_copy(model), "int8"),
}
KINDS_OF_DEVICE: dict[str, dict[str, Make]] = {
    # Its int4 stands in bytes, and neither it nor float8 has a kernel there.
    "cpu": KINDS | {"int4": lambda model: quantised_copy(model, "int4")},
    "cuda": KINDS
    | {
        "int4, bfloat16": lambda model: quantised_copy(bfloat16_copy(model), "int4", 64),
        "float8, bfloat16": lambda model: float8_copy(bfloat16_copy(model)),
    },
}


def weight_bytes(model: PreTrainedModel) -> int:
    def size(value: Tensor) -> int:
        if hasattr(value, "__tensor_flatten__"):
            return sum(size(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.numel() * value.element_size()

    return sum(size(parameter) for parameter in model.parameters())


@torch.inference_mode()
def agreement(model: PreTrainedModel, copied: PreTrainedModel, text: Tensor, prompt_length: int) -> dict[str, float]:
    p, q = (
        each(input_ids=text, use_cache=False).logits[:, prompt_length - 1 : -1].float().softmax(-1)
        for each in (model, copied)
    )
    same = (p.argmax(-1) == q.argmax(-1)).double()
    return {"acceptance": float(torch.minimum(p, q).sum(-1).mean()), "same_argmax": float(same.mean())}


def forwards(
    adapter: TransformersModel, widths: tuple[int, ...], compiled: bool
) -> dict[tuple[str, int], Callable[[], Any]]:
    """(form, M) -> a forward over M tokens behind a short text."""
    device = adapter.device
    adapter.start(1, CAPACITY)
    positions = torch.arange(CAPACITY, device=device).unsqueeze(0)
    tokens = positions % adapter.vocab_size
    with torch.inference_mode():
        adapter.forward(tokens[:, :16], positions[:, :16], 1)
    calls: dict[tuple[str, int], Callable[[], Any]] = {}
    for width in widths:
        arguments = (tokens[:, 16 : 16 + width].clone(), positions[:, 16 : 16 + width].clone(), width)
        calls["eager", width] = lambda arguments=arguments: adapter.forward(*arguments)
        if compiled:
            piece = compile_piece(adapter.forward)
            calls["compiled", width] = lambda piece=piece, arguments=arguments: piece(*arguments)
    return calls


@torch.inference_mode()
def time_all(cells: dict[tuple[str, str, int], Callable[[], Any]], rounds: int, device: str) -> list[dict[str, Any]]:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[tuple[str, str, int], list[float]] = {cell: [] for cell in cells}
    for call in cells.values():
        call()
        call()
    for _ in range(rounds):
        for cell, call in cells.items():
            synchronize()
            started = time.perf_counter()
            call()
            synchronize()
            seconds[cell].append(time.perf_counter() - started)
    records = []
    for (kind, form, width), values in seconds.items():
        q1, median, q3 = (1e3 * value for value in statistics.quantiles(values, n=4))
        records.append({"kind": kind, "form": form, "M": width, "q1_ms": q1, "median_ms": median, "q3_ms": q3})
    return records


def gain(acceptance: float, num_drafts: int, draft_ms: float, target_ms: float, alone_ms: float) -> float:
    """Tokens per second over the target alone: expected tokens of a step, over the time of the step."""
    tokens = sum(acceptance**i for i in range(num_drafts + 1))
    return tokens * alone_ms / (num_drafts * draft_ms + target_ms)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", action="store_true", help="random weights; says nothing of agreement")
    parser.add_argument("--layers", type=int, default=30, help="layers that are timed")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", help="some of the kinds of weights; default: all")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--text-tokens", type=int, default=96, help="sampled tokens on which agreement is measured")
    parser.add_argument("--no-compiled", action="store_true", help="eager forwards alone")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the records as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    makers = KINDS_OF_DEVICE[options.device]
    kinds = {kind: makers[kind] for kind in options.kinds or makers}
    widths = (1, options.num_draft_tokens + 1)

    if options.random:
        adapter, text, prompt_length = language_model(random_model(options.layers).to(options.device)), None, 0
    else:
        adapter, tokenizer = load_model(SMOLLM2, options.device), load_tokenizer(SMOLLM2)
        prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(options.device)
        prompt_length = prompt.shape[1]
        text = torch_specops.generate(adapter.model, prompt, max_new_tokens=options.text_tokens, seed=0).sequences
    timed = adapter.first_layers(options.layers).model
    copies: dict[str, dict[str, Any]] = {}
    cells: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for kind, make in kinds.items():
        whole = make(adapter.model)
        copies[kind] = {"weight_bytes": weight_bytes(whole)}
        if text is not None:
            copies[kind] |= agreement(adapter.model, whole, text, prompt_length)
        del whole
        for (form, width), call in forwards(language_model(make(timed)), widths, not options.no_compiled).items():
            cells[kind, form, width] = call
    records = time_all(cells, options.rounds, options.device)

    medians = {(record["kind"], record["form"], record["M"]): record["median_ms"] for record in records}
    forms = ("eager",) if options.no_compiled else ("eager", "compiled")
    columns = [f"{form}, M = {width}" for form in forms for width in widths]
    table = Table("weights", "MB", *columns, "acceptance", "same argmax", "gain", title="ms per forward")
    for kind, copied in copies.items():
        cost = (medians["float32", forms[-1], width] for width in reversed(widths)) if "float32" in kinds else None
        if cost is not None and "acceptance" in copied:
            draft_ms = medians[kind, forms[-1], 1]
            copied["gain"] = gain(copied["acceptance"], options.num_draft_tokens, draft_ms, *cost)
        shown = (f"{copied[name]:.3f}" if name in copied else "" for name in ("acceptance", "same_argmax", "gain"))
        times = (f"{medians[kind, form, width]:.1f}" for form in forms for width in widths)
        table.add_row(kind, f"{copied['weight_bytes'] / 1e6:.0f}", *times, *shown)
    Console().print(table)
    result = {
        "environment": environment(
            torch.device(options.device),
            # Of all processes, this one among them.
            load_average=os.getloadavg()[0],
            versions=versions(),
            model="random weights of its shapes" if options.random else "SmolLM2-135M-Instruct",
            layers_timed=options.layers,
            num_draft_tokens=options.num_draft_tokens,
            rounds=options.rounds,
        ),
        "copies": copies,
        "records": records,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
