"""The statistics of `check_lossless`: p-values are uniform if the law holds, and a bias that it calls visible is seen
as often as it says. Texts are drawn from known laws, without a loop.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from marks import slow
from torch import Tensor

from torch_specops.testing import LawTest, MarkovModel, chi_square, markov_pair, statistics
from torch_specops.testing.statistics import (
    chi_square_tail,
    critical_value,
    detectable_effect,
    mean_absolute_deviation,
    pearson_statistic,
)

V = 6
TARGET, _ = markov_pair(V)
SIGNIFICANCE = 1e-4


@pytest.fixture(autouse=True)
def cached_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """The visible bias is the same in each of many repetitions."""
    monkeypatch.setattr(statistics, "detectable_effect", lru_cache(maxsize=None)(detectable_effect))


def conditional_laws(bias: float = 0.0, positions: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
    """The laws of three tokens after the text 0, 1, some with probabilities changed by up to `bias` of themselves."""
    generator = torch.Generator().manual_seed(11)
    laws = []
    for position, logits in enumerate((TARGET.table[0, 1], TARGET.table[1, :V], TARGET.table[:V, :V])):
        p = torch.softmax(logits.double().view(-1, V), -1)
        signs = torch.randint(2, p.shape, generator=generator).double() * 2 - 1
        if position in positions:
            p = p * (1 + bias * (signs - (p * signs).sum(-1, keepdim=True)))
        laws.append(p)
    return laws


def joint_law(laws: list[Tensor]) -> Tensor:
    joint = torch.ones(1, dtype=torch.float64)
    for p in laws:
        joint = (joint.unsqueeze(-1) * p).flatten()
    return joint


def repeated_tests(laws: list[Tensor], trials: int, repetitions: int) -> list[tuple[LawTest, ...]]:
    """The tests of texts drawn from `laws` against the target's."""
    generator = np.random.default_rng(12)
    law = joint_law(laws).numpy()
    exact = conditional_laws()
    results = []
    for _ in range(repetitions):
        counts = torch.from_numpy(generator.multinomial(trials, law / law.sum()))
        by_position = [counts.view(V**t, V, -1).sum(-1) for t in range(3)]
        results.append(statistics.law_tests([*by_position, counts], exact, SIGNIFICANCE))
    return results


@pytest.mark.parametrize("trials", [2000, slow(40_000)])
def test_right_loop_has_uniform_p_values(trials: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    repetitions = 1000
    results = repeated_tests(conditional_laws(), trials, repetitions)
    for index in range(4):
        values = [tests[index].p_value for tests in results]
        assert stats.kstest(values, "uniform").pvalue > 1e-4
        # In the tail, which decides: at most as often as said, up to chance.
        assert sum(value < 0.01 for value in values) <= stats.binom.isf(1e-4, repetitions, 0.01)
        distances = torch.tensor([tests[index].total_variation for tests in results])
        by_chance = torch.tensor([tests[index].expected_total_variation for tests in results])
        assert abs(float((distances - by_chance).mean())) < 4 * float(distances.std()) / math.sqrt(repetitions)


@pytest.mark.parametrize("index", [slow(0), slow(2), 3])
def test_power_is_what_is_reported(index: int) -> None:
    """At the effect that the report calls visible, and at smaller ones by the noncentral law."""
    trials, repetitions = 40_000, 250
    exact = conditional_laws()
    reference = repeated_tests(exact, trials, 1)[0][index]
    positions = (0, 1, 2) if index == 3 else (index,)

    def effect(bias: float) -> float:
        biased = conditional_laws(bias, positions)
        if index == 3:
            joint, other = joint_law(exact), joint_law(biased)
            return math.sqrt(float(((other - joint) ** 2 / joint).sum()))
        before = joint_law(exact[:index])
        return math.sqrt(float((before * ((biased[index] - exact[index]) ** 2 / exact[index]).sum(-1)).sum()))

    for share in (1.0, 0.8, 0.6):
        goal = share * reference.detectable_effect
        # The effect is nearly proportional to the bias.
        bias = 0.1
        for _ in range(10):
            bias *= goal / effect(bias)
        biased = conditional_laws(bias, positions)
        assert effect(bias) == pytest.approx(goal)
        tests = [results[index] for results in repeated_tests(biased, trials, repetitions)]
        rate = sum(test.p_value < SIGNIFICANCE / 4 for test in tests) / repetitions
        expected = chi_square_tail(critical_value(reference.dof, SIGNIFICANCE / 4), reference.dof, trials * goal**2)
        # Four standard deviations, and what pooling of rare outcomes costs.
        assert abs(rate - expected) < 4 * math.sqrt(expected * (1 - expected) / repetitions) + 0.03, (rate, expected)
        if share == 1.0:
            assert expected == pytest.approx(0.99, abs=1e-4)
            assert rate >= 0.96
        # No bias of the visible total variation has a smaller effect.
        distance = float((joint_law(biased) - joint_law(exact)).abs().sum()) / 2
        if index in (0, 3):
            assert distance <= goal / 2 + 1e-12
            assert sum(distance <= test.total_variation_bound for test in tests) >= 0.97 * repetitions


def test_statistics_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for dof in (1, 5, 30, 400):
        for statistic in (0.1 * dof, dof, dof + 4 * math.sqrt(dof), 3.0 * dof):
            assert chi_square_tail(statistic, dof) == pytest.approx(stats.chi2.sf(statistic, dof), rel=1e-4)
            for noncentrality in (0.0, 0.5, 20.0, 2000.0):
                exact = stats.ncx2.sf(statistic, dof, noncentrality) if noncentrality else stats.chi2.sf(statistic, dof)
                assert chi_square_tail(statistic, dof, noncentrality) == pytest.approx(exact, rel=1e-4, abs=1e-9)
        critical = critical_value(dof, 2e-5)
        assert critical == pytest.approx(stats.chi2.isf(2e-5, dof), rel=1e-5)
        effect = detectable_effect(dof, 2e-5, 5000, 0.99)
        assert stats.ncx2.sf(critical, dof, 5000 * effect**2) == pytest.approx(0.99, abs=1e-6)
    assert detectable_effect(0, 2e-5, 5000, 0.99) == math.inf


def test_mean_absolute_deviation_by_summation() -> None:
    for n in (0, 1, 2, 7, 60):
        k = torch.arange(n + 1, dtype=torch.float64)
        log_choose = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
        for p in (0.0, 1e-12, 0.2, 0.5, 5 / 7, 1 - 1e-9, 1.0):
            p_tensor = torch.tensor(p, dtype=torch.float64)
            log_weights = log_choose + torch.special.xlogy(k, p_tensor) + torch.special.xlog1py(n - k, -p_tensor)
            expected = float((log_weights.exp() * (k - n * p).abs()).sum())
            got = mean_absolute_deviation(torch.tensor(float(n)).double(), p_tensor)
            assert float(got) == pytest.approx(expected, rel=1e-9, abs=1e-15)


# 5 expected in the last cell: it joins the next one. 15, 9 and 6: two are pooled, which is enough.
@pytest.mark.parametrize(
    "sizes, dof, pooled", [([1000], 3, 0), ([100], 2, 20), ([30], 1, 15), ([12], 0, 12), ([1000, 12], 3, 12)]
)
def test_rare_outcomes_are_pooled(sizes: list[int], dof: int, pooled: float) -> None:
    """Each row is pooled on its own: a large one keeps all its cells, a small one has few or only one, which tells
    nothing."""
    expected = torch.tensor(sizes).unsqueeze(-1) * torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]], dtype=torch.float64)
    assert pearson_statistic(expected, expected, 10.0) == (0.0, dof, pytest.approx(pooled))
    # A row's only possible outcome is not pooled, however rare.
    certain = torch.tensor([[5.0, 0.0]])
    assert pearson_statistic(certain, certain, 10.0) == (0.0, 0, 0.0)


def test_chi_square_of_impossible_counts() -> None:
    assert chi_square(torch.tensor([50, 49, 1]), torch.tensor([0.5, 0.5, 0.0])) == 0.0
    with pytest.raises(ValueError, match="probabilities: expected 2, as there are counts, got 3"):
        chi_square(torch.tensor([1, 2]), torch.ones(3) / 3)
    with pytest.raises(ValueError, match=r"probabilities: expected a sum of 1, got 1\.5"):
        chi_square(torch.tensor([1, 2]), torch.tensor([0.5, 1.0]))


def test_markov_models() -> None:
    tokens = torch.tensor([[2, 5, 1]])
    logits = TARGET(tokens)
    assert logits.shape == (1, 3, V)
    for index, context in enumerate([(V, 2), (2, 5), (5, 1)]):
        assert torch.equal(logits[0, index], TARGET.table[context])
    assert torch.equal(TARGET.next_logits(tokens)[0], TARGET.table[5, 1])
    assert torch.equal(TARGET.next_logits(tokens[:, :0])[0], TARGET.table[V, V])
    for vocab_size in (6, 11, 16):
        for seed in range(3):
            target, draft = (torch.softmax(m.table.double(), -1) for m in markov_pair(vocab_size, seed=seed))
            assert 0.5 < float(torch.minimum(target, draft).sum(-1).mean()) < 0.75
            assert float(target.min()) > 1e-5
    with pytest.raises(ValueError, match="order: expected a number >= 1"):
        markov_pair(order=0)
    with pytest.raises(TypeError, match="table: expected a floating point tensor"):
        MarkovModel(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="table: expected a shape of V or V \\+ 1"):
        MarkovModel(torch.zeros(5, 3))
