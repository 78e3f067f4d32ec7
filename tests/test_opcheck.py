"""`torch.library.opcheck`, all four utilities, on every op and every optional argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import torch_specops  # noqa: F401  (registers the ops)

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def strided(x: Tensor) -> Tensor:
    """The same values, with every dimension strided."""
    wide = x.new_zeros([2 * size + 1 for size in x.shape])
    view = wide[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    assert 0 in x.shape or not view.is_contiguous()
    return view


def verify_inputs(
    batch: int = 3, num_drafts: int = 4, vocab_size: int = 37, dtype: torch.dtype = torch.float32
) -> dict:
    g = torch.Generator().manual_seed(batch + 8 * num_drafts)
    return {
        "target_logits": torch.randn(batch, num_drafts + 1, vocab_size, generator=g).to(dtype),
        "draft_tokens": torch.randint(-1, vocab_size + 1, (batch, num_drafts), generator=g),
        "draft_logits": torch.randn(batch, num_drafts, vocab_size, generator=g).to(dtype),
        "accept_uniforms": torch.rand(batch, num_drafts, generator=g),
        "sample_uniforms": torch.rand(batch, generator=g),
    }


def sample_inputs(rows: int = 3, vocab_size: int = 37, dtype: torch.dtype = torch.float32) -> dict:
    g = torch.Generator().manual_seed(rows)
    return {
        "logits": torch.randn(rows, vocab_size, generator=g).to(dtype),
        "uniforms": torch.rand(rows, generator=g),
    }


def filters() -> dict[str, Tensor]:
    return {
        "top_k": torch.tensor([20, 0, 5]),
        "top_p": torch.tensor([0.9, 0.5, 1.0]),
        "min_p": torch.tensor([0.0, 0.02, 0.1]),
    }


def lse(inputs: dict) -> Tensor:
    return inputs["draft_logits"].float().logsumexp(-1)


# name -> what it changes in the inputs. Each stands for one optional argument, dtype, layout or size.
VERIFY_CHANGES: dict[str, Callable[[dict], dict]] = {
    "required arguments": lambda i: {},
    "temperature": lambda i: {"temperature": torch.tensor([0.0, 0.7, -1.0])},
    "int32 tokens": lambda i: {"draft_tokens": i["draft_tokens"].int()},
    "float64 uniforms": lambda i: {name: i[name].double() for name in ("accept_uniforms", "sample_uniforms")},
    "mixed dtypes": lambda i: {"target_logits": i["target_logits"].bfloat16()},
    "strides": lambda i: {name: strided(i[name]) for name in i},
    "masked, NaN and infinite logits": lambda i: {
        "target_logits": i["target_logits"].clone().index_fill_(2, torch.tensor([0, 9]), -torch.inf),
        "draft_logits": i["draft_logits"].clone().index_fill_(2, torch.tensor([3]), torch.nan),
    },
}
EXACT_CHANGES: dict[str, Callable[[dict], dict]] = {
    **VERIFY_CHANGES,
    "draft_logits None": lambda i: {"draft_logits": None},
    "draft_logits None, temperature, lenience": lambda i: {
        "draft_logits": None, "temperature": torch.tensor([0.0, 0.7, 1.5]), "lenience": 0.9,
    },
    "draft_lse": lambda i: {"draft_lse": lse(i)},
    "draft_lse, temperature": lambda i: {"draft_lse": lse(i), "temperature": torch.ones(3)},
    "lenience": lambda i: {"lenience": 0.5},
    "argmax_lenience": lambda i: {"argmax_lenience": 0.5, "temperature": torch.tensor([0.0, 0.7, 0.0])},
    "top_k": lambda i: {"top_k": torch.tensor([3, 0, 100])},
    "top_k int32, draft_logits None": lambda i: {"top_k": torch.tensor([3, 0, 9]).int(), "draft_logits": None},
    "top_p": lambda i: {"top_p": torch.tensor([0.9, 1.0, torch.nan])},
    "min_p": lambda i: {"min_p": torch.tensor([0.1, 0.0, 1.0])},
    "filters, temperature, draft_lse": lambda i: {
        **filters(), "temperature": torch.tensor([0.0, 0.7, -1.0]), "draft_lse": lse(i),
    },
}  # fmt: skip
BLOCK_CHANGES: dict[str, Callable[[dict], dict]] = {
    **{name: change for name, change in EXACT_CHANGES.items() if "lenience" not in name},
    "lenience of 1": lambda i: {"lenience": 1.0},
}
SIGMOID_CHANGES: dict[str, Callable[[dict], dict]] = {
    **VERIFY_CHANGES,
    "alpha and beta": lambda i: {"alpha": -1.0, "beta": 2.0},
}
SAMPLE_CHANGES: dict[str, Callable[[dict], dict]] = {
    "required arguments": lambda i: {},
    "temperature": lambda i: {"temperature": torch.tensor([0.0, 0.7, -1.0])},
    "float64 uniforms": lambda i: {"uniforms": i["uniforms"].double()},
    "strides": lambda i: {name: strided(i[name]) for name in i},
    "filters": lambda i: filters(),
    "top_k": lambda i: {"top_k": torch.tensor([3, 0, 100]).int()},
}
# Of `sample`, without its uniforms.
FILTER_CHANGES = {name: change for name, change in SAMPLE_CHANGES.items() if "uniforms" not in name}


def check(op: str, inputs: dict[str, Any]) -> None:
    outcome = opcheck(getattr(torch.ops.specops, op).default, (), inputs, test_utils=UTILITIES)
    assert outcome == dict.fromkeys(UTILITIES, "SUCCESS")


def names_all_optional_arguments(op: str, inputs: dict, changes: dict[str, Callable[[dict], dict]]) -> bool:
    schema = getattr(torch.ops.specops, op).default._schema
    optional = {a.name for a in schema.arguments if a.has_default_value()}
    return optional <= {name for change in changes.values() for name in change(inputs)}


@pytest.mark.parametrize("name", EXACT_CHANGES)
def test_verify_exact(name: str) -> None:
    inputs = verify_inputs()
    check("verify_exact", inputs | EXACT_CHANGES[name](inputs))


@pytest.mark.parametrize("name", BLOCK_CHANGES)
def test_verify_block(name: str) -> None:
    inputs = verify_inputs()
    check("verify_block", inputs | BLOCK_CHANGES[name](inputs))


@pytest.mark.parametrize("name", SIGMOID_CHANGES)
def test_verify_sigmoid(name: str) -> None:
    inputs = verify_inputs()
    check("verify_sigmoid", inputs | SIGMOID_CHANGES[name](inputs))


@pytest.mark.parametrize("name", SAMPLE_CHANGES)
def test_sample(name: str) -> None:
    inputs = sample_inputs()
    check("sample", inputs | SAMPLE_CHANGES[name](inputs))


@pytest.mark.parametrize("name", FILTER_CHANGES)
def test_filter_logits(name: str) -> None:
    inputs = sample_inputs()
    changed = inputs | FILTER_CHANGES[name](inputs)
    check("filter_logits", {key: value for key, value in changed.items() if key != "uniforms"})


def test_no_optional_argument_is_left_out() -> None:
    assert names_all_optional_arguments("filter_logits", sample_inputs(), FILTER_CHANGES)
    assert names_all_optional_arguments("verify_exact", verify_inputs(), EXACT_CHANGES)
    assert names_all_optional_arguments("verify_block", verify_inputs(), BLOCK_CHANGES)
    assert names_all_optional_arguments("verify_sigmoid", verify_inputs(), SIGMOID_CHANGES)
    assert names_all_optional_arguments("sample", sample_inputs(), SAMPLE_CHANGES)


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid"])
@pytest.mark.parametrize(("batch", "num_drafts"), [(3, 0), (0, 4), (1, 1)])
def test_verify_sizes(op: str, batch: int, num_drafts: int) -> None:
    """Without B = K = 0: opcheck itself cannot clone a tensor [0, 0, V] (torch 2.13, negative storage size)."""
    inputs = verify_inputs(batch, num_drafts)
    check(op, inputs)
    check(op, inputs | {"temperature": torch.zeros(batch)})


@pytest.mark.parametrize("op", ["verify_exact", "verify_block"])
def test_one_hot_drafts_without_drafts(op: str) -> None:
    check(op, verify_inputs(num_drafts=0) | {"draft_logits": None})


@pytest.mark.parametrize("rows", [0, 1])
def test_sample_sizes(rows: int) -> None:
    check("sample", sample_inputs(rows))
    logits = sample_inputs(rows)["logits"]
    check("filter_logits", {"logits": logits, **{name: value[:rows] for name, value in filters().items()}})


@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype: torch.dtype) -> None:
    check("verify_exact", verify_inputs(dtype=dtype))
    check("verify_block", verify_inputs(dtype=dtype))
    check("verify_sigmoid", verify_inputs(dtype=dtype))
    check("sample", sample_inputs(dtype=dtype))
    check("filter_logits", {"logits": sample_inputs(dtype=dtype)["logits"], **filters()})
    check("verify_exact", verify_inputs(dtype=dtype) | filters())


@pytest.mark.parametrize("op", ["verify_exact", "verify_block", "verify_sigmoid", "sample", "filter_logits"])
@pytest.mark.parametrize("filtered", [False, True])
def test_logits_that_require_grad(op: str, filtered: bool) -> None:
    """The ops are not differentiable: no output asks for a gradient, so a model outside `no_grad` can use them."""
    inputs = verify_inputs() if op.startswith("verify") else sample_inputs()
    if op == "filter_logits":
        del inputs["uniforms"]
    if filtered and op != "verify_sigmoid":
        inputs |= filters()
    for name in inputs:
        if name.endswith("logits"):
            inputs[name].requires_grad_()
    check(op, inputs)
    outputs = getattr(torch.ops.specops, op)(**inputs)
    assert not any(output.requires_grad for output in ((outputs,) if isinstance(outputs, Tensor) else outputs))


def broken_alias(logits: Tensor) -> Tensor:
    return logits.view(-1)


def broken_mutation(logits: Tensor) -> Tensor:
    logits.add_(1)
    return logits.clone()


def broken_fake(logits: Tensor) -> Tensor:
    return logits.clone()


@pytest.mark.parametrize(
    ("broken", "fake", "utility"),
    [
        (broken_alias, lambda logits: logits.new_empty(logits.numel()), "test_schema"),
        (broken_mutation, lambda logits: torch.empty_like(logits), "test_schema"),
        (broken_fake, lambda logits: logits.new_empty(logits.numel()), "test_faketensor"),
    ],
)
def test_opcheck_fails_a_broken_op(broken: Callable[[Tensor], Tensor], fake: Callable, utility: str) -> None:
    """Control: an output that aliases an input, an undeclared mutation and a wrong fake kernel are all found."""
    with torch.library._scoped_library("specops_broken", "FRAGMENT") as library:
        library.define(f"{broken.__name__}(Tensor logits) -> Tensor")
        library.impl(broken.__name__, broken, "CPU")
        torch.library.register_fake(f"specops_broken::{broken.__name__}", fake, lib=library)
        op = getattr(torch.ops.specops_broken, broken.__name__).default
        outcome = opcheck(op, (torch.randn(2, 3),), test_utils=UTILITIES, raise_exception=False)
        assert isinstance(outcome[utility], Exception), outcome
