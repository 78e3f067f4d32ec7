"""The decoding loop: greedy output is that of transformers, row by row; it stops where it should; rows are independent.

The families of models are compared with one draft, and one family (llama) with every draft and number of drafts.
"""

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
    raised,
    random_table,
    shared_tiny,
    tiny,
)
from torch import Tensor, nn

import torch_specops
from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.decode import GenerationOutput, GenerationStats, Step
from torch_specops.decode import decoder as decoder_module
from torch_specops.decode import runner as runner_module
from torch_specops.decode.decoder import CAPACITY_MULTIPLE
from torch_specops.decode.verify import Verifier
from torch_specops.drafts import Draft, DraftSource, LanguageModel, PromptLookup
from torch_specops.drafts.ngram import NGram
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
        # A bigram table of the expected text guesses right often, but not always.
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


def steps_of(
    draft: DraftSource | str, num_draft_tokens: int, schedule: str | Schedule = "constant", **arguments: Any
) -> tuple[list[Step], GenerationOutput]:
    source = make_draft(draft) if isinstance(draft, str) else draft
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), source, num_draft_tokens=num_draft_tokens, schedule=schedule, sampling=GREEDY
    )
    input_ids, mask = padded(PROMPTS, "left")
    steps = list(decoder.stream(input_ids, attention_mask=mask, **({"max_new_tokens": LENGTH} | arguments)))
    return steps, decoder.output()


def new_tokens(output: GenerationOutput) -> list[list[int]]:
    return [output.new_tokens(row) for row in range(len(output.lengths))]


def streamed(steps: Sequence[Step], num_rows: int = 3) -> list[list[int]]:
    return [[token for step in steps for token in step.tokens[row]] for row in range(num_rows)]


def expected_rows(length: int = LENGTH, family: str = "llama", attention: str = "sdpa") -> list[list[int]]:
    return [list(row) for row in greedy_rows(family, length, attention)]


def cut(rows: Sequence[Sequence[int]], eos: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each row up to the first of its eos tokens."""
    ends = [[row.index(token) for token in own if token in row] for row, own in zip(rows, eos, strict=True)]
    return [list(row[: min(end) + 1] if end else row) for row, end in zip(rows, ends, strict=True)]


# Greedy decoding.


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


@pytest.mark.parametrize("family", ["llama", "gemma2", "whisper", "t5"])
def test_greedy_with_eager_attention(family: str) -> None:
    output = decode(make_draft("perturbed", family, "eager"), 3, family=family, attention="eager")
    assert new_tokens(output) == expected_rows(family=family, attention="eager")
    assert output.stats.mean_acceptance_length > 1.0


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
    """Proposes the right tokens, as many as the row's index, then padding, then right tokens again."""

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
    steps, output = steps_of(Ragged(texts), 4)
    assert new_tokens(output) == rows
    assert steps[0].num_proposed == steps[0].num_accepted == [0, 1, 2]
    assert [len(tokens) for tokens in steps[0].tokens] == [1, 2, 3]


class OutOfRange(DraftSource):
    """Proposes numbers just outside the vocabulary, which are padding."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        return Draft(torch.tensor([[-1], [VOCAB], [VOCAB + 1000]]).expand(3, num_draft_tokens))


def test_drafts_outside_the_vocabulary_are_padding() -> None:
    output = decode(OutOfRange(), 2)
    assert new_tokens(output) == expected_rows()
    assert output.stats.num_proposed == 0


def test_sigmoid_verification_at_temperature_zero_is_greedy() -> None:
    output = torch_specops.generate(
        shared_tiny("llama"), torch.tensor([PROMPTS[0]]), draft=make_draft("perturbed"), num_draft_tokens=3,
        sampling=GREEDY, verify="sigmoid", max_new_tokens=LENGTH,
    )  # fmt: skip
    assert new_tokens(output) == expected_rows()[:1]


@pytest.mark.parametrize("op", ["exact", "block", "sigmoid"])
def test_the_verifier_passes_everything_on(op: str) -> None:
    """Same tokens as from the op itself; without any one of its arguments they would differ."""
    generator = torch.Generator().manual_seed(0)
    target, logits = 2 * torch.randn(2, 500, 3, 8, generator=generator)
    temperature = torch.tensor([0.0, 0.6]).repeat(250)
    tokens = torch.randint(8, (500, 2), generator=generator)
    draft = Draft(tokens, logits[:, :2], torch.zeros(500, 2))
    accept, sample = torch.rand(500, 2, generator=generator), torch.rand(500, generator=generator)
    filters = {"top_k": torch.tensor([3, 0, 0, 0]), "top_p": torch.tensor([1, 0.6, 1, 1])}
    filters |= {"min_p": torch.tensor([0, 0, 0.3, 0.3])}
    filters = {name: values.repeat_interleave(125) for name, values in filters.items()}

    def run(draft: Draft = draft, sampling: SamplingTensors | None = None, **lenience: float) -> list[list[int]]:
        sampling = sampling or SamplingTensors(temperature, **filters)
        return Verifier(op, **lenience)(target, draft, (accept, sample), sampling)[0].tolist()

    first = (target, tokens, draft.logits, accept, sample)
    if op == "exact":
        lossy = {"lenience": 0.5, "argmax_lenience": 0.3}
        direct = torch_specops.verify_exact(*first, temperature, draft.lse, **filters, **lossy)
        assert run(**lossy) == direct[0].tolist()
        assert run(**lossy) != run(lenience=0.5) != run() != run(argmax_lenience=0.3)
    elif op == "block":
        direct = torch_specops.verify_block(*first, temperature, draft.lse, **filters)
        assert run() == direct[0].tolist() != run(Draft(tokens, draft.logits))
    else:
        kept = [
            torch_specops.filter_logits(row, temperature, **filters)
            for row in torch.cat([target, draft.logits], 1).unbind(1)
        ]
        direct = torch_specops.verify_sigmoid(
            torch.stack(kept[:3], 1), tokens, torch.stack(kept[3:], 1), accept, sample, temperature=temperature
        )
        assert run() == direct[0].tolist()
    assert run() != run(Draft(tokens)) if op != "sigmoid" else True
    for name in filters:
        assert run() != run(sampling=SamplingTensors(temperature, **(filters | {name: None})))
    assert run() != run(sampling=SamplingTensors(torch.ones(500), **filters))


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


@pytest.mark.parametrize("draft", ["itself", "perturbed"])
def test_the_limit_is_exact(draft: str) -> None:
    for max_new_tokens in range(1, 12):
        output = decode(make_draft(draft), 4, max_new_tokens=max_new_tokens)
        assert new_tokens(output) == [row[:max_new_tokens] for row in expected_rows()]


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


@pytest.mark.parametrize(
    ("draft", "schedule"),
    [
        ("perturbed", "heuristic"),
        ("perturbed", "optimal"),
        ("perturbed", Heuristic(1, maximum=6)),
        ("prompt lookup", "optimal"),
        ("itself", Cycle()),
    ],
)
def test_greedy_under_a_schedule(draft: str, schedule: str | Schedule) -> None:
    assert new_tokens(steps_of(draft, 2, schedule)[1]) == expected_rows()


class Timed(PairModel):
    """A model whose forward over n tokens moves a clock by first + more * (n - 1)."""

    def __init__(self, table: Tensor, clock: list[float], first: float, more: float) -> None:
        super().__init__(table)
        self.clock, self.first, self.more = clock, first, more

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        self.clock[0] += self.first + self.more * (tokens.shape[1] - 1)
        return super().forward(tokens, positions, num_logits)


def test_the_optimal_schedule_measures_the_cost_of_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
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
    # Every draft is accepted, so in the end the largest K is chosen.
    assert output.stats.acceptance_rate == 1.0 and len(output.stats.proposed_at) == 4


def test_a_custom_schedule_is_followed_and_told() -> None:
    schedule = Cycle()
    limits = [20, 3, 12]
    steps, output = steps_of("perturbed", 2, schedule, max_new_tokens=limits)
    assert new_tokens(output) == [row[:limit] for row, limit in zip(expected_rows(), limits, strict=True)]
    assert [max(step.num_proposed) for step in steps] == list(islice(cycle([1, 3, 0]), len(steps)))
    assert schedule.resets == 1
    # It is not told of rows that had ended before a step.
    ended = [[False] * 3, *(step.finished for step in steps)]
    expected = [
        tuple([count for count, over in zip(counts, before, strict=True) if not over] for counts in both)
        for both, before in zip(((step.num_proposed, step.num_accepted) for step in steps), ended, strict=False)
    ]
    assert schedule.told == expected


@pytest.mark.parametrize(
    ("draft", "expected"), [("itself", [2, 3, 5, 8]), ("stranger", [2, 1, 1, 1, 1]), ("nothing", [0, 0, 0])]
)
def test_the_heuristic_moves_the_number_of_drafts(draft: str, expected: list[int]) -> None:
    """2, 4, 6, 8 drafts or the bucket below; 1 fewer after a rejection; none without a draft."""
    steps, _ = steps_of(draft, 2, "heuristic", max_new_tokens=40)
    assert [max(step.num_proposed) for step in steps][: len(expected)] == expected


def test_one_graph_changes_nothing_in_eager_steps() -> None:
    """Prompts of one length are read together with the first drafts."""
    prompt = torch.tensor([PROMPTS[0], PROMPTS[0]])
    for one_graph in (False, True):
        decoder = SpeculativeDecoder(
            shared_tiny("llama"), shared_tiny("llama", seed=3), sampling=GREEDY, one_graph=one_graph
        )
        assert new_tokens(decoder.generate(prompt, max_new_tokens=LENGTH)) == [expected_rows()[0]] * 2


# Steps, statistics and streams.


def test_steps_and_statistics_agree() -> None:
    steps, output = steps_of("perturbed", 2)
    assert streamed(steps) == new_tokens(output)
    for step in steps:
        assert all(0 <= n <= proposed <= 2 for n, proposed in zip(step.num_accepted, step.num_proposed, strict=True))
        assert step.seconds >= 0
        for tokens, n, finished in zip(step.tokens, step.num_accepted, step.finished, strict=True):
            assert len(tokens) == n + 1 or finished
    added, stats = GenerationStats(seeds=[]), output.stats
    for step in steps:
        added.add(step)
    assert (added.num_steps, added.num_row_steps, added.num_tokens) == (stats.num_steps, stats.num_row_steps, 60)
    assert (added.num_accepted, added.num_proposed) == (stats.num_accepted, stats.num_proposed)
    assert stats.prefill_seconds > 0 and stats.compile_seconds == 0
    assert "eager" in stats.compiled
    heard: list[Step] = []
    decode(make_draft("perturbed"), 2, streamer=heard.append)
    assert streamed(heard) == streamed(steps)


def test_statistics_count_what_was_emitted_and_verified() -> None:
    stats = GenerationStats(seeds=[0, 1])
    stats.add(Step([[1, 2, 3], [8]], [2, 0], [4, 1], [False, False], 0.5))
    stats.add(Step([[4], []], [0, 3], [0, 3], [False, True], 0.25))
    stats.add(Step([[5, 6], []], [3, 3], [4, 4], [True, True], 0.25))
    assert (stats.num_steps, stats.num_row_steps, stats.num_tokens) == (3, 4, 7)
    assert stats.mean_acceptance_length == 7 / 4
    assert stats.acceptance_rate == 5 / 9
    assert stats.acceptance_rate_per_position == [2 / 3, 1.0, 0.5, 0.0]
    assert stats.seconds == 1.0 and stats.tokens_per_second == 7.0


class TokenStreamer:
    """Like transformers' streamers: gets the prompt, then int64 tokens, then the end."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.dtype == torch.int64
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
    # A row that fails emits no token.
    streamer = TokenStreamer()
    with pytest.warns(RuntimeWarning, match="row 0: target: no finite logit after 2 tokens"):
        torch_specops.generate(
            PairModel(torch.full((9, 8, 8), torch.nan)), torch.tensor([[1, 2]]), max_new_tokens=3, streamer=streamer
        )
    assert streamer.heard == [[[1, 2]], [], "end"]


def test_a_stream_ends_where_the_next_one_begins() -> None:
    """A decoder has one state: an earlier stream may not continue with the tokens of a later one."""
    decoder = SpeculativeDecoder(shared_tiny("llama"), make_draft("perturbed"), num_draft_tokens=2, sampling=GREEDY)
    first = decoder.stream(torch.tensor([PROMPTS[0]]), max_new_tokens=LENGTH)
    next(first)
    never_begun = decoder.stream(torch.tensor([PROMPTS[2]]), max_new_tokens=LENGTH)
    last = decoder.stream(torch.tensor([PROMPTS[2]]), max_new_tokens=LENGTH)
    for old in (first, never_begun):
        with pytest.raises(RuntimeError, match="stream"):
            next(old)
    assert streamed(list(last), 1) == [expected_rows()[2]]


class Interrupting(DraftSource):
    """Ctrl-C while the third step drafts."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return Draft(torch.full((len(tokens), num_draft_tokens), -1))


def test_an_interrupt_in_a_streamer_keeps_what_was_generated() -> None:
    steps: list[Step] = []

    def impatient(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise KeyboardInterrupt

    output = decode(make_draft("perturbed"), 2, streamer=impatient)
    assert output.interrupted and output.errors == {}
    kept = new_tokens(output)
    assert kept == streamed(steps)
    assert all(3 <= len(row) <= 9 for row in kept)
    assert kept == [full[: len(row)] for full, row in zip(expected_rows(), kept, strict=True)]
    assert output.stats.num_steps == 3


def test_an_interrupt_inside_a_step_keeps_the_steps_before() -> None:
    source = Interrupting()
    decoder = SpeculativeDecoder(shared_tiny("llama"), source, sampling=GREEDY)
    input_ids, mask = padded(PROMPTS, "left")
    for expected in ([row[:2] for row in expected_rows()], expected_rows()):
        # The second call finds a decoder that works as if nothing had happened.
        output = decoder.generate(
            input_ids, attention_mask=mask, max_new_tokens=LENGTH, streamer=lambda step: None, eos_token_id=()
        )
        assert new_tokens(output) == expected and output.interrupted == (expected != expected_rows())
    # A streamer with an `end` is told.
    streamer = TokenStreamer()
    decode(Interrupting(), 2, prompts=PROMPTS[:1], streamer=streamer)
    assert streamer.heard[1:] == [[token] for token in expected_rows()[0][:2]] + ["end"]
    # Without a streamer, the interrupt goes to the caller.
    with pytest.raises(KeyboardInterrupt):
        decode(Interrupting(), 2)


# Rows whose logits are not finite.


class FailingRow(PairModel):
    """From a position on, the logits of row 1 are NaN."""

    def __init__(self, table: Tensor, position: int) -> None:
        super().__init__(table)
        self.position = position

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        logits = super().forward(tokens, positions, num_logits).clone()
        logits[1][positions[1, -logits.shape[1] :] >= self.position] = torch.nan
        return logits


TABLE = random_table(8, seed=5)
SHORT_PROMPTS = [[1, 2, 3], [4, 5], [6, 0, 2, 7]]


def run_tables(target: LanguageModel, draft: Any = None, **options: Any) -> GenerationOutput:
    input_ids, mask = padded(SHORT_PROMPTS, "left")
    arguments = {"max_new_tokens": 12, "num_draft_tokens": 3, "sampling": GREEDY, "seed": 3} | options
    return torch_specops.generate(target, input_ids, attention_mask=mask, draft=draft, **arguments)


@pytest.mark.parametrize("draft", ["nothing", "itself", "opposite", "prompt lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_logit_ends_alone(draft: str, temperature: float) -> None:
    source = {"nothing": None, "itself": PairModel(TABLE), "opposite": PairModel(-TABLE)}.get(draft, PromptLookup())
    sampling = SamplingParams(temperature=temperature)
    whole = run_tables(PairModel(TABLE), source, sampling=sampling)
    # Row 1 has two tokens: with position 1 it emits nothing.
    for position in (1, 2, 7):
        message = f"target: no finite logit after {position + 1} tokens"
        with pytest.warns(RuntimeWarning, match=f"row 1: {message}"):
            output = run_tables(FailingRow(TABLE, position), source, sampling=sampling)
        assert output.errors == {1: message}
        assert output.lengths.tolist() == [15, position + 1, 16]
        for row, new in enumerate(new_tokens(output)):
            assert new == whole.new_tokens(row)[: len(new)]
        assert (output.sequences[1, position + 1 :] == 0).all()


def test_a_row_that_ends_in_time_has_no_error() -> None:
    """The limit or an eos comes with the last token for which the target had finite logits."""
    whole = run_tables(PairModel(TABLE)).new_tokens(1)
    for draft in (None, PairModel(TABLE)):
        for options in ({"max_new_tokens": 3}, {"eos_token_id": [[], [whole[2]], []]}):
            output = run_tables(FailingRow(TABLE, 4), draft, **options)
            assert output.errors == {}
            assert output.new_tokens(1) == whole[: whole.index(whole[2]) + 1 if "eos_token_id" in options else 3]


def test_a_draft_without_a_finite_logit_costs_only_its_drafts() -> None:
    whole, output = (run_tables(PairModel(TABLE), draft) for draft in (None, FailingRow(TABLE, 4)))
    assert torch.equal(whole.sequences, output.sequences) and output.errors == {}
    assert whole.stats.num_steps > output.stats.num_steps > 2


def test_a_model_that_fails_on_one_row_works_for_the_next_batch() -> None:
    """A NaN embedding fills a row's cache with NaN: nothing of it may stay."""
    model = tiny("llama")
    broken = 59
    assert broken not in {token for row in (*expected_rows(), *PROMPTS) for token in row}
    with torch.no_grad():
        model.get_input_embeddings().weight[broken] = torch.nan
    decoder = SpeculativeDecoder(model, model, num_draft_tokens=3, sampling=GREEDY)
    # Longer than the next batch's prompts, which would overwrite it.
    input_ids, mask = padded([PROMPTS[0], [1, broken, *[8] * 10], PROMPTS[2]], "left")
    with pytest.warns(RuntimeWarning, match="row 1: target: no finite logit after 12 tokens"):
        output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)
    assert new_tokens(output) == [expected_rows()[0], [], expected_rows()[2]]
    assert list(output.errors) == [1]
    input_ids, mask = padded(PROMPTS, "left")
    output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH)
    assert new_tokens(output) == expected_rows() and output.errors == {}


# Bad input.

PROMPT = torch.tensor([[1, 2], [3, 4]])
THREE = torch.tensor([[1, 2, 3], [1, 2, 3]])

BAD_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_ids": torch.ones(3, dtype=torch.int64)}, ValueError, r"input_ids: expected \[B, P\] .* shape \[3\]"),
    ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, ValueError, r"input_ids: .* got shape \[1, 0\]"),
    ({"input_ids": torch.ones(1, 3)}, TypeError, "input_ids: expected an int64 tensor .* got torch.float32"),
    ({"input_ids": [[1, 2]]}, TypeError, "input_ids: expected an int64 tensor .* got <class 'list'>"),
    ({"input_ids": torch.tensor([[1, 8]])}, ValueError, r"input_ids: expected tokens in \[0, 8\), got 8"),
    ({"input_ids": torch.tensor([[1, -1]])}, ValueError, r"input_ids: expected tokens in \[0, 8\), got -1"),
    ({"attention_mask": PROMPT[:1]}, ValueError, r"attention_mask: expected \[2, 2\], .* got \[1, 2\]"),
    ({"attention_mask": [[1, 1], [1, 1]]}, TypeError, "attention_mask: expected a tensor .* got <class 'list'>"),
    ({"attention_mask": PROMPT}, ValueError, "attention_mask: expected zeros and ones"),
    ({"attention_mask": PROMPT == 1}, ValueError, "attention_mask: .* got none in row 1"),
    (
        {"input_ids": THREE, "attention_mask": torch.tensor([[0], [2]]) != THREE},
        ValueError,
        "attention_mask: expected padding at the ends of a row only, got a hole in row 1",
    ),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens: expected a number >= 0, got -1"),
    ({"max_new_tokens": [3, -2]}, ValueError, "max_new_tokens: expected a number >= 0, got -2"),
    ({"max_new_tokens": [3, 2, 1]}, ValueError, "max_new_tokens: expected one number or 2, got 3"),
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
    ({"eos_token_id": [[1], 2.5]}, TypeError, "eos_token_id: expected an int, got <class 'float'>"),
    ({"pad_token_id": "x"}, TypeError, "pad_token_id: expected"),
    ({"pad_token_id": -1}, ValueError, "pad_token_id: expected a number >= 0, got -1"),
    ({"sampling": 0.7}, TypeError, "sampling: expected SamplingParams"),
    (
        {"sampling": SamplingParams(temperature=[0.5, 1.0, 2.0])},
        ValueError,
        r"temperature: expected one number or 2, got shape \[3\]",
    ),
]


def test_bad_arguments_of_a_call() -> None:
    """Refused by `generate`, and by `stream` at the call and not at the first step."""
    decoder = SpeculativeDecoder(PairModel(TABLE))
    with pytest.raises(RuntimeError, match="nothing was decoded yet"):
        decoder.output()
    for call in (decoder.generate, decoder.stream):
        assert (
            raised(lambda bad, call=call: call(**({"input_ids": PROMPT, "max_new_tokens": 4} | bad)), BAD_CALLS) == []
        )


class Elsewhere(DraftSource):
    device = torch.device("meta")

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        raise AssertionError("never asked")


SIGMOID = "verify: 'sigmoid' .* a draft with probabilities"
BAD_DECODERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"target": 3}, TypeError, "target: expected a transformers model or a LanguageModel, got <class 'int'>"),
    ({"target": nn.Linear(2, 2)}, TypeError, "model: expected a transformers model, got .*Linear"),
    ({"draft": "x"}, TypeError, "draft: expected a model, a DraftSource or None, got <class 'str'>"),
    ({"draft": PairModel(random_table(7, 0))}, ValueError, r"draft: .* vocabulary .* \(8 tokens\), got 7 tokens"),
    ({"draft": Elsewhere()}, ValueError, "draft: expected a draft on cpu, as the target is, got meta"),
    ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens: expected a number >= 1, got 0"),
    ({"num_draft_tokens": True}, TypeError, "num_draft_tokens: expected an int, got <class 'bool'>"),
    ({"schedule": "fast"}, ValueError, r"schedule: expected 'constant', .* or a Schedule, got 'fast'"),
    ({"verify": "typical"}, ValueError, "verify: expected 'exact', 'block' or 'sigmoid', got 'typical'"),
    ({"verify": "sigmoid", "draft": None}, ValueError, SIGMOID),
    ({"verify": "sigmoid", "draft": PromptLookup()}, ValueError, SIGMOID),
    ({"lenience": 0.0}, ValueError, r"lenience: expected a number in \(0, 1\], got 0"),
    ({"lenience": "1"}, TypeError, "lenience: expected a number"),
    ({"argmax_lenience": 1.5}, ValueError, r"argmax_lenience: expected a number in \(0, 1\], got 1.5"),
    ({"verify": "block", "lenience": 0.5}, ValueError, "lenience: only verify='exact' can be lenient; .* 'block'"),
    ({"compile": "always"}, ValueError, "compile: expected True, False or 'auto', got 'always'"),
    ({"max_length": 1}, ValueError, "max_length: expected a number >= 2, got 1"),
    ({"max_length": 9.0}, TypeError, "max_length: expected an int, got <class 'float'>"),
    ({"sampling": 0.7}, TypeError, "sampling: expected SamplingParams"),
]


def test_bad_arguments_of_a_decoder() -> None:
    models = {"target": PairModel(TABLE), "draft": PairModel(TABLE)}
    assert raised(lambda bad: SpeculativeDecoder(**(models | bad)), BAD_DECODERS) == []


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
