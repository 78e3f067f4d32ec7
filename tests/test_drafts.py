"""Draft sources: prompt lookup against a plain loop; a draft model's law, and a cache that never lags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PairModel, raised, random_table
from torch import Tensor

import torch_specops
from torch_specops.drafts import DraftSource, ModelDraft, PromptLookup
from torch_specops.sampling import SamplingTensors


def lookup_by_loops(tokens: list[int], num_draft_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    for ngram in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - ngram):
            if ngram < len(tokens) and tokens[start : start + ngram] == tokens[-ngram:]:
                text = list(tokens)
                for index in range(num_draft_tokens):
                    text.append(text[start + ngram + index])
                return text[len(tokens) :]
    return [-1] * num_draft_tokens


def rows(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=14), min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(
    texts=st.one_of(rows(2), rows(3), rows(8)),
    num_draft_tokens=st.integers(0, 6),
    ngrams=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    spare=st.integers(0, 3),
)
def test_prompt_lookup_is_the_plain_loop(
    texts: list[list[int]], num_draft_tokens: int, ngrams: list[int], spare: int
) -> None:
    min_ngram, max_ngram = ngrams
    width = max(len(text) for text in texts) + spare
    # What stands behind a row's length must not be read: it continues every match.
    tokens = torch.tensor([text + [text[-1] if text else 0] * (width - len(text)) for text in texts])
    tokens = tokens.reshape(len(texts), width).long()
    lengths = torch.tensor([len(text) for text in texts])
    before = tokens.clone()
    draft = PromptLookup(max_ngram, min_ngram).propose(tokens, lengths, num_draft_tokens)
    assert draft.tokens.shape == (len(texts), num_draft_tokens) and draft.tokens.dtype == torch.int64
    assert draft.tokens.tolist() == [lookup_by_loops(text, num_draft_tokens, max_ngram, min_ngram) for text in texts]
    assert draft.logits is None and draft.lse is None
    assert torch.equal(tokens, before)


def test_prompt_lookup_bad_ngrams() -> None:
    cases = [
        ((3, 0), ValueError, "min_ngram: expected a number >= 1, got 0"),
        ((1, 2), ValueError, "max_ngram: expected a number >= min_ngram = 2"),
    ]
    assert raised(lambda ngrams: PromptLookup(*ngrams), cases) == []


V = 9
TABLE = random_table(V, seed=1)
ROWS = [[3, 1, 4, 1, 5], [2], [6, 5]]
CAPACITY = 24
SEEDS = torch.tensor([5, 6, 7])


def start(source: DraftSource, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens [B, CAPACITY] and lengths; what stands behind a text is garbage."""
    tokens = torch.full((len(rows), CAPACITY), 8)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows])
    source.start(tokens, lengths, CAPACITY)
    return tokens, lengths


def pair_logits(text: list[int]) -> Tensor:
    """What PairModel says after a text, without a memory."""
    return TABLE[text[-2] if len(text) > 1 else V, text[-1]]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_model_draft_returns_what_it_sampled_from(temperature: float) -> None:
    source = ModelDraft(PairModel(TABLE))
    tokens, lengths = start(source, ROWS)
    sampling = SamplingTensors(torch.full((3,), temperature), top_k=torch.full((3,), 2))
    draft = source.propose(tokens, lengths, 4, sampling, SEEDS)
    assert draft.logits is not None and draft.lse is not None
    assert draft.tokens.shape == draft.lse.shape == (3, 4) and draft.logits.shape == (3, 4, V)
    uniforms = torch_specops.uniforms(SEEDS, lengths, 4, "propose")
    for row, text in enumerate(ROWS):
        drafts = draft.tokens[row].tolist()
        expected = torch.stack([pair_logits(text + drafts[:index]) for index in range(4)])
        assert torch.equal(draft.logits[row], expected)
        drawn, lse = torch_specops.sample(
            expected, uniforms[row], torch.full((4,), temperature), top_k=torch.full((4,), 2)
        )
        assert torch.equal(draft.tokens[row], drawn)
        assert torch.equal(draft.lse[row], lse)
