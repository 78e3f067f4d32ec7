"""Grammars over the vocabulary of the tiny models, written in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tiny_models import VOCAB
from torch import Tensor

from torch_specops import Grammar, grammars


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


def allowed_tokens(grammar: Grammar, vocab_size: int = VOCAB) -> list[int]:
    """The tokens that may come next."""
    bitmask = torch.full((2, grammars.num_words(vocab_size)), -1, dtype=torch.int32)
    grammar.fill_bitmask(bitmask, 1)
    assert bool((bitmask[0] == -1).all())
    bits = bitmask[1].unsqueeze(1) >> torch.arange(32) & 1
    return bits.flatten().nonzero().flatten().tolist()
