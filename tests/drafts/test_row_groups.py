"""Reading the rows of a batch in groups: which groups, and that the tokens do not depend on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_loops import Holes, decode, expected_rows, limited, new_tokens
from torch import Tensor

from torch_specops.drafts import ragged
from torch_specops.drafts.ragged import row_groups
from torch_specops.hf import TransformersModel

LIMITS = [20, 9, 14]


def test_groups() -> None:
    cases: list[tuple[list[int], list[bool], list[tuple[list[int], int]] | None]] = [
        # One row of eight with drafts.
        ([10, *[0] * 7], [True] * 8, [([0], 11), (list(range(1, 8)), 1)]),
        # No row needs padding.
        ([10] * 8, [True] * 8, None),
        # Too few tokens are saved for another forward.
        ([1, 0, 0, 0], [True] * 4, None),
        ([10, 10, *[0] * 6], [True] * 8, None),
        # Rows that have ended.
        ([0] * 64, [True, False] * 32, [(list(range(0, 64, 2)), 1)]),
        ([0] * 8, [True, False] * 4, [([0, 2, 4, 6], 1)]),
        ([0] * 8, [*[True] * 5, *[False] * 3], None),
        ([9, 0] * 4, [True, False] * 4, [([0, 2, 4, 6], 10)]),
        ([0, 20, 0, 0, 20, 0, 0, 0], [False, *[True] * 6, False], [([1, 4], 21), ([2, 3, 5, 6], 1)]),
        ([0, 0], [False, False], None),
        ([], [], None),
    ]
    for num_proposed, active, expected in cases:
        assert row_groups(num_proposed, active) == expected


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "t5"])
def test_greedy_with_rows_in_groups(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft that proposes the right tokens, in each step for another row. Batches are grouped wherever that is
    possible."""
    seen: list[tuple[int, ...] | None] = []
    forward = TransformersModel.forward

    def watching(self: Any, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Any = None) -> Any:
        seen.append(None if rows is None else tuple(rows.tolist()))
        return forward(self, tokens, positions, num_logits, rows)

    monkeypatch.setattr(TransformersModel, "forward", watching)
    monkeypatch.setattr(ragged, "FORWARD_COST", 0)
    monkeypatch.setattr(ragged, "MAX_RELATIVE_COST", 1.0)

    def is_hole(num_calls: int, batch: int, num_draft_tokens: int) -> Tensor:
        return ((torch.arange(batch) + num_calls + 1) % 3 != 0).unsqueeze(1).expand(-1, num_draft_tokens)

    output = decode(Holes(family, is_hole), 4, family=family, max_new_tokens=LIMITS)
    assert new_tokens(output) == limited(expected_rows(family=family), LIMITS)
    # One row with drafts and two without, then without the row that has ended, then the last one alone.
    assert {*seen} >= {(0,), (2,), (0, 1), (0, 2)} if family != "t5" else {*seen} == {None}
