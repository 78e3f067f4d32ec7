"""The law of what is emitted with filters on both sides, by chi-square on 16 tokens; wrong samplers that the same tests
reject; the acceptance rate under lenience, and the law of argmax lenience by enumeration.

As in `test_laws`: 200,000 sequences from fixed seeds, a Markov chain, its laws known exactly. Here they are those of
the filtered target, the first two tokens jointly. A law fails below ALPHA, which is 1e-4 for the whole module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from conftest import Report
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.laws import chi_square

V = 16
TRIALS = 200_000
START = V
NUM_LAWS = 40
ALPHA = 1e-4 / NUM_LAWS
INF = math.inf

Filters = dict[str, float]
Verify = Callable[..., tuple[Tensor, Tensor]]
# In `tables(1, "close")` each removes tokens that the others keep, and every other order gives other sets.
ALL: Filters = {"top_k": 9, "top_p": 0.8, "min_p": 0.15}


def tables(seed: int, draft: str, ties: bool = False) -> tuple[Tensor, Tensor]:
    """[V + 1, V] logits of the target and of the draft for each last token."""
    generator = torch.Generator().manual_seed(seed)
    target = 1.2 * torch.randn(V + 1, V, generator=generator)
    noise = 0.5 * torch.randn(V + 1, V, generator=generator)
    draft_logits = {"opposite": -target, "close": target + noise}[draft]
    return (target.round(), draft_logits.round()) if ties else (target, draft_logits)


def per_row(filters: Filters, rows: int) -> dict[str, Tensor]:
    return {name: torch.full((rows,), value) for name, value in filters.items()}


def emit(
    target: Tensor,
    draft: Tensor | None,
    filters: Filters,
    seed: int,
    *,
    temperature: float = 1.0,
    lse: bool = False,
    verify: Verify | None = None,
) -> Tensor:
    """[TRIALS, 2] the first two tokens, of two steps with one draft each."""
    generator = torch.Generator().manual_seed(seed)
    t, options = torch.full((TRIALS,), temperature), per_row(filters, TRIALS)
    verify = torch_specops.verify_exact if verify is None else verify

    def step(last: Tensor) -> tuple[Tensor, Tensor]:
        if draft is None:
            x, row_lse = (last + 1) % V, None
        else:
            propose = torch.rand(TRIALS, generator=generator)
            x, row_lse = torch_specops.sample(draft[last], propose, t, **options)
        args: dict[str, Any] = {
            "target_logits": target[torch.stack([last, x], 1)],
            "draft_tokens": x.unsqueeze(-1),
            "draft_logits": None if draft is None else draft[last].unsqueeze(1),
            "accept_uniforms": torch.rand(TRIALS, 1, generator=generator),
            "sample_uniforms": torch.rand(TRIALS, generator=generator),
            "temperature": t,
        }
        if lse and row_lse is not None:
            args["draft_lse"] = row_lse.unsqueeze(-1)
        return verify(**args, **options)

    first, n = step(torch.full((TRIALS,), START))
    second, _ = step(first[:, 0])
    return torch.stack([first[:, 0], torch.where(n == 1, first[:, 1], second[:, 0])], 1)


def filtered_softmax(logits: Tensor, filters: Filters, temperature: float) -> Tensor:
    rows = [reference.filtered(row, temperature, **filters) for row in logits]
    return torch.softmax(torch.stack(rows).double() / temperature, -1)


def p_values(tokens: Tensor, target: Tensor, filters: Filters, temperature: float = 1.0) -> dict[str, float]:
    p = filtered_softmax(target, filters, temperature)
    first, step = p[START], p[:V]
    a, b = tokens.unbind(1)
    laws = {
        "token 1": (a, first),
        "token 2": (b, first @ step),
        "tokens 1, 2": (V * a + b, (first.unsqueeze(-1) * step).flatten()),
    }
    return {name: chi_square(torch.bincount(outcome, minlength=len(law)), law) for name, (outcome, law) in laws.items()}


def expect_laws(report: Report, name: str, values: dict[str, float]) -> None:
    report.p_values |= {f"filters, {name}, {key}": value for key, value in values.items()}
    assert sum(key.startswith("filters, ") for key in report.p_values) <= NUM_LAWS
    assert min(values.values()) > ALPHA, values


def expect_caught(report: Report, name: str, values: dict[str, float]) -> None:
    report.wrong_p_values[f"filters, {name}"] = min(values.values())
    assert min(values.values()) < ALPHA, f"the tests do not see that this sampler is wrong: {values}"


@pytest.mark.parametrize(
    ("name", "filters"),
    [("top_k", {"top_k": 4}), ("top_p", {"top_p": 0.7}), ("min_p", {"min_p": 0.15}), ("all", ALL)],
)
def test_tokens_follow_the_filtered_target(name: str, filters: Filters, report: Report) -> None:
    target, draft = tables(1, "close")
    expect_laws(report, name, p_values(emit(target, draft, filters, seed=2), target, filters))


def test_opposite_drafts_of_another_temperature_and_with_their_lse(report: Report) -> None:
    target, draft = tables(3, "opposite")
    tokens = emit(target, draft, ALL, seed=4, temperature=0.8, lse=True)
    expect_laws(report, "all, opposite draft, T = 0.8, draft_lse", p_values(tokens, target, ALL, 0.8))


def test_ties_follow_the_filtered_target(report: Report) -> None:
    """Rounded logits: the tokens at a boundary tie, and top_p keeps some of them."""
    target, draft = tables(5, "close", ties=True)
    kept = filtered_softmax(target, ALL, 1.0) > 0
    assert any(((row == value) & keep).any() and ((row == value) & ~keep).any()
               for row, keep in zip(target, kept, strict=True) for value in row)  # fmt: skip
    expect_laws(report, "all, ties", p_values(emit(target, draft, ALL, seed=6), target, ALL))


def test_one_hot_drafts_follow_the_filtered_target(report: Report) -> None:
    target, _ = tables(7, "close")
    expect_laws(report, "all, one-hot drafts", p_values(emit(target, None, ALL, seed=8), target, ALL))


def test_rows_of_other_filters_share_a_batch(report: Report) -> None:
    """Every row follows the law of its own filters; greedy rows ignore them."""
    target, _ = tables(9, "close")
    kinds: list[tuple[Filters, float]] = [(ALL, 1.0), ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, 1.0), (ALL, 0.0)]
    kind = torch.arange(TRIALS) % len(kinds)

    def verify(**args: Any) -> tuple[Tensor, Tensor]:
        for name in ALL:
            args[name] = torch.tensor([filters[name] for filters, _ in kinds])[kind]
        args["temperature"] = torch.tensor([t for _, t in kinds])[kind]
        # The drafts were sampled with ALL at T = 1: only a one-hot law holds for every kind.
        return torch_specops.verify_exact(**args | {"draft_logits": None})

    # A one-hot draft must not depend on chance.
    tokens = emit(target, None, ALL, seed=10, verify=verify)
    for k, (filters, t) in enumerate(kinds[:2]):
        expect_laws(report, f"row kind {k} of a mixed batch", p_values(tokens[kind == k], target, filters, t))
    first = int(target[START].argmax())
    assert torch.equal(tokens[kind == 2].unique(dim=0), torch.tensor([[first, int(target[first].argmax())]]))


def q_before_the_filters(**args: Any) -> tuple[Tensor, Tensor]:
    """The target is filtered, and q taken from the unfiltered draft, whose tokens were sampled after filtering."""
    filters = {name: args.pop(name) for name in ALL}
    rows = args["target_logits"].flatten(0, 1)
    twice = {name: value.repeat_interleave(2) for name, value in filters.items()}
    kept = torch_specops.filter_logits(rows, args["temperature"].repeat_interleave(2), **twice)
    return torch_specops.verify_exact(**args | {"target_logits": kept.view_as(args["target_logits"])})


def other_order(*names: str) -> Verify:
    """One filter after the other, in this order, on both sides, as were the drafts: lossless, for another target."""

    def verify(**args: Any) -> tuple[Tensor, Tensor]:
        filters = {name: args.pop(name) for name in ALL}
        for key in ("target_logits", "draft_logits"):
            rows, repeats = args[key].flatten(0, 1), args[key].shape[1]
            for name in names:
                rows = torch_specops.filter_logits(
                    rows, args["temperature"].repeat_interleave(repeats),
                    **{name: filters[name].repeat_interleave(repeats)},
                )  # fmt: skip
            args[key] = rows.view_as(args[key])
        return torch_specops.verify_exact(**args)

    return verify


def without_renormalisation(**args: Any) -> tuple[Tensor, Tensor]:
    """p and q are the unfiltered probabilities with what the filters remove set to zero."""
    filters = {name: args.pop(name) for name in ALL}
    masses = []
    for key in ("target_logits", "draft_logits"):
        rows, repeats = args[key].flatten(0, 1), args[key].shape[1]
        repeated = {name: value.repeat_interleave(repeats) for name, value in filters.items()}
        kept = torch_specops.filter_logits(rows, **repeated) > -INF
        masses.append(torch.where(kept, rows.softmax(-1), 0.0).view_as(args[key]))
    p, q, x = masses[0], masses[1][:, 0], args["draft_tokens"]
    p_x, q_x = p[:, 0].gather(1, x), q.gather(1, x)
    accepted = (args["accept_uniforms"] * q_x < p_x)[:, 0]
    weights = torch.where(accepted.unsqueeze(-1), p[:, 1], (p[:, 0] - q).clamp(min=0))
    drawn, _ = torch_specops.sample(weights.log(), args["sample_uniforms"])
    # Where nothing is left of the residual, from p.
    from_p, _ = torch_specops.sample(p[:, 0].log(), args["sample_uniforms"])
    drawn = torch.where(drawn >= 0, drawn, from_p)
    rejected = torch.stack([drawn, torch.full_like(drawn, -1)], 1)
    return torch.where(accepted.unsqueeze(-1), torch.stack([x[:, 0], drawn], 1), rejected), accepted.long()


def target_alone(**args: Any) -> tuple[Tensor, Tensor]:
    """No filter on either side, though the drafts were sampled with all."""
    return torch_specops.verify_exact(**{name: value for name, value in args.items() if name not in ALL})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("q before the filters", q_before_the_filters),
        ("top_p before top_k", other_order("top_p", "top_k", "min_p")),
        ("min_p before top_p", other_order("top_k", "min_p", "top_p")),
        ("no renormalisation", without_renormalisation),
        ("no filter", target_alone),
    ],
)
def test_wrong_sampler_is_caught(name: str, wrong: Verify, report: Report) -> None:
    target, draft = tables(1, "close")
    expect_caught(report, name, p_values(emit(target, draft, ALL, seed=2, verify=wrong), target, ALL))


def test_the_right_order_as_single_filters_is_no_wrong_sampler(report: Report) -> None:
    """Control of the samplers above: the same code in transformers' order."""
    target, draft = tables(1, "close")
    tokens = emit(target, draft, ALL, seed=12, verify=other_order("top_k", "top_p", "min_p"))
    expect_laws(report, "one after the other", p_values(tokens, target, ALL))


@pytest.mark.parametrize("filters", [{}, ALL], ids=["no filter", "all filters"])
@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_acceptance_rate_under_lenience(filters: Filters, lenience: float, report: Report) -> None:
    """alpha = sum min(p / l, q), Leviathan et al. appendix A.5."""
    target, draft = (table[START] for table in tables(13, "close"))
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    p, q = (filtered_softmax(logits[None], filters or off, 1.0)[0] for logits in (target, draft))
    alpha = torch.minimum(p / lenience, q).sum()
    generator = torch.Generator().manual_seed(14)
    options = per_row(filters, TRIALS)
    x, _ = torch_specops.sample(draft.expand(TRIALS, V), torch.rand(TRIALS, generator=generator), **options)
    _, n = torch_specops.verify_exact(
        target.expand(TRIALS, 2, V),
        x.unsqueeze(-1),
        draft.expand(TRIALS, 1, V),
        torch.rand(TRIALS, 1, generator=generator),
        torch.rand(TRIALS, generator=generator),
        lenience=lenience,
        **options,
    )
    law = torch.stack([1 - alpha, alpha])
    name = f"lenience {lenience}, {'all filters' if filters else 'no filter'}"
    expect_laws(report, name, {"num_accepted": chi_square(torch.bincount(n, minlength=2), law)})
    if lenience < 1:
        exact = torch.minimum(p, q).sum()
        p_value = chi_square(torch.bincount(n, minlength=2), torch.stack([1 - exact, exact]))
        expect_caught(report, f"{name}, as lossless", {"num_accepted": p_value})


@pytest.mark.parametrize("verify", [reference.verify_exact, torch_specops.verify_exact], ids=["oracle", "op"])
@pytest.mark.parametrize("argmax_lenience", [1.0, 0.9, 0.45, 0.3, 0.01])
@pytest.mark.parametrize("counts", [(3, 2, 1), (1, 4, 4, 2), (0, 5, 1, 0), (1,)])
def test_argmax_lenience_by_enumeration(verify: Verify, argmax_lenience: float, counts: tuple[int, ...]) -> None:
    """x is accepted iff p(x) >= l max p, and else the argmax is emitted: the law over drafts of weights 1, 2, 3.. is
    known as fractions. None of these l is a ratio of two counts."""
    logits = torch.tensor([math.log(c) if c else -INF for c in counts])
    size, best = len(counts), counts.index(max(counts))
    weights = [Fraction(x + 1, size * (size + 1) // 2) for x in range(size)]
    output, n = verify(
        logits.expand(size, 2, size),
        torch.arange(size).unsqueeze(-1),
        None,
        torch.full((size, 1), 0.999),
        torch.full((size,), 0.999),
        temperature=torch.zeros(size),
        argmax_lenience=argmax_lenience,
    )
    law: Counter[tuple[int, int]] = Counter()
    expected: Counter[tuple[int, int]] = Counter()
    for x, weight in enumerate(weights):
        law[int(output[x, 0]), int(n[x])] += weight
        near = counts[x] >= Fraction(argmax_lenience) * max(counts) if argmax_lenience < 1 else x == best
        expected[(x, 1) if near else (best, 0)] += weight
    assert law == expected
    # After an accepted draft the next token is the argmax all the same.
    assert all(int(row[m]) == best for row, m in zip(output, n, strict=True))


def test_argmax_lenience_is_for_greedy_rows_alone() -> None:
    """And lenience is for the others."""
    generator = torch.Generator().manual_seed(15)
    target = torch.randn(64, 4, V, generator=generator)
    args: dict[str, Any] = {
        "target_logits": target,
        "draft_tokens": torch.randint(0, V, (64, 3), generator=generator),
        "draft_logits": torch.randn(64, 3, V, generator=generator),
        "accept_uniforms": torch.rand(64, 3, generator=generator),
        "sample_uniforms": torch.rand(64, generator=generator),
        "temperature": torch.tensor([0.0, 1.0]).repeat(32),
    }
    greedy = args["temperature"] == 0
    strict = torch_specops.verify_exact(**args)
    for options, changed in (({"argmax_lenience": 0.2}, greedy), ({"lenience": 0.2}, ~greedy)):
        lenient = torch_specops.verify_exact(**args, **options)
        assert torch.equal(lenient[0][~changed], strict[0][~changed])
        assert torch.equal(lenient[1][~changed], strict[1][~changed])
        assert (lenient[1] >= strict[1]).all() and (lenient[1] > strict[1]).any()
