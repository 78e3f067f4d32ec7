"""A draft with another vocabulary: the same drafts through a map, and nothing lost but acceptance.

That the loop keeps the target's law with it is tested in test_loop_distribution.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_loops import DRAFTS, decode, expected_rows, new_tokens
from tiny_models import VOCAB, PairModel, perturbed, raised, random_table, shared_tiny
from torch import Tensor
from transformers import PreTrainedModel

from torch_specops import SamplingParams
from torch_specops.drafts.token_map import TokenMap, match_vocabularies
from torch_specops.hf import language_model


def permuted(model: PreTrainedModel, old_of_new: Tensor) -> PreTrainedModel:
    """The same model with its tokens renamed."""
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (clone.get_input_embeddings(), clone.get_output_embeddings()):
            layer.weight.copy_(layer.weight[old_of_new])
    return clone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_permuted_vocabulary_gives_the_same_drafts(temperature: float) -> None:
    draft = perturbed(shared_tiny("llama"))
    old_of_new = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    renamed = language_model(permuted(draft, old_of_new))
    # The wrong direction of the map is another draft.
    drafts = (draft, TokenMap(renamed, old_of_new.argsort()), TokenMap(renamed, old_of_new))
    sampling = SamplingParams(temperature=temperature)
    expected, found, wrong = (decode(each, 3, sampling=sampling, seed=9) for each in drafts)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.stats.accepted_at == expected.stats.accepted_at != wrong.stats.accepted_at
    assert expected.stats.acceptance_rate is not None and 0 < expected.stats.acceptance_rate < 1


def test_tokens_without_a_twin() -> None:
    mapped, plain = DRAFTS["token map"]("llama"), language_model(shared_tiny("llama"))
    assert isinstance(mapped, TokenMap) and mapped.vocab_size == VOCAB
    positions, row = torch.arange(4).unsqueeze(0), torch.tensor([1])
    logits = []
    # Token 3 is read as the unknown one, 5; in the second row alone.
    for model, tokens in ((mapped, [4, 3, 7, 10]), (plain, [4, 5, 7, 10])):
        model.start(2, 8)
        with torch.inference_mode():
            logits.append(model.forward(torch.tensor([tokens]), positions, None, row))
    has_twin = torch.arange(VOCAB) % 3 > 0
    assert bool((logits[0][..., ~has_twin] == -torch.inf).all())
    assert torch.equal(logits[0][..., has_twin], logits[1][..., has_twin])


def test_token_map_passes_other_members_on() -> None:
    names = ("clear_rows", "copy_rows", "not_compiled", "reads_rows", "replace_inputs", "static_tensors")
    for model in (language_model(shared_tiny("t5")), PairModel(random_table(VOCAB, seed=0))):
        mapped = TokenMap(model, torch.arange(VOCAB))
        assert [getattr(mapped, name) for name in names] == [getattr(model, name) for name in names]
        assert copy.deepcopy(mapped).vocab_size == VOCAB


def test_vocabularies_of_different_size() -> None:
    """A smaller and a larger draft vocabulary; two target tokens may share a twin."""
    for draft_vocab in (VOCAB - 20, VOCAB + 20):
        model = PairModel(random_table(draft_vocab, seed=1))
        assert new_tokens(decode(TokenMap(model, torch.arange(VOCAB) % draft_vocab), 3)) == expected_rows()


def test_maps_that_cannot_be() -> None:
    model = PairModel(random_table(5, seed=0))
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (([0, 1],), TypeError, r"draft_of_target: expected an int64 tensor \[V\], got <class 'list'>"),
        ((torch.tensor([0, 1], dtype=torch.int32),), TypeError, "draft_of_target: expected an int64 tensor"),
        ((torch.tensor([[0, 1]]),), ValueError, r"draft_of_target: expected \[V\], got shape \[1, 2\]"),
        ((torch.tensor([0, 5]),), ValueError, r"draft_of_target: expected tokens in \[0, 5\) or -1, got 5"),
        ((torch.tensor([0, -2]),), ValueError, r"draft_of_target: expected tokens in \[0, 5\) or -1, got -2"),
        ((torch.tensor([-1, -1]),), ValueError, "draft_of_target: expected a twin for at least one token"),
        ((torch.tensor([0, 1]), 5), ValueError, r"unknown: expected a token in \[0, 5\), got 5"),
    ]
    assert raised(lambda arguments: TokenMap(model, *arguments), cases) == []


def test_twins_have_the_same_text() -> None:
    assert match_vocabularies({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 7}).tolist() == [7, -1, 0]
    assert match_vocabularies({"a": 2, "b": 0}, {"a": 1}).tolist() == [-1, -1, 1]
    assert match_vocabularies({"a": 0}, {"a": 3}, 4).tolist() == [3, -1, -1, -1]
    with pytest.raises(ValueError, match=r"target_vocab: expected tokens in \[0, 2\), got 2"):
        match_vocabularies({"a": 2}, {"a": 0}, vocab_size=2)
