"""The tree that beam search reads, models that are not from transformers, wrong searches, and bad arguments."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_beams import ENDS, Beam, assert_same, beams_of, expected_beams, make_draft, search
from tiny_models import (
    FAMILIES,
    POSITIONS,
    VOCAB,
    PairModel,
    encoder_inputs,
    perturbed,
    raised,
    random_table,
    shared_tiny,
    tiny,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

import torch_specops.beam
from torch_specops.beam import TreeModel, beam_search
from torch_specops.beam.tree import BeamTree, Level
from torch_specops.drafts import PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.hf import language_model


@pytest.mark.parametrize(
    ("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("gemma2", "eager"), ("t5", "eager")]
)
@torch.inference_mode()
def test_nodes_of_a_tree_are_read_like_texts(family: str, attention: str) -> None:
    """Two texts that part after four tokens, and a third that parts later, in slots in no order."""
    model, inputs = shared_tiny(family, attention=attention), encoder_inputs(family)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, VOCAB, (3, 3, 14), generator=generator)
    texts[1, :, :4], texts[2, :, :9] = texts[0, :, :4], texts[1, :, :9]
    adapter = language_model(model)
    assert isinstance(adapter, TreeModel)
    adapter.start(3, 48, inputs)
    # Node of each position of each text, in order of reading; and the texts' shared beginnings.
    node = torch.arange(3 * 14).view(3, 14)
    node[1, :4], node[2, :9] = node[0, :4], node[1, :9]
    slots = torch.stack([torch.randperm(44, generator=generator) for _ in range(3)])
    positions = torch.arange(14).repeat(3)
    slot_positions = torch.zeros(3, 44, dtype=torch.int64).scatter(1, slots[:, :42], positions.expand(3, -1))
    visible = torch.zeros(3, 42, 44, dtype=torch.bool)
    for text in range(3):
        for position in range(14):
            own = slots[:, node[text, : position + 1]]
            visible[:, node[text, position]] = torch.zeros(3, 44, dtype=torch.bool).scatter(1, own, True)
    tokens = torch.cat([texts[0], texts[1], texts[2]], 1)
    nodes = node.flatten().unique()
    logits = torch.empty(3, 42, VOCAB)
    for part in nodes.split([3, 9, 1, 6, len(nodes) - 19]):
        logits[:, part] = adapter.forward_tree(
            tokens[:, part], positions[part].expand(3, -1), slots[:, part], visible[:, part], slot_positions
        )
    for text in range(3):
        if inputs is None:
            expected = model(texts[text], use_cache=False).logits.float()
        else:
            expected = model(**inputs, decoder_input_ids=texts[text], use_cache=False).logits.float()
        torch.testing.assert_close(logits[:, node[text]], expected, rtol=1e-5, atol=1e-5)


class PairTree(PairModel):
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
    output = search(
        PairTree(table),
        num_beams,
        PairTree(other),
        draft_beams=draft_beams,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=30,
        prompts=prompts,
        side="right",
    )
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


def test_rows_that_have_ended_free_their_slots() -> None:
    tree = BeamTree(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 2]), num_beams=2, num_slots=32)
    assert tree.num_live().tolist() == [2, 1]
    tree.begin(num_nodes=2, num_live=2)
    first = torch.zeros(2, 2, dtype=torch.int64)
    tree.move(first, first, num_levels=torch.ones(2, dtype=torch.int64), done=torch.tensor([True, False]))
    assert tree.num_live().tolist() == [0, 2]


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
    ({"num_return_sequences": 0}, ValueError, "num_return_sequences: expected a number >= 1"),
    ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens: expected a number >= 0"),
    ({"early_stopping": "always"}, ValueError, "early_stopping: expected True, False or 'never', got 'always'"),
    ({"early_stopping": 1}, ValueError, "early_stopping: expected True, False or 'never', got 1"),
    ({"length_penalty": "long"}, TypeError, "length_penalty: expected a number"),
    *(({"length_penalty": value}, ValueError, FLOAT32) for value in (1e4, -1e4, float("nan"))),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens: expected a number >= 1, got 0"),
    ({"max_new_tokens": [4, 4]}, ValueError, "max_new_tokens: expected one number or 3, got 2"),
    ({"max_new_tokens": POSITIONS}, ValueError, f"max_new_tokens: expected .* {POSITIONS} that the target reads"),
    ({"num_beams": 31, "eos_token_id": list(range(VOCAB))}, ValueError, "num_beams: expected the 31 beams to have"),
    ({"eos_token_id": -1}, ValueError, "eos_token_id: expected a number >= 0"),
    ({"pad_token_id": -1}, ValueError, "pad_token_id: expected a number >= 0"),
    ({"inputs": {"input_ids": torch.ones(3, 1)}}, ValueError, "inputs: a decoder-only model reads tokens alone"),
    ({"draft": "small"}, TypeError, "draft: expected a model"),
    ({"draft": PromptLookup()}, TypeError, FOLLOWS),
    # More than a model: it overrides `propose`.
    ({"draft": lambda: HierarchicalDraft(language_model(shared_tiny("llama")))}, TypeError, FOLLOWS),
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


def test_the_package_loads_it_when_it_is_used() -> None:
    assert torch_specops.beam.beam_search is beam_search
    with pytest.raises(TypeError, match="num_beams"):
        torch_specops.generate(shared_tiny("llama"), torch.tensor([[1]]), num_beams=2)  # type: ignore[call-arg]


BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_beam.py"


@pytest.mark.slow
@pytest.mark.skipif(not BENCHMARK.exists(), reason="an installed package has no benchmarks")
def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("bench_beam", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_beam", module)
    spec.loader.exec_module(module)
    out = tmp_path / "out.json"
    options = "--num-beams 2 --num-draft-tokens 2 --max-new-tokens 8 --prompts 1 --rounds 1"
    module.main([*options.split(), "--out", str(out)])
    written = json.loads(out.read_text())
    assert written["environment"]["torch"] == torch.__version__
    records = {(record["search"], record["draft_beams"]): record for record in written["records"]}
    assert set(records) == {("transformers", None), ("ours", None), ("ours", 2), ("ours", 4)}
    assert all(record["same_tokens"] == 8 and record["tokens"] == 8 for record in records.values())
    assert records["transformers", None]["speedup"] == 1.0
    assert records["ours", 4]["levels_per_round"] > 1.0
