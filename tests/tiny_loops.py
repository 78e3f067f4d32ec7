"""The decoding loop over the tiny models: drafts of every kind, and what greedy decoding has to return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import PROMPTS, VOCAB, encoder_inputs, greedy_rows, padded, perturbed, shared_tiny
from torch import nn

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import GenerationOutput, Step
from torch_specops.drafts import DraftSource, PromptLookup
from torch_specops.drafts.ngram import NGram
from torch_specops.schedules import Constant, Schedule

GREEDY = SamplingParams(temperature=0.0)
LENGTH = 20
DRAFTS = ["nothing", "prompt lookup", "n-gram", "n-gram with counts", "itself", "perturbed", "stranger"]


def make_draft(name: str, family: str = "llama") -> DraftSource | nn.Module | None:
    model = shared_tiny(family)
    if name == "nothing":
        return None
    if name == "prompt lookup":
        return PromptLookup(min_ngram=1)
    if name.startswith("n-gram"):
        rows = greedy_rows(family, LENGTH)
        texts = [torch.tensor([*prompt, *row]) for prompt, row in zip(PROMPTS, rows, strict=True)]
        # A bigram table of the expected text guesses right often, but not always.
        return NGram.from_tokens(texts, vocab_size=VOCAB, order=2, probabilities=name != "n-gram")
    if name == "perturbed":
        return perturbed(model)
    return model if name == "itself" else shared_tiny(family, seed=3)


def decode(
    draft: DraftSource | nn.Module | None,
    num_draft_tokens: int,
    *,
    family: str = "llama",
    prompts: Sequence[Sequence[int]] = PROMPTS,
    side: str = "left",
    sampling: SamplingParams = GREEDY,
    schedule: str | Schedule = "constant",
    **arguments: Any,
) -> GenerationOutput:
    decoder = SpeculativeDecoder(
        shared_tiny(family),
        draft,
        num_draft_tokens=max(num_draft_tokens, 1),
        schedule=Constant(0) if num_draft_tokens == 0 else schedule,
        sampling=sampling,
    )
    input_ids, attention_mask = padded(prompts, side)
    defaults = {"max_new_tokens": LENGTH, "inputs": encoder_inputs(family)}
    return decoder.generate(input_ids, attention_mask=attention_mask, **(defaults | arguments))


def steps_of(
    draft: DraftSource | str, num_draft_tokens: int, schedule: str | Schedule = "constant", **arguments: Any
) -> tuple[list[Step], GenerationOutput]:
    source = make_draft(draft) if isinstance(draft, str) else draft
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), source, num_draft_tokens=num_draft_tokens, schedule=schedule, sampling=GREEDY
    )
    input_ids, mask = padded(PROMPTS, "left")
    steps = list(decoder.stream(input_ids, attention_mask=mask, **({"max_new_tokens": LENGTH} | arguments)))
    return steps, decoder.output()


def new_tokens(output: GenerationOutput) -> list[list[int]]:
    return [output.new_tokens(row) for row in range(len(output.lengths))]


def streamed(steps: Sequence[Step], num_rows: int = 3) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens[row]] for row in range(num_rows)]


def expected_rows(length: int = LENGTH, family: str = "llama") -> list[list[int]]:
    return [list(row) for row in greedy_rows(family, length)]


def cut(rows: Sequence[Sequence[int]], eos: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each row up to the first of its eos tokens."""
    ends = [[row.index(token) for token in own if token in row] for row, own in zip(rows, eos, strict=True)]
    return [list(row[: min(end) + 1] if end else row) for row, end in zip(rows, ends, strict=True)]
