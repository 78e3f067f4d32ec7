"""transformers' stopping criteria as rules of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..decode.rows import BatchRule, RowRule
from .outputs import Predictions

__all__ = ["StopRules", "read_criteria", "stop_string_rule"]


@dataclass(frozen=True)
class StopRules:
    """The rules that end rows.

    Args:
        max_length: the longest sequence, prompt and padding included.
        eos_token_ids: tokens that end a row.
        row_rules: criteria whose answer for a row depends on this row, or on the clock.
        batch_rules: all others, which are called as transformers would call them.
    """

    max_length: int
    eos_token_ids: list[int]
    row_rules: list[RowRule]
    batch_rules: list[BatchRule]


def read_criteria(criteria: StoppingCriteriaList, predictions: Predictions | None) -> StopRules:
    """Sort the criteria; `predictions` has the scores that a criterion may look at.

    Raises:
        ValueError: no length.
    """
    lengths: list[int] = []
    eos_token_ids: list[int] = []
    row_rules: list[RowRule] = []
    batch_rules: list[BatchRule] = []
    for criterion in criteria:
        # Not isinstance: a subclass may do anything.
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif kind is EosTokenCriteria:
            eos_token_ids.extend(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        elif kind is StopStringCriteria:
            row_rules.append(partial(_ask_of_rows, criterion, criterion.maximum_token_len))
        elif kind is MaxTimeCriteria:
            row_rules.append(partial(_ask_of_rows, criterion, 1))
        else:
            batch_rules.append(partial(_ask, criterion, predictions))
    if not lengths:
        raise ValueError("stopping_criteria: expected a MaxLengthCriteria, got none")
    return StopRules(min(lengths), eos_token_ids, row_rules, batch_rules)


# The criterion keeps a tensor in a cache of transformers, where others find it.
@torch.inference_mode(False)
def stop_string_rule(tokenizer: Any, stop_strings: Sequence[str]) -> RowRule:
    """A text ends with one of these strings, or inside its newest token."""
    criterion = StopStringCriteria(tokenizer, list(stop_strings))
    return partial(_ask_of_rows, criterion, criterion.maximum_token_len)


def _ask_of_rows(criterion: StoppingCriteria, width: int, texts: list[list[int]]) -> list[bool]:
    """Show the criterion the newest `width` tokens of each text, which decide."""
    # No string has a token outside the vocabulary.
    outside = torch.iinfo(torch.int64).max
    newest = [[outside] * (width - len(text)) + text[-width:] for text in texts]
    ends: list[bool] = criterion(torch.tensor(newest), None).tolist()
    return ends


def _ask(criterion: StoppingCriteria, predictions: Predictions | None, input_ids: Tensor) -> Any:
    return criterion(input_ids, None if predictions is None else predictions.scores(input_ids))
