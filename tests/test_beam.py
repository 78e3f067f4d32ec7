"""Beam search: the beams are those of transformers, token for token, whatever the draft, the tree or the batch."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    POSITIONS,
    PROMPTS,
    VOCAB,
    PairModel,
    encoder_inputs,
    greedy_alone,
    padded,
    perturbed,
    raised,
    random_table,
    shared_tiny,
    tiny,
)
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

import torch_specops.beam
from torch_specops.beam import BeamOutput, TreeModel, beam_search
from torch_specops.beam.tree import BeamTree, Level
from torch_specops.drafts import EarlyExit, ModelDraft, PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.hf import language_model

LENGTH = 12
PAD = 3
# A tenth of the vocabulary ends a beam, so that beams of many lengths compete.
ENDS = (11, 24, 30, 41, 50, 58)

# A beam: its new tokens and its score.
Beam = tuple[tuple[int, ...], float]


def transformers_beams(
    model: PreTrainedModel,
    num_beams: int,
    *,
    eos: Sequence[int] = (),
    max_new_tokens: int = LENGTH,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    num_return_sequences: int | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> list[Beam]:
    """What transformers' own beam search returns, every beam unless told otherwise, prompt after prompt."""
    input_ids, attention_mask = padded(prompts, "left")
    if inputs is None:
        options |= {"input_ids": input_ids, "attention_mask": attention_mask}
    else:
        assert len(prompts) == 1
        # As in `greedy_alone`: T5's own cache has the wrong number of layers, Whisper's own `generate` forces tokens.
        options |= {**inputs, "decoder_input_ids": input_ids, "use_cache": False}
    output = GenerationMixin.generate(
        model,
        num_beams=num_beams,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=PAD,
        num_return_sequences=num_return_sequences or num_beams,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = []
    for row, score in zip(output.sequences[:, input_ids.shape[1] :].tolist(), output.sequences_scores, strict=True):
        ends = [index for index, token in enumerate(row) if token in eos]
        length = ends[0] + 1 if ends else max_new_tokens
        assert all(token == PAD for token in row[length:])
        beams.append((tuple(row[:length]), float(score)))
    return beams


@functools.cache
def expected_beams(family: str, num_beams: int, eos: tuple[int, ...] = (), **options: Any) -> list[Beam]:
    model, inputs = shared_tiny(family), encoder_inputs(family)
    if inputs is None:
        return transformers_beams(model, num_beams, eos=eos, **options)
    beams = []
    for index, prompt in enumerate(PROMPTS):
        own = {name: value[index : index + 1] for name, value in inputs.items()}
        beams += transformers_beams(model, num_beams, eos=eos, prompts=[prompt], inputs=own, **options)
    return beams


def beams_of(output: BeamOutput) -> list[Beam]:
    rows = range(len(output.lengths))
    return [(tuple(output.new_tokens(row)), float(output.scores[row])) for row in rows]


def search(
    model: PreTrainedModel | TreeModel, num_beams: int, draft: Any = None, *, side: str = "left", **options: Any
) -> BeamOutput:
    input_ids, attention_mask = padded(options.pop("prompts", PROMPTS), side)
    defaults = {"max_new_tokens": LENGTH, "num_return_sequences": num_beams, "eos_token_id": (), "pad_token_id": PAD}
    return beam_search(
        model, input_ids, num_beams=num_beams, draft=draft, attention_mask=attention_mask, **(defaults | options)
    )


def assert_same(found: Sequence[Beam], expected: Sequence[Beam], tolerance: float = 1e-6) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=tolerance)


def opposite(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that wants what the model does not want at all."""
    clone = perturbed(model, scale=0.0)
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(-model.get_output_embeddings().weight)
    clone.set_output_embeddings(head)
    return clone


def make_draft(name: str, family: str = "llama") -> Any:
    model = shared_tiny(family)
    drafts: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "itself": lambda: model,
        "perturbed": lambda: perturbed(model),
        "stranger": lambda: shared_tiny(family, seed=3),
        "opposite": lambda: opposite(model),
        "early exit": lambda: EarlyExit(1),
        "draft source": lambda: ModelDraft(language_model(perturbed(model))),
    }
    return drafts[name]()


DRAFTS = ("nothing", "itself", "perturbed", "stranger", "opposite", "early exit", "draft source")


@pytest.mark.parametrize("family", FAMILIES)
def test_beams_are_those_of_transformers(family: str) -> None:
    output = search(
        shared_tiny(family),
        3,
        make_draft("perturbed", family),
        num_draft_tokens=3,
        draft_beams=6,
        side="right",
        eos_token_id=ENDS,
        inputs=encoder_inputs(family),
    )
    assert_same(beams_of(output), expected_beams(family, 3, ENDS))
    for row, prompt in enumerate(PROMPTS):
        for beam in range(3 * row, 3 * row + 3):
            assert output.prompt_lengths[beam] == len(prompt)
            assert output.sequences[beam, : len(prompt)].tolist() == list(prompt)
            assert bool((output.sequences[beam, output.lengths[beam] :] == PAD).all())
    assert output.errors == {} and not output.interrupted


@pytest.mark.parametrize("num_beams", [2, 4])
@pytest.mark.parametrize(("num_draft_tokens", "times_as_wide"), [(0, 1), (1, 2), (5, 1), (3, 2)])
def test_any_width_and_depth(num_beams: int, num_draft_tokens: int, times_as_wide: int) -> None:
    output = search(
        shared_tiny("gpt2"),
        num_beams,
        make_draft("perturbed", "gpt2"),
        num_draft_tokens=num_draft_tokens,
        draft_beams=num_beams * times_as_wide,
        eos_token_id=ENDS[:2],
    )
    assert_same(beams_of(output), expected_beams("gpt2", num_beams, ENDS[:2]))
    if num_draft_tokens:
        assert 0 < output.stats.num_accepted < output.stats.num_proposed


WAYS_TO_STOP: tuple[bool | str, ...] = (False, True, "never")


def ends_of(family: str, num_ends: int) -> tuple[int, ...]:
    """Tokens that the best beam without an end has after its fourth token."""
    return tuple(dict.fromkeys(expected_beams(family, 3)[0][0][4:]))[:num_ends]


@pytest.mark.parametrize("num_ends", [1, 2, 6])
def test_ends_are_those_of_transformers(num_ends: int) -> None:
    results = set()
    for family, draft in (("qwen2", "perturbed"), ("gemma", "nothing")):
        eos = ends_of(family, num_ends)
        for length_penalty in (-1.0, 0.0, 0.6, 3.0):
            for early_stopping in WAYS_TO_STOP:
                options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
                output = search(shared_tiny(family), 3, make_draft(draft, family), eos_token_id=eos, **options)
                expected = expected_beams(family, 3, eos, **options)
                assert_same(beams_of(output), expected)
                results.add(tuple(tokens for tokens, _ in expected))
    # The options matter: they give different beams, of different lengths.
    assert len(results) >= 5
    assert len({len(tokens) for beams in results for tokens in beams}) > 3


def test_float32_models() -> None:
    model = perturbed(shared_tiny("llama"), scale=0.0).float()
    output = search(model, 4, perturbed(shared_tiny("llama")).float(), num_draft_tokens=3, eos_token_id=ENDS)
    assert_same(beams_of(output), transformers_beams(model, 4, eos=ENDS), tolerance=1e-4)


@pytest.mark.parametrize("num_beams", [2, 3])
def test_ties_fall_as_they_do_in_transformers(num_beams: int) -> None:
    """Every token has a twin of the same logit, so that every step has a tie."""
    model = perturbed(shared_tiny("llama"), scale=0.0)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[1::2] = head[::2]
    expected = transformers_beams(model, num_beams, eos=ENDS)
    for draft, num_draft_tokens in ((None, 0), (model, 3), (make_draft("perturbed"), 2)):
        output = search(model, num_beams, draft, num_draft_tokens=num_draft_tokens, eos_token_id=ENDS)
        assert_same(beams_of(output), expected)
    assert len({score for _, score in expected}) < len(expected)


def test_rows_do_not_meet() -> None:
    """Each prompt of a padded batch, with a limit and eos of its own, gives what it gives alone in transformers."""
    model, limits, ends = shared_tiny("llama"), [5, LENGTH, 9], [list(ENDS), [], [41, 7]]
    output = search(model, 3, make_draft("perturbed"), max_new_tokens=limits, eos_token_id=ends, num_draft_tokens=4)
    for row, prompt in enumerate(PROMPTS):
        alone = transformers_beams(model, 3, prompts=[prompt], max_new_tokens=limits[row], eos=ends[row])
        assert_same(beams_of(output)[3 * row : 3 * row + 3], alone)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_draft_has_no_part_in_the_result(draft: str) -> None:
    output = search(shared_tiny("llama"), 3, make_draft(draft), num_draft_tokens=3, eos_token_id=ENDS)
    assert_same(beams_of(output), expected_beams("llama", 3, ENDS))
    rate = output.stats.acceptance_rate
    if draft == "nothing":
        assert rate is None
    elif draft == "itself":
        assert rate == 1.0
    elif draft in ("opposite", "stranger"):
        assert rate is not None and rate < 0.2


@pytest.mark.parametrize(("num_beams", "num_draft_tokens"), [(1, 2), (4, 1), (4, 5)])
def test_the_target_as_its_own_draft_is_always_right(num_beams: int, num_draft_tokens: int) -> None:
    model = shared_tiny("llama")
    stats = search(model, num_beams, model, num_draft_tokens=num_draft_tokens, max_new_tokens=17).stats
    assert stats.acceptance_rate == 1.0 and stats.num_tokens == 17 * len(PROMPTS)
    rounds, last = divmod(17, num_draft_tokens + 1)
    assert stats.num_steps == rounds + (last > 0)
    assert stats.mean_acceptance_length == 17 / stats.num_steps
    # The last round drafts no more levels than there is room for.
    assert stats.proposed_at[0] == len(PROMPTS) * (rounds + (last > 1))
    assert stats.accepted_at == stats.proposed_at
    assert stats.tokens_per_second > 0 and stats.prefill_seconds > 0


def test_a_wider_draft_is_right_more_often() -> None:
    model, draft = shared_tiny("llama"), make_draft("perturbed")
    narrow, wide = (search(model, 3, draft, draft_beams=beams, max_new_tokens=40).stats for beams in (3, 12))
    assert wide.num_accepted / wide.num_proposed > narrow.num_accepted / narrow.num_proposed + 0.05


def test_one_beam_is_greedy() -> None:
    model = shared_tiny("llama")
    expected = [greedy_alone(model, prompt, LENGTH, eos=ENDS) for prompt in PROMPTS]
    for early_stopping, draft in (("never", "nothing"), (False, "perturbed")):
        options = {"eos_token_id": ENDS, "early_stopping": early_stopping, "length_penalty": 2.0}
        output = search(model, 1, make_draft(draft), **options)
        assert [output.new_tokens(row) for row in range(len(PROMPTS))] == expected
    assert min(len(row) for row in expected) < LENGTH


def test_the_best_beams_are_returned() -> None:
    expected = expected_beams("llama", 4, ENDS)
    for returned in (1, 2):
        output = search(shared_tiny("llama"), 4, None, eos_token_id=ENDS, num_return_sequences=returned)
        best = [beam for row in range(len(PROMPTS)) for beam in expected[4 * row : 4 * row + returned]]
        assert_same(beams_of(output), best)


def test_the_ends_of_the_target_are_the_default() -> None:
    model = perturbed(shared_tiny("llama"), scale=0.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = list(ENDS), 9
    output = search(model, 3, eos_token_id=None, pad_token_id=None, early_stopping=True)
    assert_same(beams_of(output), expected_beams("llama", 3, ENDS, early_stopping=True))
    assert int(output.lengths.min()) < output.sequences.shape[1]
    for row in range(len(output.lengths)):
        assert bool((output.sequences[row, output.lengths[row] :] == 9).all())


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
