"""`check_engine`: a right engine passes at every setting, and a wrong one is told with the settings that break."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from torch_specops import SamplingParams
from torch_specops.testing import check_engine, markov_pair

Prompts = list[list[int]]
V = 6
TARGET, _ = markov_pair(V)
# Lengths differ, so that a row of another prompt shows.
PROMPTS = ((1, 0, 1), (2, 3), (0, 5, 4, 4))
SETTINGS = {
    "plain": SamplingParams(),
    "cold top-p": SamplingParams(temperature=0.6, top_p=0.7),
    "top-k": SamplingParams(top_k=3),
    "min-p": SamplingParams(temperature=1.5, min_p=0.3),
    "greedy": SamplingParams(temperature=0.0),
}


def filtered(weights: Tensor, params: SamplingParams) -> Tensor:
    """[V] probabilities after the filters, by their definitions; `weights` are those at the row's temperature."""
    order = weights.argsort(descending=True)
    p = weights[order]
    kept = torch.ones(V, dtype=torch.bool)
    if params.top_k:
        kept &= torch.arange(V) < params.top_k
    p = p * kept / (p * kept).sum()
    kept &= p.cumsum(0) - p < params.top_p
    kept &= p >= params.min_p * p[0]
    return torch.zeros(V, dtype=torch.float64).index_put_((order,), p * kept)


@cache
def next_law(last: tuple[int, ...], params: SamplingParams) -> tuple[int, Tensor]:
    """The likeliest token after a text, of which two tokens count, and the law."""
    logits = TARGET.next_logits(torch.tensor([last]))[0].double()
    return int(logits.argmax()), filtered(torch.softmax(logits / (params.temperature or 1.0), -1), params)


def engine(prompts: Prompts, params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
    """Row by row, the simplest right engine."""
    generator = torch.Generator().manual_seed(seeds[0])
    rows = []
    for prompt, each in zip(prompts, params, strict=True):
        text = list(prompt)
        for _ in range(2):
            best, law = next_law(tuple(text[-2:]), each)
            text.append(best if each.temperature == 0 else int(torch.multinomial(law, 1, generator=generator)))
        rows.append(text[len(prompt) :])
    return rows


def check(generate: Callable[..., list[list[int]]], trials: int = 1500, **options):
    return check_engine(
        generate, TARGET, SETTINGS, vocab_size=V, num_tokens=2, trials=trials, prompts=PROMPTS, **options
    )


def test_a_right_engine_passes() -> None:
    report = check(engine)
    assert report and report.broken == []
    report.assert_lossless()
    assert list(report.reports) == list(SETTINGS)
    # All the tests of all settings share the significance.
    assert report.reports["plain"].threshold == pytest.approx(1e-4 / (5 * 3))
    assert str(report).startswith("No bias seen in 5 settings.\n")


def without_top_k(params: list[SamplingParams]) -> list[SamplingParams]:
    return [SamplingParams(each.temperature, 0, each.top_p, each.min_p) for each in params]


# The settings that break, and the engine.
WRONG = {
    "parameters of the next row": (
        list(SETTINGS),
        lambda prompts, params, seeds: engine(prompts, [*params[1:], params[0]], seeds),
    ),
    "no top-k": (["top-k"], lambda prompts, params, seeds: engine(prompts, without_top_k(params), seeds)),
    "the first row's text for all prompts": (
        list(SETTINGS)[1:3] + list(SETTINGS)[4:],
        lambda prompts, params, seeds: engine([prompts[0]] * len(prompts), params, seeds),
    ),
    "rows in the order in which they end": (list(SETTINGS), lambda *each: sorted(engine(*each))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_engine_is_caught(name: str) -> None:
    settings, generate = WRONG[name]
    report = check(generate, trials=500)
    assert not report and report.broken == settings
    with pytest.raises(AssertionError, match=f"Not the target's law: {'; '.join(settings)} \\({len(settings)} of 5"):
        report.assert_lossless()


def test_texts_that_end_early() -> None:
    """At token 2, with lists of other lengths."""

    def generate(prompts: Prompts, params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
        return [row[: row.index(2) + 1] if 2 in row else row for row in engine(prompts, params, seeds)]

    report = check(generate)
    report.assert_lossless()
    assert report.reports["plain"].tests[1].emitted < 1
    # All texts of a call may end early, but not those of all calls.
    alone = {"settings": {"plain": SamplingParams()}, "vocab_size": V, "trials": 100, "batch_size": 1}
    for kind in (list, torch.tensor):
        check_engine(lambda *each, kind=kind: kind(generate(*each)), TARGET, num_tokens=2, **alone).assert_lossless()


def test_calls() -> None:
    """Every call has all settings in turn, and the same seed gives the same requests."""
    calls, progress = [], []

    def generate(prompts: Prompts, params: list[SamplingParams], seeds: list[int]) -> Tensor:
        calls.append((prompts, params, seeds))
        return torch.tensor(engine(prompts, params, seeds))

    check(generate, trials=100, batch_size=40, progress=lambda *at: progress.append(at))
    assert progress == [(200, 500), (400, 500), (500, 500)]
    for prompts, params, seeds in calls:
        assert prompts[:5] == [list(PROMPTS[i]) for i in (0, 1, 2, 0, 1)]
        assert params == list(SETTINGS.values()) * (len(params) // 5)
        assert len(prompts) == len(params) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    assert len({seed for call in calls for seed in call[2]}) == 500
    first = [call[2] for call in calls]
    calls.clear()
    check(generate, trials=100, batch_size=100)
    assert calls[0][2] == [seed for seeds in first for seed in seeds]


BAD_ARGUMENTS = [
    (ValueError, "settings: expected a name and a SamplingParams", {"settings": {}}),
    (TypeError, "settings: expected a SamplingParams for 'a', got", {"settings": {"a": {"top_k": 1}}}),
    (TypeError, "as top_k of 'a', got <class 'list'>", {"settings": {"a": SamplingParams(top_k=[1, 2])}}),
    (ValueError, "temperature, .* got presence_penalty", {"settings": {"a": SamplingParams(presence_penalty=0.5)}}),
    (ValueError, "prompts: expected at least one", {"prompts": ()}),
    (ValueError, r"prompt: expected tokens in \[0, 6\)", {"prompts": ((1, 6),)}),
]
BAD_ROWS = [
    (ValueError, r"expected tokens \[500, >= 2\], got \[499, 2\]", lambda *each: engine(*each)[1:]),
    (ValueError, "expected at least one token in every row", lambda *each: [[], *engine(*each)[1:]]),
    (ValueError, "expected 2 tokens unless a text ended", lambda *each: [row[:1] for row in engine(*each)]),
    (TypeError, "expected tokens as an integer tensor", lambda *each: torch.zeros(500, 2)),
]


def test_bad_arguments_and_rows() -> None:
    fixed = {"generate": lambda prompts, params, seeds: engine(prompts, params, [7]), "batch_size": 50}
    calls = [*BAD_ARGUMENTS, (ValueError, "generate: expected new random numbers in every call", fixed)]
    calls += [(error, f"generate: {message}", {"generate": generate}) for error, message, generate in BAD_ROWS]
    arguments = {"generate": engine, "target": TARGET, "settings": SETTINGS, "prompts": PROMPTS}
    for error, message, options in calls:
        with pytest.raises(error, match=message):
            check_engine(**arguments | {"vocab_size": V, "num_tokens": 2, "trials": 100} | options)


def by_seed(prompts: Prompts, params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
    """An engine whose text depends on request and seed alone."""
    return [engine([prompt], [each], [seed])[0] for prompt, each, seed in zip(prompts, params, seeds, strict=True)]


def test_check_engine_needs_texts_by_seed() -> None:
    report = check(by_seed, trials=100, same_text_as=by_seed)
    assert report and report.num_changed == dict.fromkeys(SETTINGS, 0)
    assert "Texts that change with the way they are made: none." in str(report)
    # Here a row's numbers depend on its place in the batch. Greedy text does not.
    report = check(engine, trials=100, same_text_as=engine)
    assert report.broken == list(SETTINGS)[:-1] and min(report.num_changed[name] for name in report.broken) > 50
    assert str(report).startswith("Not the same text: plain; cold top-p; top-k; min-p (4 of 5 settings).")
    for wrong, error in ((3, "a function as generate is, or None, got <class 'int'>"), (len, "lists of tokens")):
        with pytest.raises(TypeError, match=f"^same_text_as: expected {error}"):
            check(by_seed, trials=100, same_text_as=(lambda *given: len(given)) if wrong is len else wrong)
    with pytest.raises(ValueError, match=r"^same_text_as: expected tokens \[500, >= 2\], got \[499, 2\]"):
        check(by_seed, trials=100, same_text_as=lambda *given: by_seed(*given)[1:])


def ended_by_zero(mark: int, shift: int = 0) -> Callable[..., list[list[int]]]:
    """`by_seed` whose texts end after a token 0, which the mark says; the plain setting has seeds of its own."""

    def generate(prompts: Prompts, params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
        own = [seed + shift * (each == SETTINGS["plain"]) for each, seed in zip(params, seeds, strict=True)]
        return [[0, mark] if row[0] == 0 else row for row in by_seed(prompts, params, own)]

    return generate


def test_check_engine_settings_and_law() -> None:
    """Any negative number ends a text. Without a second token after 0, no law of the two is the target's."""
    report = check(ended_by_zero(-1), trials=100, same_text_as=ended_by_zero(-100))
    assert report.num_changed == dict.fromkeys(SETTINGS, 0)
    report = check(by_seed, trials=100, same_text_as=ended_by_zero(-1, shift=1))
    assert str(report).startswith("Not the same text: plain;")

    def forgets_temperature(prompts: Prompts, params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
        cold = SETTINGS["cold top-p"]
        return by_seed(prompts, [SamplingParams() if each == cold else each for each in params], seeds)

    report = check(forgets_temperature, trials=500, same_text_as=forgets_temperature)
    assert str(report).startswith("Not the target's law: cold top-p (1 of 5 settings).\n\n")
    mixed = check(forgets_temperature, trials=500, same_text_as=ended_by_zero(-1, shift=1))
    assert str(mixed).startswith("Not the target's law: cold top-p (1 of 5 settings).\nNot the same text: plain; cold")
