"""Functions that call a model's modules, made to call the copies of these modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import WRAPPER_ASSIGNMENTS, partial
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

__all__ = ["NotSeenThroughError", "Rebinding"]

CONTAINERS = (list, tuple, dict, set, frozenset)
# They call no module. Neither do objects of torch, such as tensors and autocast.
INERT = (type(None), Number, str, bytes, Enum, type, ModuleType, BuiltinFunctionType, PreTrainedConfig)


class NotSeenThroughError(Exception):
    """A function may call modules in a way that cannot be changed."""


class Rebinding:
    """Follows methods, `functools.partial`, closures, default arguments and objects made with `functools.wraps`, one
    around another: what libraries put around the `forward` of a module.

    Args:
        copy_of: module -> its copy.
    """

    def __init__(self, copy_of: Callable[[nn.Module], nn.Module]) -> None:
        self._copy_of = copy_of
        # Parts -> what was made of them, for this copy and the one before. Compiled code looks at the identity of a
        # function.
        self._made: dict[tuple[Any, ...], Any] = {}
        self._made_before: dict[tuple[Any, ...], Any] = {}
        self._inside: list[FunctionType] = []

    def begin(self) -> None:
        """Begin a copy of the whole model, and forget what the last one did not use: some trainers wrap a model anew in
        every step."""
        self._made_before, self._made = self._made, {}

    def of(self, value: Any, owner: nn.Module) -> Any:
        """`value`, which a module `owner` refers to, with copies in place of modules; itself if it refers to none.

        Raises:
            NotSeenThroughError: it may refer to modules in another way.
        """
        # Not isinstance, which believes a proxy.
        kind = type(value)
        if issubclass(kind, nn.Module):
            return self._copy_of(value)
        if issubclass(kind, INERT) or kind.__module__.split(".")[0] == "torch":
            return value
        if kind is MethodType:
            bound_to = value.__self__
            new = self.of(value.__func__, bound_to if isinstance(bound_to, nn.Module) else owner)
            old: tuple[Any, ...] = value.__func__, bound_to
            return self._make(MethodType, old, (new, self.of(bound_to, owner)), value)
        if kind is partial:
            return self._of_partial(value, owner)
        if kind is FunctionType:
            return self._of_function(value, owner)
        if issubclass(kind, CONTAINERS):
            old = (*value, *value.values()) if isinstance(value, dict) else tuple(value)
            if all(new is part for new, part in zip(self._all(old, owner), old, strict=True)):
                return value
        elif "__wrapped__" in getattr(value, "__dict__", ()):
            return self._of_wrapper(value, owner)
        raise NotSeenThroughError

    def _all(self, values: Iterable[Any], owner: nn.Module) -> tuple[Any, ...]:
        return tuple(self.of(value, owner) for value in values)

    def _make(
        self, make: Callable[..., Any], old: tuple[Any, ...], new: tuple[Any, ...], value: Any, *key: object
    ) -> Any:
        """The result of `make` for the new parts; `value` if they are the old ones."""
        if all(part is before for part, before in zip(new, old, strict=True)):
            return value
        whole = (type(value), *key, *map(id, new))
        if whole not in self._made:
            before = self._made_before
            self._made[whole] = before[whole] if whole in before else make(*new)
        return self._made[whole]

    def _of_partial(self, value: partial[Any], owner: nn.Module) -> Any:
        names, first = tuple(value.keywords), 1 + len(value.args)

        def make(*parts: Any) -> partial[Any]:
            return partial(parts[0], *parts[1:first], **dict(zip(names, parts[first:], strict=True)))

        old = value.func, *value.args, *value.keywords.values()
        return self._make(make, old, self._all(old, owner), value, names)

    def _of_wrapper(self, value: Any, owner: nn.Module) -> Any:
        attributes = {name: part for name, part in vars(value).items() if name not in WRAPPER_ASSIGNMENTS}

        def make(*parts: Any) -> Any:
            made = object.__new__(type(value))
            vars(made).update(vars(value) | dict(zip(attributes, parts, strict=True)))
            return made

        old = tuple(attributes.values())
        return self._make(make, old, self._all(old, owner), value, tuple(attributes))

    def _of_function(self, function: FunctionType, owner: nn.Module) -> Any:
        # Unwrap the result of `torch.compile`: the loop compiles its own steps.
        compiled = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled is not None and not getattr(function, "_torchdynamo_disable", False):
            return self.of(compiled, owner)
        if any(vars(kind).get(function.__name__) is function for kind in type(owner).__mro__):
            return function
        if function in self._inside:
            raise NotSeenThroughError
        self._inside.append(function)
        try:
            return self._of_closure(function, owner)
        finally:
            self._inside.pop()

    def _of_closure(self, function: FunctionType, owner: nn.Module) -> Any:
        for value in _globals(function):
            if value not in self._inside and self.of(value, owner) is not value:
                raise NotSeenThroughError
        cells = function.__closure__ or ()
        defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
        old = (*map(_content, cells), *defaults, *named.values())

        def make(*parts: Any) -> FunctionType:
            inside = [
                # Others may write to the cells that stay.
                cell if part is _content(cell) else CellType(part)
                for cell, part in zip(cells, parts, strict=False)
            ]
            given, rest = parts[len(cells) :][: len(defaults)], parts[len(cells) + len(defaults) :]
            made = FunctionType(function.__code__, function.__globals__, function.__name__, given, tuple(inside))
            made.__kwdefaults__ = dict(zip(named, rest, strict=True))
            return made

        return self._make(make, old, self._all(old, owner), function, id(function.__code__), *map(id, cells))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    # Empty.
    except ValueError:
        return None


def _globals(function: FunctionType) -> Iterator[Any]:
    """The globals that a function names and that may call modules: of functions those of the same file."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType):
                if value.__globals__ is function.__globals__:
                    yield value
            elif isinstance(value, (nn.Module, MethodType, partial, *CONTAINERS)):
                yield value
