"""Beam search with models that are not from transformers, wrong searches, and bad arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_beams import ENDS, Beam, assert_same, beams_of, expected_beams, make_draft, search
from tiny_models import POSITIONS, VOCAB, PairModel, perturbed, raised, random_table, shared_tiny, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_specops.beam import TreeModel
from torch_specops.beam.tree import BeamTree, Level
from torch_specops.drafts import PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft


class PairTree(PairModel, TreeModel):
    """An order-two table that finds the token before a node by looking at what the node may see."""

    def forward_tree(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, slot_positions: Tensor
    ) -> Tensor:
        assert bool(visible.gather(2, slots.unsqueeze(2)).all()), "a node sees itself"
        assert torch.equal(slot_positions.gather(1, slots), positions)
        self.remember(tokens, slots)
        seen = torch.where(visible, slot_positions.unsqueeze(1), -1)
        # A text has one token at each of its positions, down to the first. A row that has ended has forgotten its text.
        ranks = positions.unsqueeze(2) - seen.sort(2, descending=True).values
        in_order = ranks == torch.arange(seen.shape[2])
        num_visible = visible.sum(2, keepdim=True)
        assert bool((in_order | (torch.arange(seen.shape[2]) >= num_visible)).all())
        is_whole = num_visible.squeeze(2) == positions + 1
        assert bool((is_whole | ~is_whole.any(1, keepdim=True)).all()) and bool(is_whole.any())
        before = torch.where(seen == positions.unsqueeze(2) - 1, 1, 0).argmax(2)
        before = torch.where(positions > 0, self.memory.gather(1, before), self.vocab_size)
        return self.table[before, tokens]


def naive_beams(table: Tensor, prompt: Sequence[int], num_beams: int, length: int) -> list[Beam]:
    """Beam search without an eos, as one writes it down; NaN is no continuation."""
    log_probs, vocab = table.double().log_softmax(-1), table.shape[-1]
    beams: list[Beam] = [((), 0.0)]
    for _ in range(length):
        candidates = []
        for tokens, score in beams:
            text = [vocab, *prompt, *tokens]
            row = log_probs[text[-2], text[-1]]
            candidates += [((*tokens, token), score + float(row[token])) for token in range(vocab) if row[token] <= 0]
        beams = sorted(candidates, key=lambda beam: -beam[1])[:num_beams]
    return [(tokens, score / length) for tokens, score in beams]


@pytest.mark.parametrize(
    ("num_beams", "draft_beams", "num_draft_tokens", "similarity"),
    [(2, 2, 4, 0.9), (3, 7, 2, 0.0), (3, 7, 2, 0.9), (5, 5, 1, 0.5), (5, 5, 1, 1.0)],
)
def test_models_of_other_makers(num_beams: int, draft_beams: int, num_draft_tokens: int, similarity: float) -> None:
    """A `TreeModel` that checks what it is shown, as target and as draft; long texts, so that slots are used again."""
    table = random_table(8, seed=0, scale=2.0)
    other = similarity * table + (1 - similarity) * random_table(8, seed=1, scale=2.0)
    prompts = [[1, 2, 3], [4], [5, 6]]
    options = {"draft_beams": draft_beams, "num_draft_tokens": num_draft_tokens, "max_new_tokens": 30}
    output = search(PairTree(table), num_beams, PairTree(other), prompts=prompts, side="right", **options)
    expected = [beam for prompt in prompts for beam in naive_beams(table, prompt, num_beams, 30)]
    assert_same(beams_of(output), expected, tolerance=1e-5)
    assert (output.stats.acceptance_rate == 1.0) == (similarity == 1.0)


def test_beams_that_were_not_read_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes any node for the one it needs finds other beams: the comparisons above can fail."""

    def careless(level: Level, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(parents, dtype=torch.bool), torch.zeros_like(parents)

    monkeypatch.setattr(Level, "index_of", careless)
    output = search(shared_tiny("llama"), 3, make_draft("perturbed"), eos_token_id=ENDS)
    with pytest.raises(AssertionError):
        assert_same(beams_of(output), expected_beams("llama", 3, ENDS))


def test_a_draft_that_lags_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the token that it drafted last, the draft guesses worse, and the target's beams stay what they are."""
    read = BeamTree.read
    monkeypatch.setattr(BeamTree, "read", lambda tree, model, levels, with_parents=False: read(tree, model, levels))
    model = shared_tiny("llama")
    output = search(model, 3, model, num_draft_tokens=2, eos_token_id=ENDS)
    assert_same(beams_of(output), expected_beams("llama", 3, ENDS))
    assert output.stats.acceptance_rate is not None and output.stats.acceptance_rate < 1.0


def test_logits_that_are_not_finite() -> None:
    """A beam has no continuation where a logit is NaN; a row without any ends there, and the others go on."""
    table, prompts = random_table(8, seed=0, scale=2.0), [[1, 2, 3], [6], [5, 4]]
    broken = table.clone()
    broken[:, 6, 0] = torch.nan
    with pytest.warns(RuntimeWarning, match="row 1: target: no finite score after 0 new tokens"):
        output = search(PairTree(broken), 4, PairTree(broken), max_new_tokens=8, prompts=prompts, side="right")
    assert list(output.errors) == [1]
    assert output.lengths[4:8].tolist() == [1] * 4
    for row in (0, 2):
        expected = naive_beams(broken, prompts[row], 4, 8)
        assert_same(beams_of(output)[4 * row : 4 * row + 4], expected, tolerance=1e-5)
        assert expected != naive_beams(table, prompts[row], 4, 8)
    none = torch.full_like(table, torch.nan)
    with pytest.warns(RuntimeWarning):
        output = search(PairTree(none), 2, max_new_tokens=6, prompts=prompts, side="right")
    assert sorted(output.errors) == [0, 1, 2] and output.lengths.tolist() == [3, 3, 1, 1, 2, 2]
    assert output.finish_reasons == ["error"] * 6


def test_a_masked_vocabulary() -> None:
    """Logits of -inf, so many that hardly anything is left to choose from."""
    table = random_table(12, seed=4, scale=2.0)
    table[..., 4:] = -torch.inf
    output = search(PairTree(table), 3, PairTree(table), max_new_tokens=9, prompts=[[1, 2]])
    assert_same(beams_of(output), naive_beams(table, [1, 2], 3, 9), tolerance=1e-5)
    assert output.stats.acceptance_rate == 1.0


def untested_family() -> PreTrainedModel:
    model = perturbed(shared_tiny("llama"), scale=0.0)
    model.config.model_type = "unheard-of"
    return model


FLOAT32 = "length_penalty: expected 12 to its power within float32"
FOLLOWS = "draft: beam search follows a model's own beams; expected a model or None"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_beams": 0}, ValueError, "num_beams: expected a number >= 1, got 0"),
    ({"num_beams": 2.0}, TypeError, "num_beams: expected an int"),
    ({"num_beams": 2, "draft_beams": 1}, ValueError, "draft_beams: expected a number >= 2, got 1"),
    ({"num_return_sequences": 4}, ValueError, "num_return_sequences: expected at most num_beams = 3, got 4"),
    ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens: expected a number >= 0"),
    ({"early_stopping": "always"}, ValueError, "early_stopping: expected True, False or 'never', got 'always'"),
    ({"length_penalty": "long"}, TypeError, "length_penalty: expected a number"),
    *(({"length_penalty": value}, ValueError, FLOAT32) for value in (1e4, -1e4, float("nan"))),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected a number >= 1, got 0"),
    ({"max_new_tokens": [4, 4]}, ValueError, "max_new_tokens: expected one number or 3, got 2"),
    (
        {"max_new_tokens": POSITIONS, "model": lambda: shared_tiny("gpt2")},
        ValueError,
        f"max_.* {POSITIONS} that the target",
    ),
    ({"num_beams": 31, "eos_token_id": list(range(VOCAB))}, ValueError, "num_beams: expected the 31 beams to have"),
    ({"pad_token_id": -1}, ValueError, "pad_token_id: expected a number >= 0"),
    ({"inputs": {"input_ids": torch.ones(3, 1)}}, ValueError, "inputs: a decoder-only model reads tokens alone"),
    ({"draft": PromptLookup()}, TypeError, FOLLOWS),
    # More than a model: it overrides `propose`.
    ({"draft": lambda: HierarchicalDraft(shared_tiny("llama"))}, TypeError, FOLLOWS),
    ({"draft": lambda: tiny("llama", vocab=VOCAB + 1)}, ValueError, r"draft: .* target \(60 tokens\), got 61 tokens"),
    ({"model": lambda: PairModel(random_table(8, 0))}, TypeError, "target: beam search reads trees; expected a trans"),
    ({"draft": lambda: PairModel(random_table(VOCAB, 0))}, TypeError, "draft: beam search reads trees"),
    ({"model": untested_family}, ValueError, "model: trees, .* were not tested with LlamaForCausalLM"),
]


def test_bad_input() -> None:
    def run(options: dict[str, Any]) -> None:
        arguments = {"num_beams": 3, "draft": None, "model": lambda: shared_tiny("llama")} | options
        draft = arguments.pop("draft")
        # A model is made when its turn comes.
        draft = draft() if callable(draft) and not isinstance(draft, nn.Module) else draft
        search(arguments.pop("model")(), arguments.pop("num_beams"), draft, **arguments)

    assert raised(run, BAD) == []
