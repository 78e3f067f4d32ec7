"""The decoding loop: greedy output is that of transformers, row by row; it stops where it should; nothing stays.

The families of models are compared with one draft, and one family (llama) with every draft and number of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_loops import DRAFTS, GREEDY, LENGTH, cut, decode, expected_rows, make_draft, new_tokens, steps_of, streamed
from tiny_models import FAMILIES, POSITIONS, PROMPTS, VOCAB, encoder_inputs, greedy_alone, padded, shared_tiny, tiny
from torch import Tensor

import torch_specops
from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import GenerationOutput
from torch_specops.decode.decoder import CAPACITY_MULTIPLE
from torch_specops.drafts import Draft, DraftSource
from torch_specops.sampling import SamplingTensors


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_that_of_transformers(family: str) -> None:
    output = decode(make_draft("perturbed", family), 4, family=family)
    expected = expected_rows(family=family)
    assert new_tokens(output) == expected
    for row, prompt in enumerate(PROMPTS):
        assert output.sequences[row, : output.lengths[row]].tolist() == [*prompt, *expected[row]]
    assert output.prompt_lengths.tolist() == [len(prompt) for prompt in PROMPTS]
    assert output.errors == {} and not output.interrupted
    assert 1.0 < output.stats.mean_acceptance_length < 5
    # The target as its own draft accepts everything, five tokens a step: an eos and limits in the middle of a step.
    limits, eos = (13, 8, 17), expected[0][7]
    stopped = decode(
        make_draft("itself", family), 4, family=family, side="right", max_new_tokens=limits, eos_token_id=eos
    )
    limited = [row[:limit] for row, limit in zip(expected, limits, strict=True)]
    assert new_tokens(stopped) == cut(limited, [[eos]] * 3)
    # The texts are varied: these comparisons could pass for a model that repeats one token.
    assert len({token for row in expected for token in row}) >= 10
    assert max(len(set(row)) for row in expected) >= 7 and len({tuple(row) for row in expected}) == 3


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_greedy_with_every_draft(draft: str, num_draft_tokens: int) -> None:
    output = decode(make_draft(draft), num_draft_tokens, side=["left", "right"][num_draft_tokens % 2])
    assert new_tokens(output) == expected_rows()
    assert len(output.stats.proposed_at) <= num_draft_tokens
    mean = output.stats.mean_acceptance_length
    if draft == "nothing" or num_draft_tokens == 0:
        assert mean == 1.0 and output.stats.acceptance_rate is None and output.stats.num_steps == LENGTH
    elif draft == "itself":
        assert mean == LENGTH / output.stats.num_steps and output.stats.acceptance_rate == 1.0
    elif draft != "stranger":
        assert 1.0 < mean < num_draft_tokens + 1


@pytest.mark.parametrize("family", ["qwen2 sliding", "mistral", "gemma2", "gemma3", "t5"])
def test_the_text_outgrows_the_window(family: str) -> None:
    """Sliding windows of 6 and T5's largest distance of 12 matter: without them the text is a different one."""
    model = tiny(family)
    if family == "t5":
        for block in model.decoder.block:
            block.layer[0].SelfAttention.relative_attention_max_distance = 13
    else:
        model.config.sliding_window = 64
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 64
    inputs = encoder_inputs(family)
    own = None if inputs is None else {name: value[:1] for name, value in inputs.items()}
    assert greedy_alone(model, PROMPTS[0], LENGTH, inputs=own) != expected_rows(family=family)[0]


class Ragged(DraftSource):
    """Proposes the right tokens, as many as the row's index, then padding, then right tokens again. Padding is any
    number outside the vocabulary."""

    def __init__(self, texts: Tensor) -> None:
        self.texts = texts

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        at = lengths.unsqueeze(1) + torch.arange(num_draft_tokens)
        drafts = self.texts.gather(1, at.clamp(max=self.texts.shape[1] - 1))
        holes = torch.arange(num_draft_tokens) == torch.arange(len(lengths)).unsqueeze(1)
        return Draft(torch.where(holes, torch.tensor([[-1], [VOCAB], [VOCAB + 1000]]), drafts))


def test_rows_may_have_different_numbers_of_drafts() -> None:
    rows = expected_rows()
    texts, _ = padded([[*prompt, *row] for prompt, row in zip(PROMPTS, rows, strict=True)], "right")
    steps, output = steps_of(Ragged(texts), 4)
    assert new_tokens(output) == rows
    assert steps[0].num_proposed == steps[0].num_accepted == [0, 1, 2]
    assert [len(tokens) for tokens in steps[0].tokens] == [1, 2, 3]


# Stops.


@pytest.mark.parametrize("draft", ["nothing", "itself", "perturbed"])
def test_an_eos_stops_anywhere_in_a_step(draft: str) -> None:
    rows = expected_rows()
    for eos in rows[0][:11]:
        expected = cut(rows, [[eos]] * 3)
        assert expected[0] == greedy_alone(shared_tiny("llama"), PROMPTS[0], LENGTH, eos=[eos])
        steps, output = steps_of(draft, 4, eos_token_id=eos)
        assert new_tokens(output) == expected
        if draft == "itself":
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
        (both, [both] * 3),
        (tuple(both), [both] * 3),
        (each, each),
        ([], [[]] * 3),
        (None, [[]] * 3),
        (in_prompt, [[in_prompt]] * 3),
    ):
        assert new_tokens(decode(make_draft("itself"), 4, eos_token_id=eos)) == cut(rows, per_row)


def test_the_eos_of_the_target_is_the_default() -> None:
    model = tiny("llama")
    row = expected_rows()[0]
    for eos in (row[6], [row[6], row[9]]):
        model.generation_config.eos_token_id = eos
        output = torch_specops.generate(
            model, torch.tensor([PROMPTS[0]]), draft=model, sampling=GREEDY, max_new_tokens=LENGTH
        )
        assert output.new_tokens(0) == row[: row.index(row[6]) + 1]


@pytest.mark.parametrize("draft", ["nothing", "itself", "perturbed"])
@pytest.mark.parametrize("limits", [(0, 3, 20), (11, 0, 1)])
def test_each_row_has_its_own_limit(draft: str, limits: tuple[int, ...]) -> None:
    """Rows end at different steps; a row that has ended emits nothing more."""
    steps, output = steps_of(draft, 4, max_new_tokens=limits, pad_token_id=9)
    assert new_tokens(output) == [row[:limit] for row, limit in zip(expected_rows(), limits, strict=True)]
    assert streamed(steps) == new_tokens(output)
    for row, limit in enumerate(limits):
        assert (output.sequences[row, output.lengths[row] :] == 9).all()
        ended = [step.finished[row] for step in steps]
        assert ended == sorted(ended) and ended[-1]
        counts = [len(step.tokens[row]) for step in steps]
        assert all((count == 0) == (sum(counts[:index]) == limit) for index, count in enumerate(counts))
        # The last token before the limit needs no draft.
        left = [limit - sum(counts[:index]) for index in range(len(counts))]
        assert all(step.num_proposed[row] <= max(room - 1, 0) for step, room in zip(steps, left, strict=True))


def padded_with(token: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(len(row) for row in rows)
    return [[*row, *[token] * (width - len(row))] for row in rows]


@pytest.mark.parametrize("limits", [0, torch.zeros(3, dtype=torch.int64)])
def test_no_new_tokens_return_the_prompts(limits: int | Tensor) -> None:
    output = decode(make_draft("itself"), 4, max_new_tokens=limits, pad_token_id=5)
    assert output.sequences.tolist() == padded_with(5, PROMPTS)
    assert output.lengths.tolist() == output.prompt_lengths.tolist() == [7, 1, 4]
    assert output.stats.num_steps == 0 and output.stats.mean_acceptance_length == 0.0


def test_what_fills_rows_after_their_end() -> None:
    model = tiny("llama")
    rows = expected_rows()
    eos = rows[0][2]
    ended = [[*prompt, *row] for prompt, row in zip(PROMPTS, cut(rows, [[eos]] * 3), strict=True)]
    assert len(ended[0]) < len(PROMPTS[0]) + LENGTH and rows[1:] == cut(rows, [[eos]] * 3)[1:]
    input_ids, mask = padded(PROMPTS, "left")
    options = {"attention_mask": mask, "sampling": GREEDY, "max_new_tokens": LENGTH}
    # The argument, else the target's pad token, else the first eos.
    for own, asked, filler in ((7, 9, 9), (7, None, 7), (None, None, eos)):
        model.generation_config.pad_token_id = own
        output = torch_specops.generate(model, input_ids, eos_token_id=eos, pad_token_id=asked, **options)
        assert output.sequences.tolist() == padded_with(filler, ended)


@pytest.mark.parametrize(("family", "draft"), [("gpt2", "prompt lookup"), ("whisper", "itself")])
def test_the_positions_of_the_model_can_be_used_up(family: str, draft: str) -> None:
    """The last steps draft beyond the last position."""
    room = [POSITIONS - len(prompt) for prompt in PROMPTS]
    output = decode(make_draft(draft, family), 8, family=family, max_new_tokens=room)
    # The shorter prompts leave room for more tokens than the first.
    expected = [row[:limit] for row, limit in zip(expected_rows(room[0], family=family), room, strict=True)]
    assert [row[: room[0]] for row in new_tokens(output)] == expected
    assert output.lengths.tolist() == [POSITIONS] * 3
    with pytest.raises(ValueError, match=rf"max_new_tokens: .* within the {POSITIONS} that the target reads, got 97"):
        decode(make_draft(draft, family), 8, family=family, max_new_tokens=[1, room[1] + 1, 1])


def test_other_bounds_of_the_length() -> None:
    """The draft's positions, and `max_length`."""
    short = tiny("llama", max_position_embeddings=20)
    assert new_tokens(decode(short, 8, max_new_tokens=13)) == [row[:13] for row in expected_rows()]
    with pytest.raises(ValueError, match=r"max_new_tokens: .* within the 20 that the draft reads, got 21"):
        decode(short, 8, max_new_tokens=14)
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("itself"), sampling=GREEDY, max_length=12)
    input_ids = torch.tensor([PROMPTS[0]])
    assert decoder.generate(input_ids, max_new_tokens=5).new_tokens(0) == expected_rows()[0][:5]
    with pytest.raises(ValueError, match=r"max_new_tokens: .* within max_length = 12, got 13"):
        decoder.generate(input_ids, max_new_tokens=6)


def test_drafts_have_room_behind_the_longest_text() -> None:
    """Texts that fill the buffers up to the room for the last step's drafts."""
    length = CAPACITY_MULTIPLE - len(PROMPTS[0])
    output = decode(make_draft("itself"), 8, max_new_tokens=[length, 1, length])
    assert output.lengths.tolist() == [CAPACITY_MULTIPLE, 2, CAPACITY_MULTIPLE - 3]
    expected = expected_rows(length)
    assert output.new_tokens(0) == expected[0] and output.new_tokens(2) == expected[2]


# Batch after batch.


def test_a_decoder_serves_batch_after_batch() -> None:
    """The caches of earlier batches leave no trace, whatever their sizes; outputs are not overwritten."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3, sampling=GREEDY)
    rows, outputs = expected_rows(), []
    batches = ([0, 1, 2], [2, 0, 1], [1], [0, 2], [2, 1], [1, 1, 1])
    for chosen in batches:
        input_ids, mask = padded([PROMPTS[row] for row in chosen], "left")
        outputs.append(decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH))
        assert outputs[-1].stats.num_tokens == LENGTH * len(chosen)
    for chosen, output in zip(batches, outputs, strict=True):
        assert new_tokens(output) == [rows[row] for row in chosen]


def test_a_decoder_keeps_nothing_of_the_batch_before() -> None:
    """Seeds, limits and eos tokens are those of each call."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3)
    input_ids, mask = padded(PROMPTS, "left")
    calls: list[dict[str, Any]] = [
        {"seed": 1, "max_new_tokens": 12},
        {"seed": 9, "max_new_tokens": 12},
        {"seed": 1, "max_new_tokens": [5, 12, 2]},
        {"seed": 1, "max_new_tokens": 12, "eos_token_id": list(range(0, VOCAB, 3))},
        {"seed": 1, "max_new_tokens": 12, "sampling": GREEDY},
        {"seed": 1, "max_new_tokens": 12},
    ]
    texts = []
    for arguments in calls:
        output = decoder.generate(input_ids, attention_mask=mask, **arguments)
        fresh = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3)
        texts.append(new_tokens(output))
        assert texts[-1] == new_tokens(fresh.generate(input_ids, attention_mask=mask, **arguments))
    assert texts[0] == texts[-1] != texts[1]


def test_dtypes_of_prompts_and_masks() -> None:
    """The caller's tensors are not changed."""
    input_ids, mask = padded(PROMPTS, "right")
    for dtype in (torch.bool, torch.int32, torch.float32):
        given = input_ids.int(), mask.to(dtype)
        output = torch_specops.generate(
            shared_tiny("llama"), given[0], attention_mask=given[1], sampling=GREEDY, max_new_tokens=6
        )
        assert new_tokens(output) == [row[:6] for row in expected_rows()]
        assert torch.equal(given[0].long(), input_ids) and torch.equal(given[1].long(), mask)


def test_the_seed_decides_a_sampled_text() -> None:
    def run(**arguments: Any) -> GenerationOutput:
        return decode(make_draft("perturbed"), 3, sampling=SamplingParams(), **arguments)

    def texts(**arguments: Any) -> list[list[int]]:
        return new_tokens(run(**arguments))

    assert texts(seed=1) == texts(seed=1) != texts(seed=5)
    # Row b of an int seed is seeded with seed + b.
    assert texts(seed=40) == texts(seed=torch.tensor([40, 41, 42]))
    assert texts(seed=41)[0] == texts(seed=torch.tensor([41, 0, 0]))[0] != texts(seed=40)[0]
    assert run(seed=7, max_new_tokens=1).stats.seeds == [7, 8, 9]
    # Without a seed, one is drawn from torch's generator and reported.
    first, second = run(), run()
    assert first.stats.seeds != second.stats.seeds and new_tokens(first) != new_tokens(second)
    assert texts(seed=torch.tensor(first.stats.seeds)) == new_tokens(first)
    torch.manual_seed(3)
    third = texts()
    torch.manual_seed(3)
    assert texts() == third
