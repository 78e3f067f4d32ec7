"""The graph surgery: one call of the op, and from its result what was computed from the walk over the drafts."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .law import Match, Refusal, looks_like_a_draw, match
from .reader import Reader
from .terms import Term, base_of

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
UNIFORMS = (torch.float32, torch.float64)
TOKENS = (torch.int64, torch.int32)
# Ways to count on past the first rejection, which the op's result does not tell.
RUNNING = frozenset({"cumsum", "argmax"})


@dataclass
class Counters:
    """What the pass did: `matched` calls of the op written, `refused` draws that look like speculative sampling and are
    left as they are, by reason."""

    matched: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        self.matched = 0
        self.refused.clear()


def rewrite_graph(graph: Graph) -> Counters:
    """Replace speculative sampling in an ATen graph, in place."""
    result = Counters()
    reader = Reader(graph)
    tokens = dict.fromkeys(token for node in reader.term if (token := _token(reader, node)) is not None)
    in_place = _mutates(graph)
    rewritten: list[Term] = []
    refusals: list[tuple[Term, Refusal]] = []
    for token in tokens:
        if not token.cone().isdisjoint(rewritten):
            continue
        try:
            if in_place:
                raise Refusal("the graph writes in place before its end", 10)
            found = match(reader.terms, token)
            _Surgery(graph, reader, found).run()
            rewritten.append(token)
        except Refusal as refusal:
            refusals.append((token, refusal))
        except RecursionError:
            refusals.append((token, Refusal("the expression is too deep", 0)))
    result.matched = len(rewritten)
    result.refused.update(_telling(refusals, rewritten))
    if result.matched:
        graph.eliminate_dead_code()
    return result


def _token(reader: Reader, node: Node) -> Term | None:
    """The [B] term of a node that may be a next token, [B] or [B, 1]."""
    token, _ = base_of(reader.term[node])
    dtype = node.meta["val"].dtype
    if dtype.is_floating_point or dtype == torch.bool or len(token.shape) > 2:
        return None
    one_each = len(token.shape) == 1 or (token.op == "random" and token.shape[1] == 1)
    if not one_each or token.op in ("leaf", "count", "const"):
        return None
    return token if looks_like_a_draw(token, reader.behind) else None


def _telling(refusals: list[tuple[Term, Refusal]], rewritten: Iterable[Term]) -> list[str]:
    """One reason per draw: none for parts of what was rewritten; of overlapping attempts that which came furthest."""
    parts: set[Term] = set()
    for term in rewritten:
        parts |= term.cone()
    groups: list[list[tuple[Term, Refusal]]] = []
    for token, refusal in refusals:
        if token in parts:
            continue
        cone = token.cone()
        joined = [group for group in groups if any(other in cone for other, _ in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(each for group in joined for each in group), (token, refusal)])
    return [max((refusal for _, refusal in group), key=lambda refusal: refusal.depth).reason for group in groups]


def _mutates(graph: Graph) -> bool:
    """Whether anything is written in place, except by the copies into inputs at the end of a functional graph."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target == torch.ops.aten.copy_.default and all(user.op == "output" for user in node.users):
                continue
            if node.target._schema.is_mutable:
                return True
    return False


@dataclass(frozen=True)
class _Source:
    """A node and what is done to it: operators with their numbers."""

    node: Node
    steps: tuple[tuple[Any, ...], ...] = ()


class _Surgery:
    def __init__(self, graph: Graph, reader: Reader, found: Match) -> None:
        self.graph = graph
        self.reader = reader
        self.found = found
        terms = reader.terms
        tests = found.count.args[0]
        (axis, _) = found.count.params
        # What the walk over the drafts gives, and how the op's result gives it.
        self.results: dict[Term, Callable[[Node, Node], Node]] = {
            found.token: self._next_token,
            found.count: lambda output_tokens, num_accepted: num_accepted,
            terms.cumulate("prefix", tests, axis): self._accepted_mask,
            terms.reduce("all", tests, axis): self._all_accepted,
        }
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def run(self) -> None:
        replaced = [node for node in self.reader.term if self._is_first(node)]
        self._check_other_users(set(replaced))
        arguments, temperature = self._arguments()
        sources = [source.node for source in (*arguments, temperature) if isinstance(source, _Source)]
        if len({node.meta["val"].device for node in (*sources, *replaced)}) != 1:
            raise Refusal("the arguments and results are on several devices", 10)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        anchor = max((*sources, *placeholders[-1:]), key=self.order.__getitem__)
        moved = self._dependants(replaced, anchor)
        if any(node in moved for node in (anchor, *sources)):
            raise Refusal("a uniform number or a logit depends on how many drafts are accepted", 10)
        if any(_is_random(node) for node in moved):
            raise Refusal("random numbers are drawn between the walk and what it needs", 10)

        marker = anchor.next
        with self.graph.inserting_before(marker):
            output_tokens, num_accepted = self._call_op(arguments, temperature)
            values = {node: self._value(node, output_tokens, num_accepted) for node in replaced}
        for node in moved:
            marker.prepend(node)
        for node, value in values.items():
            value.meta |= {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
            node.replace_all_uses_with(value)
            # A later match takes what stands in for the node.
            self.reader.term[value] = self.reader.term.pop(node)
        for node in reversed(replaced):
            self.graph.erase_node(node)

    def _result(self, node: Node) -> tuple[Term, bool] | None:
        """Which of the results a node is, and whether negated."""
        base, _ = base_of(self.reader.term[node])
        negated = base.op == "not"
        base = base_of(base.args[0])[0] if negated else base
        if base not in self.results:
            return None
        return base, negated

    def _is_first(self, node: Node) -> bool:
        """Whether a node computes a result from something else than the result in another layout or type."""
        result = self._result(node)
        if result is None:
            return False
        sources = [self._result(source) for source in node.all_input_nodes if source in self.reader.term]
        return all(source is None or source[0] is not result[0] for source in sources)

    def _check_other_users(self, replaced: set[Node]) -> None:
        """What stays in the graph must not count past the walk: where rounding decides it could contradict the op."""
        tests = self.found.count.args[0]
        alive: set[Node] = set()
        stack = [node for node in self.graph.nodes if node.op == "output" or node.is_impure()]
        while stack:
            node = stack.pop()
            if node not in alive and node not in replaced:
                alive.add(node)
                stack.extend(node.all_input_nodes)
        negated = self.reader.terms.negated(tests)
        for node in alive & self.reader.term.keys():
            base, _ = base_of(self.reader.term[node])
            if base.op in RUNNING and base.args[0] in (tests, negated):
                raise Refusal("the running count of rejections is used elsewhere", 10)

    def _arguments(self) -> tuple[list[_Source], _Source | float | None]:
        """target_logits, draft_tokens, draft_logits and the uniforms; the temperature."""
        found = self.found
        one = self.reader.terms.const(1)
        for target, draft, divisor in (*self._without_temperature(), (found.target_logits, found.draft_logits, one)):
            p, q = self._source(target, LOGITS), self._source(draft, LOGITS)
            temperature: _Source | float | None
            if divisor.op == "const":
                temperature = None if divisor is one else divisor.params[0]
            else:
                temperature = self._source(divisor, (torch.float32,))
            if p is not None and q is not None and (divisor.op == "const" or temperature is not None):
                break
        else:
            raise Refusal("the logits are not float32, bfloat16 or float16", 9)
        tokens = self._source(found.draft_tokens, TOKENS)
        accept, sample = (self._source(u, UNIFORMS) for u in (found.accept_uniforms, found.sample_uniforms))
        if tokens is None or accept is None or sample is None:
            raise Refusal("the uniforms are not float32 or float64 values of the graph", 9)
        return [p, tokens, q, accept, sample], temperature

    def _without_temperature(self) -> list[tuple[Term, Term, Term]]:
        """The logits and T, where both are divided by one T: a positive number, or one per sequence or for all."""
        scaled = (self.found.target_logits, self.found.draft_logits)
        if any(term.op != "div" for term in scaled):
            return []
        (target, p_divisor), (draft, q_divisor) = (term.args for term in scaled)
        (base, sources), (other, other_sources) = base_of(p_divisor), base_of(q_divisor)
        if base is not other or sources != other_sources:
            return []
        one_each = sources == (0, None, None) and base.shape == self.found.sample_uniforms.shape
        lawful = _is_temperature(base.params[0]) if base.op == "const" else one_each or base.shape == ()
        return [(target, draft, base)] if lawful else []

    def _source(self, term: Term, dtypes: tuple[torch.dtype, ...]) -> _Source | None:
        """The first node that computes this term in one of these types, or what it is selected from."""
        for node, own in self.reader.term.items():
            if own is term and node.meta["val"].dtype in dtypes and node.meta["val"].layout == torch.strided:
                return _Source(node)
        if term.op == "select":
            step = (torch.ops.aten.select.int, *term.params)
        elif term.op == "remainder" and term.args[1].op == "const":
            # What `take_along_dim` does with an index.
            step = (torch.ops.aten.remainder.Scalar, *term.args[1].params)
        else:
            return None
        inner = self._source(term.args[0], dtypes)
        if inner is None or not all(isinstance(number, int) for number in step[1:]):
            return None
        return _Source(inner.node, (*inner.steps, step))

    def _dependants(self, nodes: Iterable[Node], anchor: Node) -> list[Node]:
        """In order, what is computed from these nodes up to the anchor."""
        limit = self.order[anchor]
        reached = set(nodes)
        found = []
        for node in self.graph.nodes:
            before = self.order[node] <= limit and node not in reached
            if before and any(source in reached for source in node.all_input_nodes):
                reached.add(node)
                found.append(node)
        return found

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)

        def value(arg: Any) -> Any:
            return arg.meta["val"] if isinstance(arg, Node) else arg

        with self._fake_mode():
            node.meta["val"] = target(*map(value, args), **{key: value(arg) for key, arg in kwargs.items()})
        return node

    def _fake_mode(self) -> Any:
        mode = getattr(next(iter(self.reader.term)).meta["val"], "fake_mode", None)
        return contextlib.nullcontext() if mode is None else mode

    def _node(self, source: _Source) -> Node:
        node = source.node
        for operation, *numbers in source.steps:
            node = self._call(operation, node, *numbers)
        return node

    def _call_op(self, arguments: list[_Source], temperature: _Source | float | None) -> tuple[Node, Node]:
        aten = torch.ops.aten
        p, tokens, q, accept, sample = map(self._node, arguments)
        self.tokens = tokens
        if self.found.draft_rows != self.found.count.params[1]:
            q = self._call(aten.slice.Tensor, q, 1, 0, self._size(tokens, 1))
        t: Node | None = None
        if isinstance(temperature, _Source):
            t = self._node(temperature)
            if t.meta["val"].dim() == 0:
                ones = self._call(aten.full_like.default, sample, 1.0, dtype=torch.float32)
                t = self._call(aten.mul.Tensor, ones, t)
        elif temperature is not None:
            t = self._call(aten.full_like.default, sample, float(temperature), dtype=torch.float32)
        call = self.graph.call_function(torch.ops.specops.verify_exact.default, (p, tokens, q, accept, sample, t))
        batch, num_drafts = tokens.meta["val"].shape
        device = tokens.meta["val"].device
        # By hand: the body of the op would look at the sizes, and guard on them.
        with self._fake_mode():
            call.meta["val"] = (
                torch.empty((batch, num_drafts + 1), dtype=torch.int64, device=device),
                torch.empty((batch,), dtype=torch.int64, device=device),
            )
        return self._item(call, 0), self._item(call, 1)

    def _item(self, call: Node, index: int) -> Node:
        node = self.graph.call_function(operator.getitem, (call, index))
        node.meta["val"] = call.meta["val"][index]
        return node

    def _size(self, node: Node, dim: int) -> Any:
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self._call(torch.ops.aten.sym_size.int, node, dim)

    def _next_token(self, output_tokens: Node, num_accepted: Node) -> Node:
        aten = torch.ops.aten
        index = self._call(aten.unsqueeze.default, num_accepted, 1)
        return self._call(aten.squeeze.dim, self._call(aten.gather.default, output_tokens, 1, index), 1)

    def _accepted_mask(self, output_tokens: Node, num_accepted: Node) -> Node:
        length, device = self._size(self.tokens, 1), num_accepted.meta["val"].device
        positions = self._call(
            torch.ops.prims.iota.default,
            length, start=0, step=1, dtype=torch.int64, device=device, requires_grad=False,
        )  # fmt: skip
        ends = self._call(torch.ops.aten.unsqueeze.default, num_accepted, 1)
        return self._call(torch.ops.aten.lt.Tensor, positions, ends)

    def _all_accepted(self, output_tokens: Node, num_accepted: Node) -> Node:
        return self._call(torch.ops.aten.eq.Scalar, num_accepted, self._size(self.tokens, 1))

    def _value(self, node: Node, output_tokens: Node, num_accepted: Node) -> Node:
        """What stands in for a node: its result in its layout and type."""
        result = self._result(node)
        assert result is not None
        term, negated = result
        value = self.results[term](output_tokens, num_accepted)
        if negated:
            value = self._call(torch.ops.aten.logical_not.default, value)
        _, sources = base_of(self.reader.term[node])
        for dim, source in enumerate(sources):
            if source is None:
                value = self._call(torch.ops.aten.unsqueeze.default, value, dim)
        dtype, shape = node.meta["val"].dtype, node.meta["val"].shape
        if value.meta["val"].shape != shape:
            value = self._call(torch.ops.aten.expand.default, value, [self._size(node, d) for d in range(len(shape))])
        if value.meta["val"].dtype != dtype:
            value = self._call(torch.ops.prims.convert_element_type.default, value, dtype)
        return value


def _is_temperature(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _is_random(node: Node) -> bool:
    if node.is_impure():
        return True
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.nondeterministic_seeded in tags
