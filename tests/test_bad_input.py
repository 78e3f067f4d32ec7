"""Bad input: every argument of every op, eager through the Python functions, eager through `torch.ops.specops`, and
traced. The error names the argument, what was expected and what came. What only the data could tell follows the law."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_specops

B, K, V = 2, 3, 11
LOGITS = "float32 or bfloat16 or float16"
TOKENS = "int64 or int32"
UNIFORMS = "float32 or float64"
VERIFY_OPS = ("verify_exact", "verify_block", "verify_sigmoid")


def good(op: str) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    # Filters that keep every token.
    filters = {"top_k": torch.full((B,), V), "top_p": torch.ones(B), "min_p": torch.zeros(B)}
    if op in ("sample", "filter_logits"):
        logits, uniforms = torch.randn(B, V, generator=g), torch.rand(B, generator=g)
        arguments = {"logits": logits, "temperature": torch.ones(B)} | filters
        return arguments if op == "filter_logits" else arguments | {"uniforms": uniforms}
    arguments = {
        "target_logits": torch.randn(B, K + 1, V, generator=g),
        "draft_tokens": torch.randint(0, V, (B, K), generator=g),
        "draft_logits": torch.randn(B, K, V, generator=g),
        "accept_uniforms": torch.rand(B, K, generator=g),
        "sample_uniforms": torch.rand(B, generator=g),
        "temperature": torch.ones(B),
    }
    if op == "verify_sigmoid":
        return arguments | {"alpha": -1.0, "beta": 1.0}
    arguments |= {"draft_lse": arguments["draft_logits"].logsumexp(-1), "lenience": 1.0} | filters
    return arguments if op == "verify_block" else arguments | {"argmax_lenience": 1.0}


FILTERS = {"top_k": TOKENS, "top_p": "float32", "min_p": "float32"}
# argument -> (dtypes it takes, its axes)
TENSORS: dict[str, dict[str, tuple[str, str]]] = {
    "verify_exact": {
        "target_logits": (LOGITS, "[B, K+1, V]"),
        "draft_tokens": (TOKENS, "[B, K]"),
        "draft_logits": (LOGITS, "[B, K, V]"),
        "accept_uniforms": (UNIFORMS, "[B, K]"),
        "sample_uniforms": (UNIFORMS, "[B]"),
        "temperature": ("float32", "[B]"),
        "draft_lse": ("float32", "[B, K]"),
    },
    "sample": {"logits": (LOGITS, "[N, V]"), "uniforms": (UNIFORMS, "[N]"), "temperature": ("float32", "[N]")},
    "filter_logits": {"logits": (LOGITS, "[N, V]"), "temperature": ("float32", "[N]")},
}
TENSORS["verify_sigmoid"] = {name: wants for name, wants in TENSORS["verify_exact"].items() if name != "draft_lse"}
TENSORS["verify_exact"] |= {name: (dtypes, "[B]") for name, dtypes in FILTERS.items()}
TENSORS["verify_block"] = TENSORS["verify_exact"]
for _op in ("sample", "filter_logits"):
    TENSORS[_op] |= {name: (dtypes, "[N]") for name, dtypes in FILTERS.items()}
OPTIONAL = {
    "verify_exact": ("draft_logits", "temperature", "draft_lse", *FILTERS),
    "verify_block": ("draft_logits", "temperature", "draft_lse", *FILTERS),
    "verify_sigmoid": ("temperature",),
    "sample": ("temperature", *FILTERS),
    "filter_logits": ("temperature", *FILTERS),
}
NUMBERS: dict[str, tuple[str, tuple[float, ...]]] = {
    # argument -> (what is expected, values out of range)
    "lenience": ("(0, 1]", (0.0, -0.5, 1.0000001, 2, torch.inf, -torch.inf, torch.nan)),
    "argmax_lenience": ("(0, 1]", (0.0, -0.5, 1.0000001, 2, torch.inf, -torch.inf, torch.nan)),
    "alpha": ("a finite number below 0", (0.0, 1.0, -torch.inf, torch.inf, torch.nan)),
    "beta": ("a finite number above 0", (0.0, -1.0, torch.inf, -torch.inf, torch.nan)),
}
NUMBERS_OF = {"verify_exact": ("lenience", "argmax_lenience"), "verify_block": (), "verify_sigmoid": ("alpha", "beta")}


def metadata_cases() -> Iterator[tuple[str, str, str, type[Exception], tuple[str, ...]]]:
    """(op, argument, what is wrong with it, error, what the message says)."""
    for op, tensors in TENSORS.items():
        for name, (dtypes, axes) in tensors.items():
            value = good(op)[name]
            shape = list(value.shape)
            yield op, name, "rank above", ValueError, (axes, str([1, *shape]))
            yield op, name, "rank below", ValueError, (axes, str(shape[1:]))
            # The logits' own batch and vocabulary are what the others are measured against.
            for axis in range(value.dim()) if not name.startswith(("target", "logits")) else ():
                wrong = [size + (i == axis) for i, size in enumerate(shape)]
                yield op, name, f"axis {axis} longer", ValueError, (axes, str(shape), str(wrong))
                wrong = [size - (i == axis) for i, size in enumerate(shape)]
                yield op, name, f"axis {axis} shorter", ValueError, (axes, str(shape), str(wrong))
            for wrong_dtype in ("float64" if "float64" not in dtypes else "bfloat16", "bool", "complex64", "uint8"):
                yield op, name, wrong_dtype, TypeError, (dtypes, wrong_dtype)
            if name not in ("target_logits", "logits"):
                yield op, name, "meta", ValueError, ("cpu", "meta")
            yield op, name, "sparse", ValueError, ("strided", "sparse")


def spoil(value: Tensor, what: str) -> Tensor:
    if what == "rank above":
        return value.unsqueeze(0)
    if what == "rank below":
        return value[0]
    if what.startswith("axis"):
        _, axis, direction = what.split()
        size = value.shape[int(axis)]
        index = torch.arange(size + 1 if direction == "longer" else size - 1) % size
        return value.index_select(int(axis), index)
    if what == "meta":
        return value.to("meta")
    if what == "sparse":
        return value.to_sparse()
    return value.to(getattr(torch, what))


def function(op: str, through: str) -> Any:
    return getattr(torch_specops if through == "function" else torch.ops.specops, op)


@pytest.mark.parametrize("through", ["function", "op"])
@pytest.mark.parametrize(("op", "name", "what", "error", "said"), list(metadata_cases()))
def test_metadata(op: str, name: str, what: str, error: type[Exception], said: tuple[str, ...], through: str) -> None:
    arguments = good(op)
    function(op, through)(**arguments)
    with pytest.raises(error) as caught:
        function(op, through)(**arguments | {name: spoil(arguments[name], what)})
    message = str(caught.value)
    assert message.startswith(f"{name}: expected "), message
    assert all(part in message for part in said), message


@pytest.mark.parametrize("op", TENSORS)
def test_no_vocabulary(op: str) -> None:
    arguments = good(op)
    logits = "target_logits" if op in VERIFY_OPS else "logits"
    for name in arguments:
        if name.endswith("logits"):
            arguments[name] = arguments[name][..., :0]
    for through in ("function", "op"):
        with pytest.raises(ValueError, match=rf"^{logits}: expected a vocabulary of 1 .*got shape \[.*0\]"):
            function(op, through)(**arguments)


@pytest.mark.parametrize("op", VERIFY_OPS)
def test_no_rows(op: str) -> None:
    arguments = good(op)
    arguments["target_logits"] = arguments["target_logits"][:, :0]
    for through in ("function", "op"):
        with pytest.raises(
            ValueError, match=r"^target_logits: expected \[B, K\+1, V\] with K >= 0, got .*\[2, 0, 11\]"
        ):
            function(op, through)(**arguments)


def not_a_tensor_cases() -> Iterator[tuple[str, str, object]]:
    for op, tensors in TENSORS.items():
        for name in tensors:
            for value in (None, [1.0, 2.0], "logits", 1.0, good(op)[name].numpy()):
                if value is not None or name not in OPTIONAL[op]:
                    yield op, name, value


@pytest.mark.parametrize(("op", "name", "value"), list(not_a_tensor_cases()))
def test_not_a_tensor(op: str, name: str, value: object) -> None:
    with pytest.raises(TypeError) as caught:
        function(op, "function")(**good(op) | {name: value})
    assert str(caught.value) == f"{name}: expected a tensor, got {type(value)}"


@pytest.mark.parametrize(("op", "name", "value"), list(not_a_tensor_cases()))
def test_not_a_tensor_for_the_op(op: str, name: str, value: object) -> None:
    """The dispatcher refuses before the body runs, in its own words: RuntimeError, with the argument and what came.
    None alone passes it, as an undefined tensor."""
    with pytest.raises(TypeError if value is None else RuntimeError) as caught:
        function(op, "op")(**good(op) | {name: value})
    message = str(caught.value)
    assert name in message and "xpected" in message and type(value).__name__ in message


@pytest.mark.parametrize("op", VERIFY_OPS)
def test_numbers_out_of_range(op: str) -> None:
    for name in NUMBERS_OF[op]:
        expected, values = NUMBERS[name]
        for value in values:
            for through in ("function", "op"):
                with pytest.raises(ValueError) as caught:
                    function(op, through)(**good(op) | {name: value})
                message = str(caught.value)
                assert message.startswith(f"{name}: expected ") and expected in message
                assert message.endswith(f"got {float(value)}")


@pytest.mark.parametrize("op", VERIFY_OPS)
@pytest.mark.parametrize("value", [None, "1.0", [1.0], True, 1j, torch.tensor(1.0)])
def test_not_a_number(op: str, value: object) -> None:
    for name in NUMBERS_OF[op]:
        with pytest.raises(TypeError) as caught:
            function(op, "function")(**good(op) | {name: value})
        assert str(caught.value) == f"{name}: expected a number, got {type(value)}"


def test_an_integer_is_a_number() -> None:
    exact, sigmoid = good("verify_exact"), good("verify_sigmoid")
    for through in ("function", "op"):
        for name in ("lenience", "argmax_lenience"):
            assert function("verify_exact", through)(**exact | {name: 1})[0].shape == (B, K + 1)
        assert function("verify_sigmoid", through)(**sigmoid | {"alpha": -1, "beta": 2})[0].shape == (B, K + 1)


@pytest.mark.parametrize("op", ["verify_exact", "verify_block"])
@pytest.mark.parametrize("through", ["function", "op"])
def test_draft_lse_of_a_one_hot_draft(through: str, op: str) -> None:
    with pytest.raises(ValueError, match=r"^draft_lse: expected None when draft_logits is None .*got"):
        function(op, through)(**good(op) | {"draft_logits": None})


@pytest.mark.parametrize("through", ["function", "op"])
@pytest.mark.parametrize("lenience", [0.0, 0.3, 1.0000001, 2, torch.inf, torch.nan])
def test_blocks_have_no_lenience(through: str, lenience: float) -> None:
    with pytest.raises(ValueError, match=rf"^lenience: expected 1.0, .*, got {float(lenience)}$"):
        function("verify_block", through)(**good("verify_block") | {"lenience": lenience})


def test_the_schema_is_the_contract() -> None:
    """Names, order and defaults are what callers rely on."""
    schemas = {op: str(getattr(torch.ops.specops, op).default._schema) for op in TENSORS}
    drafts = "Tensor target_logits, Tensor draft_tokens, Tensor{} draft_logits"
    uniforms = "Tensor accept_uniforms, Tensor sample_uniforms"
    optional = "Tensor? temperature=None"
    filters = "Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None"
    result = "-> (Tensor, Tensor)"
    assert schemas == {
        "verify_exact": f"specops::verify_exact({drafts.format('?')}, {uniforms}, {optional}, "
        f"Tensor? draft_lse=None, float lenience=1., {filters}, float argmax_lenience=1.) {result}",
        "verify_block": f"specops::verify_block({drafts.format('?')}, {uniforms}, {optional}, "
        f"Tensor? draft_lse=None, float lenience=1., {filters}) {result}",
        "verify_sigmoid": f"specops::verify_sigmoid({drafts.format('')}, {uniforms}, "
        f"float alpha=-1000., float beta=1000., {optional}) {result}",
        "sample": f"specops::sample(Tensor logits, Tensor uniforms, {optional}, {filters}) {result}",
        "filter_logits": f"specops::filter_logits(Tensor logits, {optional}, {filters}) -> Tensor",
    }


def causes(error: BaseException) -> list[str]:
    """The messages of an exception and of everything that it came from."""
    messages: list[str] = []
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None:
            messages.append(str(current))
            pending += [current.__cause__, current.__context__]
    return messages


def traced(op: str, through: str, arguments: dict[str, Any]) -> None:
    torch._dynamo.reset()
    # Bad input must be refused while tracing: the backend is not reached.
    torch.compile(lambda a: function(op, through)(**a), fullgraph=True, backend=unreachable)(arguments)


def unreachable(*_: object) -> None:
    pytest.fail("bad input reached the compiler backend")


# op, argument, what is wrong (a spoil, or a value), what the message says
TRACED = [
    ("verify_exact", "target_logits", "rank above", "expected 3 dimensions [B, K+1, V], got shape [1, 2, 4, 11]"),
    ("verify_exact", "target_logits", "float64", "expected float32 or bfloat16 or float16, got float64"),
    ("verify_exact", "draft_tokens", "axis 1 shorter", "expected [B, K] = [2, 3], got shape [2, 2]"),
    ("verify_exact", "draft_tokens", "meta", "expected a tensor on cpu, as the logits are, got one on meta"),
    ("verify_exact", "draft_logits", "axis 2 longer", "expected [B, K, V] = [2, 3, 11], got shape [2, 3, 12]"),
    ("verify_exact", "accept_uniforms", "bfloat16", "expected float32 or float64, got bfloat16"),
    ("verify_exact", "sample_uniforms", "rank above", "expected [B] = [2], got shape [1, 2]"),
    ("verify_exact", "temperature", "float64", "expected float32, got float64"),
    ("verify_exact", "draft_lse", "axis 0 longer", "expected [B, K] = [2, 3], got shape [3, 3]"),
    ("verify_exact", "lenience", 1.5, "expected a number in (0, 1], got 1.5"),
    ("verify_exact", "argmax_lenience", 0.0, "expected a number in (0, 1], got 0.0"),
    ("verify_exact", "top_k", "float32", "expected int64 or int32, got float32"),
    ("verify_exact", "top_p", "axis 0 longer", "expected [B] = [2], got shape [3]"),
    ("filter_logits", "min_p", "rank above", "expected [N] = [2], got shape [1, 2]"),
    ("verify_block", "lenience", 0.5, "expected 1.0, the only one that block verification has, got 0.5"),
    ("verify_block", "draft_logits", "axis 1 longer", "expected [B, K, V] = [2, 3, 11], got shape [2, 4, 11]"),
    ("verify_sigmoid", "alpha", 0.0, "expected a finite number below 0, got 0.0"),
    ("verify_sigmoid", "beta", -1.0, "expected a finite number above 0, got -1.0"),
    ("verify_sigmoid", "draft_logits", "rank below", "expected [B, K, V] = [2, 3, 11], got shape [3, 11]"),
    ("sample", "logits", "rank below", "expected 2 dimensions [N, V], got shape [11]"),
    ("sample", "uniforms", "axis 0 longer", "expected [N] = [2], got shape [3]"),
    ("sample", "temperature", "bool", "expected float32, got bool"),
]


@pytest.mark.parametrize("through", ["function", "op"])
@pytest.mark.parametrize(("op", "name", "what", "said"), TRACED)
def test_traced(op: str, name: str, what: str | float, said: str, through: str) -> None:
    """Under torch.compile the exception is Dynamo's TorchRuntimeError; ours is in its message and its cause."""
    arguments = good(op)
    arguments[name] = spoil(arguments[name], what) if isinstance(what, str) else what
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as caught:
        traced(op, through, arguments)
    assert f"{name}: {said}" in str(caught.value)
    assert any(message == f"{name}: {said}" for message in causes(caught.value))


@pytest.mark.parametrize(
    ("op", "name", "value", "expected"),
    [
        ("verify_exact", "target_logits", None, "a tensor"),
        ("verify_exact", "draft_logits", [1.0], "a tensor"),
        ("verify_exact", "lenience", "1.0", "a number"),
        ("verify_exact", "lenience", True, "a number"),
        ("verify_block", "lenience", "1.0", "a number"),
        ("verify_sigmoid", "draft_logits", None, "a tensor"),
        ("verify_sigmoid", "alpha", "-1", "a number"),
        ("sample", "uniforms", [0.5, 0.5], "a tensor"),
    ],
)
def test_traced_type(op: str, name: str, value: object, expected: str) -> None:
    """A wrong Python type is found before the op: Dynamo's Unsupported, with our message as what was raised."""
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        traced(op, "function", good(op) | {name: value})
    said = f"{name}: expected {expected}, got {type(value)}"
    assert any(said in message for message in causes(caught.value))
    assert said in str(caught.value)


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [(op, "temperature", value) for op in (*VERIFY_OPS, "sample") for value in (-1.0, -0.5, -INF, NAN)]
    + [(op, name, NAN) for op in ("verify_exact", "verify_block", "sample") for name in ("top_p", "min_p")],
)
def test_no_lawful_value(op: str, name: str, value: float) -> None:
    """The data cannot be checked without a sync: such a row emits nothing but -1, and its neighbours are untouched."""
    arguments = good(op)
    clean = function(op, "op")(**arguments)
    tokens, second = function(op, "op")(**arguments | {name: torch.tensor([value, float(arguments[name][1])])})
    assert bool((tokens[0] == -1).all())
    assert float(second[0]) == (-INF if op == "sample" else 0)
    assert torch.equal(tokens[1], clean[0][1]) and torch.equal(second[1], clean[1][1])


@pytest.mark.parametrize("op", VERIFY_OPS)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("padding", [-1, -(2**63), V, 2**40, 2**63 - 1])
def test_a_token_out_of_range_is_padding(op: str, temperature: float, padding: int) -> None:
    arguments = good(op) | {"temperature": torch.full((B,), temperature), "accept_uniforms": torch.zeros(B, K)}
    if temperature == 0:
        arguments["draft_tokens"] = arguments["target_logits"][:, :K].argmax(-1)
    for position in range(K):
        drafts = arguments["draft_tokens"].clone()
        drafts[0, position] = padding
        tokens, num_accepted = function(op, "op")(**arguments | {"draft_tokens": drafts})
        assert num_accepted.tolist() == [position, K]
        assert torch.equal(tokens[0, :position], drafts[0, :position])
        assert 0 <= int(tokens[0, position]) < V
        assert bool((tokens[0, position + 1 :] == -1).all())


@pytest.mark.parametrize("op", [*VERIFY_OPS, "sample"])
@pytest.mark.parametrize("value", [-INF, -1.0, -1e-30, 1.0, 2.0, 1e38, INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_uniform_out_of_range(op: str, value: float, dtype: torch.dtype) -> None:
    """No law, but no crash, and no token that is out of range or masked."""
    arguments = good(op)
    for name in arguments:
        if name.endswith("uniforms"):
            arguments[name] = torch.full_like(arguments[name], value, dtype=dtype)
        if name.endswith("logits"):
            arguments[name] = arguments[name].clone()
            arguments[name][..., [0, V - 1]] = -INF
    tokens, second = function(op, "op")(**arguments)
    if op == "sample":
        emitted = tokens
    else:
        assert bool((second >= 0).all()) and bool((second <= K).all())
        kept = torch.arange(K + 1) <= second.unsqueeze(1)
        emitted = tokens[kept]
        assert bool((tokens[~kept] == -1).all())
    assert bool((emitted >= 1).all()) and bool((emitted < V - 1).all())
