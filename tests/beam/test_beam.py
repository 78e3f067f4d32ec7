"""Beam search returns the beams of transformers, token for token, whatever the draft and the batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from marks import slow
from tiny_beams import (
    DRAFTS,
    ENDS,
    LENGTH,
    PAD,
    assert_same,
    beams_of,
    expected_beams,
    make_draft,
    search,
    transformers_beams,
)
from tiny_models import FAMILIES, PROMPTS, encoder_inputs, greedy_alone, perturbed, shared_tiny


@pytest.mark.parametrize(
    ("family", "attention"), [*((family, None) for family in FAMILIES), ("llama", "eager"), ("t5", "eager")]
)
def test_beams_are_those_of_transformers(family: str, attention: str | None) -> None:
    model, draft = shared_tiny(family, attention=attention), make_draft("perturbed", family)
    options = {"num_draft_tokens": 3, "draft_beams": 6, "eos_token_id": ENDS, "inputs": encoder_inputs(family)}
    output = search(model, 3, draft, side="right", **options)
    assert_same(beams_of(output), expected_beams(family, 3, ENDS))
    for row, prompt in enumerate(PROMPTS):
        for beam in range(3 * row, 3 * row + 3):
            assert output.prompt_lengths[beam] == len(prompt)
            assert output.sequences[beam, : len(prompt)].tolist() == list(prompt)
            assert bool((output.sequences[beam, output.lengths[beam] :] == PAD).all())
    ends = ["eos" if tokens[-1] in ENDS else "length" for tokens, _ in beams_of(output)]
    assert output.errors == {} and output.finish_reasons == ends


@pytest.mark.parametrize(
    ("num_beams", "num_draft_tokens", "draft_beams"), [(4, 0, 4), (2, 1, 4), (4, 5, 4), (4, 3, 8), (2, 3, 2)]
)
def test_any_width_and_depth(num_beams: int, num_draft_tokens: int, draft_beams: int) -> None:
    options = {"num_draft_tokens": num_draft_tokens, "draft_beams": draft_beams}
    output = search(shared_tiny("gpt2"), num_beams, make_draft("perturbed", "gpt2"), eos_token_id=ENDS[:2], **options)
    assert_same(beams_of(output), expected_beams("gpt2", num_beams, ENDS[:2]))
    if num_draft_tokens:
        assert 0 < output.stats.num_accepted < output.stats.num_proposed


ALL_WAYS_TO_STOP = tuple(product((False, True, "never"), (-1.0, 0.0, 0.6, 3.0)))
# "never" looks further ahead where the penalty is above 0, and there only.
WAYS_TO_STOP = ((False, 3.0), (False, -1.0), (True, 0.6), ("never", -1.0), ("never", 0.0), ("never", 3.0))


def ends_of(family: str, num_ends: int) -> tuple[int, ...]:
    """Tokens that the best beam without an end has after its fourth token."""
    return tuple(dict.fromkeys(expected_beams(family, 3)[0][0][4:]))[:num_ends]


@pytest.mark.parametrize(
    ("num_ends", "ways"), [(6, WAYS_TO_STOP), *(slow(number, ALL_WAYS_TO_STOP) for number in (1, 2, 6))]
)
def test_ends_are_those_of_transformers(num_ends: int, ways: tuple[tuple[bool | str, float], ...]) -> None:
    results = set()
    for family, draft in (("qwen2", "perturbed"), ("gemma", "nothing")):
        eos = ends_of(family, num_ends)
        for early_stopping, length_penalty in ways:
            options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
            output = search(shared_tiny(family), 3, make_draft(draft, family), eos_token_id=eos, **options)
            expected = expected_beams(family, 3, eos, **options)
            assert_same(beams_of(output), expected)
            results.add(tuple(tokens for tokens, _ in expected))
    # The options matter: they give different beams, of different lengths.
    assert len(results) >= 5
    assert len({len(tokens) for beams in results for tokens in beams}) > 3


def test_float32_models() -> None:
    model, draft = (perturbed(shared_tiny("llama"), scale=scale).float() for scale in (0.0, 0.02))
    output = search(model, 4, draft, num_draft_tokens=3, eos_token_id=ENDS)
    assert_same(beams_of(output), transformers_beams(model, 4, eos=ENDS), tolerance=1e-4)


def test_ties_fall_as_they_do_in_transformers() -> None:
    """Every token has a twin of the same logit, so that every step has a tie."""
    model = perturbed(shared_tiny("llama"), scale=0.0)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[1::2] = head[::2]
    for num_beams in (2, 3):
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
        alone = transformers_beams(model, 3, [prompt], max_new_tokens=limits[row], eos=ends[row])
        assert_same(beams_of(output)[3 * row : 3 * row + 3], alone)
    # A row near its limit has fewer drafts.
    assert search(model, 3, model, max_new_tokens=limits, num_draft_tokens=4).stats.acceptance_rate == 1.0


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_draft_has_no_part_in_the_result(draft: str) -> None:
    output = search(shared_tiny("llama"), 3, make_draft(draft), num_draft_tokens=3, eos_token_id=ENDS)
    assert_same(beams_of(output), expected_beams("llama", 3, ENDS))
    rate = output.stats.acceptance_rate
    assert (rate is None) == (draft == "nothing")
    assert (rate == 1.0) == (draft == "itself") and (draft != "opposite" or rate < 0.2)


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
    """With the ends and the padding of the target."""
    model = perturbed(shared_tiny("llama"), scale=0.0)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = list(ENDS), 9
    expected = expected_beams("llama", 4, ENDS)
    for returned in (1, 2):
        output = search(model, 4, eos_token_id=None, pad_token_id=None, num_return_sequences=returned)
        best = [beam for row in range(len(PROMPTS)) for beam in expected[4 * row : 4 * row + returned]]
        assert_same(beams_of(output), best)
        assert int(output.lengths.min()) < output.sequences.shape[1]
        for row in range(len(output.lengths)):
            assert bool((output.sequences[row, output.lengths[row] :] == 9).all())
