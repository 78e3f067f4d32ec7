"""Which weights to give a target, and which a draft that is its copy: what a forward costs, and how often it agrees.

    python benchmarks/bench_quantised.py --layers 10 --out out.json
    python benchmarks/bench_quantised.py --model DIR_OR_HUB_ID --device cuda

A model, SmolLM2-135M-Instruct by default, in the kinds of weights that torchao makes for the device. For each: the time
of a forward over one token, as a draft does it, and over K + 1 tokens, as a target does it, through the loop's own
cache, eager and compiled as the loop compiles it. All calls take turns. `--layers` times only the first layers, with
embeddings and head, because compiling takes about a second for each layer.

Agreement compares the whole model with the float32 one, on text that the float32 one sampled: `acceptance`, the sum of
min(p, q), is the probability that a sampled draft is accepted (Leviathan et al. 2023, corollary 3.6), and `same argmax`
that of a greedy one. `gain` is theorem 3.8 with these numbers: tokens per second over the float32 model alone when the
copy drafts K tokens for it, with the measured time of the target's forward over K + 1 tokens.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from markdown_table import table
from timing import Report, call_seconds, environment, options_of, spread, take_turns, version_of
from torch import Tensor
from transformers import PreTrainedModel

import torch_specops
from torch_specops.cli.loading import SMOLLM2, load_model, load_tokenizer
from torch_specops.compilation import compile_piece
from torch_specops.drafts.quantised import quantised_copy
from torch_specops.hf import TransformersModel, language_model

PROMPT = "Write about a walk along the river in the evening, and about what two old friends say to each other."
CAPACITY = 64


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


def gain(acceptance: float, num_drafts: int, draft_ms: float, target_ms: float, alone_ms: float) -> float:
    """Tokens per second over the target alone: expected tokens of a step, over the time of the step."""
    tokens = sum(acceptance**i for i in range(num_drafts + 1))
    return tokens * alone_ms / (num_drafts * draft_ms + target_ms)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = options_of(__doc__, rounds=30)
    parser.add_argument("--model", default=SMOLLM2, help="directory or hub id")
    parser.add_argument("--layers", type=int, help="layers that are timed; default: all")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", help="some of the kinds of weights; default: all")
    parser.add_argument("--text-tokens", type=int, default=96, help="sampled tokens on which agreement is measured")
    parser.add_argument("--no-compiled", action="store_true", help="eager forwards alone")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    makers = KINDS_OF_DEVICE[device.type]
    kinds = {kind: makers[kind] for kind in options.kinds or makers}
    widths = (1, options.num_draft_tokens + 1)

    adapter, tokenizer = load_model(options.model, options.device), load_tokenizer(options.model)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(device)
    text = torch_specops.generate(adapter.model, prompt, max_new_tokens=options.text_tokens, seed=0).sequences
    timed = adapter.model
    if options.layers:
        # Prepared models have an attention of the loop's own, which is not read again.
        timed = adapter.first_layers(options.layers).prepared
        timed.set_attn_implementation(adapter.model.config._attn_implementation)
    copies: dict[str, dict[str, Any]] = {}
    calls: dict[tuple[str, str, int], Callable[[], Any]] = {}
    for kind, make in kinds.items():
        whole = make(adapter.model)
        copies[kind] = {"weight_bytes": weight_bytes(whole), **agreement(adapter.model, whole, text, prompt.shape[1])}
        del whole
        for (form, width), call in forwards(language_model(make(timed)), widths, not options.no_compiled).items():
            calls[kind, form, width] = call
    with torch.inference_mode():
        runs = {key: lambda _, call=call: call_seconds(call, device) for key, call in calls.items()}
        seconds = take_turns(runs, options.rounds)
    records = [
        {"kind": kind, "form": form, "M": width} | spread(own, "ms") for (kind, form, width), own in seconds.items()
    ]

    rows: dict[str, dict[str, Any]] = {
        kind: {"kind": kind, "MB": own["weight_bytes"] / 1e6} for kind, own in copies.items()
    }
    for record in records:
        rows[record["kind"]][f"{record['form']}, M = {record['M']}"] = record["median_ms"]
    form = "eager" if options.no_compiled else "compiled"
    for kind, own in copies.items():
        if "float32" in kinds:
            one, several = (rows["float32"][f"{form}, M = {width}"] for width in widths)
            draft_ms = rows[kind][f"{form}, M = 1"]
            own["gain"] = gain(own["acceptance"], options.num_draft_tokens, draft_ms, several, one)
        rows[kind] |= own
    forms = [f"{form}, M = {width}" for form in ("eager", "compiled") for width in widths]
    line = "{kind} | {MB:.0f} | " + " | ".join(f"{{{form}:.1f}}" for form in forms)
    header = f"weights | MB | {' | '.join(forms)} | acceptance | same argmax | gain"
    line += " | {acceptance:.3f} | {same_argmax:.3f} | {gain:.3f}"
    print(table(header, line, rows.values(), padded=True))
    described = environment(
        device,
        # Of all processes, this one among them.
        load_average=os.getloadavg()[0],
        torchao=version_of("torchao"),
        model=str(options.model),
        layers_timed=options.layers,
        num_draft_tokens=options.num_draft_tokens,
        rounds=options.rounds,
    )
    report = Report(options.out, described, copies=copies)
    report.add(records)
    return report.written


if __name__ == "__main__":
    main()
