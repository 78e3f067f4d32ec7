"""The steps of the loop: how many drafts they have, what they report, and how they end early."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_loops import (
    DRAFTS,
    GREEDY,
    LENGTH,
    Given,
    Pauses,
    TokenStreamer,
    decode,
    expected_rows,
    limited,
    new_tokens,
    steps_of,
    streamed,
)
from tiny_models import PROMPTS, PairModel, padded, perturbed, shared_tiny
from torch import Tensor
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import torch_specops
from torch_specops import SpeculativeDecoder
from torch_specops.decode import GenerationStats, Step
from torch_specops.decode.planning import Planner
from torch_specops.drafts import Draft, DraftSource
from torch_specops.hf import language_model
from torch_specops.schedules import Heuristic, NextStep


def test_a_custom_schedule_is_followed_and_told() -> None:
    schedule, limits = Pauses(), [20, 3, 12]
    schedule.learn = mock.Mock(wraps=schedule.learn)  # type: ignore[method-assign]
    schedule.reset()
    schedule.begin = mock.Mock(return_value=schedule)  # type: ignore[method-assign]
    steps, output = steps_of("perturbed", 2, schedule=schedule, max_new_tokens=limits)
    assert new_tokens(output) == limited(expected_rows(), limits)
    assert [max(step.num_proposed) for step in steps][:12] == [0, 0, 3] * 4
    schedule.begin.assert_called_once()
    # It is not told of rows that had ended before a step.
    going = [range(3), *([row for row in range(3) if not step.finished[row]] for step in steps)]
    told = [call.args[0] for call in schedule.learn.call_args_list]
    assert [(past.proposed, past.accepted) for past in told] == [
        ([step.num_proposed[row] for row in rows], [step.num_accepted[row] for row in rows])
        for step, rows in zip(steps, going, strict=False)
    ]
    assert [past.num_draft_tokens for past in told[:6]] == [0, 0, 3, 0, 0, 3]
    # The first step reads the prompts too.
    assert all(past.seconds is not None and past.seconds > 0 for past in told[1:])


class Planned(Given):
    """A plan of its own before drafts are known, and another one after."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        super().__init__([3])
        self.plans = before, after

    def plan(self, step: NextStep) -> list[int]:
        return self.plans[step.offered is not None]


@pytest.mark.parametrize(
    ("draft", "plan", "limits"),
    [
        ("perturbed", ([8, 3, 1], []), r"\[3, 2, 3\], got \[8, 3, 1\]"),
        ("perturbed", ([1, 1], []), r"\[3, 2, 3\], got \[1, 1\]"),
        # Compiled steps and rings of states have room for the largest bucket.
        ("perturbed", ([4, 2, 3], []), r"\[3, 2, 3\], got \[4, 2, 3\]"),
        ("perturbed", ([1.5, 2, 3], []), r"\[3, 2, 3\], got \[1.5, 2, 3\]"),
        ("n-gram", ([3, 2, -1], []), r"\[3, 2, 3\], got \[3, 2, -1\]"),
        ("n-gram", ([3, 2, 3], [3, 2, 4]), r"\[3, 2, 3\], got \[3, 2, 4\]"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(draft: str, plan: tuple[list[int], list[int]], limits: str) -> None:
    expected = "schedule: expected from Planned.plan one number for each text, from 0 to " + limits
    with pytest.raises(ValueError, match=expected):
        decode(draft, 3, schedule=Planned(*plan), max_new_tokens=[20, 3, 12])


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.04])
def test_the_heuristic_is_that_of_transformers(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same number of drafts in every step of a text, up to 20, which transformers does not have."""
    target = shared_tiny("llama")
    draft = perturbed(target, scale)
    draft.generation_config.num_assistant_tokens_schedule = "heuristic_transient"
    draft.generation_config.assistant_confidence_threshold = 0.0
    draft.generation_config.num_assistant_tokens = 5
    theirs: list[int] = []

    def counted(self: AssistedCandidateGenerator, input_ids: Tensor, *rest: Tensor, **more: Tensor) -> Any:
        found = candidates(self, input_ids, *rest, **more)
        theirs.append(found[0].shape[1] - input_ids.shape[1])
        return found

    candidates = AssistedCandidateGenerator.get_candidates
    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", counted)
    prompt = torch.tensor([PROMPTS[0]])
    options = {"do_sample": False, "max_new_tokens": 70, "pad_token_id": 0}
    expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), assistant_model=draft, **options)
    steps, output = steps_of(draft, 5, schedule="heuristic", prompts=PROMPTS[:1], max_new_tokens=70)
    assert output.sequences.tolist() == expected.tolist()
    assert [step.num_proposed[0] for step in steps] == theirs
    # 2 more after a step without rejections, otherwise 1 fewer.
    assert scale > 0 or theirs[:5] == [5, 7, 9, 11, 13]
    assert scale == 0 or {later - earlier for earlier, later in pairwise(theirs[:-1])} >= {2, -1}


def test_drafts_fit_the_rows_room() -> None:
    input_ids, mask = padded(PROMPTS, "left")
    draft = language_model(shared_tiny("llama", seed=3))
    draft.forward = mock.Mock(wraps=draft.forward)
    decoder = SpeculativeDecoder(shared_tiny("llama"), draft, num_draft_tokens=50, sampling=GREEDY)
    output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=[2, 3, 1])
    assert new_tokens(output) == limited(expected_rows(), [2, 3, 1])
    # One for the prompts, and two drafts in the first step, one in the second.
    assert draft.forward.call_count <= 4


def test_compiled_steps_have_few_numbers_of_drafts() -> None:
    """Those that are ready, where they suffice, and else the schedule's buckets. Eager steps have any number."""
    asked = [(5, 0), (5, 2), (5, 3), (7, 20), (11, 6), (19, 20), (1, 0)]
    ready = [(2, False), (5, False), (3, True)]
    for is_compiled, expected in ((True, [2, 2, 5, 5, 8, 12, 1]), (False, [0, 2, 3, 7, 6, 19, 0])):
        options = {"is_compiled": is_compiled, "is_masked": False}
        planner = Planner(Heuristic(), None, ready)
        assert [planner._smallest_sufficient(*numbers, **options) for numbers in asked] == expected
        # A value below all buckets.
        assert Planner(Given([4, 8]), None, [])._smallest_sufficient(3, 9, **options) == (4 if is_compiled else 3)


def test_drafts_left_out_by_the_schedule() -> None:
    schedule = Given([3])

    def chosen_of(step: NextStep) -> list[int]:
        limits = [3, 3, 3] if step.offered is None else [1, 0, 2]
        return list(map(min, limits, step.offered or step.rooms))

    chosen = mock.Mock(side_effect=chosen_of)
    schedule.plan = chosen  # type: ignore[method-assign]
    steps, output = steps_of("n-gram", 3, schedule=schedule, max_new_tokens=9)
    assert new_tokens(output) == limited(expected_rows(), [9, 9, 9]) and steps[0].num_proposed == [1, 0, 2]
    known = [call.args[0] for call in chosen.call_args_list][1]
    assert known.offered == [3, 3, 3] and known.matches is None and known.asks_again


# Steps, statistics and streams.


def test_steps_and_statistics_agree() -> None:
    # Of looked-up drafts this schedule chooses some.
    for draft, schedule in (("perturbed", "constant"), ("prompt lookup", "auto")):
        steps, output = steps_of(draft, 2, schedule=schedule)
        assert streamed(steps) == new_tokens(output) == expected_rows()
        for step in steps:
            counts = zip(step.num_accepted, step.num_proposed, step.tokens, step.finished, strict=True)
            for n, proposed, tokens, finished in counts:
                assert 0 <= n <= proposed <= 2 and (len(tokens) == n + 1 or finished)
        stats = output.stats
        assert (stats.num_steps, stats.num_tokens) == (len(steps), 60)
        assert stats.prefill_seconds > 0 and stats.compile_seconds == 0
        assert "eager" in stats.compiled


def test_statistics_count_what_was_emitted_and_verified() -> None:
    stats = GenerationStats(seeds=[0, 1])
    stats.add([3, 1], num_accepted=[2, 0], num_proposed=[4, 1])
    stats.add([1, 0], num_accepted=[0, 3], num_proposed=[0, 3])
    stats.add([2, 0], num_accepted=[3, 3], num_proposed=[4, 4])
    assert (stats.num_steps, stats.num_row_steps, stats.num_tokens) == (3, 4, 7)
    assert stats.mean_acceptance_length == 7 / 4
    assert stats.acceptance_rate == 5 / 9
    assert stats.acceptance_rate_per_position == [2 / 3, 1.0, 0.5, 0.0]
    stats.seconds = 0.5
    assert stats.tokens_per_second == 14.0


def test_a_streamer_of_transformers() -> None:
    streamer = TokenStreamer()
    decode("perturbed", 3, prompts=PROMPTS[:1], streamer=streamer)
    prompt, *tokens, end = streamer.heard
    assert prompt == list(PROMPTS[0]) and end == "end"
    assert [token for step in tokens for token in step] == expected_rows()[0]
    with pytest.raises(ValueError, match="streamer: an object with put and end takes one row, got 3 rows"):
        decode(None, 1, streamer=TokenStreamer())
    with pytest.raises(TypeError, match=r"streamer: expected a callable, .* got <class 'int'>"):
        decode(None, 1, streamer=3)
    # A row that fails emits no token.
    streamer = TokenStreamer()
    with pytest.warns(RuntimeWarning, match="row 0: target: no finite logit after 2 tokens"):
        torch_specops.generate(
            PairModel(torch.full((9, 8, 8), torch.nan)), torch.tensor([[1, 2]]), max_new_tokens=3, streamer=streamer
        )
    assert streamer.heard == [[1, 2], [], "end"]


def test_interrupt_in_a_streamer_keeps_tokens(late: bool) -> None:
    """The state may be a step ahead of what the host has seen."""
    steps: list[Step] = []

    def impatient(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise KeyboardInterrupt

    options = {"num_draft_tokens": 2, "sampling": GREEDY}
    decoder = SpeculativeDecoder(shared_tiny("llama"), DRAFTS["perturbed"]("llama"), **options)
    input_ids, mask = padded(PROMPTS, "left")
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(input_ids, attention_mask=mask, max_new_tokens=LENGTH, streamer=impatient)
    output = decoder.output()
    assert output.errors == {} and output.stats.num_steps == 3
    kept = new_tokens(output)
    assert kept == streamed(steps) == limited(expected_rows(), [len(row) for row in kept])


class Interrupting(DraftSource):
    """Ctrl-C while the third step drafts."""

    calls = 0

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *rest: Tensor) -> Draft:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return Draft(torch.full((len(tokens), num_draft_tokens), -1))


def test_interrupt_in_a_step_keeps_earlier_steps() -> None:
    decoder = SpeculativeDecoder(shared_tiny("llama"), Interrupting(), sampling=GREEDY, schedule="constant")
    input_ids, mask = padded(PROMPTS, "left")
    call = {"attention_mask": mask, "max_new_tokens": LENGTH}
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(input_ids, **call)
    assert new_tokens(decoder.output()) == limited(expected_rows(), [2] * 3)
    # The second call finds a decoder that works as if nothing had happened.
    assert new_tokens(decoder.generate(input_ids, **call)) == expected_rows()
    # One that ends while prompts are read has no text, and not that of the call before.
    with mock.patch.object(decoder.target, "forward", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        decoder.generate(input_ids, **call)
    with pytest.raises(RuntimeError, match=r"output: the newest call .* ended before it had read its prompts"):
        decoder.output()


def test_streamer_ends_before_an_interrupt() -> None:
    streamer = TokenStreamer()
    with pytest.raises(KeyboardInterrupt):
        decode(Interrupting(), 2, prompts=PROMPTS[:1], streamer=streamer)
    assert streamer.heard[1:] == [[token] for token in expected_rows()[0][:2]] + ["end"]
    # Of any other error too, and another interrupt in `end` is the caller's as well.
    for error, end in ((OSError("no space"), None), (OSError("no space"), KeyboardInterrupt)):
        streamer = TokenStreamer()
        with (
            mock.patch.object(Interrupting, "propose", side_effect=error),
            mock.patch.object(streamer, "end", side_effect=end) as ended,
            pytest.raises(KeyboardInterrupt if end else OSError),
        ):
            decode(Interrupting(), 2, prompts=PROMPTS[:1], streamer=streamer)
        ended.assert_called_once_with()
