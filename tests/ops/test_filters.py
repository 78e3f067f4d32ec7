"""top_k, top_p and min_p: the oracle against transformers' processors and by hand, and the search in long rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from marks import slow
from op_cases import FILTERS, assert_bounds, call, call_traced, check, op_arguments, results
from report import Report
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import torch_specops
from torch_specops import reference
from torch_specops.ops.cpu import filters as dense_filters
from torch_specops.testing import compare, sample_inputs
from torch_specops.testing.cases import case_names

INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max


def transformers_filter(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[V] what transformers' processors leave of a row, in their order, in float64."""
    transformers = pytest.importorskip("transformers")
    scores = (row.double() / temperature).unsqueeze(0)
    processors: list[Any] = []
    if top_k > 0:
        processors.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(transformers.TopPLogitsWarper(top_p))
    if min_p > 0:
        processors.append(transformers.MinPLogitsWarper(min_p))
    for processor in processors:
        scores = processor(None, scores)
    return torch.where(scores[0] > -INF, row, -INF)


def distance_to_boundary(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> float:
    """How near top_p lies to a sum of probabilities, or min_p to a ratio: below 2**-24, where a sum counts as having
    reached top_p, the law decides otherwise."""
    kept = reference.filtered(row, temperature, top_k).double()
    p = torch.softmax(kept / temperature, -1).sort(descending=True).values
    return min(float((p.cumsum(0) - top_p).abs().min()), float((p / p[0] - min_p).abs().min()))


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """[V] logits, many with ties: normal, rounded to few values or to bfloat16, some masked."""
    vocab_size = draw(st.sampled_from((1, 2, 7, 40, 300)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    row = draw(st.sampled_from((0.3, 2.0, 8.0))) * torch.randn(vocab_size, generator=generator)
    kind = draw(st.sampled_from(("float32", "bfloat16", "plateaus")))
    if kind == "plateaus":
        row = (row / 2).round() * 2
    if kind != "float32":
        row = row.bfloat16().float()
    masked = torch.rand(vocab_size, generator=generator) < draw(st.sampled_from((0.0, 0.5)))
    masked[int(torch.randint(vocab_size, (), generator=generator))] = False
    return row.masked_fill(masked, -INF)


TOP_P = st.one_of(st.floats(0.0, 1.0, width=32), st.sampled_from((1e-6, 0.9, 0.5, 1.0 - 2.0**-24, 1.0)))
MIN_P = st.one_of(st.floats(0.0, 1.0, width=32), st.sampled_from((0.0, 0.05, 1e-30, 1.0)))


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(rows(), st.sampled_from((1.0, 0.7, 2.5, 0.05)), st.integers(0, 310), TOP_P, MIN_P)
def test_oracle_equals_transformers(row: Tensor, t: float, top_k: int, top_p: float, min_p: float) -> None:
    """Which of the tokens that tie at top_p's boundary are kept, transformers leaves to torch.sort, which is stable in
    some builds and not in others. With a stable sort the sets are equal, with any the values that are left."""
    got = reference.filtered(row, t, top_k, top_p, min_p)
    sort = torch.sort
    with mock.patch.object(torch, "sort", lambda x, **options: sort(x, stable=True, **options)):
        expected = transformers_filter(row, t, top_k, top_p, min_p)
    as_installed = transformers_filter(row, t, top_k, top_p, min_p)
    if not (torch.equal(got, expected) and torch.equal(got.sort().values, as_installed.sort().values)):
        assert distance_to_boundary(row, t, top_k, top_p, min_p) < 2.0**-24


@pytest.mark.parametrize(
    ("row", "filters", "kept"),
    [
        # Four equal tokens of 1/4: those of the highest index come first, and a mass of 1/2 needs two.
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, [2, 3]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.51}, [1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": -1.0}, [3]),
        # As float32 these lie above the decimals, which are met exactly.
        *(([0.0] * 10, {"top_p": tenths / 10}, list(range(10 - tenths, 10))) for tenths in (2, 3, 4, 6, 8)),
        # min_p compares with the largest probability, ties with it included.
        ([0.0, 0.0, -1.0, -2.0], {"min_p": 2.0, "top_p": 1.0}, [0, 1]),
        # Off.
        ([0.0, 1.0, -1.0], {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, [0, 1, 2]),
        ([0.0, 1.0, -1.0], {"top_k": 3, "top_p": 1.5, "min_p": -1.0}, [0, 1, 2]),
        ([0.0, 1.0, -1.0], {"top_k": -1}, [0, 1, 2]),
        # What is excluded stays so, and does not count; infinities come before the largest float32.
        ([-INF, 1.0, NAN, 0.0], {"top_k": 3}, [1, 3]),
        ([INF, 1.0, LARGEST, INF], {"top_k": 1}, [0, 3]),
        ([INF, 1.0, LARGEST, INF], {"top_p": 0.5}, [0, 3]),
        ([INF, 1.0, LARGEST, INF], {"top_p": 0.5, "temperature": 2.0}, [3]),
        ([INF, 1.0, LARGEST, INF], {"top_p": 0.9, "temperature": 0.5}, [0, 2, 3]),
        ([INF, 1.0], {"temperature": -1.0, "top_k": 1}, []),
        # No law.
        ([0.0, 1.0], {"top_p": NAN}, []),
        ([0.0, 1.0], {"min_p": NAN}, []),
        ([0.0, 1.0], {"temperature": -1.0}, []),
        ([0.0, 1.0], {"temperature": NAN, "top_k": 1}, []),
        # A greedy row keeps all, whatever the filters.
        ([0.0, 1.0], {"temperature": 0.0, "top_k": 1, "top_p": NAN}, [0, 1]),
    ],
)
def test_by_hand(row: list[float], filters: dict[str, float], kept: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers does not say: the oracle, and both ways in which the dense form finds the bounds."""
    args = {name: torch.tensor([value]) for name, value in filters.items()}
    logits = torch.tensor([row])
    expected = torch.full_like(logits, -INF)
    expected[0, kept] = logits[0, kept]
    assert torch.equal(reference.filter_logits(logits, **args), expected)
    assert torch.equal(torch_specops.filter_logits(logits, **args), expected)
    monkeypatch.setattr(dense_filters, "SHORT_ROW", 0)
    assert torch.equal(torch_specops.filter_logits(logits, **args), expected)


FILTERED = [name for name in case_names("filter_logits") if name in FILTERS or name.startswith("filters")]


def test_long_rows_equal_the_oracle(report: Report) -> None:
    """On the far side of the length from which rows are searched one by one; `test_oracle_grid.py` has short rows."""
    check(results(sample_inputs("filter_logits", vocab_sizes=[2049, 5000], names=FILTERED)), report)


@pytest.mark.parametrize(
    "op, head",
    [
        *(("filter_logits", head) for head in (1, 3, 256)),
        ("verify_block", 3),
        *(slow("verify_block", h) for h in (1, 256)),
    ],
)
def test_the_search_in_long_rows(op: str, head: int, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows searched as long ones are, from fewer of their largest logits than the mass needs."""
    monkeypatch.setattr(dense_filters, "SHORT_ROW", 0)
    monkeypatch.setattr(dense_filters, "HEAD", head)
    check(results(sample_inputs(op, vocab_sizes=[17, 130], names=FILTERED, seed=head)), report)


def in_order(names: Sequence[str], logits: Tensor, temperature: Tensor | None = None, **filters: Tensor) -> Tensor:
    """The filters one by one."""
    for name in names:
        logits = reference.filter_logits(logits, temperature, **{name: filters[name]} if name in filters else {})
    return logits


def filters_with(mistake: str, args: dict[str, Tensor]) -> Tensor:
    logits, t = args["logits"], args.get("temperature", torch.ones(()))
    if mistake.startswith("in the order "):
        return in_order(mistake.split()[3:], **args)
    if mistake == "ties from below":
        return reference.filter_logits(**args | {"logits": logits.flip(-1)}).flip(-1)
    if mistake == "top_k without ties":
        spread = logits.double() + 1e-9 * torch.arange(logits.shape[-1])
        return torch.where(reference.filter_logits(**args | {"logits": spread}) > -INF, logits, -INF)
    if mistake == "scaled output":
        kept = reference.filter_logits(**args)
        return (kept / torch.where(t > 0, t, 1.0).unsqueeze(-1)).to(kept.dtype)
    temperatures = {"greedy rows too": torch.where(t == 0, 1.0, t).expand(len(logits)), "no temperature": None}
    return reference.filter_logits(**args | {"temperature": temperatures[mistake]})


@pytest.mark.parametrize(
    "mistake",
    [
        "ties from below",
        "top_k without ties",
        "greedy rows too",
        "no temperature",
        "scaled output",
        "in the order top_p top_k min_p",
        "in the order top_k top_p",
        "in the order min_p top_p top_k",
    ],
)
def test_wrong_filter_is_caught(mistake: str) -> None:
    """Control: the oracle with one mistake."""
    cases = sample_inputs("filter_logits", vocab_sizes=[17])
    assert any(compare(case, filters_with(mistake, case.args)).wrong for case in cases)


def test_in_the_right_order_the_filters_compose() -> None:
    for case in sample_inputs("filter_logits", vocab_sizes=[17, 130]):
        # What one filter leaves of a row without a law has no finite entry.
        assert torch.equal(in_order(FILTERS, **case.args), reference.filter_logits(**case.args)), case.name


@pytest.mark.usefixtures("fresh_dynamo")
def test_absent_filters_compile_away() -> None:
    """The graph of a call without filters calls no op of ours."""
    graphs: list[str] = []

    def record(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes if "specops" in str(node.target))
        return make_boxed_func(graph)

    compiled = torch.compile(torch_specops.sample, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    compiled(**op_arguments("sample", filtered=False))
    assert graphs == []
    compiled(**op_arguments("sample"))
    assert graphs == ["specops.filter_bounds.default"]


def test_returned_bounds_are_those_of_the_filters() -> None:
    num_cases = 0
    for case in sample_inputs("sample", vocab_sizes=(37,)):
        more = case.args | {"with_bounds": True}
        assert_bounds(case.args, *reference.sample(**case.args), *reference.sample(**more))
        assert_bounds(case.args, *call("sample", case.args), *call("sample", more))
        assert_bounds(case.args, *call_traced("sample", case.args), *call_traced("sample", more))
        num_cases += 1
    assert num_cases > 30
