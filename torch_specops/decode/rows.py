"""The sequences of a batch on the host, and rules that end them in addition to eos tokens and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grammars import Grammar

# Takes sequences (each is prompt + new tokens). Returns for each, independently, whether it ends with its newest token.
RowRule = Callable[[list[list[int]]], list[bool]]
# Takes all rows [B, P + n], each with n new tokens. Returns whether each row ends with its newest token [B], or one
# bool for all rows.
BatchRule = Callable[[Tensor], Any]


class RowStep(NamedTuple):
    """What a row did in a step.

    Args:
        num_tokens: emitted tokens, before a rule cut tokens at the end of the row.
        num_accepted, num_proposed: accepted drafts and verified drafts.
        rejected: the first rejected draft; -1 = none.
    """

    num_tokens: int
    num_accepted: int
    num_proposed: int
    rejected: int = -1


@dataclass(eq=False)
class Row:
    """A sequence in a row of a batch, with the tokens that the host has read so far.

    Args:
        prompt: the tokens of the prompt.
        limit: the length at which the sequence ends.
        eos: the tokens that end the sequence.
        rules: called for every new token, in order.
        grammar: restricts the new tokens, and has accepted all tokens so far.
        ended: whether the sequence gets no more tokens.
        reason, error: why the sequence ended; set once all of its tokens are released.
        tokens: the new tokens.
        steps: the steps in which the row took part.
        num_released: how many new tokens are final, so that no rule can cut them.
        is_stopped: whether a rule has ended the sequence.
        grammar_error: the number of new tokens after which the grammar has a dead end, and why; None = no dead end was
            found so far.
    """

    prompt: list[int]
    limit: int
    eos: list[int]
    rules: Sequence[RowRule]
    grammar: Grammar | None = None
    ended: bool = False
    reason: str | None = None
    error: str | None = None
    tokens: list[int] = field(default_factory=list)
    steps: list[RowStep] = field(default_factory=list)
    num_released: int = 0
    is_stopped: bool = False
    grammar_error: tuple[int, str] | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + self.num_released

    @property
    def finished(self) -> bool:
        return self.ended and self.num_released == len(self.tokens)

    def cut(self, num_tokens: int) -> bool:
        """End the sequence after this many new tokens. Returns False if it has fewer tokens."""
        if num_tokens > len(self.tokens):
            return False
        del self.tokens[num_tokens:]
        self.ended = self.is_stopped = True
        return True

    def set_finish_reason(self) -> None:
        """Set `reason`, and `error` if the target or the grammar failed."""
        if self.error is not None:
            self.reason = "error"
        elif self.tokens and self.tokens[-1] in self.eos:
            self.reason = "eos"
        elif self.is_stopped:
            self.reason = "stop"
        elif self.length == self.limit:
            self.reason = "length"
        else:
            among = "" if self.grammar is None else " among the tokens that the grammar allows"
            why = f"target: no finite logit{among}"
            if self.grammar_error is not None and self.grammar_error[0] == len(self.tokens):
                why = self.grammar_error[1]
            self.reason, self.error = "error", f"{why} after {self.length} tokens"


def ask_row_rules(rows: Sequence[Row], num_new: Sequence[int]) -> set[int]:
    """Call the rules of each row for its `num_new` newest tokens. Returns the rows that the rules cut."""
    # Call each rule once, for all rows that have it.
    asked: dict[RowRule, list[tuple[int, int]]] = {}
    for index, (row, count) in enumerate(zip(rows, num_new, strict=True)):
        for rule in row.rules if count else ():
            asked.setdefault(rule, []).extend((index, len(row.tokens) - left) for left in reversed(range(count)))
    cuts = set()
    for rule, places in asked.items():
        ends = rule([rows[index].prompt + rows[index].tokens[:length] for index, length in places])
        cuts |= {index for (index, length), end in zip(places, ends, strict=True) if end and rows[index].cut(length)}
    return cuts


class BatchRules:
    """Calls rules that look at all rows together. The rules see the n-th new token of all rows once every row has n new
    tokens or has ended. Rows that ended before are padded with pad_token_id. A token is held back until the rules have
    seen it, because a rule may still cut it.

    Args:
        input_ids: [B, P], the prompts as the rules see them.

    Attributes:
        num_asked: the number of new tokens per row that the rules have seen.
    """

    def __init__(self, rules: Sequence[BatchRule], input_ids: Tensor, pad_token_id: int) -> None:
        self.num_asked = 0
        self._rules = rules
        self._seen = input_ids
        self._pad_token_id = pad_token_id

    def ask(self, rows: Sequence[Row]) -> set[int]:
        """Call the rules for each new token that all unfinished rows have. Returns the rows that the rules cut."""
        cuts = set()
        while self.num_asked < _num_known(rows):
            place, self.num_asked = self.num_asked, self.num_asked + 1
            column = [row.tokens[place] if place < len(row.tokens) else self._pad_token_id for row in rows]
            newest = torch.tensor(column, device=self._seen.device)
            self._seen = torch.cat([self._seen, newest.unsqueeze(1)], 1)
            for rule in self._rules:
                ends = torch.as_tensor(rule(self._seen), device="cpu").bool().expand(len(rows)).tolist()
                cuts |= {index for index, end in enumerate(ends) if end and rows[index].cut(place + 1)}
        return cuts


def _num_known(rows: Sequence[Row]) -> int:
    """The smallest number of new tokens of the unfinished rows. If all rows have ended, the largest number of any
    row."""
    growing = [len(row.tokens) for row in rows if not row.ended]
    return min(growing, default=max(len(row.tokens) for row in rows))
