"""transformers' stopping criteria as rules of the loop."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
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

__all__ = ["Stops", "read_criteria", "stop_string_rule"]


@dataclass(frozen=True)
class Stops:
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


def read_criteria(criteria: StoppingCriteriaList, predictions: Predictions | None) -> Stops:
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
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos_token_ids.extend(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
        elif type(criterion) is StopStringCriteria:
            row_rules.append(functools.partial(_ends_with_stop_string, criterion))
        elif type(criterion) is MaxTimeCriteria:
            row_rules.append(functools.partial(_is_out_of_time, criterion))
        else:
            batch_rules.append(functools.partial(_ask, criterion, predictions))
    if not lengths:
        raise ValueError("stopping_criteria: expected a MaxLengthCriteria, got none")
    return Stops(min(lengths), eos_token_ids, row_rules, batch_rules)


# The criterion keeps a tensor in a cache of transformers, where others find it.
@torch.inference_mode(False)
def stop_string_rule(tokenizer: Any, stop_strings: Sequence[str]) -> RowRule:
    """A text ends with one of these strings, or inside its newest token."""
    return functools.partial(_ends_with_stop_string, StopStringCriteria(tokenizer, list(stop_strings)))


def _ends_with_stop_string(criterion: StopStringCriteria, texts: list[list[int]]) -> list[bool]:
    # No token reaches back further, and one outside the vocabulary is part of no string.
    width = criterion.maximum_token_len
    outside = torch.iinfo(torch.int64).max
    newest = [[outside] * (width - len(text)) + text[-width:] for text in texts]
    ends: list[bool] = criterion(torch.tensor(newest), None).tolist()
    return ends


def _is_out_of_time(criterion: MaxTimeCriteria, texts: list[list[int]]) -> list[bool]:
    ends: list[bool] = criterion(torch.zeros(len(texts), 1, dtype=torch.int64), None).tolist()
    return ends


def _ask(criterion: StoppingCriteria, predictions: Predictions | None, input_ids: Tensor) -> Any:
    return criterion(input_ids, None if predictions is None else predictions.scores(input_ids))
