"""A draft with another vocabulary: the same drafts through a map, and nothing lost but acceptance."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Report
from tiny_models import PROMPTS, VOCAB, PairModel, greedy_rows, padded, perturbed, random_table, shared_tiny, tiny
from torch import Tensor
from transformers import PreTrainedModel

import torch_specops
from torch_specops.decode import GenerationOutput
from torch_specops.drafts import Draft, LanguageModel, ModelDraft
from torch_specops.drafts.token_map import TokenMap, twin_tokens
from torch_specops.hf import language_model
from torch_specops.laws import chi_square
from torch_specops.sampling import SamplingTensors

GREEDY = torch_specops.SamplingParams(temperature=0.0)


def permuted(model: PreTrainedModel, old_of_new: Tensor) -> PreTrainedModel:
    """The same model with its tokens renamed."""
    clone = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (clone.get_input_embeddings(), clone.get_output_embeddings()):
            layer.weight.copy_(layer.weight[old_of_new])
    return clone


def run(draft: LanguageModel, sampling: torch_specops.SamplingParams = GREEDY) -> GenerationOutput:
    ids, mask = padded(PROMPTS, "left")
    return torch_specops.generate(
        shared_tiny("llama"),
        ids,
        draft=draft,
        attention_mask=mask,
        max_new_tokens=24,
        num_draft_tokens=3,
        sampling=sampling,
        seed=9,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_permuted_vocabulary_gives_the_same_drafts(temperature: float) -> None:
    draft = perturbed(shared_tiny("llama"))
    old_of_new = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    mapped = TokenMap(language_model(permuted(draft, old_of_new)), old_of_new.argsort())
    sampling = torch_specops.SamplingParams(temperature=temperature)
    expected, output = run(language_model(draft), sampling), run(mapped, sampling)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.stats.accepted_at == expected.stats.accepted_at
    assert expected.stats.acceptance_rate is not None and 0 < expected.stats.acceptance_rate < 1

    # The wrong direction of the map is another draft.
    wrong = run(TokenMap(language_model(permuted(draft, old_of_new)), old_of_new), sampling)
    assert wrong.stats.accepted_at != expected.stats.accepted_at


def test_tokens_without_a_twin() -> None:
    draft = shared_tiny("llama")
    twins = torch.arange(VOCAB)
    twins[::3] = -1
    mapped = TokenMap(language_model(draft), twins, unknown=5)
    assert mapped.vocab_size == VOCAB
    mapped.start(1, 8)
    plain = language_model(draft)
    plain.start(1, 8)
    tokens, positions = torch.tensor([[4, 3, 7, 10]]), torch.arange(4).unsqueeze(0)
    with torch.inference_mode():
        logits = mapped.forward(tokens, positions)
        expected = plain.forward(torch.tensor([[4, 5, 7, 10]]), positions)
    assert bool((logits[..., ::3] == -torch.inf).all())
    assert torch.equal(logits[..., twins >= 0], expected[..., twins >= 0])

    output = run(mapped)
    assert [tuple(output.new_tokens(row)) for row in range(3)] == list(greedy_rows("llama", 24))
    rate = output.stats.acceptance_rate
    assert rate is not None and 0 < rate < 1, "with every twin it would be 1"


def test_vocabularies_of_different_size() -> None:
    """A smaller and a larger draft vocabulary; two target tokens may share a twin."""
    for draft_vocab in (VOCAB - 20, VOCAB + 20):
        table = torch.randn(draft_vocab + 1, draft_vocab, draft_vocab, generator=torch.Generator().manual_seed(1))
        twins = torch.arange(VOCAB) % draft_vocab
        output = run(TokenMap(PairModel(table), twins))
        assert [tuple(output.new_tokens(row)) for row in range(3)] == list(greedy_rows("llama", 24))


# The law of sampled text: V = 6 for the target, 5 for the draft; one target token has no twin, and the others are in
# another order.
V = 6
TWINS = torch.tensor([3, 0, -1, 4, 2, 1])
TRIALS = 20_000
ALPHA = 1e-5
PROMPT = [1, 4]


class UnmappedLaw(ModelDraft):
    """The wrong draft: tokens in the target's vocabulary, logits in the order of the draft's."""

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        draft = super().propose(tokens, lengths, num_draft_tokens, sampling, seeds)
        assert draft.logits is not None
        order = torch.cat([TWINS[TWINS >= 0], torch.tensor([V - 1])])
        return Draft(draft.tokens, draft.logits[..., order], draft.lse)


def joint_p_value(draft_class: type[ModelDraft], trials: int) -> float:
    """The first three tokens of as many rows against their exact joint law; K = 2, so texts cross step boundaries."""
    table = random_table(V, seed=1)
    draft = draft_class(TokenMap(PairModel(random_table(V - 1, seed=2)), TWINS, unknown=4))
    output = torch_specops.generate(
        PairModel(table),
        torch.tensor([PROMPT]).expand(trials, -1),
        draft=draft,
        max_new_tokens=3,
        num_draft_tokens=2,
        seed=0,
        eos_token_id=None,
    )
    first, second, third = output.sequences[:, 2:].T
    counts = torch.bincount((first * V + second) * V + third, minlength=V**3)
    law = table.double().softmax(-1)
    joint = law[PROMPT[0], PROMPT[1]][:, None, None] * law[PROMPT[1]][:, :, None] * law[:V]
    return chi_square(counts, joint)


def test_the_law_is_the_targets(report: Report) -> None:
    p_value = joint_p_value(ModelDraft, TRIALS)
    report.p_values["first three tokens, draft with another vocabulary"] = p_value
    assert p_value > ALPHA


def test_a_law_in_the_wrong_vocabulary_is_seen(report: Report) -> None:
    p_value = joint_p_value(UnmappedLaw, TRIALS)
    report.wrong_p_values["draft logits in the draft's vocabulary"] = p_value
    assert p_value < ALPHA


def test_maps_that_cannot_be() -> None:
    cases: list[tuple[Any, int, type[Exception], str]] = [
        ([0, 1], 0, TypeError, r"draft_of_target: expected an int64 tensor \[V\], got <class 'list'>"),
        (torch.tensor([0, 1], dtype=torch.int32), 0, TypeError, "draft_of_target: expected an int64 tensor"),
        (torch.tensor([[0, 1]]), 0, ValueError, r"draft_of_target: expected \[V\], got shape \[1, 2\]"),
        (torch.tensor([0, 5]), 0, ValueError, r"draft_of_target: expected tokens in \[0, 5\) or -1, got 5"),
        (torch.tensor([0, -2]), 0, ValueError, r"draft_of_target: expected tokens in \[0, 5\) or -1, got -2"),
        (torch.tensor([-1, -1]), 0, ValueError, "draft_of_target: expected a twin for at least one token"),
        (torch.tensor([0, 1]), 5, ValueError, r"unknown: expected a token in \[0, 5\), got 5"),
    ]
    for twins, unknown, error, message in cases:
        with pytest.raises(error, match=message):
            TokenMap(PairModel(random_table(5, seed=0)), twins, unknown)
    with pytest.raises(ValueError, match=r"target_vocab: expected tokens in \[0, 2\), got 2"):
        twin_tokens({"a": 2}, {"a": 0}, vocab_size=2)
    # Without a map, the vocabularies have to be the same.
    with pytest.raises(ValueError, match="vocabulary of the target"):
        torch_specops.SpeculativeDecoder(PairModel(random_table(6, seed=0)), PairModel(random_table(5, seed=0)))


def test_twins_have_the_same_text() -> None:
    assert twin_tokens({"a": 0, "b": 1, "c": 2}, {"c": 0, "a": 7}).tolist() == [7, -1, 0]
    assert twin_tokens({"a": 2, "b": 0}, {"a": 1}).tolist() == [-1, -1, 1]
    assert twin_tokens({"a": 0}, {"a": 3}, 4).tolist() == [3, -1, -1, -1]


def test_the_reason_not_to_compile_is_that_of_the_model() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    mapped = TokenMap(language_model(tiny("llama", rope_parameters=rope)), torch.arange(VOCAB))
    with pytest.raises(ValueError, match="compile: expected False or 'auto', got True: the 'dynamic' rotary"):
        torch_specops.SpeculativeDecoder(shared_tiny("llama"), mapped, compile=True)
