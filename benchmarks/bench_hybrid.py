"""A step of a model that keeps a state of the text, beside transformers' forward of one token.

    python benchmarks/bench_hybrid.py --threads 1 [--models qwen3_5_text jamba] [--batch 1 8] [--out FILE.json]

Random float32 models of 8 layers, hidden size 512, 64 tokens in the cache. The ways take turns; times are medians of
processor time:

transformers   its forward of one token, in its own cache
at once        K + 1 tokens through `HybridModel.forward`
one by one     the same, where modules with states read token after token, as those of an unknown recurrence
economize      Qwen3.5 only, if the package is installed: its copy of all states, its forward of K + 1 tokens and its
               second forward of those that rows with a rejected draft keep. If all are accepted it has none
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from functools import partial
from itertools import product
from typing import Any

import torch
from markdown_table import table
from peers import economize_step
from timing import Call, Report, environment, options_of, settings_of, spread, take_turns
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from torch_specops.hf import language_model
from torch_specops.hf.cache import cache_argument
from torch_specops.hf.hybrid import HybridModel

LENGTH, VOCAB = 64, 4096


def new_model(kind: str, hidden: int, layers: int) -> PreTrainedModel:
    fields: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    fields |= {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 4096}
    # Three layers with a state for each with attention.
    kinds = ["conv" if kind == "lfm2" else "linear_attention"] * 3 + ["full_attention"]
    fields |= {} if kind == "jamba" else {"layer_types": kinds * (layers // 4)}
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
    for reader in () if at_once else own._readers.values():
        reader._at_once = reader._read_step = None
    # A step reads its states from the slots of its positions, so it may be repeated.
    return lambda: own.forward(ids[:, LENGTH:], positions)


@torch.inference_mode()
def measure(kind: str, batch: int, options: Any) -> list[dict[str, Any]]:
    model, num_drafts = new_model(kind, options.hidden, options.layers), options.num_draft_tokens
    ids = torch.randint(3, VOCAB, (batch, LENGTH + num_drafts + 1))
    positions = torch.arange(LENGTH, ids.shape[1]).expand(batch, -1)
    cache = DynamicCache(config=model.config)
    cached = {cache_argument(model.forward): cache}
    model(input_ids=ids[:, :LENGTH], **cached)

    def crop() -> None:
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, :LENGTH], layer.values[:, :, :LENGTH]

    # Each with what undoes it, which is not timed.
    ways: dict[str, tuple[Call, Call]] = {
        "transformers": (lambda: model(input_ids=ids[:, [LENGTH]], **cached).logits, crop),
        "at once": (step_of(model, ids, positions, True), int),
        "one by one": (step_of(model, ids, positions, False), int),
    }
    if kind == "qwen3_5_text" and importlib.util.find_spec("economize"):
        # Rows accept 0, 1, ... K drafts; a row alone, half of them.
        some = torch.arange(batch) % (num_drafts + 1) if batch > 1 else torch.tensor([num_drafts // 2])
        for name, accepted in {"economize": some, "economize, all accepted": torch.full_like(some, num_drafts)}.items():
            ways[name] = economize_step(model, ids, positions, accepted)
    expected = model(input_ids=ids).logits[:, LENGTH:]
    for name, (call, undo) in ways.items():
        found = call()
        undo()
        torch.testing.assert_close(found, expected[:, : found.shape[1]], rtol=1e-3, atol=1e-3, msg=f"{kind}: {name}")

    def seconds(call: Call, undo: Call, number: int) -> float:
        start = time.process_time()
        call()
        elapsed = time.process_time() - start
        undo()
        return elapsed

    times = take_turns({name: partial(seconds, *way) for name, way in ways.items()}, options.rounds)
    base = statistics.median(times["transformers"])
    records = [{"model": kind, "batch": batch, "way": name} | spread(own, "ms") for name, own in times.items()]
    return [each | {"forwards_of_transformers": each["median_ms"] * 1e-3 / base} for each in records]


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
    for kind, batch in product(options.models, options.batch):
        report.add(measure(kind, batch, options))
    line = "{model} | {batch} | {way} | {median_ms:.2f} | {forwards_of_transformers:.2f}"
    print(table("model | B | way | ms | forwards of transformers", line, report.records, padded=True))
    return report.records


if __name__ == "__main__":
    main()
