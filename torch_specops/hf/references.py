"""The references that a Python value holds, and functions that rebuild the value with other references."""

from __future__ import annotations

import gc
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from enum import Enum
from functools import WRAPPER_ASSIGNMENTS, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device}
# Containers that other code may change between two looks.
MUTABLE = (list, set, dict, OrderedDict)
INERT = (complex, bytes, Enum, type, ModuleType, BuiltinFunctionType, PreTrainedConfig, GenerationConfig)
# Packages whose classes and functions store no intermediate results of a forward.
KNOWN = {"torch", "torchao", "torch_specops", "transformers", "peft"}
# The objects that a value refers to, a function that rebuilds the value from other such objects, and a key for
# everything else that determines the rebuilt value.
Parts = tuple[Sequence[Any], Callable[..., Any], tuple[Hashable, ...]]


def is_foreign(value: Any) -> bool:
    """True if a class or a function is defined outside the packages in `KNOWN`."""
    return package(value) not in KNOWN


def package(value: Any) -> str:
    """The top-level package that defines a class, a function or the class of another object."""
    return str(getattr(value, "__module__", None)).partition(".")[0]


def calls_nothing(kind: type) -> bool:
    """True if objects of this class call no module. This includes all classes of torch, such as tensors and
    autocast."""
    return kind in PLAIN or issubclass(kind, INERT) or package(kind) == "torch"


def parts_of(value: Any) -> Parts | None:
    """The parts of a value and the function that rebuilds it. None = this kind of value cannot be rebuilt."""
    kind: Any = type(value)
    if kind is MethodType:
        return (value.__func__, value.__self__), MethodType, ()
    if kind is ReferenceType:
        return (value(),), ref, ()
    if kind is partial:
        old = (value.func, value.args, *value.keywords.values(), *vars(value).values())
        return old, partial(_make_partial, value), (*value.keywords, *vars(value))
    if kind is FunctionType:
        cells, names = value.__closure__ or (), value.__kwdefaults__ or {}
        old = (*map(_content, cells), value.__defaults__, *names.values(), *vars(value).values())
        return old, partial(_make_function, value), (id(value.__code__), *map(id, cells), *names, *vars(value))
    if kind in (dict, OrderedDict):
        return (*value, *value.values()), lambda *new: kind(zip(new, new[len(value) :], strict=False)), ()
    if kind is tuple or kind in MUTABLE:
        return tuple(value), lambda *new: kind(new), ()
    if "__wrapped__" in getattr(value, "__dict__", ()) and kind.__new__ is object.__new__:
        attributes = {name: part for name, part in vars(value).items() if name not in WRAPPER_ASSIGNMENTS}
        return tuple(attributes.values()), partial(_make_wrapper, value, tuple(attributes)), tuple(attributes)
    return None


def _make_partial(old: partial[Any], function: Any, args: tuple[Any, ...], *named: Any) -> partial[Any]:
    made = partial(function, *args, **dict(zip(old.keywords, named, strict=False)))
    vars(made).update(zip(vars(old), named[len(old.keywords) :], strict=True))
    return made


def _make_function(old: FunctionType, *parts: Any) -> FunctionType:
    cells, names = old.__closure__ or (), old.__kwdefaults__ or {}
    # If the content of a closure cell does not change, reuse the cell, because other functions may share it and write
    # to it later.
    inside = tuple(cell if part is _content(cell) else CellType(part) for cell, part in zip(cells, parts, strict=False))
    defaults, *named = parts[len(cells) :]
    made = FunctionType(old.__code__, old.__globals__, old.__name__, defaults, inside)
    made.__kwdefaults__ = dict(zip(names, named, strict=False))
    vars(made).update(zip(vars(old), named[len(names) :], strict=True))
    return made


def _make_wrapper(old: Any, names: Sequence[str], *parts: Any) -> Any:
    made = object.__new__(type(old))
    vars(made).update(vars(old) | dict(zip(names, parts, strict=True)))
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    # The cell is empty.
    except ValueError:
        return None


def globals_of(function: FunctionType) -> Iterator[Any]:
    """The global variables that a function uses and that may call modules. Global functions count only if they are
    defined in the same file."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType):
                if value.__globals__ is function.__globals__:
                    yield value
            elif isinstance(value, (nn.Module, MethodType, partial, tuple, *MUTABLE)):
                yield value


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def reaches_module(value: Any, module: nn.Module | None = None) -> bool:
    """True if a chain of references leads from a value to a module: to any, also by weak references, or to `module` by
    references that keep it alive."""
    visited: dict[int, Any] = {}
    to_visit = [value]
    while to_visit:
        each = to_visit.pop()
        is_module, is_weak = isinstance(each, nn.Module), isinstance(each, ReferenceType)
        if is_module and module in (None, each):
            return True
        is_end = not is_module if calls_nothing(type(each)) else is_weak and module is not None
        if id(each) in visited or is_end:
            continue
        visited[id(each)] = each
        parts = parts_of(each)
        to_visit += gc.get_referents(each) if parts is None else parts[0]
        if type(each) is FunctionType:
            to_visit += globals_of(each)
        # `gc` does not list weak references, such as the object of a `WeakMethod`.
        if is_weak:
            to_visit.append(each())
    return False
