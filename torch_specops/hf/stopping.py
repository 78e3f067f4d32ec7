"""transformers' stopping criteria as rules of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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


class StopRules(NamedTuple):
    """The rules that end rows."""

    lengths: list[int]  # of the longest sequence, prompt and padding included; at least one
    eos_token_ids: list[int]
    row_rules: list[RowRule]  # their answer for a row depends on this row, or on the clock
    batch_rules: list[BatchRule]  # all others, which are called as transformers would call them


def read_criteria(criteria: StoppingCriteriaList, predictions: Predictions | None) -> StopRules:
    """Sort the criteria; `predictions` has the scores that a criterion may look at.

    Raises:
        ValueError: no length.
    """
    rules = StopRules([], [], [], [])
    for criterion in criteria:
        # Not isinstance: a subclass may do anything.
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            rules.lengths.append(criterion.max_length)
        elif kind is EosTokenCriteria:
            rules.eos_token_ids.extend(torch.as_tensor(criterion.eos_token_id, device="cpu").flatten().tolist())
        elif kind in (StopStringCriteria, MaxTimeCriteria):
            rules.row_rules.append(partial(_ask_of_rows, criterion))
        else:
            rules.batch_rules.append(partial(_ask, criterion, predictions))
    if not rules.lengths:
        raise ValueError("stopping_criteria: expected a MaxLengthCriteria, got none")
    return rules


# The criterion keeps a tensor in a cache of transformers, where others find it.
@torch.inference_mode(False)
def stop_string_rule(tokenizer: Any, stop_strings: Sequence[str]) -> RowRule:
    """A text ends with one of these strings, or inside its newest token."""
    return partial(_ask_of_rows, StopStringCriteria(tokenizer, list(stop_strings)))


def _ask_of_rows(criterion: StoppingCriteria, texts: list[list[int]]) -> list[bool]:
    """Show the criterion the newest tokens of each text: as many as a stop string may have, or one."""
    width = getattr(criterion, "maximum_token_len", 1)
    # No string has a token outside the vocabulary.
    outside = torch.iinfo(torch.int64).max
    newest = [[outside] * (width - len(text)) + text[-width:] for text in texts]
    ends: list[bool] = criterion(torch.tensor(newest, device="cpu"), None).tolist()
    return ends


def _ask(criterion: StoppingCriteria, predictions: Predictions | None, input_ids: Tensor) -> Any:
    return criterion(input_ids, None if predictions is None else predictions.scores(input_ids))
