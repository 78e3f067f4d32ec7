"""What holds for every input: calls that mix everything that the cases of the oracle do one by one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from marks import slow
from op_cases import VERIFY_OPS, call, check, results
from report import Report
from torch import Tensor

from torch_specops.testing import Case
from torch_specops.testing.cases import CASES, arguments_of, case_names

OPS = (*VERIFY_OPS, "sample", "sample_gumbel")
# What `make test` has time for, and the others.
FEW, MANY = range(32), range(32, 64)


@functools.cache
def mixed_inputs(op: str, numbers: range = FEW) -> list[Case]:
    """Calls with the options of three cases each, on few tokens."""
    cases = []
    for number in numbers:
        choice = random.Random(f"{op} {number}")
        # With other options nothing is exact.
        names = choice.sample(sorted(name for name in case_names(op) if not name.startswith("exact_")), 3)
        options = {key: value for name in names for key, value in CASES[name].items()}
        if options.get("one_hot") or any("overflow" in name for name in names):
            # Float32 does not hold the lse of such large logits closely enough.
            options.pop("lse", None)
        vocab_size = choice.choice((1, 2, 3, 7, 33))
        generator = torch.Generator().manual_seed(number)
        name = f"{'+'.join(names)}-V{vocab_size}"
        cases.append(Case(name, op, arguments_of(op, generator, vocab_size, options)))
    return cases


def calls(numbers: range) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((op, case.args) for op in OPS for case in mixed_inputs(op, numbers))


def bits(x: Tensor) -> Tensor:
    """NaN equals NaN as an integer."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(outputs: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(outputs, others, strict=True))


few_and_many = pytest.mark.parametrize("numbers", [FEW, slow(MANY)], ids=["few", "many"])


def map_tensors(args: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in args.items()}


@pytest.mark.parametrize("op", OPS)
@few_and_many
def test_ops_equal_the_oracle(op: str, numbers: range, report: Report) -> None:
    check(results(mixed_inputs(op, numbers)), report)


@few_and_many
def test_inputs_are_untouched_and_outputs_own_their_memory(numbers: range) -> None:
    for op, args in calls(numbers):
        before = map_tensors(args, Tensor.clone)
        outputs = call(op, args)
        memory = [x.data_ptr() for x in outputs if x.numel() > 0]
        for name, value in args.items():
            if isinstance(value, Tensor):
                assert same((value,), (before[name],)), name
                assert value.numel() == 0 or value.data_ptr() not in memory
        assert len(set(memory)) == len(memory)


@few_and_many
def test_rows_do_not_depend_on_their_neighbours(numbers: range) -> None:
    """Rows in another order, and each on its own, give the same results, bit for bit."""
    for op, args in calls(numbers):
        outputs = call(op, args)
        order = torch.arange(len(outputs[0])).flip(0)
        assert same(tuple(x[order] for x in outputs), call(op, map_tensors(args, lambda x, order=order: x[order])))
        for b in range(len(order)):
            alone = call(op, map_tensors(args, lambda x, b=b: x[b : b + 1]))
            assert same(tuple(x[b : b + 1] for x in outputs), alone)
