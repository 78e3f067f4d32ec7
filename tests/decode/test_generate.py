"""The decoding loop: greedy output is that of transformers, row by row; it stops where it should; nothing stays.

The families of models are compared with one draft, and one family (llama) with every draft and number of drafts.
"""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from tiny_loops import (
    DRAFTS,
    GREEDY,
    LENGTH,
    Holes,
    cut,
    decode,
    expected_rows,
    limited,
    new_tokens,
    steps_of,
    streamed,
)
from tiny_models import FAMILIES, POSITIONS, PROMPTS, VOCAB, greedy_alone, padded, perturbed, shared_tiny, tiny

from torch_specops import Request, SamplingParams, SpeculativeDecoder


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(family: str) -> None:
    output = decode("perturbed", 4, family=family)
    expected = expected_rows(family=family)
    assert new_tokens(output) == expected
    for row, prompt in enumerate(PROMPTS):
        assert output.sequences[row, : output.lengths[row]].tolist() == [*prompt, *expected[row]]
    assert output.prompt_lengths.tolist() == [len(prompt) for prompt in PROMPTS]
    assert output.errors == {}
    assert 1.0 < output.stats.mean_acceptance_length < 5
    # The target as its own draft accepts everything, five tokens a step: an eos and limits in the middle of a step.
    limits, eos = (13, 8, 17), expected[0][7]
    stopped = decode("itself", 4, family=family, side="right", max_new_tokens=limits, eos_token_id=eos)
    assert new_tokens(stopped) == cut(limited(expected, limits), [[eos]] * 3)
    # The texts are varied: these comparisons could pass for a model that repeats one token.
    assert len({token for row in expected for token in row}) >= 10
    assert max(len(set(row)) for row in expected) >= 7 and len({tuple(row) for row in expected}) == 3


@pytest.mark.parametrize(
    ("draft", "num_draft_tokens"),
    [
        # Without drafts no source is asked.
        *((draft, 0) for draft in ("nothing", "perturbed", "prompt lookup")),
        # Three drafts are what test_generate_many.py and test_same_text.py have.
        *((draft, most) for draft in DRAFTS for most in (1, 8) if draft != "nothing"),
    ],
)
def test_greedy_with_every_draft(draft: str, num_draft_tokens: int) -> None:
    output = decode(draft, num_draft_tokens, side=["left", "right"][num_draft_tokens % 2])
    assert new_tokens(output) == expected_rows()
    assert len(output.stats.proposed_at) <= num_draft_tokens
    mean = output.stats.mean_acceptance_length
    if num_draft_tokens == 0:
        assert mean == 1.0 and output.stats.acceptance_rate is None and output.stats.num_steps == LENGTH
    elif draft == "itself":
        assert mean == LENGTH / output.stats.num_steps and output.stats.acceptance_rate == 1.0
    elif draft not in ("stranger", "early exit"):
        assert 1.0 < mean < num_draft_tokens + 1


def test_rows_may_have_different_numbers_of_drafts() -> None:
    """As many as the row's index. What stands behind the first padding is not read."""
    source = Holes("llama", lambda call, batch, num_drafts: torch.arange(num_drafts) == torch.arange(batch)[:, None])
    steps, output = steps_of(source, 4)
    assert new_tokens(output) == expected_rows()
    assert steps[0].num_proposed == steps[0].num_accepted == [0, 1, 2]
    assert [len(tokens) for tokens in steps[0].tokens] == [1, 2, 3]


# Stops.


def test_an_eos_stops_anywhere_in_a_step() -> None:
    rows = expected_rows()
    eos = rows[0][10]
    expected = cut(rows, [[eos]] * 3)
    assert expected[0] == greedy_alone(shared_tiny("llama"), PROMPTS[0], LENGTH, eos=[eos])
    assert new_tokens(decode("nothing", 4, eos_token_id=eos)) == expected
    for eos in rows[0][:11]:
        expected = cut(rows, [[eos]] * 3)
        steps, output = steps_of("itself", 4, eos_token_id=eos)
        assert new_tokens(output) == expected
        # Five tokens a step: the eos is an accepted draft unless it is the fifth one, and drafts after it are cut.
        last = steps[(len(expected[0]) - 1) // 5]
        assert len(last.tokens[0]) == (len(expected[0]) - 1) % 5 + 1
        assert last.num_accepted[0] == 4 and last.finished[0]
    assert {rows[0].index(eos) % 5 for eos in rows[0][:11]} == {0, 1, 2, 3, 4}


def test_several_eos_tokens_and_those_of_each_row() -> None:
    rows = expected_rows()
    both = [rows[0][5], rows[2][2]]
    each = [[rows[0][7]], [], [rows[2][3], rows[2][9]]]
    in_prompt = next(token for token in reversed(PROMPTS[0]) if token not in rows[0])
    for eos, per_row in (
        (tuple(both), [both] * 3),
        (each, each),
        ([], [[]] * 3),
        (None, [[]] * 3),
        (in_prompt, [[in_prompt]] * 3),
    ):
        output = decode("itself", 4, eos_token_id=eos)
        assert new_tokens(output) == cut(rows, per_row)
        ended = [bool(set(new) & set(own)) for new, own in zip(new_tokens(output), per_row, strict=True)]
        assert output.finish_reasons == ["eos" if end else "length" for end in ended]
    # An eos that ends the prompt ends nothing.
    output = decode("itself", 4, eos_token_id=PROMPTS[0][-1], max_new_tokens=(0, 1, 1))
    assert output.finish_reasons[0] == "length"


@pytest.mark.parametrize("draft", ["itself", "perturbed"])
@pytest.mark.parametrize("limits", [(0, 3, 20), (11, 0, 1)])
def test_each_row_has_its_own_limit(draft: str, limits: tuple[int, ...]) -> None:
    """Rows end at different steps; a row that has ended emits nothing more."""
    steps, output = steps_of(draft, 4, max_new_tokens=limits)
    assert streamed(steps) == new_tokens(output) == limited(expected_rows(), limits)
    for row, limit in enumerate(limits):
        ended = [step.finished[row] for step in steps]
        assert ended == sorted(ended) and ended[-1]
        counts = [len(step.tokens[row]) for step in steps]
        assert all((count == 0) == (sum(counts[:index]) == limit) for index, count in enumerate(counts))
        # The last token before the limit needs no draft.
        left = [limit - sum(counts[:index]) for index in range(len(counts))]
        assert all(step.num_proposed[row] <= max(room - 1, 0) for step, room in zip(steps, left, strict=True))


def test_no_new_tokens_return_the_prompts() -> None:
    output = decode("itself", 4, max_new_tokens=torch.zeros(3, dtype=torch.int64), pad_token_id=7)
    assert torch.equal(output.sequences, padded(PROMPTS, "right")[0])
    assert output.lengths.tolist() == output.prompt_lengths.tolist() == [7, 1, 4]
    assert output.stats.num_steps == 0 and output.stats.mean_acceptance_length == 0.0


def test_eos_and_padding_default_to_the_target() -> None:
    model, rows = tiny("llama"), expected_rows()
    eos = rows[0][2]
    expected = cut(rows, [[eos]] * 3)
    texts, mask = padded([[*prompt, *row] for prompt, row in zip(PROMPTS, expected, strict=True)], "right")
    assert len(expected[0]) < LENGTH and rows[1:] == expected[1:]
    # The argument, else the target's pad token, else the first eos.
    for own_eos, own_pad, asked, filler in ((eos, 7, 9, 9), ([eos, eos], 7, None, 7), (eos, None, None, eos)):
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = own_eos, own_pad
        output = decode(None, 1, target=model, pad_token_id=asked)
        assert torch.equal(output.sequences, texts.where(mask.bool(), filler))


@pytest.mark.parametrize(("family", "draft"), [("gpt2", "prompt lookup"), ("whisper", "itself")])
def test_the_positions_of_the_model_can_be_used_up(family: str, draft: str) -> None:
    """The last steps draft beyond the last position."""
    room = [POSITIONS - len(prompt) for prompt in PROMPTS]
    output = decode(draft, 8, family=family, max_new_tokens=room)
    # The shorter prompts leave room for more tokens than the first.
    assert limited(new_tokens(output), [room[0]] * 3) == limited(expected_rows(room[0], family=family), room)
    assert output.lengths.tolist() == [POSITIONS] * 3
    with pytest.raises(ValueError, match=rf"max_new_tokens: .* within the {POSITIONS} that the target reads, got 97"):
        decode(draft, 8, family=family, max_new_tokens=[1, room[1] + 1, 1])


def test_other_bounds_of_the_length() -> None:
    """What a target with rotary embeddings was made for, and `max_length`."""
    short = tiny("llama", max_position_embeddings=20)
    with pytest.warns(UserWarning, match=r"max_new_tokens: .* may become 27, and the target was made for 20"):
        assert new_tokens(decode("prompt lookup", 8, target=short)) == expected_rows()
    decoder = SpeculativeDecoder(shared_tiny("llama"), shared_tiny("llama"), sampling=GREEDY, max_length=12)
    input_ids = torch.tensor([PROMPTS[0]])
    assert decoder.generate(input_ids, max_new_tokens=5).new_tokens(0) == expected_rows()[0][:5]
    with pytest.raises(ValueError, match=r"max_new_tokens: .* within max_length = 12, got 13"):
        decoder.generate(input_ids, max_new_tokens=6)


# Batch after batch.


def new_decoder(**options: Any) -> SpeculativeDecoder:
    target = shared_tiny("llama")
    return SpeculativeDecoder(target, perturbed(target), num_draft_tokens=3, **options)


def test_a_decoder_keeps_nothing_of_the_batches_before() -> None:
    """Caches, seeds, limits and eos tokens are those of each call, whatever the sizes; outputs are not overwritten."""
    decoder = new_decoder()
    calls: list[tuple[list[int], dict[str, Any]]] = [
        ([0, 1, 2], {}),
        ([0, 1, 2], {"seed": 9}),
        ([2, 0, 1], {"max_new_tokens": [5, 12, 2]}),
        ([1], {"eos_token_id": list(range(0, VOCAB, 3))}),
        ([0, 2], {"sampling": GREEDY}),
        ([1, 1, 1], {}),
        ([0, 1, 2], {}),
    ]
    found, expected = [], []
    for chosen, options in calls:
        input_ids, mask = padded([PROMPTS[row] for row in chosen], "left")
        arguments = {"attention_mask": mask, "max_new_tokens": 12, "seed": 1} | options
        found.append(decoder.generate(input_ids, **arguments))
        expected.append(new_tokens(new_decoder().generate(input_ids, **arguments)))
    assert list(map(new_tokens, found)) == expected
    assert [output.stats.num_tokens for output in found] == [sum(map(len, rows)) for rows in expected]
    assert expected[0] == expected[-1] != expected[1]
    assert expected[4] == [row[:12] for row in (expected_rows()[0], expected_rows()[2])]


def test_dtypes_of_prompts_and_masks() -> None:
    """The caller's tensors are not changed."""
    input_ids, mask = padded(PROMPTS, "right")
    given: list[tuple[Any, Any]] = [
        *((input_ids.int(), mask.to(dtype)) for dtype in (torch.bool, torch.int32, torch.float32)),
        (input_ids.numpy(), mask.numpy()),
    ]
    arguments = {"max_new_tokens": numpy.array([6, 6, 6]), "eos_token_id": numpy.array([], dtype=int)}
    for ids, own_mask in given:
        output = new_decoder(sampling=GREEDY).generate(ids, attention_mask=own_mask, **arguments)
        assert new_tokens(output) == limited(expected_rows(), [6] * 3)
        same = zip((ids, own_mask), padded(PROMPTS, "right"), strict=True)
        assert all(torch.equal(torch.as_tensor(kept).long(), whole) for kept, whole in same)


def test_the_seed_decides_a_sampled_text() -> None:
    def run(**arguments: Any) -> tuple[list[list[int]], list[int]]:
        output = decode("perturbed", 3, sampling=SamplingParams(), max_new_tokens=6, **arguments)
        return new_tokens(output), output.stats.seeds

    # The seeds of rows, in whatever form.
    expected = _, seeds = run(seed=40)
    assert run(seed=5)[0] != expected[0]
    forms = (seeds, tuple(seeds), torch.tensor(seeds), numpy.array(seeds), [numpy.int64(seed) for seed in seeds])
    for given in (40, numpy.int32(40), *forms):
        assert run(seed=given) == expected
    # Without a seed, one is drawn from torch's generator and reported.
    torch.manual_seed(3)
    first, second = run(), run()
    assert first[0] != second[0] and first[1] != second[1]
    assert run(seed=torch.tensor(first[1])) == first
    torch.manual_seed(3)
    assert run() == first


def test_results_are_shown_in_few_words() -> None:
    """Of many rows, with log-probabilities: no tensor is printed, nor hundreds of numbers. Nothing is checked."""
    decoder, prompts = SpeculativeDecoder(tiny("llama"), sampling=GREEDY), [[3, 4, 5]] * 100
    output = decoder.generate(prompts, max_new_tokens=2, seed=0, eos_token_id=(), logprobs="raw", top_logprobs=2)
    requests = [Request(torch.arange(50), 2, stop_strings="x"), Request([[torch.ones(9)]], inputs="no mapping")]
    done = list(decoder.generate_many(requests, batch_size=2))
    for shown, part in (
        (output, "num_new_tokens=[2, 2, 2, 2, 2, 2, 2, 2, ...], finish_reasons=['length', "),
        (output.stats, "num_tokens=200, num_steps=2, mean_acceptance_length=1.0, acceptance_rate_per_position=[]"),
        *zip(requests, ("input_ids=[0, 1, 2, 3, 4, 5, 6, 7, ...], max_new_tokens=2", "no mapping"), strict=True),
        *((each, f"finish_reason='error', error={each.error!r}") for each in done),
    ):
        assert part in repr(shown) and len(repr(shown)) < 600, repr(shown)
        assert "tensor" not in repr(shown) or "no mapping" in part
