"""Schedules: Hugging Face's rule step by step, and simulated acceptances for which the optimum is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny_models import raised

from torch_specops.analysis import expected_tokens_per_step
from torch_specops.schedules import Auto, Constant, Heuristic, NextStep, PastStep, Schedule, as_schedule
from torch_specops.schedules.costs import StepCosts

ALL, SOME = ([6, 6], [6, 6]), ([6, 6], [6, 5])


def told(proposed: list[int], accepted: list[int]) -> PastStep:
    texts = list(range(len(proposed)))
    return PastStep(NextStep(texts, texts, texts, len(texts)), proposed=proposed, accepted=accepted)


def planned(schedule: Schedule, room: int = 50) -> int:
    (count,) = schedule.plan(NextStep([0], rooms=[room], left=[room + 1], num_rows=1))
    return count


@pytest.mark.parametrize(
    ("options", "reports", "expected"),
    [
        ({}, [ALL, ALL, SOME, SOME, SOME, SOME], [5, 7, 9, 8, 7, 6, 5]),
        # At least 1.
        ({"num_draft_tokens": 3}, [SOME, SOME, SOME, SOME, ALL], [3, 2, 1, 1, 1, 3]),
        # At most `maximum`, and one step down from there.
        ({"num_draft_tokens": 1, "maximum": 1}, [ALL, SOME], [1, 1, 1]),
        ({"maximum": 8}, [ALL, ALL, ALL, SOME], [5, 7, 8, 8, 7]),
        ({}, [ALL] * 9, [5, 7, 9, 11, 13, 15, 17, 19, 20, 20]),
        # A row without drafts has no say, nor has a step without rows.
        ({}, [([0, 3], [0, 3]), ([0, 3], [0, 2]), ([0, 0], [0, 0]), ([], [])], [5, 7, 6, 6, 6]),
    ],
)
def test_heuristic(options: dict[str, Any], reports: list[tuple[list[int], list[int]]], expected: list[int]) -> None:
    schedule = Heuristic(**options)
    found = [planned(schedule)]
    for report in reports:
        schedule.learn(told(*report))
        found.append(planned(schedule))
    assert found == expected and planned(schedule, room=1) == 1
    assert planned(schedule.begin()) == expected[0] and planned(schedule) == found[-1]


def test_schedules_by_name() -> None:
    found = [as_schedule(name, 6) for name in ("constant", "heuristic", "auto")]
    assert [type(schedule) for schedule in found] == [Constant, Heuristic, Auto]
    assert [schedule.buckets for schedule in found] == [(6,), (1, 2, 3, 5, 8, 12, 20), (0, 1, 2, 3, 5, 6)]
    assert [planned(schedule) for schedule in found[:2]] == [6, 6] and planned(Constant(6), room=2) == 2
    assert as_schedule("heuristic", 40).buckets[-2:] == (20, 40) and as_schedule(found[2], 1) is found[2]


BAD_SCHEDULES: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((Constant, -1), ValueError, "num_draft_tokens: expected a number >= 0, got -1"),
    ((Heuristic, 0), ValueError, "num_draft_tokens: expected a number >= 1, got 0"),
    ((Heuristic, 21), ValueError, "num_draft_tokens: expected a number up to maximum = 20, got 21"),
    ((Auto, 0), ValueError, "num_draft_tokens: expected a number >= 1, got 0"),
    ((Auto, 2.0), TypeError, "num_draft_tokens: expected an int"),
]


def test_bad_arguments() -> None:
    assert raised(lambda arguments: arguments[0](*arguments[1:]), BAD_SCHEDULES) == []


# `Auto` in a simulated loop.

# For each position of a text: how many drafts are found there, the length of their match, and how many are right.
Text = list[tuple[int, int, int]]
# The seconds of a step by the number of tokens that it reads. A step is 1 where nothing is drafted for one row.
Seconds = Callable[[int], float]


def flat(num_tokens: int) -> float:
    return (32 + num_tokens) / 33


def dear(num_tokens: int) -> float:
    """A token costs a step."""
    return float(num_tokens)


def stepped(num_tokens: int) -> float:
    """One token is read by another kernel than several."""
    return 1.0 if num_tokens == 1 else 1.6 + 0.04 * num_tokens


def a_text(length: int, chance: Callable[[int], float], seed: int = 0, match: int = 4, num_found: int = 10) -> Text:
    """Whose drafts at a position are each right with this chance, if those before them are."""
    rng = random.Random(seed)
    found = []
    for position in range(length):
        right = next((n for n in range(num_found) if rng.random() >= chance(position)), num_found)
        found.append((num_found, match, min(right, length - position - 1)))
    return found


class Loop:
    """Runs a schedule on texts, the first `num_rows` at once and the others as rows are free, with a clock.

    Args:
        looks_up: drafts are known before they are verified; otherwise each costs `drafting` seconds.
        is_compiled: all rows read as many tokens as the one with most, and as a bucket has.
        has_equal_prompts: the first step reads the prompts.
        limit: the tokens that a text may have, if it ends before.
        is_captured: no draft is known before it is verified, and a step is timed before it runs the first time.
        slow: the steps that take five times as long, for another reason.
        speed: how many times as long as said the next step takes.
    """

    def __init__(
        self,
        schedule: Schedule,
        seconds: Seconds,
        *,
        looks_up: bool = True,
        drafting: float = 0.0,
        is_compiled: bool = False,
        is_captured: bool = False,
        is_refilled: bool = False,
        has_equal_prompts: bool = True,
        limit: int = 0,
        slow: Sequence[int] = (),
        speed: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.schedule, self.seconds, self.looks_up, self.drafting = schedule, seconds, looks_up, drafting
        self.is_compiled, self.is_refilled, self.slow = is_compiled or is_captured, is_refilled, slow
        self.is_captured, self.speed = is_captured, speed
        self.has_equal_prompts, self.limit = has_equal_prompts, limit
        # The numbers of drafts whose steps were timed.
        self.timed: set[int] = set()
        # Of each step: the drafts that were verified.
        self.counts: list[list[int]] = []

    def planned(self, step: NextStep) -> list[int]:
        """Rounded as the runner rounds them."""
        counts, buckets = list(self.schedule.plan(step)), self.schedule.buckets
        most = max((count for count in buckets if count <= max(counts)), default=buckets[0])
        return [min(most, room) for room in step.rooms] if self.is_compiled else counts

    def run(self, texts: Sequence[Text], num_rows: int | None = None) -> float:
        """The seconds that it takes, without what slow steps take more."""
        self.schedule = self.schedule.begin()
        clock, waiting, size = 0.0, list(enumerate(texts)), num_rows or len(texts)
        num_steps = num_undrafted = 0
        rows, waiting = waiting[:size], waiting[size:]
        places = dict.fromkeys(range(len(texts)), 0)
        while rows:
            numbers = [number for number, _ in rows]
            cells = [text[places[number]] for number, text in rows]
            left = [max(len(text), self.limit) - places[number] for number, text in rows]
            step = NextStep(
                numbers,
                [own - 1 for own in left],
                left,
                size,
                is_compiled=self.is_compiled,
                is_refilled=self.is_refilled,
                reads_prompts=self.has_equal_prompts and num_steps == 0 and not self.is_compiled,
                looks_up=self.looks_up,
                asks_again=self.looks_up and not self.is_captured,
            )
            if self.is_compiled:
                # How much room there is decides no graph.
                step = replace(step, rooms=[self.schedule.buckets[-1] * (own > 1) for own in left])
            counts, offered = self.planned(step), None
            num_draft_tokens = max(counts)
            while self.is_captured and num_draft_tokens not in self.timed:
                self.timed.add(num_draft_tokens)
                seconds = self.seconds(size * (1 + num_draft_tokens)) + self.drafting * num_draft_tokens
                self.schedule.learn(PastStep(step, (), (), num_draft_tokens=num_draft_tokens, seconds=seconds))
                counts = self.planned(step)
                num_draft_tokens = max(counts)
            if step.asks_again and num_draft_tokens > 0:
                offered = list(map(min, counts, (found for found, _, _ in cells)))
                step = replace(step, offered=offered, matches=[match for _, match, _ in cells])
                counts = list(self.schedule.plan(step))
                assert all(0 <= own <= most for own, most in zip(counts, offered, strict=True))
                if self.is_compiled:
                    num_draft_tokens = min(count for count in self.schedule.buckets if count >= max(counts))
            if self.is_compiled:
                counts = [min(num_draft_tokens, own - 1) for own in left]
            accepted = [min(own, right) for own, (_, _, right) in zip(counts, cells, strict=True)]
            read = size * (1 + num_draft_tokens) if self.is_compiled else len(rows) + sum(counts)
            # Reading the prompts takes longer than reading the drafts, and is not timed.
            num_steps += 1
            seconds = self.seconds(len(rows) if step.reads_prompts else read)
            caught_up = not self.looks_up and num_draft_tokens > 0 and num_undrafted > 0
            num_undrafted = 0 if num_draft_tokens > 0 else num_undrafted + 1
            drafting = self.drafting * (1 if self.looks_up else num_draft_tokens + caught_up)
            if num_draft_tokens == 0:
                drafting = 0.0
            if self.is_captured:
                seconds, drafting = seconds + self.drafting * num_draft_tokens, self.drafting * caught_up
            known = None if offered is None else list(map(min, offered, (own + 1 for own in accepted)))
            self.schedule.learn(
                PastStep(
                    step,
                    proposed=counts,
                    accepted=accepted,
                    num_draft_tokens=num_draft_tokens,
                    known=known,
                    right=None if known is None else [min(n, own) for n, (_, _, own) in zip(known, cells, strict=True)],
                    seconds=None
                    if step.reads_prompts
                    else seconds * (5 if len(self.counts) in self.slow else 1) * self.speed(),
                    draft_seconds=0.0 if self.is_captured else drafting,
                    caught_up=caught_up,
                )
            )
            self.counts.append(counts)
            clock += seconds + drafting
            for number, own in zip(numbers, accepted, strict=True):
                places[number] += own + 1
            rows = [(number, text) for number, text in rows if places[number] < len(text)]
            while self.is_refilled and waiting and len(rows) < size:
                rows.append(waiting.pop(0))
        return clock


def best_constant(texts: Sequence[Text], seconds: Seconds, num_rows: int | None = None, **options: Any) -> float:
    """The least time that a constant number of drafts takes, 0 among them."""
    return min(Loop(Constant(count), seconds, **options).run(texts, num_rows) for count in (0, 1, 2, 3, 5, 10))


@pytest.mark.parametrize("seconds", [flat, dear, stepped])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 0.95, 1.0])
def test_looked_up_drafts_as_many_as_pay(chance: float, seconds: Seconds) -> None:
    texts = [a_text(800, lambda position: chance)]
    assert Loop(Auto(10), seconds).run(texts) < 1.06 * best_constant(texts, seconds) + 4


@pytest.mark.parametrize(("drafting", "chance"), [(0.05, 0.9), (0.2, 0.95), (0.4, 0.5), (0.4, 0.0), (0.1, 1.0)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_drafts_that_are_planned_as_many_as_pay(drafting: float, chance: float, is_compiled: bool) -> None:
    options: dict[str, Any] = {"looks_up": False, "drafting": drafting, "is_compiled": is_compiled}
    texts = [a_text(1500, lambda position: chance)]
    found = Loop(Auto(10), stepped, **options)
    assert found.run(texts) < 1.04 * best_constant(texts, stepped, **options) + 6
    # Theorem 3.8, with a cost of its own for each number of drafts.
    factors = [
        float(expected_tokens_per_step(chance, count)) / (stepped(count + 1) + drafting * count) for count in range(11)
    ]
    settled = [sum(own) for own in found.counts[len(found.counts) // 2 : -10]]
    assert sum(factors[count] for count in settled) / len(settled) > 0.95 * max(factors)


@pytest.mark.parametrize("num_texts", [1, 8])
@pytest.mark.parametrize("length", [64, 1000])
@pytest.mark.parametrize("seconds", [flat, dear, stepped])
@pytest.mark.parametrize("match", [2, 12, 30])
def test_what_wrong_drafts_may_cost(match: int, seconds: Seconds, length: int, num_texts: int) -> None:
    """2 % of the batches so far, and of the first; one step more where a token takes as long as a step, which nobody
    knows before it was tried."""
    texts = [a_text(length, lambda position: 0.0, match=match) for _ in range(num_texts)]
    for options in ({}, {"looks_up": False, "drafting": 0.4}):
        loop = Loop(Auto(10), seconds, **options)
        plain = length * seconds(num_texts)
        times = [loop.run(texts) / plain for _ in range(4)]
        found_out = 1 / length if seconds is dear else 0.0
        for count in range(1, 5):
            assert sum(times[:count]) < 1.02 * count + found_out, (options, times)


@pytest.mark.parametrize(
    "options", [{}, {"has_equal_prompts": False}, {"is_captured": True}], ids=["eager", "ragged", "captured"]
)
@pytest.mark.parametrize("drafting", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("num_texts", [1, 8, 20, 64])
def test_a_static_batch_finds_what_pays_within_short_calls(
    num_texts: int, drafting: float, options: dict[str, Any]
) -> None:
    """Calls of 40 tokens on a device where all tokens of a step take as long as one. The first call is never 2 % slower
    than no draft, nor are all calls so far. Drafts that are often right are found in the first call if they cost
    nothing, in the second at 0.1 of a step, and in the third at 0.3: there all that 2 % of 40 steps allow is one
    loss."""
    options = {"looks_up": False, "drafting": drafting, **options}
    for chance in (0.0, 0.3, 0.6, 0.9):
        schedule, times, best = Auto(10), [], []
        for call in range(3):
            texts = [a_text(40, lambda position, chance=chance: chance, 100 * call + row) for row in range(num_texts)]
            times.append(Loop(schedule, lambda tokens: 1.0, **options).run(texts) / 40)
            best.append(best_constant(texts, lambda tokens: 1.0, **options) / 40)
            # A later call may lose two steps that the calls before it saved.
            assert times[-1] < 1.05, (chance, times)
            assert sum(times) < 1.02 * len(times), (chance, times)
        if chance == 0.9:
            assert times[{0.0: 0, 0.1: 1, 0.3: 2}[drafting]] < 0.9, (chance, times, best)
        if chance > 0 and drafting == 0:
            assert times[0] < 1 - 0.35 * (1 - best[0]), (chance, times, best)


@pytest.mark.parametrize("seconds", [flat, dear, stepped])
def test_texts_that_end_before_their_limit_leave_a_debt(seconds: Seconds) -> None:
    """Of a limit of 1,000 tokens, drafts may lose three steps; of ten texts of 15 tokens, no more in all but 2 %."""
    loop = Loop(Auto(10), seconds, looks_up=False, drafting=0.3, limit=1000)
    lost = sum(loop.run([a_text(15, lambda position: 0.0)]) / seconds(1) - 15 for _ in range(10))
    assert lost < 4 + 0.02 * 150


def test_a_step_with_drafts_makes_no_unit_larger() -> None:
    """A step of up to 16 tokens takes as long as one of 8: drafts that seem free in a call's first step are not."""
    loop = Loop(Auto(10), lambda tokens: math.ceil(tokens / 16), looks_up=False, drafting=0.3, is_refilled=True)
    for call in range(5):
        texts = [a_text(24, lambda position: 0.6, 100 * call + row) for row in range(24)]
        assert loop.run(texts, 8) / 72 < 1.15, call


def test_the_risk_of_a_compiled_step_counts_rows_that_have_ended() -> None:
    schedule, uniform = Auto(10, (0, 10)), random.Random(6).uniform
    for call in range(4):
        lengths = [40, *(int(40 * uniform(0.3, 1)) for _ in range(19))]
        texts = [a_text(length, lambda position: 0.3, 100 * call + row) for row, length in enumerate(lengths)]
        loop = Loop(
            schedule, lambda tokens: (32 + tokens) / 52, looks_up=False, drafting=0.3, is_captured=True, limit=40
        )
        assert loop.run(texts) / 40 < 1.05, call


@pytest.mark.parametrize("num_texts", [1, 4])
@pytest.mark.parametrize("slow", range(12))
def test_a_slow_step_changes_nothing(slow: int, num_texts: int) -> None:
    """Wherever it comes, drafts that are always right are drafted."""
    texts = [a_text(200, lambda position: 1.0, match=9) for _ in range(num_texts)]
    for options in ({}, {"looks_up": False, "drafting": 0.1}):
        steady, disturbed = (
            Loop(Auto(10), flat, is_refilled=True, slow=steps, **options).run(texts) for steps in ((), (slow,))
        )
        assert disturbed < 1.1 * steady + 4


@pytest.mark.parametrize("slow", [(1, 2), (2, 3), (3, 4, 5)])
def test_slow_steps_in_a_row_are_forgotten(slow: tuple[int, ...]) -> None:
    schedule, texts = Auto(10), [a_text(200, lambda position: 1.0)]
    Loop(schedule, flat, slow=slow).run(texts)
    assert [Loop(schedule, flat).run(texts) for _ in range(3)][-1] < 30


@pytest.mark.parametrize("seed", [3, 5, 9])
def test_slow_steps_now_and_then_change_little(seed: int) -> None:
    """Many numbers of tokens are read once, and two of them in a slow step do not bear each other out."""
    rng = random.Random(seed)
    slow = [step for step in range(1000) if rng.random() < 0.05]
    texts = [a_text(200, lambda position: 0.7, seed + row % 8, match=8) for row in range(24)]
    steady, disturbed = (Loop(Auto(10), flat, is_refilled=True, slow=steps).run(texts, 8) for steps in ((), slow))
    assert disturbed < 1.03 * steady


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_a_machine_that_becomes_slower_and_faster(seed: int) -> None:
    """Steps with drafts that were read while it was fast do not look cheap beside steps without while it is slow."""
    rng, drift, schedule, took, undrafted = random.Random(seed), 0.0, Auto(10), 0.0, 0.0

    def seconds(num_tokens: int) -> float:
        return 32 + num_tokens + (12 if num_tokens > 8 else 0)

    def speed() -> float:
        nonlocal drift
        drift = 0.95 * drift + rng.gauss(0, 0.1)
        return math.exp(drift)

    for call in range(12):
        found = [rng.choice((0, 3, 10)) for _ in range(8)]
        texts = [
            a_text(64, lambda position: 0.2, 100 * seed + 10 * call + row, match=3, num_found=count)
            for row, count in enumerate(found)
        ]
        took += Loop(schedule, seconds, speed=speed).run(texts)
        undrafted += Loop(Constant(0), seconds).run(texts)
    assert took < 1.02 * undrafted


def test_no_noise_makes_drafts_that_pay_look_dear() -> None:
    """Calls of three texts in turns: what steps take does not drift away from what they took in calls before."""
    rng, schedule = random.Random(0), Auto(10)

    def speed() -> float:
        return (1 + 0.12 * abs(rng.gauss(0, 1))) * (3 if rng.random() < 0.03 else 1)

    for call in range(30):
        for chance in (0.1, 0.5, 1.0):
            took = Loop(schedule, stepped, speed=speed).run(
                [a_text(64, lambda position, chance=chance: chance, call, match=9)]
            )
        # The first call learns what drafts take: one more of them in each step.
        assert took < (16 if call > 0 else 32), call


def timed(times: Sequence[tuple[int, float]], num_rows: int = 8) -> StepCosts:
    costs = StepCosts(num_rows, draft_cost=0.25)
    for tokens, seconds in times:
        costs.add(num_rows, tokens, seconds)
    return costs


def test_costs_are_a_jump_and_a_slope() -> None:
    """What ragged steps take, whichever numbers of tokens they read, with drafts and with fewer rows."""
    costs = timed([(8, 1.0)] * 2 + [(8 + drafts, 1.3 + 0.02 * drafts) for drafts in (1, 4, 12, 30, 50)] * 20)
    found = [costs.extra(8, 8 + drafts, 0) for drafts in (0, 2, 20, 80)]
    assert found == pytest.approx([0, 0.34, 0.7, 1.9], rel=0.02) and costs.of(4) == pytest.approx(0.92, rel=0.01)


def test_a_captured_step_is_believed_at_once() -> None:
    costs = StepCosts(8, draft_cost=0.25)
    for tokens, seconds in ((8, 1.0), (88, 6.0)):
        costs.add_captured(tokens, seconds, is_plain=tokens == 8)
    found = [costs.extra(8, tokens, 3) for tokens in (88, 48, 168)]
    assert costs.are_known and found == pytest.approx([5, 2.5, 5])


def test_more_drafts_than_ever_before_may_each_take_what_the_others_took() -> None:
    """One draft that took half a step may have shown a jump or a slope."""
    costs = timed([(8, 1.0)] * 2 + [(9, 1.5)] * 20)
    assert costs.room(purse=9.0) == 4 and costs.room(purse=1.1) == 2
    assert costs.risk(8, 12, 0) > 1.9 > costs.extra(8, 12, 0) + 1


def test_a_machine_that_becomes_slower_step_by_step_changes_no_cost() -> None:
    speed, times = 1.0, []
    for tokens in (8, 8, 16, 16, *[8] * 50):
        speed *= 1.02
        times.append((tokens, speed * (1.5 if tokens == 16 else 1.0)))
    assert timed(times).extra(8, 16, 0) == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize("options", [{}, {"looks_up": False, "drafting": 0.1}])
def test_a_slow_first_step_makes_no_draft_look_free(options: dict[str, Any]) -> None:
    for seconds, chance in ((stepped, 0.3), (dear, 0.6)):
        texts = [a_text(400, lambda position, chance=chance: chance)]
        assert Loop(Auto(10), seconds, slow=(0,), **options).run(texts) < 1.02 * 400 + 6


def test_compiled_steps_need_no_more_than_two_graphs() -> None:
    texts = [a_text(600, lambda position: 1.0)]
    schedule = as_schedule(None, 10, deterministic=True)
    assert schedule.buckets == (0, 10)
    assert Loop(schedule, flat, looks_up=False, drafting=0.01, is_compiled=True).run(texts) < 85


@pytest.mark.parametrize("options", [{"is_compiled": True}, {"is_captured": True}])
@pytest.mark.parametrize("seconds", [flat, dear, stepped])
def test_two_graphs_of_drafts_that_are_looked_up(options: dict[str, Any], seconds: Seconds) -> None:
    """The default of compiled and captured steps drafts where it pays, and loses little where it does not."""
    for chance in (0.0, 0.3, 1.0):
        texts = [a_text(600, lambda position, chance=chance: chance)]
        loop = Loop(as_schedule(None, 10, deterministic=True), seconds, **options)
        best = min(Loop(Constant(count), seconds, **options).run(texts) for count in (0, 10))
        assert loop.run(texts) < 1.03 * best + 9, chance


def test_times_are_kept_for_each_number_of_rows() -> None:
    """Calls of eight texts and of one in turns, of short texts and long ones, whose steps take five times as long."""
    schedule = Auto(10)
    for _ in range(2):
        for num_texts in (8, 1):
            for factor in (1, 5):
                texts = [a_text(300, lambda position: 0.9, seed) for seed in range(num_texts)]

                def seconds(num_tokens: int, factor: int = factor) -> float:
                    return factor * flat(num_tokens)

                time = Loop(schedule, seconds, is_refilled=True).run(texts)
                assert time < 1.05 * best_constant(texts, seconds, is_refilled=True) + 3 * seconds(num_texts)


@pytest.mark.parametrize("looks_up", [True, False])
def test_texts_that_change(looks_up: bool) -> None:
    """From predictable to not, and back."""
    options: dict[str, Any] = {"looks_up": looks_up, "drafting": 0.0 if looks_up else 0.15}
    texts = [a_text(1600, lambda position: (0.95, 0.02)[position // 200 % 2])]
    time = Loop(Auto(10), flat, **options).run(texts)
    assert time < 0.97 * best_constant(texts, flat, **options)


def test_a_draft_is_worth_what_its_row_saves() -> None:
    """Alone among texts that end with the slowest, a predictable row waits for the others."""
    others = [a_text(200, lambda position: 0.0, match=2) for _ in range(7)]
    texts = [a_text(200, lambda position: 0.95, match=12), *others]
    static, refilled = Loop(Auto(10), flat), Loop(Auto(10), flat, is_refilled=True)
    assert static.run(texts) < 1.02 * best_constant(texts, flat)
    refilled.run(texts)
    verified = [sum(sum(own) for own in loop.counts) for loop in (static, refilled)]
    assert verified[0] < 40 < 150 < verified[1]


def test_drafts_are_told_apart_by_their_match() -> None:
    """Long matches are right, short ones are not."""
    long, short = a_text(1000, lambda position: 0.9, 1, 8), a_text(1000, lambda position: 0.1, 2, 2)
    texts = [[one if place % 3 == 0 else other for place, (one, other) in enumerate(zip(long, short, strict=True))]]
    found = Loop(Auto(10), stepped)
    assert found.run(texts) < 0.97 * best_constant(texts, stepped)
