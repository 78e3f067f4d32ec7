"""What each ATen operator means as a term: `READERS`. An operator or a use of one that is not here is `Unknown`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .terms import Size, Term, base_of, is_boolean, less

if TYPE_CHECKING:
    from .reader import Reader


class Unknown(Exception):
    """Of an operator, or of a use of it, that no term describes."""


def size_of(value: Any) -> Size:
    if not isinstance(value, torch.SymInt):
        return value
    expression = value.node.expr
    return int(expression) if expression.is_Integer else expression


Read = Callable[["Reader", dict[str, Any], tuple[Size, ...]], Term]


def _same(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    return reader.tensor(args["self"] if "self" in args else args["a"])


def _elementwise(op: str, swapped: bool = False) -> Read:
    def read(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
        if args.get("alpha", 1) != 1 or args.get("rounding_mode") is not None:
            raise Unknown
        pair = [reader.tensor(args["self"])]
        if "other" in args:
            pair.append(reader.tensor(args["other"]))
        return reader.terms.elementwise(op, pair[::-1] if swapped else pair, shape)

    return read


def _not_equal(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    return reader.terms.negated(_elementwise("eq")(reader, args, shape))


def _not(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    if args["self"].meta["val"].dtype != torch.bool:
        raise Unknown
    return reader.terms.negated(reader.tensor(args["self"]))


def _clamp(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    if args.get("min") is not None:
        term = reader.terms.elementwise("maximum", (term, reader.tensor(args["min"])), shape)
    if args.get("max") is not None:
        term = reader.terms.elementwise("minimum", (term, reader.tensor(args["max"])), shape)
    return term


def _relu(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    return reader.terms.elementwise("maximum", (reader.tensor(args["self"]), reader.terms.const(0)), shape)


def _negative(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    return reader.terms.elementwise("sub", (reader.terms.const(0), reader.tensor(args["self"])), shape)


def _where(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    parts = [reader.tensor(args[name]) for name in ("condition", "self", "other")]
    return reader.terms.elementwise("where", parts, shape)


def _full(value: float | None) -> Read:
    def read(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
        constant = value
        if constant is None:
            constant = args.get("fill_value", args.get("s"))
        const = reader.tensor(constant)
        return reader.terms.view(const, (None,) * len(shape), shape)

    return read


def _unsqueeze(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    dim = args["dim"] % len(shape)
    sources = tuple(None if d == dim else d - (d > dim) for d in range(len(shape)))
    return reader.terms.view(term, sources, shape)


def _reshape(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    """Only where dimensions of size 1 come or go: squeeze, and some uses of view."""
    term = reader.tensor(args["self"])
    sources: list[int | None] = []
    next_one = 0
    for size in shape:
        while size != 1 and term.shape[next_one : next_one + 1] == (1,):
            next_one += 1
        if term.shape[next_one : next_one + 1] == (size,):
            sources.append(next_one)
            next_one += 1
        elif size == 1:
            sources.append(None)
        else:
            raise Unknown
    if any(size != 1 for size in term.shape[next_one:]):
        raise Unknown
    return reader.terms.view(term, tuple(sources), shape)


def _squeeze(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    if "dim" not in args:
        return _reshape(reader, args, shape)
    term = reader.tensor(args["self"])
    dims = args["dim"] if isinstance(args["dim"], (list, tuple)) else [args["dim"]]
    gone = {dim % len(term.shape) for dim in dims}
    kept = tuple(d for d, size in enumerate(term.shape) if d not in gone or size != 1)
    if len(kept) != len(shape):
        raise Unknown
    return reader.terms.view(term, kept, shape)


def _expand(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    return reader.terms.broadcast(reader.tensor(args["self"]), shape)


def _slice(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    dim = args["dim"] % len(shape)
    start = 0 if args["start"] is None else reader.size(args["start"])
    if isinstance(start, int) and start < 0:
        start = term.shape[dim] + start
        if isinstance(start, int):
            start = max(start, 0)
    if args["step"] != 1:
        raise Unknown
    return reader.terms.slice(term, dim, start, shape[dim])


def _select(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    dim = args["dim"] % len(term.shape)
    index = reader.size(args["index"])
    return reader.terms.select(term, dim, term.shape[dim] + index if isinstance(index, int) and index < 0 else index)


def _reduce(op: str) -> Read:
    def read(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
        return reader.reduce(op, reader.tensor(args["self"]), args.get("dim"), args.get("keepdim", False))

    return read


def _any(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    if not is_boolean(term):
        raise Unknown
    return reader.terms.negated(reader.reduce("all", reader.terms.negated(term), args.get("dim"), args["keepdim"]))


def _all(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    if not is_boolean(reader.tensor(args["self"])):
        raise Unknown
    return _reduce("all")(reader, args, shape)


def _argmin(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    if not is_boolean(term):
        raise Unknown
    return reader.reduce("argmax", reader.terms.negated(term), args["dim"], args["keepdim"])


def _cumsum(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    return reader.terms.cumulate("cumsum", reader.tensor(args["self"]), args["dim"] % len(shape))


def _cumprod(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term = reader.tensor(args["self"])
    if not is_boolean(term):
        raise Unknown
    return reader.terms.cumulate("prefix", term, args["dim"] % len(shape))


def _softmax(op: str) -> Read:
    def read(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
        return reader.terms.softmax(op, reader.tensor(args["self"]), args["dim"] % len(shape))

    return read


def _iota(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    start, step = reader.size(args.get("start", 0)), reader.size(args.get("step", 1))
    return reader.terms.new("iota", (), (start, step), shape)


def _gather(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    term, index = reader.tensor(args["self"]), reader.tensor(args["index"])
    dim = args["dim"] % len(shape)
    base, sources = base_of(index)
    terms = reader.terms
    if dim == 1 and len(base.shape) == 1 and sources == (0, *(None,) * (len(shape) - 1)) and shape[1] == 1:
        if shape[0] != term.shape[0] or shape[2:] != term.shape[2:]:
            raise Unknown
        back = (0, None, *range(1, len(shape) - 1))
        return terms.view(terms.pick(term, base), back, shape)
    if dim == 2 and len(shape) == 3 and sources == (0, 1, None) and shape[2] == 1 and len(base.shape) == 2:
        return terms.view(_at(reader, term, base), (0, 1, None), shape)
    raise Unknown


def _at(reader: Reader, term: Term, tokens: Term) -> Term:
    """[B, K+, V] at [B, K] tokens: of the first K rows."""
    if term.shape[0] != tokens.shape[0]:
        raise Unknown
    return reader.terms.at(reader.terms.slice(term, 1, 0, tokens.shape[1]), tokens)


def _index(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    """t[rows, n] and t[rows, positions, tokens], where rows and positions count from 0."""
    term = reader.tensor(args["self"])
    if any(index is None or index.meta["val"].dtype not in (torch.int64, torch.int32) for index in args["indices"]):
        raise Unknown
    indices = [reader.tensor(index) for index in args["indices"]]
    common = shape[: len(shape) - len(term.shape) + len(indices)]
    bases = [base_of(reader.terms.broadcast(index, common)) for index in indices]

    def counts(position: int) -> bool:
        base, sources = bases[position]
        own = tuple(0 if d == position else None for d in range(len(common)))
        return base.op == "iota" and base.params == (0, 1) and sources == own

    if len(indices) == 2 and len(common) == 1 and counts(0) and common[0] == term.shape[0]:
        return reader.terms.pick(term, indices[1])
    if len(indices) == len(term.shape) == 3 and len(common) == 2 and counts(0) and counts(1):
        return _at(reader, term, reader.terms.broadcast(indices[2], common))
    raise Unknown


def _cat(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    parts = [reader.tensor(part) for part in args["tensors"]]
    if any(len(part.shape) != len(shape) for part in parts):
        raise Unknown
    return reader.terms.cat(parts, args["dim"] % len(shape))


def _pad(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    """At the end of one dimension."""
    term = reader.tensor(args["self"])
    amounts = [reader.size(amount) for amount in args["pad"]]
    padded = [i for i, amount in enumerate(amounts) if amount != 0]
    if len(padded) != 1 or padded[0] % 2 == 0 or not less(0, amounts[padded[0]]):
        raise Unknown
    dim = len(shape) - 1 - padded[0] // 2
    shape = (*shape[:dim], amounts[padded[0]], *shape[dim + 1 :])
    tail = reader.terms.view(reader.tensor(args["value"]), (None,) * len(shape), shape)
    return reader.terms.cat([term, tail], dim)


def _search(reader: Reader, args: dict[str, Any], shape: tuple[Size, ...]) -> Term:
    """One number per row: how many entries are at most (right), or below, it."""
    sequence, values = reader.tensor(args["sorted_sequence"]), reader.tensor(args["self"])
    axis = len(shape) - 1
    if args.get("sorter") is not None or not len(sequence.shape) == len(values.shape) == len(shape):
        raise Unknown
    if shape[axis:] != (1,) or sequence.shape[:axis] != shape[:axis]:
        raise Unknown
    right = args["right"] or args.get("side") == "right"
    values = reader.terms.broadcast(reader.terms.select(values, axis, 0), shape[:axis])
    sources = (*range(axis), None)
    pair = (sequence, reader.terms.view(values, sources, (*shape[:axis], 1)))
    below = reader.terms.elementwise("le" if right else "lt", pair, sequence.shape)
    return reader.terms.view(reader.terms.reduce("sum", below, axis), sources, shape)


CASTS: dict[str, Read] = {"aten._to_copy": _same, "prims.convert_element_type": _same}
# These only move values: read for every dtype.
KEEPING: dict[str, Read] = {
    "aten.alias": _same,
    "aten.clone": _same,
    "aten.detach": _same,
    "aten.expand": _expand,
    "aten.select": _select,
    "aten.slice": _slice,
    "aten.squeeze": _squeeze,
    "aten.unsqueeze": _unsqueeze,
    "aten.view": _reshape,
    "aten.reshape": _reshape,
    "aten._unsafe_view": _reshape,
}
READERS: dict[str, Read] = (
    CASTS
    | KEEPING
    | {
        "aten._log_softmax": _softmax("log_softmax"),
        "aten._softmax": _softmax("softmax"),
        "aten.add": _elementwise("add"),
        "aten.all": _all,
        "aten.amax": _reduce("amax"),
        "aten.any": _any,
        "aten.arange": _iota,
        "aten.argmax": _reduce("argmax"),
        "aten.argmin": _argmin,
        "aten.bitwise_not": _not,
        "aten.cat": _cat,
        "aten.clamp": _clamp,
        "aten.clamp_max": _clamp,
        "aten.clamp_min": _clamp,
        "aten.constant_pad_nd": _pad,
        "aten.cumprod": _cumprod,
        "aten.cumsum": _cumsum,
        "aten.div": _elementwise("div"),
        "aten.eq": _elementwise("eq"),
        "aten.exp": _elementwise("exp"),
        "aten.full": _full(None),
        "aten.full_like": _full(None),
        "aten.gather": _gather,
        "aten.ge": _elementwise("le", swapped=True),
        "aten.gt": _elementwise("lt", swapped=True),
        "aten.index": _index,
        "aten.le": _elementwise("le"),
        "aten.log": _elementwise("log"),
        "aten.logical_not": _not,
        "aten.lt": _elementwise("lt"),
        "aten.maximum": _elementwise("maximum"),
        "aten.minimum": _elementwise("minimum"),
        "aten.mul": _elementwise("mul"),
        "aten.ne": _not_equal,
        "aten.neg": _negative,
        "aten.ones": _full(1),
        "aten.ones_like": _full(1),
        "aten.relu": _relu,
        "aten.remainder": _elementwise("remainder"),
        "aten.scalar_tensor": _full(None),
        "aten.searchsorted": _search,
        "aten.sub": _elementwise("sub"),
        "aten.rsub": _elementwise("sub", swapped=True),
        "aten.sum": _reduce("sum"),
        "aten.where": _where,
        "aten.zeros": _full(0),
        "aten.zeros_like": _full(0),
        "prims.iota": _iota,
    }
)
