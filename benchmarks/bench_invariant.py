"""Whether `invariant=True` gives the same bits, and what it costs.

    python benchmarks/bench_invariant.py --threads 1 [--only bits] [--dtypes float32] [--out FILE.json]

"bits" (`--tokens`, 100,000 for each dtype): all logits of random models of every family, read in ragged pieces of 1, 2,
3, 5 and 7 tokens by batches of 16, beside `invariant_forward` over whole texts of 640 tokens; the same with SmolLM2
(`--smollm2-tokens`); then texts of the byte-level pair with verify="gumbel", by drafts and batches, beside those
without a draft, and their log-probabilities beside `invariant_forward`. A difference ends the script with exit code 1.
What some of these ways change without the option is measured too.

"cost": SmolLM2 and the byte-level pair with and without, in turns. Forwards of K + 1 tokens after contexts of 100 and
1,500 tokens; and whole calls of 64 new tokens, of SmolLM2 with prompt lookup, of the pair with its draft. Medians of
the time of the thread, or with several threads of the clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.resources import files
from itertools import cycle, product
from typing import Any

import torch
from markdown_table import table
from timing import Report, environment, options_of, settings_of, spread, take_turns
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from torch_specops import Request, SamplingParams, SpeculativeDecoder, invariant_forward, raw_logprobs
from torch_specops.cli.loading import smollm2_directory
from torch_specops.drafts import AnyDraft, PromptLookup
from torch_specops.hf import language_model
from torch_specops.hf.invariant import FAMILIES

PIECES = (1, 2, 3, 5, 7)
BATCH, LENGTH, VOCAB = 16, 640, 199
SIZES: dict[str, Any] = {"hidden_size": 72, "intermediate_size": 148, "num_hidden_layers": 2, "num_attention_heads": 4}
# In bfloat16 transformers' own product of experts takes multiples of 8 alone.
MIXTURE: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "intermediate_size": 152}
EXPERTS: dict[str, Any] = {"num_experts": 16, "moe_intermediate_size": 40}
# Windows that are shorter than the texts.
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 72, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "opt": SIZES | {"ffn_dim": 148, "word_embed_proj_dim": 72},
    "mistral": SIZES | {"num_key_value_heads": 2, "sliding_window": 60},
    "gemma": SIZES | {"num_key_value_heads": 1, "head_dim": 32},
    "gemma3_text": SIZES | {"num_key_value_heads": 2, "head_dim": 18, "sliding_window": 33},
    "phi": SIZES | {"partial_rotary_factor": 1.0},
    "gpt_neox": SIZES,
    "granitemoe": MIXTURE | {"num_experts_per_tok": 3},
    "mixtral": MIXTURE,
    "olmoe": MIXTURE | {"num_experts": 16},
    "qwen2_moe": MIXTURE | EXPERTS | {"shared_expert_intermediate_size": 148},
    "qwen3_moe": MIXTURE | EXPERTS | {"head_dim": 18},
}
SAMPLING = SamplingParams(temperature=1.0, top_p=0.95)
Record = dict[str, Any]
# The new tokens of each prompt, and their log-probabilities.
Texts = dict[int, tuple[list[int], Tensor]]


def family_model(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    fields = OWN.get(kind, SIZES | {"num_key_value_heads": 2})
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CONFIG_MAPPING[kind](vocab_size=VOCAB, max_position_embeddings=LENGTH, **fields, **ends)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        # As sharp as a trained model.
        weight.data.mul_(4.0 if weight.dim() > 1 else 1.0)
    return model.to(dtype)


def shipped(name: str, dtype: torch.dtype) -> PreTrainedModel:
    folder = smollm2_directory() if name == "smollm2" else files("torch_specops") / "data" / "austen_bytes" / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def compare_logits(model: PreTrainedModel, rows: Tensor, invariant: bool = True) -> tuple[int, int]:
    """The numbers of tokens, and of logits with other bits in ragged pieces than in forwards over whole texts."""
    batch, length = rows.shape
    adapter = language_model(model, invariant=invariant)
    forward = invariant_forward(model) if invariant else model
    adapter.expect(length)
    adapter.start(batch, length)
    adapter.begin_texts(torch.full((batch,), length))
    # Texts of three at a time.
    whole = torch.cat([forward(part).logits for part in rows.split(3)])
    # Row b begins b tokens earlier, so rows are at different places.
    ends, differ = -torch.arange(batch), 0
    for size in cycle(PIECES):
        positions = (ends.unsqueeze(1) + torch.arange(size)).clamp(0, length - 1)
        # A clamped position repeats its token, as the loop's padding does.
        found = adapter.forward(rows.gather(1, positions), positions)
        differ += int((found != whole[torch.arange(batch).unsqueeze(1), positions]).sum())
        ends = ends + size
        if int(ends.min()) >= length:
            break
    return rows.numel(), differ


def bits_of_families(dtype: torch.dtype, options: Any) -> Iterator[Record]:
    each = -(-options.tokens // (len(FAMILIES) * LENGTH))
    for kind in sorted(FAMILIES):
        model = family_model(kind, dtype)
        rows = torch.randint(3, VOCAB, (each, LENGTH), generator=torch.Generator().manual_seed(1))
        found = [compare_logits(model, part) for part in rows.split(BATCH)]
        yield {
            "what": kind,
            "invariant": True,
            "tokens": sum(n for n, _ in found),
            "other_bits": sum(bits for _, bits in found),
        }
    if options.smollm2_tokens > 0:
        model, size = shipped("smollm2", dtype), min(options.smollm2_tokens, LENGTH)
        rows = torch.randint(
            3, 40000, (options.smollm2_tokens // size, size), generator=torch.Generator().manual_seed(1)
        )
        tokens, bits = compare_logits(model, rows)
        yield {"what": "SmolLM2-135M", "invariant": True, "tokens": tokens, "other_bits": bits}


def bits_of_texts(dtype: torch.dtype, options: Any) -> Iterator[Record]:
    """Texts of the byte-level pair, by ways to decode them; some ways without `invariant` too."""
    target, draft = (shipped(name, dtype) for name in ("target", "draft"))
    text = b"".join((files("torch_specops") / "ops" / f"{name}.py").read_bytes() for name in ("api", "uniforms"))
    prompts = [list(text[97 * i : 97 * i + 3 + 37 * i % 61]) for i in range(options.prompts)]
    order = list(range(options.prompts))

    def decode(invariant: bool, source: AnyDraft, k: int, size: int, order: list[int]) -> Texts:
        settings: dict[str, Any] = {
            "num_draft_tokens": k,
            "sampling": SAMPLING,
            "compile": False,
            "invariant": invariant,
        }
        decoder = SpeculativeDecoder(target, source, verify="gumbel", **settings)
        requests = [Request(prompts[i], options.new_tokens, seed=torch.tensor([i])) for i in order]
        found = {}
        for each in decoder.generate_many(requests, batch_size=size, logprobs="raw"):
            found[order[each.index]] = each.new_tokens.tolist(), each.logprobs
        return found

    @torch.no_grad()
    def forward(invariant: bool) -> Texts:
        found, run = {}, invariant_forward(target) if invariant else target
        for i, (own, _) in base.items():
            ids = torch.tensor([prompts[i] + own])
            logprobs = raw_logprobs(run(ids).logits[:, :-1], ids[:, 1:])[0]
            found[i] = own, logprobs[len(prompts[i]) - 1 :]
        return found

    for invariant in (True, False):
        base = decode(invariant, None, 1, 32, order)
        ways: dict[str, Callable[[], Texts]] = {
            "a trainer's forward": partial(forward, invariant),
            "its draft, K = 4, B = 8": partial(decode, invariant, draft, 4, 8, order),
            "prompt lookup, B = 8": partial(decode, invariant, PromptLookup(), 5, 8, order),
        }
        for k in (1, 2, 3, 6) if invariant else ():
            own = partial(decode, invariant, draft, k, 8 - k, order[::-1][:: k % 3 + 1])
            ways[f"its draft, K = {k}, B = {8 - k}"] = own
        for name, way in ways.items():
            found, others, bits, tokens, largest = way(), 0, 0, 0, 0.0
            for i, (own, logprobs) in found.items():
                wanted, expected = base[i]
                same = next((n for n, pair in enumerate(zip(own, wanted, strict=True)) if pair[0] != pair[1]), len(own))
                others += same < len(own)
                # Log-probabilities are compared where the texts so far are the same.
                tokens += same
                bits += int((logprobs[:same] != expected[:same]).sum())
                largest = max([largest, *(logprobs[:same] - expected[:same]).abs().tolist()])
            counts = {"texts": len(found), "other_texts": others, "other_bits": bits, "largest_difference": largest}
            yield {"what": f"byte-level pair, {name}", "invariant": invariant, "tokens": tokens} | counts


def cost(dtype: torch.dtype, options: Any) -> Iterator[Record]:
    clock = time.thread_time if options.threads == 1 else time.perf_counter

    def seconds(call: Callable[[], object], number: int) -> float:
        start = clock()
        call()
        return clock() - start

    def record(ways: Mapping[bool, Callable[[], object]], rounds: int, **what: Any) -> Record:
        times = take_turns({way: partial(seconds, call) for way, call in ways.items()}, rounds)
        plain, ours = (statistics.median(times[way]) for way in (False, True))
        own = spread(times[False], "ms", "plain") | spread(times[True], "ms", "invariant")
        return {**what, "ratio": ours / plain, "ratio_of_minima": min(times[True]) / min(times[False])} | own

    for name, batch in product(options.models, options.batch):
        model = shipped("target" if name == "bytes" else name, dtype)
        vocab = model.config.vocab_size
        tokens = torch.randint(3, vocab, (batch, 1510), generator=torch.Generator().manual_seed(0))
        most = max(options.num_draft_tokens)
        for context in options.contexts:
            if context + most >= model.config.max_position_embeddings:
                continue
            with torch.inference_mode():
                adapters = {invariant: language_model(model, invariant=invariant) for invariant in (False, True)}
                places = torch.arange(context + most + 1).expand(batch, -1)
                for adapter in adapters.values():
                    adapter.start(batch, context + most + 1)
                    adapter.begin_texts(torch.full((batch,), context))
                    adapter.forward(tokens[:, :context], places[:, :context], 1)
                for k in options.num_draft_tokens:
                    new = slice(context, context + k + 1)
                    ways = {
                        invariant: partial(adapter.forward, tokens[:, new], places[:, new])
                        for invariant, adapter in adapters.items()
                    }
                    what = {"what": f"{name}: a forward", "batch": batch, "k": k, "context": context}
                    yield record(ways, options.rounds, **what)
        # They repeat themselves, so that prompt lookup drafts.
        prompts = [row[:16].tolist() * 4 for row in tokens]
        for k in options.num_draft_tokens:
            source = None if k == 0 else PromptLookup() if name == "smollm2" else shipped("draft", dtype)
            calls = {}
            for invariant in (False, True):
                settings: dict[str, Any] = {"num_draft_tokens": max(k, 1), "schedule": "constant", "compile": False}
                decoder = SpeculativeDecoder(model, source, verify="gumbel", invariant=invariant, **settings)
                asked = {"max_new_tokens": options.new_tokens_timed, "seed": 0, "eos_token_id": ()}
                calls[invariant] = partial(decoder.generate, prompts, **asked)
            what = {"what": f"{name}: a call", "batch": batch, "k": k, "context": 64}
            yield record(calls, max(options.rounds // 4, 3), **what)


def main(arguments: list[str] | None = None) -> list[Record]:
    parser = options_of(__doc__, rounds=20)
    parser.add_argument("--only", choices=["bits", "cost"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=100_000, help="of all families together, for each dtype")
    parser.add_argument("--smollm2-tokens", type=int, default=2560, help="0 = none")
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each prompt")
    parser.add_argument("--models", nargs="+", default=["bytes", "smollm2"], choices=["bytes", "smollm2"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[0, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1500])
    parser.add_argument("--new-tokens-timed", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report = Report(options.out, environment(torch.device("cpu")), arguments=settings_of(options))
    for name in options.dtypes:
        dtype = getattr(torch, name)
        parts = {"bits": (bits_of_families, bits_of_texts), "cost": (cost,)}
        for part in [part for key, own in parts.items() if options.only in (None, key) for part in own]:
            for each in part(dtype, options):
                report.add([{"dtype": name} | each])
                print(", ".join(f"{key} {value}" for key, value in report.records[-1].items()), file=sys.stderr)
    bits = [each for each in report.records if "other_bits" in each]
    line = "{dtype} | {what} | {invariant} | {tokens} | {other_texts} | {other_bits} | {largest_difference:.1e}"
    print(table("dtype | | invariant | tokens | other texts | other bits | largest difference", line, bits))
    costs = [each for each in report.records if "ratio" in each]
    line = (
        "{dtype} | {what} | {batch} | {k} | {context} | {plain_median_ms:.1f} | {invariant_median_ms:.1f} | {ratio:.2f}"
    )
    print(table("dtype | | B | K | context | plain ms | invariant ms | ratio", line, costs))
    if any(each["other_bits"] or each.get("other_texts") for each in bits if each["invariant"]):
        raise SystemExit("invariant: bits differ")
    return report.records


if __name__ == "__main__":
    main()
