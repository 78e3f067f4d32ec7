"""A step of a model that keeps a state of the text, beside transformers' forward of one token.

    python benchmarks/bench_hybrid.py --threads 1 [--models qwen3_5_text jamba] [--batch 1 8] [--out FILE.json]

Random float32 models of 8 layers, hidden size 512, 64 tokens in the cache. The ways take turns; times are medians of
processor time:

transformers   its forward of one token, in its own cache
at once        K + 1 tokens through `HybridModel.forward`
one by one     the same, where modules with states read token after token, as those of an unknown recurrence
economize      only Qwen3.5, and only if the package is installed: its copy of all states, its forward of K + 1 tokens
               and its second forward of those that were accepted. "all accepted" has no second forward
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from markdown_table import table
from timing import Call, Report, environment, options_of, settings_of, spread, take_turns
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from torch_specops.hf import language_model
from torch_specops.hf.hybrid import HybridModel

LENGTH, VOCAB = 64, 4096


def new_model(kind: str, hidden: int, layers: int) -> PreTrainedModel:
    fields: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    fields |= {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096}
    # Three layers with a state for each with attention.
    kinds = ["conv" if kind == "lfm2" else "linear_attention"] * 3 + ["full_attention"]
    fields |= {"layer_types": kinds * (layers // 4)} if kind != "jamba" else {}
    fields |= {
        "qwen3_5_text": {"head_dim": hidden // 8, "linear_num_value_heads": 8, "linear_num_key_heads": 4}
        | {"linear_key_head_dim": hidden // 4, "linear_value_head_dim": hidden // 4},
        "granitemoehybrid": {"shared_intermediate_size": 3 * hidden, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"mamba_n_heads": 16, "mamba_d_head": hidden // 8, "mamba_expand": 2, "mamba_d_state": hidden // 4},
        "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1, "mamba_dt_rank": hidden // 16},
        "lfm2": {},
    }[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields)).float().eval()


def step_of(model: PreTrainedModel, ids: Tensor, positions: Tensor, at_once: bool) -> Call:
    own = language_model(model)
    assert isinstance(own, HybridModel)
    own.expect(positions.shape[1])
    own.start(len(ids), ids.shape[1])
    own.forward(ids[:, :LENGTH], torch.arange(LENGTH).expand(len(ids), -1), 1)
    if not at_once:
        for reader in own._readers.values():
            reader._at_once = reader._read_step = None
    # A step reads its states from the slots of its positions, so it may be repeated.
    return lambda: own.forward(ids[:, LENGTH:], positions)


def economize_step(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, accepted: Tensor
) -> tuple[Call, Callable[[], None]]:
    """A step that commits a token and `accepted` [B] drafts of each row, and what undoes it."""
    from economize.arch import adapter_for
    from economize.runtime import LayerRunner

    runner = LayerRunner(adapter_for(model))
    cache = runner.new_cache(ids.shape[1] + 1, len(ids))
    runner.forward(ids[:, :LENGTH], runner.context(cache, torch.arange(LENGTH).expand(len(ids), -1)))
    begun = cache.snapshot()

    def step() -> Tensor:
        snapshot = cache.snapshot()
        exact = runner.forward(ids[:, LENGTH:], runner.context(cache, positions, trusted=True))
        logits = runner.logits(exact.final)
        runner.replay(cache, snapshot, ids[:, LENGTH:], positions[:, 0], accepted + 1)
        return logits

    return step, lambda: cache.restore(begun)


@torch.inference_mode()
def measure(kind: str, batch: int, options: Any) -> list[dict[str, Any]]:
    model, num_drafts = new_model(kind, options.hidden, options.layers), options.num_draft_tokens
    ids = torch.randint(3, VOCAB, (batch, LENGTH + num_drafts + 1))
    positions = (LENGTH + torch.arange(num_drafts + 1)).expand(batch, -1)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :LENGTH], past_key_values=cache)

    def crop() -> None:
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, :LENGTH], layer.values[:, :, :LENGTH]

    nothing = lambda: None  # noqa: E731
    ways: dict[str, tuple[Call, Callable[[], None]]] = {
        "transformers": (lambda: model(input_ids=ids[:, [LENGTH]], past_key_values=cache).logits, crop),
        "at once": (step_of(model, ids, positions, True), nothing),
        "one by one": (step_of(model, ids, positions, False), nothing),
    }
    if kind == "qwen3_5_text" and importlib.util.find_spec("economize"):
        # Rows accept 0, 1, ... K drafts; a row alone, half of them.
        some = torch.arange(batch) % (num_drafts + 1) if batch > 1 else torch.tensor([num_drafts // 2])
        ways["economize"] = economize_step(model, ids, positions, some)
        ways["economize, all accepted"] = economize_step(model, ids, positions, torch.full((batch,), num_drafts))
    expected = model(input_ids=ids).logits[:, LENGTH:]
    for name, (call, undo) in ways.items():
        found = call()
        undo()
        torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-3, atol=1e-3, msg=f"{kind}: {name}")

    def seconds(call: Call, undo: Callable[[], None], number: int) -> float:
        start = time.process_time()
        call()
        elapsed = time.process_time() - start
        undo()
        return elapsed

    times = take_turns({name: functools.partial(seconds, *way) for name, way in ways.items()}, options.rounds)
    base = statistics.median(times["transformers"])
    described = {"model": kind, "batch": batch, "num_draft_tokens": num_drafts}
    return [
        described | {"way": name} | spread(own, "ms") | {"tokens_of_transformers": statistics.median(own) / base}
        for name, own in times.items()
    ]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=40)
    kinds = ["qwen3_5_text", "granitemoehybrid", "jamba", "lfm2"]
    parser.add_argument("--models", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = Report(options.out, environment(torch.device("cpu")), arguments=settings_of(options))
    for kind in options.models:
        for batch in options.batch:
            report.add(measure(kind, batch, options))
    line = "{model} | {batch} | {way} | {median_ms:.2f} | {tokens_of_transformers:.2f}"
    print(table("model | B | way | ms | forwards of transformers", line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
