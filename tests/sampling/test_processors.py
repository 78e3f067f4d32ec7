"""Processors: each is that of transformers, sampled text has the exact law, and wrong loops are caught.

The law is enumerated: every text of up to three tokens goes through transformers' own processors (and through OpenAI's
formula of the presence and frequency penalty), so that the drafts before a position have to count.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from marks import slow
from report import Report
from tiny_laws import FEWER_TRIALS, LENGTH, PROMPTS, SEED, TARGET, TRIALS, V, filtered, joint_law, make_draft, p_values
from tiny_laws import prompts as law_prompts
from tiny_loops import DRAFTS
from tiny_models import VOCAB, PairModel, TracedPairs, padded, raised, random_table, shared_tiny
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.decode import step
from torch_specops.decode.state import DecodeState
from torch_specops.drafts import ModelDraft, PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft

# Three kinds of rows. The first mixes penalties, so that the order of biases and penalties shows; the second has
# words and n-grams that prompts and drafts begin; the third may end with token 5, but not at once.
ROWS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.9, "logit_bias": {0: 1.5, 4: -math.inf}},
    {"no_repeat_ngram_size": 2, "bad_words": [[1, 2], [2, 3], [0, 1], [3]], "repetition_penalty": 0.8},
    {"presence_penalty": 1.1, "frequency_penalty": -0.6, "min_new_tokens": 2, "bad_words": [[5], [1, 1, 1]]},
]
EOS = [[], [], [5]]
NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
NEUTRAL |= {"no_repeat_ngram_size": 0, "min_new_tokens": 0, "logit_bias": None, "bad_words": []}


def batch_params(kinds: list[int], **others: Any) -> SamplingParams:
    """The parameters of a batch with a row for each kind."""
    fields = {name: [(NEUTRAL | ROWS[kind])[name] for kind in kinds] for name in NEUTRAL}
    return SamplingParams(**fields, **others)


def expected_logits(row: dict[str, Any], eos: list[int], prompt: list[int], new: list[int], logits: Tensor) -> Tensor:
    """[V] -> [V], by transformers. For bad words another token comes before the text, because transformers 5.17 ignores
    words that are longer than the text."""
    row = NEUTRAL | row
    ids = torch.tensor([[*prompt, *new]])
    processors = LogitsProcessorList()
    if row["logit_bias"]:
        processors.append(SequenceBiasLogitsProcessor({(t,): float(value) for t, value in row["logit_bias"].items()}))
    if row["repetition_penalty"] != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(row["repetition_penalty"]))
    if row["no_repeat_ngram_size"]:
        processors.append(NoRepeatNGramLogitsProcessor(row["no_repeat_ngram_size"]))
    if row["bad_words"]:
        words = NoBadWordsLogitsProcessor(row["bad_words"], eos)
        processors.append(lambda ids, scores: words(torch.nn.functional.pad(ids, (1, 0), value=V - 1), scores))
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
        logits = expected_logits(ROWS[kind], EOS[kind], prompt, new, TARGET[text[-2], text[-1]]) / temperature
        return filtered(logits.double(), **filters).softmax(-1)

    return joint_law(next_law)


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
    draws = {"seed": SEED, "eos_token_id": [EOS[kind] for kind in kinds], "pad_token_id": 5}
    output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH, **draws)
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
        slow("nothing", 1, {"top_k": 3}),
        ("close", 3, {}),
        ("opposite", 2, {"verify": "block"}),
        slow("close", 2, {"top_k": 4, "top_p": 0.9}),
        ("prompt lookup", 3, {}),
        slow("over prompt lookup", 3, {}),
        slow("n-gram with counts", 3, {"top_k": 3}),
    ],
)
def test_sampled_text_has_the_law(kind: str, num_draft_tokens: int, options: dict[str, Any], report: Report) -> None:
    found = law_p_values(kind, num_draft_tokens, **options)
    expect_laws(report, f"processors, {kind} draft, K = {num_draft_tokens}, {options}", found)


def wrongly_processed(shift: int, state: DecodeState, drafts: Tensor, target_logits: Tensor, _: object) -> Tensor:
    """Each position sees the prefix alone (shift = 0), or one draft more than come before it (1)."""
    lengths = state.lengths.unsqueeze(1) + torch.zeros(drafts.shape[1] + 1, dtype=torch.int64)
    if shift:
        lengths = lengths + (torch.arange(drafts.shape[1] + 1) + shift).clamp(max=drafts.shape[1])
    places = state.lengths.unsqueeze(1) + torch.arange(drafts.shape[1])
    return state.sampling.process(target_logits, state.tokens.scatter(1, places, drafts.clamp(min=0)), lengths)


@pytest.mark.parametrize(
    ("kind", "wrong", "shift"),
    [("close", "forgets the drafts", 0), ("opposite", "sees the draft that it judges", 1)],
)
def test_a_wrong_loop_is_caught(
    kind: str, wrong: str, shift: int, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_processed", lambda *arguments: wrongly_processed(shift, *arguments))
    expect_caught(report, f"processors, a loop that {wrong}, {kind} draft", law_p_values(kind, 2, FEWER_TRIALS))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_like_the_target_is_accepted(temperature: float) -> None:
    """Only if it is processed as the target is, with its own drafts in the text."""
    kinds = [row % len(ROWS) for row in range(60)]
    input_ids, mask = law_prompts(60)
    draws = {"seed": 3, "eos_token_id": [EOS[kind] for kind in kinds], "pad_token_id": 5}
    for draft in (ModelDraft(PairModel(TARGET)), HierarchicalDraft(PairModel(TARGET), PromptLookup(min_ngram=1))):
        sampling = batch_params(kinds, temperature=temperature)
        decoder = SpeculativeDecoder(PairModel(TARGET), draft, num_draft_tokens=3, sampling=sampling)
        output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=5, **draws)
        assert output.stats.acceptance_rate > 0.999, type(draft)


def test_random_texts_as_transformers_has_them() -> None:
    """Sizes that the tables above do not have, in rows that differ, over texts shorter and longer than they are."""
    generator = torch.Generator().manual_seed(0)
    fields: dict[str, list[Any]] = {
        "no_repeat_ngram_size": [],
        "bad_words": [[[1, 0, 2], [3]], [[0, 1]], [], [[2, 2, 2, 2, 1], [4, 0]], [[0]]],
        "logit_bias": [{0: 1.5}, {}, {3: -0.5, 1: 2.0}, {}, {2: -math.inf}],
        "repetition_penalty": [1.2, 1.0, 0.7, 3.0, 1.0],
    }
    # The longer n-grams come in texts of two tokens.
    for width, sizes in product((1, 2, 3, 8, 13, 30), ([1, 2, 3, 5, 0], [4, 6, 7, 9, 10**12])):
        fields["no_repeat_ngram_size"] = sizes
        text = torch.randint(0, V - 1 if 0 in sizes else 2, (5, 30), generator=generator)
        lengths = torch.stack([torch.full((5,), width), torch.randint(1, 31, (5,), generator=generator)], 1)
        logits = 2 * torch.randn(5, 2, V, generator=generator)
        tensors = SamplingParams(**fields).tensors(5, prompt_lengths=torch.ones(5, dtype=torch.int64))
        found, given = tensors.process(logits, text, lengths), logits.clone()
        for row in range(5):
            own = {name: values[row] for name, values in fields.items()}
            for place, length in enumerate(lengths[row].tolist()):
                tokens = text[row, :length].tolist()
                assert torch.equal(
                    found[row, place], expected_logits(own, [], tokens[:1], tokens[1:], given[row, place])
                )
        assert torch.equal(logits, given)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("eager", "a model"),
        slow("eager", "hierarchical"),
        slow("eager", "n-gram with counts"),
        pytest.param("inductor", "a model", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_give_the_eager_tokens(backend: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And batches with other values, or fewer words, compile nothing."""
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    input_ids, mask = padded([[5, 6, 7, 8, 9, 5, 6], [3, 4, 3, 4]], "left")
    first = {"repetition_penalty": [1.4, 1.0], "presence_penalty": [0.0, 0.5], "frequency_penalty": 0.3}
    first |= {"no_repeat_ngram_size": [2, 3], "min_new_tokens": [0, 4], "logit_bias": {7: 1.0}}
    first |= {"bad_words": [[5, 6], [9], [3, 4, 5]]}
    second = {"repetition_penalty": 0.9, "presence_penalty": -0.2, "frequency_penalty": [0.1, 0.0]}
    second |= {"no_repeat_ngram_size": [4, 0], "bad_words": [[[5, 7]], [[1], [2, 3, 4], [9], [5]]]}
    tables = [TracedPairs(random_table(VOCAB, seed=seed)) for seed in (5, 6)]

    def decoder(compiled: bool) -> SpeculativeDecoder:
        target, draft = tables if kind == "a model" else (shared_tiny("llama"), DRAFTS[kind]("llama"))
        return SpeculativeDecoder(target, draft, num_draft_tokens=2, compile=compiled)

    def text(decoder: SpeculativeDecoder, values: dict[str, Any]) -> Tensor:
        given = {"sampling": SamplingParams(temperature=[0.0, 0.9], **values), "eos_token_id": (2, 3), "seed": 5}
        return decoder.generate(input_ids, attention_mask=mask, max_new_tokens=16, **given).sequences

    compiled = decoder(compiled=True)
    for index, values in enumerate((first, second, first)):
        with torch.compiler.set_stance("fail_on_recompile" if index else "default"):
            # A new eager decoder has no state of the batch before.
            assert torch.equal(text(compiled, values), text(decoder(compiled=False), values))
    assert not counters["graph_break"]


def test_bad_processor_arguments() -> None:
    prompt_lengths = torch.tensor([2, 2])
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"logit_bias": [{1: 1.0}]}, ValueError, "logit_bias: expected one for all sequences or 2, got 1"),
        ({"bad_words": [[[1]], [], []]}, ValueError, "bad_words: expected one for all sequences or 2, got 3"),
        ({"repetition_penalty": [1.1]}, ValueError, "repetition_penalty: expected one number or 2, got shape"),
        ({"min_new_tokens": [1, 1, 1]}, ValueError, "min_new_tokens: expected one number or 2, got shape"),
        ({"bad_words": [[1, 6]]}, ValueError, r"logit_bias, bad_words: expected tokens in \[0, 6\), .* got 6"),
    ]

    def tensors(fields: dict[str, Any]) -> object:
        return SamplingParams(**fields).tensors(2, prompt_lengths=prompt_lengths, vocab_size=6)

    assert raised(tensors, cases) == []
    with pytest.raises(ValueError, match="prompt_lengths: expected the prompts' lengths"):
        SamplingParams(presence_penalty=1.0).tensors(2)


def test_neutral_values_leave_no_processors() -> None:
    """So that a batch without them runs the graphs without them."""
    neutral = NEUTRAL | {"repetition_penalty": [1.0, 1], "logit_bias": [None, {}], "bad_words": [[], [[5]]]}
    eos = torch.tensor([[2, -1], [5, 2]])
    for fields in ({}, NEUTRAL, neutral):
        tensors = SamplingParams(**fields).tensors(2, prompt_lengths=torch.tensor([1, 1]), eos=eos)
        assert tensors.processors is None
