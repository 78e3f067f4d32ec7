"""Grammars over small vocabularies, and the libraries' own over the tokens of the tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llguidance
import torch
import xgrammar
from tiny_models import VOCAB
from torch import Tensor

from torch_specops import Grammar, grammars

EOS = 2
# The text of every token: special ones, letters, digits, signs, and words that begin like others.
TEXTS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *'{}[]",:- ']
TEXTS += ["ab", "abc", "na", "name", '"a', '":', "10", "100", "tru", "true", "\n"]
TEXTS += [f"<unused {index}>" for index in range(VOCAB - len(TEXTS))]


class Allowing:
    """The grammar in which the tokens `allowed(text)` may come next. It knows all of its text, and is strict."""

    def __init__(self, allowed: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
        self.allowed = allowed
        self.text: tuple[int, ...] = ()
        self.asked: list[tuple[int, ...]] = []

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        self.asked.append(self.text)
        words = [0] * bitmask.shape[1]
        for token in self.allowed(self.text):
            words[token // 32] |= 1 << token % 32
        bitmask[row] = torch.tensor(words, device="cpu").to(torch.int32)

    def accept(self, token: int) -> bool:
        if token not in self.allowed(self.text):
            return False
        self.text += (token,)
        return True

    def rollback(self, count: int) -> None:
        assert 0 <= count <= len(self.text)
        self.text = self.text[: len(self.text) - count]


def by_turns(text: tuple[int, ...]) -> list[int]:
    """A fifth of the tokens at each place, another fifth at the next one, and every fourth place is forced."""
    place = len(text)
    return [11 + place % 3] if place % 4 == 3 else [token for token in range(VOCAB) if token % 5 == place % 5]


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


def allowed_tokens(grammar: Grammar, vocab_size: int = VOCAB) -> list[int]:
    """The tokens that may come next."""
    bitmask = torch.full((2, grammars.num_words(vocab_size)), -1, dtype=torch.int32)
    grammar.fill_bitmask(bitmask, 1)
    assert bool((bitmask[0] == -1).all())
    bits = bitmask[1].unsqueeze(1) >> torch.arange(32) & 1
    return bits.flatten().nonzero().flatten().tolist()
