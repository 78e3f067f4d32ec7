"""`check_greedy`: plain greedy decoding beside an output."""

from __future__ import annotations

import pytest
import torch
from tiny_models import PROMPTS, VOCAB, PairModel, greedy_alone, greedy_rows, shared_tiny

from torch_specops.cli.greedy import check_greedy, verdict, worst_of
from torch_specops.hf import language_model


def test_a_wrong_token_is_found_and_the_rest_checked() -> None:
    target = language_model(shared_tiny("llama"))
    prompt, greedy = torch.tensor([PROMPTS[0]]), greedy_rows("llama", 20)[0]
    assert check_greedy(target, prompt, greedy) == []
    wrong = [*greedy[:12], (greedy[12] + 1) % VOCAB]
    # After the wrong token the text goes on greedily, so that there is one difference.
    wrong += greedy_alone(shared_tiny("llama"), [*PROMPTS[0], *wrong], 10)
    (difference,) = check_greedy(target, prompt, wrong, row=3)
    assert (difference.index, difference.expected_token, difference.row) == (12, greedy[12], 3)
    assert verdict([difference]) == "different"


def test_near_ties_are_no_defects() -> None:
    table = torch.zeros(6, 5, 5)
    table[:, 1, 2], table[:, 1, 3], table[:, 1, 4] = 1.0, 1.0 - 2e-6, 1.0 - 1e-3
    prompt = torch.tensor([[1]])
    near, far = (check_greedy(PairModel(table), prompt, [token]) for token in (3, 4))
    assert [verdict(found) for found in ([], near, far, near + far)] == ["identical", "near ties"] + ["different"] * 2
    assert verdict([], is_16_bit=True) == "identical" and verdict(far, is_16_bit=True) == "rounding"
    assert near[0].logit_gap == pytest.approx(2e-6, rel=0.1)
    assert worst_of([*near, *far, *near]) is far[0]
    # An excluded token is no near tie, nor does it make one of others.
    for excluded in (-torch.inf, torch.finfo(torch.float32).min):
        table[:, 1, 0] = excluded
        for token in (0, 4):
            assert verdict(check_greedy(PairModel(table), prompt, [token])) == "different"
