"""Pearson's chi-square test, without scipy."""

from __future__ import annotations

import torch
from torch import Tensor

from .power import chi_square_tail


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of Pearson's chi-square test that `counts` were drawn from `probabilities`.

    Args:
        counts: [N] how often each outcome came.
        probabilities: [N] float64, summing to one. Outcomes expected fewer than 5 times are merged into one bin (with
            the rarest other one where they still are too few). A count where the probability is zero gives 0.0.

    Example:
        >>> import torch
        >>> from torch_specops.laws import chi_square
        >>> round(chi_square(torch.tensor([48, 52]), torch.tensor([0.5, 0.5])), 4)
        0.6892
    """
    counts, probabilities = counts.double().flatten(), probabilities.double().flatten()
    assert counts.shape == probabilities.shape, "counts and probabilities differ in shape"
    assert abs(float(probabilities.sum()) - 1) < 1e-6, "probabilities do not sum to one"
    if (counts[probabilities == 0] > 0).any():
        return 0.0
    statistic, dof, _ = pearson(counts.unsqueeze(0), (probabilities * counts.sum()).unsqueeze(0), 5.0)
    return chi_square_tail(statistic, dof)


def pearson(counts: Tensor, expected: Tensor, min_expected: float) -> tuple[float, int, float]:
    """Chi-square of rows of counts, its degrees of freedom, and how many outcomes were expected in cells pooled.

    In each row the cells below `min_expected` become one, with the next larger one where it still is too small. A row
    that ends up as one cell tells nothing. The choice depends on the rows' sizes alone, which are given.
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
