"""Convert transformers' stopping criteria to rules of the decoding loop."""

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
    """The rules that say when a row ends."""

    lengths: list[int]  # maximum lengths, prompt and padding included; at least one
    eos_token_ids: list[int]
    stop_strings: list[str]
    row_rules: list[RowRule]  # time limits
    batch_rules: list[BatchRule]  # other criteria, called as transformers would call them


def read_criteria(criteria: StoppingCriteriaList, tokenizer: Any, predictions: Predictions | None) -> StopRules:
    """Sort the criteria by kind.

    Args:
        tokenizer: the argument `tokenizer` of `custom_generate`; None = call a criterion for stop strings unchanged,
            because the criterion itself keeps no tokenizer.
        predictions: the source of the scores that criteria get; None = they get no scores.

    Raises:
        ValueError: there is no `MaxLengthCriteria`.
    """
    rules = StopRules([], [], [], [], [])
    for criterion in criteria:
        # Compare the exact type, because a subclass may behave differently.
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
