"""Nodes of an ATen graph as terms, as torch has them or as Inductor decomposes them. What is not known is a leaf."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .operators import CASTS, KEEPING, READERS, Unknown, size_of
from .rules import RULES
from .terms import Size, Term, Terms, base_of, is_boolean

RANDOM = frozenset({"aten.multinomial", "aten.exponential", "aten.exponential_"})


def arguments(node: Node) -> dict[str, Any]:
    """By name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return defaults | given


class Reader:
    """The terms of all nodes of a graph that hold a tensor."""

    def __init__(self, graph: Graph) -> None:
        self.terms = Terms(RULES)
        self.term: dict[Node, Term] = {}
        # What leaves are made of, whose operator is not known but works entry by entry.
        self.behind: dict[Term, list[Term]] = {}
        for node in graph.nodes:
            if isinstance(node.meta.get("val"), Tensor):
                self.term[node] = self._read(node)
        self.terms.sinking = True

    def _read(self, node: Node) -> Term:
        value = node.meta["val"]
        shape = tuple(map(size_of, value.shape))
        if node.op == "call_function":
            try:
                term = self._value_of_call(node, shape, value.dtype)
                if term.shape == shape and _holds(base_of(term)[0], value.dtype):
                    return term
            except Unknown:
                pass
        leaf = self.terms.leaf(node, shape, value.dtype == torch.bool)
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
            self.behind[leaf] = [self.term[source] for source in node.all_input_nodes if source in self.term]
        return leaf

    def _value_of_call(self, node: Node, shape: tuple[Size, ...], dtype: torch.dtype) -> Term:
        if node.target is operator.getitem:
            return self._item(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unknown
        name = str(node.target.overloadpacket)
        if name in RANDOM:
            weights = (self.tensor(arguments(node)["self"]),) if name == "aten.multinomial" else ()
            return self.terms.new("random", weights, (node,), shape)
        read = READERS.get(name)
        if read is None:
            raise Unknown
        if _is_low(dtype) and name not in KEEPING and name not in CASTS:
            if name in ("aten._softmax", "aten._log_softmax"):
                return self.terms.new("low_softmax", (), (node,), shape)
            raise Unknown
        args = arguments(node)
        first = args.get("self", args.get("a"))
        value = first.meta["val"] if isinstance(first, Node) else None
        if "dim" in args and name != "aten.unsqueeze" and isinstance(value, Tensor) and value.dim() == 0:
            raise Unknown
        # `view(dtype)` reads the same bytes as other numbers.
        if name in KEEPING and value is not None and value.dtype != dtype:
            raise Unknown
        term = read(self, args, shape)
        return self._cast(term, value.dtype, dtype) if name in CASTS and value is not None else term

    def _item(self, node: Node) -> Term:
        source, index = node.args
        if isinstance(source, Node) and str(source.target) == "aten.max.dim" and index == 0:
            args = arguments(source)
            return self.reduce("amax", self.tensor(args["self"]), args["dim"], args["keepdim"])
        raise Unknown

    def _cast(self, term: Term, before: torch.dtype, after: torch.dtype) -> Term:
        """Casts that keep the value are left out; of float64 to float32 only rounding is lost."""
        if before == after or is_boolean(term):
            return term
        if after == torch.bool:
            return self.terms.negated(self.terms.elementwise("eq", (term, self.terms.const(0)), term.shape))
        if before.is_floating_point and after.is_floating_point:
            if _is_low(after):
                soft = any(part.op in ("softmax", "log_softmax") for part in term.cone())
                return self.terms.new("low_softmax" if soft else "narrowed", (term,), (after,), term.shape)
            return term
        integers = not before.is_floating_point and not after.is_floating_point
        if (integers and after.itemsize >= 4) or self.terms.upper(base_of(term)[0]) is not None:
            return term
        raise Unknown

    def tensor(self, arg: Any) -> Term:
        """The term of an argument: a tensor or a number."""
        if isinstance(arg, Node):
            if arg in self.term:
                return self.term[arg]
            value = arg.meta.get("val")
            if isinstance(value, (int, torch.SymInt)):
                return self.terms.const(size_of(value))
        elif isinstance(arg, (bool, int, float)):
            return self.terms.const(arg)
        raise Unknown

    def size(self, arg: Any) -> Size:
        return size_of(arg.meta["val"]) if isinstance(arg, Node) else size_of(arg)

    def reduce(self, op: str, term: Term, dims: Any, keepdim: bool) -> Term:
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        if len(dims) != 1 or dims[0] is None:
            raise Unknown
        axis = dims[0] % len(term.shape)
        reduced = self.terms.reduce(op, term, axis)
        if not keepdim:
            return reduced
        sources = tuple(None if d == axis else d - (d > axis) for d in range(len(term.shape)))
        return self.terms.view(reduced, sources, (*term.shape[:axis], 1, *term.shape[axis + 1 :]))


def _holds(term: Term, dtype: torch.dtype) -> bool:
    """Whether the type has room: small integers and bool for 0 and 1 only, integers for whole numbers."""
    if not dtype.is_floating_point and dtype.itemsize < 4:
        return is_boolean(term)
    number = term.params[0] if term.op == "const" else 0
    return not isinstance(number, float) or dtype.is_floating_point or number.is_integer()


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4
