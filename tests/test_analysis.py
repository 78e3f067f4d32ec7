"""The paper's formulas: closed forms, its printed numbers, simulation, and wrong formulas that each of these finds."""

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

import torch_specops
from torch_specops import reference
from torch_specops.analysis import (
    acceptance_probability,
    alpha_from_counts,
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
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


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


def test_limits() -> None:
    # Certain acceptance of free drafts is without bound; drafts as dear as the target gain nothing.
    assert oracle_walltime_factor(1.0, torch.tensor([0.0, 1.0, 3.0])).tolist() == [math.inf, 1.0, 1.0]


def printed(value: float, found: float) -> bool:
    """Whether a number with two decimals is this one, rounded."""
    return abs(found - value) <= 0.005 + 1e-12


def test_table_1() -> None:
    for alpha, gamma, operations, speed in TABLE_1:
        assert printed(operations, operations_factor(alpha, 0.0, gamma).item())
        assert printed(speed, walltime_factor(alpha, 0.0, gamma).item())


@pytest.mark.parametrize("off", [-1, 1])
def test_table_1_finds_a_wrong_formula(off: int) -> None:
    """One token more or less in the exponent, or one run of the target more or less."""
    for alpha, gamma, operations, speed in TABLE_1:
        assert not printed(speed, walltime_factor(alpha, 0.0, gamma + off).item())
        assert not printed(operations, (gamma + 1 + off) / expected_tokens_per_step(alpha, gamma).item())


def test_numbers_in_the_text() -> None:
    """Section 3.6: alpha 0.2 and gamma 3 give 1.25; appendix A.5: c = 0.015, gamma = 8, greedy with lenience."""
    assert round(walltime_factor(0.2, 0.0, 3).item(), 2) == 1.25
    factors = walltime_factor(torch.tensor([0.75, 0.75, 0.8, 0.87], dtype=torch.float64), 0.015, 8)
    assert [round(factor, 1) for factor in factors.tolist()] == [3.3, 3.3, 3.9, 4.9]


def test_the_oracle_gains_up_to_about_60_percent() -> None:
    """Section 3.5, over typical costs; the gain is the oracle's over the best constant K."""
    alpha = torch.linspace(0.3, 0.99, 500, dtype=torch.float64)
    cost = torch.tensor([0.01, 0.02, 0.05, 0.1, 0.2], dtype=torch.float64).unsqueeze(1)
    gain = oracle_walltime_factor(alpha, cost) / walltime_factor(alpha, cost, optimal_num_draft_tokens(alpha, cost))
    assert (gain >= 1).all()
    assert 0.5 < gain.amax().item() - 1 < 0.65


def simulated_steps(alpha: float, num_draft_tokens: int, num_steps: int = 200_000) -> Tensor:
    """[num_steps] accepted drafts, each draft reached accepted with probability alpha."""
    generator = torch.Generator().manual_seed(0)
    accepted = torch.rand(num_steps, num_draft_tokens, generator=generator, dtype=torch.float64) < alpha
    return accepted.long().cumprod(1).sum(1)


def z_score(samples: Tensor, expected: float) -> float:
    samples = samples.double()
    return abs(samples.mean().item() - expected) / (samples.std().item() / math.sqrt(len(samples)))


@pytest.mark.parametrize("cost", [0.05, 0.3])
def test_simulated_oracle(cost: float) -> None:
    """Steps whose K is the number of drafts that will be accepted: time 1 + c K for K + 1 tokens."""
    alpha = 0.8
    accepted = simulated_steps(alpha, 200, num_steps=50_000).double()
    speed = (accepted + 1).mean() / (accepted * cost + 1).mean()
    assert speed.item() == pytest.approx(oracle_walltime_factor(alpha, cost).item(), rel=0.01)
    # Free drafts, and one draft more than needed.
    assert speed.item() != pytest.approx(1 / (1 - alpha), rel=0.05)
    assert speed.item() != pytest.approx(1 / (1 - alpha + cost), rel=0.008)


rates = st.floats(0, 1)
costs = st.floats(0, 2)


@settings(deadline=None)
@given(alpha=rates, cost=costs, count=st.integers(0, 60))
def test_no_choice_of_k_beats_the_optimum_or_the_oracle(alpha: float, cost: float, count: int) -> None:
    best = optimal_num_draft_tokens(alpha, cost)
    found = walltime_factor(alpha, cost, best).item()
    assert found >= walltime_factor(alpha, cost, count).item() * (1 - 1e-12)
    assert oracle_walltime_factor(alpha, cost).item() >= found * (1 - 1e-12)
    # Corollary 3.9.
    assert (best > 0) == (alpha > cost)
    if best:
        assert found >= (1 + alpha) / (1 + cost) * (1 - 1e-12)


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


def overlap(target: Tensor, draft: Tensor, temperature: float, lenience: float) -> float:
    """By the oracle's laws, one token at a time."""
    laws = [reference.probabilities(row, temperature) for row in (target, draft)]
    return math.fsum(min(p / lenience, q) for p, q in zip(*(law.tolist() for law in laws), strict=True))


@settings(deadline=None)
@given(rows=two_rows, temperature=st.sampled_from([0.3, 1.0, 2.5]), lenience=st.floats(0.05, 1))
def test_acceptance_is_the_overlap_of_the_laws(
    rows: tuple[list[float], list[float]], temperature: float, lenience: float
) -> None:
    target, draft = (torch.tensor(row) for row in rows)
    found = acceptance_probability(target, draft, temperature, lenience).item()
    assert found == pytest.approx(overlap(target, draft, temperature, lenience), abs=1e-12)
    assert 0 <= found <= 1
    # Lemma 3.3 and theorem 3.5; the divergence is symmetric (corollary 3.4).
    beta = acceptance_probability(target, draft, temperature).item()
    assert divergence(target, draft, temperature).item() == pytest.approx(1 - beta, abs=1e-12)
    assert divergence(draft, target, temperature).item() == divergence(target, draft, temperature).item()
    # Leniency only adds; alpha grows by 1 / l at most.
    assert beta - 1e-12 <= found <= min(1.0, beta / lenience) + 1e-12


@settings(deadline=None)
@given(rows=two_rows, temperature=st.sampled_from([0.0, 0.7, 1.0]), lenience=st.floats(0.05, 1))
def test_over_tokens_of_the_draft_it_is_the_same(
    rows: tuple[list[float], list[float]], temperature: float, lenience: float
) -> None:
    """E over x drawn from q of min(1, p(x) / (l q(x))), summed over the whole vocabulary."""
    target, draft = (torch.tensor(row) for row in rows)
    tokens = torch.arange(len(target))
    accepted = token_acceptance_probability(target, tokens, draft, temperature, lenience, lenience)
    q = torch.zeros(len(target), dtype=torch.float64)
    if temperature > 0:
        q = reference.probabilities(draft, temperature)
    elif reference.argmax(draft) >= 0:
        q[reference.argmax(draft)] = 1.0
    expected = acceptance_probability(target, draft, temperature, lenience, lenience).item()
    assert (q * accepted).sum().item() == pytest.approx(expected, abs=1e-12)


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
    assert mixed[:2].tolist() == [1, 0]
    assert mixed[2].item() == pytest.approx(overlap(target[2], draft[2], 1.0, 0.5))
    assert token_acceptance_probability(target, torch.tensor([1, 0, 2]), draft, 0.0).tolist() == [1, 1, 0]


def test_argmax_lenience() -> None:
    """Appendix A.5 at temperature 0: the draft's argmax has e**-0.5 = 0.61 of the target's largest probability."""
    target, draft = torch.tensor([1.0, 0.0, 0.5, -math.inf]), torch.tensor([0.0, 0.0, 9.0, 1.0])
    found = [
        acceptance_probability(target, draft, 0.0, 1.0, lenience).item()
        for lenience in (1.0, 0.62, math.exp(-0.5), 0.1)
    ]
    assert found == [0, 0, 1, 1]
    tokens = torch.tensor([0, 1, 2, 3])
    assert token_acceptance_probability(target, tokens, None, 0.0, 1.0, 0.6).tolist() == [1, 0, 1, 0]
    # Sampled rows ignore it, as greedy rows ignore the other one.
    assert torch.equal(
        acceptance_probability(target, draft, 1.0, 1.0, 0.1), acceptance_probability(target, draft, 1.0, 1.0, 1.0)
    )


@pytest.mark.parametrize(("temperature", "lenience"), [(1.0, 1.0), (0.7, 0.4)])
def test_the_op_accepts_at_this_rate(temperature: float, lenience: float) -> None:
    generator = torch.Generator().manual_seed(1)
    trials, size = 100_000, 16
    target = 2 * torch.randn(size, generator=generator)
    draft = target + 1.5 * torch.randn(size, generator=generator)
    temperatures = torch.full((trials,), temperature)
    uniforms = torch.rand(3, trials, generator=generator)
    rows = draft.expand(trials, -1)
    tokens, lse = torch_specops.sample(rows, uniforms[0], temperatures)
    logits = target.expand(trials, 2, -1), tokens.unsqueeze(1), rows.unsqueeze(1)
    _, num_accepted = torch_specops.verify_exact(
        *logits, uniforms[1].unsqueeze(1), uniforms[2], temperatures, lse.unsqueeze(1), lenience
    )
    assert z_score(num_accepted, acceptance_probability(target, draft, temperature, lenience).item()) < 4
    accepted = token_acceptance_probability(target, tokens, rows, temperature, lenience)
    assert z_score(accepted, acceptance_probability(target, draft, temperature, lenience).item()) < 4
    p, q = ((row / temperature).double().softmax(0) for row in (target, draft))
    wrong = {
        "no temperature": overlap(target, draft, 1.0, lenience) if temperature != 1.0 else 0.0,
        "no lenience": overlap(target, draft, temperature, 1.0) if lenience != 1.0 else 0.0,
        "lenience on the wrong side": torch.minimum(p, q / lenience).sum().item() if lenience != 1.0 else 0.0,
        "Bhattacharyya": (p * q).sqrt().sum().item(),
        "same token": (p * q).sum().item(),
    }
    for name, value in wrong.items():
        assert z_score(num_accepted, value) > 5, name


def test_one_hot_drafts() -> None:
    target = torch.tensor([0.5, 0.3, 0.2]).log().expand(5, -1)
    tokens = torch.tensor([0, 1, 2, -1, 3])
    assert token_acceptance_probability(target, tokens).tolist() == pytest.approx([0.5, 0.3, 0.2, 0, 0])
    assert token_acceptance_probability(target, tokens, lenience=0.4).tolist() == pytest.approx([1, 0.75, 0.5, 0, 0])


def test_rows_without_a_law_accept_nothing() -> None:
    nothing, something = torch.full((3,), -math.inf), torch.zeros(3)
    for target, draft in ((nothing, something), (something, nothing), (nothing, nothing)):
        for temperature in (0.0, 1.0):
            assert acceptance_probability(target, draft, temperature).item() == 0
            assert acceptance_probability(target, draft, temperature, 0.5, 0.5).item() == 0
            assert divergence(target, draft, temperature).item() == 1
    assert token_acceptance_probability(nothing, torch.tensor(1), None, 0.0, 0.5, 0.5).item() == 0


def test_arithmetic_is_float64() -> None:
    target, draft = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = acceptance_probability(target, draft)
    assert found.dtype == torch.float64
    assert torch.equal(found, acceptance_probability(target.double(), draft.double()))
    assert expected_tokens_per_step(torch.tensor(0.5, dtype=torch.bfloat16), 2).item() == 1.75


def test_alpha_from_counts_is_what_was_simulated() -> None:
    alpha, count = 0.7, 5
    accepted = simulated_steps(alpha, count, num_steps=100_000)
    proposed = torch.full_like(accepted, count)
    tried = accepted + (accepted < count)
    error = math.sqrt(alpha * (1 - alpha) / tried.sum().item())
    assert abs(alpha_from_counts(accepted, proposed).item() - alpha) < 4 * error
    # What the loop calls its acceptance rate is another number.
    assert abs((accepted.sum() / proposed.sum()).item() - alpha) > 50 * error
    assert alpha_from_counts(torch.tensor([0]), torch.tensor([0])).isnan()


LOGITS, TOKENS = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
BAD: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ValueError, r"alpha: expected numbers in \[0, 1\]", lambda: expected_tokens_per_step(1.01, 2)),
    (ValueError, "alpha: ", lambda: walltime_factor(torch.tensor([0.5, math.nan]), 0.1, 2)),
    (TypeError, "alpha: expected a number", lambda: oracle_walltime_factor("0.5", 0.1)),  # type: ignore[arg-type]
    (TypeError, "alpha: ", lambda: expected_tokens_per_step(torch.tensor(True), 2)),
    (ValueError, "cost_ratio: expected finite numbers >= 0", lambda: walltime_factor(0.5, -0.1, 2)),
    (ValueError, "operations_ratio: ", lambda: operations_factor(0.5, math.nan, 2)),
    (ValueError, "memory_ratio: ", lambda: memory_access_factor(0.5, 2, -1.0)),
    (ValueError, "num_draft_tokens: expected finite numbers >= 0", lambda: walltime_factor(0.5, 0.1, -1)),
    (TypeError, "num_draft_tokens: expected integers", lambda: walltime_factor(0.5, 0.1, 2.0)),  # type: ignore[arg-type]
    (TypeError, "maximum: ", lambda: optimal_num_draft_tokens(0.5, 0.1, 2.0)),  # type: ignore[arg-type]
    (ValueError, "maximum: ", lambda: optimal_num_draft_tokens(0.5, 0.1, -1)),
    (ValueError, "alpha: expected shapes that broadcast", lambda: oracle_walltime_factor(torch.rand(2), torch.rand(3))),
    (TypeError, "target_logits: expected a floating-point", lambda: acceptance_probability(TOKENS, LOGITS)),
    (TypeError, "draft_logits: ", lambda: divergence(LOGITS, [0.0])),  # type: ignore[arg-type]
    (ValueError, r"draft_logits: expected the target's vocabulary, 4", lambda: divergence(LOGITS, LOGITS[:, :3])),
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
