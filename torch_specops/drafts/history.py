"""Finished texts on the host, with an index of the places that match the end of a sequence."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[Any]]

# `SuffixLookup` measures the length of matches at no more than NUM_PLACES places. It chooses the places that match most
# of the row's last NUM_TOKENS tokens, and prefers newer places among equals.
NUM_PLACES, NUM_TOKENS = 32, 3
# A level of the index with at most SMALL_LEVEL tokens is merged with the next text, whatever the size of the text. No
# level has more than LARGEST_LEVEL tokens.
SMALL_LEVEL, LARGEST_LEVEL = 8192, 2**20
# A key of the index has 21 bits for each of NUM_TOKENS tokens, the newest in the highest bits. 0 is a border of texts.
BITS, MOST_TOKENS = 21, 2_000_000
SHIFTS = BITS * np.arange(NUM_TOKENS)[::-1]


@dataclass(frozen=True)
class _Level:
    """The index of tokens[start:stop].

    Args:
        keys: int64, ascending. A key has the token at a place and those before it.
        places: int32, the place of each key, counted from `start`. Places of equal keys ascend.
    """

    start: int
    stop: int
    keys: Ints
    places: Ints

    def newest(self, low: int, high: int, first: int) -> Ints:
        """The newest NUM_PLACES places of keys[low:high] that are at least `first`, the newest first."""
        places, count = self.places[low:high], min(high - low, NUM_PLACES)
        if self.keys[low] != self.keys[high - 1]:
            # The places of different keys do not ascend together.
            places = np.sort(np.partition(places, -count)[-count:])
        places = places[: -NUM_PLACES - 1 : -1] + self.start
        return places[places >= first] if self.start < first else places


class History:
    """The newest tokens of finished texts, each text followed by a -1.

    The index is a list of levels, the oldest first. A new level is merged with the one before it unless that one is
    more than twice as large, so the number of levels, and how often a token is merged, grow with the logarithm of the
    number of tokens. A level is dropped when all its tokens have been removed.

    Args:
        most: the largest number of tokens, including the -1 after each text.

    Attributes:
        tokens: int32. The tokens of the history are a part of this array, which begins with a -1.
        lock: hold it during `find` and as long as its results are in use.
    """

    def __init__(self, most: int) -> None:
        self.lock = threading.Lock()
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Remove all tokens."""
        # Two tokens come before the first, because a key has two tokens before that of its place.
        self.tokens: Ints = np.full(2, -1, np.int32)
        # The history is tokens[begin:end].
        self._begin = self._end = 2
        self._levels: list[_Level] = []

    def newest(self) -> Ints:
        """A copy of all tokens."""
        return self.tokens[self._begin : self._end].copy()

    def count(self) -> int:
        """The number of tokens without the -1 after each text."""
        return int(np.count_nonzero(self.tokens[self._begin : self._end] >= 0))

    def append(self, tokens: Ints) -> None:
        """Add whole texts, each followed by a -1, and remove the oldest tokens."""
        tokens = tokens[max(len(tokens) - self._most, 0) :]
        begin = max(self._begin, self._end + len(tokens) - self._most)
        self._levels = [level for level in self._levels if level.stop > begin]
        if self._end + len(tokens) > len(self.tokens):
            begin = self._grow(begin, len(tokens))
        self._begin, start, stop = begin, self._end, self._end + len(tokens)
        # No match reaches into the tokens that were removed.
        self.tokens[begin - 1] = -1
        self.tokens[start:stop] = tokens
        # The oldest level keeps removed tokens, so it may have only a part of all tokens.
        largest = max(SMALL_LEVEL, min(LARGEST_LEVEL, self._most // 4))
        for first in range(start, stop, largest):
            level = self._level(first, min(first + largest, stop))
            # Only now, so that after an interrupt all tokens of the history are in the index.
            self._levels.append(level)
            self._end = level.stop
            while len(self._levels) > 1:
                older, newer = self._levels[-2:]
                num_older, num_newer = older.stop - older.start, newer.stop - newer.start
                if num_older > max(2 * num_newer, SMALL_LEVEL) or num_older + num_newer > largest:
                    break
                self._levels[-2:] = [self._merged(older, newer)]

    def _grow(self, begin: int, num_new: int) -> int:
        """Move tokens[begin:end] to a new array with room for more. Returns the new `begin`."""
        shift, needed = begin - 2, 2 + self._end - begin + num_new
        grown = np.empty(max(needed, min(2 * needed, 2 + self._most + self._most // 4)), np.int32)
        grown[:2] = -1
        grown[2 : needed - num_new] = self.tokens[begin : self._end]
        self.tokens, self._end = grown, self._end - shift
        self._levels = [
            _Level(level.start - shift, level.stop - shift, level.keys, level.places) for level in self._levels
        ]
        return 2

    def _level(self, start: int, stop: int) -> _Level:
        keys = np.zeros(stop - start, np.int64)
        for back, shift in enumerate(SHIFTS.tolist()):
            keys += (self.tokens[start - back : stop - back].astype(np.int64) + 1) << shift
        places = np.flatnonzero(self.tokens[start:stop] >= 0).astype(np.int32)
        places = places[np.argsort(keys[places], kind="stable")]
        return _Level(start, stop, keys[places], places)

    def _merged(self, older: _Level, newer: _Level) -> _Level:
        is_kept = older.places >= self._begin - older.start
        keys = np.concatenate([older.keys[is_kept], newer.keys])
        places = np.concatenate([older.places[is_kept], newer.places + np.int32(newer.start - older.start)])
        # A stable sort merges two sorted runs in linear time.
        order = np.argsort(keys, kind="stable")
        return _Level(older.start, newer.stop, keys[order], places[order])

    def find(self, suffixes: Ints, longest: list[int], counts: list[int]) -> list[list[Ints]]:
        """Find the newest places that match most of a suffix.

        Args:
            suffixes: [B, n] int64, n = 1 to NUM_TOKENS, the last tokens of B sequences, the newest first; -2 = there is
                none.
            longest: [B] the most tokens that match at a newer place. Set to the most that match at a found place if
                that is more.
            counts: [B] the number of newer places where so many match. Set to the number of found places with them.

        Returns:
            The places of each sequence, the newest first, if at least as many tokens match there as at a newer place.
            There are at most NUM_PLACES, including the newer places if as many tokens match there.
        """
        found: list[list[Ints]] = [[] for _ in longest]
        # No token of the history is MOST_TOKENS.
        tokens = np.maximum(np.minimum(suffixes, MOST_TOKENS), -1) + 1
        keys = tokens @ (1 << SHIFTS[: suffixes.shape[1]])

        def is_open(row: int, length: int) -> bool:
            return longest[row] < length or (longest[row] == length and counts[row] < NUM_PLACES)

        batch = len(found)
        for length in range(suffixes.shape[1], 0, -1):
            rows = [row for row, token in enumerate(tokens[:, length - 1].tolist()) if token and is_open(row, length)]
            if not rows:
                continue
            ignored = BITS * (NUM_TOKENS - length)
            first = keys >> ignored
            bounds = np.concatenate([first, first + 1]) << ignored
            for level in reversed(self._levels):
                ends = level.keys.searchsorted(bounds).tolist()
                for row in rows:
                    low, high = ends[row], ends[batch + row]
                    if low < high:
                        # All tokens of a match are in the history.
                        places = level.newest(low, high, self._begin + length - 1)
                        if len(places) > 0 and longest[row] < length:
                            longest[row], counts[row] = length, 0
                        found[row].append(places[: NUM_PLACES - counts[row]])
                        counts[row] += len(found[row][-1])
                rows = [row for row in rows if is_open(row, length)]
                if not rows:
                    break
        return found


def longest_matches(text: Ints, suffix: Sequence[int]) -> tuple[int, Ints]:
    """The places in a text where most tokens up to the place equal those of the suffix, whose newest token comes first.
    Returns how many are equal, and the places, ascending."""
    places = (text == suffix[0]).nonzero()[0]
    length = min(len(places), 1)
    while 0 < length < len(suffix):
        # Only the first place may be too near to the start of the text.
        longer = places[int(places[0] < length) :]
        longer = longer[text[longer - length] == suffix[length]]
        if len(longer) == 0:
            break
        places, length = longer, length + 1
    return length, places


def joined(texts: Sequence[Ints]) -> Ints:
    """The texts as one array, each followed by a -1."""
    largest = max((int(text.max(initial=0)) for text in texts), default=0)
    if largest >= MOST_TOKENS:
        raise ValueError(f"memory: expected tokens below {MOST_TOKENS}, got {largest}; memory=0 stores nothing")
    end = np.full(1, -1, np.int32)
    return np.concatenate([part for text in texts for part in (text.astype(np.int32), end)])
