"""Asks the grammars of rows which tokens may come next. Grammars are asked in every step, after drafting and before
verification."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..drafts import Draft
from ..grammars import Grammar, num_words
from .rows import Row

# A step without a draft verifies at most this many forced tokens per row. A forced token is the only token that the
# grammar allows.
MAX_FORCED = 16

# The grammars that sequences have used. The keys are ids, because a grammar may compare by value or not be hashable.
_used: dict[int, weakref.ref[Grammar]] = {}
_USED = "it is the state of one text, and another text has used it; make a new grammar for every row and call"


def check_grammar(grammar: object) -> None:
    """Raise if the object is not a `Grammar`, or if another sequence has used it."""
    if isinstance(grammar, type) or not isinstance(grammar, Grammar):
        raise TypeError(
            "grammar: expected a Grammar (an object with fill_bitmask, accept and rollback), as "
            "torch_specops.grammars.xgrammar(compiled_grammar) or .llguidance(tokenizer, grammar) makes it, got "
            f"{type(grammar)}"
        )
    try:
        weakref.ref(grammar)
    except TypeError as error:
        raise TypeError(f"grammar: expected '__weakref__' in __slots__, got {type(grammar)} without it") from error
    if _is_used(grammar):
        raise ValueError(f"grammar: {_USED}")


def _is_used(grammar: Grammar) -> bool:
    if getattr(grammar, "num_accepted", 0) > 0:
        return True
    reference = _used.get(id(grammar))
    return reference is not None and reference() is grammar


def _mark_used(grammar: Grammar) -> None:
    key = id(grammar)
    _used[key] = weakref.ref(grammar, lambda _: _used.pop(key, None))


def masks_of(
    rows: Sequence[Row],
    drafts: Sequence[Sequence[int]],
    vocab_size: int,
    *,
    deterministic: Sequence[bool],
    max_drafts: int,
    width: int | None,
) -> tuple[Tensor, Tensor]:
    """The drafts to verify, and the tokens that may come next at each position of a step. The tokens before a position
    are the sequence and the drafts before the position.

    If a row's drafts are deterministic, a forbidden draft is dropped with the drafts after it, and forced tokens fill
    the free positions. A forbidden draft that was sampled stays: its p is 0, so it is rejected, and the next token is
    drawn from the residual. If it were dropped, the next token would be drawn from p, which would change the output's
    distribution.

    If the grammar raises at a position or allows no token there, the mask of that position is empty. The row ends with
    an error when it reaches the position.

    Args:
        rows: the B rows of the batch.
        drafts: the drafts of each row; tokens from the first outside [0, V) on are ignored.
        vocab_size: the size of the logits, V.
        deterministic: for each row, whether its drafts are deterministic, or share the target's noise and may be
            replaced.
        max_drafts: the largest number of drafts of a row, including forced tokens.
        width: K; None = the largest number of drafts of any row.

    Returns:
        The drafts [B, K] int64, padded with -1, and the bitmask [B, K + 1, ceil(V / 32)] int32, both on the CPU.
    """
    chosen = [list(row_drafts) for row_drafts in drafts]
    size = max([max_drafts, *map(len, chosen)]) + 1
    bitmask = torch.full((len(rows), size, num_words(vocab_size)), -1, dtype=torch.int32, device="cpu")
    for index, row in enumerate(rows):
        if row.grammar is not None and not row.ended:
            most = max(min(row.limit - row.length - 1, max_drafts), 0)
            walk = _Walk(row, row.grammar, bitmask[index], vocab_size)
            chosen[index] = walk.drafts(chosen[index][:most], most, deterministic[index])
    width = max(map(len, chosen)) if width is None else width
    padded = [row_drafts + [-1] * (width - len(row_drafts)) for row_drafts in chosen]
    tokens = torch.tensor(padded, dtype=torch.int64, device="cpu")
    return tokens.view(len(rows), width), bitmask[:, : width + 1]


def accept_tokens(row: Row, grammar: Grammar, start: int) -> bool:
    """Advance a row's grammar by the row's new tokens from index `start` on. Returns False if the grammar refuses a
    token; the row then ends before that token, with an error."""
    if start == 0 < len(row.tokens):
        # Mark the grammar as used only at its first token, so that another call may take a grammar that has no token
        # yet.
        _mark_used(grammar)
    place = start
    try:
        for place in range(start, len(row.tokens)):
            if not grammar.accept(row.tokens[place]):
                raise _Contradiction(f"refuses token {row.tokens[place]}, which its mask allows,")
    except Exception as error:
        row.error = f"{_text_of(error)} after {len(row.prompt) + place} tokens"
        row.cut(place)
        return False
    return True


def all_allowed(vocab_size: int, proposal: Draft) -> tuple[Draft, Tensor]:
    """The unchanged drafts of a step, and a bitmask [B, K + 1, ceil(V / 32)] that allows all tokens."""
    batch, num_draft_tokens = proposal.tokens.shape
    shape = batch, num_draft_tokens + 1, num_words(vocab_size)
    return proposal, torch.full(shape, -1, dtype=torch.int32, device=proposal.tokens.device)


class _Walk:
    """Advances a grammar over a row's drafts, and rolls it back.

    Args:
        bitmask: [n, ceil(V / 32)] int32 with all bits set; the walk writes masks to it.
    """

    def __init__(self, row: Row, grammar: Grammar, bitmask: Tensor, vocab_size: int) -> None:
        self._row = row
        self._grammar = grammar
        self._bitmask = bitmask
        self._vocab_size = vocab_size
        row.grammar_error = None

    def drafts(self, drafts: list[int], most: int, deterministic: bool) -> list[int]:
        """The drafts to verify, at most `most` of them."""
        verified: list[int] = []
        num_accepted = 0
        try:
            if not self._row.tokens and _is_used(self._grammar):
                raise _Contradiction(_USED)
            while True:
                self._fill(len(verified))
                draft = drafts[len(verified)] if len(verified) < len(drafts) else -1
                is_token = 0 <= draft < self._vocab_size
                if not (is_token and self._allows(len(verified), draft)):
                    if not deterministic:
                        return [*verified, draft] if is_token else verified
                    drafts, draft = [], self._only_token(len(verified))
                    if draft < 0 or len(verified) == most:
                        return verified
                verified.append(draft)
                if draft in self._row.eos:
                    return verified
                if not self._grammar.accept(draft):
                    raise _Contradiction(f"refuses token {draft}, which its mask allows,")
                num_accepted += 1
        except Exception as error:
            self._end(len(verified), error)
            return verified
        except BaseException:
            # An interrupt may have left the grammar in the middle of a change, so no other call may use it.
            _mark_used(self._grammar)
            raise
        finally:
            self._roll_back(num_accepted)

    def _fill(self, place: int) -> None:
        self._grammar.fill_bitmask(self._bitmask, place)
        if self._vocab_size % 32:
            # Clear the bits beyond the vocabulary, because `_only_token` would count them.
            self._bitmask[place, -1] &= (1 << self._vocab_size % 32) - 1

    def _allows(self, place: int, token: int) -> bool:
        return int(self._bitmask[place, token // 32].item()) >> token % 32 & 1 == 1

    def _only_token(self, place: int) -> int:
        """The only token that the grammar allows; -1 if it allows several."""
        words = self._bitmask[place].nonzero()
        if len(words) == 0:
            raise _Contradiction("allows no token")
        if len(words) > 1:
            return -1
        word = int(words.item())
        bits = int(self._bitmask[place, word].item()) & 0xFFFFFFFF
        return word * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else -1

    def _end(self, place: int, error: Exception) -> None:
        self._bitmask[place] = 0
        self._row.grammar_error = len(self._row.tokens) + place, _text_of(error)

    def _roll_back(self, count: int) -> None:
        try:
            self._grammar.rollback(count)
        except Exception as error:
            self._end(0, error)


class _Contradiction(Exception):
    """Raised if a grammar allows no token, or refuses a token that its mask allows."""


def _text_of(error: Exception) -> str:
    return f"grammar: {error}" if isinstance(error, _Contradiction) else f"grammar: {type(error).__name__}: {error}"
