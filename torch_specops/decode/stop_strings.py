"""Ends sequences at stop strings, which are searched in the bytes of the tokens."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from .rows import RowRule

# A token is decoded after this prefix, as in transformers, to see which text the token adds.
_PREFIX = "abcdef"
# The token bytes of each tokenizer in use. `_lock` protects additions.
_token_bytes: WeakKeyDictionary[Any, _TokenBytes] = WeakKeyDictionary()
_lock = threading.Lock()


def stop_string_rule(tokenizer: Any, stop_strings: Sequence[str]) -> RowRule:
    """A rule that ends a sequence if one of these strings ends within its newest token, as in transformers'
    `StopStringCriteria`. Unlike `StopStringCriteria`, the rule makes no table of the vocabulary for each set of
    strings, and the tokenizer need not know all letters.

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
    """Whether a stop string ends within the newest token of each sequence. `strings` has the stop strings by length."""
    longest, ends = max(strings), []
    for text in texts:
        tail = newest = bytes_of(text[-1]) or b""
        # A string of n bytes spans at most n tokens, so no stop string reaches back beyond the last `longest` tokens.
        for token in reversed(text[-longest:-1]):
            before = bytes_of(token)
            if before is None or len(tail) >= longest + len(newest):
                break
            tail = before + tail
        places = range(len(tail) - len(newest) + 1, len(tail) + 1)
        matches = (tail[end - size : end] in group for end in places for size, group in strings.items() if size <= end)
        ends.append(any(matches))
    return ends


def letters_of_bytes() -> dict[str, int]:
    """Maps each letter in the names of GPT-2's tokens to the byte that it stands for. Most printable bytes stand for
    themselves; the other bytes have letters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class _TokenBytes:
    """The bytes that each token of a tokenizer adds to a text. A token is decoded when it first occurs."""

    def __init__(self, tokenizer: Any) -> None:
        self._known: dict[int, bytes] = {}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = b"" if decoder is None else decoder.__getstate__()
        # A token may be part of a character. Its name is then a byte code such as <0x0A>, or has one letter for each
        # byte.
        self._has_named_bytes = b'"ByteFallback"' in kinds
        has_letters = b'"ByteLevel"' in kinds and not self._has_named_bytes
        self._letters = letters_of_bytes() if has_letters else {}
        try:
            self._prefix: list[str] = tokenizer.tokenize(_PREFIX)
        # A tokenizer without a token for unknown text may raise any exception.
        except Exception:
            self._prefix = []
        if not any(self.of(tokenizer, token) for token in range(16)):
            raise ValueError(
                f"stop_strings: {type(tokenizer).__name__} does not say what a token adds to a text; "
                "end such texts with eos_token_id, or look for the strings in the tokens of a stream or a handle"
            )

    def of(self, tokenizer: Any, token: int) -> bytes | None:
        """The bytes that a token adds. None if the tokenizer does not have the token, or if the token changes the text
        before it."""
        added = self._known.get(token)
        if added is None:
            name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
            added = None if name is None else self._read(tokenizer, name)
            # Do not store None, because the tokenizer may get this token later.
            if added is not None:
                self._known[token] = added
        return added

    def _read(self, tokenizer: Any, name: str) -> bytes | None:
        if self._letters and all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        if self._has_named_bytes and re.fullmatch("<0x[0-9a-fA-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        # Decode the token after other tokens, because at the start of a text it may give another text.
        before = self._prefix or [name]
        text, start = tokenizer.convert_tokens_to_string([*before, name]), _PREFIX
        if start not in text:
            start = tokenizer.convert_tokens_to_string(before)
            if not text.startswith(start):
                return None
        return text[text.index(start) + len(start) :].encode()
