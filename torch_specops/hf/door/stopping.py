"""transformers' stopping criteria as rules of the loop."""

from __future__ import annotations

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

from ...decode.rows import BatchRule, RowRule
from .outputs import Predictions


class StopRules(NamedTuple):
    """The rules that end rows."""

    lengths: list[int]  # of the longest sequence, prompt and padding included; at least 1
    eos_token_ids: list[int]
    stop_strings: list[str]
    row_rules: list[RowRule]  # clocks
    batch_rules: list[BatchRule]  # all others, which are called as transformers would call them


def read_criteria(criteria: StoppingCriteriaList, tokenizer: Any, predictions: Predictions | None) -> StopRules:
    """Sort the criteria.

    Args:
        tokenizer: of the call. Without it, a criterion of stop strings is called: it has no tokenizer to read.
        predictions: the scores that a criterion may look at.

    Raises:
        ValueError: no length.
    """
    rules = StopRules([], [], [], [], [])
    for criterion in criteria:
        # Not isinstance: a subclass may do anything.
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            rules.lengths.append(criterion.max_length)
        elif kind is EosTokenCriteria:
            rules.eos_token_ids.extend(torch.as_tensor(criterion.eos_token_id, device="cpu").flatten().tolist())
        elif kind is StopStringCriteria and tokenizer is not None:
            rules.stop_strings.extend(criterion.stop_strings)
        elif kind is MaxTimeCriteria:
            rules.row_rules.append(partial(_ask_clock, criterion))
        else:
            rules.batch_rules.append(partial(_ask, criterion, predictions))
    if not rules.lengths:
        raise ValueError("stopping_criteria: expected a MaxLengthCriteria, got none")
    return rules


def _ask(criterion: StoppingCriteria, predictions: Predictions | None, input_ids: Tensor) -> Any:
    return criterion(input_ids, None if predictions is None else predictions.scores(input_ids))


def _ask_clock(criterion: MaxTimeCriteria, texts: list[list[int]]) -> list[bool]:
    return criterion(torch.empty(len(texts), 0, device="cpu"), None).tolist()
