"""Decodes a stream of tokens to pieces of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

# New tokens are decoded together with this many tokens before them, because the first token of a text may lose its
# leading space.
CONTEXT = 4
# If more tokens than this are decoded at once, the older half of them is dropped.
_WINDOW = 16
# The length of the longest string that the clean-up of spaces replaces: " n ' t".
_CLEANED = 6
_BYTE = re.compile("<0x[0-9a-fA-F]{2}>")


class TextPieces:
    """Turns a stream of tokens into a stream of text pieces.

    The concatenated pieces equal the text of `GenerationOutput.texts` with the same arguments: `tokenizer.decode` of
    all new tokens, after the prompt. A piece ends with a whole character, and later tokens never change it. Text that
    later tokens may change is held back: an incomplete character; a run of tokens such as `<0x0A>`, which one wrong
    byte changes; the last characters, with `clean_up_tokenization_spaces`; and a possible beginning of a stop string.

    Args:
        tokenizer: a tokenizer or processor of transformers, a `tokenizers.Tokenizer`, or another object with `decode`.
        prompt: [P] int64, the tokens before the text; without them the text lacks the space that SentencePiece drops at
            the beginning.
        eos_token_id: one token or several. With `skip_special_tokens=True` they are left out of the text, even if the
            tokenizer does not call them special.
        stop_strings: a string or several, not empty; the text ends before the first of them.
        decode_arguments: passed to `decode`. The default is `skip_special_tokens=True`.

    Attributes:
        stopped: whether the text has reached a stop string. All pieces after it are empty.

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
        # `tokenizer` may be a processor, which contains the tokenizer.
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
        self._tokens, self._num_prompt = prompt, len(prompt)
        # `_text` is the text of `_tokens`. `_given` is the part of `_text` that must not be returned again: the prompt,
        # and the pieces returned so far.
        self._text = self._given = self._decode(prompt)
        self._in_bytes = False

    def push(self, token: int) -> str:
        """Add a token. Returns the text that became certain with it, which is often empty."""
        token = int(token)
        if self.stopped or token in self._without_text:
            return ""
        self._tokens.append(token)
        before, self._text = self._text, self._decode(self._tokens)
        if _BYTE.fullmatch(self._name_of(token) or ""):
            self._in_bytes = True
        elif self._text != before:
            # Only a token with text ends a run of byte tokens.
            self._in_bytes = False
        new = self._new_text()
        if any(stop in new for stop in self._stops):
            return self.end()
        if self._in_bytes:
            return ""
        certain = self._first(len(self._text) - _CLEANED * self._cleans - self._text.endswith("\ufffd"))
        if self._num_prompt and len(certain) > len(self._given) and not certain.startswith(self._given):
            # The new token has changed the last character of the prompt, so decode the new tokens without the prompt.
            tokens = self._tokens[self._num_prompt :]
            self._begin([])
            return "".join(map(self.push, tokens))
        certain = self._first(len(certain) - self._tail)
        piece = certain[len(self._given) :]
        if piece:
            self._given, self._num_prompt = certain, 0
        self._shorten()
        return piece

    def text_after(self, token: int) -> str:
        """The text that a token would add now. The token is not added."""
        if self.stopped or token in self._without_text:
            return ""
        text = self._decode([*self._tokens, token])
        return text[len(self._text) :] if text.startswith(self._text) else self._decode([token])

    def end(self) -> str:
        """Return the rest of the text. Called after the last token. An incomplete character at the end becomes
        U+FFFD."""
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
        """All text that was not returned yet, even if later tokens may change it. The text is separated from the prompt
        as in `GenerationOutput.texts`."""
        if self._num_prompt and not self._text.startswith(self._given):
            return self._decode(self._tokens[self._num_prompt :])
        return self._text[len(self._given) :]

    def _shorten(self) -> None:
        """Drop the older half of the tokens if the text of the newer half does not depend on them."""
        # Keep all tokens if spaces are cleaned up, because the result may depend on any earlier token.
        if len(self._tokens) <= _WINDOW or self._num_prompt or self._cleans:
            return
        tokens = self._tokens[len(self._tokens) // 2 :]
        text, waiting = self._decode(tokens), len(self._text) - len(self._given)
        # The newer tokens may begin with the rest of an incomplete character, which gives at most two U+FFFD. Require a
        # third character, which must begin in the newer tokens.
        if self._text.endswith(text) and len(text) > max(waiting, 2):
            self._tokens, self._text, self._given = tokens, text, text[: len(text) - waiting]
