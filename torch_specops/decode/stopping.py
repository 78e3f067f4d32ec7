"""Ends rows by a caller's rules (stop strings, stopping criteria), beside eos tokens and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["BatchRule", "RowRule", "Stopping"]

# From texts (prompt and new tokens) to whether each ends with its newest token. Texts are judged independently.
RowRule = Callable[[list[list[int]]], list[bool]]
# From all rows [B, P + n], with equally many new tokens, to which of them end with the newest token [B], or whether all
# do.
BatchRule = Callable[[Tensor], Any]


@dataclass
class Stopping:
    """Asks the rules about every new token in order, and holds back tokens that a rule may still cut.

    A `RowRule` is asked at once. Rows get different numbers of tokens per step, so a `BatchRule` is asked about the
    n-th tokens once every row has n or has ended; a row that ended before is filled with pad_token_id.

    Args:
        prompts: the tokens that the rules see before the new ones; of equal lengths if there is a `BatchRule`.
        row_rules, batch_rules: the rules.
        pad_token_id: as in `Prompts`.
        device: where a `BatchRule` gets its tensor.

    Attributes:
        stopped: whether a rule ended the row.
        cuts: row -> how many new tokens it keeps, for the rows that the newest call of `add` ended.
    """

    prompts: list[list[int]]
    row_rules: Sequence[RowRule] = ()
    batch_rules: Sequence[BatchRule] = ()
    pad_token_id: int = 0
    device: torch.device | str = "cpu"
    stopped: list[bool] = field(init=False)
    cuts: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        batch = len(self.prompts)
        self.stopped = [False] * batch
        self._texts: list[list[int]] = [[] for _ in range(batch)]
        self._ended = [False] * batch
        self._num_shown = [0] * batch
        self._num_asked = 0
        if self.batch_rules:
            self._seen = torch.tensor(self.prompts, device=self.device)

    def add(self, tokens: list[list[int]], ended: list[bool]) -> tuple[list[list[int]], list[bool]]:
        """Ask the rules about a step.

        Args:
            tokens: what each row emitted.
            ended: whether each row has reached its eos or limit.

        Returns:
            Of each row the tokens, not yet returned, that no rule can cut any more, and whether it ends with them.
        """
        self.cuts = {}
        for row, new in enumerate(tokens):
            self._texts[row] += new
            self._ended[row] |= ended[row]
        self._ask_of_rows([len(new) for new in tokens])
        self._ask_of_batch()
        lengths = [len(text) for text in self._texts]
        settled = [min(length, self._num_asked) for length in lengths] if self.batch_rules else lengths
        ends = zip(self._texts, self._num_shown, settled, strict=True)
        shown = [text[start:stop] for text, start, stop in ends]
        self._num_shown = settled
        finished = [end and stop == length for end, stop, length in zip(self._ended, settled, lengths, strict=True)]
        return shown, finished

    def _ask_of_rows(self, num_new: list[int]) -> None:
        places, texts = [], []
        for row, count in enumerate(num_new):
            whole = self.prompts[row] + self._texts[row]
            for left in reversed(range(count)):
                places.append((row, len(self._texts[row]) - left))
                texts.append(whole[: len(whole) - left])
        if not texts:
            return
        answers = [rule(texts) for rule in self.row_rules]
        for (row, length), *answer in zip(places, *answers, strict=True):
            if any(answer):
                self._stop(row, length)

    def _ask_of_batch(self) -> None:
        if not self.batch_rules:
            return
        while self._num_asked < self._num_known():
            asked = self._num_asked = self._num_asked + 1
            column = [text[asked - 1] if asked <= len(text) else self.pad_token_id for text in self._texts]
            self._seen = torch.cat([self._seen, torch.tensor(column, device=self.device).unsqueeze(1)], 1)
            answers = [torch.as_tensor(rule(self._seen)).bool().expand(len(column)) for rule in self.batch_rules]
            for row, answer in enumerate(zip(*(each.tolist() for each in answers), strict=True)):
                if any(answer):
                    self._stop(row, asked)

    def _num_known(self) -> int:
        """How many new tokens every row has; a row that has ended counts as if it had as many as the longest."""
        lengths = [len(text) for text in self._texts]
        growing = [length for length, ended in zip(lengths, self._ended, strict=True) if not ended]
        return min(growing, default=max(lengths))

    def _stop(self, row: int, length: int) -> None:
        """End a row after its first `length` new tokens, unless it ended before."""
        if length > len(self._texts[row]):
            return
        del self._texts[row][length:]
        self._ended[row] = self.stopped[row] = True
        self.cuts[row] = length
