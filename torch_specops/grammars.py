"""Grammars say which tokens may come next in a sequence, for structured output.

The decoding loop uses objects with the interface `Grammar`. The functions `xgrammar` and `llguidance` make such an
object with the library of the same name, which is imported when they are called.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .ops.tracing import is_eager_cpu

__all__ = ["Grammar", "allowed_logits", "llguidance", "num_words", "xgrammar"]


@runtime_checkable
class Grammar(Protocol):
    """The state of one sequence, which says which tokens may come next. Any class with these methods works.

    The loop passes only the new tokens to a grammar, not the prompt. Every row and every call needs a new object. The
    loop refuses a grammar that has already accepted a token, and a grammar whose attribute `num_accepted` is above 0. A
    class with `__slots__` needs "__weakref__" among them.

    Examples:
        >>> import torch, torch_specops
        >>> class Alternating:
        ...     "Token 3, token 4, token 3, ..."
        ...     def __init__(self):
        ...         self.count = 0
        ...     def fill_bitmask(self, bitmask, row):
        ...         bitmask[row] = 0
        ...         bitmask[row, 0] = 1 << 3 + self.count % 2
        ...     def accept(self, token):
        ...         is_right = token == 3 + self.count % 2
        ...         self.count += is_right
        ...         return is_right
        ...     def rollback(self, count):
        ...         self.count -= count
        >>> isinstance(Alternating(), torch_specops.Grammar)
        True
    """

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        """Write which tokens may come next.

        Args:
            bitmask: [rows, ceil(V / 32)] int32 on the CPU; bit v % 32 of word v // 32 = token v may come next. Bits at
                or above V are ignored.
            row: the row to write; all of its words are written.
        """

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and leaves the state unchanged, if the token may not come next. The token
        may be an eos token; then the sequence ends."""

    def rollback(self, count: int) -> None:
        """Undo the newest accepted tokens; `count` >= 0 is their number."""


def xgrammar(compiled_grammar: Any) -> Grammar:
    """A `Grammar` for one sequence, from a compiled grammar of the library xgrammar.

    Args:
        compiled_grammar: an `xgrammar.CompiledGrammar`, which any number of sequences may share. The stop tokens of the
            grammar are the eos tokens of its `TokenizerInfo`, which should match the row's eos tokens.

    Raises:
        ModuleNotFoundError: xgrammar is not installed.
        TypeError: not a compiled grammar.

    Examples:
        >>> import torch, xgrammar, torch_specops
        >>> info = xgrammar.TokenizerInfo(["a", "b", "ab", "</s>"], stop_token_ids=[3])
        >>> compiled = xgrammar.GrammarCompiler(info).compile_regex("a(ba)*")
        >>> grammar, bitmask = torch_specops.grammars.xgrammar(compiled), torch.zeros(1, 1, dtype=torch.int32)
        >>> grammar.accept(1), grammar.accept(0)
        (False, True)
        >>> grammar.fill_bitmask(bitmask, 0)
        >>> f"{bitmask.item():04b}"  # "b" or the end
        '1010'
    """
    import xgrammar as library

    if not isinstance(compiled_grammar, library.CompiledGrammar):
        raise TypeError(f"compiled_grammar: expected an xgrammar.CompiledGrammar, got {type(compiled_grammar)}")
    return _Matcher(library.GrammarMatcher(compiled_grammar), compiled_grammar.tokenizer_info.vocab_size)


def llguidance(tokenizer: Any, grammar: str) -> Grammar:
    """A `Grammar` for one sequence, from a grammar of the library llguidance.

    Args:
        tokenizer: an `llguidance.LLTokenizer`; or a fast tokenizer of transformers, which is converted in about half a
            second. For several sequences, convert the tokenizer once with `llguidance.hf.from_tokenizer`.
        grammar: as `llguidance.LLMatcher` takes it, for example from `LLMatcher.grammar_from_json_schema`.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
        TypeError: a wrong tokenizer.
        ValueError: a wrong grammar.

    Examples:
        >>> import torch, torch_specops
        >>> from importlib.resources import files
        >>> from llguidance import LLMatcher
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained(files("torch_specops") / "data" / "austen_bytes" / "target")
        >>> grammar = torch_specops.grammars.llguidance(tokenizer, LLMatcher.grammar_from_regex("a(ba)*"))
        >>> grammar.accept(ord("b")), grammar.accept(ord("a"))
        (False, True)
    """
    from llguidance import LLMatcher, LLTokenizer

    if not isinstance(tokenizer, LLTokenizer):
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise TypeError(
                f"tokenizer: expected an LLTokenizer, or a fast tokenizer of transformers, got {type(tokenizer)}"
            )
        from llguidance.hf import from_tokenizer

        tokenizer = from_tokenizer(tokenizer)
    matcher = LLMatcher(tokenizer, grammar)
    if matcher.is_error():
        raise ValueError(
            "grammar: expected Lark, or a grammar made by LLMatcher.grammar_from_json_schema or grammar_from_regex; "
            f"llguidance says: {matcher.get_error()}"
        )
    return _Matcher(_LLGuidance(matcher, tokenizer.eos_tokens), tokenizer.vocab_size)


class _Matcher:
    """A `Grammar` that wraps a matcher with xgrammar's methods. The matcher's vocabulary may be larger or smaller than
    the logits.

    Attributes:
        num_accepted: the number of tokens that were accepted and not rolled back, by any caller.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self.num_accepted = 0
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token: int) -> bool:
        is_accepted: bool = self._matcher.accept_token(token)
        self.num_accepted += is_accepted
        return is_accepted

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self.num_accepted:
            raise ValueError(f"count: expected a number in [0, {self.num_accepted}], the accepted tokens, got {count}")
        self._matcher.rollback(count)
        self.num_accepted -= count

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        words = num_words(self._vocab_size)
        if bitmask.shape[1] != words:
            # Fill a mask of `words` words and copy it, because the libraries accept no other width.
            temporary = torch.zeros(1, words, dtype=torch.int32, device="cpu")
            self.fill_bitmask(temporary, 0)
            bitmask[row, :words] = temporary[0, : bitmask.shape[1]]
            bitmask[row, words:] = 0
            return
        self._matcher.fill_next_token_bitmask(bitmask, row)
        if self._vocab_size % 32:
            # Clear the bits beyond the vocabulary, because xgrammar sets them if all tokens are allowed.
            bitmask[row, -1] &= (1 << self._vocab_size % 32) - 1


class _LLGuidance:
    """Wraps a matcher of llguidance so that it has xgrammar's methods."""

    def __init__(self, matcher: Any, eos_tokens: list[int]) -> None:
        self._matcher = matcher
        self._eos_tokens = eos_tokens
        # True = the newest accepted token is an eos token that llguidance has not counted, so `rollback` must not count
        # it either.
        self._has_ended = False

    def fill_next_token_bitmask(self, bitmask: Tensor, row: int) -> None:
        mask = bitmask[row]
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        self._check()

    def accept_token(self, token: int) -> bool:
        if not self._matcher.is_stopped():
            return bool(self._matcher.try_consume_tokens([token]))
        self._check()
        if self._has_ended or token not in self._eos_tokens or self._matcher.stop_reason() == "EndOfSentence":
            return False
        self._has_ended = True
        return True

    def rollback(self, count: int) -> None:
        if count > 0 and self._has_ended:
            self._has_ended = False
            count -= 1
        self._matcher.rollback(count)
        self._check()

    def _check(self) -> None:
        # The matcher stores errors instead of raising them.
        if self._matcher.is_error():
            raise RuntimeError(f"llguidance: {self._matcher.get_error().splitlines()[0]}")


def num_words(vocab_size: int) -> int:
    """The number of int32 words per row of a bitmask."""
    return -(-vocab_size // 32)


# [256, 8]: for each byte of a bitmask, the numbers (0 or -inf) to add to the logits of its eight tokens.
_OF_BYTES = torch.where(
    torch.arange(256, device="cpu").unsqueeze(1) >> torch.arange(8, device="cpu") & 1 == 1, 0.0, -math.inf
)


def allowed_logits(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Set the logits [B, n, V] of tokens that the bitmask [B, n, ceil(V / 32)] does not allow to -inf, or to NaN where
    a logit is infinite."""
    if is_eager_cpu(logits, bitmask):
        # Look up the eight summands of each byte in a table. On a CPU this is by far the fastest eager form.
        added = torch.nn.functional.embedding(bitmask.view(torch.uint8).int(), _OF_BYTES.to(logits.dtype))
        return logits + added.flatten(2)[..., : logits.shape[2]]
    bits = bitmask.unsqueeze(3) >> torch.arange(32, dtype=torch.int32, device=bitmask.device) & 1
    return logits.masked_fill(bits.flatten(2)[..., : logits.shape[2]] == 0, -math.inf)
