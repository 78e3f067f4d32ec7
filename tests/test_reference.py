"""The oracle against closed forms.

Probabilities are fractions of small integers here, so the op is constant on the cells of a grid over u and s: calling
it once per cell and counting gives the law exactly, as fractions.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from torch_specops import reference

Law = dict[object, Fraction]


def logits_of(counts: Sequence[int]) -> Tensor:
    """[V] log of unnormalised probabilities; -inf where the count is zero."""
    return torch.tensor([math.log(c) if c else -math.inf for c in counts], dtype=torch.float64)


def cells(n: int) -> list[float]:
    """The midpoints of n cells of [0, 1): half a cell away from every multiple of 1 / n."""
    return [(i + 0.5) / n for i in range(n)]


def fractions_of(counts: Sequence[int]) -> list[Fraction]:
    return [Fraction(c, sum(counts)) for c in counts]


def grid(p: Sequence[int], q: Sequence[int]) -> int:
    """A number of cells for s on which every inverse CDF of p and of its residual is constant."""
    total = math.lcm(sum(p), sum(q))
    scaled_p, scaled_q = (Fraction(total, sum(w)) for w in (p, q))
    residual = sum(max(a * scaled_p - b * scaled_q, 0) for a, b in zip(p, q, strict=True))
    return math.lcm(total, int(residual) or 1)


def first_token_law(
    p: Sequence[int], q: Sequence[int], *, lenience: float = 1.0, one_hot: bool = False, drafts: Sequence[int] = ()
) -> Law:
    """The exact law of (first token, num_accepted) for K = 1; `drafts` are the weights of the draft tokens, q's if not
    given. The bonus row is p too."""
    drafts = drafts or q
    # Every boundary of u l q(x) < p(x) lies on this grid, l = 1/2 and 1/4 included.
    n_u = sum(p) if one_hot else math.lcm(*(b for b in q if b)) * sum(p)
    rows = []
    for x, count in enumerate(drafts):
        # A one-hot q leaves p without x.
        n_s = math.lcm(sum(p), sum(p) - p[x] or 1) if one_hot else grid(p, q)
        weight = Fraction(count, sum(drafts) * n_u * n_s)
        rows += [(x, u, s, weight) for u in cells(n_u) for s in cells(n_s)] if count else []
    output, accepted = reference.verify_exact(
        logits_of(p).expand(len(rows), 2, -1),
        torch.tensor([[x] for x, _, _, _ in rows]),
        None if one_hot else logits_of(q).expand(len(rows), 1, -1),
        torch.tensor([[u] for _, u, _, _ in rows], dtype=torch.float64),
        torch.tensor([s for _, _, s, _ in rows], dtype=torch.float64),
        lenience=lenience,
    )
    law: Counter[tuple[int, int]] = Counter()
    for (_, _, _, weight), first, n in zip(rows, output[:, 0].tolist(), accepted.tolist(), strict=True):
        law[first, n] += weight
    return dict(law)


def marginal(law: Law, vocab_size: int) -> list[Fraction]:
    return [sum((weight for (first, _), weight in law.items() if first == v), Fraction(0)) for v in range(vocab_size)]


PAIRS = {
    "close": ((3, 2, 1), (2, 3, 1)),
    "opposite": ((4, 1, 1), (1, 1, 4)),
    "equal": ((1, 2, 3), (1, 2, 3)),
    "disjoint": ((1, 2, 0, 0), (0, 0, 2, 1)),
    "masked": ((3, 0, 2, 1), (0, 4, 1, 1)),
    "five": ((2, 1, 1, 3, 1), (1, 2, 1, 2, 2)),
    "certain target": ((0, 6, 0), (2, 2, 2)),
    "certain draft": ((2, 2, 2), (0, 6, 0)),
    "one token": ((1,), (1,)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_emitted_token_has_the_targets_law(name: str) -> None:
    """And P(accept) = sum_v min(p(v), q(v)), Leviathan et al. theorem 3.5."""
    p, q = PAIRS[name]
    law = first_token_law(p, q)
    assert marginal(law, len(p)) == fractions_of(p)
    accepted = sum((weight for (_, n), weight in law.items() if n == 1), Fraction(0))
    assert accepted == sum(map(min, fractions_of(p), fractions_of(q)))


def test_wrong_draft_distribution_loses_the_law() -> None:
    """The enumeration sees it when the drafts were not drawn from q."""
    p, q = PAIRS["close"]
    assert marginal(first_token_law(p, q, drafts=(1, 1, 1)), 3) != fractions_of(p)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("drafts", [(1,), (1, 3), (1, 1, 1)])
def test_one_hot_drafts_keep_the_law(name: str, drafts: tuple[int, ...]) -> None:
    p, _ = PAIRS[name]
    drafts = drafts[: len(p)]
    law = first_token_law(p, p, one_hot=True, drafts=drafts)
    assert marginal(law, len(p)) == fractions_of(p)
    accepted = sum((weight for (_, n), weight in law.items() if n == 1), Fraction(0))
    assert accepted == sum(a * b for a, b in zip(fractions_of(p), fractions_of(drafts), strict=False))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("lenience", [0.5, 0.25])
def test_lenience_bounds_every_token_by_p_over_l(name: str, lenience: float) -> None:
    p, q = PAIRS[name]
    law = marginal(first_token_law(p, q, lenience=lenience), len(p))
    p_fractions, q_fractions = fractions_of(p), fractions_of(q)
    assert all(emitted <= a / Fraction(lenience) for emitted, a in zip(law, p_fractions, strict=True))
    kept = [min(b, a / Fraction(lenience)) for a, b in zip(p_fractions, q_fractions, strict=True)]
    residual = [max(a - b, Fraction(0)) for a, b in zip(p_fractions, q_fractions, strict=True)]
    rejected = 1 - sum(kept)
    # p == q is never rejected.
    assert law == [k + (rejected * r / sum(residual) if rejected else 0) for k, r in zip(kept, residual, strict=True)]
    assert sum(law) == 1


def test_two_tokens_have_the_targets_joint_law() -> None:
    """K = 2 and K = 1: the first token and, where the draft survived, the second, by enumeration over drafts, u, s.

    Where the walk ended at the first token the second comes from the next step, which has the law of position two.
    """
    p_1, q_1 = (3, 2, 1), (1, 2, 3)
    p_2 = ((1, 2, 3), (2, 2, 2), (3, 1, 2))
    q_2 = ((3, 2, 1), (1, 3, 2), (2, 1, 3))
    p_3 = (1, 4, 1)
    cells_u, cells_s = cells(6), cells(12)
    for num_drafts in (1, 2):
        drafts = list(itertools.product(range(3), repeat=num_drafts))
        rows = [(x, u, s) for x in drafts for u in itertools.product(cells_u, repeat=num_drafts) for s in cells_s]
        target = torch.stack(
            [torch.stack([logits_of(p_1), logits_of(p), logits_of(p_3)][: num_drafts + 1]) for p in p_2]
        )
        draft = torch.stack([torch.stack([logits_of(q_1), logits_of(q)][:num_drafts]) for q in q_2])
        draft_tokens = torch.tensor([x for x, _, _ in rows])
        output, accepted = reference.verify_exact(
            target[draft_tokens[:, 0]],
            draft_tokens,
            draft[draft_tokens[:, 0]],
            torch.tensor([u for _, u, _ in rows], dtype=torch.float64),
            torch.tensor([s for _, _, s in rows], dtype=torch.float64),
        )
        law: Counter[tuple[int, int]] = Counter()
        for (x, _, _), tokens, n in zip(rows, output.tolist(), accepted.tolist(), strict=True):
            weight = Fraction(q_1[x[0]], 6) * (Fraction(q_2[x[0]][x[1]], 6) if num_drafts == 2 else 1)
            weight *= Fraction(1, len(cells_u) ** num_drafts * len(cells_s))
            for second in range(3):
                if n >= 1:
                    law[tokens[0], second] += weight * (tokens[1] == second)
                else:
                    law[tokens[0], second] += weight * Fraction(p_2[tokens[0]][second], 6)
        assert law == {(a, b): Fraction(p_1[a], 6) * Fraction(p_2[a][b], 6) for a in range(3) for b in range(3)}


def test_inverse_cdf_at_its_boundaries() -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    below = math.nextafter
    # The smallest v with cdf(v) > s: a boundary belongs to the token above it.
    expected = {0.0: 1, below(0.25, 0): 1, 0.25: 3, below(0.75, 0): 3, 0.75: 4, below(1.0, 0): 4}
    assert {s: reference.inverse_cdf(weights, s) for s in expected} == expected
    # The weights need not sum to one.
    assert {s: reference.inverse_cdf(3 * weights, s) for s in expected} == expected
    # Out of range (u = 1.0): the last token of positive weight, not the last one.
    assert reference.inverse_cdf(weights, 1.0) == 4
    assert reference.inverse_cdf(torch.zeros(3, dtype=torch.float64), 0.5) == -1


@pytest.mark.parametrize(
    "counts, temperature",
    [([1], None), ([1, 2, 3], None), ([0, 5, 0, 1], None), ([3, 0, 0], None), ([1, 2, 3], 0.5), ([1, 4, 9], 2.0)],
)
def test_sample_has_the_law_of_softmax(counts: list[int], temperature: float | None) -> None:
    """softmax(log(c) / T) is c^(1/T): T = 1/2 squares the weights, T = 2 takes their roots."""
    weights = [round(count ** (1 / (temperature or 1.0))) for count in counts]
    n = sum(weights)
    tokens, lse = reference.sample(logits_of(counts).expand(n, -1), torch.tensor(cells(n)), temperature)
    assert torch.bincount(tokens, minlength=len(counts)).tolist() == weights
    assert lse.tolist() == pytest.approx([math.log(n)] * n)


def test_sample_greedy_and_lawless_rows() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [1.0, 2.0, 3.0], [-math.inf, math.nan, -math.inf], [0.0, 0.0, 0.0]])
    tokens, lse = reference.sample(logits, torch.full((4,), 0.99), torch.tensor([0.0, -1.0, 1.0, math.nan]))
    assert tokens.tolist() == [1, -1, -1, -1]
    assert lse.tolist() == [0.0, -math.inf, -math.inf, -math.inf]


def verify_one(
    target: Tensor, tokens: list[int], draft: Tensor | None, u: float = 0.5, s: float = 0.5, **kwargs: Tensor
) -> tuple[list[int], int]:
    """One row of verify_exact as lists."""
    output, accepted = reference.verify_exact(
        target[None],
        torch.tensor([tokens], dtype=torch.int64),
        None if draft is None else draft[None],
        torch.full((1, len(tokens)), u),
        torch.tensor([s]),
        **kwargs,
    )
    return output[0].tolist(), int(accepted[0])


def test_greedy_rows() -> None:
    """Temperature 0: the lowest index of the maximum decides; uniforms and the draft's logits do not matter."""
    target = torch.tensor([[0.0, 7.0, 7.0], [9.0, 1.0, 2.0], [0.0, 0.0, 4.0]])
    draft = torch.full((2, 3), math.nan)
    zero = torch.zeros(1)
    for u in (0.0, 1 - 2.0**-24):
        assert verify_one(target, [1, 0], draft, u, u, temperature=zero) == ([1, 0, 2], 2)
        assert verify_one(target, [2, 0], draft, u, u, temperature=zero) == ([1, -1, -1], 0)
        assert verify_one(target, [1, 1], draft, u, u, temperature=zero) == ([1, 0, -1], 1)
        assert verify_one(target, [1, -1], draft, u, u, temperature=zero) == ([1, 0, -1], 1)


@pytest.mark.parametrize("padding", [-1, 3, 10, -(2**31), 2**31 - 1])
def test_padding_ends_the_walk_and_draws_from_the_target(padding: int) -> None:
    """At a padded position the next token has the law of p, not of a residual."""
    target = torch.stack([logits_of((1, 1, 1)), logits_of((1, 2, 3)), logits_of((1, 0, 0))])
    draft = torch.stack([logits_of((1, 1, 1)), logits_of((0, 0, 6))])
    rows = [verify_one(target, [2, padding], draft, 0.5, s) for s in cells(6)]
    assert Counter(output[1] for output, _ in rows) == {0: 1, 1: 2, 2: 3}
    assert {(output[0], output[2], n) for output, n in rows} == {(2, -1, 1)}
    head = [verify_one(target, [padding, 2], draft, 0.0, s) for s in cells(3)]
    assert sorted(output[0] for output, _ in head) == [0, 1, 2]
    assert {n for _, n in head} == {0}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_row_without_a_finite_entry(value: float) -> None:
    flat, row = torch.zeros(3), torch.full((3,), value)
    # A draft row without a law: rejected, and the next token drawn from p, the rejected one included.
    drawn = [verify_one(torch.stack([flat, flat]), [1], row[None], 0.0, s) for s in cells(3)]
    assert [output[0] for output, _ in drawn] == [0, 1, 2]
    assert {n for _, n in drawn} == {0}
    # A target row without a law: rejected, and -1.
    assert verify_one(torch.stack([row, flat]), [1], flat[None], 0.0) == ([-1, -1], 0)
    assert verify_one(torch.stack([flat, row]), [1], flat[None], 0.0) == ([1, -1], 1)
    assert verify_one(torch.stack([row, flat]), [1], None, 0.0) == ([-1, -1], 0)
    assert verify_one(torch.stack([row, flat]), [1], row[None], 0.0, temperature=torch.zeros(1)) == ([-1, -1], 0)


def test_non_finite_entries() -> None:
    """NaN is -inf; +inf is the largest float32, so infinities share the mass and nothing else has any."""
    p = reference.probabilities(torch.tensor([math.nan, 0.0, math.inf, 3.4e38, -math.inf, math.inf]), 1.0)
    assert p.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0, 0.5]
    assert reference.probabilities(torch.tensor([math.nan, 0.0, 0.0, -math.inf]), 0.5).tolist() == [0.0, 0.5, 0.5, 0.0]
    # A finite value that the temperature takes over float32's range equals an infinite one.
    assert reference.probabilities(torch.tensor([1e38, math.inf, 0.0]), 1e-3).tolist() == [0.5, 0.5, 0.0]
    assert reference.probabilities(torch.tensor([-1e38, -3e38, -math.inf]), 1e-3).tolist() == [0.5, 0.5, 0.0]


def test_excluded_draft_token_is_rejected_at_u_zero() -> None:
    """u q(x) < p(x) is strict: at u = 0 and p(x) = 0, and at u = p(x) for a one-hot draft."""
    assert verify_one(torch.zeros(2, 2), [0], None, 0.5) == ([1, -1], 0)
    target = torch.stack([logits_of((1, 0, 1)), logits_of((1, 1, 1))])
    assert verify_one(target, [1], torch.zeros(1, 3), 0.0, 0.9) == ([2, -1], 0)
    # q(x) = 0 cannot be accepted, however large p(x); the residual is p there.
    assert verify_one(target, [0], logits_of((0, 1, 1))[None], 0.0, 0.1) == ([0, -1], 0)


def test_zero_residual_draws_from_the_target() -> None:
    same = logits_of((0, 1, 3))
    target = torch.stack([same, same])
    drawn = [verify_one(target, [0], same[None], 0.0, s)[0][0] for s in cells(4)]
    assert drawn == [1, 2, 2, 2]


def test_bad_temperature_emits_nothing() -> None:
    for t in (-1.0, -math.inf, math.nan):
        found = verify_one(torch.zeros(2, 3), [1], torch.zeros(1, 3), 0.0, temperature=torch.tensor([t]))
        assert found == ([-1, -1], 0)


def test_draft_lse_normalises_the_draft() -> None:
    """q = exp(z - lse): the softmax where lse is its logsumexp; no distribution where it is not finite."""
    p, q = (3, 2, 1), (2, 3, 1)
    target = torch.stack([logits_of(p), logits_of(p)])
    # Shifted logits: only their logsumexp can normalise them.
    draft = logits_of(q)[None] + 5.0
    lse = torch.tensor([[math.log(6) + 5.0]])
    for x, u in itertools.product(range(3), cells(12)):
        assert verify_one(target, [x], draft, u, draft_lse=lse) == verify_one(target, [x], draft, u)
    for bad in (math.nan, math.inf, -math.inf):
        assert verify_one(target, [1], draft, 0.0, 0.1, draft_lse=torch.tensor([[bad]])) == ([0, -1], 0)


def test_sigmoid_scores() -> None:
    """Equation 5 of Wagner et al. 2024 by the standard library."""
    logits, alpha, beta = [-40.0, -1.0, 0.0, 2.5, 40.0], -3.0, 7.0
    for t in (1.0, 0.5):
        expected = [1 / (1 + math.exp(-(z / t - alpha) / (beta - alpha))) for z in logits]
        assert reference.sigmoid_scores(torch.tensor(logits), t, alpha, beta).tolist() == pytest.approx(expected)
    excluded = reference.sigmoid_scores(torch.tensor([math.nan, -math.inf, math.inf]), 1.0, alpha, beta)
    assert excluded.tolist() == [0.0, 0.0, 1.0]


def test_sigmoid_law() -> None:
    """Scores a / 12 and b / 12: accepted with min(1, a / b), recovered by (a - b)+, the bonus by softmax."""
    alpha, beta = -2.0, 2.0
    p_hat, q_hat, drafts, bonus = (8, 3, 6), (4, 6, 6), (1, 2, 3), (1, 2, 1)

    def scored(counts: Sequence[int]) -> Tensor:
        odds = torch.tensor([c / (12 - c) for c in counts], dtype=torch.float64)
        return alpha + (beta - alpha) * odds.log()

    n_u, n_s = 12, 12
    rows = [(x, u, s) for x in range(3) for u in cells(n_u) for s in cells(n_s)]
    drawn, u, s = torch.tensor(rows, dtype=torch.float64).unbind(1)
    output, accepted = reference.verify_sigmoid(
        torch.stack([scored(p_hat), logits_of(bonus)]).expand(len(rows), 2, 3),
        drawn.long().unsqueeze(1),
        scored(q_hat).expand(len(rows), 1, 3),
        u.unsqueeze(1),
        s,
        alpha,
        beta,
    )
    law: Counter[tuple[int, ...]] = Counter()
    for (x, _, _), tokens, n in zip(rows, output.tolist(), accepted.tolist(), strict=True):
        assert tokens[n + 1 :] == [-1] * (1 - n)
        law[tuple(tokens[: n + 1])] += Fraction(drafts[x], 6 * n_u * n_s)
    accept = [Fraction(c, 6) * min(Fraction(1), Fraction(a, b)) for a, b, c in zip(p_hat, q_hat, drafts, strict=True)]
    expected = {(x, y): accept[x] * Fraction(bonus[y], 4) for x in range(3) for y in range(3)}
    # Only token 0 has a score above the draft's.
    expected[0,] = 1 - sum(accept)
    assert law == expected


def test_gumbel_draws_the_least_exponential_number() -> None:
    """-log u(v) / p(v) with u = exp(-exp(-g)); and special rows."""
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seeds, positions = torch.arange(200), torch.arange(200) % 7
    for t in (1.0, 0.3):
        noise = torch.stack([reference.gumbel_noise(s, s % 7, 9) for s in range(200)])
        race = torch.exp(-noise) / torch.softmax(logits / t, 1)
        assert torch.equal(reference.sample_gumbel(logits, seeds, positions, t), race.argmin(1))
    rows = torch.tensor(
        [[0.0, 2.0, 2.0], [-math.inf, math.nan, -math.inf], [-math.inf, 0.0, -math.inf], [1.0, 0.0, 0.0]]
    )
    temperature = torch.tensor([0.0, 1.0, math.inf, -1.0])
    zeros = torch.zeros(4, dtype=torch.int64)
    assert reference.sample_gumbel(rows, zeros, zeros, temperature).tolist() == [1, -1, 1, -1]


def test_gumbel_verification_keeps_leading_matches() -> None:
    target = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(1)).expand(5, 4, 50)
    seeds, positions = torch.full((5,), 3), torch.full((5,), 10)
    y = torch.cat([reference.sample_gumbel(target[:1, i], seeds[:1], positions[:1] + i) for i in range(4)])
    drafts = y[:3].repeat(5, 1)
    drafts[0, 0], drafts[1, 1], drafts[2, 2], drafts[3, 1] = (y[0] + 1) % 50, (y[1] + 1) % 50, -1, 50
    output, n = reference.verify_gumbel(target, drafts, seeds, positions)
    assert n.tolist() == [0, 1, 2, 1, 3]
    assert all(row.tolist() == [*y[: k + 1].tolist(), *[-1] * (3 - k)] for row, k in zip(output, n, strict=True))
