"""What holds for every input: calls that mix everything that the cases of the oracle do one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import compare, mixed_inputs
from torch import Tensor

import torch_specops
from torch_specops import reference

VERIFY_OPS = ("verify_exact", "verify_block", "verify_sigmoid")
OPS = (*VERIFY_OPS, "sample")
NUM_CASES = 60
Call = tuple[str, dict[str, Any]]


def calls(*ops: str) -> Iterator[Call]:
    return ((op, case.args) for op in ops for case in mixed_inputs(op, NUM_CASES))


def run(op: str, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return getattr(torch_specops, op)(**args)


def bits(x: Tensor) -> Tensor:
    """NaN equals NaN as an integer."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(outputs: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(outputs, others, strict=True))


def map_tensors(args: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in args.items()}


def next_tokens(op: str, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[B] the tokens that were drawn, and [B, V] the logits of the target that they were drawn from."""
    output, n = run(op, args)
    if op == "sample":
        return output, args["logits"]
    rows = torch.arange(len(n))
    return output[rows, n], args["target_logits"][rows, n]


@pytest.mark.parametrize("op", OPS)
def test_ops_equal_the_oracle(op: str) -> None:
    left_out = rows = 0
    for case in mixed_inputs(op, NUM_CASES):
        comparison = compare(case, run(op, case.args))
        assert comparison.wrong == [], case.name
        left_out, rows = left_out + comparison.rounding, rows + comparison.rows
    assert rows > 150 and left_out < 0.06 * rows


def test_masked_tokens_are_never_drawn() -> None:
    for op, args in calls(*OPS):
        tokens, row = next_tokens(op, args)
        drawn = tokens >= 0
        assert (row[drawn].gather(1, tokens[drawn].unsqueeze(-1)) > -torch.inf).all()


def test_inputs_are_untouched_and_outputs_own_their_memory() -> None:
    for op, args in calls(*OPS):
        before = map_tensors(args, Tensor.clone)
        outputs = run(op, args)
        memory = [x.data_ptr() for x in outputs if x.numel() > 0]
        for name, value in args.items():
            if isinstance(value, Tensor):
                assert same((value,), (before[name],)), name
                assert value.numel() == 0 or value.data_ptr() not in memory
        assert len(set(memory)) == len(memory)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Rows in another order, and each on its own, give the same results, bit for bit."""
    for op, args in calls(*OPS):
        outputs = run(op, args)
        order = torch.arange(len(outputs[0])).flip(0)
        assert same(tuple(x[order] for x in outputs), run(op, map_tensors(args, lambda x, order=order: x[order])))
        for b in range(len(order)):
            alone = run(op, map_tensors(args, lambda x, b=b: x[b : b + 1]))
            assert same(tuple(x[b : b + 1] for x in outputs), alone)


def test_what_comes_after_the_rejection_does_not_matter() -> None:
    """Later rows, tokens and uniforms may hold anything."""
    for op, args in calls("verify_exact", "verify_sigmoid"):
        outputs = run(op, args)
        k = args["draft_tokens"].shape[1]
        after = torch.arange(k + 1) > outputs[1].unsqueeze(-1)
        changed = args | {
            "target_logits": args["target_logits"].masked_fill(after.unsqueeze(-1), 7.0),
            "draft_tokens": args["draft_tokens"].masked_fill(after[:, :k], 0),
            "accept_uniforms": args["accept_uniforms"].masked_fill(after[:, :k], 0.0),
        }
        if args["draft_logits"] is not None:
            changed["draft_logits"] = args["draft_logits"].masked_fill(after[:, :k].unsqueeze(-1), torch.nan)
        assert same(outputs, run(op, changed))


def test_a_token_out_of_range_is_found() -> None:
    """The inputs are wild enough: the oracle with padding let through is found wrong."""

    def with_padding(op: str, args: dict[str, Any]) -> tuple[Tensor, ...]:
        output, n = getattr(reference, op)(**args)
        tokens = args["draft_tokens"].long()
        output[:, :-1] = torch.where(tokens < -1, tokens, output[:, :-1])
        return output, n

    for op in VERIFY_OPS:
        assert any(compare(case, with_padding(op, case.args)).wrong for case in mixed_inputs(op, NUM_CASES))
