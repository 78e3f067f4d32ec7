"""Lookups of eager steps on a CPU: the drafts of `lookup.py`, by scans and an index in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from .history import NUM_PLACES, NUM_TOKENS, History, Ints, longest_matches

# Tokens of suffixes and drafts where there is none. A text has -1 at borders and in padding, and never -2.
NO_TOKEN, NO_DRAFT = -2, -1


class Texts:
    """The texts of B rows.

    Args:
        tokens: [B, W] int64, the rows' sequences.
        lengths: [B], their lengths.
        before: [B, S] int64, tokens that are searched too, with -1 for padding and at the end; None = there are none.
    """

    def __init__(self, tokens: Ints, lengths: Ints, before: Ints | None) -> None:
        self.tokens = tokens if before is None else np.concatenate([before, tokens], 1)
        self.begin = 0 if before is None else before.shape[1]
        self.last = lengths + self.begin - 1

    def suffixes(self, count: int) -> Ints:
        """[B, count + 1], the last `count` tokens of the sequences, the newest first, then NO_TOKEN."""
        index = self.last[:, None] - np.arange(count + 1)
        suffixes = self.tokens[np.arange(len(index))[:, None], np.maximum(index, 0)]
        suffixes[index < self.begin] = NO_TOKEN
        suffixes[:, count] = NO_TOKEN
        return suffixes

    def longest_matches(self, suffixes: Ints) -> list[tuple[int, Ints]]:
        """`history.longest_matches` of the rows' suffixes [B, n], before the rows' last tokens."""
        rows = zip(self.tokens, self.last.tolist(), suffixes.tolist(), strict=True)
        return [longest_matches(text[:last], suffix) for text, last, suffix in rows]

    def matched(self, rows: Ints, places: Ints, suffixes: Ints) -> Ints:
        """[C], how many tokens of the row's suffix equal the tokens up to a place, for places of `rows` [C]."""
        index = places[:, None] - np.arange(suffixes.shape[1])
        is_equal = (self.tokens[rows[:, None], np.maximum(index, 0)] == suffixes[rows]) & (index >= 0)
        return is_equal.argmin(1)

    def following(self, rows: Ints, places: Ints, count: int) -> Ints:
        """[C, count], the tokens after places of `rows` [C]. If the row ends before `count` tokens, they start again
        after the place."""
        ahead = np.arange(count) % np.maximum(self.last[rows] - places, 1)[:, None]
        return self.tokens[rows[:, None], np.minimum(places[:, None] + 1 + ahead, self.tokens.shape[1] - 1)]


def prompt_lookup(
    texts: Texts, num_draft_tokens: int, max_ngram: int, min_ngram: int, *, repeat: bool, longest_match: int
) -> tuple[Ints, Ints]:
    """The drafts [B, K] of `PromptLookup`, and the length [B] of each row's match, at most `longest_match`."""
    suffixes = texts.suffixes(max(max_ngram, longest_match))
    rows = np.arange(len(suffixes))
    found = texts.longest_matches(suffixes[:, :max_ngram])
    is_found = np.array([length >= min_ngram for length, _ in found], bool)
    # In most steps no row has a match.
    if not is_found.any():
        return np.full((len(rows), num_draft_tokens), NO_DRAFT), np.zeros(len(rows), np.int64)
    places = np.array([places[0] if length >= min_ngram else 0 for length, places in found], np.int64)
    is_draft = is_found[:, None] & (repeat | (np.arange(num_draft_tokens) < (texts.last - places)[:, None]))
    drafts = np.where(is_draft, texts.following(rows, places, num_draft_tokens), NO_DRAFT)
    return drafts, texts.matched(rows, places, suffixes).clip(max=longest_match)


def suffix_lookup(
    texts: Texts, history: History, num_draft_tokens: int, max_ngram: int, min_ngram: int, min_probability: float
) -> tuple[Ints, Ints]:
    """The drafts [B, K] of `SuffixLookup`, and the length [B] of each row's longest match."""
    suffixes = texts.suffixes(max_ngram)
    short = suffixes[:, : min(NUM_TOKENS, max_ngram)]
    found = texts.longest_matches(short)
    places = [places[: -NUM_PLACES - 1 : -1] for _, places in found]
    longest, counts = [length for length, _ in found], list(map(len, places))
    with history.lock:
        held = history.find(short, longest, counts)
        # Skip places where too few tokens match, and a row's own places if more tokens match elsewhere.
        least = min(min_ngram, short.shape[1])
        held = [each if most >= least else [] for each, most in zip(held, longest, strict=True)]
        own = [
            [each] * (length == most >= least) for each, (length, _), most in zip(places, found, longest, strict=True)
        ]
        own_rows, own_places = _flat(own)
        rows, held_places = _flat(held)
        window = held_places[:, None] + np.arange(-max_ngram, num_draft_tokens + 1)
        window = history.tokens.take(window, mode="clip")
    matched = (window[:, max_ngram::-1] == suffixes[rows]).argmin(1)
    matched = np.concatenate([texts.matched(own_rows, own_places, suffixes), matched])
    following = np.concatenate([texts.following(own_rows, own_places, num_draft_tokens), window[:, max_ngram + 1 :]])
    rows = np.concatenate([own_rows, rows])
    lengths = np.array(longest, np.int64)
    np.maximum.at(lengths, rows, matched)
    agrees = (matched == lengths[rows]) & (matched >= min_ngram)
    continuations: list[list[list[int]]] = [[] for _ in lengths]
    for row, continuation in zip(rows[agrees].tolist(), following[agrees].tolist(), strict=True):
        continuations[row].append(continuation)
    votes = [_votes(agreeing, num_draft_tokens) for agreeing in continuations]
    shape = len(votes), num_draft_tokens
    drafts = np.array([tokens for tokens, _ in votes], np.int64).reshape(shape)
    shares = np.array([share for _, share in votes], np.float32).reshape(shape)
    # Round as a traced step does, so that both end drafts at the same token.
    numbers = (lengths + np.arange(num_draft_tokens + 1)[:, None]).astype(np.float32)
    probabilities, probability = np.empty_like(shares), np.float32(1)
    for ahead, (share, number, next_number) in enumerate(zip(shares.T, numbers[:-1], numbers[1:], strict=True)):
        probability = probability * share * number / next_number
        probabilities[:, ahead] = probability
    return np.where(probabilities >= np.float32(min_probability), drafts, NO_DRAFT), lengths


def _flat(places: Sequence[Sequence[Ints]]) -> tuple[Ints, Ints]:
    """The row of each place, and the places, of the lists of places of each row."""
    rows = np.repeat(np.arange(len(places)), [sum(map(len, each)) for each in places])
    return rows, np.concatenate([np.zeros(0, np.int64), *(part for each in places for part in each)])


def _votes(continuations: list[list[int]], num_draft_tokens: int) -> tuple[list[int], list[float]]:
    """The drafts [K] that the places of a row with the longest match vote for, and the share [K] of each draft among
    the places that agree with the drafts before it; NO_DRAFT and 0 after the last draft.

    Args:
        continuations: the tokens after each place, the newest place first; negative = none.
    """
    drafts: list[int] = []
    shares: list[float] = []
    while continuations and len(drafts) < num_draft_tokens:
        ahead, newest = len(drafts), continuations[0]
        if continuations.count(newest) == len(continuations):
            drafts += takewhile(lambda token: token >= 0, newest[ahead:])
            shares += [1.0] * (len(drafts) - ahead)
            break
        votes = [each[ahead] for each in continuations if each[ahead] >= 0]
        if not votes:
            break
        # Among equals, the token after the newest place comes first.
        token = max(dict.fromkeys(votes), key=votes.count)
        drafts.append(token)
        shares.append(votes.count(token) / len(continuations))
        continuations = [each for each in continuations if each[ahead] == token]
    num_left = num_draft_tokens - len(drafts)
    return drafts + [NO_DRAFT] * num_left, shares + [0.0] * num_left
