"""What a chi-square test of a given size can detect, without scipy: float64 sums and bisection."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def chi_square_tail(statistic: float, dof: int) -> float:
    """P(X >= statistic) for X with a chi-square law; without degrees of freedom X is 0."""
    if dof == 0:
        return float(statistic <= 0)
    return float(torch.special.gammaincc(torch.tensor(dof / 2).double(), torch.tensor(statistic / 2).double()))


def noncentral_tail(statistic: float, dof: int, noncentrality: float) -> float:
    """P(X >= statistic) for X with a noncentral chi-square law: chi-square laws with dof + 2 j degrees of freedom,
    weighted by a Poisson law of mean noncentrality / 2 over j."""
    mean = noncentrality / 2
    # Beyond 12 standard deviations a Poisson weight is below float64's resolution; the 60 are for small means.
    reach = 12 * math.sqrt(mean) + 60
    j = torch.arange(max(0, math.floor(mean - reach)), math.ceil(mean + reach) + 1, dtype=torch.float64)
    weights = torch.exp(torch.special.xlogy(j, torch.tensor(mean).double()) - mean - torch.lgamma(j + 1))
    tails = torch.special.gammaincc(dof / 2 + j, torch.full_like(j, statistic / 2))
    return float((weights * tails).sum())


def critical_value(dof: int, significance: float) -> float:
    """The statistic that a chi-square law exceeds with probability `significance`."""
    return _solve(lambda statistic: chi_square_tail(statistic, dof) <= significance)


def detectable_effect(dof: int, significance: float, trials: int, power: float) -> float:
    """The smallest effect w, w**2 = sum (r - p)**2 / p for counts drawn from r, that a test of p with that significance
    rejects with probability `power`: the statistic is noncentral with noncentrality trials * w**2. Infinite without
    degrees of freedom.

    As 2 TV = sum |r - p| <= w (Cauchy and Schwarz), every r whose total variation from p is at least w / 2 is detected
    with at least that probability.
    """
    if dof == 0:
        return math.inf
    critical = critical_value(dof, significance)
    noncentrality = _solve(lambda value: noncentral_tail(critical, dof, value) >= power)
    return math.sqrt(noncentrality / trials)


def mean_absolute_deviation(trials: Tensor, probabilities: Tensor) -> Tensor:
    """E|X - n p| for binomial X: 2 (m + 1) C(n, m + 1) p**(m + 1) (1 - p)**(n - m), m = floor(n p) (De Moivre).

    `trials` (n) and `probabilities` (p) are float64 and broadcast.
    """
    m = torch.floor(trials * probabilities)
    logarithm = (
        math.log(2)
        + torch.lgamma(trials + 1)
        - torch.lgamma(m + 1)
        - torch.lgamma(trials - m)
        + torch.special.xlogy(m + 1, probabilities)
        + torch.special.xlog1py(trials - m, -probabilities)
    )
    return torch.exp(logarithm)


def _solve(holds: Callable[[float], bool]) -> float:
    """The smallest number >= 0 at which a monotone condition holds."""
    high = 1.0
    while not holds(high):
        high *= 2
    low = 0.0
    # After 53 halvings the interval is below float64's resolution.
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
