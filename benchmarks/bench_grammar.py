"""Structured output: the loop with a JSON schema beside transformers, and what grammars cost a step.

    python benchmarks/bench_grammar.py --threads 2 [--target smollm2-135m-instruct] [--out FILE.json]

Greedy, one prompt at a time. Compared are

- transformers' `generate` with xgrammar's processor and the schema;
- the loop with each draft, and with no grammar, with one that allows any text (the same text as without: what a
  grammar costs a step), with the schema in xgrammar, and in llguidance;
- the schema where nothing is drafted because a grammar forces it ("no jump").

They take turns. `mask_us` is the time of asking the grammar in a step, `apply_us` that of applying its masks,
`library_us` that inside xgrammar or llguidance, most of it a part of `mask_us`; they are per row and step, and parts of
`step_ms`. `mask_bytes` are written to the host's memory for a row and step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest import mock

import llguidance
import llguidance.hf
import torch
import xgrammar
from markdown_table import table
from rich.console import Console
from timing import Report, environment, options_of
from torch import Tensor
from xgrammar.contrib.hf import LogitsProcessor

from torch_specops import Grammar, SamplingParams, SpeculativeDecoder, grammars
from torch_specops.cli.models import load_models
from torch_specops.decode import batch, grammar, step
from torch_specops.drafts import PromptLookup, SuffixLookup

PEOPLE = [
    "Alice Smith is 42 years old, lives in Paris, and likes chess and green tea.",
    "Maria Garcia, aged 61, moved to Lisbon last year; she paints and plays the piano.",
    "Our newest member is Tom Brown from Dublin, 19 years old, a friend of football and computer games.",
]
EXAMPLE = {"name": "Eva Lang", "age": 35, "city": "Vienna", "interests": ["opera", "hiking"], "kind": "person"}
TEXT = {"type": "string", "maxLength": 30}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": TEXT,
        "interests": {"type": "array", "items": TEXT, "maxItems": 4},
        "kind": {"enum": ["person", "place", "organisation"]},
    },
    "required": ["name", "age", "city", "interests", "kind"],
    "additionalProperties": False,
}
DRAFTS: dict[str, Callable[[], Any]] = {
    "no draft": lambda: None,
    "prompt lookup": PromptLookup,
    "suffix lookup": lambda: SuffixLookup(memory=0),
}
ANY_TEXT = r"[\s\S]*"
METHODS = ("fill_bitmask", "accept", "rollback")
NewGrammar = Callable[[], Grammar | None]


class Timed:
    """The time of a function's calls, and the bytes of the bitmasks that it returned."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds, self.bytes = function, 0.0, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        found = self.function(*arguments, **options)
        self.seconds += time.perf_counter() - started
        self.bytes += found[1].nbytes if isinstance(found, tuple) else 0
        return found


@dataclass
class Way:
    """One of the ways to generate, and what its rounds took: seconds in all, and per step of the loop, of asking
    grammars, of applying masks and inside the grammars' library."""

    run: Callable[[list[int], Timed], tuple[list[int], int]]
    rounds: list[tuple[float, ...]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    steps: int = 0
    bytes: float = 0.0

    def round(self, prompts: list[list[int]]) -> None:
        asked, applied, called = Timed(grammar.masks_of), Timed(grammars.allowed_logits), Timed(call)
        started = time.perf_counter()
        with mock.patch.object(batch, "masks_of", asked), mock.patch.object(step, "allowed_logits", applied):
            found = [self.run(prompt, called) for prompt in prompts]
        seconds = time.perf_counter() - started
        self.texts, self.steps = [text for text, _ in found], sum(steps for _, steps in found)
        parts = seconds, asked.seconds, applied.seconds, called.seconds
        self.rounds.append((seconds, *(part / self.steps for part in parts)))
        self.bytes = asked.bytes / self.steps


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def with_transformers(model: Any, schema: Any, options: Any, prompt: list[int], _: Timed) -> tuple[list[int], int]:
    ids = torch.tensor([prompt])
    how = {"do_sample": False, "logits_processor": [LogitsProcessor(schema)]}
    output: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **how, **options)
    new = output[0, len(prompt) :].tolist()
    return new, len(new)


class TimedGrammar(SimpleNamespace):
    """The methods of a grammar, timed. The loop refers to it weakly, which a namespace itself does not allow."""


def with_loop(
    decoder: SpeculativeDecoder,
    new_grammar: NewGrammar,
    options: dict[str, Any],
    jumps: bool,
    prompt: list[int],
    called: Timed,
) -> tuple[list[int], int]:
    own: Any = new_grammar()
    if own is not None:
        own = TimedGrammar(**{name: partial(called, getattr(own, name)) for name in METHODS})
    with nullcontext() if jumps else mock.patch.object(grammar._Walk, "_only_token", return_value=-1):
        output = decoder.generate(torch.tensor([prompt]), grammar=own, **options)
    return output.new_tokens(0), output.stats.num_steps


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=len(PEOPLE))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    models, tokenizer = load_models(Console(), chosen.target, "prompt-lookup", torch.device("cpu"))
    eos, vocab_size = tokenizer.eos_token_id or 0, models.target.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info)
    schema, any_text = compiler.compile_json_schema(json.dumps(SCHEMA)), compiler.compile_regex(ANY_TEXT)
    own_tokenizer = llguidance.hf.from_tokenizer(tokenizer, eos_token=eos)
    own_schema = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
    in_grammars: dict[str, NewGrammar] = {
        "none": lambda: None,
        "any text": lambda: grammars.xgrammar(any_text),
        "xgrammar": lambda: grammars.xgrammar(schema),
        "llguidance": lambda: grammars.llguidance(own_tokenizer, own_schema),
        "llguidance, no jump": lambda: grammars.llguidance(own_tokenizer, own_schema),
    }
    options: dict[str, Any] = {"max_new_tokens": chosen.new_tokens, "eos_token_id": eos}
    model: Any = models.target.model
    ways = {("transformers", "xgrammar"): Way(partial(with_transformers, model, schema, options))}
    for draft, make in DRAFTS.items():
        greedy, count = SamplingParams(temperature=0.0), chosen.num_draft_tokens
        decoder = SpeculativeDecoder(
            models.target, make(), num_draft_tokens=count, schedule="constant", sampling=greedy, compile=False
        )
        for name, new_grammar in in_grammars.items():
            ways[draft, name] = Way(partial(with_loop, decoder, new_grammar, options, "no jump" not in name))
    question = f"Write as JSON: who, age, city, interests. For example: {json.dumps(EXAMPLE)}\n\n"
    prompts = [tokenizer(question + text + "\n\nJSON: ")["input_ids"] for text in PEOPLE[: chosen.prompts]]
    for index in range(-1, chosen.rounds):
        for way in ways.values():
            way.round(prompts)
            if index < 0:
                # The first round warms up.
                way.rounds.clear()
    versions = {name: metadata.version(name) for name in ("xgrammar", "llguidance")}
    report = Report(chosen.out, environment(torch.device("cpu"), **versions), vocab_size=vocab_size)
    report.add(record_of(key, way, ways, tokenizer) for key, way in ways.items())
    line = "{draft} | {grammar} | {tokens_per_second:.1f} | {tokens_per_step:.2f} | {step_ms:.2f} | {mask_us:.0f} | "
    line += "{library_us:.0f} | {apply_us:.0f} | {mask_bytes:.0f} | {valid}"
    header = "draft | grammar | tokens/s | tokens per step | ms per step | asking, us | library, us | applying, us | "
    header += "bytes | valid"
    print(table(header, line, report.records, padded=True))
    return report.records


def record_of(key: tuple[str, str], way: Way, ways: dict[tuple[str, str], Way], tokenizer: Any) -> dict[str, Any]:
    num_tokens, plain = sum(map(len, way.texts)), ways.get((key[0], "none"), way)
    seconds, per_step, asking, applying, inside = zip(*way.rounds, strict=True)
    return {
        "draft": key[0],
        "grammar": key[1],
        "seconds": seconds,
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / statistics.median(seconds),
        "tokens_per_step": num_tokens / way.steps,
        "step_ms": 1e3 * statistics.median(per_step),
        # Of each round against the same round without a grammar.
        "step_time_to_none": [own / other[1] for own, other in zip(per_step, plain.rounds, strict=True)],
        "mask_us": 1e6 * statistics.median(asking),
        "apply_us": 1e6 * statistics.median(applying),
        "library_us": 1e6 * statistics.median(inside),
        "mask_bytes": way.bytes,
        "valid": sum(map(is_valid, map(tokenizer.decode, way.texts))),
        "same_text_as_transformers": way.texts == ways["transformers", "xgrammar"].texts,
    }


def is_valid(text: str) -> bool:
    """Whether a text is JSON with the keys of the schema; one that is cut by the limit is not."""
    for end in ("</s>", "<|im_end|>", "<|endoftext|>", "\x00"):
        text = text.removesuffix(end)
    try:
        return set(json.loads(text)) == set(SCHEMA["properties"])
    except (ValueError, TypeError):
        return False


if __name__ == "__main__":
    main()
