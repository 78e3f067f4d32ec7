"""Values of a graph as terms in one normal form, so that two spellings of one value are one term.

A term says what is computed, not how it is laid out: `unsqueeze`, `expand`, `squeeze` and `keepdim` are all a `view` of
something smaller, and views are moved outwards. Casts that keep the value are left out. Terms are made by
`Terms` alone, which keeps one object for equal terms: equal means identical.

The rules hold for what speculative sampling works on: logits with a finite entry in every row, so that no probability
is NaN, and tokens in [0, V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# An int, or sympy's expression of a dynamic size.
Size = Any
Map = tuple["int | None", ...]

COMMUTATIVE = frozenset({"add", "mul", "minimum", "maximum", "eq"})
ELEMENTWISE = COMMUTATIVE | {"sub", "div", "lt", "le", "not", "where", "exp", "log", "remainder"}
REDUCTIONS = frozenset({"sum", "amax", "argmax", "all"})
CUMULATIVE = frozenset({"cumsum", "prefix"})
BOOLEAN = frozenset({"lt", "le", "eq", "not", "prefix", "all"})
# What stands for one row of a softmax, or some.
STRUCTURE = frozenset({"slice", "select", "pick", "at"})
# Nothing inside these is looked at once a graph has been read.
ATOMS = frozenset({"leaf", "const", "iota", "softmax", "log_softmax", "count"})


@dataclass(frozen=True, eq=False)
class Term:
    op: str
    args: tuple[Term, ...]
    params: tuple[Any, ...]
    shape: tuple[Size, ...]
    index: int = field(repr=False)

    def cone(self) -> set[Term]:
        """The term and all it is made of, atoms closed."""
        seen: set[Term] = set()
        stack = [self]
        while stack:
            term = stack.pop()
            if term not in seen:
                seen.add(term)
                stack.extend(() if term.op in ATOMS else term.args)
        return seen


def less(a: Size, b: Size) -> bool:
    """Whether a < b is known."""
    try:
        return int(b - a) > 0 and int(b - a) == b - a
    except (TypeError, ValueError, OverflowError):
        return False


def base_of(term: Term) -> tuple[Term, Map]:
    return (term.args[0], term.params[0]) if term.op == "view" else (term, tuple(range(len(term.shape))))


def _without(items: Sequence[Any], index: int) -> tuple[Any, ...]:
    return (*items[:index], *items[index + 1 :])


def _insert(items: Sequence[Any], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index:])


Rule = Callable[["Terms", tuple[Term, ...], tuple[Size, ...]], "Term | None"]


class Terms:
    """Makes terms. `sinking`: slices, selections and picks move inwards, up to the softmax; set once a graph has been
    read, since before that the logits of a softmax should stay what the graph computes."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.rules = rules
        self.sinking = False
        self.upper_bounds: dict[Term, Size] = {}
        self._terms: dict[Any, Term] = {}

    def new(self, op: str, args: tuple[Term, ...], params: tuple[Any, ...], shape: tuple[Size, ...]) -> Term:
        if op in COMMUTATIVE:
            # Constants last.
            args = tuple(sorted(args, key=lambda arg: (arg.op == "const", arg.index)))
        key = (op, tuple(arg.index for arg in args), params, shape)
        if key not in self._terms:
            self._terms[key] = Term(op, args, params, shape, len(self._terms))
        return self._terms[key]

    def leaf(self, node: Any, shape: tuple[Size, ...], boolean: bool = False) -> Term:
        return self.new("leaf", (), (node, boolean), shape)

    def const(self, value: Any) -> Term:
        return self.new("const", (), (value,), ())

    def view(self, base: Term, sources: Map, shape: tuple[Size, ...]) -> Term:
        """`sources` names for every dimension of the result the one of `base` it is, or None: of size 1, or repeated.
        They ascend. Dimensions of `base` that are not named have size 1."""
        base, inner = base_of(base)
        if base.op == "const":
            sources = (None,) * len(shape)
        sources = tuple(None if d is None else inner[d] for d in sources)
        if sources == tuple(range(len(base.shape))) and shape == base.shape:
            return base
        return self.new("view", (base,), (sources,), shape)

    def broadcast(self, term: Term, shape: tuple[Size, ...]) -> Term:
        if base_of(term)[0].op == "const":
            return base_of(term)[0]
        extra = len(shape) - len(term.shape)
        repeated = [d for d in range(len(term.shape)) if term.shape[d] != shape[d + extra]]
        if any(term.shape[d] != 1 for d in repeated):
            # Dynamic sizes that are equal, but not known to be.
            return self.new("broadcast", (term,), (), shape)
        for d in reversed(repeated):
            term = self.select(term, d, 0)
        base, sources = base_of(term)
        rest = iter(sources)
        kept = tuple(None if d - extra in repeated or d < extra else next(rest) for d in range(len(shape)))
        return self.view(base, kept, shape)

    def elementwise(self, op: str, args: Sequence[Term], shape: tuple[Size, ...]) -> Term:
        args = [self.broadcast(arg, shape) for arg in args]
        parts = [(b, (None,) * len(shape) if b.op == "const" else s) for b, s in map(base_of, args)]
        kept = [d for d in range(len(shape)) if any(sources[d] is not None for _, sources in parts)]
        if len(kept) == len(shape):
            return self._simplified(op, tuple(args), shape)
        inner_shape = tuple(shape[d] for d in kept)
        inner_args = [
            base if base.op == "const" else self.view(base, tuple(sources[d] for d in kept), inner_shape)
            for base, sources in parts
        ]
        inner = self.elementwise(op, inner_args, inner_shape)
        return self.view(inner, tuple(kept.index(d) if d in kept else None for d in range(len(shape))), shape)

    def reduce(self, op: str, term: Term, axis: int) -> Term:
        base, sources = base_of(term)
        source = sources[axis]
        shape = _without(term.shape, axis)
        if term.op == "view" and source is not None:
            inner = self.reduce(op, base, source)
            rest = _without(sources, axis)
            return self.view(inner, tuple(s if s is None else s - (s > source) for s in rest), shape)
        if op == "sum" and term.op == "prefix" and term.params == (axis,):
            return self.new("count", term.args, (axis, term.shape[axis]), shape)
        if op == "argmax" and term.op == "cat" and term.params == (axis,) and is_boolean(term.args[0]):
            # The first rejection of a row that is closed with one.
            head, last = term.args[0], base_of(term.args[-1])[0]
            if len(term.args) == 2 and last.op == "const" and last.params[0] == 1 and term.args[-1].shape[axis] == 1:
                return self.new("count", (self.negated(head),), (axis, head.shape[axis]), shape)
        return self.new(op, (term,), (axis,), shape)

    def cumulate(self, op: str, term: Term, axis: int) -> Term:
        base, sources = base_of(term)
        source = sources[axis]
        if term.op == "view" and source is not None:
            return self.view(self.cumulate(op, base, source), sources, term.shape)
        return self.new(op, (term,), (axis,), term.shape)

    def softmax(self, op: str, term: Term, axis: int) -> Term:
        """Rows are independent: taking some of them comes after the softmax."""
        base, sources = base_of(term)
        source = sources[axis]
        if term.op == "view" and source is not None:
            return self.view(self.softmax(op, base, source), sources, term.shape)
        outer = self._rows_last(term)
        if outer is not None:
            inner = outer.args[0]
            if outer.op == "pick":
                return self.pick(self.softmax(op, inner, axis + (axis >= 1)), outer.args[1])
            dim = outer.params[0]
            if outer.op == "select":
                return self.select(self.softmax(op, inner, axis + (axis >= dim)), *outer.params)
            if dim != axis:
                return self.slice(self.softmax(op, inner, axis), *outer.params)
        return self.new(op, (term,), (axis,), term.shape)

    def _rows_last(self, term: Term) -> Term | None:
        """The same value with slice, select or pick outermost, if that is all it takes: of x, or of x / temperature."""
        rows = ("slice", "select", "pick")
        if term.op in rows:
            return term
        if term.op != "div" or term.args[0].op not in rows:
            return None
        outer, divisor = term.args
        inner = outer.args[0]
        dim = outer.params[0] if outer.op in ("slice", "select") else 1
        base, sources = base_of(divisor)
        if base.op != "const":
            if outer.op == "slice":
                if sources[dim] is not None:
                    return None
            else:
                sources = _insert(sources, dim, None)
            divisor = self.view(base, sources, inner.shape)
        scaled = self.elementwise("div", (inner, divisor), inner.shape)
        return self.new(outer.op, (scaled, *outer.args[1:]), outer.params, outer.shape)

    def slice(self, term: Term, dim: int, start: Size, length: Size) -> Term:
        shape = (*term.shape[:dim], length, *term.shape[dim + 1 :])
        if shape == term.shape:
            return term
        base, sources = base_of(term)
        if term.op == "view":
            source = sources[dim]
            inner = base if source is None else self.slice(base, source, start, length)
            return self.view(inner, sources, shape)
        if term.op == "slice" and term.params[0] == dim:
            return self.slice(term.args[0], dim, term.params[1] + start, length)
        if term.op == "cumsum" and term.params == (dim,) and length == 1 and start == term.shape[dim] - 1:
            sources = tuple(None if d == dim else d - (d > dim) for d in range(len(shape)))
            return self.view(self.reduce("sum", term.args[0], dim), sources, shape)
        sunk = self._sunk(term, lambda x: self.slice(x, dim, start, length), dim, shape)
        return sunk or self.new("slice", (term,), (dim, start, length), shape)

    def select(self, term: Term, dim: int, index: Size) -> Term:
        shape = _without(term.shape, dim)
        base, sources = base_of(term)
        if term.op == "view":
            source = sources[dim]
            rest = _without(sources, dim)
            if source is None:
                return self.view(base, rest, shape)
            inner = self.select(base, source, index)
            return self.view(inner, tuple(s if s is None else s - (s > source) for s in rest), shape)
        if term.op == "slice" and term.params[0] == dim:
            return self.select(term.args[0], dim, term.params[1] + index)
        if term.op == "cumsum" and term.params == (dim,) and index == term.shape[dim] - 1:
            return self.reduce("sum", term.args[0], dim)
        if term.op == "cat" and term.params == (dim,):
            head, *tail = term.args
            if index == head.shape[dim]:
                return self.select(self.cat(tail, dim), dim, 0)
        sunk = self._sunk(term, lambda x: self.select(x, dim, index), dim, shape)
        return sunk or self.new("select", (term,), (dim, index), shape)

    def pick(self, term: Term, index: Term) -> Term:
        """[B, N, ...], [B] -> [B, ...]: row b takes entry index[b] of dimension 1."""
        if index.op == "const":
            return self.select(term, 1, index.params[0])
        shape = _without(term.shape, 1)
        base, sources = base_of(term)
        if term.op == "view" and sources[1] is None:
            return self.view(base, _without(sources, 1), shape)
        if term.op == "view" and sources[:2] == (0, 1):
            rest = tuple(s if s is None else s - (s > 1) for s in _without(sources, 1))
            return self.view(self.pick(base, index), rest, shape)
        bound = self.upper(index)
        if bound is not None and term.op == "slice" and term.params[:2] == (1, 0) and less(bound, term.params[2]):
            return self.pick(term.args[0], index)
        if bound is not None and term.op == "cat" and term.params == (1,) and less(bound, term.args[0].shape[1]):
            return self.pick(term.args[0], index)
        sunk = self._sunk(term, lambda x: self.pick(x, index), 1, shape)
        return sunk or self.new("pick", (term, index), (), shape)

    def at(self, term: Term, tokens: Term) -> Term:
        """[..., V], [...] -> [...]: the entry of the token in each row."""
        base, sources = base_of(term)
        if term.op == "view" and sources[-1] is None:
            return self.view(base, sources[:-1], tokens.shape)
        if self.sinking and term.op in ELEMENTWISE:
            return self._through(term, lambda x: self.at(x, tokens), tokens.shape)
        return self.new("at", (term, tokens), (), tokens.shape)

    def _through(self, term: Term, take: Callable[[Term], Term], shape: tuple[Size, ...]) -> Term:
        return self.elementwise(term.op, [arg if arg.op == "const" else take(arg) for arg in term.args], shape)

    def _sunk(self, term: Term, take: Callable[[Term], Term], dim: int, shape: tuple[Size, ...]) -> Term | None:
        """`take`, which works along `dim`, moved inside."""
        if not self.sinking:
            return None
        if term.op in ELEMENTWISE:
            return self._through(term, take, shape)
        if len(shape) >= len(term.shape) or term.op not in CUMULATIVE | REDUCTIONS:
            return None
        axis = term.params[0]
        inner = term.args[0]
        if term.op in CUMULATIVE:
            return None if axis == dim else self.cumulate(term.op, take(inner), axis - (axis > dim))
        return self.reduce(term.op, take(inner), axis - 1) if axis > dim else None

    def cat(self, parts: Sequence[Term], dim: int) -> Term:
        if len(parts) == 1:
            return parts[0]
        length = sum((part.shape[dim] for part in parts[1:]), parts[0].shape[dim])
        shape = parts[0].shape
        return self.new("cat", tuple(parts), (dim,), (*shape[:dim], length, *shape[dim + 1 :]))

    def negated(self, term: Term) -> Term:
        return self.elementwise("not", (term,), term.shape)

    def rebuilt(self, term: Term, known: dict[Term, Term]) -> Term:
        """The term made anew with `known` replaced, under the present rules and bounds."""
        done = dict(known)

        def visit(term: Term) -> Term:
            if term not in done:
                args = () if term.op in ATOMS else tuple(visit(arg) for arg in term.args)
                done[term] = term if term.op in ATOMS else self._make(term, args)
            return done[term]

        return visit(term)

    def _make(self, term: Term, args: tuple[Term, ...]) -> Term:
        op, params = term.op, term.params
        if op == "view":
            return self.view(args[0], params[0], term.shape)
        if op in ELEMENTWISE:
            return self.elementwise(op, args, term.shape)
        if op in REDUCTIONS:
            return self.reduce(op, args[0], params[0])
        if op in CUMULATIVE:
            return self.cumulate(op, args[0], params[0])
        if op == "slice":
            return self.slice(args[0], *params)
        if op == "select":
            return self.select(args[0], *params)
        if op in ("pick", "at"):
            return getattr(self, op)(*args)
        return self.cat(args, params[0]) if op == "cat" else self.new(op, args, params, term.shape)

    def upper(self, term: Term) -> Size | None:
        """A bound of an index that is never negative."""
        if term.op == "const":
            return term.params[0]
        if term.op == "count":
            return self.upper_bounds.get(term, term.params[1])
        bounded = term.op == "minimum" and term.args[1].op == "const" and is_nonnegative(term.args[0])
        return term.args[1].params[0] if bounded else None

    def _simplified(self, op: str, args: tuple[Term, ...], shape: tuple[Size, ...]) -> Term:
        rule = self.rules.get(op)
        term = None if rule is None else rule(self, args, shape)
        if term is None:
            return self.new(op, args, (), shape)
        return self.view(term, (None,) * len(shape), shape) if term.op == "const" else term


def is_boolean(term: Term) -> bool:
    base, _ = base_of(term)
    if base.op == "leaf":
        return bool(base.params[1])
    if base.op in STRUCTURE:
        return is_boolean(base.args[0])
    if base.op == "cat":
        return all(map(is_boolean, base.args))
    return base.op in BOOLEAN or (base.op == "const" and base.params[0] in (0, 1))


def is_nonnegative(term: Term, depth: int = 8) -> bool:
    """Whether it is known; `depth` bounds the search, for sums may be nested as deep as a model."""
    base, _ = base_of(term)
    if base.op == "const":
        return bool(base.params[0] >= 0)
    if depth == 0:
        return False
    parts = (is_nonnegative(arg, depth - 1) for arg in base.args)
    if base.op == "maximum":
        return any(parts)
    if base.op in STRUCTURE | {"sum"}:
        return next(parts)
    if base.op == "where":
        return all(list(parts)[1:])
    if base.op in ("div", "mul", "add", "minimum"):
        return all(parts)
    return base.op in ("softmax", "exp", "count", "argmax") or is_boolean(base)


def constants(args: Sequence[Term]) -> Iterator[Any]:
    """The value of each constant, None for the others."""
    return (arg.params[0] if arg.op == "const" else None for arg in args)
