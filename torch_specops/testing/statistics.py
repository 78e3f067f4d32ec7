"""Pearson's chi-square test and its power, without scipy: float64 sums and bisection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .report import CONFIDENCE, LawTest

# For each position t, [V ** t, V] float64: the distribution of the token at t after each possible sequence of t tokens.
Laws = list[Tensor]
# A cell needs at least this expected count, because the chi-square approximation is poor for smaller counts.
MIN_EXPECTED = 10.0


def count_texts(tokens: Tensor, laws: Laws, generator: torch.Generator) -> list[Tensor]:
    """Count the tokens of sequences [N, T]. For each position t it returns counts [V ** t, V] of the emitted tokens (>=
    0), for each sequence of tokens before them. The last element has counts [V ** T] of whole sequences, whose missing
    tokens are drawn from the laws. A sequence y_0 y_1 .. has as its index the number with these digits in base V."""
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
    """Test the counts of `count_texts`. Returns a test for each position, of the token given the tokens before it, and
    then the joint test."""
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
    """Test whether each row of counts [.., C] is a sample from its row of `law`, given the size of each sample."""
    counts = counts.double()
    sizes = counts.sum(-1, keepdim=True)
    # Avoid a division by zero if no trial reached the position.
    trials = max(int(sizes.sum()), 1)
    expected = sizes * law
    impossible = int(counts[law == 0].sum())
    statistic, dof, pooled = pearson_statistic(counts, expected, MIN_EXPECTED)
    statistic = math.inf if impossible else statistic
    effect = detectable_effect(dof, threshold, trials, CONFIDENCE)
    # If the target emits one token with certainty, any other token is detected. With a bias of TV, another token occurs
    # with probability 1 - (1 - TV)**trials.
    is_certain = dof == 0 and pooled == 0 and int(sizes.sum()) > 0
    visible = 1 - (1 - CONFIDENCE) ** (1 / trials) if is_certain else min(effect / 2, 1.0)
    distance = float((counts - expected).abs().sum()) / 2 / trials
    by_chance = float(mean_absolute_deviation(sizes, law).sum()) / 2 / trials
    # McDiarmid's inequality: one trial changes the distance by at most 1 / trials, and the mean distance is at least
    # the distance between the loop's and the target's distribution.
    bound = min(distance + math.sqrt(-math.log(1 - CONFIDENCE) / (2 * trials)), 1.0)
    numbers = (statistic, dof, chi_square_tail(statistic, dof), effect, visible, pooled / trials, impossible)
    return LawTest(position, distance, by_chance, bound, *numbers)


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of Pearson's chi-square test that `counts` were drawn from `probabilities`.

    Args:
        counts: [N], the number of times that each outcome occurred.
        probabilities: [N] float64 with sum 1. Outcomes expected fewer than 5 times are merged into one bin. If the bin
            is still expected fewer than 5 times, the rarest other outcome is merged into it. If an outcome of
            probability zero occurred, the p-value is 0.0.

    Raises:
        ValueError: the shapes differ, or the sum of the probabilities is not 1.

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
    """The temperature T that maximises the likelihood of the counts, if the logits of `law` are divided by T. Returns 0
    if only the most likely outcome occurred, and None if the counts do not fit the law at any temperature.

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

    # The likelihood is largest at the T for which the mean logit under the distribution equals the mean logit of the
    # counts. The mean increases with 1 / T, so bisect.
    inverse = _solve(lambda value: value > 1e6 or mean(at(value)) >= mean(counts))
    fits = inverse > 1e-6 and chi_square(counts, at(inverse)) > 1 - CONFIDENCE
    return 1 / inverse if fits else None


def pearson_statistic(counts: Tensor, expected: Tensor, min_expected: float) -> tuple[float, int, float]:
    """The chi-square statistic of rows of counts, its degrees of freedom, and the expected number of outcomes in pooled
    cells.

    In each row, the cells expected fewer than `min_expected` times are pooled into one cell. If that cell is still too
    small, the next larger cell is added. A row with only one cell left is not tested. Pooling depends on the sizes of
    the rows, but not on the counts in them.
    """
    expected, order = expected.sort(-1)
    frequent = expected >= min_expected
    small = (expected * ~frequent).sum(-1, keepdim=True)
    # The cell that is added to a pooled cell is the smallest frequent one. Cells are in ascending order, so it is the
    # first.
    is_next = frequent & (frequent.cumsum(-1) == 1)
    pooled = (expected > 0) & (~frequent | (is_next & (small > 0) & (small < min_expected)))

    def merged(row: Tensor) -> Tensor:
        return torch.cat([row * ~pooled, (row * pooled).sum(-1, keepdim=True)], -1)

    counts, cells = merged(counts.gather(-1, order)), merged(expected)
    dof = ((cells > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    terms = torch.where((cells > 0) & (dof > 0), (counts - cells) ** 2 / cells, 0.0)
    # Do not count a pooled cell with a single member, which is the only possible outcome of its row.
    num_pooled = float(cells[..., -1][pooled.sum(-1) > 1].sum())
    return float(terms.sum()), int(dof.sum()), num_pooled


def chi_square_tail(statistic: float, dof: int, noncentrality: float = 0.0) -> float:
    """P(X >= statistic) for X with a noncentral chi-square distribution. This is a mixture of chi-square distributions
    with dof + 2 j degrees of freedom, where j has a Poisson distribution with mean noncentrality / 2. With dof 0, X is
    0."""
    if dof == 0:
        return float(statistic <= 0)
    mean = noncentrality / 2
    # Beyond 12 standard deviations, Poisson weights are below the resolution of float64. Add 60, because for small
    # means 12 standard deviations are too few terms.
    reach = 12 * math.sqrt(mean) + 60 if mean > 0 else 0
    j = torch.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach) + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(torch.special.xlogy(j, mean) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(dof / 2 + j, torch.full_like(j, statistic / 2))
    return float((weights * tails).sum())


def critical_value(dof: int, significance: float) -> float:
    """The value that a chi-square variable exceeds with probability `significance`."""
    return _solve(lambda statistic: chi_square_tail(statistic, dof) <= significance)


def detectable_effect(dof: int, significance: float, trials: int, power: float) -> float:
    """The smallest effect w that a test of p detects with probability `power`; infinite for dof 0.

    The effect of counts drawn from r is defined by w**2 = sum (r - p)**2 / p, and the statistic then has noncentrality
    trials * w**2. By the inequality of Cauchy and Schwarz, 2 TV = sum |r - p| <= w. Therefore every r whose total
    variation from p is at least w / 2 is detected with at least this probability."""
    if dof == 0:
        return math.inf
    critical = critical_value(dof, significance)
    return math.sqrt(_solve(lambda value: chi_square_tail(critical, dof, value) >= power) / trials)


def mean_absolute_deviation(trials: Tensor, probabilities: Tensor) -> Tensor:
    """E|X - n p| for a binomial variable X. By De Moivre it is 2 (m + 1) C(n, m + 1) p**(m + 1) (1 - p)**(n - m) with m
    = floor(n p). `trials` (n) and `probabilities` (p) are float64 and broadcast."""
    m = torch.floor(trials * probabilities)
    log_choose = torch.lgamma(trials + 1) - torch.lgamma(m + 1) - torch.lgamma(trials - m)
    log_powers = torch.special.xlogy(m + 1, probabilities) + torch.special.xlog1py(trials - m, -probabilities)
    return 2 * torch.exp(log_choose + log_powers)


def _solve(holds: Callable[[float], bool]) -> float:
    """The smallest number >= 0 at which a monotone condition holds."""
    low, high = 0.0, 1.0
    while not holds(high):
        high *= 2
    # After 53 halvings, the interval is smaller than the resolution of float64.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
