"""`SuffixLookup` and its index against plain loops over all tokens: by the index on the host, and by a traced scan."""

from __future__ import annotations

import copy
import ctypes
import pickle
import random
from collections import Counter

import pytest
import torch
from tiny_models import raised
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torch_specops.drafts import SuffixLookup, history, lookup


def rounded(number: float) -> float:
    return ctypes.c_float(number).value


def drafts_by_loops(
    before: list[int], own: list[int], count: int, ngrams: tuple[int, int], least: float
) -> tuple[list[int], int]:
    """The drafts of a row, and the length of its longest match. `before` has what is searched besides `own`, and a -1
    at each border."""
    text, begin = before + own, len(before)
    last = len(text) - 1

    def matched(end: int, most: int) -> int:
        length = 0
        while length < most and length <= end and last - length >= begin and text[end - length] == text[last - length]:
            length += 1
        return length

    # The 32 newest of the places where most of the last three tokens match.
    ends = sorted(range(last), key=lambda end: (-matched(end, min(3, ngrams[1])), -end))[:32]
    lengths = [matched(end, ngrams[1]) for end in ends]
    longest = max(lengths, default=0)
    agree = [end for end, length in zip(ends, lengths, strict=True) if length == longest >= ngrams[0]]
    drafts: list[int] = []
    probability = 1.0
    while agree and len(drafts) < count:
        # A match in the row itself goes on after its end with the first token after the match.
        votes = [text[end + 1 + len(drafts) % (last - end)] for end in agree]
        choices = Counter(vote for vote in votes if vote >= 0).most_common(1)
        if not choices:
            break
        token, most = choices[0]
        probability = rounded(probability * rounded(most / len(votes)))
        probability = rounded(rounded(probability * (longest + len(drafts))) / (longest + len(drafts) + 1))
        if probability < rounded(least):
            break
        drafts.append(token)
        agree = [end for end, vote in zip(agree, votes, strict=True) if vote == token]
    return drafts + [-1] * (count - len(drafts)), longest


class Case:
    """A lookup, texts that it remembers, and prompts, all at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose, size = self.random.choice, self.random.choice([1, 2, 3, 8, 50])
        self.alphabet = choose([range(size), range(size), range(1_999_999 - size, 1_999_999)])
        self.pieces = [self.random.choices(self.alphabet, k=choose([1, 4, 12])) for _ in range(4)]
        self.ngrams = self.random.choice([(1, 1), (1, 2), (2, 2), (1, 3), (2, 5), (2, 32), (5, 32)])
        self.memory = choose([0, 1, 5, 40, 90, 400])
        self.least = choose([0.0, 0.1, 0.25, 1.0, self.random.random()])
        self.draft = SuffixLookup(self.ngrams[1], self.ngrams[0], self.least, self.memory)
        self.remembered: list[int] = []

    def text(self, longest: int) -> list[int]:
        """Some of the case's pieces, and other tokens."""
        length, text = self.random.randint(1, longest), list[int]()
        while len(text) < length:
            text += self.random.choice([*self.pieces, self.random.choices(self.alphabet, k=2)])
        return text[:length]

    def prompt(self) -> list[int]:
        """A text, or a part of what is remembered, often of the oldest; it may end with a token that no memory has."""
        text = self.text(self.random.choice([40, 40, 150]))
        if self.remembered and self.random.random() < 0.4:
            end = self.random.choice([*range(1, 7), self.random.randint(1, len(self.remembered))])
            text = [token for token in self.remembered[max(end - 40, 0) : end] if token >= 0] or text
        if self.random.random() < 0.1:
            text[-self.random.randint(1, min(3, len(text)))] += 2**21
        return text

    def batch(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows with the texts. What follows a text goes on with its matches."""
        width = max(map(len, texts)) + self.random.choice([0, 3])
        rows = [text + (text * width)[: width - len(text)] for text in texts]
        return torch.tensor(rows), torch.tensor(list(map(len, texts)))

    def remember(self) -> None:
        """Some more texts, in one of the two ways; or forget all."""
        texts = [self.text(self.random.choice([3, 30, 120])) for _ in range(self.random.randint(1, 4))]
        if self.random.random() < 0.05:
            self.draft.forget()
            self.remembered.clear()
        elif self.random.random() < 0.4:
            self.draft.remember([torch.tensor(text) if self.random.random() < 0.5 else text for text in texts])
            self.remembered += [token for text in texts for token in [*text, -1]]
        else:
            self.draft.on_finished(*self.batch(texts))
            self.remembered += [token for text in texts for token in [*text, -1]]
        self.remembered = self.remembered[len(self.remembered) - min(self.memory, len(self.remembered)) :]

    def check(self, monkeypatch: pytest.MonkeyPatch) -> int:
        """Compare the drafts for some prompts. Returns how many drafts there were."""
        texts = [self.prompt() for _ in range(self.random.randint(1, 4))]
        tokens, lengths = self.batch(texts)
        before: list[list[int]] = [[] for _ in texts]
        inputs = None
        if self.random.random() < 0.3:
            read = [self.text(20) for _ in texts]
            ids, ends = self.batch(read)
            inputs = {"input_ids": ids, "attention_mask": torch.arange(ids.shape[1]) < ends.unsqueeze(1)}
            before = [[*text, *[-1] * (ids.shape[1] + 1 - len(text))] for text in read]
        count = self.random.choice([0, 1, 4, 10])
        self.draft.start(tokens, lengths, 99, inputs)
        rows = [
            drafts_by_loops(self.remembered + own, text, count, self.ngrams, self.least)
            for own, text in zip(before, texts, strict=True)
        ]
        kept = tokens.clone()
        for is_eager in (True, False):
            with monkeypatch.context() as patch:
                if not is_eager:
                    # The code that a step on another device or a traced step has.
                    patch.setattr(lookup, "is_eager_cpu", lambda *tensors: False)
                draft = self.draft.propose(tokens, lengths, count)
            assert draft.matches is not None and draft.tokens.dtype == draft.matches.dtype == torch.int64
            assert draft.tokens.tolist() == [drafts for drafts, _ in rows], is_eager
            assert draft.matches.tolist() == [longest for _, longest in rows], is_eager
        assert torch.equal(tokens, kept)
        assert self.draft.num_remembered == sum(token >= 0 for token in self.remembered)
        return sum(token >= 0 for drafts, _ in rows for token in drafts)


def test_no_match_reaches_into_removed_tokens() -> None:
    draft = SuffixLookup(max_ngram=5, memory=9)
    for text in ([1, 2, 3, 4, 4], [2, 3, 8, 8]):
        draft.remember([text])
    # The memory begins with 3, behind 1 and 2, which are removed.
    assert draft.propose(torch.tensor([[1, 2, 3]]), torch.tensor([3]), 1).tokens.tolist() == [[8]]


def test_the_newest_32_places_vote() -> None:
    # The oldest come first. Of the newest 32, as many are followed by 8 as by 9.
    text = [token for follows in [8] * 3 + [9] + [8] * 16 + [9] * 15 for token in (7, follows)]
    draft = SuffixLookup(max_ngram=1, min_ngram=1)
    assert draft.propose(torch.tensor([[*text, 7]]), torch.tensor([len(text) + 1]), 1).tokens.tolist() == [[9]]
    draft.remember([text])
    assert draft.propose(torch.tensor([[7]]), torch.tensor([1]), 1).tokens.tolist() == [[9]]


@pytest.fixture
def _small_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "SMALL_LEVEL", 8)
    monkeypatch.setattr(history, "LARGEST_LEVEL", 64)
    monkeypatch.setattr(lookup, "LARGEST_LEVEL", 64)


@pytest.mark.usefixtures("_small_levels")
def test_drafts_are_those_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    num_drafts, num_levels = 0, Counter[int]()
    for seed in range(60):
        case = Case(seed)
        for _ in range(8):
            case.remember()
            num_drafts += case.check(monkeypatch)
            # The index keeps few tokens that were removed.
            sizes = [len(level.places) for level in case.draft._history._levels]
            largest = max(8, min(64, case.memory // 4))
            assert max(sizes, default=0) <= largest and sum(sizes) <= case.memory + largest
            num_levels[len(sizes)] += 1
        copied = [copy.deepcopy(case.draft), pickle.loads(pickle.dumps(case.draft))]
        case.draft.forget()
        for case.draft in copied:
            case.check(monkeypatch)
    assert num_drafts > 400 and sum(count for number, count in num_levels.items() if number >= 3) > 40


def test_what_cannot_be_remembered() -> None:
    draft = SuffixLookup()
    kind = "expected a 1-D tensor of integers or a list of int, got"
    cases = [
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "sequences: expected a list of 1-D tensors .* got .*Tensor"),
        (7, TypeError, "sequences: expected a list of 1-D tensors or lists of int, got .*int"),
        ([[1, 2], [1.5]], TypeError, rf"sequences\[1\]: {kind} \[1.5\]"),
        ([torch.ones(2, 3, dtype=torch.int64)], TypeError, rf"sequences\[0\]: {kind} torch.int64 of shape \[2, 3\]"),
        ([torch.ones(2, dtype=torch.bfloat16)], TypeError, rf"sequences\[0\]: {kind} torch.bfloat16 of shape \[2\]"),
        ([torch.ones(2, dtype=torch.int64, device="meta")], TypeError, rf"sequences\[0\]: {kind} .* on meta"),
        ([[True]], TypeError, rf"sequences\[0\]: {kind} \[True\]"),
        (["text"], TypeError, rf"sequences\[0\]: {kind} 'text'"),
        ([[1, [2]]], TypeError, rf"sequences\[0\]: {kind} \[1, \[2\]\]"),
        ([[1, -1]], ValueError, r"sequences\[0\]: expected tokens in \[0, 2000000\), got -1 to 1"),
        ([[2_000_000]], ValueError, r"sequences\[0\]: expected tokens in \[0, 2000000\), got 2000000 to 2000000"),
    ]
    assert raised(draft.remember, cases) == []
    with pytest.raises(ValueError, match="memory: expected tokens below 2000000, got 2000000; memory=0 stores nothing"):
        draft.on_finished(torch.tensor([[1, 2_000_000]]), torch.tensor([2]))


def test_no_rows() -> None:
    draft, tokens, lengths = SuffixLookup(), torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    assert draft.propose(tokens, lengths, 2).tokens.shape == (0, 2)
    draft.on_finished(tokens, lengths)
    assert draft.num_remembered == 0


def test_a_recorded_lookup_in_a_large_memory_is_refused() -> None:
    draft, lengths = SuffixLookup(memory=9000, min_ngram=1), torch.tensor([2])
    draft.remember([[1, 2, 3, 4], [7, 8, 9]])
    with pytest.raises(NotImplementedError, match="memory: expected at most 8192 in a traced lookup, got 9000"):
        make_fx(lambda tokens: draft.propose(tokens, lengths, 2).tokens)(torch.tensor([[1, 2]]))


@pytest.mark.usefixtures("_small_levels")
def test_after_an_interrupt_all_tokens_are_in_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, right, built = SuffixLookup(memory=1000), history.History._level, 0

    def interrupted(of: history.History, start: int, stop: int) -> object:
        nonlocal built
        built += 1
        if built == 3:
            raise KeyboardInterrupt
        return right(of, start, stop)

    monkeypatch.setattr(history.History, "_level", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draft.remember([list(range(200))])
    assert 0 < draft.num_remembered == sum(len(level.places) for level in draft._history._levels) < 200
    draft.remember([[500, 501, 502, 503]])
    assert draft.propose(torch.tensor([[500, 501, 502]]), torch.tensor([3]), 1).tokens.tolist() == [[503]]
