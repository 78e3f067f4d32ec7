"""N-gram tables against counts by plain loops. Their laws are tested in test_loop_distribution.py."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import raised
from torch import Tensor

import torch_specops
from torch_specops.drafts import Draft
from torch_specops.drafts.ngram import NGram
from torch_specops.sampling import SamplingTensors

Table = dict[tuple[int, ...], list[tuple[int, int]]]


def count_by_loops(texts: list[list[int]], order: int, max_candidates: int) -> Table:
    """Context -> its most frequent continuations with their counts; among equals the lowest token first."""
    counters: dict[tuple[int, ...], Counter[int]] = {}
    for text in texts:
        for end, token in enumerate(text):
            for length in range(min(order - 1, end) + 1):
                counters.setdefault(tuple(text[end - length : end]), Counter())[token] += 1
    ranked = {
        context: sorted(counter.items(), key=lambda item: (-item[1], item[0])) for context, counter in counters.items()
    }
    return {context: items[:max_candidates] for context, items in ranked.items()}


def candidates_by_loops(table: Table, text: list[int], order: int) -> list[tuple[int, int]]:
    for length in range(min(order - 1, len(text)), -1, -1):
        context = tuple(text[len(text) - length :])
        if context in table:
            return table[context]
    raise AssertionError("the unigram is in every table")


def batch_of(rows: list[list[int]], spare: int = 0) -> tuple[Tensor, Tensor]:
    """Rows padded with a token that the texts are full of, because nothing behind a row's length may be read."""
    width = max(len(row) for row in rows) + spare
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def propose(source: NGram, rows: list[list[int]], num_draft_tokens: int, **options: Any) -> Draft:
    tokens, lengths = batch_of(rows, options.get("spare", 0))
    sampling = options.get("sampling", SamplingTensors(torch.ones(len(rows))))
    return source.propose(tokens, lengths, num_draft_tokens, sampling, torch.arange(len(rows)) + 11)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    vocab_size = draw(st.sampled_from([1, 2, 3, 7]))
    token = st.integers(0, vocab_size - 1)
    # A row may hold a token that the tables do not know.
    any_token = st.integers(-1, vocab_size + 1)
    return {
        "texts": draw(st.lists(st.lists(token, max_size=20), min_size=1, max_size=3).filter(any)),
        "rows": draw(st.lists(st.lists(st.one_of(token, any_token), min_size=1, max_size=6), min_size=1, max_size=4)),
        "vocab_size": vocab_size,
        "order": draw(st.integers(1, 5)),
        "max_candidates": draw(st.integers(1, 4)),
        "num_draft_tokens": draw(st.integers(1, 8)),
        "spare": draw(st.integers(0, 3)),
    }


def proposals(case: dict[str, Any], **options: Any) -> tuple[Draft, Table]:
    """The proposals of a case's tables, and the counts by loops."""
    limits = {name: case[name] for name in ("vocab_size", "order", "max_candidates")}
    texts = [torch.tensor(text, dtype=torch.int64) for text in case["texts"]]
    source = NGram.from_tokens(texts, **limits, probabilities="sampling" in options)
    draft = propose(source, case["rows"], case["num_draft_tokens"], spare=case["spare"], **options)
    return draft, count_by_loops(case["texts"], case["order"], case["max_candidates"])


@settings(deadline=None, max_examples=100)
@given(case=cases())
def test_most_frequent_continuation_is_the_plain_loop(case: dict[str, Any]) -> None:
    draft, table = proposals(case)
    expected = []
    for row in case["rows"]:
        text = list(row)
        for _ in range(case["num_draft_tokens"]):
            text.append(candidates_by_loops(table, text, case["order"])[0][0])
        expected.append(text[len(row) :])
    assert draft.tokens.tolist() == expected
    assert draft.tokens.dtype == torch.int64
    assert draft.logits is None and draft.lse is None


def expected_logits(table: Table, text: list[int], order: int, vocab_size: int) -> Tensor:
    logits = torch.full((vocab_size,), -math.inf)
    for token, count in candidates_by_loops(table, text, order):
        logits[token] = math.log(count)
    return logits


@settings(deadline=None, max_examples=80)
@given(case=cases(), temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]))
def test_drawn_from_the_counts_of_the_plain_loop(case: dict[str, Any], temperature: float) -> None:
    rows, num_draft_tokens = case["rows"], case["num_draft_tokens"]
    # Greedy and sampled rows share a batch.
    temperatures = torch.tensor([temperature, 1.0, 0.0, 0.3])[: len(rows)]
    sampling = SamplingTensors(temperatures, top_k=torch.tensor([0, 2, 0, 1])[: len(rows)])
    draft, table = proposals(case, sampling=sampling)
    assert draft.logits is not None and draft.lse is not None
    assert draft.logits.dtype == draft.lse.dtype == torch.float32
    # The logits are those behind the drafts before them.
    for row, drafted, logits in zip(rows, draft.tokens.tolist(), draft.logits, strict=True):
        for i in range(num_draft_tokens):
            expected = expected_logits(table, row + drafted[:i], case["order"], case["vocab_size"])
            torch.testing.assert_close(logits[i], expected, rtol=1e-6, atol=0)

    # And the drafts those that these logits and the row's own numbers give.
    _, lengths = batch_of(rows)
    draws = torch_specops.uniforms(torch.arange(len(rows)) + 11, lengths, num_draft_tokens, "propose")
    for i in range(num_draft_tokens):
        tokens, lse = torch_specops.sample(draft.logits[:, i], draws[:, i], temperatures, **sampling.filters)
        assert torch.equal(tokens, draft.tokens[:, i])
        assert torch.equal(lse, draft.lse[:, i])


def test_the_largest_keys() -> None:
    """A vocabulary and order just below 2**63 lose no digit."""
    vocab_size = 2**21 - 2
    text = torch.tensor([vocab_size - 1, vocab_size - 1, vocab_size - 1, 7, vocab_size - 1, vocab_size - 1, 8, 9])
    source = NGram.from_tokens(text, vocab_size=vocab_size, order=4)
    v = vocab_size - 1
    assert propose(source, [[v, v, v], [7, v, v], [v, v, 8]], 2).tokens.tolist() == [[7, v], [8, 9], [9, v]]


TEXT = torch.tensor([0, 1, 2])


def test_bad_text() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tokens": [1, 2]}, TypeError, r"tokens: expected an int64 tensor \[N\] or a list of them, got .*list"),
        ({"tokens": TEXT.int()}, TypeError, "tokens: expected int64, got int32"),
        ({"tokens": TEXT.unsqueeze(0)}, ValueError, r"tokens: expected texts of shape \[N\], got \[1, 3\]"),
        ({"tokens": [TEXT[:0], TEXT[:0]]}, ValueError, "tokens: expected at least one token, got none"),
        ({"tokens": TEXT + 3}, ValueError, r"tokens: expected tokens in \[0, 4\), got 4"),
        ({"vocab_size": 0}, ValueError, "vocab_size: expected a number >= 1, got 0"),
        ({"vocab_size": 2**31, "order": 1}, ValueError, r"vocab_size: expected a number below 2\*\*31, got 2147483648"),
        ({"order": 0}, ValueError, "order: expected a number >= 1, got 0"),
        ({"max_candidates": 0}, ValueError, "max_candidates: expected a number >= 1, got 0"),
        ({"vocab_size": 2**21 - 1, "order": 4}, ValueError, "order: expected .* order 4 for a vocabulary of 2097151"),
    ]
    assert raised(lambda case: NGram.from_tokens(**{"tokens": TEXT, "vocab_size": 4} | case), cases) == []
