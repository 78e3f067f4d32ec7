"""An opt-in graph pass for `torch.compile` that removes operations on logits directly before one of our ops. The op
does not need these operations, because it reads any dtype and any strides, and takes a temperature. In

    verify_exact(target_logits.float() / 2, draft_tokens, draft_logits.float() / 2, u, s)

the op gets the original logits and a temperature of 2, if the code is compiled inside `with absorb():` or after
`install()`. The pass absorbs

- a cast of bfloat16 or float16 to float32, and a copy (`.clone()`, `.contiguous()`) of contiguous rows,
- a division in float32 by a constant power of two, if target and draft are divided alike and the op has no temperature.

The scaled logits inside the op are then bitwise the same, unless the division overflows a finite logit in float32. On a
CPU the op returns the same tokens. On CUDA, the order in which a kernel sums a row depends on dtype and alignment, so a
token may differ if the rounding of a sum decides it.

For other temperatures, the op's product with 1 / T differs from the quotient in the last bits, so these divisions are
absorbed only with `any_temperature=True`: divisions by other positive constants, and by float32 tensors with one
positive temperature for all rows or for each sequence. If the op has a `draft_lse`, such a division is not absorbed,
because the lse was computed from the quotient. Where bounds are returned or given, no division is absorbed, because
they are logits, and must be the quotients.

The pass does not absorb operations whose result has other users, divisors per token, and casts to a narrower dtype. It
also does not absorb an operation if its input or its divisor is written to before the op reads it. The pass absorbs
nothing before `filter_logits`, which returns logits in the dtype and scale of its input. On a CPU, Inductor fuses most
of these operations into the op's code, so the pass saves little except before an op with filters.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import types
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import ops
from .ops import private

__all__ = ["absorb", "install", "uninstall"]

config: Any
CustomGraphPass: Any
config, CustomGraphPass = private.inductor_hook()
_aten, _specops = torch.ops.aten, torch.ops.specops
# A graph may contain an op or its default overload, so list both.
_OPS: set[Any] = {getattr(_specops, name) for name in ops.__all__ if name != "filter_logits"}
_OPS |= {op.default for op in _OPS}
# Targets that may copy or cast. Methods are identified by name. `_kind` compares the dtypes and shapes of input and
# result to tell what a call does.
_COPIES = {"float", "to", "type", "type_as", "clone", "contiguous", torch.clone}
_COPIES |= {_aten.to.dtype, _aten._to_copy.default, _aten.clone.default, _aten.contiguous.default}
_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
_DIVISIONS = {"div", "true_divide", operator.truediv, torch.div, torch.true_divide, _aten.div.Tensor}


def install(*, any_temperature: bool = False) -> None:
    """Run the pass on all later compilations of this thread, after other passes at the same hook. Arguments are as in
    `absorb`.

    Examples:
        >>> import torch_specops.inductor
        >>> torch_specops.inductor.install()
        >>> torch_specops.inductor.uninstall()
    """
    config.pre_grad_custom_pass = AbsorbPass(_other_passes(), any_temperature, Counter())


def uninstall() -> None:
    """Remove the pass. Other passes at the same hook stay."""
    others = _other_passes()
    config.pre_grad_custom_pass = list(others) if len(others) > 1 else next(iter(others), None)


@contextlib.contextmanager
def absorb(*, any_temperature: bool = False) -> Iterator[Counter[str]]:
    """Run the pass on everything that is compiled inside the `with` block. A function is compiled when it is first
    called.

    Args:
        any_temperature: True = also absorb divisions by temperatures that are not powers of two. Rounding may then
            change a token.

    Yields:
        The number of absorbed operations of each kind: "cast", "copy", "division". Graphs that come from Inductor's
            cache are not counted (torch 2.13 and later).

    Examples:
        >>> import torch, torch_specops.inductor
        >>> def draw(logits, u):
        ...     return torch_specops.sample(logits.float() / 2, u)[0]
        >>> with torch_specops.inductor.absorb():  # doctest: +SKIP
        ...     torch.compile(draw)(torch.tensor([[1.0, 9.0]], dtype=torch.bfloat16), torch.tensor([0.5]))
        tensor([1])
    """
    absorbed: Counter[str] = Counter()
    with config.patch(pre_grad_custom_pass=AbsorbPass(_other_passes(), any_temperature, absorbed)):
        yield absorbed


def _other_passes() -> tuple[Any, ...]:
    """The passes at the hook, without this pass."""
    current = config.pre_grad_custom_pass
    passes = current if isinstance(current, (list, tuple)) else () if current is None else (current,)
    return tuple(other for each in passes for other in (each.others if isinstance(each, AbsorbPass) else (each,)))


class AbsorbPass(CustomGraphPass):  # type: ignore[misc]
    """Runs the other passes at the hook, and then absorbs operations. The hook runs before AOTAutograd's tracing, in
    which the ops are decomposed."""

    def __init__(self, others: tuple[Any, ...], any_temperature: bool, absorbed: Counter[str]) -> None:
        self.others = others
        self.any_temperature = any_temperature
        self.absorbed = absorbed

    def __call__(self, graph: Graph) -> None:
        for other in self.others:
            other(graph)
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _OPS:
                self.absorbed.update(_absorb_before(node, self.any_temperature))

    def uuid(self) -> Any:
        """The cache key of the pass. It is None, which disables Inductor's cache, if another pass has no key."""
        uuids = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.others]
        return (_DIGEST, self.any_temperature, *uuids) if all(uuids) else None


def _absorb_before(op: Node, any_temperature: bool) -> list[str]:
    """Replace the logits of the op by their values before the operations that it can do itself. Returns the kinds of
    these operations."""
    target: Any = op.target
    parameters = private.schema(getattr(target, "default", target)).arguments
    arguments = dict(zip((each.name for each in parameters), op.args, strict=False)) | op.kwargs
    logits = [name for name in arguments if name.endswith("logits") and arguments[name] is not None]
    steps = {name: _steps_before(op, arguments[name]) for name in logits}
    divisors = [next((node.args[1] for kind, node in each if kind == "division"), None) for each in steps.values()]
    divisor = divisors[0]
    is_exact = isinstance(divisor, (int, float)) and math.frexp(divisor)[0] == 0.5
    lse = arguments.get("draft_lse")
    lse_value = _value(lse)
    has_bounds = arguments.get("with_bounds", False) or (lse_value is not None and lse_value.dim() == 3)
    is_wanted = not has_bounds and (is_exact or (any_temperature and lse is None))
    if is_wanted and arguments.get("temperature") is None and all(_same_divisor(each, divisor) for each in divisors):
        if divisor != 1:
            like = next(arguments[name] for name in ("uniforms", "sample_uniforms", "positions") if name in arguments)
            arguments["temperature"] = _temperature(op, divisor, like)
    else:
        steps = {name: list(takewhile(lambda step: step[0] != "division", each)) for name, each in steps.items()}
    op.args, op.kwargs = (), arguments | {name: each[-1][1].args[0] for name, each in steps.items() if each}
    absorbed = [step for each in steps.values() for step in each]
    for _, node in dict.fromkeys(absorbed):
        if not node.users:
            op.graph.erase_node(node)
    return [kind for kind, _ in absorbed]


def _steps_before(op: Node, node: Node) -> list[tuple[str, Node]]:
    """The operations before the op that can be absorbed, as (kind, node), starting with the one next to the op. Only
    our ops read their results, and at most one is a division."""
    steps: list[tuple[str, Node]] = []
    while all(user.target in _OPS or (steps and user is steps[-1][1]) for user in node.users):
        kind = _kind(node)
        is_second_division = kind == "division" and kind in dict(steps)
        # The op will read the input later than the operation did, so nothing may write to the input in between.
        if kind is None or is_second_division or not all(_unchanged(each, node, op) for each in node.all_input_nodes):
            break
        steps.append((kind, node))
        node = node.all_input_nodes[0]
    return steps


def _kind(node: Node) -> str | None:
    before, after = _value(next(iter(node.args), None)), _value(node)
    if node.op not in ("call_method", "call_function") or before is None or after is None:
        return None
    if before.device != after.device or not _same(before.shape, after.shape):
        return None
    is_wider = before.dtype in (torch.bfloat16, torch.float16) and after.dtype == torch.float32
    is_float32 = before.dtype == after.dtype == torch.float32
    if node.target in _DIVISIONS and (is_wider or is_float32) and len(node.args) == 2 and not node.kwargs:
        return "division" if _is_shared(node.args[1], before) else None
    # Keep a copy of rows that are not contiguous, because the ops read some rows twice, and strided reads are slow.
    is_copy = before.dtype == after.dtype and statically_known_true(before.stride(-1) == 1)
    return None if node.target not in _COPIES else "cast" if is_wider else "copy" if is_copy else None


def _is_shared(divisor: Any, logits: Tensor) -> bool:
    """True if all rows of a sequence are divided by the same number. The inverse of a constant must not be
    subnormal."""
    if not isinstance(divisor, Node):
        return isinstance(divisor, (int, float)) and not isinstance(divisor, bool) and 2**-126 <= divisor <= 2**126
    value = _value(divisor)
    if value is None or value.dtype != torch.float32 or value.device != logits.device:
        return False
    return _same(value.shape, [1] * value.dim()) or _same(value.shape, [logits.shape[0], *[1] * (logits.dim() - 1)])


def _same_divisor(one: Any, other: Any) -> bool:
    """True if both are the same number, or the same view of the same memory."""
    a, b = _value(one), _value(other)
    if a is None or b is None:
        return one is not None and one == other
    views = [[each.storage_offset(), *each.shape, *each.stride()[:1]] for each in (a, b)]
    return _same(*views) and _memory(one) == _memory(other)


def _temperature(op: Node, divisor: Any, like: Any) -> Node:
    """Insert nodes before the op that compute a temperature tensor [B] or [N] float32 with the shape of `like`."""
    with op.graph.inserting_before(op):
        if isinstance(divisor, Node):
            return op.graph.call_method("expand_as", (op.graph.call_method("reshape", (divisor, -1)), like))
        return op.graph.call_function(torch.full_like, (like, divisor), {"dtype": torch.float32})


def _unchanged(source: Node, start: Node, end: Node) -> bool:
    """True if no node between `start` and `end` can write to the memory of `source`."""
    node, memory = start.next, _memory(source)
    while node is not end:
        if _may_write(node) and any(_memory(each) is None or _memory(each) & memory for each in node.all_input_nodes):
            return False
        node = node.next
    return True


def _may_write(node: Node) -> bool:
    """True if a call may write to its arguments, judged by its name, schema and arguments. True if this cannot be
    told."""
    target: Any = node.target
    if isinstance(target, type(_aten.clone.default)):
        return private.schema(target).is_mutable
    if isinstance(target, type(_aten.clone)):
        return any(private.schema(getattr(target, overload)).is_mutable for overload in target.overloads())
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.endswith("_") or name == "setitem" or (name[:1] == "i" and hasattr(operator, name)):
        return True
    # An argument with the value True may be `inplace`.
    if "out" in node.kwargs or any(each is True for each in (*node.args, *node.kwargs.values())):
        return True
    is_torch = isinstance(target, types.FunctionType) and target.__module__.startswith("torch.")
    return not (node.op == "call_method" or is_torch or isinstance(target, types.BuiltinFunctionType))


def _value(node: Any) -> Tensor | None:
    fake = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
    return fake if isinstance(fake, Tensor) and fake.layout == torch.strided else None


def _memory(node: Node) -> Any:
    """Ids of the storages of a node's tensors; None if they are not known."""
    fake = node.meta.get("example_value", node.meta.get("val"))
    tensors = [each for each in private.tree_leaves(fake) if isinstance(each, Tensor)]
    if fake is None or any(each.layout != torch.strided for each in tensors):
        return None
    return {private.storage_of(each) for each in tensors}


def _same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))
