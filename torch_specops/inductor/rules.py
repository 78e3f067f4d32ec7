"""The rules that make two spellings of a value one term: each returns the simpler term, or None where it says nothing.

The arguments have the full shape, or are constants.
"""

from __future__ import annotations

from collections.abc import Callable

from .terms import Rule, Size, Term, Terms, base_of, constants, is_boolean, is_nonnegative, less

Args = tuple[Term, ...]
Shape = tuple[Size, ...]


def _add(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = sorted(args, key=lambda arg: arg.op == "const")
    return a if b.op == "const" and b.params[0] == 0 else None


def _sub(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = args
    value_a, value_b = constants(args)
    if value_b == 0:
        return a
    if value_a == 1 and is_boolean(b):
        return terms.negated(b)
    # (x - max) - log(sum(exp(x - max)))
    if a.op == "sub" and base_of(b)[0].op == "log":
        x, axis = _shifted(a)
        if x is not None and b is _spread(terms, _log_sum_exp(terms, a, axis), axis, shape):
            return terms.softmax("log_softmax", x, axis)
    return None


def _shifted(term: Term) -> tuple[Term | None, int]:
    """x and the axis, of x - max(x)."""
    if term.op != "sub":
        return None, 0
    x, shift = term.args
    base, sources = base_of(shift)
    missing = [d for d, source in enumerate(sources) if source is None]
    kept = [d for d, source in enumerate(sources) if source is not None]
    if base.op != "amax" or len(missing) != 1 or base.params != (missing[0],) or base.args[0] is not x:
        return None, 0
    return (x, missing[0]) if [sources[d] for d in kept] == list(range(len(kept))) else (None, 0)


def _spread(terms: Terms, term: Term, axis: int, shape: Shape) -> Term:
    """A reduction over `axis` brought back to the full shape."""
    sources = tuple(None if d == axis else d - (d > axis) for d in range(len(shape)))
    return terms.view(term, sources, shape)


def _log_sum_exp(terms: Terms, term: Term, axis: int) -> Term:
    total = terms.reduce("sum", terms.elementwise("exp", (term,), term.shape), axis)
    return terms.elementwise("log", (total,), total.shape)


def _div(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = args
    if b.op == "const" and b.params[0] == 1:
        return a
    if a.op == "exp":
        x, axis = _shifted(a.args[0])
        if x is not None and b is _spread(terms, terms.reduce("sum", a, axis), axis, shape):
            return terms.softmax("softmax", x, axis)
    return None


def _mul(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = sorted(args, key=lambda arg: arg.op == "const")
    if b.op == "const":
        return a if b.params[0] == 1 else None
    if is_boolean(a) or is_boolean(b):
        mask, x = (a, b) if is_boolean(a) else (b, a)
        return terms.elementwise("where", (mask, x, terms.const(0)), shape)
    return None


def _minimum(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = sorted(args, key=lambda arg: arg.op == "const")
    if b.op != "const":
        return None
    limit = b.params[0]
    if a.op == "const":
        return a if less(a.params[0], limit) else b
    upper = terms.upper(a)
    return a if upper is not None and (upper == limit or less(upper, limit)) else None


def _maximum(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = sorted(args, key=lambda arg: arg.op == "const")
    return a if b.op == "const" and b.params[0] == 0 and is_nonnegative(a) else None


def _remainder(terms: Terms, args: Args, shape: Shape) -> Term | None:
    a, b = args
    upper = terms.upper(a)
    return a if b.op == "const" and upper is not None and less(upper, b.params[0]) else None


def _not(terms: Terms, args: Args, shape: Shape) -> Term | None:
    (a,) = args
    if a.op == "const":
        return terms.const(not a.params[0])
    if a.op == "not":
        return a.args[0]
    if a.op in ("lt", "le"):
        return terms.elementwise("le" if a.op == "lt" else "lt", a.args[::-1], shape)
    return None


def _where(terms: Terms, args: Args, shape: Shape) -> Term | None:
    condition, a, b = args
    if condition.op == "const":
        return a if condition.params[0] else b
    if a is b:
        return a
    if condition.op == "not":
        return terms.elementwise("where", (condition.args[0], b, a), shape)
    if condition.op == "le":
        return terms.elementwise("where", (terms.negated(condition), b, a), shape)
    value_a, value_b = constants((a, b))
    if is_boolean(condition) and (value_a, value_b) == (1, 0):
        return condition
    if is_boolean(condition) and (value_a, value_b) == (0, 1):
        return terms.negated(condition)
    # The first rejection, or K where there is none.
    if condition.op == "all" and b.op == "argmax" and b.params == condition.params:
        tests = condition.args[0]
        axis = condition.params[0]
        if b.args[0] is terms.negated(tests) and value_a == tests.shape[axis]:
            return terms.new("count", (tests,), (axis, value_a), shape)
    return None


def _exp(terms: Terms, args: Args, shape: Shape) -> Term | None:
    return terms.softmax("softmax", args[0].args[0], args[0].params[0]) if args[0].op == "log_softmax" else None


def _log(terms: Terms, args: Args, shape: Shape) -> Term | None:
    return terms.softmax("log_softmax", args[0].args[0], args[0].params[0]) if args[0].op == "softmax" else None


Interval = tuple[Size, Size]


def _at_most(a: Size, b: Size) -> bool:
    return bool(a == b) or less(a, b)


def _compared(op: str, a: Interval, b: Interval) -> bool | None:
    """What is known of any two integers in these intervals."""
    if op == "eq":
        return False if less(a[1], b[0]) or less(b[1], a[0]) else True if a[0] == a[1] == b[0] == b[1] else None
    holds, fails = (less, _at_most) if op == "lt" else (_at_most, less)
    return True if holds(a[1], b[0]) else False if fails(b[1], a[0]) else None


def _compare(op: str) -> Rule:
    def rule(terms: Terms, args: Args, shape: Shape) -> Term | None:
        for position, (term, limit) in enumerate((args, args[::-1])):
            if limit.op != "const":
                continue
            value = (limit.params[0], limit.params[0])

            def of(low: Size, high: Size, value: Interval = value, first: bool = position == 0) -> bool | None:
                return _compared(op, (low, high), value) if first else _compared(op, value, (low, high))

            if is_boolean(term) and term.op != "const":
                return _of_boolean(terms, term, of(0, 0), of(1, 1))
            upper = terms.upper(term)
            known = None if upper is None else of(upper if term.op == "const" else 0, upper)
            return _of_count(terms, term, of) if known is None else terms.const(known)
        return _running_count(terms, args) if op == "eq" else None

    return rule


def _of_boolean(terms: Terms, term: Term, at_false: bool | None, at_true: bool | None) -> Term | None:
    if at_false is None or at_true is None:
        return None
    if at_false == at_true:
        return terms.const(at_true)
    return term if at_true else terms.negated(term)


def _of_count(terms: Terms, term: Term, of: Callable[[Size, Size], bool | None]) -> Term | None:
    """A number of rejections, so far or in all, compared with what tells 0 from the rest; or a number of acceptances
    in all compared with what tells the number of tests from the rest."""
    if term.op not in ("cumsum", "sum") or not is_boolean(term.args[0]):
        return None
    tests, (axis,) = term.args[0], term.params
    size = tests.shape[axis]
    none, one, two = of(0, 0), of(1, 1), of(2, 2)
    if none is not None and one is not None and none is not one and one is two:
        passed = terms.negated(tests)
        held = terms.cumulate("prefix", passed, axis) if term.op == "cumsum" else terms.reduce("all", passed, axis)
        return held if none else terms.negated(held)
    before, last, every = of(size - 2, size - 2), of(size - 1, size - 1), of(size, size)
    if term.op == "sum" and before is last is not None and every is not None and every is not last:
        held = terms.reduce("all", tests, axis)
        return held if every else terms.negated(held)
    return None


def _running_count(terms: Terms, args: Args) -> Term | None:
    """cumsum(accepted) == 1, 2, ..: all accepted so far."""
    for a, b in (args, args[::-1]):
        base, sources = base_of(b)
        if a.op == "cumsum" and is_boolean(a.args[0]) and base.op == "iota" and base.params == (1, 1):
            axis = a.params[0]
            if all((source is not None) == (d == axis) for d, source in enumerate(sources)):
                return terms.cumulate("prefix", a.args[0], axis)
    return None


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "minimum": _minimum,
    "maximum": _maximum,
    "remainder": _remainder,
    "not": _not,
    "where": _where,
    "exp": _exp,
    "log": _log,
    "lt": _compare("lt"),
    "le": _compare("le"),
    "eq": _compare("eq"),
}
