"""Reading the rows of a batch apart: which ones, and that nobody can tell from the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, PROMPTS, encoder_inputs, greedy_rows, padded, shared_tiny, tiny
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import ragged
from torch_specops.decode.ragged import FORWARD_COST, as_row_reader, read_ragged, row_groups
from torch_specops.drafts import Draft, DraftSource, PromptLookup
from torch_specops.hf import TransformersModel, language_model
from torch_specops.sampling import SamplingTensors

LENGTH = 20
READ_APART = [family for family in FAMILIES if family not in ("whisper", "t5")]


@pytest.mark.parametrize(
    ("num_proposed", "active", "expected"),
    [
        # One row of eight with drafts, and the others without.
        ([10, *[0] * 7], [True] * 8, [([0], 11), (list(range(1, 8)), 1)]),
        # Nothing is padding.
        ([10] * 8, [True] * 8, None),
        ([0] * 8, [True] * 8, None),
        # A few tokens are not worth another forward.
        ([1, 0, 0, 0], [True] * 4, None),
        ([10, 10, *[0] * 6], [True] * 8, None),
        # Rows that have ended.
        ([0] * 64, [True, False] * 32, [(list(range(0, 64, 2)), 1)]),
        ([0] * 8, [True, False] * 4, None),
        ([9, 0] * 4, [True, False] * 4, [([0, 2, 4, 6], 10)]),
        ([0, 20, 0, 0, 20, 0, 0, 0], [False, *[True] * 6, False], [([1, 4], 21), ([2, 3, 5, 6], 1)]),
        ([0, 0], [False, False], None),
        ([], [], None),
    ],
)
def test_groups(num_proposed: list[int], active: list[bool], expected: list[tuple[list[int], int]] | None) -> None:
    assert row_groups(num_proposed, active) == expected


@pytest.mark.parametrize("batch", [1, 2, 5, 8, 64])
@pytest.mark.parametrize("width", [1, 2, 4, 11])
def test_groups_never_read_more(batch: int, width: int) -> None:
    for drafting in range(batch + 1):
        for ended in range(batch - drafting + 1):
            counts = [width - 1] * drafting + [0] * (batch - drafting)
            active = [True] * (batch - ended) + [False] * ended
            groups = row_groups(counts, active)
            if groups is None:
                continue
            assert sorted(row for rows, _ in groups for row in rows) == list(range(batch - ended))
            assert all(counts[row] < count for rows, count in groups for row in rows)
            cost = sum(len(rows) * count + FORWARD_COST for rows, count in groups)
            assert cost <= 0.75 * (batch * (max(counts) + 1) + FORWARD_COST)


class Some(DraftSource):
    """Proposes what is right, and only for the rows whose turn it is."""

    def __init__(self, texts: Tensor) -> None:
        self.texts = texts
        self.turn = 0

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        self.turn += 1
        at = lengths.unsqueeze(1) + torch.arange(num_draft_tokens)
        drafts = self.texts.gather(1, at.clamp(max=self.texts.shape[1] - 1))
        chosen = (torch.arange(len(lengths)) + self.turn) % 3 == 0
        return Draft(torch.where(chosen.unsqueeze(1), drafts, -1))


def watched(monkeypatch: pytest.MonkeyPatch) -> list[list[int] | None]:
    """The rows of every forward; and a batch is taken apart wherever it can be."""
    seen: list[list[int] | None] = []
    forward = TransformersModel.forward

    def watching(self: Any, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Any = None) -> Any:
        seen.append(None if rows is None else rows.tolist())
        return forward(self, tokens, positions, num_logits, rows)

    monkeypatch.setattr(TransformersModel, "forward", watching)
    monkeypatch.setattr(ragged, "FORWARD_COST", 0)
    monkeypatch.setattr(ragged, "MAX_RELATIVE_COST", 1.0)
    return seen


def decoded(family: str, limits: list[int], num_draft_tokens: int = 4) -> list[list[int]]:
    rows = greedy_rows(family, LENGTH)
    texts, _ = padded([[*prompt, *row] for prompt, row in zip(PROMPTS, rows, strict=True)], "right")
    decoder = SpeculativeDecoder(
        shared_tiny(family), Some(texts), num_draft_tokens=num_draft_tokens, sampling=SamplingParams(temperature=0.0)
    )
    input_ids, mask = padded(PROMPTS, "left")
    output = decoder.generate(
        input_ids, attention_mask=mask, max_new_tokens=limits, inputs=encoder_inputs(family), eos_token_id=()
    )
    return [output.new_tokens(row) for row in range(3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_with_rows_read_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watched(monkeypatch)
    limits = [LENGTH, 9, 14]
    assert decoded(family, limits) == [
        list(row[:limit]) for row, limit in zip(greedy_rows(family, LENGTH), limits, strict=True)
    ]
    apart = {tuple(rows) for rows in seen if rows is not None}
    # One with drafts and two without, then without the row that has ended, then the last one alone.
    assert (family in READ_APART) == (len(apart) > 0)
    if family in READ_APART:
        assert {(0,), (2,), (0, 1), (0, 2)} <= apart


def test_rows_that_are_mixed_up_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    watched(monkeypatch)
    forward = TransformersModel.forward

    def mixed_up(self: Any, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Any = None) -> Any:
        return forward(self, tokens, positions, num_logits, None if rows is None else (rows + 1) % 3)

    monkeypatch.setattr(TransformersModel, "forward", mixed_up)
    assert decoded("llama", [LENGTH] * 3) != [list(row) for row in greedy_rows("llama", LENGTH)]


def test_a_sampled_row_does_not_depend_on_how_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampled() -> list[list[int]]:
        decoder = SpeculativeDecoder(shared_tiny("llama"), PromptLookup(min_ngram=1), num_draft_tokens=4)
        input_ids, mask = padded(PROMPTS, "left")
        output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=[5, LENGTH, 12], seed=3)
        return [output.new_tokens(row) for row in range(3)]

    together = sampled()
    seen = watched(monkeypatch)
    assert sampled() == together
    assert any(rows is not None for rows in seen)


def test_the_logits_are_those_of_a_forward_over_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "FORWARD_COST", 0)
    model = as_row_reader(language_model(tiny("gemma2")))
    assert model is not None
    input_ids, _ = padded([[3, 5, 7, 9]] * 3, "right")
    tokens, positions = torch.tensor([[4, 6, 8], [4, 1, 1], [2, 1, 1]]), torch.tensor([[4, 5, 6], [3, 4, 5], [2, 3, 4]])
    num_proposed, finished = torch.tensor([2, 0, 0]), torch.tensor([False, False, True])

    def read(apart: bool) -> Tensor:
        assert model is not None
        model.start(3, 16)
        model.forward(input_ids, torch.arange(4).expand(3, -1))
        if apart:
            return read_ragged(model, tokens, positions, num_proposed, finished)
        return model.forward(tokens, positions, 3)

    with torch.inference_mode():
        apart, together = read(True), read(False)
    torch.testing.assert_close(apart[0], together[0])
    torch.testing.assert_close(apart[1, 0], together[1, 0])
    assert not apart[1, 1:].any() and not apart[2].any()


def test_who_cannot_read_rows_apart_is_not_asked_to() -> None:
    assert as_row_reader(language_model(tiny("llama"))) is not None
    assert as_row_reader(language_model(tiny("t5"))) is None
