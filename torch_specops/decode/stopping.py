"""Ends rows by a caller's rules (stop strings, stopping criteria), beside eos tokens and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["BatchRule", "RowRule", "Stopping"]

# From texts (prompt and new tokens) to whether each ends with its newest token. Texts are judged independently.
RowRule = Callable[[list[list[int]]], list[bool]]
# From all rows [B, P + n], with equally many new tokens, to which of them end with the newest token [B], or whether all
# do.
BatchRule = Callable[[Tensor], Any]


class Stopping:
    """Asks the rules about every new token in order, and holds back tokens that a rule may still cut.

    A `RowRule` is asked at once. Rows get different numbers of tokens per step, so a `BatchRule` is asked about the
    n-th tokens once every row has n or has ended; a row that ended before is filled with pad_token_id.

    Args:
        prompts: the tokens that the rules see before the new ones; of equal lengths if there is a `BatchRule`.
        row_rules: for all rows.
        batch_rules: for all rows together.
        pad_token_id: as in `Prompts`.
        device: where a `BatchRule` gets its tensor.

    Attributes:
        cuts: row -> how many new tokens it keeps, for the rows that the newest call of `add` ended.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        row_rules: Sequence[RowRule] = (),
        batch_rules: Sequence[BatchRule] = (),
        pad_token_id: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.cuts: dict[int, int] = {}
        self._batch_rules = batch_rules
        self._pad_token_id = pad_token_id
        self._device = device
        num_rows = len(prompts)
        self._prompts = prompts
        self._rules = [row_rules] * num_rows
        self._texts: list[list[int]] = [[] for _ in range(num_rows)]
        self._ended = [False] * num_rows
        self._num_shown = [0] * num_rows
        self._num_asked = 0
        self._seen: Tensor | None = None

    def begin(self, row: int, prompt: list[int], rules: Sequence[RowRule]) -> None:
        """Begin another text in a row, with rules of its own."""
        self._rules[row], self._prompts[row], self._texts[row] = rules, prompt, []
        self._ended[row], self._num_shown[row] = False, 0

    def add(self, tokens: list[list[int]], ended: list[bool]) -> tuple[list[list[int]], list[bool]]:
        """Ask the rules about a step.

        Args:
            tokens: the tokens that each row emitted.
            ended: whether each row has reached its eos or limit.

        Returns:
            Of each row the tokens, not yet returned, that no rule can cut any more, and whether it ends with them.
        """
        self.cuts = {}
        for row, new in enumerate(tokens):
            self._texts[row] += new
            self._ended[row] |= ended[row]
        self._ask_of_rows(tokens)
        self._ask_of_batch()
        lengths = [len(text) for text in self._texts]
        settled = [min(length, self._num_asked) for length in lengths] if self._batch_rules else lengths
        shown = [text[start:stop] for text, start, stop in zip(self._texts, self._num_shown, settled, strict=True)]
        self._num_shown = settled
        finished = [end and stop == length for end, stop, length in zip(self._ended, settled, lengths, strict=True)]
        return shown, finished

    def _ask_of_rows(self, tokens: list[list[int]]) -> None:
        # Rows with the same rule are asked about together.
        asked: dict[RowRule, list[tuple[int, int]]] = {}
        for row, new in enumerate(tokens):
            length = len(self._texts[row])
            for rule in self._rules[row]:
                asked.setdefault(rule, []).extend((row, length - left) for left in reversed(range(len(new))))
        for rule, places in asked.items():
            texts = [self._prompts[row] + self._texts[row][:length] for row, length in places]
            for (row, length), ends in zip(places, rule(texts) if texts else (), strict=True):
                if ends:
                    self._stop(row, length)

    def _ask_of_batch(self) -> None:
        while self._batch_rules and self._num_asked < self._num_known():
            asked = self._num_asked = self._num_asked + 1
            column = [text[asked - 1] if asked <= len(text) else self._pad_token_id for text in self._texts]
            before = torch.tensor(self._prompts, device=self._device) if self._seen is None else self._seen
            self._seen = torch.cat([before, torch.tensor(column, device=self._device).unsqueeze(1)], 1)
            for rule in self._batch_rules:
                answer = torch.as_tensor(rule(self._seen)).bool().expand(len(column))
                for row, ends in enumerate(answer.tolist()):
                    if ends:
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
        self._ended[row] = True
        self.cuts[row] = length
