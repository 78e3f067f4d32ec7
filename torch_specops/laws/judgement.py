"""Counts of texts against the target's law: Pearson's test for each position and for all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .pearson import pearson
from .power import chi_square_tail, detectable_effect, mean_absolute_deviation
from .report import CONFIDENCE, LawTest

# Below it the chi-square law is a poor one for a cell's share of the statistic.
MIN_EXPECTED = 10.0


def judge(counts: list[Tensor], joint_counts: Tensor, laws: list[Tensor], significance: float) -> list[LawTest]:
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
    """Row h of counts [H, C] is a sample of row h of `law`, of a size that is given."""
    counts = counts.double()
    sizes = counts.sum(-1, keepdim=True)
    # A position that no trial reached has a test that says nothing.
    trials = max(int(sizes.sum()), 1)
    expected = sizes * law
    impossible = int(counts[law == 0].sum())
    statistic, dof, pooled = pearson(counts, expected, MIN_EXPECTED)
    statistic = math.inf if impossible else statistic
    effect = detectable_effect(dof, threshold, trials, CONFIDENCE)
    # Under a law without chance any other token is seen, and one comes with probability 1 - (1 - TV)**trials.
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
