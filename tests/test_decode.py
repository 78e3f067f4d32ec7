"""The decoding loop: greedy output is that of transformers, row by row; stops are exact; rows do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from types import SimpleNamespace
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
    greedy_rows,
    padded,
    perturbed,
    random_table,
    shared_tiny,
    tiny,
)
from torch import Tensor, nn

import torch_specops
from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.cli.greedy import GreedyDifference, check_greedy
from torch_specops.decode import GenerationOutput, GenerationStats, Step
from torch_specops.decode import decoder as decoder_module
from torch_specops.decode import runner as runner_module
from torch_specops.decode.decoder import CAPACITY_MULTIPLE
from torch_specops.drafts import Draft, DraftSource, LanguageModel, PromptLookup
from torch_specops.drafts.ngram import NGram
from torch_specops.hf import language_model
from torch_specops.sampling import SamplingTensors
from torch_specops.schedules import Constant, Heuristic, Optimal, Schedule

GREEDY = SamplingParams(temperature=0.0)
LENGTH = 20
DRAFTS = ["nothing", "prompt lookup", "n-gram", "n-gram with counts", "itself", "perturbed", "stranger"]


def make_draft(name: str, family: str = "llama", attention: str = "sdpa") -> DraftSource | nn.Module | None:
    model = shared_tiny(family, attention=attention)
    if name == "nothing":
        return None
    if name == "prompt lookup":
        return PromptLookup(min_ngram=1)
    if name.startswith("n-gram"):
        rows = greedy_rows(family, LENGTH, attention)
        texts = [torch.tensor([*prompt, *row]) for prompt, row in zip(PROMPTS, rows, strict=True)]
        # A bigram table of what is to come guesses right often, not always.
        return NGram.from_tokens(texts, vocab_size=VOCAB, order=2, probabilities=name != "n-gram")
    if name == "perturbed":
        return perturbed(model)
    return model if name == "itself" else shared_tiny(family, seed=3, attention=attention)


def decode(
    draft: DraftSource | nn.Module | None,
    num_draft_tokens: int,
    *,
    family: str = "llama",
    attention: str = "sdpa",
    prompts: Sequence[Sequence[int]] = PROMPTS,
    side: str = "left",
    sampling: SamplingParams = GREEDY,
    schedule: str | Schedule = "constant",
    **arguments: Any,
) -> GenerationOutput:
    decoder = SpeculativeDecoder(
        shared_tiny(family, attention=attention),
        draft,
        num_draft_tokens=max(num_draft_tokens, 1),
        schedule=Constant(0) if num_draft_tokens == 0 else schedule,
        sampling=sampling,
    )
    input_ids, attention_mask = padded(prompts, side)
    defaults = {"max_new_tokens": LENGTH, "inputs": encoder_inputs(family)}
    return decoder.generate(input_ids, attention_mask=attention_mask, **(defaults | arguments))


def new_tokens(output: GenerationOutput) -> list[list[int]]:
    return [output.new_tokens(row) for row in range(len(output.lengths))]


def expected_rows(length: int = LENGTH, family: str = "llama", attention: str = "sdpa") -> list[list[int]]:
    return [list(row) for row in greedy_rows(family, length, attention)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("draft", "num_draft_tokens", "side"),
    [
        ("nothing", 5, "left"),
        ("prompt lookup", 3, "right"),
        ("n-gram", 2, "left"),
        ("n-gram with counts", 3, "right"),
        ("itself", 4, "right"),
        ("perturbed", 4, "left"),
        ("perturbed", 1, "right"),
        ("stranger", 8, "left"),
    ],
)
def test_greedy_is_that_of_transformers(family: str, draft: str, num_draft_tokens: int, side: str) -> None:
    output = decode(make_draft(draft, family), num_draft_tokens, family=family, side=side)
    expected = expected_rows(family=family)
    assert new_tokens(output) == expected
    for row, prompt in enumerate(PROMPTS):
        assert output.sequences[row, : output.lengths[row]].tolist() == [*prompt, *expected[row]]
    assert output.prompt_lengths.tolist() == [len(prompt) for prompt in PROMPTS]
    assert output.errors == {} and not output.interrupted
    mean = output.stats.mean_acceptance_length
    if draft == "nothing":
        assert mean == 1.0 and output.stats.acceptance_rate is None
    elif draft == "itself":
        assert mean == num_draft_tokens + 1 and output.stats.acceptance_rate == 1.0
    elif draft == "perturbed":
        assert 1.0 < mean < num_draft_tokens + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_of_the_tiny_models_are_varied(family: str) -> None:
    """The tests above could pass for a model that repeats one token."""
    rows = greedy_rows(family, LENGTH)
    assert len({token for row in rows for token in row}) >= 10
    assert max(len(set(row)) for row in rows) >= 7
    assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("draft", ["prompt lookup", "n-gram with counts", "itself", "perturbed"])
@pytest.mark.parametrize("num_draft_tokens", range(9))
def test_greedy_with_every_number_of_drafts(family: str, draft: str, num_draft_tokens: int) -> None:
    side = ["left", "right"][num_draft_tokens % 2]
    output = decode(make_draft(draft, family), num_draft_tokens, family=family, side=side)
    assert new_tokens(output) == expected_rows(family=family)
    assert len(output.stats.proposed_at) <= num_draft_tokens
    if num_draft_tokens == 0:
        assert output.stats.num_steps == LENGTH and output.stats.num_proposed == 0


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "whisper", "t5"])
@pytest.mark.parametrize("draft", ["itself", "perturbed"])
def test_greedy_with_eager_attention(family: str, draft: str) -> None:
    output = decode(make_draft(draft, family, "eager"), 3, family=family, attention="eager")
    assert new_tokens(output) == expected_rows(family=family, attention="eager")
    assert output.stats.mean_acceptance_length > 1.0


@pytest.mark.parametrize("family", ["qwen2 sliding", "mistral", "gemma2", "gemma3", "t5"])
def test_the_text_outgrows_the_window(family: str) -> None:
    """Sliding windows of 6 and T5's largest distance of 12 matter: without them the text is another one."""
    model = tiny(family)
    config = model.config
    if family == "t5":
        for block in model.decoder.block:
            block.layer[0].SelfAttention.relative_attention_max_distance = 13
    else:
        config.sliding_window = 64
        for layer in model.model.layers:
            layer.self_attn.sliding_window = 64
    inputs = encoder_inputs(family)
    own = None if inputs is None else {name: value[:1] for name, value in inputs.items()}
    assert greedy_alone(model, PROMPTS[0], LENGTH, inputs=own) != expected_rows(family=family)[0]


class Ragged(DraftSource):
    """Proposes what is right, as many tokens as a row's index says, then padding, then the right tokens again."""

    def __init__(self, texts: Tensor) -> None:
        self.texts = texts

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        at = lengths.unsqueeze(1) + torch.arange(num_draft_tokens)
        drafts = self.texts.gather(1, at.clamp(max=self.texts.shape[1] - 1))
        holes = torch.arange(num_draft_tokens) == torch.arange(len(lengths)).unsqueeze(1)
        return Draft(torch.where(holes, -1, drafts))


def test_rows_may_have_different_numbers_of_drafts() -> None:
    rows = expected_rows()
    texts, _ = padded([[*prompt, *row] for prompt, row in zip(PROMPTS, rows, strict=True)], "right")
    decoder = SpeculativeDecoder(shared_tiny("llama"), Ragged(texts), num_draft_tokens=4, sampling=GREEDY)
    input_ids, mask = padded(PROMPTS, "left")
    steps = list(decoder.stream(input_ids, attention_mask=mask, max_new_tokens=LENGTH))
    assert new_tokens(decoder.output()) == rows
    # Row b gets b drafts a step, and all of them are right.
    assert steps[0].num_proposed == [0, 1, 2]
    assert steps[0].num_accepted == [0, 1, 2]
    assert [len(tokens) for tokens in steps[0].tokens] == [1, 2, 3]


class OutOfRange(DraftSource):
    """Proposes the numbers next to the vocabulary, which are padding."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        return Draft(torch.tensor([[-1], [VOCAB], [VOCAB + 1000]]).expand(3, num_draft_tokens))


def test_drafts_outside_the_vocabulary_are_padding() -> None:
    output = decode(OutOfRange(), 2)
    assert new_tokens(output) == expected_rows()
    assert output.stats.num_proposed == 0


# Stops.


@pytest.mark.parametrize("eos_at", range(11))
@pytest.mark.parametrize("draft", ["nothing", "itself", "perturbed"])
def test_an_eos_stops_inside_an_accepted_run(eos_at: int, draft: str) -> None:
    rows = expected_rows()
    eos = rows[0][eos_at]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert expected[0] == greedy_alone(shared_tiny("llama"), PROMPTS[0], LENGTH, eos=[eos])
    input_ids, mask = padded(PROMPTS, "left")
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft(draft), num_draft_tokens=4, sampling=GREEDY)
    steps = list(decoder.stream(input_ids, attention_mask=mask, max_new_tokens=LENGTH, eos_token_id=eos))
    assert new_tokens(decoder.output()) == expected
    if draft == "itself":
        # Five tokens a step: the eos is an accepted draft unless it is the fifth one, and the drafts after it are cut.
        last = steps[(len(expected[0]) - 1) // 5]
        assert len(last.tokens[0]) == (len(expected[0]) - 1) % 5 + 1
        assert last.num_accepted[0] == 4 and last.finished[0]


def test_an_eos_among_the_first_tokens_was_tried() -> None:
    """The test above covers eos at several places of a step."""
    row = expected_rows()[0]
    assert {row.index(eos) % 5 for eos in row[:11]} >= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("draft", ["nothing", "itself", "prompt lookup"])
def test_several_eos_tokens_and_those_of_each_row(draft: str) -> None:
    rows = expected_rows()

    def stopped(eos: list[list[int]]) -> list[list[int]]:
        ends = [[row.index(token) for token in own if token in row] for row, own in zip(rows, eos, strict=True)]
        return [row[: min(end) + 1] if end else row for row, end in zip(rows, ends, strict=True)]

    both = [rows[0][5], rows[2][2]]
    each = [[rows[0][7]], [], [rows[2][3], rows[2][9]]]
    for eos, per_row in ((both, [both] * 3), (tuple(both), [both] * 3), (each, each), ([], [[]] * 3), (None, [[]] * 3)):
        output = decode(make_draft(draft), 4, eos_token_id=eos)
        assert new_tokens(output) == stopped(per_row)


def test_the_eos_of_the_target_is_the_default() -> None:
    model = tiny("llama")
    row = expected_rows()[0]
    for eos in (row[6], [row[6], row[9]]):
        model.generation_config.eos_token_id = eos
        output = torch_specops.generate(
            model, torch.tensor([PROMPTS[0]]), draft=model, sampling=GREEDY, max_new_tokens=LENGTH
        )
        assert output.new_tokens(0) == row[: row.index(row[6]) + 1]


def test_an_eos_in_the_prompt_stops_nothing() -> None:
    eos = next(token for token in reversed(PROMPTS[0]) if token not in expected_rows()[0])
    assert new_tokens(decode(make_draft("itself"), 4, eos_token_id=eos))[0] == expected_rows()[0]


@pytest.mark.parametrize("max_new_tokens", range(1, 12))
@pytest.mark.parametrize("draft", ["itself", "perturbed"])
def test_the_limit_is_exact(max_new_tokens: int, draft: str) -> None:
    output = decode(make_draft(draft), 4, max_new_tokens=max_new_tokens)
    assert new_tokens(output) == [row[:max_new_tokens] for row in expected_rows()]


@pytest.mark.parametrize("draft", ["nothing", "itself", "perturbed"])
@pytest.mark.parametrize("limits", [(0, 3, 20), (11, 0, 1), (7, 20, 5)])
def test_each_row_has_its_own_limit(draft: str, limits: tuple[int, ...]) -> None:
    """Rows end at different steps; one that has ended emits nothing more."""
    input_ids, mask = padded(PROMPTS, "right")
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft(draft), num_draft_tokens=4, sampling=GREEDY)
    steps = list(decoder.stream(input_ids, attention_mask=mask, max_new_tokens=limits, pad_token_id=9))
    output = decoder.output()
    assert new_tokens(output) == [row[:limit] for row, limit in zip(expected_rows(), limits, strict=True)]
    assert output.lengths.tolist() == [len(prompt) + limit for prompt, limit in zip(PROMPTS, limits, strict=True)]
    for row, limit in enumerate(limits):
        assert [token for step in steps for token in step.tokens[row]] == expected_rows()[row][:limit]
        assert (output.sequences[row, output.lengths[row] :] == 9).all()
        ended = [step.finished[row] for step in steps]
        assert ended == sorted(ended) and ended[-1]
        counts = [len(step.tokens[row]) for step in steps]
        assert all((count == 0) == (sum(counts[:index]) == limit) for index, count in enumerate(counts))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_stops_inside_a_step(family: str) -> None:
    """The target as its own draft accepts all, five tokens a step: an eos, and limits, in the middle of them."""
    rows, limits = expected_rows(family=family), (13, 8, 17)
    eos = rows[0][7]
    cut = [row[:limit] for row, limit in zip(rows, limits, strict=True)]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in cut]
    output = decode(make_draft("itself", family), 4, family=family, max_new_tokens=limits, eos_token_id=eos)
    assert new_tokens(output) == expected


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("llama", "gpt2")])
@pytest.mark.parametrize("num_draft_tokens", [0, 2, 5, 6, 7])
def test_greedy_with_more_numbers_of_drafts(family: str, num_draft_tokens: int) -> None:
    """Of 0 to 8 the ones that the first test of this file leaves out."""
    output = decode(make_draft("perturbed", family), num_draft_tokens, family=family)
    assert new_tokens(output) == expected_rows(family=family)


@pytest.mark.parametrize("limits", [0, [0, 0, 0], torch.zeros(3, dtype=torch.int64)])
def test_no_new_tokens_give_the_prompts_back(limits: int | list[int] | Tensor) -> None:
    output = decode(make_draft("itself"), 4, max_new_tokens=limits, pad_token_id=5)
    assert output.sequences.tolist() == padded_with(5, PROMPTS)
    assert output.lengths.tolist() == output.prompt_lengths.tolist() == [7, 1, 4]
    assert output.stats.num_steps == 0 and output.stats.mean_acceptance_length == 0.0


def padded_with(token: int, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max(len(row) for row in rows)
    return [[*row, *[token] * (width - len(row))] for row in rows]


def test_what_fills_rows_after_their_end() -> None:
    model = tiny("llama")
    rows = expected_rows()
    eos = rows[0][2]
    ended = [[*prompt, *row] for prompt, row in zip(PROMPTS, rows, strict=True)]
    ended[0] = ended[0][: ended[0].index(eos, len(PROMPTS[0])) + 1]
    assert all(eos not in row for row in ended[1:])
    input_ids, mask = padded(PROMPTS, "left")
    # What is asked for, then what the target says, then its first eos.
    for own, asked, filler in ((7, 9, 9), (7, None, 7), (None, None, eos)):
        model.generation_config.pad_token_id = own
        output = torch_specops.generate(
            model,
            input_ids,
            attention_mask=mask,
            sampling=GREEDY,
            eos_token_id=eos,
            pad_token_id=asked,
            max_new_tokens=LENGTH,
        )
        assert output.sequences.tolist() == padded_with(filler, ended)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "whisper"])
@pytest.mark.parametrize("draft", ["prompt lookup", "itself"])
def test_the_positions_of_the_model_can_be_used_up(family: str, draft: str) -> None:
    """The last steps draft beyond the last position."""
    room = [POSITIONS - len(prompt) for prompt in PROMPTS]
    output = decode(make_draft(draft, family), 8, family=family, max_new_tokens=room)
    # Of the shorter texts one more token could be read.
    expected = [row[:limit] for row, limit in zip(expected_rows(room[0], family=family), room, strict=True)]
    assert [row[: room[0]] for row in new_tokens(output)] == expected
    assert output.lengths.tolist() == [POSITIONS] * 3
    with pytest.raises(ValueError, match=rf"max_new_tokens: .* within the {POSITIONS} that the target reads, got 97"):
        decode(make_draft(draft, family), 8, family=family, max_new_tokens=[1, room[1] + 1, 1])


def test_the_positions_of_the_draft_count_too() -> None:
    short = tiny("llama", max_position_embeddings=20)
    assert new_tokens(decode(short, 8, max_new_tokens=13)) == [row[:13] for row in expected_rows()]
    with pytest.raises(ValueError, match=r"max_new_tokens: .* within the 20 that the draft reads, got 21"):
        decode(short, 8, max_new_tokens=14)


def test_a_decoder_serves_batch_after_batch() -> None:
    """The caches of the batch before leave no trace, whatever its size and lengths."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3, sampling=GREEDY)
    rows = expected_rows()
    for chosen in ([0, 1, 2], [2, 0, 1], [1], [0, 2], [2, 1], [1, 1, 1]):
        input_ids, mask = padded([PROMPTS[row] for row in chosen], "left")
        output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)
        assert new_tokens(output) == [rows[row] for row in chosen]
        assert output.stats.num_tokens == LENGTH * len(chosen)


def test_outputs_are_not_overwritten_by_the_next_batch() -> None:
    decoder = SpeculativeDecoder(shared_tiny("llama"), None, sampling=GREEDY)
    input_ids, mask = padded(PROMPTS, "left")
    first = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)
    before = [first.sequences.clone(), first.lengths.clone(), first.prompt_lengths.clone()]
    decoder.generate(input_ids.flip(0), attention_mask=mask.flip(0), max_new_tokens=5)
    assert all(map(torch.equal, before, (first.sequences, first.lengths, first.prompt_lengths)))
    assert new_tokens(first) == expected_rows()


def test_a_decoder_keeps_nothing_of_the_batch_before() -> None:
    """Seeds, temperatures, limits and eos tokens are those of each call."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3)
    input_ids, mask = padded(PROMPTS, "left")
    calls: list[dict[str, Any]] = [
        {"seed": 1, "max_new_tokens": 12},
        {"seed": 9, "max_new_tokens": 12},
        {"seed": 1, "max_new_tokens": [5, 12, 2]},
        {"seed": 1, "max_new_tokens": 12, "eos_token_id": expected_rows()[0][3]},
        {"seed": 1, "max_new_tokens": 12, "eos_token_id": list(range(0, VOCAB, 3))},
        {"seed": 1, "max_new_tokens": 12},
    ]
    texts = []
    for arguments in calls:
        output = decoder.generate(input_ids, attention_mask=mask, **arguments)
        fresh = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3)
        texts.append(new_tokens(output))
        assert texts[-1] == new_tokens(fresh.generate(input_ids, attention_mask=mask, **arguments))
    assert texts[0] == texts[-1] != texts[1]


@pytest.mark.parametrize("draft", ["itself", "prompt lookup"])
def test_drafts_have_room_behind_the_longest_text(draft: str) -> None:
    """Texts that end where the buffers would, without the room for a last step's drafts."""
    length = CAPACITY_MULTIPLE - len(PROMPTS[0])
    output = decode(make_draft(draft), 8, max_new_tokens=[length, 1, length])
    assert output.lengths.tolist() == [CAPACITY_MULTIPLE, 2, CAPACITY_MULTIPLE - 3]
    expected = expected_rows(length)
    assert output.new_tokens(0) == expected[0] and output.new_tokens(2) == expected[2]


def test_max_length_bounds_prompt_and_new_tokens() -> None:
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("itself"), sampling=GREEDY, max_length=12)
    input_ids = torch.tensor([PROMPTS[0]])
    assert decoder.generate(input_ids, max_new_tokens=5).new_tokens(0) == expected_rows()[0][:5]
    with pytest.raises(ValueError, match=r"max_new_tokens: .* within max_length = 12, got 13"):
        decoder.generate(input_ids, max_new_tokens=6)


def test_the_caller_s_tensors_are_left_alone() -> None:
    input_ids, mask = padded(PROMPTS, "left")
    given = input_ids.clone(), mask.clone()
    torch_specops.generate(
        shared_tiny("llama"), input_ids, attention_mask=mask, draft=PromptLookup(), sampling=GREEDY, max_new_tokens=4
    )
    assert torch.equal(input_ids, given[0]) and torch.equal(mask, given[1])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_other_dtypes(dtype: torch.dtype) -> None:
    input_ids, mask = padded(PROMPTS, "right")
    output = torch_specops.generate(
        shared_tiny("llama"), input_ids.int(), attention_mask=mask.to(dtype), sampling=GREEDY, max_new_tokens=6
    )
    assert new_tokens(output) == [row[:6] for row in expected_rows()]


# Rows and seeds.

MIXED = [0.0, 1.0, 0.7]
SEEDS = torch.tensor([11, -5, 2**62])


@pytest.mark.parametrize("draft", ["nothing", "prompt lookup", "n-gram with counts", "perturbed"])
def test_a_row_does_not_depend_on_the_batch_around_it(draft: str) -> None:
    def rows(chosen: list[int], limits: list[int]) -> list[list[int]]:
        sampling = SamplingParams(temperature=[MIXED[row] for row in chosen])
        prompts = [PROMPTS[row] for row in chosen]
        return new_tokens(
            decode(make_draft(draft), 3, prompts=prompts, sampling=sampling, seed=SEEDS[chosen], max_new_tokens=limits)
        )

    alone = [rows([row], [LENGTH])[0] for row in range(3)]
    assert alone[0] == expected_rows()[0]
    assert alone[1] != expected_rows()[1] and alone[2] != expected_rows()[2]
    for chosen in ([0, 1, 2], [2, 0, 1], [1, 2], [1, 1, 2, 1]):
        assert rows(chosen, [LENGTH] * len(chosen)) == [alone[row] for row in chosen]
    # Neighbours that end early change nothing either.
    assert rows([2, 1, 0], [2, LENGTH, 0])[1] == alone[1]


def test_the_seed_decides_a_sampled_text() -> None:
    def texts(**arguments: Any) -> list[list[int]]:
        return new_tokens(decode(make_draft("perturbed"), 3, sampling=SamplingParams(), **arguments))

    assert texts(seed=1) == texts(seed=1) != texts(seed=5)
    # Row b of an int seed is seeded with seed + b.
    assert texts(seed=40) == texts(seed=torch.tensor([40, 41, 42]))
    assert texts(seed=41)[0] == texts(seed=torch.tensor([41, 0, 0]))[0] != texts(seed=40)[0]


def test_a_seed_that_was_drawn_is_reported() -> None:
    sampling = SamplingParams()
    first, second = (decode(make_draft("perturbed"), 3, sampling=sampling) for _ in range(2))
    assert first.stats.seeds != second.stats.seeds
    assert new_tokens(first) != new_tokens(second)
    again = decode(make_draft("perturbed"), 3, sampling=sampling, seed=torch.tensor(first.stats.seeds))
    assert torch.equal(first.sequences, again.sequences)
    assert decode(None, 1, seed=7, max_new_tokens=1).stats.seeds == [7, 8, 9]


def test_torch_s_generator_decides_the_seed_drawn() -> None:
    torch.manual_seed(3)
    first = decode(None, 1, sampling=SamplingParams(), max_new_tokens=3)
    torch.manual_seed(3)
    assert torch.equal(first.sequences, decode(None, 1, sampling=SamplingParams(), max_new_tokens=3).sequences)


# Schedules.


class Cycle(Schedule):
    """1, 3, 0, 1, 3, 0, ...; remembers what it was told."""

    buckets = (0, 1, 3)

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[int]]] = []
        self.resets = 0

    def first(self) -> int:
        self._coming = cycle([3, 0, 1])
        return 1

    def next(self, num_proposed: Sequence[int], num_accepted: Sequence[int]) -> int:
        self.told.append((list(num_proposed), list(num_accepted)))
        return next(self._coming)

    def reset(self) -> None:
        self.resets += 1


def steps_of(schedule: str | Schedule, draft: str, limits: int | list[int]) -> tuple[list[Step], GenerationOutput]:
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), make_draft(draft), num_draft_tokens=2, schedule=schedule, sampling=GREEDY
    )
    input_ids, mask = padded(PROMPTS, "left")
    return list(decoder.stream(input_ids, attention_mask=mask, max_new_tokens=limits)), decoder.output()


@pytest.mark.parametrize("draft", ["perturbed", "itself", "prompt lookup"])
@pytest.mark.parametrize("schedule", ["heuristic", "optimal", Cycle(), Heuristic(1, maximum=6)])
def test_greedy_under_a_schedule(draft: str, schedule: str | Schedule) -> None:
    assert new_tokens(steps_of(schedule, draft, LENGTH)[1]) == expected_rows()


class Timed(PairModel):
    """A model whose forward over n tokens moves a clock by first + more * (n - 1)."""

    def __init__(self, table: Tensor, clock: list[float], first: float, more: float) -> None:
        super().__init__(table)
        self.clock, self.first, self.more = clock, first, more

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        self.clock[0] += self.first + self.more * (tokens.shape[1] - 1)
        return super().forward(tokens, positions, num_logits)


def test_the_optimal_schedule_measures_what_a_draft_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    for module in (decoder_module, runner_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    table = random_table(8, 0)
    decoder = SpeculativeDecoder(
        Timed(table, clock, 1.0, 0.1), Timed(table, clock, 0.2, 0.0), num_draft_tokens=4, schedule="optimal"
    )
    output = decoder.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=24, seed=0)
    assert isinstance(decoder.schedule, Optimal)
    assert decoder.schedule.buckets == (0, 1, 2, 3, 4)
    # Four drafts of 0.2, and four more tokens of 0.1 for the target, in target forwards of 1.
    assert decoder.schedule.cost_ratio == pytest.approx((4 * 0.2 + 4 * 0.1) / 4)
    # Every draft is accepted, so in the end all are wanted.
    assert output.stats.acceptance_rate == 1.0 and len(output.stats.proposed_at) == 4


def test_a_custom_schedule_is_followed_and_told() -> None:
    schedule = Cycle()
    limits = [20, 3, 12]
    steps, output = steps_of(schedule, "perturbed", limits)
    assert new_tokens(output) == [row[:limit] for row, limit in zip(expected_rows(), limits, strict=True)]
    assert [max(step.num_proposed) for step in steps] == list(islice(cycle([1, 3, 0]), len(steps)))
    assert schedule.resets == 1
    # Of rows that had ended before a step it hears nothing.
    ended = [[False] * 3, *(step.finished for step in steps)]
    expected = [
        tuple([count for count, over in zip(counts, before, strict=True) if not over] for counts in both)
        for both, before in zip(((step.num_proposed, step.num_accepted) for step in steps), ended, strict=False)
    ]
    assert schedule.told == expected


@pytest.mark.parametrize(("draft", "expected"), [("itself", [2, 3, 5, 8]), ("stranger", [2, 1, 1, 1, 1])])
def test_the_heuristic_moves_the_number_of_drafts(draft: str, expected: list[int]) -> None:
    """2, 4, 6, 8 drafts or the bucket below; 1 fewer after a rejection."""
    steps, _ = steps_of("heuristic", draft, 40)
    assert [max(step.num_proposed) for step in steps][: len(expected)] == expected


@pytest.mark.parametrize("compile", [False, "auto"])
def test_one_graph_means_nothing_to_eager_steps(compile: bool | str) -> None:
    """Prompts of one length are read together with the first drafts."""
    prompt = torch.tensor([PROMPTS[0], PROMPTS[0]])
    outputs = []
    for one_graph in (False, True):
        decoder = SpeculativeDecoder(
            shared_tiny("llama"), shared_tiny("llama", seed=3), sampling=GREEDY, compile=compile, one_graph=one_graph
        )
        outputs.append(new_tokens(decoder.generate(prompt, max_new_tokens=LENGTH)))
    assert outputs[0] == outputs[1] == [expected_rows()[0]] * 2


def test_a_schedule_without_a_draft_proposes_nothing() -> None:
    steps, output = steps_of("heuristic", "nothing", 5)
    assert len(steps) == 5 and output.stats.num_proposed == 0


# Steps, stats and streams.


def test_steps_tell_what_happened() -> None:
    steps, output = steps_of("constant", "perturbed", LENGTH)
    for row in range(3):
        assert [token for step in steps for token in step.tokens[row]] == output.new_tokens(row)
    for step in steps:
        assert all(0 <= n <= proposed <= 2 for n, proposed in zip(step.num_accepted, step.num_proposed, strict=True))
        assert step.seconds >= 0
        for tokens, n, finished in zip(step.tokens, step.num_accepted, step.finished, strict=True):
            assert len(tokens) == n + 1 or finished
    added = GenerationStats(seeds=[])
    for step in steps:
        added.add(step)
    stats = output.stats
    assert (added.num_steps, added.num_row_steps, added.num_tokens) == (stats.num_steps, stats.num_row_steps, 60)
    assert (added.num_accepted, added.num_proposed) == (stats.num_accepted, stats.num_proposed)
    assert stats.prefill_seconds > 0 and stats.compile_seconds == 0
    assert "eager" in stats.compiled


def test_stats_count_what_was_emitted_and_verified() -> None:
    stats = GenerationStats(seeds=[0, 1])
    stats.add(Step([[1, 2, 3], [8]], [2, 0], [4, 1], [False, False], 0.5))
    stats.add(Step([[4], []], [0, 3], [0, 3], [False, True], 0.25))
    stats.add(Step([[5, 6], []], [3, 3], [4, 4], [True, True], 0.25))
    assert (stats.num_steps, stats.num_row_steps, stats.num_tokens) == (3, 4, 7)
    assert stats.mean_acceptance_length == 7 / 4
    assert stats.acceptance_rate == 5 / 9
    assert stats.acceptance_rate_per_position == [2 / 3, 1.0, 0.5, 0.0]
    assert stats.seconds == 1.0 and stats.tokens_per_second == 7.0


def test_a_streamer_gets_every_step() -> None:
    steps: list[Step] = []
    output = decode(make_draft("perturbed"), 3, streamer=steps.append)
    for row in range(3):
        assert [token for step in steps for token in step.tokens[row]] == output.new_tokens(row)


class TokenStreamer:
    """What transformers' streamers are: they get the prompt, then tokens, then the end."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_a_streamer_of_transformers() -> None:
    streamer = TokenStreamer()
    decode(make_draft("perturbed"), 3, prompts=PROMPTS[:1], streamer=streamer)
    prompt, *tokens, end = streamer.heard
    assert prompt == [list(PROMPTS[0])] and end == "end"
    assert [token for step in tokens for token in step] == expected_rows()[0]
    with pytest.raises(ValueError, match="streamer: one with put and end takes a batch of one, got 3 rows"):
        decode(None, 1, streamer=TokenStreamer())
    with pytest.raises(TypeError, match=r"streamer: expected a callable, .* got <class 'int'>"):
        decode(None, 1, streamer=3)


def test_a_streamer_gets_integers_also_from_a_row_that_fails() -> None:
    class Dtypes(TokenStreamer):
        def put(self, value: Tensor) -> None:
            assert value.dtype == torch.int64
            super().put(value)

    streamer = Dtypes()
    table = torch.full((9, 8, 8), torch.nan)
    with pytest.warns(RuntimeWarning, match="row 0: target: no finite logit after 2 tokens"):
        torch_specops.generate(PairModel(table), torch.tensor([[1, 2]]), max_new_tokens=3, streamer=streamer)
    assert streamer.heard[0] == [[1, 2]] and streamer.heard[-1] == "end"
    assert [token for step in streamer.heard[1:-1] for token in step] == []


def test_a_stream_ends_where_the_next_one_begins() -> None:
    """A decoder has one state: the stream before may not go on with the tokens of the next."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=2, sampling=GREEDY)
    first = decoder.stream(torch.tensor([PROMPTS[0]]), max_new_tokens=LENGTH)
    next(first)
    second = decoder.stream(torch.tensor([PROMPTS[2]]), max_new_tokens=LENGTH)
    with pytest.raises(RuntimeError, match="stream"):
        next(first)
    never_begun, second = second, decoder.stream(torch.tensor([PROMPTS[2]]), max_new_tokens=LENGTH)
    with pytest.raises(RuntimeError, match="stream"):
        next(never_begun)
    assert [token for step in second for token in step.tokens[0]] == expected_rows()[2]


class Interrupting(DraftSource):
    """Ctrl-C while the third step drafts."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return Draft(torch.full((len(tokens), num_draft_tokens), -1))


def test_an_interrupt_in_a_stream_keeps_what_was_generated() -> None:
    steps: list[Step] = []

    def impatient(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise KeyboardInterrupt

    output = decode(make_draft("perturbed"), 2, streamer=impatient)
    assert output.interrupted and output.errors == {}
    kept = new_tokens(output)
    assert kept == [[token for step in steps for token in step.tokens[row]] for row in range(3)]
    assert all(3 <= len(row) <= 9 for row in kept)
    assert kept == [full[: len(row)] for full, row in zip(expected_rows(), kept, strict=True)]
    assert output.stats.num_steps == 3


def test_an_interrupt_inside_a_step_keeps_the_steps_before() -> None:
    output = decode(Interrupting(), 2, streamer=lambda step: None)
    assert output.interrupted
    assert new_tokens(output) == [row[:2] for row in expected_rows()]
    # A streamer with an end hears of it.
    streamer = TokenStreamer()
    decode(Interrupting(), 2, prompts=PROMPTS[:1], streamer=streamer)
    assert streamer.heard[1:] == [[token] for token in expected_rows()[0][:2]] + ["end"]
    # Nobody listens: the interrupt is the caller's.
    with pytest.raises(KeyboardInterrupt):
        decode(Interrupting(), 2)


def test_a_decoder_can_be_used_after_an_interrupt() -> None:
    source = Interrupting()
    decoder = SpeculativeDecoder(shared_tiny("llama"), source, sampling=GREEDY)
    input_ids, mask = padded(PROMPTS, "left")
    for interrupted in (True, False):
        output = decoder.generate(
            input_ids, attention_mask=mask, max_new_tokens=LENGTH, streamer=lambda step: None, eos_token_id=()
        )
        assert output.interrupted == interrupted
    assert new_tokens(output) == expected_rows()


# Rows without a law.


class FailingRow(PairModel):
    """From a position on, the logits of row 1 are not numbers."""

    def __init__(self, table: Tensor, position: int) -> None:
        super().__init__(table)
        self.position = position

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        logits = super().forward(tokens, positions, num_logits).clone()
        logits[1][positions[1, -logits.shape[1] :] >= self.position] = torch.nan
        return logits


TABLE = random_table(8, seed=5)
SHORT_PROMPTS = [[1, 2, 3], [4, 5], [6, 0, 2, 7]]


@pytest.mark.parametrize("draft", ["nothing", "itself", "opposite", "prompt lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
# Row 1 has two tokens: with position 1 it emits nothing.
@pytest.mark.parametrize("position", [1, 2, 7])
def test_a_row_without_a_finite_logit_ends_alone(draft: str, temperature: float, position: int) -> None:
    source = {"nothing": None, "itself": PairModel(TABLE), "opposite": PairModel(-TABLE)}.get(draft, PromptLookup())
    input_ids, mask = padded(SHORT_PROMPTS, "left")

    def run(target: LanguageModel) -> GenerationOutput:
        return torch_specops.generate(
            target,
            input_ids,
            attention_mask=mask,
            draft=source,
            num_draft_tokens=3,
            max_new_tokens=12,
            sampling=SamplingParams(temperature=temperature),
            seed=3,
        )

    whole = run(PairModel(TABLE))
    message = f"target: no finite logit after {position + 1} tokens"
    with pytest.warns(RuntimeWarning, match=f"row 1: {message}"):
        output = run(FailingRow(TABLE, position))
    assert output.errors == {1: message}
    assert output.lengths.tolist() == [15, position + 1, 16]
    for row in range(3):
        assert output.new_tokens(row) == whole.new_tokens(row)[: int(output.lengths[row]) - len(SHORT_PROMPTS[row])]
    assert (output.sequences[1, position + 1 :] == 0).all()


def test_a_row_that_ends_in_time_has_no_error() -> None:
    """The limit or an eos comes at the last token that the target had a law for."""
    input_ids, mask = padded(SHORT_PROMPTS, "left")
    whole = torch_specops.generate(
        PairModel(TABLE), input_ids, attention_mask=mask, sampling=GREEDY, max_new_tokens=12
    ).new_tokens(1)
    for draft in (None, PairModel(TABLE)):
        for arguments in ({"max_new_tokens": 3}, {"max_new_tokens": 12, "eos_token_id": [[], [whole[2]], []]}):
            output = torch_specops.generate(
                FailingRow(TABLE, 4), input_ids, attention_mask=mask, draft=draft, sampling=GREEDY, **arguments
            )
            assert output.errors == {}
            assert output.new_tokens(1) == whole[: whole.index(whole[2]) + 1 if "eos_token_id" in arguments else 3]


def test_a_draft_without_a_finite_logit_costs_only_its_drafts() -> None:
    input_ids, mask = padded(SHORT_PROMPTS, "left")
    whole, output = (
        torch_specops.generate(
            PairModel(TABLE), input_ids, attention_mask=mask, draft=draft, sampling=GREEDY, max_new_tokens=12
        )
        for draft in (None, FailingRow(TABLE, 4))
    )
    assert torch.equal(whole.sequences, output.sequences) and output.errors == {}
    assert whole.stats.num_steps > output.stats.num_steps > 2


def test_a_model_that_fails_on_one_row_works_for_the_next_batch() -> None:
    """A token whose embedding is not a number fills the row's cache with such: nothing of it may stay."""
    model = tiny("llama")
    broken = 59
    assert broken not in {token for row in (*expected_rows(), *PROMPTS) for token in row}
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = torch.nan
    decoder = SpeculativeDecoder(model, model, num_draft_tokens=3, sampling=GREEDY)
    # Longer than the next batch's prompts, which would write over it.
    input_ids, mask = padded([PROMPTS[0], [1, broken, *[8] * 10], PROMPTS[2]], "left")
    with pytest.warns(RuntimeWarning, match="row 1: target: no finite logit after 12 tokens"):
        output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)
    assert new_tokens(output) == [expected_rows()[0], [], expected_rows()[2]]
    assert list(output.errors) == [1]
    input_ids, mask = padded(PROMPTS, "left")
    output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)
    assert new_tokens(output) == expected_rows() and output.errors == {}


# The check beside an output.


def test_check_greedy_finds_a_wrong_token_and_checks_the_rest() -> None:
    target = language_model(shared_tiny("llama"))
    prompt = torch.tensor([PROMPTS[0]])
    greedy = expected_rows()[0]
    assert check_greedy(target, prompt, greedy).identical
    wrong = [*greedy[:12], (greedy[12] + 1) % VOCAB]
    # After the wrong token the text goes on greedily, so that there is one difference.
    wrong += greedy_alone(shared_tiny("llama"), [*PROMPTS[0], *wrong], 10)
    check = check_greedy(target, prompt, wrong)
    assert [(difference.index, difference.expected_token) for difference in check.differences] == [(12, greedy[12])]
    assert check.num_tokens == 23
    assert not check.identical and not check.only_rounding


def test_check_greedy_tells_near_ties_from_defects() -> None:
    table = torch.zeros(6, 5, 5)
    table[:, 1, 2], table[:, 1, 3], table[:, 1, 4] = 1.0, 1.0 - 2e-6, 1.0 - 1e-3
    prompt = torch.tensor([[1]])
    near, far = (check_greedy(PairModel(table), prompt, [token]) for token in (3, 4))
    assert not near.identical and near.only_rounding
    assert not far.identical and not far.only_rounding
    assert isinstance(near.differences[0], GreedyDifference)
    assert near.differences[0].logit_gap == pytest.approx(2e-6, rel=0.1)
    with pytest.raises(ValueError, match=r"input_ids: expected one prompt \[1, P\], got \[2, 1\]"):
        check_greedy(PairModel(table), torch.tensor([[1], [2]]), [3])


# Bad input.

PROMPT = torch.tensor([[1, 2], [3, 4]])


def long(*rows: Sequence[int]) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.int64)}, ValueError, r"input_ids: expected \[B, P\] .* shape \[3\]"),
        ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, ValueError, r"input_ids: .* got shape \[1, 0\]"),
        ({"input_ids": torch.ones(0, 3, dtype=torch.int64)}, ValueError, r"input_ids: .* got shape \[0, 3\]"),
        ({"input_ids": torch.ones(1, 3)}, TypeError, "input_ids: expected an int64 tensor .* got torch.float32"),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids: expected an int64 tensor .* got <class 'list'>"),
        ({"input_ids": long([1, 8], [1, 2])}, ValueError, r"input_ids: expected tokens in \[0, 8\), got 8"),
        ({"input_ids": long([1, 2], [-1, 2])}, ValueError, r"input_ids: expected tokens in \[0, 8\), got -1"),
        ({"attention_mask": long([1, 1])}, ValueError, r"attention_mask: expected \[2, 2\], .* got \[1, 2\]"),
        ({"attention_mask": [[1, 1], [1, 1]]}, TypeError, "attention_mask: expected a tensor .* got <class 'list'>"),
        ({"attention_mask": long([1, 2], [1, 1])}, ValueError, "attention_mask: expected zeros and ones"),
        ({"attention_mask": long([1, 1], [0, 0])}, ValueError, "attention_mask: .* got none in row 1"),
        (
            {"input_ids": long([1, 2, 3], [1, 2, 3]), "attention_mask": long([1, 1, 1], [1, 0, 1])},
            ValueError,
            "attention_mask: expected padding at the ends of a row only, got a hole in row 1",
        ),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens: expected a number >= 0, got -1"),
        ({"max_new_tokens": [3, -2]}, ValueError, "max_new_tokens: expected a number >= 0, got -2"),
        ({"max_new_tokens": [3, 2, 1]}, ValueError, "max_new_tokens: expected one number or 2, got 3"),
        ({"max_new_tokens": 2.0}, TypeError, "max_new_tokens: expected"),
        ({"max_new_tokens": None}, TypeError, "max_new_tokens: expected"),
        ({"max_new_tokens": [2, 2.5]}, TypeError, "max_new_tokens: expected an int, got <class 'float'>"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens: expected an int, got <class 'bool'>"),
        ({"seed": 2**63}, ValueError, "seed: expected a 64-bit number, got 9223372036854775808"),
        ({"seed": "x"}, TypeError, "seed: expected an int or an int64 tensor .* got <class 'str'>"),
        ({"seed": torch.tensor([1, 2, 3])}, ValueError, r"seed: expected an int or a tensor \[2\], got shape \[3\]"),
        ({"seed": torch.tensor([1.0, 2.0])}, TypeError, "seed: .* int64 tensor .* got torch.float32"),
        ({"eos_token_id": "draft"}, TypeError, "eos_token_id: expected an int, got <class 'str'>"),
        ({"eos_token_id": -1}, ValueError, "eos_token_id: expected a number >= 0, got -1"),
        ({"eos_token_id": [[1], [2], [3]]}, ValueError, "eos_token_id: expected tokens for each of 2 rows, got 3"),
        ({"eos_token_id": 1.5}, TypeError, "eos_token_id: expected"),
        ({"eos_token_id": [1, 2.5]}, TypeError, "eos_token_id: expected"),
        ({"eos_token_id": [[1], 2.5]}, TypeError, "eos_token_id: expected an int, got <class 'float'>"),
        ({"pad_token_id": "x"}, TypeError, "pad_token_id: expected"),
        ({"pad_token_id": -1}, ValueError, "pad_token_id: expected a number >= 0, got -1"),
    ],
)
def test_bad_arguments_of_a_decode(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    decoder = SpeculativeDecoder(PairModel(TABLE))
    everything = {"input_ids": PROMPT, "max_new_tokens": 4} | arguments
    with pytest.raises(error, match=message):
        decoder.generate(everything.pop("input_ids"), **everything)
    with pytest.raises(error, match=message):
        # At the call, not at the first step.
        decoder.stream(**({"input_ids": PROMPT, "max_new_tokens": 4} | arguments))


class Elsewhere(DraftSource):
    device = torch.device("meta")

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        raise AssertionError("never asked")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": 3}, TypeError, "target: expected a transformers model or a LanguageModel, got <class 'int'>"),
        ({"target": nn.Linear(2, 2)}, TypeError, "expected a transformers model, got .*Linear"),
        ({"draft": "x"}, TypeError, "draft: expected a model, a DraftSource or None, got <class 'str'>"),
        (
            {"draft": PairModel(random_table(7, 0))},
            ValueError,
            r"draft: .* vocabulary .* \(8 tokens\), got 7 tokens",
        ),
        ({"draft": Elsewhere()}, ValueError, "draft: expected a draft on cpu, as the target is, got meta"),
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected a number >= 1, got 0"),
        ({"num_draft_tokens": 2.0}, TypeError, "num_draft_tokens: expected an int, got <class 'float'>"),
        ({"num_draft_tokens": True}, TypeError, "num_draft_tokens: expected an int, got <class 'bool'>"),
        ({"schedule": "fast"}, ValueError, r"schedule: expected 'constant', .* or a Schedule, got 'fast'"),
        ({"verify": "typical"}, ValueError, "verify: expected 'exact', 'block' or 'sigmoid', got 'typical'"),
        ({"verify": "sigmoid", "draft": None}, ValueError, "verify: 'sigmoid' .* a draft with probabilities"),
        ({"verify": "sigmoid", "draft": PromptLookup()}, ValueError, "verify: 'sigmoid' .* a draft with probabilities"),
        ({"compile": "always"}, ValueError, "compile: expected True, False or 'auto', got 'always'"),
        ({"max_length": 1}, ValueError, "max_length: expected a number >= 2, got 1"),
        ({"max_length": 9.0}, TypeError, "max_length: expected an int, got <class 'float'>"),
        ({"sampling": 0.7}, TypeError, "sampling: expected SamplingParams"),
    ],
)
def test_bad_arguments_of_a_decoder(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    everything = {"target": PairModel(TABLE), "draft": PairModel(TABLE)} | arguments
    with pytest.raises(error, match=message):
        SpeculativeDecoder(**everything)


def test_temperatures_for_another_number_of_rows_are_refused() -> None:
    decoder = SpeculativeDecoder(PairModel(TABLE), sampling=SamplingParams(temperature=[0.5, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"temperature: expected one number or 2, got shape \[3\]"):
        decoder.generate(PROMPT, max_new_tokens=4)


def test_nothing_decoded_is_no_output() -> None:
    with pytest.raises(RuntimeError, match="nothing was decoded yet"):
        SpeculativeDecoder(PairModel(TABLE)).output()


def test_sigmoid_verification_decodes() -> None:
    """Lossy at other temperatures; at 0 it is greedy decoding."""
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=3, sampling=GREEDY, verify="sigmoid"
    )
    input_ids, mask = padded(PROMPTS, "left")
    assert new_tokens(decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)) == expected_rows()


def test_generate_passes_everything_on() -> None:
    input_ids, mask = padded(PROMPTS, "left")
    steps: list[Step] = []
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": [9, 20, 4],
        "seed": 3,
        "eos_token_id": [5, 6],
        "pad_token_id": 9,
    }
    options: dict[str, Any] = {
        "num_draft_tokens": 4,
        "schedule": "heuristic",
        "sampling": SamplingParams(temperature=0.8),
        "verify": "sigmoid",
        "compile": False,
    }
    model, draft = shared_tiny("llama"), make_draft("perturbed")
    output = torch_specops.generate(model, input_ids, draft=draft, streamer=steps.append, **arguments, **options)
    same = SpeculativeDecoder(model, draft, **options).generate(input_ids, **arguments)
    assert torch.equal(output.sequences, same.sequences)
    assert output.stats.seeds == [3, 4, 5] and len(steps) == output.stats.num_steps
    assert output.stats.compiled == "compile=False was asked for"
    encoder = encoder_inputs("t5")
    whole = torch_specops.generate(shared_tiny("t5"), input_ids, attention_mask=mask, inputs=encoder, sampling=GREEDY)
    assert len(whole.new_tokens(0)) == 128 and whole.new_tokens(0)[:LENGTH] == expected_rows(family="t5")[0]
