"""Grammars of xgrammar and llguidance over the vocabulary of the tiny models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import llguidance
import xgrammar
from tiny_models import VOCAB

from torch_specops import Grammar, grammars

EOS = 2
# The text of every token: special ones, letters, digits, signs, and words that begin like others.
TEXTS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *'{}[]",:- ']
TEXTS += ["ab", "abc", "na", "name", '"a', '":', "10", "100", "tru", "true", "\n"]
TEXTS += [f"<unused {index}>" for index in range(VOCAB - len(TEXTS))]


@cache
def tokenizer_info() -> Any:
    return xgrammar.TokenizerInfo(TEXTS, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[EOS])


@cache
def compiled(regex: str) -> Any:
    return xgrammar.GrammarCompiler(tokenizer_info()).compile_regex(regex)


class _Wrapped:
    """What llguidance reads of a tokenizer."""

    eos_token_id, bos_token_id = EOS, 1
    special_token_ids = (0, 1, EOS)
    tokens = tuple(b"\xff" + text.encode() if text.startswith("<") else text.encode() for text in TEXTS)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self.tokens.index(bytes([byte])) for byte in data]


@cache
def llguidance_tokenizer() -> Any:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Wrapped()), eos_token=[EOS])


# From a regular expression to a new text in it.
LIBRARIES: dict[str, Callable[[str], Grammar]] = {
    "xgrammar": lambda regex: grammars.xgrammar(compiled(regex)),
    "llguidance": lambda regex: grammars.llguidance(
        llguidance_tokenizer(), llguidance.LLMatcher.grammar_from_regex(regex)
    ),
}
