"""Draft sources: prompt lookup against a plain loop; a draft model's law, and a cache that never lags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_specops
from torch_specops.drafts import Draft, ModelDraft, PromptLookup

ONE = torch.ones(1)
SEED = torch.tensor([5])


def lookup_by_loops(tokens: list[int], num_draft_tokens: int, max_ngram: int, min_ngram: int) -> list[int]:
    for ngram in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - ngram - 1, -1, -1):
            if ngram < len(tokens) and tokens[start : start + ngram] == tokens[-ngram:]:
                found = tokens[start + ngram : start + ngram + num_draft_tokens]
                return found + [-1] * (num_draft_tokens - len(found))
    return [-1] * num_draft_tokens


def rows(vocab_size: int) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=14), min_size=1, max_size=4)


@settings(deadline=None, max_examples=300)
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The longer match wins over the more recent one.
        ([1, 2, 3, 9, 7, 3, 8, 1, 2, 3], [9, 7, 3]),
        # Among equals the most recent one.
        ([1, 2, 4, 1, 2, 5, 1, 2], [5, 1, 2]),
        # A match may overlap the end; fewer tokens than asked for follow it.
        ([6, 6, 6], [6, -1, -1]),
        ([1, 2, 3], [-1, -1, -1]),
        ([1], [-1, -1, -1]),
    ],
)
def test_prompt_lookup_choices(text: list[int], expected: list[int]) -> None:
    assert PromptLookup(3, 1).propose(torch.tensor([text]), torch.tensor([len(text)]), 3).tokens.tolist() == [expected]


def test_prompt_lookup_ignores_matches_shorter_than_the_least() -> None:
    text = torch.tensor([[4, 7, 1, 4]])
    assert PromptLookup(3, 1).propose(text, torch.tensor([4]), 2).tokens.tolist() == [[7, 1]]
    assert PromptLookup(3, 2).propose(text, torch.tensor([4]), 2).tokens.tolist() == [[-1, -1]]


def test_prompt_lookup_traces_in_one_graph() -> None:
    # A host synchronisation would break the graph.
    @torch.compile(fullgraph=True, backend="eager")
    def propose(tokens: Tensor, lengths: Tensor) -> Tensor:
        return PromptLookup().propose(tokens, lengths, 3).tokens

    tokens, lengths = torch.tensor([[1, 2, 3, 1, 2], [5, 5, 5, 0, 0]]), torch.tensor([5, 3])
    assert propose(tokens, lengths).tolist() == [[3, 1, 2], [5, -1, -1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((3, 0), "min_ngram: expected a number >= 1, got 0"), ((1, 2), "max_ngram: expected a number >= min_ngram = 2")],
)
def test_prompt_lookup_bad_ngrams(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptLookup(*arguments)


class TableModel:
    """Logits from a table [V, V] of the last token; remembers what it read, and lists every reading."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.vocab_size = len(table)
        self.device = table.device
        self.max_length = None
        self.memory: list[int] = []
        self.readings: list[tuple[int, int]] = []

    def forward(self, tokens: Tensor, position: int, num_logits: int) -> Tensor:
        assert 0 <= position <= len(self.memory), "a gap in the cache"
        self.memory = self.memory[:position] + tokens[0].tolist()
        self.readings.append((position, tokens.shape[1]))
        return self.table[tokens][:, -num_logits:]


def propose(source: ModelDraft, text: list[int], num_draft_tokens: int, temperature: Tensor = ONE) -> Draft:
    return source.propose(torch.tensor([text]), torch.tensor([len(text)]), num_draft_tokens, temperature, SEED)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_model_draft_returns_what_it_sampled_from(temperature: float) -> None:
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    draft = propose(ModelDraft(TableModel(table)), [3, 1], 4, torch.tensor([temperature]))
    assert draft.logits is not None and draft.lse is not None
    read = [1, *draft.tokens[0].tolist()]
    assert torch.equal(draft.logits[0], table[read[:-1]])
    uniforms = torch_specops.uniforms(SEED, torch.tensor([2]), 4, "propose")[0]
    tokens, lse = torch_specops.sample(draft.logits[0], uniforms, torch.full((4,), temperature))
    assert torch.equal(draft.tokens[0], tokens)
    assert torch.equal(draft.lse[0], lse)


def test_model_draft_reads_every_token_once_and_never_lags() -> None:
    """The text grows as a loop would let it: all accepted, some accepted, none."""
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    model = TableModel(table)
    source = ModelDraft(model)
    text = [4, 2, 8]
    # The first forward of each step reads what the cache lacks: the prompt; after three acceptances the last draft
    # token and the bonus token; after fewer the recovered token alone.
    for num_accepted, first_reading in [
        (3, (0, 3)),
        (3, (5, 2)),
        (1, (9, 2)),
        (0, (12, 1)),
        (3, (13, 1)),
        (2, (16, 2)),
    ]:
        model.readings.clear()
        drafts = propose(source, text, 3).tokens[0].tolist()
        assert len(model.readings) == 3, "more forwards than drafts"
        assert model.readings[0] == first_reading
        assert [length for _, length in model.readings[1:]] == [1, 1]
        assert model.memory == text + drafts[:2]
        recovered = (drafts[num_accepted] + 1) % 9 if num_accepted < 3 else 0
        text = [*text, *drafts[:num_accepted], recovered]


def test_model_draft_begins_anew_with_another_text() -> None:
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    source = ModelDraft(TableModel(table))
    propose(source, [1, 2, 3], 2)
    # The last tokens are those it read, where it read them; the first is not.
    fresh = ModelDraft(TableModel(table))
    assert torch.equal(propose(source, [4, 2, 3, 0], 3).tokens, propose(fresh, [4, 2, 3, 0], 3).tokens)
    assert source.model.memory[:4] == [4, 2, 3, 0]


def test_model_draft_survives_a_row_without_a_law() -> None:
    table = torch.zeros(3, 3)
    table[1] = -torch.inf
    assert propose(ModelDraft(TableModel(table)), [1], 2).tokens[0, 0] == -1


def test_model_draft_of_no_tokens_reads_nothing() -> None:
    model = TableModel(torch.zeros(3, 3))
    assert propose(ModelDraft(model), [1, 2], 0).tokens.shape == (1, 0)
    assert model.readings == []


def test_model_draft_bad_input() -> None:
    source = ModelDraft(TableModel(torch.zeros(3, 3)))
    with pytest.raises(ValueError, match=r"tokens: a draft model reads one sequence, expected \[1, L\], got \[2, 3\]"):
        source.propose(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), 2, torch.ones(2), SEED.expand(2))
    with pytest.raises(ValueError, match=r"lengths: .* expected at least 1, got 0"):
        source.propose(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([0]), 2, ONE, SEED)
