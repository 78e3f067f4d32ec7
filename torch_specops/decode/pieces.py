"""Decodes tokens to pieces of text as they come."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

# Tokens before the new ones that are decoded with them: alone, tokens may lose the space before them.
CONTEXT = 4
# A window of more tokens than this is halved.
_WINDOW = 16
# The most characters that the clean-up of spaces replaces at once: " n ' t".
_CLEANED = 6
_BYTE = re.compile("<0x[0-9a-fA-F]{2}>")


class TextPieces:
    """Turns tokens into text, piece by piece, as they come.

    The pieces of a text add up to what `GenerationOutput.texts` gives with the same arguments: `tokenizer.decode` of
    all new tokens, after the prompt. A piece ends with a whole character and never has to be taken back. What is not
    certain yet waits for the next tokens: half a character; a run of tokens like `<0x0A>`, which one wrong byte
    changes; with `clean_up_tokenization_spaces` the last characters; what may begin a stop string.

    Args:
        tokenizer: a tokenizer or processor of transformers, a `tokenizers.Tokenizer`, or another object with `decode`.
        prompt: [P] int64, the tokens before the text; without them the text loses the space that SentencePiece drops at
            a beginning.
        eos_token_id: a token or several, which have no text with `skip_special_tokens=True`, special or not.
        stop_strings: a string or several, not empty; the text ends before the first one in it.
        decode_arguments: passed to `decode`. The default is `skip_special_tokens=True`.

    Attributes:
        stopped: whether a stop string has come. All further pieces are empty.

    Raises:
        ValueError: an empty stop string.

    Examples:
        >>> from importlib.resources import files
        >>> from torch_specops import TextPieces
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(files("torch_specops") / "data" / "austen_bytes" / "target")
        >>> pieces = TextPieces(tokenizer, stop_strings=["!"])
        >>> [pieces.push(token) for token in tokenizer("été!?")["input_ids"]], pieces.end(), pieces.stopped
        (['', 'é', 't', '', 'é', '', ''], '', True)
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] | Tensor = (),
        *,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        **decode_arguments: Any,
    ) -> None:
        arguments = {"skip_special_tokens": True} | decode_arguments
        self.stopped = False
        self._decode = partial(tokenizer.decode, **arguments)
        # A processor has a tokenizer.
        inner = getattr(tokenizer, "tokenizer", tokenizer)
        of_tokenizers = getattr(inner, "id_to_token", lambda token: None)
        self._name_of = getattr(inner, "convert_ids_to_tokens", of_tokenizers)
        cleans = arguments.get("clean_up_tokenization_spaces")
        self._cleans = getattr(inner, "clean_up_tokenization_spaces", False) is True if cleans is None else cleans
        eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        self._without_text = eos if arguments["skip_special_tokens"] else set()
        self._stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
        if "" in self._stops:
            raise ValueError("stop_strings: expected strings that are not empty, got ''")
        self._tail = max(map(len, self._stops), default=1) - 1
        self._begin([int(token) for token in prompt[-CONTEXT:]])

    def _begin(self, prompt: list[int]) -> None:
        # The newest tokens, their text, and the part of it that is not new: the prompt, then the pieces given so far.
        self._tokens, self._num_prompt = prompt, len(prompt)
        self._text = self._given = self._decode(prompt)
        self._in_bytes = False

    def push(self, token: int) -> str:
        """The text that this token makes certain; often empty."""
        token = int(token)
        if self.stopped or token in self._without_text:
            return ""
        self._tokens.append(token)
        before, self._text = self._text, self._decode(self._tokens)
        if _BYTE.fullmatch(self._name_of(token) or ""):
            self._in_bytes = True
        elif self._text != before:
            # A token without text does not end a run of bytes.
            self._in_bytes = False
        new = self._new_text()
        if any(stop in new for stop in self._stops):
            return self.end()
        if self._in_bytes:
            return ""
        certain = self._first(len(self._text) - _CLEANED * self._cleans - self._text.endswith("\ufffd"))
        if self._num_prompt and len(certain) > len(self._given) and not certain.startswith(self._given):
            # The new token changed the character at the end of the prompt.
            tokens = self._tokens[self._num_prompt :]
            self._begin([])
            return "".join(map(self.push, tokens))
        certain = self._first(len(certain) - self._tail)
        piece = certain[len(self._given) :]
        if piece:
            self._given, self._num_prompt = certain, 0
        self._shorten()
        return piece

    def end(self) -> str:
        """The rest, after the last token; half a character at the end is U+FFFD."""
        if self.stopped:
            return ""
        text = self._new_text()
        places = [text.index(stop) for stop in self._stops if stop in text]
        self.stopped = bool(places)
        self._given, self._num_prompt = self._text, 0
        return text[: min(places, default=len(text))]

    def _first(self, length: int) -> str:
        return self._text[: max(length, 0)]

    def _new_text(self) -> str:
        """The text that was not given yet, certain or not, cut from the prompt as in `GenerationOutput.texts`."""
        if self._num_prompt and not self._text.startswith(self._given):
            return self._decode(self._tokens[self._num_prompt :])
        return self._text[len(self._given) :]

    def _shorten(self) -> None:
        """Drop the older half of the tokens if the text of the newer half does not depend on them."""
        # The clean-up of spaces may depend on all earlier tokens.
        if len(self._tokens) <= _WINDOW or self._num_prompt or self._cleans:
            return
        tokens = self._tokens[len(self._tokens) // 2 :]
        text, waiting = self._decode(tokens), len(self._text) - len(self._given)
        # Half a character has at most three bytes, so of three characters at least one begins among these tokens.
        if self._text.endswith(text) and len(text) > max(waiting, 2):
            self._tokens, self._text, self._given = tokens, text, text[: len(text) - waiting]
