"""Pearson's chi-square test, without scipy."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["chi_square"]


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
    expected, order = (probabilities * counts.sum()).sort()
    counts = counts[order]
    # From the rarest on, until the merged bin is large enough.
    merged = int((expected < 5).sum())
    while 0 < merged < len(expected) and expected[:merged].sum() < 5:
        merged += 1
    if merged > 0:
        expected = torch.cat((expected[:merged].sum()[None], expected[merged:]))
        counts = torch.cat((counts[:merged].sum()[None], counts[merged:]))
    if len(expected) < 2:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
