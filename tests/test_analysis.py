"""The paper's formulas: closed forms, its printed numbers, and the laws of the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import raised
from torch import Tensor

from torch_specops import reference
from torch_specops.analysis import (
    acceptance_probability,
    alpha_from_counts,
    coupled_acceptance_probability,
    divergence,
    expected_tokens_per_step,
    memory_access_factor,
    operations_factor,
    optimal_num_draft_tokens,
    oracle_walltime_factor,
    token_acceptance_probability,
    walltime_factor,
)

NEAR_ONE = 1 - 1e-9
ALPHAS = [Fraction(0), Fraction(1, 5), Fraction(4, 5), 1 - Fraction(1, 2**20), Fraction(NEAR_ONE), Fraction(1)]
COUNTS = [0, 1, 5, 20, 300]

# Leviathan et al. 2023, table 1: alpha, gamma, "operations", "speed".
TABLE_1 = [(0.6, 2, 1.53, 1.96), (0.8, 5, 1.63, 3.69), (0.9, 10, 1.60, 6.86)]


def tokens_of(alpha: Fraction, count: int) -> Fraction:
    """Equation 1 in exact arithmetic, as the sum that it is."""
    return sum((alpha**i for i in range(count + 1)), Fraction(0))


@pytest.mark.parametrize("alpha", ALPHAS, ids=float)
def test_closed_forms(alpha: Fraction) -> None:
    """Exact at 0 and 1 and accurate next to 1, where the textbook form loses every digit."""
    counts = torch.tensor(COUNTS)
    exact = [tokens_of(alpha, count) for count in COUNTS]
    c = Fraction(1, 8)

    def close(found: Tensor, expected: list[Fraction]) -> None:
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx([float(value) for value in expected], rel=1e-14)

    both = list(zip(exact, COUNTS, strict=True))
    close(expected_tokens_per_step(float(alpha), counts), exact)
    close(walltime_factor(float(alpha), 0.125, counts), [s / (k * c + 1) for s, k in both])
    close(operations_factor(float(alpha), 0.125, counts), [(k * c + k + 1) / s for s, k in both])
    close(memory_access_factor(float(alpha), counts, 0.125), [(k * c + 1) / s for s, k in both])
    close(memory_access_factor(float(alpha), counts), [1 / s for s in exact])
    close(oracle_walltime_factor(float(alpha), 0.125).unsqueeze(0), [1 / (1 - alpha + c * alpha)])

    # Certain acceptance of free drafts is without bound; drafts as dear as the target gain nothing.
    assert oracle_walltime_factor(1.0, torch.tensor([0.0, 1.0, 3.0])).tolist() == [math.inf, 1.0, 1.0]


def test_numbers_of_the_paper() -> None:
    """Rows of table 1, and section 3.5: the oracle gains up to about 60 percent over the best constant K."""
    for alpha, gamma, operations, speed in TABLE_1:
        assert round(operations_factor(alpha, 0.0, gamma).item(), 2) == operations
        assert round(walltime_factor(alpha, 0.0, gamma).item(), 2) == speed
    alpha = torch.linspace(0.3, 0.99, 500, dtype=torch.float64)
    cost = torch.tensor([0.01, 0.02, 0.05, 0.1, 0.2], dtype=torch.float64).unsqueeze(1)
    gain = oracle_walltime_factor(alpha, cost) / walltime_factor(alpha, cost, optimal_num_draft_tokens(alpha, cost))
    assert (gain >= 1).all()
    assert 0.5 < gain.amax().item() - 1 < 0.65


@pytest.mark.parametrize("cost", [Fraction(1, 50), Fraction(1, 2)])
def test_optimum_is_the_smallest_of_the_best(cost: Fraction) -> None:
    alphas = [Fraction(i, 20) for i in range(20)]
    expected = []
    for alpha in alphas:
        factors = [tokens_of(alpha, count) / (count * cost + 1) for count in range(60)]
        expected.append(factors.index(max(factors)))
    alpha = torch.tensor([float(value) for value in alphas], dtype=torch.float64)
    assert optimal_num_draft_tokens(alpha, float(cost)).tolist() == expected


def test_optimum_at_the_ends() -> None:
    ends = torch.tensor([0.0, 0.5, 1.0])
    assert optimal_num_draft_tokens(ends, 0.0, maximum=7).tolist() == [0, 7, 7]
    assert optimal_num_draft_tokens(ends, 0.5, maximum=7).tolist() == [0, 0, 7]
    assert optimal_num_draft_tokens(1.0, torch.tensor([1.0, 1.5]), maximum=7).tolist() == [0, 0]
    assert optimal_num_draft_tokens(0.9, 0.0, maximum=0).item() == 0
    # The power of alpha underflows.
    assert optimal_num_draft_tokens(0.01, 0.0, maximum=200).item() == 200


def test_arguments_broadcast() -> None:
    alpha, cost, count = torch.rand(4, 1, 1), torch.rand(3, 1), torch.tensor([1, 2, 5, 9, 12])
    table = walltime_factor(alpha, cost, count)
    assert table.shape == (4, 3, 5)
    assert table[2, 1, 3].item() == walltime_factor(alpha[2, 0, 0].item(), cost[1, 0].item(), 9).item()
    assert operations_factor(alpha, cost, count).shape == memory_access_factor(alpha, count, cost).shape == (4, 3, 5)
    assert optimal_num_draft_tokens(alpha[..., 0], cost[:, 0]).shape == (4, 3)
    assert oracle_walltime_factor(alpha, cost).shape == (4, 3, 1)
    assert expected_tokens_per_step(torch.empty(0), 3).shape == (0,)


# Acceptance.

logit = st.one_of(st.floats(-30, 30), st.sampled_from([-math.inf, math.nan, math.inf, 0.0, 3e38]))


two_rows = st.integers(1, 6).flatmap(
    lambda size: st.tuples(*(st.lists(logit, min_size=size, max_size=size) for _ in range(2)))
)


@settings(deadline=None)
@given(rows=two_rows, temperature=st.sampled_from([0.3, 1.0, 2.5]), lenience=st.floats(0.05, 1))
def test_acceptance_by_the_laws_of_the_oracle(
    rows: tuple[list[float], list[float]], temperature: float, lenience: float
) -> None:
    target, draft = (torch.tensor(row) for row in rows)
    laws = [reference.probabilities(row, temperature).tolist() for row in (target, draft)]
    both = list(zip(*laws, strict=True))
    of_tokens = token_acceptance_probability(target, torch.arange(len(target)), draft, temperature, lenience)
    assert of_tokens.tolist() == pytest.approx([min(1, p / lenience / q) if q > 0 else 0 for p, q in both], abs=1e-11)
    found = acceptance_probability(target, draft, temperature, lenience).item()
    assert found == pytest.approx(math.fsum(min(p / lenience, q) for p, q in both), abs=1e-12)
    assert 0 <= found <= 1
    # Lemma 3.3 and theorem 3.5; the divergence is symmetric (corollary 3.4).
    beta = acceptance_probability(target, draft, temperature).item()
    assert divergence(target, draft, temperature).item() == pytest.approx(1 - beta, abs=1e-12)
    assert divergence(draft, target, temperature).item() == divergence(target, draft, temperature).item()
    # Leniency only adds; alpha grows by 1 / l at most.
    assert beta - 1e-12 <= found <= min(1.0, beta / lenience) + 1e-12


@settings(deadline=None)
@given(rows=two_rows, temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_coupled_acceptance_by_its_formula(rows: tuple[list[float], list[float]], temperature: float) -> None:
    target, draft = (torch.tensor(row) for row in rows)
    found = coupled_acceptance_probability(target, draft, temperature).item()
    if temperature > 0:
        p, q = (reference.probabilities(row, temperature).tolist() for row in (target, draft))
        expected = math.fsum(
            1 / math.fsum(max(p[w] / p[v], q[w] / q[v]) for w in range(len(p)))
            for v in range(len(p))
            if min(p[v], q[v]) > 1e-290
        )
        assert found == pytest.approx(expected, abs=1e-9)
    # The bounds of Daliri et al. 2024; both are 1 for equal rows.
    beta = acceptance_probability(target, draft, temperature).item()
    assert beta / (2 - beta) - 1e-9 <= found <= beta + 1e-9
    assert coupled_acceptance_probability(draft, target, temperature).item() == pytest.approx(found, abs=1e-9)


def test_divergence_keeps_its_digits() -> None:
    """Where p and q all but agree, 1 - alpha is rounding; the sum is not."""
    step = 2.0**-40
    target = torch.zeros(2, dtype=torch.float64)
    draft = torch.tensor([0.0, 4 * step], dtype=torch.float64)
    assert divergence(target, draft).item() == pytest.approx(step, rel=1e-3)
    assert divergence(target, target).item() == 0


def test_temperature_zero() -> None:
    """One-hot at the lowest index of the maximum, row by row."""
    target = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.5], [1.0, 0.0, 0.5]])
    draft = torch.tensor([[-1.0, 5.0, 5.0], [0.0, 0.0, 9.0], [0.0, 0.0, 9.0]])
    at_zero = acceptance_probability(target, draft, temperature=0.0)
    assert at_zero.tolist() == [1, 0, 0]
    mixed = acceptance_probability(target, draft, torch.tensor([0.0, 0.0, 1.0]), lenience=0.5)
    assert mixed.tolist() == [1, 0, acceptance_probability(target[2], draft[2], lenience=0.5).item()]
    assert token_acceptance_probability(target, torch.tensor([1, 0, 2]), draft, 0.0).tolist() == [1, 1, 0]


def test_argmax_lenience() -> None:
    """Appendix A.5 at temperature 0: the draft's argmax has e**-0.5 = 0.61 of the target's largest probability."""
    target, draft = torch.tensor([1.0, 0.0, 0.5, -math.inf]), torch.tensor([0.0, 0.0, 9.0, 1.0])
    for lenience, expected in ((1.0, 0), (0.62, 0), (math.exp(-0.5), 1), (0.1, 1)):
        assert acceptance_probability(target, draft, 0.0, 1.0, lenience).item() == expected
    tokens = torch.tensor([0, 1, 2, 3])
    assert token_acceptance_probability(target, tokens, None, 0.0, 1.0, 0.6).tolist() == [1, 0, 1, 0]
    # Sampled rows ignore it, as greedy rows ignore the other one.
    sampled = [acceptance_probability(target, draft, 1.0, 1.0, lenience).item() for lenience in (0.1, 1.0)]
    assert sampled[0] == sampled[1]


def test_one_hot_drafts() -> None:
    target = torch.tensor([0.5, 0.3, 0.2]).log().expand(5, -1)
    tokens = torch.tensor([0, 1, 2, -1, 3])
    assert token_acceptance_probability(target, tokens).tolist() == pytest.approx([0.5, 0.3, 0.2, 0, 0])
    assert token_acceptance_probability(target, tokens, lenience=0.4).tolist() == pytest.approx([1, 0.75, 0.5, 0, 0])


def test_rows_without_a_law_accept_nothing() -> None:
    nothing, something = torch.full((3,), -math.inf), torch.zeros(3)
    for target, draft in ((nothing, something), (something, nothing), (nothing, nothing)):
        for temperature in (0.0, 1.0):
            assert acceptance_probability(target, draft, temperature, 0.5, 0.5).item() == 0
            assert divergence(target, draft, temperature).item() == 1
    assert token_acceptance_probability(nothing, torch.tensor(1), None, 0.0, 0.5, 0.5).item() == 0


def test_simulated_steps() -> None:
    alpha, count = 0.7, 5
    drafts = torch.rand(100_000, count, generator=torch.Generator().manual_seed(0)) < alpha
    accepted = drafts.long().cumprod(1).sum(1)
    proposed = torch.full_like(accepted, count)
    assert alpha_from_counts(accepted, proposed).item() == pytest.approx(alpha, abs=0.005)
    assert alpha_from_counts(torch.tensor([0]), torch.tensor([0])).isnan()
    tokens = (accepted + 1).double().mean().item()
    assert tokens == pytest.approx(expected_tokens_per_step(alpha, count).item(), rel=0.01)


LOGITS, TOKENS = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
BAD: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, r"alpha: expected numbers in \[0, 1\]", lambda: expected_tokens_per_step(1.01, 2)),
    (ValueError, "alpha: ", lambda: walltime_factor(torch.tensor([0.5, math.nan]), 0.1, 2)),
    (TypeError, "alpha: expected a number", lambda: oracle_walltime_factor("0.5", 0.1)),  # type: ignore[arg-type]
    (TypeError, "alpha: ", lambda: expected_tokens_per_step(torch.tensor(True), 2)),
    (ValueError, "cost_ratio: expected finite numbers >= 0", lambda: walltime_factor(0.5, -0.1, 2)),
    (ValueError, "operations_ratio: ", lambda: operations_factor(0.5, math.nan, 2)),
    (ValueError, "memory_ratio: ", lambda: memory_access_factor(0.5, 2, math.inf)),
    (ValueError, "num_draft_tokens: expected finite numbers >= 0", lambda: walltime_factor(0.5, 0.1, -1)),
    (TypeError, "num_draft_tokens: expected integers", lambda: walltime_factor(0.5, 0.1, 2.0)),  # type: ignore[arg-type]
    (TypeError, "maximum: ", lambda: optimal_num_draft_tokens(0.5, 0.1, 2.0)),  # type: ignore[arg-type]
    (ValueError, "maximum: ", lambda: optimal_num_draft_tokens(0.5, 0.1, -1)),
    (ValueError, "cost_ratio: expected a shape", lambda: oracle_walltime_factor(torch.rand(2), torch.rand(3))),
    (TypeError, "target_logits: expected a floating-point", lambda: acceptance_probability(TOKENS, LOGITS)),
    (TypeError, "draft_logits: ", lambda: divergence(LOGITS, [0.0])),  # type: ignore[arg-type]
    (ValueError, r"draft_logits: expected the target's vocabulary, 4", lambda: divergence(LOGITS, LOGITS[:, :1])),
    (ValueError, "draft_logits: expected a shape", lambda: acceptance_probability(LOGITS, torch.zeros(3, 4))),
    (ValueError, "target_logits: expected", lambda: divergence(torch.zeros(2, 0), torch.zeros(2, 0))),
    (ValueError, "temperature: expected finite", lambda: acceptance_probability(LOGITS, LOGITS, -1.0)),
    (ValueError, "temperature: expected a shape", lambda: divergence(LOGITS, LOGITS, torch.ones(3))),
    (ValueError, r"lenience: expected a number in \(0, 1\]", lambda: acceptance_probability(LOGITS, LOGITS, 1.0, 0.0)),
    (TypeError, "lenience: ", lambda: acceptance_probability(LOGITS, LOGITS, 1.0, "1")),  # type: ignore[arg-type]
    (ValueError, "argmax_lenience: ", lambda: token_acceptance_probability(LOGITS, TOKENS, None, 0.0, 1.0, 1.5)),
    (TypeError, "draft_tokens: ", lambda: token_acceptance_probability(LOGITS, LOGITS[:, 0])),
    (ValueError, "draft_tokens: ", lambda: token_acceptance_probability(LOGITS, TOKENS.repeat(2)[:3])),
    (TypeError, "num_accepted: ", lambda: alpha_from_counts(torch.rand(2), TOKENS)),
    (ValueError, "num_proposed: expected the shape", lambda: alpha_from_counts(TOKENS, TOKENS[:1])),
    (ValueError, "num_accepted: expected counts", lambda: alpha_from_counts(TOKENS + 1, TOKENS)),
]


def test_errors_name_the_argument() -> None:
    cases = [(call, error, message) for error, message, call in BAD]
    assert raised(lambda call: call(), cases) == []
