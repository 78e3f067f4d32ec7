"""Pearson's chi-square test without scipy: of any counts, and of texts at each position and jointly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .power import chi_square_tail, detectable_effect, mean_absolute_deviation
from .report import CONFIDENCE, LawTest

# With fewer expected outcomes in a cell, the chi-square approximation is poor.
MIN_EXPECTED = 10.0


def law_tests(counts: list[Tensor], joint_counts: Tensor, laws: list[Tensor], significance: float) -> list[LawTest]:
    """One test for each position t, of the tokens counted in [V ** t, V] by the text before them against the law of the
    same shape, then the joint test of texts counted in [V ** T]."""
    threshold = significance / (len(laws) + 1)
    joint = torch.ones(1, dtype=torch.float64)
    tests = []
    for position, (count, law) in enumerate(zip(counts, laws, strict=True)):
        tests.append(_test(position, count, law, threshold))
        joint = (joint.unsqueeze(-1) * law).flatten()
    return [*tests, _test(None, joint_counts.unsqueeze(0), joint.unsqueeze(0), threshold)]


def _test(position: int | None, counts: Tensor, law: Tensor, threshold: float) -> LawTest:
    """The test that row h of counts [H, C] is a sample from row h of `law`, given the size of each sample."""
    counts = counts.double()
    sizes = counts.sum(-1, keepdim=True)
    # The test of a position that no trial reached says nothing.
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
    return LawTest(
        position=position,
        total_variation=distance,
        expected_total_variation=float(mean_absolute_deviation(sizes, law).sum()) / 2 / trials,
        # One trial moves the distance by 1 / trials at most, and its mean is no less than the loop's own.
        total_variation_bound=min(distance + math.sqrt(-math.log(1 - CONFIDENCE) / (2 * trials)), 1.0),
        statistic=statistic,
        dof=dof,
        p_value=0.0 if impossible else chi_square_tail(statistic, dof),
        detectable_effect=effect,
        detectable_total_variation=visible,
        pooled=pooled / trials,
        impossible=impossible,
    )


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of Pearson's chi-square test that `counts` were drawn from `probabilities`.

    Args:
        counts: [N] how often each outcome occurred.
        probabilities: [N] float64, summing to one. Outcomes expected fewer than 5 times are merged into one bin (with
            the rarest other one if they still are too few). A count where the probability is zero gives 0.0.

    Raises:
        ValueError: shapes that differ, probabilities whose sum is not one.

    Example:
        >>> import torch
        >>> from torch_specops.laws import chi_square
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
    statistic, dof, _ = pearson_statistic(counts.unsqueeze(0), (probabilities * counts.sum()).unsqueeze(0), 5.0)
    return chi_square_tail(statistic, dof)


def pearson_statistic(counts: Tensor, expected: Tensor, min_expected: float) -> tuple[float, int, float]:
    """Chi-square of rows of counts, its degrees of freedom, and the expected number of outcomes in pooled cells.

    In each row the cells below `min_expected` are pooled into one, with the next larger one if that is still too small.
    A row that ends up as one cell is not tested. What is pooled depends on the sizes of the rows, not on the counts.
    """
    expected, order = expected.sort(-1)
    counts = counts.gather(-1, order)
    possible = expected > 0
    rare = possible & (expected < min_expected)
    small = (expected * rare).sum(-1, keepdim=True)
    # Ascending order: the first cell that is not rare comes next.
    frequent = possible & ~rare
    next_cell = frequent & (frequent.cumsum(-1) == 1)
    joined = rare | (next_cell & (small > 0) & (small < min_expected))
    alone = possible & ~joined
    pool_expected, pool_counts = (expected * joined).sum(-1), (counts * joined).sum(-1)
    has_pool = pool_expected > 0
    cells = alone.sum(-1) + has_pool
    tested = cells > 1
    terms = torch.where(alone & tested.unsqueeze(-1), (counts - expected) ** 2 / expected, 0.0).sum(-1)
    pool_terms = torch.where(has_pool & tested, (pool_counts - pool_expected) ** 2 / pool_expected, 0.0)
    # A single cell that is a row's only possible outcome was not pooled.
    pooled = pool_expected[joined.sum(-1) > 1].sum()
    return float((terms + pool_terms).sum()), int((cells - 1).clamp(min=0).sum()), float(pooled)
