"""The result of an op against the oracle's, row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_specops import reference

from .cases import Case
from .rounding import Laws, is_open, lawful_results, lse_is_lawful
from .rounding_block import lawful_block_results
from .rounding_filters import filters_of, lawful_rows, single_rows

__all__ = ["Comparison", "compare", "rounding_rows"]


@dataclass(frozen=True)
class Comparison:
    """The verdict of `compare`: `rows` compared, `rounding` rows with more than one lawful result, `wrong` rows whose
    result is not lawful, and how many rounding rows differ from the oracle lawfully."""

    rows: int
    rounding: int
    wrong: list[int]
    disagreements: int = 0


def rounding_rows(case: Case) -> Tensor:
    """[B] bool: rows for which float32 rounding may decide, so that more than one result is lawful.

    With eps = 2**-24, z a scaled logit and a = max z, the float32 weight exp(z - a) errs by at most
    eps (12 + 2 max(|z|, |a|) + 3.25|z - a|) in relative terms: scaling rounds z and a, or a and the maximum of the
    tile, which lies between them; log2(e) / T, the difference and the product of the two round z - a. Where z = a the
    difference is exact, so +-float32 max adds nothing. With `draft_lse` a is that number. A probability adds the error
    of its normaliser, the sum of all weights' errors. With scores, the argument (z - alpha) / (beta - alpha) errs by
    eps 3 (|z| + |alpha|) / (beta - alpha), weighed by 1 - sigmoid, and the residual
    sigmoid(a) sigmoid(-b) (1 - exp(b - a)) by the two and by the rounding of the gap,
    eps 2 (|z_p| + |z_q|) / (beta - alpha). Weights below 1e-37 may be flushed to zero, and a q(x) that vanishes in
    float64 though x is not excluded counts as zero or as positive.

    An acceptance test is open if u l q and p, each within its bound, overlap. For a token v, with weights w of error e,
    total W and C, E the prefix sums of w and e, the test C_v > s W is open if
    |C_v - s W| <= (1 - s) E_v + s (E_V - E_v) + 48 eps (C_v + s W), the last for the sums. A residual that may be
    positive or zero leaves both laws open. Rows of bitwise equal logits have a residual of exactly zero. Greedy rows
    have no margin.

    Example:
        >>> from oracle import rounding_rows, sample_inputs
        >>> rounding_rows(next(sample_inputs("sample", vocab_sizes=[17])))
        tensor([False, False, False, False, False, False])
    """
    args = _on_cpu(case.args)
    if case.op == "filter_logits":
        is_open_row = [len(_filtered(args, r)) > 1 for r in range(args["logits"].shape[0])]
        return torch.tensor(is_open_row, dtype=torch.bool)
    batch = (args["logits"] if case.op == "sample" else args["target_logits"]).shape[0]
    return torch.tensor([is_open(_laws(case.op, args, b)) for b in range(batch)], dtype=torch.bool)


def compare(case: Case, got: Tensor | tuple[Tensor, ...]) -> Comparison:
    """Compare the result of an op with the oracle's, row by row.

    A row off the margin must equal the oracle's; a rounding row must be one of its lawful results. `sample`'s lse must
    lie within its float32 bound; what `filter_logits` keeps must be the same bits. Wrong shapes, dtypes or a wrong
    number of outputs raise AssertionError.

    Example:
        >>> from oracle import compare, sample_inputs
        >>> from torch_specops import reference
        >>> case = next(sample_inputs("verify_exact", vocab_sizes=[17]))
        >>> compare(case, reference.verify_exact(**case.args))
        Comparison(rows=8, rounding=0, wrong=[], disagreements=0)
    """
    args = _on_cpu(case.args)
    expected = _as_tuple(getattr(reference, case.op)(**args))
    got = tuple(x.cpu() for x in _as_tuple(got))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in expected], (
        f"{case.name}: expected {[(list(x.shape), x.dtype) for x in expected]}, "
        f"got {[(list(x.shape), x.dtype) for x in got]}"
    )
    if case.op == "filter_logits":
        return _compare_filtered(args, expected[0], got[0])
    check = _sample_row_is_lawful if case.op == "sample" else _verify_row_is_lawful
    rounding, wrong, disagreements = 0, [], 0
    for b in range(expected[0].shape[0]):
        laws = _laws(case.op, args, b)
        may_differ = is_open(laws)
        rounding += may_differ
        lawful = check(args, b, laws, expected, got)
        equal = all(torch.equal(e[b], g[b]) for e, g in zip(expected, got, strict=True) if not e.is_floating_point())
        if not lawful or not (equal or may_differ):
            wrong.append(b)
        elif not equal:
            disagreements += 1
    return Comparison(expected[0].shape[0], rounding, wrong, disagreements)


def _laws(op: str, args: dict[str, Any], b: int) -> Laws:
    if op != "verify_block":
        return lawful_results(op, args, b)
    laws: Laws = {}
    for single in single_rows(args, b):
        for n, tokens in lawful_block_results(single, 0).items():
            laws[n] = laws[n] | tokens if n in laws else tokens
    return laws


def _filtered(args: dict[str, Any], r: int) -> list[Tensor]:
    t = 1.0 if args.get("temperature") is None else float(args["temperature"][r])
    return [
        torch.full_like(row, -math.inf) if not t >= 0 else torch.where(row.isnan(), -math.inf, row)
        for row in lawful_rows(args["logits"][r], t, filters_of(args, r))
    ]


def _compare_filtered(args: dict[str, Any], expected: Tensor, got: Tensor) -> Comparison:
    rounding, wrong, disagreements = 0, [], 0
    for r in range(expected.shape[0]):
        lawful = _filtered(args, r)
        rounding += len(lawful) > 1
        if not any(_same_bits(row, got[r]) for row in lawful):
            wrong.append(r)
        elif not _same_bits(expected[r], got[r]):
            disagreements += 1
    return Comparison(expected.shape[0], rounding, wrong, disagreements)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def _verify_row_is_lawful(
    args: dict[str, Any], b: int, laws: Laws, expected: tuple[Tensor, ...], got: tuple[Tensor, ...]
) -> bool:
    output, n = got[0][b], int(got[1][b])
    if n not in laws:
        return False
    drafts = args["draft_tokens"][b, :n].long()
    return (
        torch.equal(output[:n], drafts)
        and _token_is_lawful(int(output[n]), laws[n])
        and bool((output[n + 1 :] == -1).all())
    )


def _sample_row_is_lawful(
    args: dict[str, Any], b: int, laws: Laws, expected: tuple[Tensor, ...], got: tuple[Tensor, ...]
) -> bool:
    token, lse, exact = int(got[0][b]), float(got[1][b]), float(expected[1][b])
    token_is_lawful = _token_is_lawful(token, laws[0])
    t = 1.0 if args.get("temperature") is None else float(args["temperature"][b])
    if not math.isfinite(exact) or t == 0:
        return token_is_lawful and lse == exact
    return token_is_lawful and lse_is_lawful(args, b, lse, token)


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def _on_cpu(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in args.items()}


def _token_is_lawful(token: int, tokens: Tensor) -> bool:
    return bool(tokens[token]) if 0 <= token < len(tokens) else token == -1 and not tokens.any()
