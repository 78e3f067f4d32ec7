"""Bad input, through the Python functions, through `torch.ops.specops`, and traced: the error names the argument, what
was expected and what came. What only the data could tell follows the law."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import FILTERS, OPS, SCHEMAS, VERIFY_OPS, call, equal, op_arguments
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.ops.arguments import GumbelArguments, SigmoidArguments, VerifyArguments

B, K, V = 2, 3, 11
INF, NAN = torch.inf, torch.nan
# argument -> (dtypes it takes, its axes)
TENSORS = {
    "target_logits": ("float32 or bfloat16 or float16", "[B, K+1, V]"),
    "draft_tokens": ("int64 or int32", "[B, K]"),
    "draft_logits": ("float32 or bfloat16 or float16", "[B, K, V]"),
    "accept_uniforms": ("float32 or float64", "[B, K]"),
    "sample_uniforms": ("float32 or float64", "[B]"),
    "draft_lse": ("float32", "[B, K]"),
    "logits": ("float32 or bfloat16 or float16", "[N, V]"),
    "uniforms": ("float32 or float64", "[N]"),
    "seeds": ("int64", "[B]"),
    "positions": ("int64", "[B]"),
    "temperature": ("float32", "[B]"),
    "top_k": ("int64 or int32", "[B]"),
    "top_p": ("float32", "[B]"),
    "min_p": ("float32", "[B]"),
    "draft_is_one_hot": ("bool", "[B]"),
}
FLAGS = ("filter_draft", "with_bounds")
# argument -> (values out of range, other kinds); a number stands for all rows
ROW_NUMBERS = {
    "temperature": ((-1e-9, 1e39, INF, NAN), "a tensor or a number"),
    "top_k": ((-1, 2**63), "a tensor or an int"),
    "top_p": ((-0.1, 1.1, NAN), "a tensor or a number"),
    "min_p": ((-0.1, 1.1, NAN), "a tensor or a number"),
}
# argument -> (what is expected, values out of range)
NUMBERS = {
    "lenience": ("(0, 1]", (0.0, -0.5, 1.0000001, 2, INF, -INF, NAN)),
    "argmax_lenience": ("(0, 1]", (0.0, -0.5, 1.0000001, 2, INF, -INF, NAN)),
    "alpha": ("(-1e36, -1e-36)", (0.0, 1.0, -1e-38, -1e38, -INF, INF, NAN)),
    "beta": ("(1e-36, 1e36)", (0.0, -1.0, 1e-38, 1e38, INF, -INF, NAN)),
}


def good(op: str) -> dict[str, Any]:
    """Every argument, and rows that all have a law."""
    given = op_arguments(op, B, K, V)
    return given | {name: torch.ones(B) for name in given.keys() & {"temperature"}}


def function(op: str, through: str) -> Callable[..., Any]:
    return getattr(torch_specops if through == "function" else torch.ops.specops, op)


# A bad value of an argument, the error, and what its message says.
Bad = tuple[object, type[Exception], tuple[str, ...]]


def bad_metadata(op: str, name: str) -> Iterator[Bad]:
    dtypes, axes = TENSORS[name]
    axes = axes if op in VERIFY_OPS else axes.replace("B", "N")
    value = good(op)[name]
    shape = list(value.shape)
    yield value.unsqueeze(0), ValueError, (axes, str([1, *shape]))
    yield value[0], ValueError, (axes, str(shape[1:]))
    # The logits' own batch and vocabulary are what the others are measured against.
    for axis in range(value.dim()) if name not in ("target_logits", "logits") else ():
        for size in (shape[axis] - 1, shape[axis] + 1):
            wrong = value.index_select(axis, torch.arange(size) % shape[axis])
            yield wrong, ValueError, (axes, str(shape), str(list(wrong.shape)))
    for dtype in ("float64" if "float64" not in dtypes else "bfloat16", "bool", "complex64", "uint8"):
        if dtype != dtypes:
            yield value.to(getattr(torch, dtype)), TypeError, (dtypes, dtype)
    if name not in ("target_logits", "logits"):
        yield value.to("meta"), ValueError, ("cpu", "meta")
    yield value.to_sparse(), ValueError, ("strided", "sparse")
    if name in ("target_logits", "logits"):
        yield value[..., :0], ValueError, ("a vocabulary of 1 ", ", 0]")
    if name == "target_logits":
        yield value[:, :0], ValueError, ("[B, K+1, V] with K >= 0", "[2, 0, 11]")


def bad_numbers(op: str, name: str) -> Iterator[Bad]:
    expected, values = NUMBERS[name]
    if (op, name) == ("verify_block", "lenience"):
        expected, values = "1.0, as block", (*values, 0.3)
    return ((value, ValueError, (expected, f"got {float(value)}")) for value in values)


def bad_kinds(op: str, name: str) -> Iterator[Bad]:
    array = good(op)[name].numpy() if name in TENSORS else None
    values: tuple[object, ...] = ([1.0, 2.0], "logits", 1.0, array)
    expected = "a tensor"
    if name in NUMBERS:
        values, expected = (None, "1.0", [1.0], True, 1j, torch.tensor(1.0)), "a number"
    elif name in FLAGS:
        values, expected = (None, 1, "True", torch.tensor(True)), "a bool"
    elif name in ROW_NUMBERS:
        values, expected = ([1.0, 2.0], "0.5", True, array, *((1.0,) if name == "top_k" else ())), ROW_NUMBERS[name][1]
    elif not any(each.name == name and str(each.type).startswith("Optional") for each in schema_of(op).arguments):
        values = (*values, None)
    return ((value, TypeError, (f"expected {expected}, got {type(value)}",)) for value in values)


def schema_of(op: str) -> Any:
    return getattr(torch.ops.specops, op).default._schema


def outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> tuple[type[BaseException] | None, str]:
    try:
        call(**arguments)
    except Exception as error:
        return type(error), str(error)
    return None, "no error"


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments(op: str) -> None:
    """The functions name the argument, and so do the ops; but of another kind the dispatcher refuses in its own words,
    where it refuses at all."""
    failures = []

    def check(name: str, value: object, error: type[Exception], said: tuple[str, ...], through: str) -> None:
        got, message = outcome(function(op, through), good(op) | {name: value})
        if got is not error or not all(each in message for each in (f"{name}: expected ", *said)):
            failures.append((name, said, through, got, message))

    for name in good(op):
        for bad in bad_numbers(op, name) if name in NUMBERS else () if name in FLAGS else bad_metadata(op, name):
            check(name, *bad, "function")
            check(name, *bad, "op")
        for bad in bad_kinds(op, name):
            check(name, *bad, "function")
            refused = outcome(function(op, "op"), good(op) | {name: bad[0]})[0] is not None
            if name not in (*NUMBERS, *FLAGS) and not refused:
                failures.append((name, bad[0], "op"))
    assert not failures


@pytest.mark.parametrize("op", OPS)
def test_good_input_passes(op: str) -> None:
    integers = {"lenience": 1, "argmax_lenience": 1, "alpha": -(10**30), "beta": 10**30}
    for through in ("function", "op"):
        function(op, through)(**good(op))
        function(op, through)(**good(op) | {name: value for name, value in integers.items() if name in good(op)})
        absent = [name for name in good(op) if name in (*FILTERS, "temperature", "draft_lse")]
        function(op, through)(**good(op) | dict.fromkeys(absent))
    if op in VERIFY_OPS:
        # The drafts agree on K, so a missing bonus row, or one too many, is named as what it is.
        for rows in (K, K + 2) if op != "verify_gumbel" else ():
            logits = torch.zeros(B, rows, V)
            with pytest.raises(
                ValueError, match=rf"^target_logits: expected \[B, K\+1, V\] with K = 3, .* \[2, {rows}, 11\]"
            ):
                function(op, "function")(**good(op) | {"target_logits": logits})
    if "draft_lse" in good(op):
        with pytest.raises(ValueError, match=r"^draft_lse: expected None when draft_logits is None .*got"):
            function(op, "function")(**good(op) | {"draft_logits": None})


@pytest.mark.parametrize("op", OPS)
def test_a_number_stands_for_all_rows(op: str) -> None:
    """In the functions, mapped too, and in the oracle; the ops take tensors alone."""
    numbers: dict[str, Any] = {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 1}
    numbers = {name: value for name, value in numbers.items() if name in good(op)}
    dtypes = {"top_k": torch.int64}
    tensors = {name: torch.full((B,), x, dtype=dtypes.get(name, torch.float32)) for name, x in numbers.items()}
    expected = call(op, good(op) | tensors)
    assert equal(call(op, good(op) | numbers), expected)
    of_numpy = {name: np.int64(x) if name == "top_k" else np.float32(x) for name, x in numbers.items()}
    assert equal(call(op, good(op) | of_numpy), expected)
    got, want = (getattr(reference, op)(**good(op) | values) for values in (numbers, tensors))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    given = {name: value for name, value in good(op).items() if name not in numbers}
    tensors = {name: value.unsqueeze(0) for name, value in given.items() if isinstance(value, Tensor)}
    mapped = torch.func.vmap(lambda *values: call(op, given | dict(zip(tensors, values, strict=True)) | numbers))
    assert equal(tuple(each[0] for each in mapped(*tensors.values())), expected)
    for name, (out_of_range, _) in ROW_NUMBERS.items() if op != "verify_sigmoid" else ():
        for value in out_of_range:
            error, message = outcome(function(op, "function"), good(op) | {name: value})
            expected = {"temperature": ">= 0 that is finite in float32", "top_k": ">= 0 that int64 has"}
            assert error is ValueError
            assert message.startswith(f"{name}: expected a number {expected.get(name, 'in [0, 1]')}, got ")
            assert message.endswith(f", got {value}")
        assert outcome(function(op, "op"), good(op) | {name: 0.5})[0] is not None


@pytest.mark.parametrize("op, names", [("verify_exact", ["lenience", "argmax_lenience"]), ("verify_sigmoid", ["beta"])])
def test_numbers_of_numpy_for_the_law(op: str, names: list[str]) -> None:
    found = [call(op, good(op) | dict.fromkeys(names, kind(0.5))) for kind in (float, np.float16, np.float32)]
    assert all(equal(each, found[0]) for each in found)


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_for_all_numbers() -> None:
    compiled = torch.compile(torch_specops.sample, fullgraph=True, backend="aot_eager")
    for i, (temperature, top_k, top_p) in enumerate([(0.5, 3, 0.9), (1.5, 4, 0.8), (2.5, 5, 0.7), (0.0, 6, 0.6)]):
        numbers = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": None}
        # The first numbers are taken for constants.
        with torch.compiler.set_stance("fail_on_recompile" if i > 1 else "default"):
            assert equal(compiled(**good("sample") | numbers), call("sample", good("sample") | numbers))


def test_the_schema_is_the_contract() -> None:
    """Names, order and defaults are what callers rely on, and the same in signatures, argument objects and schemas."""
    assert {op: str(schema_of(op)) for op in OPS} == SCHEMAS
    kinds = {"verify_exact": VerifyArguments, "verify_sigmoid": SigmoidArguments, "verify_gumbel": GumbelArguments}
    for op, kind in kinds.items():
        parameters = inspect.signature(getattr(torch_specops, op)).parameters.values()
        assert tuple(parameter.name for parameter in parameters) == kind._fields
        given = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert given == kind._field_defaults


def causes(error: BaseException | None) -> str:
    """The messages of an exception and of everything that it came from."""
    return "" if error is None else f"{error}\n{causes(error.__cause__)}\n{causes(error.__context__)}"


def unreachable(*_: object) -> None:
    pytest.fail("bad input reached the compiler backend")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("op", "name", "value", "said"),
    [
        ("verify_exact", "draft_tokens", torch.zeros(B, 2).long(), "expected [B, K] = [2, 3], got shape [2, 2]"),
        ("verify_block", "lenience", 0.5, "expected 1.0, as block verification has no other, got 0.5"),
        ("verify_block", "filter_draft", 0, "expected a bool, got <class 'int'>"),
        ("verify_sigmoid", "alpha", True, "expected a number, got <class 'bool'>"),
        ("verify_gumbel", "seeds", torch.zeros(B), "expected int64, got float32"),
        ("sample_gumbel", "positions", [0, 0], "expected a tensor, got <class 'list'>"),
        ("sample", "uniforms", [0.5, 0.5], "expected a tensor, got <class 'list'>"),
        ("filter_logits", "min_p", torch.ones(B).double(), "expected float32, got float64"),
    ],
)
def test_traced(op: str, name: str, value: object, said: str) -> None:
    """Bad input is refused while tracing, with our message; where a graph may break, by the eager error itself. An op
    that is called without its function shows the message further up."""
    arguments = good(op) | {name: value}
    compiled = torch.compile(function(op, "function"), backend=unreachable)
    eager = outcome(function(op, "function"), arguments)
    assert outcome(compiled, arguments) == eager and eager[1] == f"{name}: {said}"
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"\n.*context: raised exception .*{re.escape(eager[1])}"):
        torch.compile(function(op, "function"), fullgraph=True, backend=unreachable)(**arguments)
    if isinstance(value, Tensor):
        with pytest.raises(Exception) as caught:
            torch.compile(function(op, "op"), fullgraph=True, backend=unreachable)(**arguments)
        assert eager[1] in causes(caught.value)
