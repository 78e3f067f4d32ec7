"""Reading rows of different lengths without their padding: the same logits, cache and texts, from fewer tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tiny_hybrids import tiny_hybrid
from tiny_loops import GREEDY, Holes, decode, expected_rows, limited, new_tokens
from tiny_models import FAMILIES, PROMPTS, VOCAB, padded, perturbed, shared_tiny, sharp_model, tiny
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig

from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import step
from torch_specops.hf import TransformersModel, language_model
from torch_specops.models import reading
from torch_specops.models.reading import read_ragged

LIMITS = [20, 9, 14]
# The newest tokens of five rows, and their numbers of drafts.
STARTS, COUNTS = [9, 7, 3, 5, 1], [3, 0, 2, 1, 3]
# Attention that adds a softcap, and what is no decoder alone.
PADDED = ("gemma2", "whisper", "t5")


@pytest.fixture
def always_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are packed wherever that is possible."""
    monkeypatch.setattr(reading, "FORWARD_COST", 0)
    monkeypatch.setattr(reading, "PACKED_COST", 1.0)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shape of the tokens of each forward of a transformers model."""
    seen: list[tuple[int, int]] = []
    read = TransformersModel._read

    def watching(self: Any, tokens: Tensor, *rest: Any) -> Tensor:
        seen.append((tokens.shape[0], tokens.shape[1]))
        return read(self, tokens, *rest)

    monkeypatch.setattr(TransformersModel, "_read", watching)
    return seen


def read_apart(target: TransformersModel, ended: Sequence[int], packs: bool) -> list[Tensor]:
    """What a step gives whose rows have COUNTS drafts, and the next one: the logits that are used, and features."""
    rows = [row for row in range(5) if row not in ended]
    tokens, counts = torch.arange(45).view(5, 9) * 7 % VOCAB, torch.tensor(COUNTS)
    target.keep_features((0, 1, 2))
    target.start(5, 20)
    target.begin_texts(torch.full((5,), 6))
    target.forward(tokens, torch.arange(9).expand(5, -1), 1)
    positions = torch.tensor(STARTS).unsqueeze(1) + torch.arange(4)
    if packs:
        finished = torch.tensor([row in ended for row in range(5)])
        logits = read_ragged(target, tokens[:, :4] + 1, positions, counts, finished, is_filled=True)
    else:
        logits = target.forward(tokens[:, :4] + 1, positions)
    used = torch.cat([logits[row, : COUNTS[row] + 1] for row in rows])
    features = torch.cat([target.features[row, : STARTS[row] + COUNTS[row] + 1] for row in rows])
    return [used, features, target.forward(tokens[:, :1], positions[:, :1] + counts.unsqueeze(1) + 1)[rows]]


def model_of(family: str) -> PreTrainedModel:
    if family in FAMILIES:
        return tiny(family)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return sharp_model(Qwen3MoeConfig(vocab_size=VOCAB, num_experts=4, num_experts_per_tok=2, **sizes))


# Qwen3 MoE is checked when it is first used.
@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family not in PADDED), "qwen3_moe"])
def test_packed_rows_give_the_logits_of_padded_rows(
    family: str, always_packed: None, forwards: list[tuple[int, int]]
) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        target = language_model(model_of(family).to(dtype))
        for ended, num_read in (([2], 11), ([1, 2, 4], 6)):
            with torch.inference_mode():
                expected = read_apart(target, ended, packs=False)
                forwards.clear()
                found = read_apart(target, ended, packs=True)
            assert forwards[1] == (1, num_read)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_packed_reads_rotate_by_row_length(always_packed: None) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    target = language_model(tiny("llama", max_position_embeddings=8, rope_parameters=rope))
    target.max_length = None
    with torch.inference_mode():
        torch.testing.assert_close(read_apart(target, [2], packs=True), read_apart(target, [2], packs=False))


def test_autocast(always_packed: None, forwards: list[tuple[int, int]]) -> None:
    target = language_model(tiny("llama").float())
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected, found = (read_apart(target, [2], packs) for packs in (False, True))
    assert (1, 11) in forwards
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_what_does_not_pack(always_packed: None, forwards: list[tuple[int, int]]) -> None:
    """Eager attention, and states. Ended rows are left out all the same if they are half of the batch."""
    for model in (tiny("llama", attention="eager"), tiny_hybrid("lfm2")):
        target = language_model(model)
        assert not target.packs_rows and not target.first_layers(1).packs_rows
    assert language_model(tiny("llama")).first_layers(1).packs_rows
    target = language_model(tiny("llama", attention="eager"))
    with torch.inference_mode():
        for ended, shape in (([2], (5, 4)), ([1, 2, 4], (2, 4))):
            forwards.clear()
            read_apart(target, ended, packs=True)
            assert forwards[1] == shape


def test_a_single_row_is_an_ordinary_one(always_packed: None, forwards: list[tuple[int, int]]) -> None:
    target = language_model(tiny("llama"))
    target.start(1, 20)
    tokens, positions, finished = torch.tensor([[5, 6, 7]]), torch.arange(3)[None], torch.tensor([False])
    with torch.inference_mode():
        logits = read_ragged(target, tokens, positions, torch.tensor([1]), finished, is_filled=True)[:, :2]
        torch.testing.assert_close(logits, target.forward(tokens[:, :2], positions[:, :2]))
    assert forwards[0] == (1, 2)


def test_packing_has_to_pay(forwards: list[tuple[int, int]]) -> None:
    for num_drafts, shape in (([10, *[0] * 7], (1, 18)), ([10] * 7 + [0], (8, 11)), ([0] * 8, (8, 1))):
        forwards.clear()
        with torch.inference_mode():
            target = language_model(shared_tiny("llama"))
            target.start(8, 20)
            width = max(num_drafts) + 1
            tokens, positions = torch.ones(8, width, dtype=torch.int64), torch.arange(width).expand(8, -1)
            read_ragged(
                target, tokens, positions, torch.tensor(num_drafts), torch.zeros(8, dtype=torch.bool), is_filled=False
            )
        assert forwards == [shape]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_greedy_with_drafts_in_some_rows(family: str, always_packed: None, forwards: list[tuple[int, int]]) -> None:
    """With a draft that proposes the right tokens, in each step for other rows, in a batch whose rows end."""

    def is_hole(num_calls: int, batch: int, num_draft_tokens: int) -> Tensor:
        return ((torch.arange(batch) + num_calls + 1) % 3 != 0).unsqueeze(1).expand(-1, num_draft_tokens)

    output = decode(Holes(family, is_hole), 4, family=family, max_new_tokens=LIMITS)
    assert new_tokens(output) == limited(expected_rows(family=family), LIMITS)
    # One row of three with four drafts, later one of two, and the last one alone.
    assert {*forwards} >= {(1, 7), (1, 6), (1, 1)}


def read_and_fill(
    filling: float | None,
    target: Any,
    tokens: Tensor,
    positions: Tensor,
    num_proposed: Tensor,
    finished: Tensor,
    **_: Any,
) -> Tensor:
    logits: Tensor = target.forward(tokens, positions, tokens.shape[1])
    is_padding = torch.arange(tokens.shape[1]) > num_proposed.unsqueeze(1)
    if filling is not None:
        logits[is_padding | finished.unsqueeze(1)] = filling
    return logits


@pytest.mark.parametrize(
    ("verify", "sampling"),
    [
        (None, GREEDY),
        (None, SamplingParams(repetition_penalty=1.3)),
        ("exact", SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=0.5)),
        ("block", SamplingParams(temperature=[0.0, 0.7, 1.2], top_k=9)),
        ("gumbel", SamplingParams(temperature=0.7, min_p=0.02)),
        ("sigmoid", SamplingParams(temperature=0.7, top_k=9)),
    ],
)
def test_logits_that_are_not_read_change_nothing(
    verify: str | None, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands where nothing was read."""

    def is_hole(num_calls: int, batch: int, num_draft_tokens: int) -> Tensor:
        return (torch.arange(batch).unsqueeze(1) + torch.arange(num_draft_tokens) + num_calls) % 3 == 0

    found = []
    for filling in (None, 0.0, torch.nan):
        monkeypatch.setattr(step, "read_ragged", partial(read_and_fill, filling))
        source = Holes("llama", is_hole) if verify is None else perturbed(shared_tiny("llama"))
        decoder = SpeculativeDecoder(
            shared_tiny("llama"), source, num_draft_tokens=4, schedule="constant", sampling=sampling, verify=verify
        )
        ids, mask = padded(PROMPTS, "left")
        output = decoder.generate(
            ids, attention_mask=mask, max_new_tokens=LIMITS, seed=3, logprobs="processed", top_logprobs=2
        )
        found.append([new_tokens(output), output.logprobs, output.top_logprobs])
    for each in found[1:]:
        assert each[0] == found[0][0]
        torch.testing.assert_close(each[1:], found[0][1:], rtol=0, atol=0, equal_nan=True)
