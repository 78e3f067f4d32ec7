"""The law under top_k, top_p and min_p, by chi-square against that of the filtered target, samplers that filter
wrongly, and the two kinds of lenience."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from chains import START, TRIALS, Uniforms, Verify, chain_p_values, emit, expect_caught, expect_laws, probabilities
from chains import tables as chain_tables
from marks import slow
from report import Report
from torch import Tensor

import torch_specops
from torch_specops import reference

# In `tables(1, "close")` each removes tokens that the others keep, and every other order gives other sets.
ALL = {"top_k": 9, "top_p": 0.8, "min_p": 0.15}
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def tables(seed: int, draft: str) -> tuple[Tensor, Tensor]:
    return chain_tables(seed, draft, spread=1.2)


def per_row(filters: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.full((TRIALS,), value) for name, value in filters.items()}


def filtered_tokens(
    target: Tensor, draft: Tensor | None, filters: dict[str, float], seed: int, **options: Any
) -> Tensor:
    """[TRIALS, 2] tokens of steps with one draft, which is sampled with the same filters."""
    temperature = torch.full((TRIALS,), options.pop("temperature", 1.0))
    uniforms = Uniforms(seed)
    return emit(target, draft, 1, uniforms, length=2, temperature=temperature, filters=per_row(filters), **options)


@pytest.mark.parametrize(
    ("draft", "filters", "options"),
    [
        ("close", {"top_k": 4}, {}),
        ("close", {"top_p": 0.7}, {}),
        ("close", {"min_p": 0.15}, {}),
        ("close", ALL, {}),
        ("opposite", ALL, {"temperature": 0.8, "lse": True}),
        ("one-hot", ALL, {}),
    ],
    ids=str,
)
def test_tokens_follow_the_filtered_target(
    draft: str, filters: dict[str, float], options: dict[str, Any], report: Report
) -> None:
    target, logits = tables(1, "close" if draft == "one-hot" else draft)
    tokens = filtered_tokens(target, None if draft == "one-hot" else logits, filters, seed=2, **options)
    p_values = chain_p_values(tokens, target, options.get("temperature", 1.0), **filters)
    expect_laws(report, f"filters {list(filters)}, {draft} draft", p_values)


def test_ties_follow_the_filtered_target(report: Report) -> None:
    """Rounded logits: the tokens at a boundary tie, and top_p keeps some of them."""
    target, draft = (table.round() for table in tables(5, "close"))
    kept = probabilities(target, **ALL) > 0
    assert any(((row == value) & keep).any() and ((row == value) & ~keep).any()
               for row, keep in zip(target, kept, strict=True) for value in row)  # fmt: skip
    tokens = filtered_tokens(target, draft, ALL, seed=6)
    expect_laws(report, "filters, ties", chain_p_values(tokens, target, **ALL))


def test_rows_of_other_filters_share_a_batch(report: Report) -> None:
    """Every row follows the law of its own filters; greedy rows ignore them. The drafts are one-hot."""
    target, _ = tables(9, "close")
    kinds = [(ALL, 1.0), (OFF, 1.0), (ALL, 0.0)]
    kind = torch.arange(TRIALS) % len(kinds)
    filters = {name: torch.tensor([values[name] for values, _ in kinds])[kind] for name in ALL}
    temperature = torch.tensor([t for _, t in kinds])[kind]
    tokens = emit(target, None, 1, Uniforms(10), length=2, temperature=temperature, filters=filters)
    for k, (values, t) in enumerate(kinds[:2]):
        name = f"filters, row kind {k} of a mixed batch"
        expect_laws(report, name, chain_p_values(tokens[kind == k], target, t, **values))
    first = int(target[START].argmax())
    assert torch.equal(tokens[kind == 2].unique(dim=0), torch.tensor([[first, int(target[first].argmax())]]))


def filtered_rows(logits: Tensor, args: dict[str, Any], filters: dict[str, Tensor]) -> Tensor:
    """[B, rows, V] filtered beforehand."""
    repeats = logits.shape[1]
    repeated = {name: value.repeat_interleave(repeats) for name, value in filters.items()}
    temperature = args["temperature"].repeat_interleave(repeats)
    return torch_specops.filter_logits(logits.flatten(0, 1), temperature, **repeated).view_as(logits)


def q_before_the_filters(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """The target is filtered, and q taken from the unfiltered draft, whose tokens were sampled after filtering."""
    filters = {name: args.pop(name) for name in ALL}
    return torch_specops.verify_exact(**args | {"target_logits": filtered_rows(args["target_logits"], args, filters)})


def other_order(*names: str) -> Verify:
    """The filters one by one in this order, on both sides: lossless, but for another target."""

    def verify(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
        filters = {name: args.pop(name) for name in ALL}
        for key in ("target_logits", "draft_logits"):
            for name in names:
                args[key] = filtered_rows(args[key], args, {name: filters[name]})
        return torch_specops.verify_exact(**args)

    return verify


def no_filter(propose: Tensor, **args: Any) -> tuple[Tensor, Tensor]:
    """No filter on either side, though the drafts were sampled with all."""
    return torch_specops.verify_exact(**{name: value for name, value in args.items() if name not in ALL})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("the right order", other_order("top_k", "top_p", "min_p")),
        ("q before the filters", q_before_the_filters),
        slow("top_p before top_k", other_order("top_p", "top_k", "min_p")),
        ("min_p before top_p", other_order("top_k", "min_p", "top_p")),
        slow("no filter", no_filter),
    ],
)
def test_wrong_sampler_is_caught(name: str, wrong: Verify, report: Report) -> None:
    """The control is the same code in transformers' order."""
    target, draft = tables(1, "close")
    tokens = filtered_tokens(target, draft, ALL, seed=2, verify=wrong)
    expect = expect_laws if name == "the right order" else expect_caught
    expect(report, f"filters, {name}", chain_p_values(tokens, target, **ALL))


@pytest.mark.parametrize("op", ["verify_exact", "verify_block"])
def test_drafts_sampled_without_the_filters(op: str) -> None:
    """The law of the first token by enumeration: every draft, and a grid of both uniforms. Drafts of the unfiltered q
    verified against the filtered one, as an engine that filters the target alone might call it, have another law."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    grid = (torch.arange(200) + 0.5) / 200
    x, u, s = torch.cartesian_prod(torch.arange(3.0), grid, grid).unbind(1)
    arguments = (p.log().expand(len(x), 2, 3), x.long().unsqueeze(1), q.log().expand(len(x), 1, 3), u.unsqueeze(1), s)
    right, naive = (torch.tensor(law, dtype=torch.float64) for law in ([0.625, 0.375, 0.0], [0.7, 0.3, 0.0]))
    top_k, lse = torch.full((len(x),), 2), torch.zeros(len(x), 1)
    for options, expected in (
        ({}, naive),
        ({"filter_draft": False}, right),
        ({"filter_draft": False, "draft_lse": lse}, right),
    ):
        output, _ = getattr(torch_specops, op)(*arguments, top_k=top_k, **options)
        law = torch.bincount(output[:, 0], weights=q[x.long()].double(), minlength=3) / len(grid) ** 2
        torch.testing.assert_close(law, expected, rtol=0, atol=0.005)


@pytest.mark.parametrize("argmax_lenience", [1.0, 0.9, 0.45, 0.3, 0.01])
def test_argmax_lenience(argmax_lenience: float) -> None:
    """x is accepted iff p(x) >= l max p, and else the argmax is emitted. None of these l is a ratio of two counts."""
    for counts in ((3, 2, 1), (1, 4, 4, 2), (0, 5, 1, 0), (1,)):
        logits = torch.tensor([math.log(c) if c else -math.inf for c in counts])
        size, best = len(counts), counts.index(max(counts))
        output, n = reference.verify_exact(
            logits.expand(size, 2, size),
            torch.arange(size).unsqueeze(-1),
            None,
            torch.full((size, 1), 0.999),
            torch.full((size,), 0.999),
            temperature=torch.zeros(size),
            argmax_lenience=argmax_lenience,
        )
        for x, count in enumerate(counts):
            near = count >= argmax_lenience * max(counts) if argmax_lenience < 1 else x == best
            # After an accepted draft the next token is the argmax all the same.
            assert output[x].tolist() == ([x, best] if near else [best, -1]) and int(n[x]) == near
