"""The result of an op against the oracle's, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_specops import reference

from .cases import Case
from .margins import left_out, lse_bound


@dataclass(frozen=True)
class Comparison:
    """What `compare` found: how many `rows` there are, how many of them float32 `rounding` may decide and are left out,
    which of the others are `wrong`, and how many of those left out differ from the oracle."""

    rows: int
    rounding: int
    wrong: list[int]
    disagreements: int = 0


def rounding_rows(case: Case) -> Tensor:
    """[B] bool: the rows that are left out, as float32 rounding may decide them (`margins.py`)."""
    args = _on_cpu(case.args)
    accepted = reference_outputs(case.op, args)[1] if case.op.startswith("verify") else None
    return left_out(case.op, args, accepted)


def compare(case: Case, got: Tensor | tuple[Tensor, ...]) -> Comparison:
    """Compare the result of an op with the oracle's, row by row.

    A row must equal the oracle's, bit for bit; `sample`'s lse must lie within its float32 bound. A row that is left out
    must still be a possible output: accepted drafts, one token, then -1; logits or -inf. Wrong shapes, dtypes or a
    wrong number of outputs raise AssertionError.
    """
    args = _on_cpu(case.args)
    expected = reference_outputs(case.op, args)
    got = tuple(x.cpu() for x in ((got,) if isinstance(got, Tensor) else got))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected], (
        f"{case.name}: expected {[(list(x.shape), x.dtype) for x in expected]}, "
        f"got {[(list(x.shape), x.dtype) for x in got]}"
    )
    open_rows = left_out(case.op, args, expected[1] if case.op.startswith("verify") else None).tolist()
    wrong, disagreements = [], 0
    for b, is_open in enumerate(open_rows):
        equal = _equals(case.op, args, b, expected, got)
        disagreements += is_open and not equal
        if not (equal or (is_open and _is_possible(case.op, args, b, got))):
            wrong.append(b)
    return Comparison(len(open_rows), sum(open_rows), wrong, disagreements)


def reference_outputs(op: str, args: dict[str, Any]) -> tuple[Tensor, ...]:
    outputs = getattr(reference, op)(**args)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _equals(op: str, args: dict[str, Any], b: int, expected: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> bool:
    if op == "filter_logits":
        return torch.equal(expected[0][b], got[0][b]) and torch.equal(expected[0][b].signbit(), got[0][b].signbit())
    if op == "sample":
        lse = expected[1][b]
        exact = not lse.isfinite() or ("temperature" in args and args["temperature"][b] == 0)
        close = got[1][b] == lse if exact else (got[1][b] - lse).abs() <= lse_bound(args, b)
        return bool(close) and torch.equal(expected[0][b], got[0][b])
    return all(torch.equal(e[b], g[b]) for e, g in zip(expected, got, strict=True))


def _is_possible(op: str, args: dict[str, Any], b: int, got: tuple[Tensor, ...]) -> bool:
    if op == "filter_logits":
        return bool(((got[0][b] == args["logits"][b]) | (got[0][b] == -torch.inf)).all())
    if op == "sample":
        return 0 <= int(got[0][b]) < args["logits"].shape[-1] and bool(got[1][b].isfinite())
    output, n, drafts = got[0][b], int(got[1][b]), args["draft_tokens"][b]
    if not 0 <= n <= len(drafts) or not torch.equal(output[:n], drafts[:n].long()):
        return False
    return bool((output[: n + 1] >= 0).all() and (output < args["target_logits"].shape[-1]).all()) and bool(
        (output[n + 1 :] == -1).all()
    )


def _on_cpu(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in args.items()}
