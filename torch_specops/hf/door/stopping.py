"""transformers' stopping criteria as rules of the loop."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ...decode.rows import BatchRule, RowRule
from .outputs import Predictions

# As in transformers.
_PREFIX = "abcdef"
# What is known of each tokenizer that is in use, and the lock for adding to it.
_token_bytes: WeakKeyDictionary[Any, _TokenBytes] = WeakKeyDictionary()
_lock = threading.Lock()


class StopRules(NamedTuple):
    """The rules that end rows."""

    lengths: list[int]  # of the longest sequence, prompt and padding included; at least 1
    eos_token_ids: list[int]
    row_rules: list[RowRule]  # their answer for a row depends on this row, or on the clock
    batch_rules: list[BatchRule]  # all others, which are called as transformers would call them


def read_criteria(criteria: StoppingCriteriaList, predictions: Predictions | None) -> StopRules:
    """Sort the criteria; `predictions` has the scores that a criterion may look at.

    Raises:
        ValueError: no length.
    """
    rules = StopRules([], [], [], [])
    for criterion in criteria:
        # Not isinstance: a subclass may do anything.
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            rules.lengths.append(criterion.max_length)
        elif kind is EosTokenCriteria:
            rules.eos_token_ids.extend(torch.as_tensor(criterion.eos_token_id, device="cpu").flatten().tolist())
        elif kind in (StopStringCriteria, MaxTimeCriteria):
            rules.row_rules.append(partial(_ask_of_rows, criterion))
        else:
            rules.batch_rules.append(partial(_ask, criterion, predictions))
    if not rules.lengths:
        raise ValueError("stopping_criteria: expected a MaxLengthCriteria, got none")
    return rules


def stop_string_rule(tokenizer: Any, stop_strings: Sequence[str]) -> RowRule:
    """A text ends with one of these strings, or inside its newest token: transformers' `StopStringCriteria`.
    It makes no table of the vocabulary for each set of strings, and needs no tokenizer that knows all letters.

    Raises:
        ValueError: a tokenizer that does not say what a token adds to a text.
    """
    with _lock:
        tokens = _token_bytes.get(tokenizer)
        if tokens is None:
            tokens = _token_bytes[tokenizer] = _TokenBytes(tokenizer)
    strings: dict[int, set[bytes]] = {}
    for string in map(str.encode, stop_strings):
        strings.setdefault(len(string), set()).add(string)
    return partial(_find_strings, partial(tokens.of, tokenizer), strings)


def _find_strings(
    bytes_of: Callable[[int], bytes | None], strings: dict[int, set[bytes]], texts: list[list[int]]
) -> list[bool]:
    """Whether each text has the end of a string in its newest token; the strings are given by length."""
    longest, ends = max(strings), []
    for text in texts:
        tail = newest = bytes_of(text[-1]) or b""
        # A string has at most as many tokens as bytes.
        for token in reversed(text[-longest:-1]):
            before = bytes_of(token)
            if before is None or len(tail) >= longest + len(newest):
                break
            tail = before + tail
        places = range(len(tail) - len(newest) + 1, len(tail) + 1)
        found = (tail[end - size : end] in own for end in places for size, own in strings.items() if size <= end)
        ends.append(any(found))
    return ends


class _TokenBytes:
    """What the tokens of a tokenizer add to a text; each is found out when it first comes."""

    def __init__(self, tokenizer: Any) -> None:
        self._known: dict[int, bytes] = {}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = b"" if decoder is None else decoder.__getstate__()
        # Tokens may be parts of characters: either they are called <0x0A>, or a letter stands for each of their bytes.
        self._has_named_bytes = b'"ByteFallback"' in kinds
        has_letters = b'"ByteLevel"' in kinds and not self._has_named_bytes
        self._letters = {letter: byte for byte, letter in bytes_to_unicode().items()} if has_letters else {}
        try:
            self._prefix: list[str] = tokenizer.tokenize(_PREFIX)
        # A tokenizer without a token for what is unknown may raise anything.
        except Exception:
            self._prefix = []
        if not any(self.of(tokenizer, token) for token in range(16)):
            raise ValueError(
                f"stop_strings: {type(tokenizer).__name__} does not say what a token adds to a text; "
                "end such texts with eos_token_id, or look for the strings in the tokens of a stream or a handle"
            )

    def of(self, tokenizer: Any, token: int) -> bytes | None:
        """None for a token that the tokenizer does not have, or that changes the text before it."""
        found = self._known.get(token)
        if found is None:
            name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
            found = None if name is None else self._read(tokenizer, name)
            # The tokenizer may get this token later.
            if found is not None:
                self._known[token] = found
        return found

    def _read(self, tokenizer: Any, name: str) -> bytes | None:
        if self._letters and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        if self._has_named_bytes and re.fullmatch("<0x[0-9a-fA-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        # A token may look different where a text begins, so another token stands before it.
        before = self._prefix or [name]
        text, start = tokenizer.convert_tokens_to_string([*before, name]), _PREFIX
        if start not in text:
            start = tokenizer.convert_tokens_to_string(before)
            if not text.startswith(start):
                return None
        return text[text.index(start) + len(start) :].encode()


def _ask_of_rows(criterion: StoppingCriteria, texts: list[list[int]]) -> list[bool]:
    """Show the criterion the newest tokens of each text: as many as a stop string may have, or the last."""
    width = getattr(criterion, "maximum_token_len", 1)
    # No string has a token outside the vocabulary.
    outside = torch.iinfo(torch.int64).max
    newest = [[outside] * (width - len(text)) + text[-width:] for text in texts]
    return criterion(torch.tensor(newest, device="cpu"), None).tolist()


def _ask(criterion: StoppingCriteria, predictions: Predictions | None, input_ids: Tensor) -> Any:
    return criterion(input_ids, None if predictions is None else predictions.scores(input_ids))
