"""Schedules: Hugging Face's rule step by step, and "auto" in simulated loops, for which the best number is known.

Each bound on what "auto" takes is a sum of the numbers below: what its docstring allows it to lose, and how often it
looks again. All are measured in steps without drafts, which take 1 second for one row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from marks import slow
from simulated_loop import (
    Loop,
    Seconds,
    a_double_text,
    a_text,
    best_constant,
    dear,
    flat,
    run_with_two_sources,
    stepped,
)
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


# "auto" in simulated loops.

# Auto's docstring: drafts lose at most this share of a batch. A step that is slower than expected may exceed it once.
LOST = 0.0165
# The docstring: steps that a batch may lose because earlier ones did not, and because drafts gained as many in them.
RESERVE, GAINED = 2.0, 4.0
# Steps that the first batch may lose in addition, and what a long batch may lose at its beginning (schedules/auto.py).
FIRST_RESERVE, LOAN = 0.4, 3.0
# After as many steps with drafts, one without drafts is timed (STALE_AFTER in schedules/costs.py).
RETIMED = 1 / 64
# Drafts that did not pay are tried again after 8, 16, 32, 64, 64 .. steps (TRY_AFTER in schedules/auto.py).
FIRST_TRY, LAST_TRY = 8, 64


def learning(num_rows: int = 1, most: int = 10) -> int:
    """Steps with fewer drafts than are best: two without drafts give the cost of a step; then a step reads at most
    3 n + B / 8 drafts after one with n (`StepCosts.room`)."""
    steps, drafts = 2, max(num_rows // 8, 1)
    while drafts < most * num_rows:
        steps, drafts = steps + 1, 3 * drafts + max(num_rows // 8, 1)
    return steps


def in_turns(first: Sequence[Any], second: Sequence[Any], third: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Every combination; of the values of `third`, one in turn for two others is quick."""
    combinations = product(enumerate(first), enumerate(second), enumerate(third))
    return [
        (slow if (i + j - k) % len(third) else pytest.param)(one, other, *rest)
        for (i, one), (j, other), (k, rest) in combinations
    ]


@pytest.mark.parametrize("seconds", [flat, dear, stepped])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 0.95, 1.0])
def test_auto_with_looked_up_drafts(chance: float, seconds: Seconds) -> None:
    texts = [a_text(800, lambda position: chance)]
    # The priors of ten places weigh 6 + 2 drafts each (WEIGHT, PATIENCE); wrong ones may cost what a batch may lose.
    priors = min(80 * (seconds(3) - seconds(2)), LOAN)
    bound = (1 + LOST + RETIMED) * best_constant(texts, seconds) + learning() + priors
    assert Loop(Auto(10), seconds).run(texts) < bound


@pytest.mark.parametrize(("drafting", "chance"), [(0.05, 0.9), (0.2, 0.95), (0.4, 0.5), (0.4, 0.0), (0.1, 1.0)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_auto_with_planned_drafts(drafting: float, chance: float, is_compiled: bool) -> None:
    options: dict[str, Any] = {"looks_up": False, "drafting": drafting, "is_compiled": is_compiled}
    texts = [a_text(1500, lambda position: chance)]
    found = Loop(Auto(10), stepped, **options)
    # A step more: the first draft is judged when two steps without drafts were timed.
    assert found.run(texts) < (1 + LOST) * best_constant(texts, stepped, **options) + 1

    def factors(chance: float) -> list[float]:
        """Theorem 3.8, with a separate cost for each number of drafts."""
        return [
            float(expected_tokens_per_step(chance, count)) / (stepped(count + 1) + drafting * count)
            for count in range(11)
        ]

    # Drafts count half after 50 (MEMORY_OF_OTHERS), as much as 72 drafts: the chance is known to two standard errors.
    error = 2 * math.sqrt(chance * (1 - chance) / 72)
    exact = factors(chance)
    chosen = [exact.index(max(exact))]
    for guess in (max(chance - error, 0.0), min(chance + error, 1.0)):
        guessed = factors(guess)
        chosen.append(guessed.index(max(guessed)))
    settled = [sum(own) for own in found.counts[len(found.counts) // 2 : -10]]
    # The steps that are retimed, or in which one draft is tried.
    others = math.ceil(len(settled) * RETIMED) / len(settled)
    least = (1 - others) * min(exact[count] for count in chosen) + others * min(exact[:2])
    assert sum(exact[count] for count in settled) / len(settled) > least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("seconds", "match", "length", "num_texts"),
    in_turns([flat, dear, stepped], [2, 30], [(64, 1), (64, 8), (600, 1)]),
)
def test_auto_with_wrong_drafts(seconds: Seconds, match: int, length: int, num_texts: int) -> None:
    texts = [a_text(length, lambda position: 0.0, match=match) for _ in range(num_texts)]
    for options in ({}, {"looks_up": False, "drafting": 0.4}):
        loop = Loop(Auto(10), seconds, **options)
        times = [loop.run(texts) / seconds(num_texts) for _ in range(4)]
        # Where a token takes as long as a step, nobody knows it before one was tried.
        unknown = 1.0 if seconds is dear else 0.0
        for count in range(1, 5):
            assert sum(times[:count]) <= count * length * (1 + LOST) + FIRST_RESERVE + unknown, (options, times)


@pytest.mark.parametrize(
    ("num_texts", "drafting", "options"),
    in_turns([1, 8, 64], [0.0, 0.1, 0.3], [({},), ({"has_equal_prompts": False},), ({"is_captured": True},)]),
)
def test_auto_in_short_static_batches(num_texts: int, drafting: float, options: dict[str, Any]) -> None:
    """Calls of 40 tokens on a device where all tokens of a step take as long as one. Drafts that are often right are
    found in the first call if they cost nothing, in the second at 0.1 of a step, and in the third at 0.3: there all
    that 40 steps may lose is one wrong draft."""
    options = {"looks_up": False, "drafting": drafting, **options}
    found = {0.0: 0, 0.1: 1, 0.3: 2}[drafting]
    for chance in (0.0, 0.3, 0.6, 0.9):
        schedule, times = Auto(10), []
        for call in range(3):
            texts = [a_text(40, lambda position, chance=chance: chance, 100 * call + row) for row in range(num_texts)]
            times.append(Loop(schedule, lambda tokens: 1.0, **options).run(texts))
            assert times[-1] <= 40 + RESERVE and sum(times) <= 40 * len(times) * (1 + LOST), (chance, times)
            if call == found and (chance == 0.9 or (chance > 0 and drafting == 0)):
                best = best_constant(texts, lambda tokens: 1.0, **options)
                assert times[-1] <= best + learning(num_texts), (chance, times, best)


@pytest.mark.parametrize("seconds", [flat, dear, stepped])
def test_auto_with_early_ends(seconds: Seconds) -> None:
    """Of a limit of 1,000 tokens drafts may lose the loan. If texts end after 15, it is a debt: later calls lose no
    more than their share."""
    loop = Loop(Auto(10), seconds, looks_up=False, drafting=0.3, limit=1000)
    lost = sum(loop.run([a_text(15, lambda position: 0.0)]) / seconds(1) - 15 for _ in range(10))
    assert lost < LOAN + FIRST_RESERVE + LOST * 150


def test_auto_unit_is_a_step_without_drafts() -> None:
    """A step of up to 16 tokens takes as long as one of 8: drafts that seem free in a call's first step are not."""
    loop = Loop(Auto(10), lambda tokens: math.ceil(tokens / 16), looks_up=False, drafting=0.3, is_refilled=True)
    for call in range(5):
        texts = [a_text(24, lambda position: 0.6, 100 * call + row) for row in range(24)]
        # A call may lose what others did not, and what they gained.
        assert loop.run(texts, 8) < 72 + RESERVE + GAINED, call


def test_auto_risk_counts_ended_rows() -> None:
    """Captured steps read rows that have ended too."""
    schedule, uniform = Auto(10, (0, 10)), random.Random(6).uniform
    for call in range(4):
        lengths = [40, *(int(40 * uniform(0.3, 1)) for _ in range(19))]
        texts = [a_text(length, lambda position: 0.3, 100 * call + row) for row, length in enumerate(lengths)]
        loop = Loop(
            schedule, lambda tokens: (32 + tokens) / 52, looks_up=False, drafting=0.3, is_captured=True, limit=40
        )
        assert loop.run(texts) <= 40 + RESERVE, call


@pytest.mark.parametrize("num_texts", [1, 4])
@pytest.mark.parametrize("options", [{}, {"looks_up": False, "drafting": 0.1}], ids=["looked up", "drafted"])
def test_auto_with_a_slow_step(options: dict[str, Any], num_texts: int) -> None:
    """Wherever it comes, drafts that are always right are drafted: at most one step more is without them."""
    texts = [a_text(200, lambda position: 1.0, match=9) for _ in range(num_texts)]
    steady, *disturbed = (
        Loop(Auto(10), flat, is_refilled=True, slow=steps, **options).run(texts)
        for steps in ((), *((step,) for step in range(12)))
    )
    assert [step for step in range(12) if disturbed[step] > steady + flat(num_texts) + 1e-9] == []


@pytest.mark.parametrize("slow", [(1, 2), (2, 3), (3, 4, 5)])
def test_auto_forgets_slow_steps_in_a_row(slow: tuple[int, ...]) -> None:
    schedule, texts = Auto(10), [a_text(200, lambda position: 1.0)]
    Loop(schedule, flat, slow=slow).run(texts)
    last = [Loop(schedule, flat).run(texts) for _ in range(3)][-1]
    # One step of a call may be without drafts, to time it.
    assert last <= best_constant(texts, flat) + 1


@pytest.mark.parametrize("seed", [3, 5, 9])
def test_auto_with_slow_steps_now_and_then(seed: int) -> None:
    """Many numbers of tokens are read once, and two of them in a slow step do not confirm each other."""
    rng, share = random.Random(seed), 0.05
    slow = [step for step in range(1000) if rng.random() < share]
    texts = [a_text(200, lambda position: 0.7, seed + row % 8, match=8) for row in range(24)]
    steady, disturbed = (Loop(Auto(10), flat, is_refilled=True, slow=steps).run(texts, 8) for steps in ((), slow))
    # Slow steps weigh 1/4 and count as at most twice what was expected (WEIGHT_OF_SLOW_STEPS, LARGEST_SURPRISE).
    assert disturbed < (1 + share * 0.25) * steady


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_auto_on_a_machine_whose_speed_drifts(seed: int) -> None:
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
    assert took < (1 + LOST) * undrafted


def test_auto_with_noise_in_each_step() -> None:
    """Calls of three texts in turns: what steps take does not drift away from what they took in calls before."""
    rng, schedule = random.Random(0), Auto(10)

    def speed() -> float:
        return (1 + 0.12 * abs(rng.gauss(0, 1))) * (3 if rng.random() < 0.03 else 1)

    for call in range(30):
        for chance in (0.1, 0.5, 1.0):
            texts = [a_text(64, lambda position, chance=chance: chance, call, match=9)]
            took = Loop(schedule, stepped, speed=speed).run(texts)
        if call == 0:
            # After two steps without drafts, ten steps with one more draft each have 64 tokens.
            assert took <= 2 + sum(stepped(1 + count) for count in range(1, 11))
        else:
            # One step without drafts is timed, and one with all drafts may be needed for the last tokens.
            assert took <= best_constant(texts, stepped) + 1 + stepped(11)


def timed(times: Sequence[tuple[int, float]], num_rows: int = 8) -> StepCosts:
    costs = StepCosts(num_rows, draft_cost=0.25)
    for tokens, seconds in times:
        costs.add(num_rows, tokens, seconds)
    return costs


def test_costs_are_a_jump_and_a_slope() -> None:
    """What ragged steps take, whichever numbers of tokens they read, with drafts and with fewer rows."""
    costs = timed([(8, 1.0)] * 2 + [(8 + drafts, 1.3 + 0.02 * drafts) for drafts in (1, 4, 12, 30, 50)] * 20)
    found = [costs.extra(8, 8 + drafts, 0) for drafts in (0, 2, 20, 80)]
    # The first steps are slower than expected and weigh 1/4 each; the prior at 0 weighs 0.1 of some 64 steps.
    assert found == pytest.approx([0, 0.34, 0.7, 1.9], rel=0.02) and costs.of(4) == pytest.approx(0.92, rel=0.01)


def test_costs_of_captured_steps_are_exact() -> None:
    costs = StepCosts(8, draft_cost=0.25)
    for tokens, seconds in ((8, 1.0), (88, 6.0)):
        costs.add_captured(tokens, seconds, is_plain=tokens == 8)
    found = [costs.extra(8, tokens, 3) for tokens in (88, 48, 168)]
    assert costs.are_known and found == pytest.approx([5, 2.5, 5])


def test_costs_of_more_drafts_than_ever_before() -> None:
    """One draft that took half a step may have shown a jump or a slope."""
    costs = timed([(8, 1.0)] * 2 + [(9, 1.5)] * 20)
    assert costs.room(purse=9.0) == 4 and costs.room(purse=1.1) == 2
    assert costs.risk(8, 12, 0) > 1.9 > costs.extra(8, 12, 0) + 1


def test_costs_on_a_machine_that_becomes_slower() -> None:
    speed, times = 1.0, []
    for tokens in (8, 8, 16, 16, *[8] * 50):
        speed *= 1.02
        times.append((tokens, speed * (1.5 if tokens == 16 else 1.0)))
    # The steps with drafts are two and three steps after the faster of the two that give the unit.
    assert 0.5 <= timed(times).extra(8, 16, 0) <= 1.5 * 1.02**3 - 1


@pytest.mark.parametrize("options", [{}, {"looks_up": False, "drafting": 0.1}])
def test_auto_with_a_slow_first_step(options: dict[str, Any]) -> None:
    """It makes no draft look free. The first step with a draft may be lost: nobody knows what it costs."""
    for seconds, chance in ((stepped, 0.3), (dear, 0.6)):
        texts = [a_text(400, lambda position, chance=chance: chance)]
        assert Loop(Auto(10), seconds, slow=(0,), **options).run(texts) < (1 + LOST) * 400 + seconds(2)


def test_auto_with_two_graphs() -> None:
    texts, options = [a_text(600, lambda position: 1.0)], {"looks_up": False, "drafting": 0.01, "is_compiled": True}
    schedule = as_schedule(None, 10, deterministic=True)
    assert schedule.buckets == (0, 10)
    # What ten drafts may lose is too much at first. The eight steps until they are tried have 8 of the 600 tokens.
    best = best_constant(texts, flat, **options)
    assert Loop(schedule, flat, **options).run(texts) <= (1 - FIRST_TRY / 600) * best + FIRST_TRY


@pytest.mark.parametrize("options", [{"is_compiled": True}, {"is_captured": True}])
@pytest.mark.parametrize("seconds", [flat, dear, stepped])
def test_auto_with_two_graphs_and_looked_up_drafts(options: dict[str, Any], seconds: Seconds) -> None:
    """The default of compiled and captured steps drafts where it pays, and loses little where it does not."""
    for chance in (0.0, 0.3, 1.0):
        texts = [a_text(600, lambda position, chance=chance: chance)]
        loop = Loop(as_schedule(None, 10, deterministic=True), seconds, **options)
        best = min(Loop(Constant(count), seconds, **options).run(texts) for count in (0, 10))
        # Before drafts are stopped, they may lose what they gained and the loan.
        assert loop.run(texts) < (1 + LOST + RETIMED) * best + GAINED + LOAN, chance


def test_auto_keeps_costs_for_each_number_of_rows() -> None:
    """Calls of eight texts and of one in turns, of short texts and long ones, whose steps take five times as long."""
    schedule = Auto(10)
    for _ in range(2):
        for num_texts in (8, 1):
            for factor in (1, 5):
                texts = [a_text(300, lambda position: 0.9, seed) for seed in range(num_texts)]

                def seconds(num_tokens: int, factor: int = factor) -> float:
                    return factor * flat(num_tokens)

                time = Loop(schedule, seconds, is_refilled=True).run(texts)
                # Two steps without drafts give the cost of a step.
                best = best_constant(texts, seconds, is_refilled=True)
                assert time < (1 + LOST + RETIMED) * best + 2 * seconds(num_texts)


@pytest.mark.parametrize(("seconds", "drafting", "chance"), [(stepped, 0.3, 0.9), (flat, 0.1, 0.8)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_auto_in_refilled_batches(seconds: Seconds, drafting: float, chance: float, is_compiled: bool) -> None:
    """Drafts that are good and dear are as many as the best constant number: each takes time in which others are
    made, at the rate of steps with drafts."""
    options: dict[str, Any] = {"looks_up": False, "drafting": drafting, "is_compiled": is_compiled, "is_refilled": True}
    texts = [a_text(200, lambda position: chance, row) for row in range(24)]
    bound = (1 + LOST + RETIMED) * best_constant(texts, seconds, 8, **options) + learning(8)
    assert Loop(Auto(10), seconds, **options).run(texts, 8) < bound


@pytest.mark.parametrize("looks_up", [True, False])
def test_auto_with_texts_that_change(looks_up: bool) -> None:
    """From predictable to not, and back, every 200 tokens: better than any constant, and near the best of each part."""
    options: dict[str, Any] = {"looks_up": looks_up, "drafting": 0.0 if looks_up else 0.15}
    chances = (0.95, 0.02)
    texts = [a_text(1600, lambda position: chances[position // 200 % 2])]
    time = Loop(Auto(10), flat, **options).run(texts)
    parts = 4 * sum(best_constant([a_text(200, lambda position, c=c: c)], flat, **options) for c in chances)
    # Drafts that are looked up: an end is seen after 14 drafts (MEMORY_OF_SEQUENCE: they count half then), one in each
    # step of eleven tokens; a beginning too, without verifying any, in two steps. Others: after an end, they may lose
    # what they gained and the loan; a beginning is seen when they are tried again.
    late = 14 * (flat(11) - 1) + 2 if looks_up else GAINED + LOAN + LAST_TRY
    assert time < (1 + LOST + RETIMED) * parts + 4 * late
    assert time < (1 - LOST - RETIMED) * best_constant(texts, flat, **options)


def test_auto_counts_what_a_row_saves() -> None:
    """Alone among texts that end with the slowest, a predictable row waits for the others."""
    others = [a_text(200, lambda position: 0.0, match=2) for _ in range(7)]
    texts = [a_text(200, lambda position: 0.95, match=12), *others]
    static, refilled = Loop(Auto(10), flat), Loop(Auto(10), flat, is_refilled=True)
    assert static.run(texts) < (1 + LOST) * best_constant(texts, flat)
    refilled.run(texts)
    verified = [sum(sum(own) for own in loop.counts) for loop in (static, refilled)]
    # In 200 steps, one draft of each of the 8 rows is tried 5 times. With all its drafts, the row needs 200 / 8.6 steps
    # of 10; at least two thirds of them are verified.
    assert verified[0] < 5 * 8
    assert verified[1] > 2 / 3 * 10 * 200 / float(expected_tokens_per_step(0.95, 10))


def test_auto_tells_drafts_apart_by_match() -> None:
    """Long matches are right, short ones are not: by more than what it may lose, "auto" is better than any constant."""
    long, short = a_text(1000, lambda position: 0.9, 1, 8), a_text(1000, lambda position: 0.1, 2, 2)
    texts = [[one if place % 3 == 0 else other for place, (one, other) in enumerate(zip(long, short, strict=True))]]
    found = Loop(Auto(10), stepped)
    assert found.run(texts) < (1 - LOST - RETIMED) * best_constant(texts, stepped)


COPY, HALF, SPURIOUS = (1.0, 0.97, 0.1), (0.5, 0.9, 0.1), (0.0, 0.0, 0.7)


@pytest.mark.parametrize(
    ("lookup", "chance_of_others", "drafting", "seconds", "num_rows", "is_refilled", "share"),
    [
        (COPY, 0.3, 0.5, flat, 1, False, 1.0),
        (COPY, 0.3, 0.25, flat, 8, True, 1.0),
        (SPURIOUS, 0.85, 0.1, flat, 1, False, 1.0),
        (HALF, 0.85, 0.1, flat, 1, False, 0.85),
        (HALF, 0.6, 0.25, stepped, 8, False, 0.9),
        # Both sources pay, but most looked-up drafts are better left out.
        ((1.0, 0.7, 0.1), 0.85, 0.1, flat, 8, True, 1.0),
        (COPY, 0.85, 0.1, flat, 8, True, 0.9),
    ],
)
def test_auto_with_two_sources(
    lookup: tuple[float, float, float],
    chance_of_others: float,
    drafting: float,
    seconds: Seconds,
    num_rows: int,
    is_refilled: bool,
    share: float,
) -> None:
    """The worse of two sources loses no more than its limit. Where each is better in some steps, both together are
    faster than the better one."""
    copied, chance, elsewhere = lookup
    schedules, times, length, num_batches = [Auto(10), Auto(4), Auto(10)], [0.0] * 3, 400, 2
    options: dict[str, Any] = {"is_refilled": is_refilled}
    for batch in range(num_batches):
        seeds = range(100 * batch, 100 * batch + num_rows * (1 + is_refilled))
        texts = [a_double_text(length, copied, chance, chance_of_others, elsewhere, seed) for seed in seeds]
        looked_up = [[cell[:3] for cell in text] for text in texts]
        others = [[(4, 0, cell[3]) for cell in text] for text in texts]
        times[0] += Loop(schedules[0], seconds, **options).run(looked_up, num_rows)
        times[1] += Loop(schedules[1], seconds, looks_up=False, drafting=drafting, **options).run(others, num_rows)
        times[2] += run_with_two_sources(schedules[2], texts, seconds, drafting, num_rows, **options)
    to_the_limit = num_batches * (1 + is_refilled) * length * seconds(num_rows)
    assert times[2] < share * min(times[:2]) + LOST * to_the_limit


@pytest.mark.parametrize("seconds", [flat, stepped])
def test_auto_in_static_batches_of_texts_that_copy(seconds: Seconds) -> None:
    """Sequences take turns in copying, so none is the slowest for long."""
    schedule, times, best = Auto(10), 0.0, 0.0
    for batch in range(3):
        texts = [[cell[:3] for cell in a_double_text(400, 0.9, 0.9, 0.0, 0.0, 100 * batch + row)] for row in range(8)]
        times += Loop(schedule, seconds).run(texts)
        best += best_constant(texts, seconds)
    assert times < 1.1 * best


def test_lookups_before_a_plan_lose_no_more_than_their_limit() -> None:
    """They find nothing, and each takes a tenth of a step."""
    texts, seconds = [a_double_text(400, 0.0, 0.0, 0.02, 0.0, 0)], []
    for looking_up in (0.0, 0.1):
        schedule = Auto(10)
        seconds.append(run_with_two_sources(schedule, texts, flat, 0.1, 1, is_refilled=False, looking_up=looking_up))
    assert seconds[0] + 0.3 < seconds[1] < seconds[0] + LOST * 400 + RESERVE


class Counting(Auto):
    """Keeps the answers of `may_look_up`, in a list that all copies share."""

    def __init__(self) -> None:
        super().__init__(10)
        self.answers: list[bool] = []

    def may_look_up(self, step: NextStep) -> bool:
        self.answers.append(super().may_look_up(step))
        return self.answers[-1]


@pytest.mark.parametrize(
    ("copied", "chance_of_others", "elsewhere", "least", "most"),
    [(0.0, 0.02, 0.0, 0.25, 0.45), (1.0, 0.02, 0.0, 1.0, 1.0), (0.0, 0.85, 0.7, 0.25, 0.45)],
    ids=["none found", "copied", "others are better"],
)
def test_lookups_that_are_not_used_are_seldom(
    copied: float, chance_of_others: float, elsewhere: float, least: float, most: float
) -> None:
    schedule, texts = Counting(), [a_double_text(400, copied, 0.9, chance_of_others, elsewhere, 1)]
    run_with_two_sources(schedule, texts, flat, 0.1, 1, is_refilled=False)
    assert least <= sum(schedule.answers) / len(schedule.answers) <= most


def test_auto_tries_the_second_source_beside_lookups() -> None:
    """Lookups that pay in each step do not keep the other source, which was mostly wrong in an earlier batch, from
    being tried."""
    schedule = Auto(10)
    for batch, chance in enumerate((0.05, 0.95)):
        texts = [a_double_text(300, 0.5, 0.7, chance, 0.7, 100 * batch + row) for row in range(16)]
        seconds = run_with_two_sources(schedule, texts, flat, 0.1, 8, is_refilled=True)
    looked_up = [[cell[:3] for cell in text] for text in texts]
    assert seconds < 0.8 * Loop(Auto(10), flat, is_refilled=True).run(looked_up, 8)


def test_auto_judges_each_source_by_its_drafts() -> None:
    """Looked-up drafts that are wrong say nothing about the other source."""
    step = NextStep([0], [20], [400], num_rows=1, offered=[0], matches=[0], num_others=4)
    schedule = Auto(10)
    for _ in range(2):
        schedule.learn(PastStep(step, [0], [0], known=[0], right=[0], seconds=1.0))
    before = schedule.plan_sources(step)
    found = replace(step, offered=[10], matches=[4])
    for _ in range(20):
        schedule.learn(PastStep(found, [2], [0], known=[1], right=[0], seconds=1.0, is_looked_up=[True]))
    (count,), is_looked_up = schedule.plan_sources(step)
    assert count >= before[0][0] > 0 and is_looked_up == [False]
