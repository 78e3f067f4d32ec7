"""Leviathan et al. 2023 (arXiv 2211.17192), what follows from its formulas alone: figures 2, 3 and 4, table 1, and the
factors printed in table 4, section 3.6 and appendix A.5, from `torch_specops.analysis`.

    python benchmarks/papers/leviathan_theory.py

Seconds on any machine. The curves of the figures are given as pictures in the paper, without numbers; the choice of
gamma and c in the figures is ours. Everything else is compared with the number that the paper prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from evidence import Cell, reproduce
from torch import Tensor

from torch_specops import analysis
from torch_specops.analysis import operations_factor, optimal_num_draft_tokens, walltime_factor

# Table 1: alpha, gamma, operations, speed.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# Table 4: task, draft, temperature, gamma, alpha, c, expected, measured.
TABLE_4 = [
    ("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("EnDe", "T5-base", 0, 7, 0.8, 0.04, 3.3, 2.8),
    ("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
]
# Appendix A.5, T5-small at c = 0.015: lenience, alpha, factor. Sampled (the gamma is not given), greedy (gamma = 8).
LENIENCE_SAMPLED = [(1.0, 0.62, 2.5), (0.5, 0.71, 3.1), (0.3, 0.76, 3.6), (0.1, 0.84, 5.0)]
LENIENCE_GREEDY = [(1.0, 0.75, 3.3), (0.5, 0.75, 3.3), (0.3, 0.8, 3.9), (0.1, 0.87, 4.9)]

GAMMAS = [1, 2, 3, 5, 7, 10]
COSTS = [0.01, 0.02, 0.05, 0.1, 0.2]


def grid(num_points: int, highest: float = 1.0) -> Tensor:
    return torch.linspace(0, highest, num_points, dtype=torch.float64)


def rounded(values: Tensor) -> Any:
    """The numbers of a tensor, with four digits behind the point."""
    return values.round(decimals=4).tolist()


def figure_2(gammas: Sequence[int], num_points: int) -> dict[str, Any]:
    alpha = grid(num_points)
    tokens = analysis.expected_tokens_per_step(alpha, torch.tensor(gammas).unsqueeze(1))
    return {"alpha": rounded(alpha), "gammas": gammas, "expected_tokens_per_step": rounded(tokens)}


def figure_3(costs: Sequence[float], num_points: int, highest: float) -> dict[str, Any]:
    alpha = grid(num_points, highest)
    best = optimal_num_draft_tokens(alpha, torch.tensor(costs, dtype=torch.float64).unsqueeze(1))
    return {"alpha": rounded(alpha), "costs": costs, "optimal_num_draft_tokens": best.tolist()}


def figure_4(gammas: Sequence[int], num_points: int) -> dict[str, Any]:
    alpha, counts = grid(num_points), torch.tensor(gammas).unsqueeze(1)
    factors = {f.__name__: rounded(f(alpha, 0.0, counts)) for f in (walltime_factor, operations_factor)}
    return {"alpha": rounded(alpha), "gammas": gammas, **factors}


def table_1() -> list[dict[str, float]]:
    rows = []
    for alpha, gamma, operations, speed in TABLE_1:
        ours = {"operations": operations_factor(alpha, 0.0, gamma).item()}
        ours["speed"] = walltime_factor(alpha, 0.0, gamma).item()
        rows.append({"alpha": alpha, "gamma": gamma, **ours, "paper_operations": operations, "paper_speed": speed})
    return rows


def table_4() -> list[dict[str, Any]]:
    """The column "expected": theorem 3.8 from the printed alpha, c and gamma; and the least and greatest factor of any
    alpha and c that print as these two with two decimals."""
    rows = []
    for task, draft, temperature, gamma, alpha, cost, expected, measured in TABLE_4:
        low = walltime_factor(max(alpha - 0.005, 0.0), cost + 0.005, gamma).item()
        high = walltime_factor(min(alpha + 0.005, 1.0), max(cost - 0.005, 0.0), gamma).item()
        ours = {"expected": walltime_factor(alpha, cost, gamma).item(), "within_rounding": [low, high]}
        ours["optimal_gamma"] = optimal_num_draft_tokens(alpha, cost).item()
        row = {"task": task, "draft": draft, "temperature": temperature, "gamma": gamma, **ours}
        rows.append(row | {"paper_expected": expected, "paper_measured": measured})
    return rows


def lenience(rows: Sequence[Sequence[float]], cost: float, gamma: int | None) -> list[dict[str, Any]]:
    """Factors from the alphas of appendix A.5; without a gamma the best one, and the alpha rounded in its favour."""
    found = []
    for each, alpha, paper in rows:
        count = optimal_num_draft_tokens(alpha, cost).item() if gamma is None else gamma
        factor, up = (walltime_factor(rate, cost, count).item() for rate in (alpha, alpha + 0.005))
        row = {"lenience": each, "alpha": alpha, "gamma": count, "factor": factor}
        found.append(row | {"factor_at_alpha_rounded_up": up, "paper_factor": paper})
    return found


def bigram(alpha: float, gamma: int) -> dict[str, float]:
    """Section 3.6: a draft of no cost that is accepted one time in five."""
    return {"factor": walltime_factor(alpha, 0.0, gamma).item(), "paper_factor": 1.25}


def oracle(costs: Sequence[float], num_points: int) -> list[dict[str, float]]:
    """Section 3.5: what choosing gamma by an oracle gains over the best constant one, at most over alpha."""
    alpha = grid(num_points, 0.99)
    rows = []
    for cost in costs:
        best = optimal_num_draft_tokens(alpha, cost)
        gain = analysis.oracle_walltime_factor(alpha, cost) / walltime_factor(alpha, cost, best)
        at = int(gain.argmax())
        row = {"cost_ratio": cost, "gain": gain[at].item() - 1, "alpha": alpha[at].item(), "gamma": best[at].item()}
        rows.append(row | {"paper_gain": 0.6})
    return rows


def cells_of(_: Any) -> list[Cell]:
    return [
        Cell("table 1", table_1),
        Cell("figure 2", figure_2, {"gammas": GAMMAS, "num_points": 101}),
        Cell("figure 3", figure_3, {"costs": COSTS, "num_points": 100, "highest": 0.99}),
        Cell("figure 4", figure_4, {"gammas": GAMMAS, "num_points": 101}),
        Cell("table 4, expected", table_4),
        Cell("section 3.6", bigram, {"alpha": 0.2, "gamma": 3}),
        Cell("section 3.5, oracle", oracle, {"costs": COSTS, "num_points": 1000}),
        Cell("appendix A.5, sampled", lenience, {"rows": LENIENCE_SAMPLED, "cost": 0.015, "gamma": None}),
        Cell("appendix A.5, greedy", lenience, {"rows": LENIENCE_GREEDY, "cost": 0.015, "gamma": 8}),
    ]


main = partial(reproduce, "leviathan_theory", __doc__, cells_of)

if __name__ == "__main__":
    main()
