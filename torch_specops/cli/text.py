"""Tokens as text for a terminal: whole characters, and no control sequences."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable


class TextStream:
    """Tokens in, text out as soon as it is whole: a character may take several tokens.

    Args:
        decode_text: tokens to text; bytes that are not yet a character come out as U+FFFD.
    """

    def __init__(self, decode_text: Callable[[list[int]], str]) -> None:
        self._decode_text = decode_text
        # Decoded together with the new tokens, since the first token of a text may lose its leading space.
        self._context: list[int] = []
        self._held: list[tuple[int, bool]] = []

    def push(self, token: int, accepted: bool) -> tuple[str, bool]:
        """The text that this token completes, and whether all tokens of that text were accepted drafts."""
        self._held.append((token, accepted))
        held = [token for token, _ in self._held]
        text = self._decode_text(self._context + held)
        if text.endswith("\ufffd"):
            return "", accepted
        piece = text[len(self._decode_text(self._context)) :]
        all_accepted = all(accepted for _, accepted in self._held)
        self._context, self._held = held, []
        return piece, all_accepted


def printable(text: str) -> str:
    """The text with U+FFFD for every control character but newline and tab: a model may emit escape sequences."""
    return "".join(
        "\ufffd" if unicodedata.category(character) == "Cc" and character not in "\n\t" else character
        for character in text
    )
