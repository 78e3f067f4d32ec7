"""A second set of modules over a model's weights, so that the loop can prepare a model without changing it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from enum import Enum
from functools import WRAPPER_ASSIGNMENTS, partial
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ShadowModel"]

# Most attributes are of these types, and refer to nothing that has a copy. They are skipped at once, because every call
# of a decoder brings its copy up to date.
PLAIN = {type(None), bool, int, float, str, set, dict, OrderedDict}
CONTAINERS = (list, tuple, dict, set, frozenset)
# They call no module. Neither do objects of torch, such as tensors and autocast.
INERT = (type(None), Number, str, bytes, Enum, type, ModuleType, BuiltinFunctionType, PreTrainedConfig)


class NotSeenThroughError(Exception):
    """A function may call modules in a way that cannot be changed."""


class ShadowModel:
    """Copies a model's modules and configs; parameters and hooks stay the same objects.

    The copy is in evaluation mode, and so is every module that a `forward` set on a module calls: methods,
    `functools.partial`, closures, default arguments and objects made with `functools.wraps` are followed, one around
    another. A different attention function or fewer layers can be set in the copy, and everybody else who uses the
    model, in another thread too, sees nothing of that.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        # What is made belongs to one call of `of`, and only a finished call replaces what there was: an interrupted one
        # leaves the copy behind, which the next call brings up to date.
        self._configs: dict[int, Any] = {}
        self._new_configs: dict[int, Any] = {}
        # Module -> the attributes of its copy.
        self._attributes: dict[nn.Module, dict[str, Any]] = {}
        # Modules with a forward that was not copied.
        self._not_seen_through: list[str] = []
        # Parts -> the callable that was made of them, in this call of `of` and the one before. Compiled code looks at
        # the identity of a function. Older ones are forgotten: some trainers wrap a model anew in every step.
        self._made: dict[Hashable, Any] = {}
        self._made_before: dict[Hashable, Any] = {}
        # The callables that are being followed.
        self._inside: list[Any] = []

    def __reduce__(self) -> tuple[type[ShadowModel], tuple[()]]:
        # Weak references cannot be pickled, and the next call of `of` makes the copies anew.
        return ShadowModel, ()

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copies of the configs that the modules have."""
        return [value for value in self._configs.values() if isinstance(value, PreTrainedConfig)]

    def of(self, model: PreTrainedModel, own_layers: bool = False) -> PreTrainedModel:
        """The copy of `model`: the same object in every call, brought up to date with what has changed in the model
        (its device, a module that was exchanged, an active LoRA adapter). Configs are copied once.

        The copy changes once all of it is made. After an interrupt it must be asked for again.

        Args:
            model: the model.
            own_layers: True = a forward that may run the model's layers in place of the copy's is an error.

        Raises:
            ValueError: a module has a `forward` of its own that may run modules in training mode.
        """
        self._attributes, self._not_seen_through, self._inside, self._made = {}, [], [], {}
        self._new_configs = dict(self._configs)
        copied = self._copy_of(model)
        assert isinstance(copied, PreTrainedModel)
        if self._not_seen_through:
            names = ", ".join(sorted(set(self._not_seen_through)))
            found = f"model: {names} has a forward of its own that may run the model's own layers"
            if any(module.training for module in model.modules()):
                raise ValueError(f"{found}, in training mode and with dropout; call model.eval() first")
            if own_layers:
                raise ValueError(f"{found}, and this draft reads fewer layers or their features; remove that forward")
        for module, attributes in self._attributes.items():
            object.__setattr__(self._copies[module], "__dict__", attributes)
        self._configs, self._made_before, self._attributes = self._new_configs, self._made, {}
        return copied

    def _copy_of(self, module: nn.Module) -> nn.Module:
        clone = self._copies.get(module)
        if clone is None:
            clone = self._copies[module] = type(module).__new__(type(module))
        if module in self._attributes:
            return clone
        attributes = self._attributes[module] = dict(vars(module))
        attributes["training"] = False
        # Some rotary embeddings register a new buffer in a forward, and longrope writes to its own (transformers 5.23).
        writes = "longrope" in str(attributes.get("rope_type"))
        attributes["_buffers"] = copy.deepcopy(module._buffers) if writes else dict(module._buffers)
        attributes["_modules"] = {
            name: child if child is None else self._copy_of(child) for name, child in module._modules.items()
        }
        for name, value in vars(module).items():
            if type(value) in PLAIN:
                continue
            if isinstance(value, PreTrainedConfig):
                # One memory for all: configs that are one object, or one inside another, are so in the copy.
                attributes[name] = copy.deepcopy(value, self._new_configs)
            elif name == "forward" or isinstance(value, (MethodType, partial, FunctionType, nn.Module)):
                try:
                    attributes[name] = self._rebound(value, module)
                except NotSeenThroughError:
                    # Such as accelerate's `_old_forward`.
                    if name.endswith("forward"):
                        self._not_seen_through.append(type(module).__name__)
        return clone

    def _rebound(self, value: Any, owner: nn.Module) -> Any:
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
        if kind is FunctionType:
            # Unwrap the result of `torch.compile`: the loop compiles its own steps.
            compiled = getattr(value, "_torchdynamo_orig_callable", None)
            if compiled is not None and not getattr(value, "_torchdynamo_disable", False):
                return self._rebound(compiled, owner)
            if any(vars(each).get(value.__name__) is value for each in type(owner).__mro__):
                return value
        if any(value is each for each in self._inside):
            raise NotSeenThroughError
        self._inside.append(value)
        try:
            if kind is MethodType and isinstance(value.__self__, nn.Module):
                owner = value.__self__
            for each in _globals(value) if kind is FunctionType else ():
                if not any(each is one for one in self._inside) and self._rebound(each, owner) is not each:
                    raise NotSeenThroughError
            old, make, key = _parts(value)
            new = tuple(self._rebound(part, owner) for part in old)
        finally:
            self._inside.pop()
        if all(part is before for part, before in zip(new, old, strict=True)):
            return value
        if make is None:
            raise NotSeenThroughError
        whole = (kind, *key, *map(id, new))
        if whole not in self._made:
            before = self._made_before
            self._made[whole] = before[whole] if whole in before else make(*new)
        return self._made[whole]


def _parts(value: Any) -> tuple[tuple[Any, ...], Callable[..., Any] | None, tuple[Hashable, ...]]:
    """The parts of a callable or a container, the function that makes the same of other parts, and the rest of what
    determines the result. The function is None for a container, because others may change it later.

    Raises:
        NotSeenThroughError: an object of another kind.
    """
    kind = type(value)
    if kind is MethodType:
        return (value.__func__, value.__self__), MethodType, ()
    if kind is FunctionType:
        return _parts_of_function(value)
    if kind is partial:
        names, first = tuple(value.keywords), len(value.args)

        def make_partial(function: Any, *parts: Any) -> partial[Any]:
            return partial(function, *parts[:first], **dict(zip(names, parts[first:], strict=True)))

        return (value.func, *value.args, *value.keywords.values()), make_partial, names
    if issubclass(kind, CONTAINERS):
        return (*value, *value.values()) if isinstance(value, dict) else tuple(value), None, ()
    if "__wrapped__" in getattr(value, "__dict__", ()):
        attributes = {name: part for name, part in vars(value).items() if name not in WRAPPER_ASSIGNMENTS}

        def make_wrapper(*parts: Any) -> Any:
            made = object.__new__(kind)
            vars(made).update(vars(value) | dict(zip(attributes, parts, strict=True)))
            return made

        return tuple(attributes.values()), make_wrapper, tuple(attributes)
    raise NotSeenThroughError


def _parts_of_function(function: FunctionType) -> tuple[tuple[Any, ...], Callable[..., Any], tuple[Hashable, ...]]:
    cells = function.__closure__ or ()
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}

    def make(*parts: Any) -> FunctionType:
        # Others may write to the cells that stay.
        inside = tuple(
            cell if part is _content(cell) else CellType(part) for cell, part in zip(cells, parts, strict=False)
        )
        given, rest = parts[len(cells) :][: len(defaults)], parts[len(cells) + len(defaults) :]
        made = FunctionType(function.__code__, function.__globals__, function.__name__, given, inside)
        made.__kwdefaults__ = dict(zip(named, rest, strict=True))
        return made

    return (*map(_content, cells), *defaults, *named.values()), make, (id(function.__code__), *map(id, cells))


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
