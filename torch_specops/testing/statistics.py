"""Pearson's chi-square test and its power, without scipy: float64 sums and bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .report import CONFIDENCE, LawTest

# For each position t, the laws [V ** t, V] of the token there after each sequence of t tokens, float64.
Laws = list[Tensor]
# With fewer expected outcomes in a cell, the chi-square approximation is poor.
MIN_EXPECTED = 10.0


def count_texts(tokens: Tensor, laws: Laws, generator: torch.Generator) -> list[Tensor]:
    """Count sequences [N, T]: for each position t, [V ** t, V] counts of the tokens emitted there (>= 0) by the tokens
    before them; then [V ** T] counts of whole sequences, whose missing tokens are drawn from the laws. A sequence y_0
    y_1 .. is indexed as a number in base V."""
    index = torch.zeros(len(tokens), dtype=torch.int64, device="cpu")
    uniforms = torch.rand(tokens.shape, generator=generator, dtype=torch.float64, device="cpu")
    counts = []
    for token, law, numbers in zip(tokens.unbind(1), laws, uniforms.unbind(1), strict=True):
        missing = token < 0
        cumulative = law[index[missing]].cumsum(-1)
        drawn = (cumulative <= numbers[missing].unsqueeze(-1) * cumulative[:, -1:]).sum(-1)
        index = index * law.shape[1] + token.masked_scatter(missing, drawn)
        counts.append(torch.bincount(index[~missing], minlength=law.numel()).view_as(law))
    return [*counts, torch.bincount(index, minlength=laws[-1].numel())]


def law_tests(counts: list[Tensor], laws: Laws, significance: float, draft: Laws | None = None) -> tuple[LawTest, ...]:
    """One test for each position, of the tokens given the tokens before them, then the joint test; see
    `count_texts`."""
    threshold, trials = significance / len(counts), int(counts[-1].sum())
    before = torch.ones(1, dtype=torch.float64, device="cpu")
    tests = []
    for position, law in enumerate(laws):
        overlap = None if draft is None else float((before * torch.minimum(law, draft[position]).sum(-1)).sum())
        test = _test(position, counts[position], law, threshold)
        tests.append(replace(test, emitted=int(counts[position].sum()) / trials, overlap=overlap))
        before = (before.unsqueeze(-1) * law).flatten()
    return (*tests, _test(None, counts[-1], before, threshold))


def _test(position: int | None, counts: Tensor, law: Tensor, threshold: float) -> LawTest:
    """The test that each row of counts [.., C] is a sample from its row of `law`, given the size of each sample."""
    counts = counts.double()
    sizes = counts.sum(-1, keepdim=True)
    # Avoid a division by zero if no trial reached the position.
    trials = max(int(sizes.sum()), 1)
    expected = sizes * law
    impossible = int(counts[law == 0].sum())
    statistic, dof, pooled = pearson_statistic(counts, expected, MIN_EXPECTED)
    statistic = math.inf if impossible else statistic
    effect = detectable_effect(dof, threshold, trials, CONFIDENCE)
    # If the law is certain, any other token is detected, and one occurs with probability 1 - (1 - TV)**trials.
    is_certain = dof == 0 and pooled == 0 and int(sizes.sum()) > 0
    visible = 1 - (1 - CONFIDENCE) ** (1 / trials) if is_certain else min(effect / 2, 1.0)
    distance = float((counts - expected).abs().sum()) / 2 / trials
    by_chance = float(mean_absolute_deviation(sizes, law).sum()) / 2 / trials
    # One trial moves the distance by at most 1 / trials, and the mean distance is at least that of the loop's law.
    bound = min(distance + math.sqrt(-math.log(1 - CONFIDENCE) / (2 * trials)), 1.0)
    numbers = (statistic, dof, chi_square_tail(statistic, dof), effect, visible, pooled / trials, impossible)
    return LawTest(position, distance, by_chance, bound, *numbers)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of Pearson's chi-square test that `counts` were drawn from `probabilities`.

    Args:
        counts: [N] how often each outcome occurred.
        probabilities: [N] float64, summing to 1. Outcomes expected fewer than 5 times are merged into one bin (with
            the rarest other outcome if they still are too few). A count where the probability is zero gives 0.0.

    Raises:
        ValueError: shapes that differ, probabilities whose sum is not 1.

    Examples:
        >>> import torch
        >>> from torch_specops.testing import chi_square
        >>> round(chi_square(torch.tensor([48, 52]), torch.tensor([0.5, 0.5])), 4)
        0.6892
    """
    counts, probabilities = counts.double().flatten(), probabilities.double().flatten()
    if counts.shape != probabilities.shape:
        raise ValueError(f"probabilities: expected {len(counts)}, as there are counts, got {len(probabilities)}")
    total = float(probabilities.sum())
    if not abs(total - 1) < 1e-6:
        raise ValueError(f"probabilities: expected a sum of 1, got {total:g}")
    if (counts[probabilities == 0] > 0).any():
        return 0.0
    statistic, dof, _ = pearson_statistic(counts, probabilities * counts.sum(), 5.0)
    return chi_square_tail(statistic, dof)


def fitting_temperature(counts: Tensor, law: Tensor) -> float | None:
    """The temperature T that maximises the likelihood of the counts, with the law's logits divided by T; 0 if only the
    most likely outcome occurred; None if the counts do not fit the law at that temperature either.

    Args:
        counts: [V].
        law: [V] float64.
    """
    counts, logits = counts.double(), law.log()
    if bool((counts[law == 0] > 0).any()):
        return None
    if float(counts[law == law.max()].sum()) == float(counts.sum()):
        return 0.0
    possible = law > 0

    def at(inverse: float) -> Tensor:
        return torch.softmax(torch.where(possible, logits * inverse, -math.inf), -1)

    def mean(weights: Tensor) -> float:
        return float((weights * logits)[possible].sum() / weights.sum())

    # The likelihood is greatest where the mean log-probability equals that of the counts; the mean grows with 1 / T.
    inverse = _solve(lambda value: value > 1e6 or mean(at(value)) >= mean(counts))
    fits = inverse > 1e-6 and chi_square(counts, at(inverse)) > 1 - CONFIDENCE
    return 1 / inverse if fits else None


def pearson_statistic(counts: Tensor, expected: Tensor, min_expected: float) -> tuple[float, int, float]:
    """Chi-square of rows of counts, its degrees of freedom, and the expected number of outcomes in pooled cells.

    In each row the cells below `min_expected` are pooled into one, with the next larger if that is still too small.
    A row that ends up as one cell is not tested. Pooling depends on the sizes of the rows, not on the counts.
    """
    expected, order = expected.sort(-1)
    frequent = expected >= min_expected
    small = (expected * ~frequent).sum(-1, keepdim=True)
    # Ascending order: the first frequent cell comes next.
    is_next = frequent & (frequent.cumsum(-1) == 1)
    pooled = (expected > 0) & (~frequent | (is_next & (small > 0) & (small < min_expected)))

    def merged(row: Tensor) -> Tensor:
        return torch.cat([row * ~pooled, (row * pooled).sum(-1, keepdim=True)], -1)

    counts, cells = merged(counts.gather(-1, order)), merged(expected)
    dof = ((cells > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    terms = torch.where((cells > 0) & (dof > 0), (counts - cells) ** 2 / cells, 0.0)
    # A cell that is the only possible outcome of a row was not pooled.
    num_pooled = float(cells[..., -1][pooled.sum(-1) > 1].sum())
    return float(terms.sum()), int(dof.sum()), num_pooled


def chi_square_tail(statistic: float, dof: int, noncentrality: float = 0.0) -> float:
    """P(X >= statistic) for X with a noncentral chi-square law: chi-square laws with dof + 2 j degrees of freedom,
    weighted by a Poisson law of mean noncentrality / 2 over j. With dof 0, X is 0."""
    if dof == 0:
        return float(statistic <= 0)
    mean = noncentrality / 2
    # Beyond 12 standard deviations a Poisson weight is below float64's resolution; the 60 are for small means.
    reach = 12 * math.sqrt(mean) + 60 if mean > 0 else 0
    j = torch.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach) + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(torch.special.xlogy(j, mean) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(dof / 2 + j, torch.full_like(j, statistic / 2))
    return float((weights * tails).sum())


def critical_value(dof: int, significance: float) -> float:
    """The statistic that a chi-square law exceeds with probability `significance`."""
    return _solve(lambda statistic: chi_square_tail(statistic, dof) <= significance)


def detectable_effect(dof: int, significance: float, trials: int, power: float) -> float:
    """The smallest effect w, w**2 = sum (r - p)**2 / p for counts drawn from r, that a test of p with that significance
    rejects with probability `power`: the statistic has noncentrality trials * w**2. Infinite for dof 0. Since 2 TV =
    sum |r - p| <= w (Cauchy and Schwarz), every r whose total variation from p is at least w / 2 is detected with at
    least that probability."""
    if dof == 0:
        return math.inf
    critical = critical_value(dof, significance)
    return math.sqrt(_solve(lambda value: chi_square_tail(critical, dof, value) >= power) / trials)


def mean_absolute_deviation(trials: Tensor, probabilities: Tensor) -> Tensor:
    """E|X - n p| for binomial X: 2 (m + 1) C(n, m + 1) p**(m + 1) (1 - p)**(n - m), m = floor(n p) (De Moivre).
    `trials` (n) and `probabilities` (p) are float64 and broadcast."""
    m = torch.floor(trials * probabilities)
    log_choose = torch.lgamma(trials + 1) - torch.lgamma(m + 1) - torch.lgamma(trials - m)
    log_powers = torch.special.xlogy(m + 1, probabilities) + torch.special.xlog1py(trials - m, -probabilities)
    return 2 * torch.exp(log_choose + log_powers)


def _solve(holds: Callable[[float], bool]) -> float:
    """The smallest number >= 0 at which a monotone condition holds."""
    low, high = 0.0, 1.0
    while not holds(high):
        high *= 2
    # After 53 halvings the interval is below float64's resolution.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
