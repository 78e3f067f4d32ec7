"""Processors: each is that of transformers, sampled text has the exact law, and wrong loops are caught.

The law is enumerated: every text of up to three tokens goes through transformers' own processors (and through OpenAI's
formula of the presence and frequency penalty), so that the drafts before a position have to count.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from conftest import Report
from tiny_laws import FEWER_TRIALS, LENGTH, PROMPTS, SEED, TARGET, TRIALS, V, filtered, make_draft, p_values
from tiny_laws import prompts as law_prompts
from tiny_models import PairModel
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import step
from torch_specops.decode.step import DecodeState

# Of three kinds of rows. The first mixes penalties, so that the order of biases and penalties shows; the second has
# words and n-grams that prompts and drafts begin; the third may end with token 5, but not at once.
ROWS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.9, "logit_bias": {0: 1.5, 4: -math.inf}},
    {"no_repeat_ngram_size": 2, "bad_words": [[1, 2], [2, 3], [0, 1], [3]], "repetition_penalty": 0.8},
    {"presence_penalty": 1.1, "frequency_penalty": -0.6, "min_new_tokens": 2, "bad_words": [[5], [1, 1, 1]]},
]
EOS = [[], [], [5]]
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "bad_words": [],
}


def batch_params(kinds: list[int], **others: Any) -> SamplingParams:
    """Of a batch with a row for each kind."""
    fields = {name: [(NEUTRAL | ROWS[kind])[name] for kind in kinds] for name in NEUTRAL}
    return SamplingParams(**fields, **others)


def expected_logits(kind: int, prompt: list[int], new: list[int], logits: Tensor) -> Tensor:
    """[V] -> [V], by transformers."""
    row, eos = NEUTRAL | ROWS[kind], EOS[kind]
    ids = torch.tensor([[*prompt, *new]])
    processors = LogitsProcessorList()
    if row["logit_bias"]:
        processors.append(SequenceBiasLogitsProcessor({(t,): float(value) for t, value in row["logit_bias"].items()}))
    if row["repetition_penalty"] != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(row["repetition_penalty"]))
    if row["no_repeat_ngram_size"]:
        processors.append(NoRepeatNGramLogitsProcessor(row["no_repeat_ngram_size"]))
    if row["bad_words"]:
        processors.append(NoBadWordsLogitsProcessor(row["bad_words"], eos))
    if row["min_new_tokens"]:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), row["min_new_tokens"], eos))
    counts = torch.bincount(torch.tensor(new, dtype=torch.int64), minlength=V)
    penalties = row["frequency_penalty"] * counts + row["presence_penalty"] * (counts > 0)
    return processors(ids, logits.unsqueeze(0).clone())[0] - penalties


def exact_law(kind: int, prompt: list[int], temperature: float, **filters: Any) -> Tensor:
    """[V, V, V]; what follows an eos is that eos."""

    def next_law(new: list[int]) -> Tensor:
        if any(token in EOS[kind] for token in new):
            return torch.eye(V, dtype=torch.float64)[new[-1]]
        text = [*prompt, *new]
        logits = expected_logits(kind, prompt, new, TARGET[text[-2], text[-1]]) / temperature
        return filtered(logits.double(), **filters).softmax(-1)

    second = torch.stack([next_law([i]) for i in range(V)])
    third = torch.stack([torch.stack([next_law([i, j]) for j in range(V)]) for i in range(V)])
    return next_law([])[:, None, None] * second[:, :, None] * third


def law_p_values(kind: str, num_draft_tokens: int, trials: int = TRIALS, **options: Any) -> dict[str, float]:
    kinds = [row // 2 % len(ROWS) for row in range(trials)]
    filters = {name: value for name, value in options.items() if name.startswith("top")}
    decoder = SpeculativeDecoder(
        PairModel(TARGET),
        make_draft(kind),
        num_draft_tokens=num_draft_tokens,
        sampling=batch_params(kinds, temperature=0.9, **filters),
        verify=options.get("verify", "exact"),
    )
    input_ids, mask = law_prompts(trials)
    eos = [EOS[kind] for kind in kinds]
    output = decoder.generate(
        input_ids, attention_mask=mask, max_new_tokens=LENGTH, seed=SEED, eos_token_id=eos, pad_token_id=5
    )
    tokens = torch.nn.functional.pad(output.sequences, (0, LENGTH), value=5)
    tokens = tokens.gather(1, output.prompt_lengths.unsqueeze(1) + torch.arange(LENGTH))
    chosen = torch.tensor(kinds)
    return {
        f"rows {index}, {prompt}": value
        for index in range(len(ROWS))
        for prompt, value in p_values(
            tokens[chosen == index], [exact_law(index, prompt, 0.9, **filters) for prompt in PROMPTS]
        ).items()
    }


@pytest.mark.parametrize(
    ("kind", "num_draft_tokens", "options"),
    [
        ("nothing", 1, {"top_k": 3}),
        ("close", 3, {}),
        ("opposite", 2, {"verify": "block"}),
        ("close", 2, {"top_k": 4, "top_p": 0.9}),
        ("prompt lookup", 3, {}),
        ("over prompt lookup", 3, {}),
        ("n-gram with counts", 3, {"top_k": 3}),
    ],
)
def test_sampled_text_has_the_law(kind: str, num_draft_tokens: int, options: dict[str, Any], report: Report) -> None:
    found = law_p_values(kind, num_draft_tokens, **options)
    expect_laws(report, f"processors, {kind} draft, K = {num_draft_tokens}, {options}", found)


def wrongly_processed(shift: int, state: DecodeState, drafts: Tensor, target_logits: Tensor) -> Tensor:
    """Each position sees the prefix alone (shift = 0), or one draft more than come before it (1)."""
    lengths = state.lengths.unsqueeze(1) + torch.zeros(drafts.shape[1] + 1, dtype=torch.int64)
    if shift:
        lengths = lengths + (torch.arange(drafts.shape[1] + 1) + shift).clamp(max=drafts.shape[1])
    places = state.lengths.unsqueeze(1) + torch.arange(drafts.shape[1])
    return state.sampling.process(target_logits, state.tokens.scatter(1, places, drafts.clamp(min=0)), lengths)


@pytest.mark.parametrize(("wrong", "shift"), [("forgets the drafts", 0), ("sees the draft that it judges", 1)])
@pytest.mark.parametrize("kind", ["close", "opposite"])
def test_a_wrong_loop_is_caught(
    kind: str, wrong: str, shift: int, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_processed", lambda *arguments: wrongly_processed(shift, *arguments))
    expect_caught(report, f"processors, a loop that {wrong}, {kind} draft", law_p_values(kind, 2, FEWER_TRIALS))
